"""Recompute a training step as if the trainer had a known bug."""

from collections.abc import Callable
from typing import Any

from torch.nn.functional import pad

from minivlmrl.extras.parity.names import SCOPES


class Values:
    """Argument `s` of bug formulas. For example, `lambda s: s.x / 2` halves the correct value s.x.

    Attributes are looked up in `values`, `place`, `place.options` and `step`, in this order.
    """

    def __init__(self, step, place=None, **values):
        self.__dict__.update(values)
        self.step = step
        self._place = place

    def __getattr__(self, name: str) -> Any:
        for owner in (self._place, getattr(self._place, "options", None)):
            if hasattr(owner, name):
                return getattr(owner, name)
        return self.step[name] if name in self.step else getattr(self.step, name)


class Change(dict):
    """Simulated bug, such as {"rewards": lambda s: s.x / 2}, which halves the rewards."""

    def __init__(self, d, values: dict):
        super().__init__(values)
        self.d = d

    def __call__(self, name: str, x: Any, place=None, **values) -> Any:
        """Apply the bug to a quantity, such as "rewards"; `x` is the correct value.

        Replacements:
            - a value;
            - a formula, such as `lambda s: s.x / 2`;
            - (kind, part, None): use values of other rows or tokens, such as "the next row in its group";
            - (kind, part, formula): change only `s.region`, a mask.
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
        return deviation(Values(self.d, place, x=x, **values)) if callable(deviation) else deviation

    def inside(self, use: str) -> "Change":
        """Return self if the bug applies in a computation such as "the KL", else an empty Change."""
        other_uses = {*self.get("inside", ())} - {use}
        for _, uses, _ in SCOPES:
            if use in uses and not other_uses.isdisjoint(uses):
                return Change(self.d, {})
        return self


def composed(first: Any, then: Any) -> Any:
    """Combine two bugs into one; return None if they conflict, as two fixed values for beta do."""
    if not first or not then:
        return first or then
    if "inside" in first or "inside" in then:
        return None
    result = dict(first)
    for name, x in then.items():
        if callable(x) and callable(result.get(name)):
            x = chained(result[name], x)
        elif name in result:
            return None
        result[name] = x
    return result


def with_number(replacement: Any, c: float) -> Any:
    """Use a fitted number c, such as a clip bound, for the value "{c}", or as s.c in a formula."""
    if not callable(replacement):
        return c if replacement == "{c}" else replacement

    def changed(s):
        s.c = c
        return replacement(s)

    return changed


def chained(first: Callable, then: Callable) -> Callable:
    def changed(s):
        s.x = first(s)
        return then(s)

    return changed
