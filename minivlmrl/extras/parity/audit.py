"""Recompute a recorded optimizer step, and search the causes of its differences.

Each stage is recomputed from the trainer's own inputs to that stage, so one mistake is reported only once. For a stage
that differs, the search tries a fitted factor, then known causes one at a time, then the most promising
pairs. A search ends after some seconds with the causes that it has found.
"""

import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby, permutations, product
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from minivlmrl.errors import error_context
from minivlmrl.extras.parity import model_stages, stages, step_format
from minivlmrl.extras.parity import names as table
from minivlmrl.extras.parity.change import Change
from minivlmrl.extras.parity.step import DAMAGES, Dump, SearchEndedError, read

# Largest error that counts as agreement, relative to the summed terms. It is a small multiple of float32's rounding
# error.
TOLERANCE = 1e-5
# stages that need a model's forward: (dumped tensor, field in step.json with the model's folder)
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
SHOWN = 4  # maximum number of printed explanations per stage
LIKELY_CAUSES = 8  # single causes closest to the trainer's numbers, each tried in pairs with other causes
PAIRED = 400  # causes with which each likely cause is tried as a pair
MODEL_CAUSES = 24  # used instead of PAIRED for stages in which each cause needs a model's forward
PAIRED_NUMBERS = 12  # pairs of causes are tried only if at least this many numbers differ
# initial values in the search for a cause's free number; the last ones are discounts
NUMBERS = [digit * 10.0**k for k in range(-10, 6) for digit in (1, 2, 5)] + [0.9, 0.95, 0.99, 0.999]
SECONDS = 30.0  # time after which the search for a stage's causes ends in commands
# pieces in a change that apply to a model's outputs, so that the forward needs no repetition
AFTER_FORWARD = {"logps", "mode", "inside"}
# names for the groups that count_groups counts
GROUPS = {"advantages": "group of completions", "loss": "row, pair or micro-batch"}
# progress bar for a search, shown only after 20 seconds
searched = partial(tqdm, delay=20, leave=False, disable=None)


@dataclass(eq=False)
class Cause:
    """A possible mistake: a way in which a stage may deviate from its definition."""

    says: str
    change: dict  # quantities in the stage's definition that this cause replaces, see Change
    of: table.Quantity  # for example with the stages and the effect
    error: float = 0.0  # error that remains if the stage is recomputed with this cause
    parts: int = 1  # how many single causes this cause combines
    is_guess: bool = False  # whether this cause has a fitted number that no count or option has

    def __str__(self) -> str:
        return f"{self.says} (remaining error {self.error:.0e})"

    @property
    def kind(self) -> str:
        """Return "design" for a choice that some project makes on purpose, else "mistake"."""
        return "design" if self.of.who else "mistake"

    def is_limited(self) -> bool:
        """Return whether this cause uses other rows or tokens, or affects only part of the step."""
        return any(isinstance(x, tuple) for x in self.change.values())

    def is_fitted(self) -> bool:
        """Return whether this cause has a free number that is fitted to the trainer's values."""
        return "{c}" in self.says or "c" in self.change

    def is_general(self) -> bool:
        """Return whether this cause only says that a quantity is, for example, halved or taken from another row."""
        if self.of.who:
            return False
        return self.is_limited() or any(callable(x) and x in table.GENERAL for x in self.change.values())

    def has_unlikely_number(self) -> bool:
        """Return whether a number was fitted that is far from 1 and has no known origin."""
        return "factor" not in self.change and not 0.01 <= abs(self.change.get("c", 1.0)) <= 100

    def may_be_inside(self, quantity: str) -> bool:
        """Return whether this cause can be limited to one use of `quantity`; "" means any quantity."""
        # With few numbers, values from other rows or tokens match by chance, except in a mask, which has many numbers.
        may_be = "mask" in self.change or not self.is_limited()
        return may_be and quantity in (*self.change, "") and not self.is_fitted()

    def inside(self, use: str) -> "Cause":
        """Return a copy that affects a quantity only in one use, such as a wrong reward only in the baseline."""
        change = self.change | {"inside": [*self.change.get("inside", []), use]}
        return replace(self, says=f"{self.says}, only in {use}", change=change, of=replace(self.of, about=""))

    def rank(self) -> int:
        """Return the order in which causes are tried, because simpler causes are tried first.

        A cause with a fitted number has rank 3. For any other cause, the rank counts the uses to which it is limited.
        """
        return 3 if self.is_fitted() else len(self.change.get("inside", []))

    def needs_forward(self) -> bool:
        """Return whether log-probabilities need another forward for this cause."""
        return not self.change.keys() <= AFTER_FORWARD

    def with_number(self, number: float, source: str = "") -> "Cause":
        """Return a copy with a fitted number, and a text that names where the number may come from."""
        says = self.says.replace("{c}", f"{number:.5g}") + source
        return replace(self, says=says, change=self.change | {"c": number}, is_guess=not source)


