"""Search for known bugs that reproduce wrong numbers in a trainer's recorded step or in a test case of a loss.

The search recomputes the numbers with one known bug at a time, and compares the results with the trainer's:

    1. simple bugs, such as "a reward is halved"
    2. bugs in one computation, such as a wrong mask only in the token count
    3. bugs with an unknown constant, such as c in "the ratio is at most c"
    4. one factor for all numbers
    5. pairs of bugs
"""

import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import permutations, product
from typing import NamedTuple

import torch
from torch import Tensor

from minivlmrl.extras.parity import model_stages, stages
from minivlmrl.extras.parity import names as table
from minivlmrl.extras.parity.change import Change, composed
from minivlmrl.extras.parity.step import DAMAGES, Dump, SearchEndedError

TOLERANCE = 1e-5  # largest relative error that counts as rounding; float32 rounds one number to about 1e-7
NAN = 1e300  # stands for NaN in the test cases of a loss, in which two NaN are equal
# {stage: (recomputed tensor, field of step.json that names the model's folder)}
LOGPS = {
    "logps": ("per_token_logps", "model"),
    "entropies": ("entropies", "model"),
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
IDS = ("tokens", "pictures", "mask")  # stages with integers, for which no factor is fitted
# what the warning "only one row differs, too few to tell causes apart" counts in these stages instead of rows
GROUPS = {"advantages": "group of completions", "loss": "row, pair or micro-batch"}
# start values of the search for an unknown number, such as the bound c in the bug "the ratio is at most c"
NUMBERS = [digit * 10.0**k for k in range(-10, 6) for digit in (1, 2, 5)] + [0.9, 0.95, 0.99, 0.999]
FEW_NUMBERS = [0.05, 0.1, 0.2, 0.5, 0.9, 0.99, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 200.0, 1000.0]
REFINED = 16  # number of bugs, those with the smallest errors, whose number is fitted to all digits
CASE_REFINED = 4  # in test cases of a loss
LIKELY_CAUSES = 8  # number of bugs that are paired with other bugs, those with the smallest errors
PAIRED = 400  # number of bugs with which each likely bug is paired
MODEL_CAUSES = 24  # in stages that need a forward pass for each bug
PAIRED_NUMBERS = 12  # with fewer wrong numbers, some pair of bugs would fit by chance


@dataclass(eq=False)
class Cause:
    """A known bug that may explain why a trainer's numbers differ from the recomputed numbers."""

    says: str
    change: dict  # {quantity: replacement}, see Change
    of: table.Quantity  # the quantity's stages, effect and source
    error: float = 0.0  # error that remains if the stage is recomputed with this bug
    parts: int = 1  # number of single bugs that this bug combines
    is_guess: bool = False  # whether a fitted number equals no count or option of the step

    def __str__(self) -> str:
        return f"{self.says} (remaining error {self.error:.0e})"

    @property
    def kind(self) -> str:
        return "design" if self.of.who and abs(self.change.get("c", math.inf)) >= self.of.least else "mistake"

    @property
    def is_limited(self) -> bool:
        """True for a bug in only some rows, tokens or parameters, and for a wrong order of rows or tokens."""
        return any(isinstance(x, tuple) for x in self.change.values())

    @property
    def is_fitted(self) -> bool:
        """True for a bug with an unknown constant, such as the bound c in "the ratio is at most c"."""
        return "{c}" in self.says or "c" in self.change

    @property
    def is_general(self) -> bool:
        is_formula = any(callable(x) and x in table.GENERAL for x in self.change.values())
        return not self.of.who and (self.is_limited or is_formula)

    @property
    def has_unlikely_number(self) -> bool:
        return "factor" not in self.change and not 0.01 <= abs(self.change.get("c", 1.0)) <= 100

    def may_be_inside(self, quantity: str) -> bool:
        """Return True if the bug can be limited to one computation, such as the baseline of the advantages."""
        # A wrong order of rows in only the baseline would fit too often by chance.
        may_be = "mask" in self.change or not self.is_limited
        return may_be and quantity in (*self.change, "") and not self.is_fitted

    def inside(self, use: str) -> "Cause":
        """Limit the bug to one computation, as in "a reward is halved, only in the baseline"."""
        change = self.change | {"inside": [*self.change.get("inside", []), use]}
        return replace(self, says=f"{self.says}, only in {use}", change=change, of=replace(self.of, about=""))

    def with_number(self, number: float, source: str = "") -> "Cause":
        """Put the number into the text of the bug, for example "all values are 8 times as large: the 8 rows"."""
        says = self.says.replace("{c}", f"{number:.5g}") + source
        return replace(self, says=says, change=self.change | {"c": number}, is_guess=not source)


FACTOR = Cause("all values are {c} times as large", {"factor": table.fitted_number}, table.FACTOR)
OWN_LENGTH = replace(FACTOR, of=table.OWN_LENGTH)


def names_of(name: str, d: Dump) -> set[str]:
    """Return the names under which names.py lists the bugs of a stage: "loss" and "dpo" for the loss of DPO."""
    return {name, d.about["kind"] if name == "loss" else "logps" if name in LOGPS else name}


def possible_causes(name: str, d: Dump) -> list[Cause]:
    """List the known bugs of a stage, such as the loss, without bugs whose tensors the step lacks."""
    names = names_of(name, d)
    result = []
    for quantity, causes in table.QUANTITIES.items():
        could_be = not quantity.read or d.reads(quantity.read)
        if names & quantity.stage_names() and quantity.needs in d and could_be:
            if quantity.unread and d.reads(quantity.unread):
                quantity = replace(quantity, who="")
            for says, change in causes.items():
                change = change if isinstance(change, dict) else {quantity.name: change}
                for text, pieces in for_each_part(says, change, d, "mask" in names):
                    result.append(Cause(text, pieces, quantity))
    # The search tries a wrong clip bound, which only one loss can have, before a wrong sign, which all can have.
    result.sort(key=lambda cause: (cause.is_general, not (names - {"loss", "logps"}) & cause.of.stage_names()))
    for of_stages, uses, quantity in table.SCOPES:
        if names & set(of_stages.split(", ")):
            alone = [cause for cause in result if cause.may_be_inside(quantity)]
            result += [cause.inside(use) for use in uses for cause in alone]
    return result


def for_each_part(says: str, change: dict, d: Dump, in_mask: bool) -> Iterator[tuple[str, dict]]:
    """Limit a bug to each part of a model or of a step, for example to the gradient of the vision tower."""
    pieces = [name for name, x in change.items() if isinstance(x, table.Limited)]
    if not pieces:
        yield says, change
    for name in pieces:
        kinds, formula = change[name]
        for kind in kinds.split():
            for part in getattr(d, kind):
                # Counted tokens are those in the mask, so a bug in the mask cannot be limited to counted tokens.
                if not (in_mask and "counted" in part):
                    yield says.replace("{}", part), change | {name: (kind, part, formula)}


def computed(name: str, d: Dump, change: dict | None) -> dict | None:
    """Recompute a stage, such as the loss. `change` is the bug to simulate, or {} for none.

    Returns None if the computation fails with this bug. Raises SearchEndedError after a search's deadline.
    """
    d.check_time()
    if change is None:
        return None
    factor = Change(d, change)("factor", 1.0)
    if "factor" in change:
        change = {piece: x for piece, x in change.items() if piece not in ("factor", "c")}
    try:
        answer = STAGES[name](d, Change(d, change))
    # A bug may make the computation fail, for example if a wrong mask leaves a DPO answer without tokens.
    except (ValueError, *DAMAGES):
        return None
    if answer and not change:
        d.usual_answers[name] = answer
    for key, (theirs, ours, unit) in (answer or {}).items():
        ours = ours * factor
        if d.case_tolerance:  # two NaN are equal, as in `formulas.distance`
            theirs, ours = theirs.nan_to_num(nan=NAN), ours.nan_to_num(nan=NAN)
            unit = ours.where(ours.abs() < NAN, 0.0).abs().max().clamp(min=1) * d.case_tolerance / TOLERANCE
        else:  # the unit is limited, so that a bug with huge numbers does not hide differences
            _, _, usual_unit = d.usual_answers.get(name, answer)[key]
            limit = 3 * usual_unit + theirs.abs().nan_to_num().max() if theirs.numel() else math.inf
            unit = torch.minimum(torch.as_tensor(unit), torch.as_tensor(limit))
        answer[key] = theirs, ours, unit
    return answer


def gaps(theirs: Tensor, ours: Tensor, unit: Tensor | float) -> Tensor:
    return ((theirs - ours).abs() / unit).nan_to_num(math.inf, math.inf)


def best_factor(theirs: Tensor, ours: Tensor) -> float:
    return float(theirs @ ours / (ours @ ours + 1e-300))


def all_gaps(answer: dict) -> Tensor:
    return torch.cat([torch.zeros(0), *(gaps(*values).flatten() for values in answer.values())])


def error(answer: dict | None) -> float:
    if answer is None:
        return math.inf
    differences = all_gaps(answer)
    return differences.max().item() if len(differences) else 0.0


def distance(answer: dict | None) -> tuple[float, float]:
    """Return two sums of the relative errors; two bugs with the same sums have the same effect."""
    if answer is None:
        return math.inf, math.inf
    differences = all_gaps(answer).clamp(max=1.0)
    return float(differences.sum()), float(differences.cumsum(0).sum())


def count_wrong(answer: dict) -> int:
    return int((all_gaps(answer) > TOLERANCE).sum())


def count_groups(name: str, answer: dict, d: Dump) -> int:
    """Count wrong numbers; all advantages of a group count only once, and so do all tokens of a row or pair."""
    if name not in GROUPS:
        return count_wrong(answer)
    labels = d["group"] if name == "advantages" else d.all_rows
    if name == "loss" and "pair" in d:  # numbered within each micro-batch
        labels = d["pair"] + len(labels) * d["micro_batch"]
    counts = []
    for theirs, ours, unit in answer.values():
        is_wrong = (gaps(theirs, ours, unit) > TOLERANCE).view(len(theirs), -1).any(1)
        is_by_row = len(is_wrong) == len(labels)
        counts.append(len(labels[is_wrong].unique()) if is_by_row else int(is_wrong.sum()))
    return max(counts)


class Place(NamedTuple):
    """Some rows or parameters of a step, such as "truncated completions" or "the vision tower"."""

    says: str  # name of the rows or parameters; "" means all
    inside: dict[str, Tensor]  # bool mask for each tensor in the stage
    rows: Tensor | None = None

    def of(self, answer: dict | None) -> dict | None:
        """Ignore errors elsewhere by replacing the trainer's numbers there with the recomputed ones."""
        if answer is None:
            return None
        values = {key: (*answer[key], mask) for key, mask in self.inside.items()}
        return {key: (theirs.where(mask, ours), ours, unit) for key, (theirs, ours, unit, mask) in values.items()}

    def distance(self, answer: dict | None) -> float:
        return distance(self.of(answer))[0]


def find_places(name: str, answer: dict, d: Dump) -> list[Place]:
    """List the whole step, and each part that contains all wrong numbers, such as the truncated completions."""
    places = [Place("", {key: torch.tensor(True) for key in answer})]
    row_sets = d.rollout_sets if name == "advantages" else d.row_sets
    for says, chosen in (d.parts if name in BY_PARAMETER else row_sets).items():
        if name in BY_PARAMETER:
            inside = {key: torch.tensor(bool(chosen(key))) for key in answer}
        else:
            by_row = {key: ours.dim() for key, (_, ours, _) in answer.items() if len(ours) == len(chosen)}
            inside = {key: chosen.view(-1, *[1] * (dim - 1)) for key, dim in by_row.items()}
        place = Place(says, inside, chosen)
        outside = Place("", {key: ~mask for key, mask in inside.items()})
        if error(place.of(answer)) > TOLERANCE >= error(outside.of(answer)):
            places.append(place)
    return places


class Search:
    """Searches for bugs that explain a trainer's wrong numbers in one stage, such as the loss.

    If all wrong numbers are in one part, such as the truncated completions, bugs in only this part are also tried.

    Args:
        deviation: bugs that were found earlier and stay active in all recomputed numbers.
    """

    def __init__(self, name: str, d: Dump, deviation: dict | None = None):
        self.name = name
        self.d = d
        self.deviation = deviation or {}
        self.explained = []  # bugs found so far, which are kept if the time is over
        self.has_ended = False  # whether the time limit has ended the search
        self.base = self.answer({})
        self.sources = {} if d.case_tolerance else known_numbers(d, next(iter(self.base)))
        self.places = find_places(name, self.base, d)
        self.by_distance = {distance(self.base): None}

    def answer(self, change: dict) -> dict | None:
        return computed(self.name, self.d, composed(self.deviation, change))

    def run(self, causes: list[Cause]):
        factors = self.factors()
        # Bugs that need no new forward pass, such as rounded log-probabilities, come first.
        causes = sorted(causes, key=lambda cause: not cause.change.keys() <= model_stages.AFTER_FORWARD)
        plain, limited, fitted = by_kind(causes)
        try:
            for phase, some in ((self.tried, plain), (self.tried, limited), (self.fitted, fitted)):
                if not any(cause.parts == 1 for cause in self.explained):
                    for cause in phase(some):
                        self.explained.append(cause)
        finally:
            self.explained += factors  # last, because a factor says less than other bugs
        if not self.explained and (self.name in LOGPS or count_wrong(self.base) >= PAIRED_NUMBERS):
            for cause in self.tried(self.pairs()):
                self.explained.append(cause)

    def pairs(self) -> list[Cause]:
        """Return pairs of bugs. Only bugs that alone leave small errors are paired."""
        count = MODEL_CAUSES if self.name in THROUGH_A_MODEL else PAIRED
        near = [self.by_distance[key] for key in sorted(self.by_distance) if self.by_distance[key]][:count]
        result = []
        for first, then in product(near[:LIKELY_CAUSES], near):
            if first is not then and (change := composed(first.change, then.change)):
                of = first.of if first.kind == "mistake" else then.of
                result.append(Cause(f"{first.says}; and {then.says}", change, of, parts=2))
        return result

    def tried(self, causes: list[Cause]) -> Iterator[Cause]:
        """Yield each bug that reproduces the trainer's numbers."""
        for cause in causes:
            answer = self.answer(cause.change)
            key = distance(answer)
            for place in self.places[: 1 if key in self.by_distance or cause.parts > 1 else None]:
                yield from self.confined(answer, cause, place)
            if answer and cause.parts == 1 and "inside" not in cause.change:
                self.by_distance.setdefault(key, cause)

    def confined(self, answer: dict | None, cause: Cause, place: Place) -> list[Cause]:
        """Limit the bug to one place, such as the truncated completions; return [] if wrong numbers remain."""
        d = self.d
        if place.says:
            cause = replace(cause, says=f"{cause.says}, only for {place.says}", parts=2)
        explained = fit(place.of(answer), cause, d)
        if explained and place.says and "loss" in answer and d.about["kind"] != "dpo":
            rows = place.rows[:, None]
            theirs, ours, unit = computed("loss", d, cause.change | {"weights": rows})["loss"]
            _, others, other_unit = computed("loss", d, {"weights": ~rows})["loss"]
            return fit({"loss": (theirs, ours + others, unit + other_unit)}, cause, d)
        return explained

    def is_few(self, place: Place) -> bool:
        """Return True if fewer than two rows or groups are wrong, which is too few to fit a number."""
        return not self.d.case_tolerance and count_groups(self.name, place.of(self.base), self.d) < 2

    def factors(self) -> list[Cause]:
        """Return bugs such as "all values are 8 times as large"."""
        result = []
        if self.name in IDS:
            return result
        has_own_length = self.d.about.get("loss_type") == "dr_grpo" and not self.d.reads("max_completion_length")
        for cause in count_causes(self.d) if self.d.case_tolerance else ():
            result += self.confined(self.answer(cause.change), cause, self.places[0])
        for place in self.places:
            values = [(*self.base[key], mask) for key, mask in place.inside.items()]
            pairs = [[(x / unit)[mask.expand_as(x)] for x in (theirs, ours)] for theirs, ours, unit, mask in values]
            theirs, ours = (torch.cat(x) for x in zip(*pairs, strict=True))
            best = best_factor(theirs, ours)
            numbers = [min(self.sources, key=lambda number, best=best: abs(number - best))] if self.sources else []
            if count_wrong(place.of(self.base)) > 2:  # two opposite advantages always match some factor
                numbers += [float(f"{best:.{digits}g}") for digits in (1, 2, 3)] + [best]
            for number in numbers:
                if number == 0 and (theirs.any() or not self.sources):
                    continue  # small values are not zero
                factor = OWN_LENGTH if has_own_length else FACTOR
                cause = factor.with_number(number, self.sources.get(number, ""))
                if found := self.confined(self.answer(cause.change), cause, place):
                    result += found
                    break
        return result

    def fitted(self, causes: list[Cause]) -> Iterator[Cause]:
        """Fit each bug's unknown constant, such as a clip bound; yield bugs that reproduce the trainer's numbers."""
        near = []
        usual = [(place, place.distance(self.base), self.is_few(place)) for place in self.places]
        for cause in causes:
            # A wrong factor is often a count of the step, such as the number of rows.
            sources = self.sources if any(x is table.times for x in cause.change.values()) else {}
            gaps = defaultdict(list)  # for each place, the distance with each number
            for number in [*(FEW_NUMBERS if self.d.case_tolerance else NUMBERS), *sources]:
                answer = self.answer(cause.with_number(number).change)
                for i, place in enumerate(self.places):
                    gaps[i].append((place.distance(answer), number))
            for i, (place, usual_gap, is_few) in enumerate(usual):
                gap, number = min(gaps[i])
                is_known = number in sources or number == 1  # 1 is a likely bound
                if gap <= 0.9 * usual_gap and (is_known or not is_few):
                    near.append((gap, len(near), number, cause, place, sources, is_few))
        count = CASE_REFINED if self.d.case_tolerance else REFINED
        nearest = sorted(near, key=lambda fit: fit[:2])[:count]
        for _, _, start, cause, place, sources, is_few in sorted(nearest, key=lambda fit: fit[1]):

            def gap_with(number: float, cause=cause, place=place) -> float:
                return place.distance(self.answer(cause.with_number(number).change))

            for number in [start] if is_few else numbers_near(start, gap_with):
                named = cause.with_number(number, sources.get(number, ""))
                if found := self.confined(self.answer(named.change), named, place):
                    yield from found
                    break


def by_kind(causes: list[Cause]) -> tuple[list[Cause], list[Cause], list[Cause]]:
    simple = [cause for cause in causes if not cause.is_fitted]
    plain = [cause for cause in simple if "inside" not in cause.change]
    return (
        plain,
        [cause for cause in simple if "inside" in cause.change],
        [cause for cause in causes if cause.is_fitted],
    )


def find_causes(name: str, d: Dump, seconds: float = math.inf) -> Search:
    """Search for the simplest known bugs that reproduce the trainer's numbers, for at most `seconds` of CPU time."""
    search = Search(name, d)
    answer = search.base
    # Many bugs could explain one wrong token id or one learning rate, so the search needs at least two.
    if (name in IDS and count_wrong(answer) < 2) or (name == "schedule" and len(all_gaps(answer)) < 2):
        return search
    # A bug fits if at most 1 % of the original error remains; this limit is kept between 1e-5 and 3e-5.
    d.tolerance = min(max(error(answer) / 100, TOLERANCE), 3 * TOLERANCE)
    # Forward passes are slow: the search recomputes only the row with the largest error, and later all rows.
    if name in LOGPS:
        [values] = answer.values()
        d.part = gaps(*values).amax(1).argmax().view(1)
        search = Search(name, d)
    d.deadline = time.thread_time() + seconds
    try:
        search.run(possible_causes(name, d))
    except SearchEndedError:
        search.has_ended = True
    d.deadline = math.inf
    d.part = None
    explained = search.explained
    if name in LOGPS:
        explained = [again for cause in explained for again in fits(name, d, cause)]
    fewest = min((cause.parts for cause in explained), default=1)
    explained = [cause for cause in explained if cause.parts == fewest]
    limit = max(10 * min((cause.error for cause in explained), default=0.0), TOLERANCE / 100)
    # Bugs with an unlikely number, such as 0.0001, are reported last.
    search.explained = sorted(
        (cause for cause in explained if cause.error <= limit), key=lambda cause: cause.has_unlikely_number
    )
    return search


def fits(name: str, d: Dump, cause: Cause) -> list[Cause]:
    return fit(computed(name, d, cause.change), cause, d)


def fit(answer: dict | None, cause: Cause, d: Dump) -> list[Cause]:
    remaining = error(answer)
    return [replace(cause, error=remaining)] if remaining <= d.tolerance else []


def numbers_near(number: float, gap_with: Callable[[float], float]) -> Iterator[float]:
    """Yield a start value, then the best number near it with 1, 2, 3 and all digits: 0.2, 0.23, 0.234, 0.2341."""
    yield number
    gap_with = cache(gap_with)
    number = min((number * 1.1**power for power in range(-9, 10)), key=gap_with)
    step = number / 10
    for _ in range(35):
        number = min((number, number - step, number + step), key=gap_with)
        step *= 0.6
    yield from (float(f"{number:.{digits}g}") for digits in (1, 2, 3))
    yield number


def count_causes(d: Dump) -> list[Cause]:
    """List bugs such as "all values are divided by the number of rows"."""
    causes = []
    for name, (function, keys) in (table.FACTORS | table.COUNTS).items():
        if (keys and "loss" not in keys.split("|")) or function(d) in (None, 0, 1):
            continue
        number = f"the number of {name}" if name in table.COUNTS else name
        for word, sign in (("multiplied", 1), ("divided", -1)):
            change = {"factor": lambda s, function=function, sign=sign: (function(s.step) or 1) ** sign}
            causes.append(Cause(f"all values are {word} by {number}", change, table.FACTOR))
    return causes


def known_numbers(d: Dump, key: str) -> dict[float, str]:
    """Return {number: its name} for the step's options, counts and ratios, such as {8.0: ": the 8 rows"}."""
    factors, counts = (
        [(function(d), says) for says, (function, keys) in table.items() if re.match(keys, key)]
        for table in (table.FACTORS, table.COUNTS)
    )
    units = defaultdict(list)  # names of the quantities that have each count
    for count, unit in counts:
        if count not in (None, 0, 1):
            units[count].append(unit)
    texts = {count: f"the {count:g} {' or '.join(names)}" for count, names in units.items()}
    singles = [(0.0, "exactly zero"), *((number, says) for number, says in factors if number not in (None, 0, 1))]
    for count, text in texts.items():
        singles += [(count, text), (1 / count, f"1 over {text}")]
    ratios = [(a / b, f"{texts[a]} over {texts[b]}") for a, b in permutations(texts, 2)]
    # Ratios of small counts, such as 3 / 4, are left out: a factor could equal such a ratio by chance.
    trusted = {rounded_key(a / b) for a, b in permutations(texts, 2) if min(a, b) > 10}
    ratios = [(number, text) for number, text in ratios if rounded_key(number) in trusted]
    return joined_texts(ratios) | joined_texts(singles)  # a single count is simpler than a ratio


def joined_texts(named_numbers: list[tuple[float, str]]) -> dict[float, str]:
    """Join the names of equal numbers: 8 rows and 8 pairs give {8.0: ": the 8 rows or the 8 pairs"}."""
    texts = defaultdict(list)
    for number, says in named_numbers:
        texts[rounded_key(number)].append(says)
    return {number: f": {' or '.join(dict.fromkeys(says))}" for number, says in texts.items()}


def rounded_key(number: float) -> float:
    """Round a number to 12 digits, so that 0.1 + 0.2 and 0.3 become the same dictionary key."""
    return float(f"{number:.12g}")
