"""`python -m minivlmrl audit STEP`: compute a dumped step again, and name what explains it.

Each stage is compared by itself, from what the trainer had before it, so one mistake is reported
once. For a stage that differs known causes are tried alone, then in the most promising pairs, each
also up to a factor. Exit status 0: all agrees, 1: not, 2: nothing could be compared.
"""

import argparse
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import groupby, permutations, product
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from minivlmrl_audit import stages, updates
from minivlmrl_audit.dump import DAMAGES, Dump, read
from minivlmrl_audit.minivlmrl_api import naming
from minivlmrl_audit.moves import TABLE, Change, formula

TOLERANCE = 1e-5  # of an error, in units of what was added up: some times float32's rounding
# what a model has to give again: the tensor, and the folder of the model
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
    **{name: partial(updates.logps, *arguments) for name, arguments in LOGPS.items()},
    "loss": stages.loss,
    "gradients": updates.gradients,
    "clip": updates.clip,
    "update": updates.update,
    "schedule": updates.schedule,
}
THROUGH_A_MODEL = (*LOGPS, "gradients")
BY_PARAMETER = ("gradients", "clip", "update")
IDS = ("tokens", "pictures", "mask")  # which are off by no factor
SHOWN = 4  # explanations that are printed
LIKELY_CAUSES = 8  # those that come closest alone, which are paired with all others
PAIRED = 400  # as many as are paired with these
PAIRED_NUMBERS = 12  # that differ, where pairs are tried
MODEL_CAUSES = 16  # or with so many, where each needs a model
NUMBERS = [digit * 10.0**k for k in range(-10, 6) for digit in (1, 2, 5)]  # a fit begins there
# a bar of what is searched, where that takes over 20 seconds
searched = partial(tqdm, delay=20, leave=False, disable=None)


@dataclass
class Cause:
    """A deviation of a stage from its definition: a row of causes.yaml, or composed."""

    name: str
    says: str
    stages: tuple | list = ()
    change: dict = field(default_factory=dict)  # what the stage's function computes differently
    source: str = ""
    costs: str = ""
    about: str = ""  # what a step needs to show it
    error: float = 0.0  # that it leaves, where it explains a stage
    parts: int = 1  # causes of which it is joined

    def __str__(self) -> str:
        return f"{self.name} (to {self.error:.0e})"

    def is_fitted(self) -> bool:
        """Tell whether it has a number that is fitted."""
        return "{c}" in self.name or "c" in self.change

    def may_be_inside(self, scope: dict) -> bool:
        """Tell whether it may be in one use of what deviates alone."""
        # what is of other rows or tokens would give few numbers by chance; masks have many
        may_be = "mask" in self.change or not any(
            isinstance(x, tuple) for x in self.change.values()
        )
        return may_be and scope.get("of", "") in (*self.change, "") and not self.is_fitted()

    def inside(self, use: str) -> "Cause":
        """Return this cause in one use alone."""
        return replace(
            self,
            name=f"{self.name}, in {use} alone",
            says=f"{self.says}, in {use} alone",
            change=self.change | {"inside": [*self.change.get("inside", []), use]},
            about="",
        )

    def rank(self) -> int:
        """Rank causes by how much they assume: in how few uses they are, or a number."""
        return 3 if self.is_fitted() else len(self.change.get("inside", []))

    def with_number(self, number: float, source: str = "") -> "Cause":
        """Return this cause with a number, and what that may come from."""
        text = f"{number:.5g}"
        says = self.says.replace("{c}", text) + source
        change = self.change | {"c": number}
        return replace(self, name=self.name.replace("{c}", text), says=says, change=change)


class Place(NamedTuple):
    """All numbers of a stage, or those of some rows or of a part of the model."""

    says: str  # which; "": all
    inside: dict[str, Tensor]  # of each tensor: which numbers
    rows: Tensor | None = None


@dataclass
class Finding:
    """What became of a stage; it agrees where the error is at most TOLERANCE."""

    stage: str
    error: float
    numbers: int
    where: Sequence[str] = ()  # which differ; the first of these, and how
    explained: Sequence[Cause] = ()  # of the fewest parts; empty: no known cause explains it
    again: bool = False  # an earlier stage says so already

    @property
    def ok(self) -> bool:
        return self.error <= TOLERANCE