class Place(NamedTuple):
    """A subset of a stage's numbers: all numbers, some rows, or a part of the model."""

    says: str  # the subset's name; "" means all numbers
    inside: dict[str, Tensor]  # bool mask for each tensor in the stage
    rows: Tensor | None = None


@dataclass
class Finding:
    """A compared stage, which agrees if its error is at most TOLERANCE."""

    stage: str
    error: float
    numbers: int
    where: Sequence[str] = ()  # text lines: how many numbers differ, then examples
    # causes with the fewest parts that explain the stage; empty if no known cause explains it
    explained: Sequence[Cause] = ()
    again: bool = False  # whether an earlier stage has reported the same cause already
    groups: int = 0  # how many independent groups differ, see count_groups
    search: "Search | None" = None  # None if no search was needed

    @property
    def ok(self) -> bool:
        return self.error <= TOLERANCE

    def doubts(self) -> list[str]:
        """Return sentences about why the explanations, or their absence, may be wrong."""
        if self.ok or self.again:
            return []
        unit = GROUPS.get(self.stage, "number")
        count = len(self.explained)
        near = self.search.near if self.search else []
        names = "; ".join(cause.says for cause in near[:SHOWN])
        doubts = {
            f"only one {unit} differs, too few to tell causes apart; audit a larger step": self.groups < 2,
            f"{count} causes give the same numbers, so this step cannot tell them apart": count > SHOWN,
            f"one number decides against {len(near)} other causes, which give all other numbers: {names}; "
            "audit a larger step": count and near,
            f"a number was fitted for the first cause, so only one {unit} confirms it; audit a larger step": (
                self.groups == 2 and count and self.explained[0].is_guess
            ),
            "the time was over before all causes were tried; a larger --seconds tries more": (
                self.search and self.search.has_ended
            ),
        }
        return [text for text, holds in doubts.items() if holds]


# a fitted factor that multiplies all numbers in a stage
FACTOR = Cause("all values are {c} times as large", {"factor": table.fitted_number}, table.FACTOR)


def names_of(name: str, d: Dump) -> set[str]:
    """Return the names that names.py uses for a stage in this step."""
    other_name = "logps" if name in LOGPS else name
    return {name, d.about["kind"] if name == "loss" else other_name}


def possible_causes(name: str, d: Dump) -> list[Cause]:
    """List the causes for a stage in this step, with causes that are limited to one use last."""
    names = names_of(name, d)
    result = []
    for quantity, causes in table.QUANTITIES.items():
        if names & quantity.stage_names() and quantity.needs in d:
            for says, change in causes.items():
                change = change if isinstance(change, dict) else {quantity.name: change}
                for text, pieces in for_each_part(says, change, d, "mask" in names):
                    result.append(Cause(text, pieces, quantity))
    # causes specific to this loss or model come before general causes
    result.sort(key=lambda cause: (cause.is_general(), not (names - {"loss", "logps"}) & cause.of.stage_names()))
    for of_stages, uses, quantity in table.SCOPES:
        if names & set(of_stages.split(", ")):
            alone = [cause for cause in result if cause.may_be_inside(quantity)]
            result += [cause.inside(use) for use in uses for cause in alone]
    return result


