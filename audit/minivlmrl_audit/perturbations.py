"""Apply hypothetical bugs to the definition of a training step.

A bug replaces a quantity of the definition by a formula, or by the values of other rows, tokens or images. For example,
each row may take the value of "the next row in its group". With tool calls, a formula may apply to only some tokens,
such as "the first turn".
"""

from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from minivlmrl_audit.known_bugs import SCOPES
from minivlmrl_audit.units import PICTURES


class FormulaError(Exception):
    """A formula of known_bugs.py is invalid; the audited step is not at fault."""


class Values:
    """The values that a formula may use, as attributes.

    These are the values of the place where the formula is used, then those of an object with more quantities of the
    place, then the tensors and the attributes of the step.
    """

    def __init__(self, step, quantities=None, **values):
        self.__dict__.update(values)
        self.step = step
        self._quantities = quantities

    def __getattr__(self, name: str):
        if hasattr(self._quantities, name):
            return getattr(self._quantities, name)
        return self.step[name] if name in self.step else getattr(self.step, name)


def formula(function: Callable, step, quantities=None, **values):
    """Call a formula of known_bugs.py with the values of its place, see Values.

    Raises:
        RuntimeError, ValueError: the sizes or options of the step do not fit the formula. FormulaError: the formula
        itself is invalid.
    """
    try:
        return function(Values(step, quantities, **values))
    except (RuntimeError, ValueError):
        raise  # the sizes or options of the step do not fit, so the formula is not at fault
    except Exception as error:
        code = function.__code__
        raise FormulaError(
            f"{Path(code.co_filename).name}:{code.co_firstlineno}: the formula is invalid: "
            f"{type(error).__name__}: {error}"
        ) from error


class Change(dict):
    """A deviation from the definition of the step `d`: {name of a quantity: its replacement}."""

    def __init__(self, d, values: dict):
        super().__init__(values)
        self.d = d

    def __call__(self, name: str, x, selection=(), quantities=None, **values):
        """Return the quantity x, or its replacement if this deviation has one under `name`.

        A replacement is one of:
            - a value;
            - a formula, which can use x, the fitted number c, and the values that Values describes;
            - (kind, unit, None), which reorders x by one of the orders in the Dump;
            - (kind, unit, formula), whose formula can also use `region`. For tokens and images, `region` is a mask of
              the unit. It has the shape of x, because it is indexed by `selection` as x was. For a part of the model,
              `region` is a function that tests the name of a parameter.
        """
        if name not in self:
            return x
        deviation = self[name]
        if isinstance(deviation, tuple):
            kind, unit, deviation = deviation
            region = getattr(self.d, kind)[unit]
            if deviation is None:
                return pad(x.flatten(), (0, 1))[region] if kind == "columns" else x[region]
            if kind == "pictures":
                region = region(values["number"], values["num_pictures"], values["num_given"])
            values["region"] = region[selection] if selection else region
        if not callable(deviation):
            return deviation
        return formula(deviation, self.d, quantities, x=x, c=self.get("c", 1.0), **values)

    def inside(self, use: str) -> "Change":
        """Return the deviation for one use of a quantity, such as "the baseline".

        The result is empty if this deviation is limited to another use of the same quantity. The uses of each quantity
        are listed in SCOPES of known_bugs.py.
        """
        other_uses = {*self.get("inside", ())} - {use}
        for _, uses, _ in SCOPES:
            if use in uses and not other_uses.isdisjoint(uses):
                return Change(self.d, {})
        return self

    def picture_rows(self) -> Tensor:
        """Return the index (n,) of the row from which each row takes its images."""
        kind, unit, _ = self.get("pictures", ("", "", None))
        return self.d.rows[unit] if kind == "rows" else self.d.all_rows

    def shown_as(self, pictures: list, num_given: int) -> list:
        """Return a row's images with this deviation applied. The first `num_given` are in the prompt."""
        kind, unit, change = self.get("pictures", ("", "", None))
        if kind != "pictures":
            return pictures
        count = len(pictures)
        region = PICTURES[unit](torch.arange(count), count, num_given)
        return edited(self.d, pictures, [0] * count, region.tolist(), change)[0]


def edited(step, x: list, flags: list, region: list, change: Callable) -> tuple[list, list]:
    """Apply a formula to parts of a list, and return the new items and their flags.

    The list x is split into runs of consecutive items with equal `flags` and equal `region` values. The formula
    replaces each run inside the region, and all new items get the flag of their run.
    """
    new_items, new_flags = [], []
    triples = zip(flags, region, x, strict=True)
    for (flag, inside), run in groupby(triples, key=lambda triple: triple[:2]):
        items = [item for _, _, item in run]
        if inside:
            items = formula(change, step, x=items)
        new_items += items
        new_flags += [flag] * len(items)
    return new_items, new_flags
