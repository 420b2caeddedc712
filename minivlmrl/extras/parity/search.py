"""Search for known mistakes that turn TRL's loss into the user's loss.

Mistakes to try, likeliest first:

    1. plain mistakes, such as "an advantage has the wrong sign"
    2. mistakes with a number to fit, such as c in "the ratio is at most c"
    3. mistakes in one place, such as a mask that is wrong only in the KL
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from minivlmrl.extras.parity.calling import loss_and_gradient
from minivlmrl.extras.parity.mistakes import Mistake, possible
from minivlmrl.extras.parity.recomputed import Case, rows_of

PARTS = 4  # maximum mistakes in a combination
SEARCHED = 50  # about this many cases are searched; mistakes are verified in all cases
REFINED = 6  # maximum mistakes per case whose number is fitted to all digits
SHOWN = 4  # maximum mistakes to print
NUMBERS = [0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.9, 0.99, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 200.0, 1000.0]


def case_of(my_loss: Callable, name: str, options: dict, batch: dict, *right: Tensor, **about) -> Case:
    """Call the user's loss for a test case, and return its value and gradient as a Case.

    Args:
        right: TRL's value and gradient.
        about: tolerance and read, see `Case`.
    """
    value, gradient = loss_and_gradient(my_loss, batch, options)
    case = Case(name, options, rows_of(batch), value, gradient.flatten(0, -2), **about)
    if right:
        case.right = (right[0], right[1].flatten(0, -2))

    def simpler() -> list[Case]:
        # a loss with a hard-coded beta ignores the option beta=0, so its KL cannot be left out
        can_leave_out_kl = "beta" in case.read or "ref_per_token_logps" not in case.read
        variants = simpler_variants(batch, options, can_leave_out_kl)
        return [case_of(my_loss, name, changed, of_batch, **about) for of_batch, changed in variants]

    case.simpler = simpler
    return case


def without_value(case: Case) -> Case:
    """Return a copy of the case in which only gradients are compared."""
    return replace(case, compares_value=False, simpler=lambda: [*map(without_value, case.simpler())])


def simpler_variants(batch: dict, options: dict, can_leave_out_kl: bool) -> Iterator[tuple[dict, dict]]:
    """Yield simplified versions (batch, options) of a test case, simplest first.

    Few mistakes change the loss of a simple case, so that mistakes are found one by one.
    """
    logps = batch["per_token_logps"]
    if options["kind"] == "grpo":
        without_kl = options | {"beta": 0.0} if can_leave_out_kl else options
        advantages = batch["advantages"]
        first_step = batch | {"old_per_token_logps": logps, "ref_per_token_logps": logps}
        yield first_step | {"advantages": torch.ones_like(advantages)}, without_kl  # finds wrong averages
        yield first_step, without_kl  # finds wrong advantages
        yield batch, without_kl  # finds wrong ratios and clipping
        # finds mistakes in the KL
        yield batch | {"old_per_token_logps": logps, "advantages": torch.zeros_like(advantages)}, options
        yield {name: pad(x, (0, 2)) if x.dim() > 1 else x for name, x in batch.items()}, options  # finds wrong padding
    if options["kind"] == "dpo":
        pair = {name: x[:1] for name, x in batch.items()}
        first = pair["mask"].argmax(-1, keepdim=True)
        one_token = {name: x.gather(-1, first) for name, x in pair.items()}
        without_ref = one_token | {"ref_per_token_logps": torch.zeros_like(one_token["mask"])}
        yield without_ref, options | {"beta": 1.0}  # finds swapped answers and a wrong margin
        yield without_ref, options  # finds a wrong beta
        yield one_token, options  # finds wrong reference log-probs
        yield pair, options  # finds a wrong sum over answer tokens


def find_names(cases: list[Case]) -> list[str]:
    """Find mistakes that turn TRL's loss into the user's; return lines to print, [] if none is found."""
    parts = find_parts(cases)
    of_value = not parts
    if of_value:
        parts = find_parts([without_value(case) for case in cases])
    lines = [line for part in parts for line in lines_of(part)]
    if lines and of_value:
        lines.append("design: the remaining differences are in the value, which does not train")
    return lines


def lines_of(part: list[Mistake]) -> list[str]:
    """Describe the first mistake, and list others that give the same loss."""
    first, *others = part[:SHOWN]
    lines = [f"{first.kind}: {first.says}"]
    lines += [f"  or: {other.says}" for other in others]
    if first.kind == "design":
        lines.append(f"  done by: {first.used_by}")
    return lines


def find_parts(cases: list[Case]) -> list[list[Mistake]]:
    """Find mistakes that together reproduce the user's loss, such as a wrong sign and a wrong mask; [] = none found.

    The search uses some cases; the mistakes must reproduce all. Returns one list per mistake: the mistake, then others
    that give the same loss.
    """
    searched = cases[:: max(1, len(cases) // SEARCHED)]
    searched += [case for case in cases if not case.is_explained({})][:1]
    by_size = sorted(searched, key=lambda case: len(case.batch["mask"]))
    variants = []
    for pair in zip(by_size[-1].simpler(), by_size[0].simpler(), strict=True):
        variants += pair
    combination = Combination(searched, variants)
    parts = combination.run()
    if all(case.is_explained(combination.change) for case in cases):
        return parts
    return []


class Combination:
    """Search for several mistakes that together reproduce a user's loss.

    Args:
        cases: test cases that the mistakes must explain.
        variants: simplified cases, simplest first, in which fewer mistakes change the loss.
    """

    def __init__(self, cases: list[Case], variants: list[Case]):
        self.cases = [*variants, *cases]
        self.num_variants = len(variants)
        self.plain, self.fitted, self.placed = possible(cases[0])
        self.change: dict | None = {}
        self.parts = []
        self.agrees = self.agreements({})

    def run(self) -> list[list[Mistake]]:
        """Add mistakes until they explain all recorded cases; return [] if this fails."""
        while not self.are_explained(self.change):
            part = self.next_part() if len(self.parts) < PARTS else []
            if not part:
                return []
            self.parts.append(part)
            self.change = self.change_with(part[0])
            self.agrees = self.agreements(self.change)
        for part in self.parts[:-1]:  # drop mistakes that later ones make unnecessary
            others = [other for other in self.parts if other is not part]
            if self.are_explained(reduce(composed, [other[0].change for other in others])):
                self.parts = others
        for number, part in enumerate(self.parts):
            self.parts[number] = [row for row in part if self.replaces(row, part)]
        return self.parts

    def replaces(self, row: Mistake, part: list[Mistake]) -> bool:
        """Return whether a mistake can replace the first one in its part: all cases must stay explained."""
        chosen = [row.change if other is part else other[0].change for other in self.parts]
        return row is part[0] or self.are_explained(reduce(composed, chosen))

    def are_explained(self, change: dict | None) -> bool:
        """Return whether a change explains all recorded cases; simplified cases may differ."""
        return all(self.agreements(change)[self.num_variants :])

    def agreements(self, change: dict | None) -> list[bool]:
        """Return one bool per case: whether the change explains it."""
        return [case.is_explained(change) for case in self.cases]

    def change_with(self, row: Mistake) -> dict | None:
        """Merge the change of a mistake with the changes of mistakes found before."""
        return composed(self.change, row.change)

    def next_part(self) -> list[Mistake]:
        """Search for one more mistake; return the best candidates."""
        left = [case for case, agrees in zip(self.cases, self.agrees, strict=True) if not agrees]
        simplest = left[0]
        left.sort(key=lambda case: int((case.error(self.change) > case.tolerance).sum()))
        chosen = [simplest]
        for case in (left[-1], left[0]):
            if not any(case is other for other in chosen):
                chosen.append(case)
        found = self.best_of(self.tried(self.plain, case) for case in chosen)
        if not found:  # slow, so only if no plain mistake is found
            found = self.best_of(self.with_numbers(case) for case in chosen)
        if not found:
            found = self.best_of([self.tried(self.placed, left[-1])])
        return found or self.best_of(self.tried(self.plain, case) for case in left)

    def best_of(self, tables: Iterable[Iterable[Mistake]]) -> list[Mistake]:
        """Return the mistakes that reproduce the user's loss in the most cases.

        Args:
            tables: lists of mistakes, tried until a mistake explains all cases.
        """
        best = {}  # {description: mistake}
        most = sum(self.agrees)
        for table in tables:
            for row in table:
                now = self.agreements(self.change_with(row))
                is_worse = any(old and not new for old, new in zip(self.agrees, now, strict=True))
                if is_worse or sum(now) < most or now == self.agrees:
                    continue
                if sum(now) > most:
                    most = sum(now)
                    best = {}
                best.setdefault(row.says, row)
            if most == len(self.cases):
                break
        return sorted(best.values(), key=simplicity)

    def tried(self, mistakes: list[Mistake], case: Case) -> list[Mistake]:
        """List the mistakes that explain a case, together with those found before."""
        return [row for row in mistakes if case.is_explained(self.change_with(row))]

    def with_numbers(self, case: Case) -> Iterator[Mistake]:
        """Fit the number in each mistake, such as a clip bound; yield mistakes that explain the case."""

        def gap(row: Mistake, number: float) -> float:
            """Return the sum of errors, each limited to 1."""
            error = case.error(self.change_with(row.with_number(number)))
            return float((error * 1e-5 / case.tolerance).clamp(max=1).sum())

        nearest = {row: min((gap(row, number), number) for number in NUMBERS) for row in self.fitted}
        limit = sorted(nearest.values())[:REFINED][-1]
        for row, start in nearest.items():
            if start > limit:
                continue
            for number in numbers_near(start[1], partial(gap, row)):
                fitted = row.with_number(number)
                if self.tried([fitted], case):
                    yield fitted
                    break


def simplicity(row: Mistake) -> tuple:
    """Return a sort key for mistakes: numbers with few digits first, then left-out terms."""
    return len(f"{row.number:g}"), "left out" not in row.says


def numbers_near(number: float, gap_with: Callable[[float], float]) -> Iterator[float]:
    """Yield a start value, then the best value near it with 1, 2, 3 and all digits: 0.2, 0.23, 0.234, 0.2341."""
    yield number
    gap_with = cache(gap_with)
    number = min((number * 1.1**power for power in range(-9, 10)), key=gap_with)
    step = number / 10
    for _ in range(35):
        number = min((number, number - step, number + step), key=gap_with)
        step *= 0.6
    yield from (float(f"{number:.{digits}g}") for digits in (1, 2, 3))
    yield number


def composed(first: dict | None, then: dict | None) -> dict | None:
    """Merge two simulated mistakes; return None if they conflict, as beta=0 and beta=1 do."""
    if first is None or then is None:
        return None
    if first and then and "inside" in first | then:
        return None
    result = dict(first)
    for name, x in then.items():
        if callable(x) and callable(result.get(name)):
            x = chained(result[name], x)
        elif name in result:
            return None
        result[name] = x
    return result


def chained(first: Callable, then: Callable) -> Callable:
    """Return a function that applies two changes to the same quantity, one after the other."""

    def changed(s: Any) -> Tensor:
        s.x = first(s)
        return then(s)

    return changed