def for_each_part(says: str, change: dict, d: Dump, in_mask: bool) -> Iterator[tuple[str, dict]]:
    """Yield a cause's sentence and change, once for each part to which the cause may be limited."""
    pieces = [name for name, x in change.items() if isinstance(x, table.Limited)]
    if not pieces:
        yield says, change
    for name in pieces:
        kinds, formula = change[name]
        for kind in kinds.split():
            for part in getattr(d, kind):
                # the completion mask cannot select tokens while the mask itself is compared
                if not (in_mask and "counted" in part):
                    yield says.replace("{}", part), change | {name: (kind, part, formula)}


def audit(d: Dump, seconds: float = math.inf) -> list[Finding]:
    """Compare every stage for which the dump has the needed tensors and fields.

    seconds: time after which the search for a stage's causes ends.

    Raises ValueError if a stage cannot be recomputed because a tensor or field has a wrong type or shape.
    """
    findings = []
    for name, stage in STAGES.items():
        if name == "mask" and d.ids is None:
            continue  # the mask depends on token ids, whose difference is unexplained
        differing = {finding.stage: finding for finding in findings if not finding.ok}
        try:
            answer = stage(d, Change(d, {}))
            if answer is None:
                continue
            finding = Finding(name, error(answer), len(all_gaps(answer)))
        except (ValueError, *DAMAGES) as cause:
            if name in THROUGH_A_MODEL and "pictures" in differing:
                d.forward = None
                continue  # the model cannot run, because the images do not fit the token ids
            raise ValueError(
                f"the stage {name!r} cannot be recomputed ({type(cause).__name__}: {cause}). "
                "Compare the types and shapes of its tensors and fields with docs/notes/step_format.md."
            ) from cause
        findings.append(finding)
        if finding.ok:
            continue
        finding.where = where(answer)
        finding.groups = count_groups(name, answer, d)
        look_for_causes(finding, d, differing, seconds)
    return findings


def look_for_causes(finding: Finding, d: Dump, differing: dict[str, Finding], seconds: float = math.inf):
    """Find causes for a stage that differs, and record them for the later stages."""
    of_one_forward = finding.stage == "entropies" and "logps" in differing
    names = names_of(finding.stage, d)
    for earlier in differing.values():
        # A cause that explains both stages is accepted as the mistake. Log-probabilities and entropies come from the
        # same forward, so for these two stages no other cause is accepted.
        both = {}
        for cause in earlier.explained:
            if names & cause.of.stage_names():
                both |= {again.says: again for again in fits(finding.stage, d, cause)}
        if both or (of_one_forward and earlier.stage == "logps"):
            finding.explained = list(both.values())
            earlier.explained = [cause for cause in earlier.explained if cause.says in both]
    finding.again = bool(finding.explained)
    if not (finding.again or of_one_forward):
        finding.search = find_causes(finding.stage, d, seconds)
        finding.explained = finding.search.explained
    if finding.stage == "mask" and "tokens" in differing and not finding.explained:
        finding.again = True  # the mask depends on the token ids, which differ already
        finding.explained = differing["tokens"].explained
    change = finding.explained[0].change if finding.explained else None
    # the gradients stage repeats the forward's deviation
    if finding.stage == "logps" or of_one_forward:
        d.forward = d.entropy_forward = change or None
    elif finding.stage == "entropies":
        d.entropy_forward = change or None
    if finding.stage == "tokens":  # the mask stage repeats the token ids' deviation
        d.ids = change
        d.__dict__.pop("regions", None)


def error(answer: dict) -> float:
    """Return a stage's largest relative difference; infinite if a number is not finite."""
    differences = all_gaps(answer)
    return differences.max().item() if len(differences) else 0.0


def all_gaps(answer: dict) -> Tensor:
    """Return the relative differences (numbers,) for all numbers in a stage, see `gaps`."""
    nothing = torch.zeros(0)
    return torch.cat([nothing, *(gaps(*values).flatten() for values in answer.values())])