# rows of causes.yaml: what one does not say, its list says
CAUSES = [Cause(**group["of"] | row) for group in TABLE["causes"] for row in group["list"]]
FACTOR = Cause(**TABLE["factor"])  # of all numbers of a stage


def names_of(name: str, d: Dump) -> set[str]:
    """Tell what causes.yaml calls a stage of this step."""
    other_name = "logps" if name in LOGPS else name
    return {name, d.about["kind"] if name == "loss" else other_name}


def possible_causes(name: str, d: Dump) -> list[Cause]:
    """List what may go wrong in a stage of this step: causes.yaml's, then what is composed."""
    names = names_of(name, d)
    result = [cause for cause in CAUSES if names & set(cause.stages)]
    for thing in TABLE["things"]:
        if names & set(thing["stages"]) and thing.get("needs", "input_ids") in d:
            result += composed(thing, d, "mask" in names)
    # what is of this kind of loss or model before what is of all
    result.sort(key=lambda cause: not (names - {"loss", "logps"}) & set(cause.stages))
    for scope in TABLE["scopes"]:
        if names & set(scope["stages"]):
            alone = [cause for cause in result if cause.may_be_inside(scope)]
            result += [cause.inside(use) for use in scope["uses"] for cause in alone]
    return result


def composed(thing: dict, d: Dump, in_mask: bool) -> list[Cause]:
    """Compose causes of a thing and what it may take, such as another row, or be, such as 0."""
    changes = dict(thing.get("terms", {}))
    for operators in thing.get("operators", []):
        changes |= TABLE["operators"][operators]
    for kind in thing.get("units", []):
        for unit in getattr(d, kind):
            for says, text in thing.get("changes", {"{}": None}).items():
                # the mask that is compared is no unit for itself
                if not (in_mask and "counted" in unit):
                    changes[says.format(unit)] = (kind, unit, text)
    fields = ("stages", "source", "costs", "about")
    shared_fields = {name: thing[name] for name in fields if name in thing}
    name = thing["thing"]
    result = []
    for text, change in changes.items():
        all_changes = {name: change, **thing.get("also", {})}
        says = f"{thing['says']} {text}"
        result.append(Cause(f"{name}: {text}", says, change=all_changes, **shared_fields))
    return result


def audit(d: Dump) -> list[Finding]:
    """Check every stage for which the dump has what is needed."""
    findings = []
    for name, stage in STAGES.items():
        if name == "mask" and d.ids is None:
            continue  # it is of ids that nothing explains
        differing = {finding.stage: finding for finding in findings if not finding.ok}
        try:
            answer = stage(d, Change(d, {}))
            if answer is None:
                continue
            finding = Finding(name, error(answer), len(all_gaps(answer)))
        except (ValueError, *DAMAGES) as cause:
            if name in THROUGH_A_MODEL and "pictures" in differing:
                d.forward = None
                continue  # these pictures do not fit the ids
            raise ValueError(
                f"{name} cannot be computed again: {type(cause).__name__} {cause}: "
                "a tensor or a field is not as in docs/audit.md"
            ) from cause
        findings.append(finding)
        if finding.ok:
            continue
        finding.where = where(answer)
        look_for_causes(finding, d, differing)
    return findings


def look_for_causes(finding: Finding, d: Dump, differing: dict[str, Finding]):
    """Explain a stage that differs, and let the stages after it know."""
    of_one_forward = finding.stage == "entropies" and "logps" in differing
    names = names_of(finding.stage, d)
    for earlier in differing.values():
        both = {}  # what explains both stages is the mistake; of one forward nothing else is
        for cause in earlier.explained:
            if names & {*cause.stages}:
                both |= {again.name: again for again in fits(finding.stage, d, cause)}
        if both or (of_one_forward and earlier.stage == "logps"):
            finding.explained = list(both.values())
            earlier.explained = [cause for cause in earlier.explained if cause.name in both]
    finding.again = bool(finding.explained)
    if not (finding.again or of_one_forward):
        finding.explained = explain(finding.stage, d)
    if finding.stage == "mask" and "tokens" in differing and not finding.explained:
        finding.again = True  # it is of these ids
        finding.explained = differing["tokens"].explained
    change = finding.explained[0].change if finding.explained else None
    if finding.stage == "logps" or of_one_forward:  # gradients are those of the forward
        d.forward = change or None
    if finding.stage == "tokens":  # as masks are of the ids
        d.ids = change
        d.__dict__.pop("regions", None)


