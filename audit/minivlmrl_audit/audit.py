"""`python -m minivlmrl audit STEP`: compute a dumped step again, and name what explains it.

Each stage is compared by itself, from what the trainer had before it, so one mistake is reported
once. For a stage that differs known causes are tried alone, then in the most promising pairs, each
also up to a factor. Exit status 0: all agrees, 1: not, 2: nothing could be compared.
"""

import argparse
import json
import math
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from minivlmrl.hub.recipe_values import naming
from minivlmrl_audit import stages, updates
from minivlmrl_audit.dump import DAMAGES, Dump, read
from minivlmrl_audit.moves import TABLE, formula

TOLERANCE = 1e-5  # of an error, in units of what was added up: some times float32's rounding
LOGPS = {
    "logps": ("per_token_logps", "model"),
    "logps of old": ("old_per_token_logps", "old_model"),
    "logps of sampler": ("sampler_logps", "old_model"),
    "logps of reference": ("ref_per_token_logps", "ref_model"),
}
BEFORE = ("advantages", "rows", "tokens", "pictures", "mask")
STAGES = {name: getattr(stages, name) for name in BEFORE}
STAGES |= {name: partial(updates.logps, *of) for name, of in LOGPS.items()} | {"loss": stages.loss}
STAGES |= {name: getattr(updates, name) for name in ("gradients", "clip", "update", "schedule")}
# what may be off by a factor
FACTORS = ("advantages", "rows", "loss", "gradients", "clip", "update", "schedule")
THROUGH_A_MODEL = ("gradients", *LOGPS)
EVALUATIONS = 1000, 50  # of pairs at most; through a model
NUMBERS = 4096  # of a stage, by which pairs are judged before they are tried


@dataclass
class Cause:
    """A deviation of a stage from its definition: a row of causes.yaml, or composed."""

    name: str
    says: str
    stages: str = ""
    change: dict = field(default_factory=dict)  # what the stage's function computes differently
    source: str = ""
    costs: str = ""
    about: str = ""  # what a step needs to show it


CAUSES = [
    Cause(**{name: x for name, x in (group | row).items() if name != "list"})
    for group in TABLE["causes"]
    for row in group["list"]
]
Fit = tuple[list[Cause], float]  # causes, and the error that is left


def causes(name: str, d: Dump) -> list[Cause]:
    """List what may go wrong in a stage of this step: causes.yaml's, then what is composed."""
    names = {name, name.partition(" ")[0], d.about["kind"] if name == "loss" else name}
    known = [cause for cause in CAUSES if names & set(cause.stages.split())]
    for row in TABLE["things"]:
        if names & set(row["stages"].split()) and row.get("needs", "input_ids") in d.tensors:
            about = {name: row[name] for name in ("source", "costs", "about") if name in row}
            changes = {} if "of" in row else TABLE["terms"]
            for kind in row.get("of", "").split():
                units = TABLE[kind] if kind == "pictures" else getattr(d, kind)
                if "mask" in names:  # what is compared is no unit for itself
                    units = [text for text in units if "counted tokens" not in text]
                for how, change in row.get("changes", {"{}": None}).items():
                    of = ((kind, text, *filter(None, [change])) for text in units)
                    changes = changes | {how.format(x[1]): x for x in of}
            for text, change in changes.items():
                says = f"{row['says']} {text}"
                name = f"{row['thing']}: {text}"
                known.append(Cause(name, says, change={row["thing"]: change}, **about))
    return known


@dataclass
class Finding:
    """What became of a stage; it agrees where the error is at most TOLERANCE."""

    stage: str
    error: float
    numbers: int
    where: list[str] = field(default_factory=list)  # which differ; the first of these, and how
    # by the fewest causes; empty: no known cause explains it
    explained: list[Fit] = field(default_factory=list)
    again: bool = False  # an earlier stage says so already
    unseen: Counter = field(default_factory=Counter)  # causes that would change no number

    @property
    def ok(self) -> bool:
        return self.error <= TOLERANCE