def gaps(theirs: Tensor, ours: Tensor, unit: Tensor | float) -> Tensor:
    """Return |theirs - ours| / unit for each number; infinite where a number is not finite."""
    return ((theirs - ours).abs() / unit).nan_to_num(math.inf, math.inf)


def computed(name: str, d: Dump, change: dict) -> dict | None:
    """Recompute a stage with a deviation, see Change; {} recomputes the definition itself.

    Returns None if this is impossible. Raises SearchEndedError after a search's deadline.
    """
    d.check_time()
    factor = Change(d, change)("factor", 1.0)
    # a factor multiplies the stage's result, so the result itself needs no new computation
    if "factor" in change:
        change = {piece: x for piece, x in change.items() if piece not in ("factor", "c")}
    try:
        answer = STAGES[name](d, Change(d, change))
    # for example a changed mask that counts no token in a DPO answer
    except (ValueError, *DAMAGES):
        return None
    if answer and not change:
        d.usual_answers[name] = answer
    for key, (theirs, ours, unit) in (answer or {}).items():
        # The unit is limited, so that a deviation with huge numbers does not hide differences.
        _, _, usual_unit = d.usual_answers.get(name, answer)[key]
        limit = 3 * usual_unit + theirs.abs().nan_to_num().max() if theirs.numel() else math.inf
        unit = torch.minimum(torch.as_tensor(unit), torch.as_tensor(limit))
        answer[key] = theirs, ours * factor, unit
    return answer


def unseen(name: str, d: Dump) -> Iterator[tuple[str, bool]]:
    """Yield (topic, is unseen) for each cause with a topic, such as clipping.

    A cause is unseen if it does not change any number in the stage, so this step cannot reveal it. Causes that are
    limited to a part are left out.
    """
    answer = computed(name, d, {})
    for cause in possible_causes(name, d):
        shows = cause.of.about and not (cause.is_limited() or cause.is_fitted())
        other_answer = computed(name, d, cause.change) if shows else None
        if other_answer:
            pairs = {key: (answer[key][1], x, unit) for key, (_, x, unit) in other_answer.items()}
            yield cause.of.about, error(pairs) <= TOLERANCE


def explain(name: str, d: Dump, seconds: float = math.inf) -> list[Cause]:
    """Find the simplest causes that reproduce the trainer's numbers."""
    return find_causes(name, d, seconds).explained


def find_causes(name: str, d: Dump, seconds: float = math.inf) -> "Search":
    """Search the simplest causes that reproduce the trainer's numbers, for some seconds."""
    answer = computed(name, d, {})
    search = Search(name, d)
    # some cause would match a single wrong token id, or a learning rate without earlier ones
    compared = all_gaps(answer) > TOLERANCE
    if (name in IDS and compared.sum() < 2) or (name == "schedule" and len(compared) < 2):
        return search
    # A deviation may round more than the definition, so up to 3 * TOLERANCE may remain if 99 % are explained.
    d.tolerance = min(max(error(answer) / 100, TOLERANCE), 3 * TOLERANCE)
    # Forwards are slow, so only the row with the largest error is searched. Each cause that is found must then explain
    # all rows.
    if name in LOGPS:
        [values] = answer.values()
        d.part = gaps(*values).amax(1).argmax().view(1)
    d.deadline = time.thread_time() + seconds
    try:
        search.run()
    except SearchEndedError:
        search.has_ended = True
    d.deadline = math.inf
    d.part = None
    explanations = search.explained
    if name in LOGPS:
        explanations = [again for cause in explanations for again in fits(name, d, cause)]
    fewest = min((cause.parts for cause in explanations), default=1)
    explanations = [cause for cause in explanations if cause.parts == fewest]
    smallest_error = min((cause.error for cause in explanations), default=0.0)
    limit = max(10 * smallest_error, TOLERANCE / 100)
    explanations = [cause for cause in explanations if cause.error <= limit]
    # rewards that are 0.0001 times as large give the same advantages as epsilon 1, which is the likelier mistake
    search.explained = sorted(explanations, key=Cause.has_unlikely_number)
    return search


