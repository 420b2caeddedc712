"""Search for known mistakes that turn TRL's loss into the user's loss.

Kinds of mistakes, likeliest first:

    1. plain mistakes and wrong factors, such as "an advantage has the wrong sign"
    2. mistakes with a number to fit, such as c in "the ratio is at most c"
    3. mistakes in one place, such as a mask that is wrong only in the token count
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, reduce
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from minivlmrl.extras.parity.calling import loss_and_gradient
from minivlmrl.extras.parity.mistakes import Mistake, possible
from minivlmrl.extras.parity.recomputed import Case, recomputed, with_mistake

PARTS = 4  # maximum number of mistakes in a combination
SEARCHED = 32  # mistakes are tried in about this many cases, and verified in all
REFINED = 4  # maximum number of mistakes fitted to all digits in a case
SHOWN = 4  # maximum number of mistakes to print
NUMBERS = [0.05, 0.1, 0.2, 0.3, 0.5, 0.9, 0.99, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 200.0, 1000.0]
RATE = "the effective learning rate changes"
FACTOR = Mistake("all values are {c} times as large", {"factor": "{c}"}, RATE)
OWN_LENGTH = replace(FACTOR, used_by="Dr. GRPO losses with a constant length")
DIVIDED_BY_0 = Mistake(
    "a row without tokens is divided by 0 in the mean over each row",
    {},
    "a completion without tokens makes the loss NaN",
)
NO_NAME = "no name: no known mistake or deliberate variant reproduces the loss in all cases"


def case_of(my_loss: Callable, name: str, batch: dict, options: dict, tolerance: float, read: set[str]) -> Case:
    """Call the user's loss for a test case."""
    value, gradient = loss_and_gradient(my_loss, batch, options)

    def simpler() -> list[Case]:
        # a loss with a hard-coded beta ignores the option beta=0, so its KL cannot be left out
        can_leave_out_kl = "beta" in read or "ref_per_token_logps" not in read
        variants = simpler_variants(batch, options, can_leave_out_kl)
        return [case_of(my_loss, name, *variant, tolerance, read) for variant in variants]

    return Case(name, options, rows_of(batch), value, gradient.flatten(0, -2), tolerance, read, simpler)


def rows_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Flatten DPO's pairs to rows: (B, 2, T) becomes (2B, T)."""
    return {name: x.flatten(0, -2) if x.dim() > 1 else x for name, x in batch.items()}


def without_value(case: Case) -> Case:
    """Return the case with only its gradient compared."""
    return replace(case, compares_value=False, simpler=lambda: [*map(without_value, case.simpler())])


def simpler_variants(batch: dict, options: dict, can_leave_out_kl: bool) -> Iterator[tuple[dict, dict]]:
    """Yield variants of a test case, simplest first."""
    logps = batch["per_token_logps"]
    if options["kind"] == "grpo":
        without_kl = options | {"beta": 0.0} if can_leave_out_kl else options
        advantages = batch["advantages"]
        first_step = batch | {"old_per_token_logps": logps, "ref_per_token_logps": logps}
        yield first_step | {"advantages": torch.ones_like(advantages)}, without_kl  # reveals averages
        yield first_step, without_kl  # reveals advantages
        yield batch, without_kl  # reveals ratios and clipping
        # reveals the KL
        yield batch | {"old_per_token_logps": logps, "advantages": torch.zeros_like(advantages)}, options
        yield {name: pad(x, (0, 2)) if x.dim() > 1 else x for name, x in batch.items()}, options  # reveals padding
    if options["kind"] == "dpo":
        pair = {name: x[:1] for name, x in batch.items()}
        first = pair["mask"].argmax(-1, keepdim=True)
        one_token = {name: x.gather(-1, first) for name, x in pair.items()}
        without_ref = one_token | {"ref_per_token_logps": torch.zeros_like(one_token["mask"])}
        yield without_ref, options | {"beta": 1.0}  # reveals the order of answers, and the margin
        yield without_ref, options  # reveals beta
        yield one_token, options  # reveals the reference
        yield pair, options  # reveals the sum over answer tokens


def find_names(cases: list[Case]) -> tuple[list[str], list[str]]:
    """Find mistakes that turn TRL's loss into the user's; return "mistake" or "design" for each, and lines to print."""
    parts = find_parts(cases)
    of_value = []
    if not parts:
        parts = find_parts([without_value(case) for case in cases])
        if parts:
            of_value = ["design: the remaining differences are in the value, which does not train"]
    lines = [line for part in parts for line in lines_of(part)]
    kinds = [part[0].kind for part in parts] + ["design"] * len(of_value)
    return kinds, [*lines, *of_value] or [NO_NAME]


