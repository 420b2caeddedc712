"""Search for known bugs that explain wrong numbers in a recorded step, or in a loss test case.

A stage of a step, such as advantages, loss or gradients, is recomputed with one simulated bug at a time, and compared
with the recorded numbers. Kinds of bugs, likeliest first:

    1. simple bugs, such as "a reward is halved"
    2. bugs in one part of the loss, such as a mask that is wrong only in the token count
    3. bugs with an unknown constant, such as c in "the ratio is at most c"
    4. a wrong scale, such as "all values are 8 times as large"
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minivlmrl.extras.parity import model_stages, stages
from minivlmrl.extras.parity import names as table
from minivlmrl.extras.parity.change import Change, composed, with_number
from minivlmrl.extras.parity.progress import with_bar
from minivlmrl.extras.parity.scales import known_numbers
from minivlmrl.extras.parity.step import DAMAGES, Dump, SearchEndedError

TOLERANCE = 1e-5  # larger relative errors are not rounding; one float32 rounding is about 1e-7
# {stage: (log-prob tensor, step.json field with the model folder)}
LOGPS = {
    "logps": ("per_token_logps", "model"),
    "logps of old": ("old_per_token_logps", "old_model"),
    "logps of sampler": ("sampler_logps", "old_model"),
    "logps of reference": ("ref_per_token_logps", "ref_model"),
}
STAGES = {
    "advantages": stages.advantages,
    "rows": stages.rows,
    "tokens": stages.tokens,
    "pictures": stages.pictures,
    "mask": stages.mask,
    **{name: partial(model_stages.logps, *arguments) for name, arguments in LOGPS.items()},
    "loss": stages.loss,
    "gradients": model_stages.gradients,
    "clip": model_stages.clip,
    "update": model_stages.update,
    "schedule": model_stages.schedule,
}
THROUGH_A_MODEL = (*LOGPS, "gradients")
BY_PARAMETER = ("gradients", "clip", "update")
SHOWN = 4  # maximum number of bugs to print
IDS = ("tokens", "pictures", "mask")  # stages with integers, such as token ids: no search for wrong factors
# start values for an unknown constant, such as a clip bound
NUMBERS = [digit * 10.0**k for k in range(-10, 6) for digit in (1, 2, 5)] + [0.9, 0.95, 0.99, 0.999]
FEW_NUMBERS = [0.05, 0.1, 0.2, 0.5, 0.9, 0.99, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 200.0, 1000.0]
REFINED = 16  # maximum number of bugs whose unknown constant is fitted to all digits
CASE_REFINED = 4  # maximum number of bugs fitted to all digits in a loss test case


@dataclass(eq=False)
class Bug:
    """Bug that can be simulated, such as "the rewards are halved"."""

    says: str
    change: dict  # simulated bug, {quantity: replacement}, see Change
    of: table.Target  # entry in bugs.json, with effect and source
    error: float = 0.0  # largest relative error if this bug is simulated
    parts: int = 1  # 2 = bug in only some rows, which is less likely
    number: float = 0.0  # fitted constant in the bug; 0 = none

    @property
    def kind(self) -> str:
        return "design" if self.of.used_by and abs(self.number or math.inf) >= self.of.threshold else "mistake"

    @property
    def is_scoped(self) -> bool:
        """True for a bug with wrong rows or tokens."""
        return any(isinstance(x, tuple) for x in self.change.values())

    @property
    def is_fitted(self) -> bool:
        """True for a bug with an unknown constant {c}."""
        return "{c}" in self.says

    @property
    def is_general(self) -> bool:
        is_formula = any(callable(x) and x in table.GENERAL_FORMULAS for x in self.change.values())
        return not self.of.used_by and (self.is_scoped or is_formula)

    def may_be_inside(self, target: str) -> bool:
        """Return whether to test the bug in only one part of the loss, such as the token count."""
        # wrong rows in only one part of the loss would often reproduce the recorded numbers by chance
        may_be = "mask" in self.change or not self.is_scoped
        return may_be and target in (*self.change, "") and not self.is_fitted

    def inside(self, use: str) -> "Bug":
        """Limit the bug to one part of the loss, such as the token count."""
        change = self.change | {"inside": [*self.change.get("inside", []), use]}
        return replace(self, says=f"{self.says}, only in {use}", change=change, of=replace(self.of, about=""))

    def with_number(self, number: float) -> "Bug":
        """Fill in the constant {c} of a bug, such as 8 in "all values are {c} times as large"."""
        change = {name: with_number(x, number) for name, x in self.change.items()}
        return replace(self, says=self.says.replace("{c}", f"{number:.5g}"), change=change, number=number)


RATE = table.TARGETS["factor: the effective learning rate changes"]
FACTOR = Bug("all values are {c} times as large", {"factor": "{c}"}, RATE)
OWN_LENGTH = replace(FACTOR, of=replace(RATE, used_by="Dr. GRPO losses with a constant length"))


def names_of(name: str, d: Dump) -> set[str]:
    """Return names that bugs.json has for a stage: {"loss", "dpo"} for the loss in a DPO step."""
    return {name, d.about["kind"] if name == "loss" else "logps" if name in LOGPS else name}


def possible_bugs(name: str, d: Dump) -> list[Bug]:
    """List known bugs that may affect a stage, such as "loss"; skip bugs in missing tensors."""
    names = names_of(name, d)
    result = []
    for key, target in table.TARGETS.items():
        if target.about == "clipping" and d.about.get("loss", {}).get("loss_type") in ("sapo", "vespo"):
            continue
        if names & target.stage_names() and target.needs in d and (not target.read or d.reads(target.read)):
            if target.unread and d.reads(target.unread):
                target = replace(target, used_by="")
            for says, change in table.BUGS[key].items():
                change = change if isinstance(change, dict) else {target.name: change}
                for text, pieces in for_each_part(says, change, d, "mask" in names):
                    result.append(Bug(text, pieces, target))
    result.sort(key=lambda bug: (bug.is_general, not (names - {"loss", "logps"}) & bug.of.stage_names()))
    for of_stages, uses, target in table.SCOPES:
        if names & set(of_stages.split(", ")):
            alone = [bug for bug in result if bug.may_be_inside(target)]
            result += [bug.inside(use) for use in uses for bug in alone]
    return result


def for_each_part(says: str, change: dict, d: Dump, in_mask: bool) -> Iterator[tuple[str, dict]]:
    """Yield (description, bug) with each row or token set for "{}", as in "the mask also counts {}"."""
    pieces = [name for name, x in change.items() if isinstance(x, table.Scoped)]
    if not pieces:
        yield says, change
    for name in pieces:
        kinds, formula = change[name]
        for kind in kinds.split():
            for part in getattr(d, kind):
                # skip mask bugs in "the last counted tokens": the mask decides which tokens are counted
                if not (in_mask and "counted" in part):
                    yield says.replace("{}", part), change | {name: (kind, part, formula)}


def computed(name: str, d: Dump, change: dict | None) -> Any:
    """Recompute a stage with a simulated bug ({} = none); return None if the computation fails."""
    d.check_time()
    if change is None:
        return None
    bug = Change(d, change)
    factor = bug("factor", 1.0)
    bug.pop("factor", None)
    try:
        answer = STAGES[name](d, bug)
    except (ValueError, *DAMAGES):
        return None
    if answer and not bug:
        d.usual_answers[name] = answer
    for key, (theirs, ours, unit) in (answer or {}).items():
        ours = ours * factor
        if d.case_tolerance:  # in a loss test case, errors are relative to max(1, largest recomputed number)
            unit = ours.nan_to_num().abs().max().clamp(min=1) * d.case_tolerance / TOLERANCE
        else:  # limit the divisor `unit`: huge numbers from a simulated bug would make all relative errors small
            _, _, usual_unit = d.usual_answers.get(name, answer)[key]
            limit = 3 * usual_unit + theirs.abs().nan_to_num().max() if theirs.numel() else math.inf
            unit = torch.minimum(torch.as_tensor(unit), torch.as_tensor(limit))
        answer[key] = theirs, ours, unit
    return answer


def gaps(theirs: Tensor, ours: Tensor | float, unit: Tensor | float) -> Tensor:
    return ((theirs - ours).abs() / unit).nan_to_num(math.inf, math.inf)


def all_gaps(answer: dict) -> Tensor:
    return torch.cat([torch.zeros(0), *(gaps(*values).flatten() for values in answer.values())])


def error(answer: dict | None) -> float:
    if answer is None:
        return math.inf
    differences = all_gaps(answer)
    return differences.max().item() if len(differences) else 0.0


def distance(answer: dict | None) -> float:
    """Sum the relative errors, each clamped to 1."""
    return math.inf if answer is None else float(all_gaps(answer).clamp(max=1.0).sum())


def count_wrong(answer: dict) -> int:
    return int((all_gaps(answer) > TOLERANCE).sum())


def count_groups(name: str, answer: dict, d: Dump) -> int:
    """Count rows with wrong numbers, or groups of completions if the stage is "advantages"."""
    labels = d["group"] if name == "advantages" else d.all_rows
    counts = []
    for theirs, ours, unit in answer.values():
        rows = (gaps(theirs, ours, unit) > TOLERANCE).nonzero()[:, 0]
        counts.append(len((labels[rows] if len(theirs) == len(labels) else rows).unique()))
    return max(counts)


class Region(NamedTuple):
    """Set of rows that may have a bug, such as all truncated completions."""

    says: str  # description of the rows, "" = all rows
    inside: dict[str, Tensor]  # {tensor name: mask, True in the set's rows}
    rows: Tensor | None = None  # mask (n,), None = all rows

    def of(self, answer: dict | None) -> Any:
        """Make errors outside the row set 0: replace the trainer's numbers by recomputed ones there."""
        if answer is None:
            return None
        result = {}
        for key, mask in self.inside.items():
            theirs, ours, unit = answer[key]
            result[key] = theirs.where(mask, ours), ours, unit
        return result