class Search:
    """A search for the causes that reproduce a stage's numbers: first single causes, then pairs.

    A single cause is also tried on each subset that contains all differences. A cause with a fitted
    number is not tried in pairs, because such a pair would match by chance.
    """

    def __init__(self, name: str, d: Dump):
        self.name = name
        self.d = d
        self.explained = []  # causes found so far; they remain if the time is over
        self.near = []  # causes that leave exactly one number unexplained
        self.has_ended = False  # whether the time was over before all causes were tried

    def run(self):
        """Try all causes in turn, the simplest first, until some explain the stage."""
        name, d = self.name, self.d
        self.base = computed(name, d, {})
        self.places = find_suspects(name, self.base, d)
        # first cause for each distance, so that causes with equal results are tried only once
        self.by_distance = {distance(self.base): None}
        factors = [] if name in IDS else self.fitted(FACTOR)
        causes = sorted(possible_causes(name, d), key=lambda cause: (cause.rank(), cause.needs_forward()))
        try:
            for _, of_rank in groupby(searched(causes, f"{name}: known causes"), Cause.rank):
                if any(cause.parts == 1 for cause in self.explained):
                    break
                for cause in of_rank:
                    self.explained += self.fitted(cause) if cause.is_fitted() else self.tried(cause)
        finally:
            self.explained += factors  # last, because a factor says less than other causes
        # with few differing numbers, some pair would match by chance
        if not self.explained and (name in LOGPS or count_wrong(self.base) >= PAIRED_NUMBERS):
            for cause in searched(self.pairs(), f"{name}: pairs of causes"):
                self.explained += fits(name, d, cause)

    def pairs(self) -> list[Cause]:
        """Combine each likely cause with the other causes that come close to the trainer's numbers."""
        ranked = [self.by_distance[key] for key in sorted(self.by_distance) if self.by_distance[key]]
        ranked = ranked[: MODEL_CAUSES if self.name in THROUGH_A_MODEL else PAIRED]
        return [
            replace(cause, says=f"{cause.says}; and {other.says}", change=cause.change | other.change, parts=2)
            for cause, other in product(ranked[:LIKELY_CAUSES], ranked)
            if cause.change.keys().isdisjoint(other.change)
        ]

    def tried(self, cause: Cause) -> list[Cause]:
        """Return the ways in which a cause without a free number explains the stage, and note its distance."""
        answer = computed(self.name, self.d, cause.change)
        if answer is None:
            return []
        key = distance(answer)
        is_new = key not in self.by_distance
        explanations = []
        for place in self.places if is_new else self.places[:1]:
            explanations += self.confined(answer, cause, place)
        has_one_left = (all_gaps(answer) > self.d.tolerance).sum() == 1
        if is_new and has_one_left and count_wrong(self.base) > 2:
            self.near.append(cause)
        if not cause.rank():
            self.by_distance.setdefault(key, cause)
        return explanations

    def confined(self, answer: dict | None, cause: Cause, place: Place) -> list[Cause]:
        """Return [cause] if the cause, limited to a subset, explains the stage."""
        d = self.d
        if place.says:
            cause = replace(cause, says=f"{cause.says}, only for {place.says}", parts=2)
        explanations = fit(answer and seen(answer, place.inside), cause, d)
        if explanations and place.says and "loss" in answer and d.about["kind"] != "dpo":
            rows = place.rows[:, None]
            inside = computed("loss", d, cause.change | {"weights": rows})
            outside = computed("loss", d, {"weights": ~rows})
            theirs, ours, unit = inside["loss"]
            _, others, other_unit = outside["loss"]
            return fit({"loss": (theirs, ours + others, unit + other_unit)}, cause, d)
        return explanations

    def fitted(self, cause: Cause) -> list[Cause]:
        """Fit a cause's free number in each place, and return the fits that explain the stage."""
        name, d, base = self.name, self.d, self.base

        def answer_with(number: float) -> dict | None:
            if cause is not FACTOR:
                return computed(name, d, cause.with_number(number).change)
            d.check_time()
            return {key: (theirs, number * ours, unit) for key, (theirs, ours, unit) in base.items()}

        # a fitted multiplier may equal a known count in the step, or its inverse
        multiplies = cause is FACTOR or any(x is table.times for x in cause.change.values())
        sources = known_numbers(d, next(iter(base))) if multiplies else {}
        distances = {}  # for each candidate number, the distances in all places
        for number in [*NUMBERS, *sources]:
            answer = answer_with(number)
            distances[number] = [distance_in(place, answer) for place in self.places]
        explanations = []
        for index, place in enumerate(self.places):
            nearest = min(distances, key=lambda number: distances[number][index])
            is_nearer = distances[nearest][index] <= 0.9 * distance_in(place, base)
            wrong = seen(base, place.inside)
            # A fitted number always matches a single group's values, such as the advantages that one reward changes,
            # and a fitted factor always matches two opposite advantages. Such fits are ignored unless the number itself
            # is a known one.
            is_few = count_wrong(wrong) < 3 if cause is FACTOR else count_groups(name, wrong, d) < 2
            is_known = nearest in sources or nearest == 1  # 1 is a likely bound
            is_zero = cause is FACTOR and nearest == 0  # only true if the trainer's numbers are zero, not just small
            if not is_nearer or (is_few and not is_known) or (is_zero and any_number(wrong, place)):
                continue

            def distance_with(number: float, place=place) -> float:
                return distance_in(place, answer_with(number))

            for number in [nearest] if is_few else numbers_near(nearest, distance_with):
                named = cause.with_number(number, sources.get(number, ""))
                fits_here = self.confined(answer_with(number), named, place)
                if fits_here:
                    explanations += fits_here
                    break
        return explanations