def error(answer: dict) -> float:
    """Measure the largest difference, in units; infinite for what is not finite."""
    differences = all_gaps(answer)
    return differences.max().item() if len(differences) else 0.0


def all_gaps(answer: dict) -> Tensor:
    """Measure the differences of a stage (numbers,), in units; infinite for what is not finite."""
    nothing = torch.zeros(0)
    return torch.cat([nothing, *(gaps(*values).flatten() for values in answer.values())])


def gaps(theirs: Tensor, ours: Tensor, unit: Tensor | float) -> Tensor:
    """Measure each difference, in units; infinite for what is not finite."""
    return ((theirs - ours).abs() / unit).nan_to_num(math.inf, math.inf)


def joined(first: Cause, second: Cause) -> Cause:
    """Make one cause of two."""
    return replace(
        first,
        name=f"{first.name} and {second.name}",
        says=f"{first.says}; {second.says}",
        change=first.change | second.change,
        parts=2,
    )


def computed(name: str, d: Dump, change: dict) -> dict | None:
    """Compute a stage with a deviation; None: with it the step has no answer."""
    factor = Change(d, change)("factor", 1.0)
    if "factor" in change:  # of what comes out, which is computed once
        change = {piece: x for piece, x in change.items() if piece not in ("factor", "c")}
    try:
        answer = STAGES[name](d, Change(d, change))
    except (ValueError, *DAMAGES):  # such as a mask that leaves an answer of a pair no token
        return None
    if answer and not change:
        d.usual_answers[name] = answer
    for key, (theirs, ours, unit) in (answer or {}).items():
        # a deviation that makes numbers huge excuses no differences
        _, _, usual_unit = d.usual_answers.get(name, answer)[key]
        limit = 3 * usual_unit + theirs.abs().nan_to_num().max() if theirs.numel() else math.inf
        unit = torch.minimum(torch.as_tensor(unit), torch.as_tensor(limit))
        answer[key] = theirs, ours * factor, unit
    return answer


def unseen(name: str, d: Dump) -> Iterator[tuple[str, bool]]:
    """Tell of each cause with a topic, such as clips, whether it changes no number of a stage."""
    answer = computed(name, d, {})
    for cause in possible_causes(name, d):
        shows = cause.about and not cause.is_fitted()
        other_answer = computed(name, d, cause.change) if shows else None
        if other_answer:
            pairs = {key: (answer[key][1], x, unit) for key, (_, x, unit) in other_answer.items()}
            yield cause.about, error(pairs) <= TOLERANCE


def explain(name: str, d: Dump) -> list[Cause]:
    """Search the simplest causes that give the trainer's numbers."""
    answer = computed(name, d, {})
    # one id or rate is met by chance
    if name in (*IDS, "schedule") and count_wrong(answer) < 2:
        return []
    # what a deviation computes may round more than the definition, if it explains nearly all
    d.tolerance = min(max(error(answer) / 100, TOLERANCE), 3 * TOLERANCE)
    if name in LOGPS:  # a row tells enough; what explains it has to explain all
        [values] = answer.values()
        d.part = gaps(*values).amax(1).argmax().view(1)
    explanations = search(name, d)
    d.part = None
    if name in LOGPS:
        explanations = [again for cause in explanations for again in fits(name, d, cause)]
    smallest_error = min((cause.error for cause in explanations), default=0.0)
    limit = max(10 * smallest_error, TOLERANCE / 100)
    return [cause for cause in explanations if cause.error <= limit]


