"""Search for known mistakes that explain how a user's loss differs from TRL's."""

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import replace
from functools import reduce
from itertools import chain

import torch
from torch import Tensor
from torch.nn.functional import pad

from minivlmrl.extras.parity.audit import where
from minivlmrl.extras.parity.calling import loss_and_gradient
from minivlmrl.extras.parity.change import composed
from minivlmrl.extras.parity.search import (
    RATE,
    Bug,
    Search,
    by_kind,
    computed,
    count_wrong,
    error,
    lines_of,
    possible_bugs,
)
from minivlmrl.extras.parity.step import Dump
from minivlmrl.extras.parity.step_format import options_of

PARTS = 4  # maximum number of bugs in a combination
DIVIDED_BY_0 = Bug(
    "a row without tokens is divided by 0 in the mean over each row",
    {},
    replace(RATE, effect="a completion without tokens makes the loss NaN"),
)
NO_NAME = "no name: no known mistake or deliberate variant reproduces the loss in all cases"
SEARCHED = 32  # simulated bugs are tried in about this many test cases, and verified in all


def as_step(
    batch: dict, options: dict, value: Tensor, gradient: Tensor, tolerance: float = 1e-6, read: set[str] | None = None
) -> Dump:
    """Convert a test case with the user's loss to the format of a recorded training step.

    Args:
        value: user's loss.
        gradient: loss gradient with respect to log-probs.
        tolerance: maximum error in value and gradient.
        read: tensor and option names used by the loss, None = all.
    """
    rows = {}
    for name, x in {**batch, "logps_gradient": gradient}.items():
        rows[name] = x.detach().flatten(0, -2) if x.dim() > 1 else x
    mask = rows.pop("mask")
    zeros = torch.zeros_like(mask, dtype=torch.long)
    tensors = {**rows, "completion_mask": mask, "input_ids": zeros, "prompt_mask": zeros, "loss": value.view(1)}
    if options["kind"] == "dpo":
        number = torch.arange(len(mask))
        tensors |= {"pair": number // 2, "chosen": 1 - number % 2}
    about = {**options, "loss": options_of(options["kind"], options), "rollout_tokens": options.get("tokens")}
    d = Dump(about, tensors)
    d.case_tolerance = tolerance
    d.read = read
    d.row_sets = {}  # skip bugs in only some rows: a loss function treats all rows alike
    return d


def case_of(my_loss: Callable, batch: dict, options: dict, tolerance: float) -> Dump:
    """Call the user's loss for a test case; return loss and gradient in the format of a recorded training step.

    The result's `simpler()` calls the loss with simplified batches, such as one with all advantages 1.
    """
    read = set()
    value, gradient = loss_and_gradient(my_loss, batch, options, read)
    d = as_step(batch, options, value, gradient, tolerance, read)
    # a loss with a hard-coded beta ignores the option beta=0, so its KL cannot be left out
    can_leave_out_kl = "beta" in read or "ref_per_token_logps" not in read
    d.simpler = lambda: [
        case_of(my_loss, *variant, tolerance) for variant in simpler_variants(batch, options, can_leave_out_kl)
    ]
    return d


def without_value(step: Dump) -> Dump:
    """Copy a test case without the loss value, to compare only gradients."""
    d = copy(step)
    del d["loss"]
    d.usual_answers = {}
    d.simpler = lambda: map(without_value, step.simpler())
    return d


def is_finite(step: Dump) -> bool:
    return bool(step.get("loss", step["logps_gradient"]).isfinite().all())


def simpler_variants(batch: dict, options: dict, can_leave_out_kl: bool) -> Iterator[tuple[dict, dict]]:
    """Yield variants of a test case, simplest first."""
    logps = batch["per_token_logps"]
    if options["kind"] == "grpo":
        without_kl = options | {"beta": 0.0} if can_leave_out_kl else options
        advantages = batch["advantages"]
        first_step = batch | {"old_per_token_logps": logps, "ref_per_token_logps": logps}
        yield first_step | {"advantages": torch.ones_like(advantages)}, without_kl  # reveals averaging bugs
        yield first_step, without_kl  # reveals advantage bugs
        yield batch, without_kl  # reveals ratio and clip bugs
        # reveals KL bugs
        yield batch | {"old_per_token_logps": logps, "advantages": torch.zeros_like(advantages)}, options
        yield {name: pad(x, (0, 2)) if x.dim() > 1 else x for name, x in batch.items()}, options  # reveals padding bugs
    if options["kind"] == "dpo":
        pair = {name: x[:1] for name, x in batch.items()}
        first = pair["mask"].argmax(-1, keepdim=True)
        one_token = {name: x.gather(-1, first) for name, x in pair.items()}
        without_ref = one_token | {"ref_per_token_logps": torch.zeros_like(one_token["mask"])}
        yield without_ref, options | {"beta": 1.0}  # reveals bugs in answer order or margin
        yield without_ref, options  # reveals beta bugs
        yield one_token, options  # reveals reference bugs
        yield pair, options  # reveals bugs in the sum over answer tokens


def find_parts(steps: list[Dump]) -> list[list[Bug]]:
    """Find bugs that together reproduce the user's loss, such as a wrong sign and a wrong mask; [] = none found.

    Returns one list per bug: the bug, then other bugs that give the same loss.
    """
    # NaN for completions without tokens is a separate bug, which must not hide others
    finite = [step for step in steps if is_finite(step) or step["completion_mask"].any(1).all()]
    agrees = all(explains(step, {}) for step in finite)
    parts = [] if agrees else parts_of(finite)
    return [*parts, [DIVIDED_BY_0]] if len(finite) < len(steps) and (agrees or parts) else parts


def parts_of(steps: list[Dump]) -> list[list[Bug]]:
    """Search for bugs in a few test cases; add cases until the bugs reproduce the user's loss in all."""
    searched = steps[:: max(1, len(steps) // SEARCHED)]
    searched += [step for step in steps if not explains(step, {})][:1]
    by_size = sorted(searched, key=lambda step: len(step.all_rows))
    variants = chain(*zip(by_size[-1].simpler(), by_size[0].simpler(), strict=True))
    variants = [step for step in variants if is_finite(step)]
    while True:
        combination = Combination(searched, variants)
        parts = combination.run()
        wrong = [step for step in steps if parts and not explains(step, combination.deviation)]
        if not wrong:
            return parts
        searched += wrong[:: max(1, len(wrong) // SEARCHED)]


def explains(step: Dump, change: dict | None) -> bool:
    """Return whether the user's loss equals TRL's with the simulated bug `change`."""
    return error(computed("loss", step, change)) <= step.tolerance


class Combination:
    """Search for several bugs that together reproduce a user's loss.

    Args:
        steps: test cases; the search ends if TRL's loss with simulated bugs equals the user's loss in all.
        variants: simplified test cases, simplest first, in which fewer bugs change the loss.
    """

    def __init__(self, steps: list[Dump], variants: list[Dump]):
        self.steps = [*variants, *steps]
        self.num_variants = len(variants)
        # a test case with many rows, in which "next row" and "previous row" differ
        self.bugs = by_kind(possible_bugs("loss", max(steps, key=lambda step: len(step.all_rows))))
        self.deviation = {}
        self.parts = []
        self.agrees = self.agreements({})

    def run(self) -> list[list[Bug]]:
        while not self.are_explained(self.agrees):
            part = self.next_part() if len(self.parts) < PARTS else []
            if not part:
                return []
            self.parts.append(part)
            self.deviation = composed(self.deviation, part[0].change)
            self.agrees = self.agreements(self.deviation)
        return [[bug for bug in part if self.replaces(bug, part)] for part in self.parts]

    def replaces(self, bug: Bug, part: list[Bug]) -> bool:
        chosen = [bug.change if each is part else each[0].change for each in self.parts]
        change = reduce(lambda both, then: both and composed(both, then), chosen)
        return bug is part[0] or self.are_explained(self.agreements(change))

    def are_explained(self, agrees: list[bool]) -> bool:
        """Return whether all recorded test cases agree; simplified test cases may differ."""
        return all(agrees[self.num_variants :])

    def agreements(self, change: dict | None) -> list[bool]:
        return [explains(step, change) for step in self.steps]

    def next_part(self) -> list[Bug]:
        """Search for one more bug; return the best candidates."""
        left = [
            Search("loss", d, self.deviation) for d, agrees in zip(self.steps, self.agrees, strict=True) if not agrees
        ]
        simplest = left[0]
        left.sort(key=lambda search: count_wrong(search.base))
        most = left[-1]
        chosen = dict.fromkeys((simplest, most, left[0]))
        plain, scoped, fitted = self.bugs

        def plain_bugs(searches: Iterable[Search]) -> Iterator[Iterable[Bug]]:
            return ([*search.tried(plain), *search.factors()] for search in searches)

        # bugs with an unknown constant are slow to fit: try them second, in few test cases
        phases = (
            plain_bugs(chosen),
            (search.fitted(fitted) for search in chosen),
            [most.tried(scoped)],
            plain_bugs(search for search in left if search not in chosen),
        )
        return next(filter(None, map(self.best_of, phases)), [])

    def best_of(self, tables: Iterable[Iterable[Bug]]) -> list[Bug]:
        """Return the bugs that reproduce the user's loss in the most test cases.

        tables: lists of bugs, tried until a bug explains all test cases.
        """
        counts = {}  # {bug description: (number of test cases that agree with this bug, bug)}
        for bugs in tables:
            for bug in bugs:
                now = self.agreements(composed(self.deviation, bug.change))
                if all(new >= old for new, old in zip(now, self.agrees, strict=True)) and now != self.agrees:
                    counts.setdefault(bug.says, (sum(now), bug))
            if any(count == len(self.steps) for count, _ in counts.values()):
                break
        most = max((count for count, _ in counts.values()), default=0)
        return sorted((bug for count, bug in counts.values() if count == most), key=simplicity)


def simplicity(bug: Bug) -> tuple:
    """Return a sort key for simulated bugs: wrong factors, then constants with few digits, then missing terms."""
    return "factor" not in bug.change, len(f"{bug.number:g}"), "left out" not in bug.says


def find_names(steps: list[Dump]) -> tuple[list[str], list[str]]:
    """Find bugs that turn TRL's loss into the user's; return "mistake" or "design" (deliberate) per bug, and text."""
    parts = find_parts(steps)
    of_value = []
    if not parts:
        parts = find_parts([without_value(step) for step in steps])
        if parts:
            of_value = ["design: the remaining differences are in the value, which does not train"]
    lines = [line for part in parts for line in lines_of(part)]
    kinds = [part[0].kind for part in parts] + ["design"] * len(of_value)
    return kinds, [*lines, *of_value] or [NO_NAME]


def examples(steps: list[Dump]) -> list[str]:
    """Describe the test case with the largest count of wrong values."""
    return [f"  {text}" for text in where(max((computed("loss", step, {}) for step in steps), key=count_wrong))]