def find_suspects(name: str, answer: dict, d: Dump) -> list[Place]:
    """Find row sets, or parts of the model, that contain all differences in a stage.

    The first suspect is always the whole stage.
    """
    suspects = [Place("", {key: torch.tensor(True) for key in answer})]
    row_sets = d.rollout_sets if name == "advantages" else d.row_sets
    for says, chosen in (d.parts if name in BY_PARAMETER else row_sets).items():
        if name in BY_PARAMETER:
            inside = {key: torch.tensor(bool(chosen(key))) for key in answer}
        else:
            by_row = {key: ours.dim() for key, (_, ours, _) in answer.items() if len(ours) == len(chosen)}
            inside = {key: chosen.view(-1, *[1] * (dim - 1)) for key, dim in by_row.items()}
        outside = {key: ~mask for key, mask in inside.items()}
        differs = error(seen(answer, inside)) > TOLERANCE
        if differs and error(seen(answer, outside)) <= TOLERANCE:
            suspects.append(Place(says, inside, chosen))
    return suspects


def any_number(answer: dict, place: Place) -> bool:
    """Return whether one of the trainer's numbers in a subset is not zero."""
    return any((answer[key][0] * mask).any() for key, mask in place.inside.items())


def seen(answer: dict, inside: dict) -> dict:
    """Return the answer with the trainer's numbers outside the masks replaced by ours."""
    result = {}
    for key, mask in inside.items():
        theirs, ours, unit = answer[key]
        result[key] = theirs.where(mask, ours), ours, unit
    return result


def distance(answer: dict) -> tuple[float, float]:
    """Return the summed distance from the trainer's numbers, and a position-dependent sum.

    Two causes with the same pair are treated as the same deviation.
    """
    differences = all_gaps(answer).clamp(max=1.0)
    return float(differences.sum()), float(differences.cumsum(0).sum())


def distance_in(place: Place, answer: dict | None) -> float:
    """Return the summed distance from the trainer's numbers in a subset; inf without an answer."""
    return distance(seen(answer, place.inside))[0] if answer else math.inf


def fits(name: str, d: Dump, cause: Cause) -> list[Cause]:
    """Return [cause with its remaining error] if the cause explains the stage, else []."""
    return fit(computed(name, d, cause.change), cause, d)


