"""Apply hypothetical bugs to a training step's definition.

A bug replaces a quantity by a formula, or by values from other rows, tokens or images. For example, each row may take
the value that belongs to "the next row in its group". A formula may also be limited to a part, such as "the first
turn".
"""

from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from torch.nn.functional import pad

from minivlmrl.extras.parity.names import SCOPES


class FormulaError(Exception):
    """A formula in names.py is invalid; the audited step is not at fault."""


class Values:
    """The values that a formula may use, as attributes.

    A name is searched among the values at the formula's place, then in an object with more quantities,
    then among the step's tensors and attributes.
    """

    def __init__(self, step, place=None, **values):
        self.__dict__.update(values)
        self.step = step
        self._place = place

    def __getattr__(self, name: str):
        if hasattr(self._place, name):
            return getattr(self._place, name)
        return self.step[name] if name in self.step else getattr(self.step, name)


def formula(function: Callable, step, place=None, **values):
    """Call a formula from names.py with the values at its place, see Values.

    Raises:
        RuntimeError, ValueError: the step's sizes or options do not fit the formula.
        FormulaError: the formula itself is invalid.
    """
    try:
        return function(Values(step, place, **values))
    except (RuntimeError, ValueError):
        raise  # the step's sizes or options do not fit, so the formula is not at fault
    except Exception as error:
        code = function.__code__
        raise FormulaError(
            f"{Path(code.co_filename).name}:{code.co_firstlineno}: the formula is invalid: "
            f"{type(error).__name__}: {error}"
        ) from error


class Change(dict):
    """A deviation from the step's definition: {quantity: its replacement}."""

    def __init__(self, d, values: dict):
        super().__init__(values)
        self.d = d

    def __call__(self, name: str, x, place=None, **values):
        """Return the quantity x, or its replacement if this deviation has one under `name`.

        A replacement is one of:
            - a value;
            - a formula, which can use x, the fitted number c, and everything that Values describes;
            - (kind, part, None), which reorders x by an order in the Dump;
            - (kind, part, formula), whose formula can also use `region`: a mask or, for a model, a function that tests
              a parameter's name.
        """
        if name not in self:
            return x
        deviation = self[name]
        if isinstance(deviation, tuple):
            kind, part, deviation = deviation
            region = getattr(self.d, kind)[part]
            if deviation is None:
                return pad(x.flatten(), (0, 1))[region] if kind == "columns" else x[region]
            values["region"] = region
        if not callable(deviation):
            return deviation
        return formula(deviation, self.d, place, x=x, c=self.get("c", 1.0), **values)

    def inside(self, use: str) -> "Change":
        """Return the deviation for one use of a quantity, such as "the baseline".

        The result is empty if this deviation is limited to another use, see SCOPES.
        """
        other_uses = {*self.get("inside", ())} - {use}
        for _, uses, _ in SCOPES:
            if use in uses and not other_uses.isdisjoint(uses):
                return Change(self.d, {})
        return self


def edited(step, x: list, flags: list, region: list, change: Callable) -> tuple[list, list]:
    """Apply a formula to parts in a list, and return the new items and their flags.

    The list is split into runs in which `flags` and `region` are constant. The formula replaces each run inside the
    region, and all new items get the run's flag.
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
