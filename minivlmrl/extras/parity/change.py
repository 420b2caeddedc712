"""Apply hypothetical bugs to the definition of a training step.

A bug replaces a quantity by a formula, or by values from other rows, tokens or images. For example, each row may take
the advantage of the next row in its group. A bug may also affect only a part of the step, such as the first turn of a
conversation.
"""

from collections.abc import Callable
from itertools import groupby

from torch.nn.functional import pad

from minivlmrl.extras.parity.names import SCOPES


class Values:
    """The argument of a bug's formula, whose attributes include the tensors and options of the recorded step."""

    def __init__(self, step, place=None, **values):
        self.__dict__.update(values)
        self.step = step
        self._place = place

    def __getattr__(self, name: str):
        if hasattr(self._place, name):
            return getattr(self._place, name)
        return self.step[name] if name in self.step else getattr(self.step, name)


class Change(dict):
    """A hypothetical bug in a training step: {name of a quantity: what replaces this quantity}."""

    def __init__(self, d, values: dict):
        super().__init__(values)
        self.d = d

    def __call__(self, name: str, x, place=None, **values):
        """Return the quantity x, or its replacement if the hypothetical bug changes the quantity `name`.

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
        """Return the part of the bug that affects one use of a quantity, such as "the baseline"."""
        other_uses = {*self.get("inside", ())} - {use}
        for _, uses, _ in SCOPES:
            if use in uses and not other_uses.isdisjoint(uses):
                return Change(self.d, {})
        return self


def edited(step, x: list, flags: list, region: list, change: Callable) -> tuple[list, list]:
    """Apply a bug's formula to runs of sampled tokens or of tool tokens, for example to the first turn."""
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
    """Combine two hypothetical bugs, the second applied after the first; return None if this is impossible."""
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
    """Set the constant c in a bug's formulas, as in "the ratio is at most c", to the fitted number."""
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