def lines_of(part: list[Mistake]) -> list[str]:
    """Describe the first mistake, and list others that give the same loss."""
    first, *others = part[:SHOWN]
    about = {"effect": first.effect, "source": first.source}
    if first.kind == "design":
        about["done by"] = first.used_by
    alternatives = [f"  or: {other.says}" for other in others]
    return [f"{first.kind}: {first.says}", *alternatives, *(f"  {name}: {x}" for name, x in about.items() if x)]


def find_parts(cases: list[Case]) -> list[list[Mistake]]:
    """Find mistakes that together reproduce the user's loss, such as a wrong sign and a wrong mask; [] = none found.

    Returns one list per mistake: the mistake, then others that give the same loss.
    """
    # NaN for completions without tokens is a mistake of its own, which must not hide others
    finite = [case for case in cases if case.is_finite() or case.batch["mask"].any(1).all()]
    agrees = all(case.is_explained({}) for case in finite)
    parts = [] if agrees else parts_of(finite)
    return [*parts, [DIVIDED_BY_0]] if len(finite) < len(cases) and (agrees or parts) else parts


def parts_of(cases: list[Case]) -> list[list[Mistake]]:
    """Search in a few cases; add cases until the mistakes reproduce the user's loss in all."""
    searched = cases[:: max(1, len(cases) // SEARCHED)]
    searched += [case for case in cases if not case.is_explained({})][:1]
    by_size = sorted(searched, key=lambda case: len(case.batch["mask"]))
    variants = chain(*zip(by_size[-1].simpler(), by_size[0].simpler(), strict=True))
    variants = [case for case in variants if case.is_finite()]
    while True:
        combination = Combination(searched, variants)
        parts = combination.run()
        wrong = [case for case in cases if parts and not case.is_explained(combination.change)]
        if not wrong:
            return parts
        searched += wrong[:: max(1, len(wrong) // SEARCHED)]


class Combination:
    """Search for several mistakes that together reproduce a user's loss.

    Args:
        cases: test cases that the mistakes must explain.
        variants: simplified cases, simplest first, in which fewer mistakes change the loss.
    """

    def __init__(self, cases: list[Case], variants: list[Case]):
        self.cases = [*variants, *cases]
        self.num_variants = len(variants)
        # a case with many rows, in which "next row" and "previous row" differ
        mistakes = possible(max(cases, key=lambda case: len(case.batch["mask"])))
        self.fitted = [row for row in mistakes if row.is_fitted]
        self.placed = [row for row in mistakes if "inside" in row.change]
        self.plain = [row for row in mistakes if not row.is_fitted and "inside" not in row.change]
        self.change: dict | None = {}
        self.parts = []
        self.agrees = self.agreements({})

    def run(self) -> list[list[Mistake]]:
        """Add mistakes until all recorded cases are explained; [] if this fails."""
        while not self.are_explained(self.agrees):
            part = self.next_part() if len(self.parts) < PARTS else []
            if not part:
                return []
            self.parts.append(part)
            self.change = composed(self.change, part[0].change)
            self.agrees = self.agreements(self.change)
        return [[row for row in part if self.replaces(row, part)] for part in self.parts]

    def replaces(self, row: Mistake, part: list[Mistake]) -> bool:
        """Return whether another mistake of the part, with the other parts, also explains all cases."""
        chosen = [row.change if other is part else other[0].change for other in self.parts]
        return row is part[0] or self.are_explained(self.agreements(reduce(composed, chosen)))

    def are_explained(self, agrees: list[bool]) -> bool:
        """Return whether all recorded cases agree; simplified cases may differ."""
        return all(agrees[self.num_variants :])

    def agreements(self, change: dict | None) -> list[bool]:
        """List which cases a change explains."""
        return [case.is_explained(change) for case in self.cases]

    def next_part(self) -> list[Mistake]:
        """Search for one more mistake; return the best candidates."""
        left = [case for case, agrees in zip(self.cases, self.agrees, strict=True) if not agrees]
        simplest = left[0]
        left.sort(key=lambda case: int((case.error(self.change) > case.tolerance).sum()))
        most = left[-1]
        chosen = [*{id(case): case for case in (simplest, most, left[0])}.values()]

        def plain(cases: Iterable[Case]) -> Iterator[Iterable[Mistake]]:
            return ([*self.tried(self.plain, case), *self.factors(case)] for case in cases)

        # numbers are slow to fit: second, in few cases
        phases = (
            plain(chosen),
            (self.with_numbers(case) for case in chosen),
            [self.tried(self.placed, most)],
            plain(case for case in left if all(case is not other for other in chosen)),
        )
        return next(filter(None, map(self.best_of, phases)), [])

    def best_of(self, tables: Iterable[Iterable[Mistake]]) -> list[Mistake]:
        """Return the mistakes that reproduce the user's loss in the most cases.

        tables: lists of mistakes, tried until one explains all cases.
        """
        counts = {}  # {says: (number of cases that agree with this mistake, mistake)}
        for table in tables:
            for row in table:
                now = self.agreements(composed(self.change, row.change))
                if all(new >= old for new, old in zip(now, self.agrees, strict=True)) and now != self.agrees:
                    counts.setdefault(row.says, (sum(now), row))
            if any(count == len(self.cases) for count, _ in counts.values()):
                break
        most = max((count for count, _ in counts.values()), default=0)
        return sorted((row for count, row in counts.values() if count == most), key=simplicity)

    def tried(self, mistakes: list[Mistake], case: Case) -> Iterator[Mistake]:
        """Yield mistakes that, with those found before, explain a case."""
        for row in mistakes:
            if case.is_explained(composed(self.change, row.change)):
                yield row

    def factors(self, case: Case) -> list[Mistake]:
        """Find factors that explain a case, such as "all values are divided by the number of rows"."""
        result = [*self.tried([of_count(name, sign) for name in counts_of(case) for sign in (1, -1)], case)]
        has_own_length = case.options["loss_type"] == "dr_grpo" and "max_completion_length" not in case.read
        simulated = with_mistake(case, self.change)
        if simulated is None:
            return result
        _, gradient = simulated
        best = float((case.gradient * gradient).sum() / (gradient.square().sum() + 1e-300))  # least squares
        for digits in (1, 2, 3, 17):
            row = (OWN_LENGTH if has_own_length else FACTOR).with_number(float(f"{best:.{digits}g}"))
            if found := [*self.tried([row], case)]:
                return result + found
        return result

    def with_numbers(self, case: Case) -> Iterator[Mistake]:
        """Fit the number in each mistake, such as a clip bound; yield mistakes that explain the case."""
        near = []
        usual = gap(case, self.change)
        for row in self.fitted:

            def gap_with(number: float, row=row) -> float:
                return gap(case, composed(self.change, row.with_number(number).change))

            smallest, start = min((gap_with(number), number) for number in NUMBERS)
            if smallest <= 0.9 * usual:
                near.append((smallest, len(near), start, row, gap_with))
        nearest = sorted(near, key=lambda fit: fit[:2])[:REFINED]
        for _, _, start, row, gap_with in sorted(nearest, key=lambda fit: fit[1]):
            for number in numbers_near(start, gap_with):
                if found := [*self.tried([row.with_number(number)], case)]:
                    yield from found
                    break


def gap(case: Case, change: dict | None) -> float:
    """Sum the errors, each at most 1; infinite if a change is impossible."""
    return math.inf if change is None else float((case.error(change) * 1e-5 / case.tolerance).clamp(max=1).sum())


def counts_of(case: Case) -> dict[str, float]:
    """Return factors or divisors that a loss may apply by mistake."""
    mask = case.batch["mask"]
    counts = {
        "1 / ln 2, as in bits": 1 / math.log(2),
        "beta": case.options.get("beta", 0),
        "the number of rows": len(mask),
        "the number of counted tokens": mask.sum().item(),
        "the number of columns, including padding": mask.numel(),
        "the number of tokens of the longest completion": mask.sum(1).max().item(),
        "the number of tokens of max_completion_length": case.options.get("max_completion_length", 0),
        "the number of pairs": len(mask) / 2 if case.options["kind"] == "dpo" else 0,
    }
    return {name: count for name, count in counts.items() if count not in (0, 1)}


def of_count(name: str, sign: int) -> Mistake:
    """Return a wrong factor (sign 1) or divisor (sign -1), such as the number of rows."""
    word = "multiplied" if sign > 0 else "divided"
    return Mistake(
        f"all values are {word} by {name}", {"factor": lambda s: counts_of(s.case).get(name, 1) ** sign}, RATE
    )


def simplicity(row: Mistake) -> tuple:
    """Return a sort key: wrong factors, then numbers with few digits, then missing terms."""
    return "factor" not in row.change, len(f"{row.number:g}"), "left out" not in row.says


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


def chained(first: Callable, then: Callable) -> Callable:
    """Return a change that applies two changes of one quantity."""

    def changed(s: Any) -> Tensor:
        s.x = first(s)
        return then(s)

    return changed


def examples(cases: list[Case]) -> list[str]:
    """Describe the case with the most wrong numbers."""
    case = max(cases, key=lambda case: int((case.error({}) > case.tolerance).sum()))
    _, right = recomputed(case, {})
    error = (case.gradient - right).abs()
    row, token = divmod(int(error.argmax()), error.shape[1])
    return [
        f"  {case.name}: {int((error > case.tolerance).sum())} of {error.numel()} gradients differ, most in row {row}, "
        f"token {token}: {case.gradient[row, token]:.6g} instead of {right[row, token]:.6g}"
    ]