def find_regions(name: str, answer: dict, d: Dump) -> list[Region]:
    """List row sets that include every row with a wrong number."""
    regions = [Region("", {key: torch.tensor(True) for key in answer})]
    if name in ("advantages", *BY_PARAMETER):  # the stage compares rollout completions or parameters, not rows
        return regions
    for says, rows in d.row_sets.items():
        masks = {}
        for key, (_, ours, _) in answer.items():
            if len(ours) == len(rows):
                masks[key] = rows.view(-1, *[1] * (ours.dim() - 1))
        region = Region(says, masks, rows)
        outside = Region("", {key: ~mask for key, mask in masks.items()})
        if error(region.of(answer)) > TOLERANCE >= error(outside.of(answer)):
            regions.append(region)
    return regions


class Search:
    """Search for bugs that explain wrong numbers in one stage, such as "loss".

    If all wrong numbers are in one row set, such as truncated completions, bugs in only these rows are also tried.

    Args:
        name: stage.
        deviation: bugs found earlier; every bug tried is simulated together with them.
    """

    def __init__(self, name: str, d: Dump, deviation: dict | None = None):
        self.name = name
        self.d = d
        self.deviation = deviation or {}
        self.explained = []
        self.has_ended = False
        self.base = self.answer({})
        self.regions = find_regions(name, self.base, d)

    def answer(self, change: dict) -> Any:
        return computed(self.name, self.d, composed(self.deviation, change))

    def run(self, bugs: list[Bug]):
        factors = self.factors()
        # first try bugs that need no new forward pass, such as rounded log-probs
        bugs = sorted(bugs, key=lambda bug: not bug.change.keys() <= model_stages.AFTER_FORWARD)
        plain, scoped, fitted = by_kind(bugs)
        if any(bug.parts == 1 and not bug.number for bug in factors):
            fitted = []  # a known factor, such as the row count, is likelier than an unknown constant
        try:
            for phase, some in ((self.tried, plain), (self.tried, scoped), (self.fitted, fitted)):
                if not any(bug.parts == 1 for bug in self.explained):
                    self.explained.extend(phase(some))  # bugs found before a timeout are kept
        finally:
            self.explained += factors  # wrong scale factors come last: other bugs tell more about the cause

    def tried(self, bugs: list[Bug]) -> Iterator[Bug]:
        """Yield bugs whose simulation gives the recorded numbers."""
        for bug in with_bar("causes", bugs):
            answer = self.answer(bug.change)
            for region in self.regions:
                yield from self.confined(answer, bug, region)

    def confined(self, answer: Any, bug: Bug, region: Region) -> list[Bug]:
        """Return [bug] if simulating the bug only in rows of `region` gives the recorded numbers, else []."""
        d = self.d
        if region.says:
            bug = replace(bug, says=f"{bug.says}, only for {region.says}", parts=2)
        explained = fit(region.of(answer), bug, d)
        if explained and region.rows is not None and "loss" in answer and d.about["kind"] != "dpo":
            rows = region.rows[:, None]
            theirs, ours, unit = computed("loss", d, bug.change | {"weights": rows})["loss"]
            _, others, other_unit = computed("loss", d, {"weights": ~rows})["loss"]
            return fit({"loss": (theirs, ours + others, unit + other_unit)}, bug, d)
        return explained

    def factors(self) -> list[Bug]:
        """Find bugs that scale all numbers in a stage, such as "all values are divided by the number of rows"."""
        if self.name in IDS:
            return []
        d = self.d
        result = [*self.tried(count_bugs(self.name, d))]
        if result and not d.case_tolerance:
            return result
        has_own_length = d.about.get("loss_type") == "dr_grpo" and not d.reads("max_completion_length")
        for region in self.regions:
            if count_wrong(region.of(self.base)) <= 2:
                continue  # one factor fits two numbers by chance, such as the advantages 1 and -1 in a group of two
            product = square = 0.0
            for key, mask in region.inside.items():
                theirs, ours, unit = self.base[key]
                ours = (ours / unit).where(mask, 0.0)
                product += (theirs / unit * ours).sum()
                square += ours.square().sum()
            best = float(product / (square + 1e-300))  # least squares
            for digits in (1, 2, 3, 17):
                bug = (OWN_LENGTH if has_own_length else FACTOR).with_number(float(f"{best:.{digits}g}"))
                if found := self.confined(self.answer(bug.change), bug, region):
                    result += found
                    break
        return result

    def fitted(self, bugs: list[Bug]) -> Iterator[Bug]:
        """Fit the constant of each bug, such as a clip bound; yield bugs that reproduce the recorded numbers."""
        d = self.d
        numbers, count = (FEW_NUMBERS, CASE_REFINED) if d.case_tolerance else (NUMBERS, REFINED)
        near = []
        for region in self.regions:
            base = region.of(self.base)
            # a single wrong row would match bugs with a fitted constant by chance
            if not d.case_tolerance and d.part is None and count_groups(self.name, base, d) < 2:
                continue
            usual_gap = distance(base)
            for bug in with_bar("causes with a number", bugs):

                def gap_with(number: float, bug=bug, region=region) -> float:
                    return distance(region.of(self.answer(bug.with_number(number).change)))

                gap, start = min((gap_with(number), number) for number in numbers)
                if gap <= 0.9 * usual_gap:
                    near.append((gap, len(near), start, bug, region, gap_with))
        nearest = sorted(near, key=lambda fit: fit[:2])[:count]
        for _, _, start, bug, region, gap_with in sorted(nearest, key=lambda fit: fit[1]):
            for number in numbers_near(start, gap_with):
                named = bug.with_number(number)
                if found := self.confined(self.answer(named.change), named, region):
                    yield from found
                    break


