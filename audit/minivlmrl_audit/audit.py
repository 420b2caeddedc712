"""`python -m minivlmrl audit STEP`: compute a dumped step again, and name what explains it.

Each stage is compared by itself, from what the trainer had before it, so one mistake is reported
once. For a stage that differs known causes are tried alone, then in the most promising pairs, each
also up to a factor. Exit status 0: all agrees, 1: not, 2: nothing could be compared.
"""

import argparse
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from minivlmrl.hub.recipe_values import naming
from minivlmrl_audit import stages, updates
from minivlmrl_audit.dump import DAMAGES, Dump, read
from minivlmrl_audit.moves import TABLE, Change, formula

TOLERANCE = 1e-5  # of an error, in units of what was added up: some times float32's rounding
STAGES = {
    "advantages": stages.advantages,
    "rows": stages.rows,
    "tokens": stages.tokens,
    "pictures": stages.pictures,
    "mask": stages.mask,
    "logps": partial(updates.logps, "per_token_logps", "model"),
    "logps of old": partial(updates.logps, "old_per_token_logps", "old_model"),
    "logps of sampler": partial(updates.logps, "sampler_logps", "old_model"),
    "logps of reference": partial(updates.logps, "ref_per_token_logps", "ref_model"),
    "loss": stages.loss,
    "gradients": updates.gradients,
    "clip": updates.clip,
    "update": updates.update,
    "schedule": updates.schedule,
}
LOGPS = ("logps", "logps of old", "logps of sampler", "logps of reference")
THROUGH_A_MODEL = (*LOGPS, "gradients")
# what may be off by a factor
FACTORS = ("advantages", "rows", "loss", "gradients", "clip", "update", "schedule")
EVALUATIONS = 1000  # of pairs at most
MODEL_EVALUATIONS = 50  # where each needs a model
THEIRS = 0  # index of what the trainer has, in what a stage gives
OURS = 1
NUMBERS = 4096  # of a stage, by which pairs are judged before they are tried


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


Fit = tuple[list[Cause], float]  # causes, and the error that is left


@dataclass
class Finding:
    """What became of a stage; it agrees where the error is at most TOLERANCE."""

    stage: str
    error: float
    numbers: int
    where: Sequence[str] = ()  # which differ; the first of these, and how
    explained: Sequence[Fit] = ()  # by the fewest causes; empty: no known cause explains it
    again: bool = False  # an earlier stage says so already
    unseen: Counter = field(default_factory=Counter)  # causes that would change no number

    @property
    def ok(self) -> bool:
        return self.error <= TOLERANCE


def causes_of_table() -> list[Cause]:
    """Read the rows of causes.yaml: what one does not say, its list says."""
    result = []
    for group in TABLE["causes"]:
        shared_fields = {name: value for name, value in group.items() if name != "list"}
        result += [Cause(**shared_fields | row) for row in group["list"]]
    return result


CAUSES = causes_of_table()


def possible_causes(name: str, d: Dump) -> list[Cause]:
    """List what may go wrong in a stage of this step: causes.yaml's, then what is composed."""
    names = {name, name.partition(" ")[0]}
    if name == "loss":
        names.add(d.about["kind"])
    result = [cause for cause in CAUSES if names & set(cause.stages)]
    for thing in TABLE["things"]:
        if names & set(thing["stages"]) and thing.get("needs", "input_ids") in d.tensors:
            result += composed(thing, d, "mask" in names)
    return result


def composed(thing: dict, d: Dump, in_mask: bool) -> list[Cause]:
    """Compose causes of a thing and what it may take, such as another row, or be, such as 0."""
    changes = {}
    for kind in thing.get("units", []):
        units = TABLE[kind] if kind == "pictures" else getattr(d, kind)
        for says, text in thing.get("changes", {"{}": None}).items():
            for unit in units:
                # the mask that is compared is no unit for itself
                if not (in_mask and "counted tokens" in unit):
                    changes[says.format(unit)] = (
                        (kind, unit) if text is None else (kind, unit, text)
                    )
    if "units" not in thing:
        changes = TABLE["terms"]
    shared_fields = {name: thing[name] for name in ("source", "costs", "about") if name in thing}
    result = []
    for text, change in changes.items():
        name = thing["thing"]
        says = f"{thing['says']} {text}"
        result.append(Cause(f"{name}: {text}", says, change={name: change}, **shared_fields))
    return result