def search(name: str, d: Dump) -> list[Cause]:
    """Find single causes that give a stage's numbers, or else those of a place, or pairs.

    A factor is a cause by itself; it is fitted, so with another one it proves nothing.
    """
    base_answer = computed(name, d, {})
    suspects = find_suspects(name, base_answer, d)
    factors = [] if name in IDS else fitted(name, d, FACTOR, suspects)
    explanations = []
    by_distance = {distance(base_answer): None}  # causes that do the same are one
    all_causes = sorted(possible_causes(name, d), key=Cause.rank)
    for _, causes in groupby(searched(all_causes, f"{name}: known causes"), Cause.rank):
        if any(cause.parts == 1 for cause in explanations):
            break
        for cause in causes:
            if cause.is_fitted():
                explanations += fitted(name, d, cause, suspects)
                continue
            answer = computed(name, d, cause.change)
            if answer is None:
                continue
            key = distance(answer)
            for place in suspects[: 1 if key in by_distance else None]:
                explanations += confined(answer, cause, place, d)
            if not cause.rank():
                by_distance.setdefault(key, cause)
    explanations += factors
    if explanations:
        fewest = min(cause.parts for cause in explanations)
        return [cause for cause in explanations if cause.parts == fewest]
    if name not in LOGPS and count_wrong(base_answer) < PAIRED_NUMBERS:
        return []  # some pair would give so few by chance
    ranked = filter(None, (by_distance[key] for key in sorted(by_distance)))
    ranked_causes = list(ranked)[: MODEL_CAUSES if name in THROUGH_A_MODEL else PAIRED]
    pairs = list(product(ranked_causes[:LIKELY_CAUSES], ranked_causes))
    for first_cause, second_cause in searched(pairs, f"{name}: pairs of causes"):
        if first_cause.change.keys().isdisjoint(second_cause.change):
            explanations += fits(name, d, joined(first_cause, second_cause))
    return explanations


def find_suspects(name: str, answer: dict, d: Dump) -> list[Place]:
    """Find rows or parts of the model outside which a stage's numbers agree; first everything."""
    suspects = [Place("", {key: torch.tensor(True) for key in answer})]
    sets = d.parts if name in BY_PARAMETER else d.row_sets
    if name == "advantages":
        sets = d.rollout_sets
    for says, chosen in sets.items():
        inside = {}
        for key, (_, ours, _) in answer.items():
            if name in BY_PARAMETER:
                inside[key] = torch.tensor(bool(chosen(key)))
            elif len(ours) == len(chosen):
                inside[key] = chosen.view(-1, *[1] * (ours.dim() - 1))
        outside = {key: ~mask for key, mask in inside.items()}
        differs = error(seen(answer, inside)) > TOLERANCE
        if differs and error(seen(answer, outside)) <= TOLERANCE:
            suspects.append(Place(says, inside, chosen))
    return suspects


def seen(answer: dict, inside: dict) -> dict:
    """Look at the numbers inside alone: the others are ours."""
    result = {}
    for key, mask in inside.items():
        theirs, ours, unit = answer[key]
        result[key] = theirs.where(mask, ours), ours, unit
    return result


def distance(answer: dict) -> tuple[float, float]:
    """Measure how far a stage is from the trainer's numbers, in sum, and where; equal causes are one."""
    differences = all_gaps(answer).clamp(max=1.0)
    return float(differences.sum()), float(differences.cumsum(0).sum())


def confined(answer: dict | None, cause: Cause, place: Place, d: Dump) -> list[Cause]:
    """Explain a stage by a cause in a place alone."""
    if place.says:
        name = f"{cause.name}, only {place.says}"
        cause = replace(cause, name=name, says=f"{cause.says}, for {place.says} alone", parts=2)
    explanations = fit(answer and seen(answer, place.inside), cause, d)
    if explanations and place.says and "loss" in answer and d.about["kind"] != "dpo":
        rows = place.rows[:, None]
        inside = computed("loss", d, cause.change | {"weights": rows})
        outside = computed("loss", d, {"weights": ~rows})
        theirs, ours, unit = inside["loss"]
        _, others, other_unit = outside["loss"]
        return fit({"loss": (theirs, ours + others, unit + other_unit)}, cause, d)
    return explanations


