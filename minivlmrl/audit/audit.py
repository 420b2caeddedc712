"""`python -m minivlmrl audit STEP`: compute a dumped step again, and name what explains each number that differs.

Each stage is compared by itself, from what the trainer had before it, so that one mistake is reported once. For a stage
that differs, known causes are tried alone, then in pairs, each also up to a constant factor. Exit status 0 when all
agrees, 1 when something differs, 2 for a folder that is no step.
"""

import argparse
import math
import sys
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations

import torch

from minivlmrl.audit import stages, updates
from minivlmrl.audit.causes import CAUSES, Cause
from minivlmrl.audit.dump import Dump, read

TOLERANCE = 1e-5  # of an error, in units of what was added up: some times float32's rounding
LOGPS = {"logps": ("per_token_logps", "model"), "logps of old": ("old_per_token_logps", "old_model")}
LOGPS |= {"logps of reference": ("ref_per_token_logps", "ref_model"), "logps of sampler": ("sampler_logps", "old_model")}
STAGES = {name: getattr(stages, name) for name in ("advantages", "rows", "mask")}
STAGES |= {name: partial(updates.logps, *of) for name, of in LOGPS.items()} | {"loss": stages.loss}
STAGES |= {name: getattr(updates, name) for name in ("gradients", "clip", "update", "schedule")}
FACTORS = ("advantages", "rows", "loss", "gradients", "clip", "update", "schedule")  # what may be off by a factor


@dataclass
class Finding:
    """What became of a stage."""

    stage: str
    error: float  # 0 for perfect, TOLERANCE for the limit
    numbers: int  # how many were compared
    where: str = ""  # which differ
    explained: list[tuple[list[Cause], float]] = field(default_factory=list)  # the simplest sets of causes, their error

    @property
    def ok(self) -> bool:
        return self.error <= TOLERANCE


def audit(d: Dump) -> list[Finding]:
    """Check every stage that the dump has what is needed for."""
    findings: dict[str, Finding] = {}
    for name, stage in STAGES.items():
        answer = stage(d, {})
        if answer is None or (name == "gradients" and d.forward is None):
            continue
        findings[name] = examine(name, d, answer)
        if name == "logps" and not findings[name].ok:  # gradients are then those of the forward that is known
            known = findings[name].explained
            d.forward = dict(pair for cause in known[0][0] for pair in cause.change) if known else None
    return list(findings.values())


def examine(name: str, d: Dump, answer: dict) -> Finding:
    """Compare a stage, and explain it if it differs."""
    finding = Finding(name, error(answer), sum(has.numel() for has, _, _ in answer.values()))
    if not finding.ok:
        finding.where = where(answer)
        finding.explained = explain(name, d)
    return finding


def error(answer: dict, factor: float = 1.0) -> float:
    """The largest difference, in units; infinite for what is not finite."""
    sizes = [((has - factor * should).abs() / unit).max().item() for has, should, unit in answer.values() if has.numel()]
    return max((size if math.isfinite(size) else math.inf for size in sizes), default=0.0)


def explain(name: str, d: Dump) -> list[tuple[list[Cause], float]]:
    """The simplest sets of causes that give the numbers of the trainer, best known first."""
    own = {name, name.partition(" ")[0]} | ({d.about["kind"]} if name == "loss" else set())
    known = [cause for cause in CAUSES if own & set(cause.stages.split())]
    for size in (1, 2):
        found = [fit for causes in combinations(known, size) if (fit := fits(name, d, list(causes)))]
        scaled = [fit for causes in combinations(known, size - 1) if (fit := fits(name, d, list(causes), True))]
        if fitting := [*found, *scaled]:
            best = min(size for _, size in fitting)
            return [(causes, size) for causes, size in fitting if size <= max(10 * best, TOLERANCE / 100)]
    return []