def audit(d: Dump) -> list[Finding]:
    """Check every stage for which the dump has what is needed."""
    findings = []
    named = []  # what explains earlier stages, lists of causes
    for name, stage in STAGES.items():
        if name == "mask" and d.ids is None:
            continue  # it is of ids that nothing explains
        differing = {finding.stage: finding for finding in findings if not finding.ok}
        try:
            answer = stage(d, Change(d, {}))
            if answer is None:
                continue
            count = sum(theirs.numel() for theirs, _, _ in answer.values())
            finding = Finding(name, error(answer), count)
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
            if name not in THROUGH_A_MODEL:
                finding.unseen = unseen(name, d, answer)
            continue
        finding.where = where(answer, d)
        look_for_causes(finding, d, named, differing)
        for causes, _ in finding.explained[:1]:
            if all(cause.change for cause in causes):
                named.append(causes)
    return findings


def look_for_causes(finding: Finding, d: Dump, named: list, differing: dict[str, Finding]):
    """Explain a stage that differs, and let the stages after it know."""
    known_fits = [fit for causes in named for fit in fits(finding.stage, d, causes)]
    finding.again = bool(known_fits)
    finding.explained = known_fits or explain(finding.stage, d)
    if finding.stage == "mask" and "tokens" in differing and not finding.explained:
        finding.again = True  # it is of these ids
        finding.explained = differing["tokens"].explained
    change = merged(finding.explained[0][0]) if finding.explained else None
    if finding.stage == "logps":  # gradients are then those of the forward that is known
        d.forward = change
    if finding.stage == "tokens":  # as masks are of the ids
        d.ids = change
        for kind in ("regions", "edges"):
            d.__dict__.pop(kind, None)


def error(answer: dict, factor: float = 1.0) -> float:
    """Measure the largest difference, in units; infinite for what is not finite."""
    largest_error = 0.0
    for theirs, ours, unit in answer.values():
        if theirs.numel():
            size = ((theirs - factor * ours).abs() / unit).max().item()
            largest_error = max(largest_error, size if math.isfinite(size) else math.inf)
    return largest_error


def merged(causes: list[Cause]) -> dict | None:
    """Join the deviations of several causes; None: two values for one."""
    change = {}
    for cause in causes:
        if change.keys() & cause.change.keys():
            return None
        change |= cause.change
    return change


def computed(name: str, d: Dump, change: dict | None) -> dict | None:
    """Compute a stage with a deviation; None: with it the step has no answer."""
    try:
        return None if change is None else STAGES[name](d, Change(d, change))
    except (ValueError, *DAMAGES):  # such as a mask that leaves an answer of a pair no token
        return None


def unseen(name: str, d: Dump, answer: dict) -> Counter:
    """Count the causes of each topic, and those that change no number."""
    topic_counts = Counter()
    for cause in possible_causes(name, d):
        other_answer = computed(name, d, cause.change) if cause.about else None
        if other_answer:
            pairs = {key: (answer[key][1], x, unit) for key, (_, x, unit) in other_answer.items()}
            topic_counts[cause.about, "all"] += 1
            topic_counts[cause.about, "unseen"] += error(pairs) <= TOLERANCE
    return topic_counts


def explain(name: str, d: Dump) -> list[Fit]:
    """Search the simplest sets of causes that give the trainer's numbers."""
    d.cache = {}
    base_answer = computed(name, d, {})
    if name in LOGPS:  # two rows tell enough; what explains them has to explain all
        [(theirs, ours, unit)] = base_answer.values()
        errors = ((theirs - ours).abs() / unit).amax(1)
        d.part = errors.topk(min(2, len(theirs))).indices
        base_answer = computed(name, d, {})
    fitting_causes = search(name, d, base_answer)
    d.cache = None
    d.part = None
    if name in LOGPS:
        fitting_causes = [fit for causes, _ in fitting_causes for fit in fits(name, d, causes)]
    smallest_error = min((error_left for _, error_left in fitting_causes), default=0.0)
    limit = max(10 * smallest_error, TOLERANCE / 100)
    return [(causes, error_left) for causes, error_left in fitting_causes if error_left <= limit]