def audit(d: Dump) -> list[Finding]:
    """Check every stage for which the dump has what is needed."""
    findings = []
    named = []
    for name, stage in STAGES.items():
        if name == "mask" and d.ids is None:
            continue  # it is of ids that nothing explains
        try:
            if (answer := stage(d, {})) is None:
                continue
            count = sum(has.numel() for has, _, _ in answer.values())
            findings.append(f := Finding(name, error(answer), count))
        except (ValueError, *DAMAGES) as cause:
            if name in THROUGH_A_MODEL and "pictures" in {f.stage for f in findings if not f.ok}:
                d.forward = None
                continue  # these pictures do not fit the ids
            what = f"{type(cause).__name__} {cause}: a tensor or a field is not as in docs/audit.md"
            raise ValueError(f"{name} cannot be computed again: {what}") from cause
        if f.ok:
            f.unseen = unseen(name, d, answer)
            continue
        again = [fit for one in named if (fit := fits(name, d, one))]
        f.where = where(answer, d)
        f.again = bool(again)
        f.explained = again or explain(name, d)
        ids = next((other for other in findings if other.stage == "tokens" and not other.ok), None)
        if name == "mask" and ids and not f.explained:  # it is of these ids
            f.again, f.explained = True, ids.explained
        named += [one for one, _ in f.explained[:1] if all(cause.change for cause in one)]
        change = merged(f.explained[0][0]) if f.explained else None
        if name == "logps":  # gradients are then those of the forward that is known
            d.forward = change
        if name == "tokens":  # as masks are of the ids
            d.ids = change
            for kind in ("regions", "edges"):
                d.__dict__.pop(kind, None)
    return findings


def error(answer: dict, factor: float = 1.0) -> float:
    """Measure the largest difference, in units; infinite for what is not finite."""
    gaps = [(x - factor * should, unit) for x, should, unit in answer.values() if x.numel()]
    sizes = [(gap.abs() / unit).max().item() for gap, unit in gaps]
    return max((size if math.isfinite(size) else math.inf for size in sizes), default=0.0)


def merged(some: list[Cause]) -> dict | None:
    """Join the deviations of several causes; None: two values for one."""
    change = dict(pair for cause in some for pair in cause.change.items())
    return change if len(change) == sum(len(cause.change) for cause in some) else None


def computed(name: str, d: Dump, change: dict | None) -> dict | None:
    """Compute a stage with a deviation; None: with it the step has no answer."""
    try:
        return None if change is None else STAGES[name](d, change)
    except (ValueError, *DAMAGES):  # such as a mask that leaves an answer of a pair no token
        return None


def unseen(name: str, d: Dump, answer: dict) -> Counter:
    """Count the causes of each topic, and those that change no number and need no model."""
    topics = Counter()
    for cause in causes(name, d) if name not in THROUGH_A_MODEL else ():
        if cause.about and (other := computed(name, d, cause.change)):
            pairs = {key: (answer[key][1], x, unit) for key, (_, x, unit) in other.items()}
            topics[cause.about, "all"] += 1
            topics[cause.about, "unseen"] += error(pairs) <= TOLERANCE
    return topics


def explain(name: str, d: Dump) -> list[Fit]:
    """Search the simplest sets of causes that give the trainer's numbers."""
    d.known, base = {}, computed(name, d, {})
    if name in LOGPS:  # two rows tell enough; what explains them has to explain all
        [(has, should, unit)] = base.values()
        d.part = ((has - should).abs() / unit).amax(1).topk(min(2, len(has))).indices
        base = computed(name, d, {})
    # causes; a factor is one
    one = []
    two = []
    known = []
    gives = [numbers(base, base)]
    for cause in causes(name, d):
        if (answer := computed(name, d, cause.change)) is None:
            continue
        one.append(fit(answer, [cause], d))
        two.append(fit(answer, [cause], d, scaled=name in FACTORS))
        changed = numbers(answer, base)
        if not any(torch.equal(changed, other) for other in gives):
            known.append(cause)
            gives.append(changed)
    one.append(fit(base, [], d, scaled=name in FACTORS))
    if not any(one):
        pairs = promising(numbers(base, base, of=0), *gives)
        for number, pair in enumerate(pairs[: EVALUATIONS[name in THROUGH_A_MODEL]]):
            if number % 100 == 0 and any(two):
                break
            two.append(fits(name, d, [known[i] for i in pair]))
    d.known = d.part = None
    fitting = list(filter(None, one if any(one) else two))
    if name in LOGPS:
        fitting = list(filter(None, (fits(name, d, some) for some, _ in fitting)))
    limit = max(10 * min((left for _, left in fitting), default=0.0), TOLERANCE / 100)
    return [(some, left) for some, left in fitting if left <= limit]