def fits(name: str, d: Dump, causes: list[Cause], scaled: bool = False) -> tuple[list[Cause], float] | None:
    """The causes and their error if they explain the stage; `scaled`: together with a factor, which is fitted."""
    change = dict(pair for cause in causes for pair in cause.change)
    if len(change) < sum(len(cause.change) for cause in causes):
        return None  # two values for one deviation
    answer = STAGES[name](d, change)
    if not scaled:
        return (causes, size) if (size := error(answer)) <= TOLERANCE else None
    if name not in FACTORS:
        return None
    both = [torch.cat([(x[i] / x[2]).flatten() for x in answer.values()]) for i in (0, 1)]
    power = both[1].square().sum().item()
    factor = (both[0] @ both[1]).item() / power if power else math.nan
    size = error(answer, factor)
    few = both[1].count_nonzero() < 3  # any number is another one times a factor
    reason = named_factor(factor, d, few)
    return ([*causes, reason], size) if size <= TOLERANCE and reason else None


def named_factor(factor: float, d: Dump, few: bool) -> Cause | None:
    """What a factor may come from."""
    M, W, G = len(d.micro_batches), d.about.get("world_size", 1), d.about.get("num_generations", 1)
    rollout = d.about.get("steps_per_rollout", 1)
    rollout = int(rollout) if rollout == int(rollout) else rollout
    known = [(0.0, "it is exactly zero"), (-1.0, "the sign is wrong")]
    for number, what in ((M, "micro-batches"), (W, "ranks"), (G, "completions of a group"), (len(d["input_ids"]), "rows"),
                         (rollout, "steps of a rollout")):  # fmt: skip
        known += [(number, f"not divided by the {number} {what}"), (1 / number, f"divided once more by the {number} {what}")]
    found = [text for value, text in known if value != 1 and abs(factor - value) <= 1e-4 * max(abs(value), 1e-3)]
    if found:
        text, cost = " or ".join(found), "the learning rate means something else"
        return Cause(f"factor {factor:.6g}", "", (), text, "losses.py: Counts", cost)
    return None if few or not math.isfinite(factor) else Cause(f"factor {factor:.6g}", "", (), f"all of it is {factor:.6g} times")


def where(answer: dict) -> str:
    """Which numbers differ, in a few words."""
    wrong = {name: ((has - should).abs() / unit > TOLERANCE) for name, (has, should, unit) in answer.items()}
    bad = {name: int(x.sum()) for name, x in wrong.items() if x.any()}
    parts = [f"{name}: {count} of {wrong[name].numel()}" for name, count in list(bad.items())[:3]]
    for name, x in wrong.items():
        if x.dim() == 2 and 0 < (rows := int(x.any(1).sum())) < len(x):
            parts.append(f"in {rows} of {len(x)} rows of {name}")
    return ", ".join(parts) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")


def report(findings: list[Finding], d: Dump) -> str:
    """The lines that the tool prints."""
    lines = []
    for f in findings:
        lines.append(f"{f.stage:20} {'agrees' if f.ok else 'DIFFERS'}  {f.numbers} numbers, error {f.error:.1e}")
        if f.ok:
            continue
        lines[-1] += f"; {f.where}"
        for causes, size in f.explained[:4]:
            word = "because" if causes is f.explained[0][0] else "or"
            lines.append(f"{'':21}{word}: {' and '.join(c.name for c in causes)} (explains it to {size:.0e})")
            lines += [f"{'':24}{c.sentence}. {c.source}{'; costs: ' * bool(c.cost)}{c.cost}" for c in causes]
        if not f.explained:
            lines.append(f"{'':21}no known cause explains it")
    left = [name for name in STAGES if name not in {f.stage for f in findings}]
    return "\n".join([*lines, f"not checked, the step lacks what it needs: {', '.join(left) or 'nothing'}"])


def main(arguments: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m minivlmrl audit", description="Check a step that a trainer dumped.")
    p.add_argument("step", help="a folder with step.json and step.safetensors: docs/audit.md")
    try:
        d = read(p.parse_args(arguments).step)
        findings = audit(d)
    except ValueError as problem:
        print(f"python -m minivlmrl audit: {problem}", file=sys.stderr)
        return 2
    print(report(findings, d))
    return int(not all(f.ok for f in findings))