def search(name: str, d: Dump, base_answer: dict) -> list[Fit]:
    """Find single causes that give a stage's numbers, or else pairs of them; a factor is one."""
    scaled = name in FACTORS
    single_fits = []
    pair_fits = []
    different_causes = []  # causes that do something else than those before them, and what they give
    cause_numbers = [numbers(base_answer, base_answer, OURS)]
    for cause in possible_causes(name, d):
        answer = computed(name, d, cause.change)
        if answer is None:
            continue
        single_fits += fit(answer, [cause], d)
        pair_fits += fit(answer, [cause], d, scaled)
        changed_numbers = numbers(answer, base_answer, OURS)
        if not any(torch.equal(changed_numbers, other) for other in cause_numbers):
            different_causes.append(cause)
            cause_numbers.append(changed_numbers)
    single_fits += fit(base_answer, [], d, scaled)
    if single_fits:
        return single_fits
    ranked_pairs = promising(numbers(base_answer, base_answer, THEIRS), *cause_numbers)
    limit = MODEL_EVALUATIONS if name in THROUGH_A_MODEL else EVALUATIONS
    for number, (i, j) in enumerate(ranked_pairs[:limit]):
        if number % 100 == 0 and pair_fits:
            break
        pair_fits += fits(name, d, [different_causes[i], different_causes[j]])
    return pair_fits