def numbers(answer: dict, base: dict, of: int = 1) -> Tensor:
    """Sample numbers of a stage, theirs (0) or ours (1), in the units of its definition."""
    every = [(answer[name][of] / unit).flatten() for name, (_, _, unit) in base.items()]
    every = torch.cat(every).nan_to_num(0.0, 0.0, 0.0)
    return every[:: 1 + len(every) // NUMBERS]


def promising(theirs: Tensor, right: Tensor, *gives: Tensor) -> list[tuple[int, int]]:
    """Rank pairs of causes that may explain a stage, by what each gives alone.

    What one leaves wrong the other must change. Those come first whose changes, added or
    multiplied, come closest.
    """
    gives = torch.stack(gives) if gives else right.new_zeros(0, len(right))
    wrong = ((gives - theirs).abs() > 10 * TOLERANCE).float()
    same = ((gives - right).abs() < TOLERANCE / 10).float()
    hopeless = wrong @ same.T
    ranked = []
    for i, x in enumerate(gives):
        others = ((hopeless + hopeless.T)[i, i + 1 :] == 0).nonzero()[:, 0] + i + 1
        y = gives[others]
        for both in (x + y - right, x * y / torch.where(right == 0, 1.0, right)):
            gaps = (both - theirs).abs().clamp(max=1).mean(1)
            ranked += [(gap, i, j) for gap, j in zip(gaps.tolist(), others.tolist(), strict=True)]
    return list(dict.fromkeys((i, j) for _, i, j in sorted(ranked)))


def fits(name: str, d: Dump, some: list[Cause], scaled: bool = False) -> Fit | None:
    """Return the causes and what they leave if they explain the stage, `scaled`: with a factor."""
    answer = computed(name, d, merged(some))
    return answer and fit(answer, some, d, scaled)


def fit(answer: dict, some: list[Cause], d: Dump, scaled: bool = False) -> Fit | None:
    """Compare an answer as `fits` does."""
    factor = 1.0
    if scaled:
        parts = [(x / unit, y / unit) for x, y, unit in answer.values()]
        has, should = (torch.cat([x.flatten() for x in of]) for of in zip(*parts, strict=True))
        power = should.square().sum().item()
        factor = (has @ should).item() / power if power else math.nan
        # any number is another times a factor
        some = [*some, why(factor, d, few=should.count_nonzero() < 3)]
    left = error(answer, factor)
    return (some, left) if left <= TOLERANCE and None not in some else None


def why(factor: float, d: Dump, few: bool) -> Cause | None:
    """Name what a factor may come from; None: nothing that is known, and any number is one."""
    counts = {what: formula(how, d=d, of=d.about.get) for what, how in TABLE["counts"].items()}
    known = [(0.0, "it is exactly zero"), (-1.0, "the sign is wrong")]
    known += [(n, f"not divided by the {n:g} {what}") for what, n in counts.items()]
    known += [(1 / n, f"divided once more by the {n:g} {what}") for what, n in counts.items()]
    near = partial(math.isclose, factor, rel_tol=1e-4, abs_tol=1e-7)
    sources = [text for value, text in known if value != 1 and near(value)]
    says = " or ".join(sources) or f"all of it is {factor:.6g} times"
    costs = "the learning rate means something else"
    unknown = not sources and (few or not math.isfinite(factor))
    return None if unknown else Cause(f"factor {factor:.6g}", says, costs=costs)


def where(answer: dict, d: Dump) -> list[str]:
    """Say which pairs differ, in a few words; then of some tensors the first that differ, theirs
    over ours, and on what that ratio depends."""
    wrong = {name: (x - y).abs() / unit > TOLERANCE for name, (x, y, unit) in answer.items()}
    counts = [f"{name}: {int(x.sum())} of {x.numel()}" for name, x in wrong.items() if x.any()]
    counts[3:] = [f"and {len(counts) - 3} more"] * (len(counts) > 3)
    lines = []
    n = len(d["micro_batch"])
    for name, (x, y, unit) in answer.items():
        at = [(f"{i}", x[tuple(i)], y[tuple(i)]) for i in wrong[name].nonzero()[:4].tolist()]
        of = {"is one number": x * 0}
        if 0 < x.dim() < 3 and len(x) == n:
            column = (n,) + (1,) * (x.dim() - 1)
            of["depends on the micro-batch alone"] = x * 0 + d["micro_batch"].view(column)
            of["depends on the row alone"] = x * 0 + torch.arange(n).view(column)
        if x.dim() == 2:
            of["depends on the column alone"] = x * 0 + torch.arange(x.shape[1])
        real = y.abs() / unit > 100 * TOLERANCE
        ratio = x / y
        depends = next((says for says, by in of.items() if steady(ratio[real], by[real])), "varies")
        pairs = ", ".join(f"{i}: {theirs:.4g} over {ours:.4g}" for i, theirs, ours in at)
        lines += [f"{name} at {pairs}; theirs over ours {depends}"] * bool(at)
    return [", ".join(counts), *lines[:3]]


def steady(x: Tensor, by: Tensor) -> bool:
    """Tell whether x (N,) is one number wherever `by` is."""
    parts = [x[by == value] for value in by.unique()]
    return all((part - part[0]).abs().max() <= 1e-3 * part[0].abs() for part in parts)


def report(findings: list[Finding], d: Dump) -> str:
    """Write the lines that the tool prints."""
    lines = []
    unseen = Counter()
    for f in findings:
        unseen += f.unseen
        word = "agrees" if f.ok else "DIFFERS"
        numbers = f"{f.numbers:9} numbers, error {f.error:.0e}  {'; '.join(f.where[:1])}".rstrip()
        lines.append(f"{f.stage:20} {word:8}{numbers}")
        for number, (some, left) in enumerate(f.explained[: 1 if f.again else 4]):
            word = "or" if number else "again" if f.again else "explained by"
            names = " and ".join(cause.name for cause in some)
            lines.append(f"{'':12}{word}: {names} (to {left:.0e})")
            for cause in () if f.again else some:
                about = cause.says, cause.source, cause.costs and f"costs: {cause.costs}"
                lines.append(f"{'':16}{'; '.join(filter(None, about))}")
        if not (f.ok or f.explained):
            lines += [f"{'':12}no known cause explains it", *(f"{'':16}{x}" for x in f.where[1:])]
    left = [name for name in STAGES if name not in {f.stage for f in findings}]
    lines.append(f"not in this step: {', '.join(left) or 'nothing'}")
    for about in (about for about, kind in unseen if kind == "all"):
        count = unseen[about, "all"]
        hidden = unseen[about, "unseen"]
        if 2 * hidden >= count:
            lines.append(f"cannot show: {hidden} of {count} mistakes of {about}")
    return "\n".join(lines)


def checked(folder) -> tuple[list[Finding], Dump]:
    """Audit a step's folder (ValueError: it is none, or nothing of it can be compared)."""
    d = read(folder)
    with naming(folder):
        findings = audit(d)
        some = sum(f.numbers for f in findings) and d["completion_mask"].any()
        if all(f.ok for f in findings) and not some:
            why = "no token counts" if findings else "each stage lacks a tensor or a field"
            raise ValueError(f"nothing was compared: {why}; docs/audit.md says what a step has")
    return findings, d


def as_json(findings: list[Finding]) -> dict:
    """Return what `report` says as an object; fields may come, none of these goes."""
    stages = []
    for f in findings:
        fits = [
            (left, [{"name": of.name, "says": of.says} for of in some])
            for some, left in f.explained
        ]
        own = {name: getattr(f, name) for name in ("stage", "numbers", "again", "where")}
        own |= {"agrees": f.ok, "error": f.error if math.isfinite(f.error) else None}
        stages.append(own | {"explained": [{"error": left, "causes": of} for left, of in fits]})
    left = [name for name in STAGES if name not in {f.stage for f in findings}]
    agrees = all(f.ok for f in findings)
    return {"schema": 1, "agrees": agrees, "stages": stages, "not_in_this_step": left}


def main(arguments: list[str] | None = None) -> int:
    """Audit the step that the command line names; returns the exit status."""
    p = argparse.ArgumentParser("python -m minivlmrl audit", description="Check a dumped step.")
    p.add_argument("step", help="a folder with step.json and step.safetensors: docs/audit.md")
    p.add_argument("--json", action="store_true", help="print one object, as docs/audit.md has it")
    options = p.parse_args(arguments)
    findings, d = checked(options.step)
    said = as_json(findings)
    print(json.dumps(said, indent=1) if options.json else report(findings, d))
    return int(not said["agrees"])
