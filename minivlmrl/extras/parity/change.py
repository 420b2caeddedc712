"""Simulate a known bug while a training step is recomputed."""

from collections.abc import Callable
from typing import Any

from torch.nn.functional import pad

from minivlmrl.extras.parity.names import SCOPES


class Values:
    """Argument `s` of functions that simulate a bug: `lambda s: s.x / 2` halves the correct value s.x.

    Attributes, such as s.beta, are searched in order: keyword arguments, loss tensors, loss options, recorded step.
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
    """Simulated bug as {wrong tensor or option: replacement}; {"rewards": lambda s: s.x / 2} halves the rewards."""

    def __init__(self, d, values: dict):
        super().__init__(values)
        self.d = d

    def __call__(self, name: str, x: Any, place=None, **values) -> Any:
        """Return what a trainer with this bug uses instead of `x`, the correct tensor or option called `name`.

        self[name] may be, for example:
            0.0: always 0
            lambda s: s.x / 2: half the correct value
            ("rows", "the next row in its group", None): value of the next row ("columns": of another token)
            ("regions", "the prompt", function): function that reads a mask of prompt tokens as s.region
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
        """Return the bug to simulate in one loss part, such as "the KL": empty if only other parts are wrong."""
        other_uses = {*self.get("inside", ())} - {use}
        for _, uses, _ in SCOPES:
            if use in uses and not other_uses.isdisjoint(uses):
                return Change(self.d, {})
        return self


def composed(first: Any, then: Any) -> Any:
    """Merge two simulated bugs; return None if they conflict, as beta=0 and beta=1 do."""
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
    """Replace "{c}" in a simulated bug by a number, such as a clip bound; functions read the number as s.c."""
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
