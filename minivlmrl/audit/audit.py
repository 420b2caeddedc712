"""`python -m minivlmrl audit STEP`: compute a dumped step again, and name what explains the numbers
that differ.

Each stage is compared by itself, from what the trainer had before it, so one mistake is reported
once. For a stage that differs known causes are tried alone, then in pairs, each also up to a
factor. Exit status 0: all agrees, 1: not.
"""

import argparse
import math
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path

import torch
import yaml

from minivlmrl.audit import stages, updates
from minivlmrl.audit.dump import DAMAGES, Dump, read
from minivlmrl.hub.checker import naming

TOLERANCE = 1e-5  # of an error, in units of what was added up: some times float32's rounding
LOGPS = {
    "logps": ("per_token_logps", "model"),
    "logps of old": ("old_per_token_logps", "old_model"),
    "logps of sampler": ("sampler_logps", "old_model"),
    "logps of reference": ("ref_per_token_logps", "ref_model"),
}
STAGES = {name: getattr(stages, name) for name in ("advantages", "rows", "mask")}
STAGES |= {name: partial(updates.logps, *of) for name, of in LOGPS.items()} | {"loss": stages.loss}
STAGES |= {name: getattr(updates, name) for name in ("gradients", "clip", "update", "schedule")}
# what may be off by a factor
FACTORS = ("advantages", "rows", "loss", "gradients", "clip", "update", "schedule")


@dataclass
class Cause:
    """A deviation of a stage from its definition: a row of causes.yaml."""

    name: str
    says: str
    stages: str = ""
    change: dict = field(default_factory=dict)  # what the stage's function computes differently
    source: str = ""
    costs: str = ""


TABLE = Path(__file__).parent / "causes.yaml"
CAUSES = [Cause(**row) for row in yaml.safe_load(TABLE.read_text(encoding="utf-8"))]
Fit = tuple[list[Cause], float]  # causes, and the error that is left


@dataclass
class Finding:
    """What became of a stage; it agrees where the error is at most TOLERANCE."""

    stage: str
    error: float
    numbers: int
    where: str = ""  # which differ
    # by the fewest causes; empty: no known cause explains it
    explained: list[Fit] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.error <= TOLERANCE


def audit(d: Dump) -> list[Finding]:
    """Check every stage for which the dump has what is needed."""
    findings = []
    for name, stage in STAGES.items():
        try:
            if (answer := stage(d, {})) is None:
                continue
            count = sum(has.numel() for has, _, _ in answer.values())
            findings.append(f := Finding(name, error(answer), count))
        except (ValueError, *DAMAGES) as cause:
            what = f"{type(cause).__name__} {cause}: a tensor or a field is not as in docs/audit.md"
            raise ValueError(f"{name} cannot be computed again: {what}") from cause
        if not f.ok:
            f.where, f.explained = where(answer), explain(name, d)
        if name == "logps" and not f.ok:  # gradients are then those of the forward that is known
            d.forward = None
            if f.explained:
                causes, _ = f.explained[0]
                d.forward = dict(pair for cause in causes for pair in cause.change.items())
    return findings


def error(answer: dict, factor: float = 1.0) -> float:
    """The largest difference, in units; infinite for what is not finite."""
    given = [(x - factor * should, unit) for x, should, unit in answer.values() if x.numel()]
    sizes = [(gap.abs() / unit).max().item() for gap, unit in given]
    return max((size if math.isfinite(size) else math.inf for size in sizes), default=0.0)


def explain(name: str, d: Dump) -> list[Fit]:
    """The simplest sets of causes that give the trainer's numbers."""
    own = {name, name.partition(" ")[0], d.about["kind"] if name == "loss" else name}
    known = [cause for cause in CAUSES if own & set(cause.stages.split())]
    for size in (1, 2):
        sets = [(list(causes), False) for causes in combinations(known, size)]
        if name in FACTORS:
            sets += [(list(causes), True) for causes in combinations(known, size - 1)]
        if fitting := [fit for causes, scaled in sets if (fit := fits(name, d, causes, scaled))]:
            limit = max(10 * min(left for _, left in fitting), TOLERANCE / 100)
            return [(causes, left) for causes, left in fitting if left <= limit]
    return []


def computed(name: str, d: Dump, change: dict) -> dict | None:
    """What a stage answers with a deviation; None: with it the step has no answer."""
    try:
        return STAGES[name](d, change)
    except (ValueError, *DAMAGES):  # such as a mask that leaves an answer of a pair no token
        return None