def fits(name: str, d: Dump, cause: Cause) -> list[Cause]:
    """List the cause, with the error that it leaves, if it explains the stage."""
    return fit(computed(name, d, cause.change), cause, d)


def fit(answer: dict | None, cause: Cause, d: Dump) -> list[Cause]:
    """Compare an answer as `fits` does."""
    error_left = error(answer) if answer else math.inf
    return [replace(cause, error=error_left)] if error_left <= d.tolerance else []


def fitted(name: str, d: Dump, cause: Cause, suspects: list[Place]) -> list[Cause]:
    """Explain a stage by a cause with the number that fits best, in any of these suspects."""

    def answer_with(number: float) -> dict | None:
        return computed(name, d, cause.with_number(number).change)

    def distance_with(place: Place, number: float) -> float:
        return distance_in(place, answer_with(number))

    base_answer = computed(name, d, {})
    # what multiplies may be a count or one over it
    multiplies = cause is FACTOR or "c * x" in cause.change.values()
    sources = known_numbers(d, next(iter(base_answer))) if multiplies else {}
    distances = {}  # of each number: in each suspect
    for number in [*NUMBERS, *sources]:
        answer = answer_with(number)
        distances[number] = [distance_in(place, answer) for place in suspects]
    explanations = []
    for index, place in enumerate(suspects):
        nearest = min(distances, key=lambda number: distances[number][index])
        is_nearer = distances[nearest][index] <= 0.9 * distance_in(place, base_answer)
        num_wrong = count_wrong(seen(base_answer, place.inside))
        # one number is met by any that is fitted, an advantage and its opposite by any factor
        is_met = num_wrong < (3 if cause is FACTOR else 2) and nearest not in sources
        if not is_nearer or is_met:
            continue
        for number in numbers_near(nearest, partial(distance_with, place)):
            named = cause.with_number(number, sources.get(number, ""))
            fits_here = confined(answer_with(number), named, place, d)
            if fits_here:
                explanations += fits_here
                break
    return explanations


def numbers_near(number: float, distance_of: Callable[[float], float]) -> Iterator[float]:
    """Yield a number, then the one near it whose distance is least, as round as may be first."""
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


def distance_in(place: Place, answer: dict | None) -> float:
    """Measure how far a stage is from the trainer's numbers in a place."""
    return distance(seen(answer, place.inside))[0] if answer else math.inf


def count_wrong(answer: dict) -> int:
    """Count the numbers that differ."""
    return int((all_gaps(answer) > TOLERANCE).sum())


def known_numbers(d: Dump, key: str) -> dict[float, str]:
    """Say what a fitted number may be: counts of the step, over one another, or settings.

    key: of the numbers that it explains, which tells the counts that may be theirs.
    """
    named_numbers = [
        (formula(text, about=d.about), says) for says, text in TABLE["factors"].items()
    ]
    units = defaultdict(list)  # of each count that may be theirs
    for unit, (text, keys) in TABLE["counts"].items():
        count = formula(text, step=d, about=d.about)
        if count not in (None, 0, 1) and re.match(keys, key):
            units[count].append(unit)
    counts = {count: f"the {count:g} {' or '.join(names)}" for count, names in units.items()}
    for count, says in counts.items():
        named_numbers.append((count, says))
        named_numbers.append((1 / count, f"1 over {says}"))
    for count, other in permutations(counts, 2):
        if min(count, other) > 10:  # ratios of few are met by chance
            named_numbers.append((count / other, f"{counts[count]} over {counts[other]}"))
    return {
        number: f": {says}" for number, says in reversed(named_numbers)
    }  # what comes first is said


def where(answer: dict) -> list[str]:
    """Say which numbers differ, and of three tensors the first that do, theirs over ours."""
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
            pairs.append(f"{place}: {theirs[index]:.4g} over {ours[index]:.4g}")
        lines.append(f"{name} at {', '.join(pairs)}")
    if len(wrong_counts) > 3:
        wrong_counts[3:] = [f"and {len(wrong_counts) - 3} more"]
    return [", ".join(wrong_counts), *lines[:3]]