def fit(answer: dict | None, cause: Cause, d: Dump) -> list[Cause]:
    """Return [cause with its remaining error] if the answer is within d.tolerance, else []."""
    error_left = error(answer) if answer else math.inf
    return [replace(cause, error=error_left)] if error_left <= d.tolerance else []


def numbers_near(number: float, distance_of: Callable[[float], float]) -> Iterator[float]:
    """Yield a number, then the best number near it: rounded to 1, 2 and 3 digits, then exact.

    distance_of: function that returns how far a number leaves the stage from the trainer's values.
    """
    yield number
    distance_of = cache(distance_of)
    around = [number * 1.1**power for power in range(-9, 10)]
    number = min(around, key=distance_of)
    step = number / 10
    for _ in range(35):
        number = min((number, number - step, number + step), key=distance_of)
        step *= 0.6
    for digits in (1, 2, 3):
        yield float(f"{number:.{digits}g}")
    yield number


def count_wrong(answer: dict) -> int:
    """Count a stage's numbers that differ by more than TOLERANCE."""
    return int((all_gaps(answer) > TOLERANCE).sum())


def count_groups(name: str, answer: dict, d: Dump) -> int:
    """Count the independent groups in which a number differs.

    They are the completions' groups for advantages, and rows, pairs and micro-batches for losses. In other stages, each
    number is a group by itself.
    """
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


def known_numbers(d: Dump, key: str) -> dict[float, str]:
    """Return {number: description} for settings, counts, their inverses and ratios that a fitted number may equal.

    key: name of the explained tensor, which selects the numbers that apply.
    """
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
    # a ratio that only small counts give is left out, because it would match by chance
    trusted = {rounded_key(a / b) for a, b in permutations(texts, 2) if min(a, b) > 10}
    ratios = [(number, text) for number, text in ratios if rounded_key(number) in trusted]
    return joined_texts(ratios) | joined_texts(singles)  # a single count is simpler than a ratio


def joined_texts(named_numbers: list[tuple[float, str]]) -> dict[float, str]:
    """Return {number: ": description or description"}, because each description may be right."""
    texts = defaultdict(list)
    for number, says in named_numbers:
        texts[rounded_key(number)].append(says)
    return {number: f": {' or '.join(dict.fromkeys(says))}" for number, says in texts.items()}


def rounded_key(number: float) -> float:
    """Round a number to 12 digits, so that equal ratios such as 16 / 12 and 12 / 9 are one key."""
    return float(f"{number:.12g}")


def where(answer: dict) -> list[str]:
    """Describe which numbers differ: counts for each tensor, then up to 4 examples for up to 3 tensors.

    An example shows the trainer's value "instead of" the recomputed value.
    """
    wrong_counts = []
    lines = []
    for name, (theirs, ours, unit) in answer.items():
        is_wrong = gaps(theirs, ours, unit) > TOLERANCE
        if not is_wrong.any():
            continue
        wrong_counts.append(f"{name}: {int(is_wrong.sum())} of {is_wrong.numel()}")
        pairs = []
        for place in is_wrong.nonzero()[:4].tolist():
            index = tuple(place)
            pairs.append(f"{place}: {theirs[index]:.4g} instead of {ours[index]:.4g}")
        lines.append(f"{name} at {', '.join(pairs)}")
    if len(wrong_counts) > 3:
        wrong_counts[3:] = [f"and {len(wrong_counts) - 3} more"]
    return [", ".join(wrong_counts), *lines[:3]]


def report(findings: list[Finding], d: Dump) -> str:
    """Return the text that `python -m minivlmrl parity` prints."""
    lines = []
    topics = defaultdict(list)
    for finding in findings:
        lines += finding_lines(finding)
        if finding.ok and finding.stage not in THROUGH_A_MODEL:
            d.deadline = time.thread_time() + SECONDS
            # after the time, the topics of causes that were tried remain
            with suppress(SearchEndedError):
                for about, is_unseen in unseen(finding.stage, d):
                    topics[about].append(is_unseen)
            d.deadline = math.inf
    lines += [f"note: {note}" for note in notes(d)]
    lines.append(f"not in this step: {', '.join(not_in_step(findings)) or 'nothing'}")
    for about, flags in topics.items():
        if 2 * sum(flags) >= len(flags):
            lines.append(f"cannot reveal: {sum(flags)} of {len(flags)} mistakes in {about}")
    return "\n".join(lines)


