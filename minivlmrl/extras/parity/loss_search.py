"""Name the mistakes and designs in a loss function that `minivlmrl.extras.parity.loss.check` rejects."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, reduce
from itertools import permutations, product

import torch
from torch import Tensor

from minivlmrl.extras.parity import names as table
from minivlmrl.extras.parity.audit import FACTOR, Cause, computed, count_wrong, possible_causes, where
from minivlmrl.extras.parity.formulas import distance
from minivlmrl.extras.parity.step import Dump, SearchEndedError
from minivlmrl.extras.parity.step_format import options_of

SECONDS = 5.0  # time after which a search ends
PARTS = 4  # maximum number of causes that are combined
TIED = 4  # maximum number of printed causes that give the same numbers
SEARCHED = 32  # about so many cases are searched; the others are compared at the end
REFINED = 4  # causes whose number is refined, because they come closest
NEAREST = 6  # causes that are tried in pairs with PAIRED others
PAIRED = 60
# numbers that are tried for a cause with a free number
NUMBERS = [0.05, 0.1, 0.2, 0.5, 0.9, 0.99, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0]


@dataclass
class Names:
    """The result of a search: the causes that together reproduce all cases, or none."""

    parts: list[list[Cause]]  # each part lists the causes that give the same numbers
    has_ended: bool = False  # whether the time was over before all causes were tried


def as_step(batch: dict, options: dict, value: Tensor, gradient: Tensor) -> Dump:
    """Convert a case to a Dump, so that its loss can be recomputed with a cause.

    Args:
        batch: the case's tensors, by name.
        options: the loss's options, by name.
        value: loss that the checked function returned.
        gradient: this loss's gradient with respect to the log-probabilities.
    """
    rows = {}
    for name, x in {**batch, "logps_gradient": gradient}.items():
        rows[name] = x.detach().flatten(0, -2) if x.dim() > 1 else x
    mask = rows.pop("mask")
    zeros = torch.zeros_like(mask, dtype=torch.long)
    tensors = {**rows, "completion_mask": mask, "input_ids": zeros, "prompt_mask": zeros, "loss": value.view(1)}
    if options["kind"] == "dpo":  # other losses have no pairs, by which a mistake could divide
        number = torch.arange(len(mask))
        tensors |= {"pair": number // 2, "chosen": 1 - number % 2}
    about = {**options, "loss": options_of(options["kind"], options), "rollout_tokens": options.get("tokens")}
    return Dump(about, tensors)


def find_names(steps: list[Dump], tolerance: float, seconds: float = SECONDS) -> Names:
    """Search causes that together reproduce the loss in all cases, also in those that agree with the definition.

    Args:
        steps: all cases, see `as_step`.
        tolerance: largest error in a case's value and gradient, as in `minivlmrl.extras.parity.loss.check`.
        seconds: time after which the search ends.
    """
    deadline = time.thread_time() + seconds
    for step in steps:
        step.deadline = deadline
    searched = steps[:: max(1, len(steps) // SEARCHED)]
    try:
        searched += [step for step in steps if not explains(step, {}, tolerance)][:1]
        while True:
            search = Search(searched, tolerance)
            parts = search.run()
            wrong = [step for step in steps if parts and not explains(step, search.deviation, tolerance)]
            if not wrong:
                return Names(parts)
            searched += wrong[:: max(1, len(wrong) // SEARCHED)]
    except SearchEndedError:
        return Names([], has_ended=True)
    finally:
        for step in steps:
            step.deadline = math.inf


def explains(step: Dump, change: dict | None, tolerance: float) -> bool:
    """Return whether a deviation reproduces a case within the tolerance."""
    answer = None if change is None else computed("loss", step, change)
    return answer is not None and all(distance(a, b) <= tolerance for a, b, _ in answer.values())


class Search:
    """A search that adds one cause after the other to a deviation, until it reproduces all cases."""

    def __init__(self, steps: list[Dump], tolerance: float):
        self.steps = steps
        self.tolerance = tolerance
        # in a case with more rows, fewer orders of rows are equal
        self.causes = possible_causes("loss", max(steps, key=lambda step: len(step.all_rows)))
        self.deviation = {}
        self.parts = []
        self.found = {}  # causes that reproduce further cases, by their sentences
        self.agrees = self.agreements({})

    def run(self) -> list[list[Cause]]:
        """Return the parts of a deviation that reproduces all cases, or [] if none is found."""
        while not all(self.agrees):
            part = self.next_part() if len(self.parts) < PARTS else []
            if not part:
                return []
            self.add(part)
        return self.equal_parts()

    def add(self, part: list[Cause]):
        """Add causes with the same numbers to the deviation."""
        self.parts.append(part)
        self.deviation = composed(self.deviation, part[0].change)
        self.agrees = self.agreements(self.deviation)

    def equal_parts(self) -> list[list[Cause]]:
        """Return the parts with the causes that reproduce all cases if they replace the first one of their part."""
        parts = []
        for number, part in enumerate(self.parts):
            kept = part[:1]
            for other in part[1:]:
                chosen = [other if i == number else each[0] for i, each in enumerate(self.parts)]
                change = reduce(lambda both, cause: both and composed(both, cause.change), chosen[1:], chosen[0].change)
                if all(self.agreements(change)):
                    kept.append(other)
            parts.append(kept)
        return parts

    def agreements(self, change: dict | None) -> list[bool]:
        """Return for each case whether a deviation reproduces it."""
        return [explains(step, change, self.tolerance) for step in self.steps]

    def answer(self, step: Dump, change: dict) -> dict | None:
        """Recompute the loss of a case with the deviation so far and a further change."""
        both = composed(self.deviation, change)
        return None if both is None else computed("loss", step, both)

    def next_part(self) -> list[Cause]:
        """Return the causes that reproduce most further cases, and keep the others; [] if there is none."""
        left = [step for step, agrees in zip(self.steps, self.agrees, strict=True) if not agrees]
        left.sort(key=lambda step: count_wrong(self.answer(step, {})), reverse=True)
        targets = [left[0], left[-1]][: len(left)]  # the cases with the most and the fewest differing numbers
        found = {}  # {sentence: (number of cases that the cause reproduces, cause)}

        def best_of(causes: Iterable[Cause]) -> list[Cause]:
            for cause in causes:
                now = self.agreements(composed(self.deviation, cause.change))
                if all(new >= old for new, old in zip(now, self.agrees, strict=True)) and now != self.agrees:
                    found.setdefault(cause.says, (sum(now), cause))
                    self.found[cause.says] = cause
            most = max((count for count, _ in found.values()), default=0)
            best = [cause for count, cause in found.values() if count == most]
            return sorted(best, key=lambda cause: len(f"{cause.change.get('c', 0):g}"))  # round numbers are likelier

        best = best_of([*self.found.values()])  # for example two designs that act on different cases
        if best and found[best[0].says][0] == len(self.steps):
            return best
        # there are many limited causes and pairs, so they are tried on one case
        tries = [
            *product((self.simple, self.designs_with_a_number), targets),
            (self.others_with_a_number, targets[0]),
            (self.limited, targets[0]),
            (self.others_with_a_number, targets[-1]),
            (self.pairs, targets[0]),
        ]
        for phase, target in tries:
            best = best_of(self.fitting(target, phase(target)))
            is_last = target is targets[-1]
            # a part of the answer is taken early only if it is a design, because several designs are usual
            if best and (found[best[0].says][0] == len(self.steps) or (is_last and best[0].of.who)):
                return best
        return best

    def simple(self, target: Dump) -> list[Cause]:
        """List the causes without a free number that are not limited to one use, and factors."""
        return [cause for cause in self.causes if not cause.rank()] + count_causes(target) + factor_causes(target)

    def limited(self, _: Dump) -> list[Cause]:
        """List the causes without a free number that are limited to one use, such as the KL."""
        return [cause for cause in self.causes if 0 < cause.rank() < 3]

    def designs_with_a_number(self, _: Dump) -> list[Cause]:
        """List the designs with a free number, such as a bound."""
        return [cause for cause in self.causes if cause.is_fitted() and cause.of.who]

    def others_with_a_number(self, _: Dump) -> list[Cause]:
        """List the other causes with a free number."""
        return [cause for cause in self.causes if cause.is_fitted() and not cause.of.who]

    def pairs(self, target: Dump) -> list[Cause]:
        """Combine each of the causes that come closest to a case with others that come close."""
        gaps = {cause: gap_of(self.answer(target, cause.change)) for cause in self.simple(target)}
        near = sorted(gaps, key=gaps.get)[:PAIRED]
        result = []
        for first, then in permutations(near, 2):
            if near.index(first) < NEAREST and (change := composed(first.change, then.change)):
                of = first.of if first.kind == "mistake" else then.of
                result.append(Cause(f"{first.says}; and {then.says}", change, of, parts=2))
        return result

    def fitting(self, target: Dump, causes: list[Cause]) -> Iterator[Cause]:
        """Yield the causes that reproduce a case, each with its number if it has a free one."""
        near = []
        unchanged = gap_of(self.answer(target, {}))
        for cause in causes:
            if not cause.is_fitted():
                if explains(target, composed(self.deviation, cause.change), self.tolerance):
                    yield cause
                continue
            gap, number = min((self.gap(target, cause, number), number) for number in NUMBERS)
            if gap <= 0.9 * unchanged:
                near.append((gap, len(near), number, cause))
        nearest = sorted(near, key=lambda each: each[:2])[:REFINED]
        for _, _, start, cause in sorted(nearest, key=lambda each: each[1]):  # in the order of the table
            for number in refined(start, lambda number, cause=cause: self.gap(target, cause, number)):
                named = cause.with_number(number)
                if explains(target, composed(self.deviation, named.change), self.tolerance):
                    yield replace(named, is_guess=False)
                    break

    def gap(self, target: Dump, cause: Cause, number: float) -> float:
        """Return how far a cause with a number leaves a case from the checked loss."""
        return gap_of(self.answer(target, cause.with_number(number).change))


def refined(number: float, gap_with: Callable[[float], float]) -> Iterator[float]:
    """Yield a number, then the best number near it: rounded to 1, 2 and 3 digits, then exact."""
    yield number
    gap_with = cache(gap_with)
    step = number / 3
    for _ in range(27):
        best = min((number, number - step, number + step), key=gap_with)
        step *= 0.5 if best == number else 1.0
        number = best
    yield from (float(f"{number:.{digits}g}") for digits in (1, 2, 3))
    yield number


def gap_of(answer: dict | None) -> float:
    """Return how far a recomputed loss is from the checked one: the sum over its numbers, each at most 1."""
    if answer is None:
        return math.inf
    return sum(float(((a - b).abs() / (b.abs() + 1)).nan_to_num(1.0).clamp(max=1).sum()) for a, b, _ in answer.values())


def count_causes(step: Dump) -> list[Cause]:
    """List one cause for each count or option by which all values may be multiplied or divided."""
    causes = []
    for name, (function, keys) in (table.FACTORS | table.COUNTS).items():
        if (keys and "loss" not in keys.split("|")) or function(step) in (None, 0, 1):
            continue
        name = name.replace("one over the temperature", "temperature")
        for word, sign in (("multiplied", 1), ("divided", -1)):
            change = {"factor": lambda s, function=function, sign=sign: (function(s.step) or 1) ** sign}
            causes.append(Cause(f"all values are {word} by the number of {name}", change, table.FACTOR))
    return causes


def factor_causes(step: Dump) -> list[Cause]:
    """List the cause that all values are multiplied by a number, with the number that fits this case best."""
    answer = computed("loss", step, {}).values()
    number = float(sum((a * b).sum() for a, b, _ in answer) / (sum((b * b).sum() for _, b, _ in answer) + 1e-300))
    return [FACTOR.with_number(c) for c in dict.fromkeys((float(f"{number:.3g}"), number)) if c not in (0.0, 1.0)]


def composed(first: dict, then: dict) -> dict | None:
    """Combine two deviations, the second one after the first; None if both replace a quantity by a value."""
    if not first:
        return then
    if "inside" in first or "inside" in then:
        return None
    result = numbered(first)
    for name, x in numbered(then).items():
        if name not in result:
            result[name] = x
        elif callable(x) and callable(result[name]):
            result[name] = chained(result[name], x)
        else:
            return None
    return result


def numbered(change: dict) -> dict:
    """Return a deviation whose formulas contain their fitted number."""
    if "c" not in change:
        return dict(change)
    return {name: with_c(x, change["c"]) for name, x in change.items() if name != "c"}


def with_c(formula: Callable, c: float) -> Callable:
    def changed(s):
        s.c = c
        return formula(s)

    return changed


def chained(first: Callable, then: Callable) -> Callable:
    def changed(s):
        s.x = first(s)
        return then(s)

    return changed


def lines_of(names: Names, steps: list[Dump]) -> list[str]:
    """Describe the result of a search: each mistake or design, or the first differing numbers."""
    if not names.parts:
        why = "the time was over before all causes were tried" if names.has_ended else "no known mistake or design does"
        step = max(steps, key=lambda step: count_wrong(computed("loss", step, {})))
        return [
            f"no name reproduces the loss in all cases: {why}",
            *(f"  {x}" for x in where(computed("loss", step, {}))),
        ]
    lines = []
    for part in names.parts:
        cause = part[0]
        lines.append(f"{cause.kind}: {cause.says}")
        lines += [f"  or: {other.says}" for other in part[1:TIED]]
        lines.append(f"  effect: {cause.of.effect}")
        lines += [f"  done by: {cause.of.who}"] * bool(cause.of.who)
    return lines