def lines_of(bugs: Sequence[Bug]) -> list[str]:
    """Describe the first bug, and list alternatives."""
    first, *others = bugs[:SHOWN]
    lines = [f"{first.kind}: {first.says}", *(f"  or: {bug.says}" for bug in others)]
    about = {"effect": first.of.effect, "source": first.of.source}
    if first.kind == "design":
        about["done by"] = first.of.used_by
    return [*lines, *(f"  {name}: {text}" for name, text in about.items() if text)]


def by_kind(bugs: list[Bug]) -> tuple[list[Bug], list[Bug], list[Bug]]:
    simple = [bug for bug in bugs if not bug.is_fitted]
    plain = [bug for bug in simple if "inside" not in bug.change]
    return (plain, [bug for bug in simple if "inside" in bug.change], [bug for bug in bugs if bug.is_fitted])


def find_bugs(name: str, d: Dump, seconds: float = math.inf) -> Search:
    """Find the simplest known bugs whose simulation gives a stage's recorded numbers, within `seconds` of CPU time."""
    search = Search(name, d)
    answer = search.base
    # skip the search: a single wrong learning rate would match many bugs by chance
    if name == "schedule" and len(all_gaps(answer)) < 2:
        return search
    # allowed error with a simulated bug: 1 % of the error without the bug, clamped to 1e-5 and 3e-5
    d.tolerance = min(max(error(answer) / 100, TOLERANCE), 3 * TOLERANCE)
    # forward passes are slow: search in the row with the largest error, then check all rows
    if name in LOGPS:
        [values] = answer.values()
        d.part = gaps(*values).amax(1).argmax().view(1)
        search = Search(name, d)
    d.deadline = time.thread_time() + seconds
    try:
        bugs = possible_bugs(name, d)
        # a single wrong token id would match many bugs by chance: try only padding bugs
        if name in IDS and count_wrong(answer) < 2:
            bugs = [bug for bug in bugs if bug.of.about == "padding"]
        search.run(bugs)
    except SearchEndedError:
        search.has_ended = True
    d.deadline = math.inf
    d.part = None
    explained = search.explained
    if name in LOGPS:
        explained = [again for bug in explained for again in fits(name, d, bug)]
    fewest = min((bug.parts for bug in explained), default=1)
    explained = [bug for bug in explained if bug.parts == fewest]
    limit = max(10 * min((bug.error for bug in explained), default=0.0), TOLERANCE / 100)
    search.explained = [bug for bug in explained if bug.error <= limit]
    return search


def fits(name: str, d: Dump, bug: Bug) -> list[Bug]:
    return fit(computed(name, d, bug.change), bug, d)


def fit(answer: dict | None, bug: Bug, d: Dump) -> list[Bug]:
    remaining = error(answer)
    return [replace(bug, error=remaining)] if remaining <= d.tolerance else []


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


def count_bugs(stage: str, d: Dump) -> list[Bug]:
    bugs = []
    for name in known_numbers(d, stage):
        for word, sign in (("multiplied", 1), ("divided", -1)):
            change = {"factor": lambda s, name=name, sign=sign: known_numbers(s.step, stage).get(name, 1) ** sign}
            bugs.append(Bug(f"all values are {word} by {name}", change, RATE))
    return bugs