def notes(d: Dump) -> list[str]:
    """Return sentences about the limits of an agreement."""
    filters = [f"{name} = {d.about[name]}" for name, off in step_format.FILTERS.items() if d.about.get(name) not in off]
    result = []
    if filters:
        result.append(
            f"tokens were sampled with {' and '.join(filters)}, but the audit normalises log-probabilities over the "
            "whole vocabulary, as TRL does; they are not the sampler's (TRL #6789)"
        )
    if d.about.get("autocast"):
        allowed = TOLERANCE * model_stages.THROUGH_A_MODEL * model_stages.HALF
        result.append(
            f"the model ran in {d.about['autocast']} (autocast), so log-probabilities agree if they differ by less "
            f"than {allowed:g} nats, and gradients by less than {allowed:.0%} of the largest"
        )
    return result


def finding_lines(finding: Finding) -> list[str]:
    """Return a stage's report lines: whether the stage agrees, and up to 4 explanations."""
    word = "agrees" if finding.ok else "DIFFERS"
    numbers = f"{finding.numbers:9} numbers, error {finding.error:.0e}"
    line = f"{finding.stage:20} {word:8}{numbers}  {'; '.join(finding.where[:1])}"
    lines = [line.rstrip()]
    if finding.again:
        return [*lines, f"{'':12}same cause as in an earlier stage: {finding.explained[0]}"]
    lines += [f"{'':12}{text}" for text in finding.doubts()]
    if not (finding.ok or finding.explained):
        lines.append(f"{'':12}no known cause explains the difference")
        return lines + [f"{'':16}{text}" for text in finding.where[1:]]
    word = "explained by"
    for cause in finding.explained[:SHOWN]:
        lines.append(f"{'':12}{word}: {cause}")
        word = "or"
        about = [cause.of.source, f"effect: {cause.of.effect}", cause.of.who and f"a design of {cause.of.who}"]
        lines.append(f"{'':16}{'; '.join(filter(None, about))}")
    return lines


def not_in_step(findings: list[Finding]) -> list[str]:
    """List the stages that were not compared."""
    compared = {finding.stage for finding in findings}
    return [name for name in STAGES if name not in compared]


def checked(folder, seconds: float = math.inf) -> tuple[list[Finding], Dump]:
    """Read and audit a step's folder, see `audit`.

    Raises ValueError if the folder does not contain a valid step, or if no number can be compared.
    """
    d = read(folder)
    with error_context(folder):
        findings = audit(d, seconds)
        compared = sum(finding.numbers for finding in findings) and d["completion_mask"].any()
        if all(finding.ok for finding in findings) and not compared:
            why = "no token is in the loss" if findings else "each stage lacks a tensor or a field"
            raise ValueError(
                f"nothing was compared, because {why}. docs/notes/step_format.md lists the tensors and fields that a "
                "step needs."
            )
    return findings, d


def as_json(findings: list[Finding], d: Dump) -> dict:
    """Return the findings as a JSON object with schema 1. Later versions may only add fields."""
    stages = []
    for finding in findings:
        stage = {name: getattr(finding, name) for name in ("stage", "numbers", "again", "where")}
        stage |= {"agrees": finding.ok, "error": finding.error if math.isfinite(finding.error) else None}
        stage |= {"explained": [], "doubts": finding.doubts()}
        for cause in finding.explained:
            names = ", ".join(name for name in cause.change if name not in ("inside", "c"))
            stage["explained"].append(
                {"error": cause.error, "kind": cause.kind, "causes": [{"name": names, "says": cause.says}]}
            )
        stages.append(stage)
    return {
        "schema": 1,
        "agrees": all(finding.ok for finding in findings),
        "stages": stages,
        "not_in_this_step": not_in_step(findings),
        "notes": notes(d),
    }
