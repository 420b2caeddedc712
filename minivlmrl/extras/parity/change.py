"""Apply hypothetical bugs to the definition of a training step.

A bug replaces a quantity by a formula, or by values from other rows, tokens or images. For example, each row may take
the value that belongs to "the next row in its group". A formula may also be limited to a part, such as "the first
turn".
"""

from collections.abc import Callable
from itertools import groupby

from torch.nn.functional import pad

from minivlmrl.extras.parity.names import SCOPES


class Values:
    """The values that a formula may use: given values, then the attributes of `place`, then the values of the step."""

    def __init__(self, step, place=None, **values):
        self.__dict__.update(values)
        self.step = step
        self._place = place

    def __getattr__(self, name: str):
        if hasattr(self._place, name):
            return getattr(self._place, name)
        return self.step[name] if name in self.step else getattr(self.step, name)


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
        return deviation(Values(self.d, place, x=x, c=self.get("c", 1.0), **values))

    def inside(self, use: str) -> "Change":
        """Return the deviation for one use, such as "the baseline", or an empty one if it is limited to another use."""
        other_uses = {*self.get("inside", ())} - {use}
        for _, uses, _ in SCOPES:
            if use in uses and not other_uses.isdisjoint(uses):
                return Change(self.d, {})
        return self


def edited(step, x: list, flags: list, region: list, change: Callable) -> tuple[list, list]:
    """Apply a formula to each run of items in the region that have equal flags; return items and flags."""
    new_items, new_flags = [], []
    triples = zip(flags, region, x, strict=True)
    for (flag, inside), run in groupby(triples, key=lambda triple: triple[:2]):
        items = [item for _, _, item in run]
        if inside:
            items = change(Values(step, x=items))
        new_items += items
        new_flags += [flag] * len(items)
    return new_items, new_flags


def composed(first: dict, then: dict) -> dict | None:
    """Combine two deviations, the second one after the first; None if both replace a quantity by a value."""
    if not first or not then:
        return first or then
    if "inside" in first or "inside" in then:
        return None
    result = numbered(first)
    for name, x in numbered(then).items():
        if callable(x) and callable(result.get(name)):
            x = chained(result[name], x)
        elif name in result:
            return None
        result[name] = x
    return result


def numbered(change: dict) -> dict:
    """Return a deviation whose formulas contain their fitted number."""
    if "c" not in change:
        return dict(change)
    return {name: with_c(x, change["c"]) for name, x in change.items() if name != "c"}


def with_c(formula, c: float):
    def changed(s):
        s.c = c
        return formula(s)

    return changed if callable(formula) else formula


def chained(first: Callable, then: Callable) -> Callable:
    def changed(s):
        s.x = first(s)
        return then(s)

    return changed