def report(findings: list[Finding], d: Dump) -> str:
    """Write the lines that the tool prints."""
    lines = []
    topics = defaultdict(list)
    for finding in findings:
        lines += finding_lines(finding)
        if finding.ok and finding.stage not in THROUGH_A_MODEL:
            for about, is_unseen in unseen(finding.stage, d):
                topics[about].append(is_unseen)
    lines.append(f"not in this step: {', '.join(not_in_step(findings)) or 'nothing'}")
    for about, flags in topics.items():
        if 2 * sum(flags) >= len(flags):
            lines.append(f"cannot show: {sum(flags)} of {len(flags)} mistakes of {about}")
    return "\n".join(lines)


def finding_lines(finding: Finding) -> list[str]:
    """Write a stage's lines: whether it agrees, and up to four explanations."""
    word = "agrees" if finding.ok else "DIFFERS"
    numbers = f"{finding.numbers:9} numbers, error {finding.error:.0e}"
    line = f"{finding.stage:20} {word:8}{numbers}  {'; '.join(finding.where[:1])}"
    lines = [line.rstrip()]
    if not (finding.ok or finding.explained):
        lines.append(f"{'':12}no known cause explains it")
        return lines + [f"{'':16}{text}" for text in finding.where[1:]]
    if finding.again:
        return [*lines, f"{'':12}again: {finding.explained[0]}"]
    word = "explained by"
    for cause in finding.explained[:SHOWN]:
        lines.append(f"{'':12}{word}: {cause}")
        word = "or"
        about = [cause.says, cause.source, cause.costs and f"costs: {cause.costs}"]
        lines.append(f"{'':16}{'; '.join(filter(None, about))}")
    if len(finding.explained) > SHOWN:
        lines.append(f"{'':12}and {len(finding.explained) - SHOWN} more that give the same numbers")
    return lines


def not_in_step(findings: list[Finding]) -> list[str]:
    """Name the stages that were not compared."""
    compared = {finding.stage for finding in findings}
    return [name for name in STAGES if name not in compared]


def checked(folder) -> tuple[list[Finding], Dump]:
    """Audit a step's folder (ValueError: it is none, or nothing of it can be compared)."""
    d = read(folder)
    with naming(folder):
        findings = audit(d)
        compared = sum(finding.numbers for finding in findings) and d["completion_mask"].any()
        if all(finding.ok for finding in findings) and not compared:
            why = "no token counts" if findings else "each stage lacks a tensor or a field"
            raise ValueError(f"nothing was compared: {why}; docs/audit.md says what a step has")
    return findings, d


def as_json(findings: list[Finding]) -> dict:
    """Return what `report` says as an object; fields may come, none of these goes."""
    return {
        "schema": 1,
        "agrees": all(finding.ok for finding in findings),
        "stages": [stage_json(finding) for finding in findings],
        "not_in_this_step": not_in_step(findings),
    }


def stage_json(finding: Finding) -> dict:
    """Return what is known of a stage as an object."""
    explained = []
    for cause in finding.explained:
        named = {"name": cause.name, "says": cause.says}
        explained.append({"error": cause.error, "causes": [named]})
    return {
        "stage": finding.stage,
        "numbers": finding.numbers,
        "again": finding.again,
        "where": finding.where,
        "agrees": finding.ok,
        "error": finding.error if math.isfinite(finding.error) else None,
        "explained": explained,
    }


def main(arguments: list[str] | None = None) -> int:
    """Audit the step that the command line names; returns the exit status."""
    p = argparse.ArgumentParser("python -m minivlmrl audit", description="Check a dumped step.")
    p.add_argument("step", help="a folder with step.json and step.safetensors: docs/audit.md")
    p.add_argument("--json", action="store_true", help="print one object, as docs/audit.md has it")
    options = p.parse_args(arguments)
    findings, d = checked(options.step)
    result = as_json(findings)
    print(json.dumps(result, indent=1) if options.json else report(findings, d))
    return int(not result["agrees"])