def fits(name: str, d: Dump, causes: list[Cause], scaled: bool) -> Fit | None:
    """The causes and what they leave, if they explain the stage;
    `scaled`: together with a factor, which is fitted."""
    change = dict(pair for cause in causes for pair in cause.change.items())
    if len(change) < sum(len(cause.change) for cause in causes):
        return None  # two values for one deviation
    if (answer := computed(name, d, change)) is None:
        return None
    factor = 1.0
    if scaled:
        parts = [(x / unit, y / unit) for x, y, unit in answer.values()]
        has, should = (torch.cat([x.flatten() for x in of]) for of in zip(*parts, strict=True))
        power = should.square().sum().item()
        factor = (has @ should).item() / power if power else math.nan
        # any number is another times a factor
        causes = [*causes, why(factor, d, few=should.count_nonzero() < 3)]
    left = error(answer, factor)
    return (causes, left) if left <= TOLERANCE and None not in causes else None


def why(factor: float, d: Dump, few: bool) -> Cause | None:
    """What a factor may come from."""
    part = len(d.micro_batches[0])
    counts = {
        "micro-batches": len(d.micro_batches),
        "rows": len(d["input_ids"]),
        "tokens that count": d["completion_mask"].sum().item(),
        "ranks": d.about.get("world_size", 1),
        "completions of a group": d.about.get("num_generations", 1),
        "steps of a rollout": d.about.get("steps_per_rollout", 1),
        "rows of a micro-batch": part,
        "pairs of a micro-batch": 1 if d.get("pair") is None else part // 2,
    }
    known = [(0.0, "it is exactly zero"), (-1.0, "the sign is wrong")]
    known += [(n, f"not divided by the {n:g} {what}") for what, n in counts.items()]
    known += [(1 / n, f"divided once more by the {n:g} {what}") for what, n in counts.items()]
    near = partial(math.isclose, factor, rel_tol=1e-4, abs_tol=1e-7)
    found = [text for value, text in known if value != 1 and near(value)]
    says = " or ".join(found) or f"all of it is {factor:.6g} times"
    costs = "the learning rate means something else"
    unknown = not found and (few or not math.isfinite(factor))
    return None if unknown else Cause(f"factor {factor:.6g}", says, costs=costs)


def where(answer: dict) -> str:
    """Which numbers differ, in a few words."""
    wrong = {name: (x - y).abs() / unit > TOLERANCE for name, (x, y, unit) in answer.items()}
    parts = [f"{name}: {int(x.sum())} of {x.numel()}" for name, x in wrong.items() if x.any()]
    parts[3:] = [f"and {len(parts) - 3} more"] * (len(parts) > 3)
    rows = [x.any(1) for name, x in wrong.items() if name.endswith("gradient")]
    parts += [f"in {int(x.sum())} of {len(x)} rows" for x in rows if 0 < x.sum() < len(x)]
    return ", ".join(parts)


def report(findings: list[Finding], d: Dump) -> str:
    """The lines that the tool prints."""
    lines = []
    for f in findings:
        word = "agrees" if f.ok else "DIFFERS"
        numbers = f"{f.numbers:9} numbers, error {f.error:.0e}  {f.where}".rstrip()
        lines.append(f"{f.stage:20} {word:8}{numbers}")
        for number, (causes, left) in enumerate(f.explained[:4]):
            word = "or" if number else "explained by"
            names = " and ".join(cause.name for cause in causes)
            lines.append(f"{'':12}{word}: {names} (to {left:.0e})")
            for cause in causes:
                about = cause.says, cause.source, cause.costs and f"costs: {cause.costs}"
                lines.append(f"{'':16}{'; '.join(filter(None, about))}")
        if not (f.ok or f.explained):
            lines.append(f"{'':12}no known cause explains it")
    left = [name for name in STAGES if name not in {f.stage for f in findings}]
    return "\n".join([*lines, f"not in this step: {', '.join(left) or 'nothing'}"])


def main(arguments: list[str] | None = None) -> int:
    p = argparse.ArgumentParser("python -m minivlmrl audit", description="Check a dumped step.")
    p.add_argument("step", help="a folder with step.json and step.safetensors: docs/audit.md")
    folder = p.parse_args(arguments).step
    d = read(folder)
    with naming(folder):
        findings = audit(d)
    print(report(findings, d))
    return int(not all(f.ok for f in findings))