def numbers(answer: dict, base_answer: dict, side: int) -> Tensor:
    """Sample numbers of a stage, THEIRS or OURS, in the units of its definition."""
    parts = [(answer[name][side] / unit).flatten() for name, (_, _, unit) in base_answer.items()]
    values = torch.cat(parts).nan_to_num(0.0, 0.0, 0.0)
    return values[:: 1 + len(values) // NUMBERS]


def promising(theirs: Tensor, right: Tensor, *cause_numbers: Tensor) -> list[tuple[int, int]]:
    """Rank pairs of causes that may explain a stage, by what each gives alone.

    What one leaves wrong the other must change. Those come first whose changes, added or
    multiplied, come closest.
    """
    cause_numbers = torch.stack(cause_numbers) if cause_numbers else right.new_zeros(0, len(right))
    wrong = ((cause_numbers - theirs).abs() > 10 * TOLERANCE).float()
    same = ((cause_numbers - right).abs() < TOLERANCE / 10).float()
    hopeless = wrong @ same.T  # how many numbers are wrong with one, and the same with the other
    hopeless = hopeless + hopeless.T
    divisor = torch.where(right == 0, 1.0, right)
    ranked_pairs = []
    for i, own_numbers in enumerate(cause_numbers):
        others = (hopeless[i, i + 1 :] == 0).nonzero()[:, 0] + i + 1
        other_numbers = cause_numbers[others]
        for joined in (own_numbers + other_numbers - right, own_numbers * other_numbers / divisor):
            gaps = (joined - theirs).abs().clamp(max=1).mean(1)
            ranked_pairs += [
                (gap, i, j) for gap, j in zip(gaps.tolist(), others.tolist(), strict=True)
            ]
    return list(dict.fromkeys((i, j) for _, i, j in sorted(ranked_pairs)))


def fits(name: str, d: Dump, causes: list[Cause], scaled: bool = False) -> list[Fit]:
    """List the causes and what they leave if they explain the stage, `scaled`: with a factor."""
    answer = computed(name, d, merged(causes))
    return fit(answer, causes, d, scaled) if answer else []


def fit(answer: dict, causes: list[Cause], d: Dump, scaled: bool = False) -> list[Fit]:
    """Compare an answer as `fits` does."""
    factor = 1.0
    if scaled:
        theirs = torch.cat([(x / unit).flatten() for x, _, unit in answer.values()])
        ours = torch.cat([(x / unit).flatten() for _, x, unit in answer.values()])
        power = ours.square().sum().item()
        factor = (theirs @ ours).item() / power if power else math.nan
        # any number is another times a factor
        cause = why(factor, d, few=ours.count_nonzero() < 3)
        if cause is None:
            return []
        causes = [*causes, cause]
    error_left = error(answer, factor)
    return [(causes, error_left)] if error_left <= TOLERANCE else []


def why(factor: float, d: Dump, few: bool) -> Cause | None:
    """Name what a factor may come from; None: nothing that is known, and any number is one."""
    known_factors = [(0.0, "it is exactly zero"), (-1.0, "the sign is wrong")]
    names = {"step": d, "about": d.about}
    counts = [(formula(text, **names), unit) for unit, text in TABLE["counts"].items()]
    known_factors += [(n, f"not divided by the {n:g} {unit}") for n, unit in counts if n != 1]
    known_factors += [
        (1 / n, f"divided once more by the {n:g} {unit}") for n, unit in counts if n != 1
    ]
    is_near = partial(math.isclose, factor, rel_tol=1e-4, abs_tol=1e-7)
    sources = [says for number, says in known_factors if is_near(number)]
    if not sources and (few or not math.isfinite(factor)):
        return None
    says = " or ".join(sources) or f"all of it is {factor:.6g} times"
    return Cause(f"factor {factor:.6g}", says, costs="the learning rate means something else")


def where(answer: dict, d: Dump) -> list[str]:
    """Say which numbers differ, and of three tensors the first that do, theirs over ours."""
    wrong_counts = []
    lines = []
    for name, (theirs, ours, unit) in answer.items():
        wrong = ~((theirs - ours).abs() / unit <= TOLERANCE)  # NaN too
        if not wrong.any():
            continue
        wrong_counts.append(f"{name}: {int(wrong.sum())} of {wrong.numel()}")
        pairs = []
        for place in wrong.nonzero()[:4].tolist():
            index = tuple(place)
            pairs.append(f"{place}: {theirs[index]:.4g} over {ours[index]:.4g}")
        depends = dependence(theirs, ours, unit, d)
        lines.append(f"{name} at {', '.join(pairs)}; theirs over ours {depends}")
    if len(wrong_counts) > 3:
        wrong_counts[3:] = [f"and {len(wrong_counts) - 3} more"]
    return [", ".join(wrong_counts), *lines[:3]]


def dependence(theirs: Tensor, ours: Tensor, unit, d: Dump) -> str:
    """Say on what the ratio of theirs to ours depends."""
    zeros = torch.zeros_like(theirs)
    indices = {"is one number": zeros}
    if 0 < theirs.dim() < 3 and len(theirs) == len(d.all_rows):
        column = (-1,) + (1,) * (theirs.dim() - 1)
        indices["depends on the micro-batch alone"] = zeros + d["micro_batch"].view(column)
        indices["depends on the row alone"] = zeros + d.all_rows.view(column)
    if theirs.dim() == 2:
        indices["depends on the column alone"] = zeros + torch.arange(theirs.shape[1])
    is_large = ours.abs() / unit > 100 * TOLERANCE
    ratio = (theirs / ours)[is_large]
    for says, index in indices.items():
        if steady(ratio, index[is_large]):
            return says
    return "varies"


def steady(x: Tensor, index: Tensor) -> bool:
    """Tell whether x (N,) is one number wherever `index` is."""
    parts = [x[index == value] for value in index.unique()]
    return all((part - part[0]).abs().max() <= 1e-3 * part[0].abs() for part in parts)


def report(findings: list[Finding], d: Dump) -> str:
    """Write the lines that the tool prints."""
    lines = []
    topic_counts = Counter()
    for finding in findings:
        lines += finding_lines(finding)
        topic_counts += finding.unseen
    lines.append(f"not in this step: {', '.join(not_in_step(findings)) or 'nothing'}")
    for about, kind in topic_counts:
        count = topic_counts[about, "all"]
        hidden_count = topic_counts[about, "unseen"]
        if kind == "all" and 2 * hidden_count >= count:
            lines.append(f"cannot show: {hidden_count} of {count} mistakes of {about}")
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
        return lines + [f"{'':12}again: {fit_line(*fit)}" for fit in finding.explained[:1]]
    word = "explained by"
    for causes, error_left in finding.explained[:4]:
        lines.append(f"{'':12}{word}: {fit_line(causes, error_left)}")
        word = "or"
        for cause in causes:
            about = [cause.says, cause.source, cause.costs and f"costs: {cause.costs}"]
            lines.append(f"{'':16}{'; '.join(filter(None, about))}")
    return lines


def fit_line(causes: list[Cause], error_left: float) -> str:
    """Name causes and the error that they leave."""
    return f"{' and '.join(cause.name for cause in causes)} (to {error_left:.0e})"


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
    for causes, error_left in finding.explained:
        named = [{"name": cause.name, "says": cause.says} for cause in causes]
        explained.append({"error": error_left, "causes": named})
    return {
        "stage": finding.stage,
        "numbers": finding.numbers,
        "again": finding.again,
        "where": list(finding.where),
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
