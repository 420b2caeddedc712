"""Recompute a recorded optimizer step, and name known trainer bugs that explain wrong numbers.

Every stage is recomputed from recorded inputs: the loss uses the recorded advantages, even if they are wrong.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from minivlmrl.errors import UserError, error_context
from minivlmrl.extras.parity import model_stages, step_format
from minivlmrl.extras.parity.change import Change
from minivlmrl.extras.parity.search import (
    SHOWN,
    STAGES,
    THROUGH_A_MODEL,
    TOLERANCE,
    Bug,
    all_gaps,
    count_groups,
    error,
    find_bugs,
    fits,
    gaps,
    lines_of,
    names_of,
)
from minivlmrl.extras.parity.step import DAMAGES, Dump, read

# do not compare the mask if token ids differ, or gradients if log-probs differ
WITHOUT = {"mask": {"tokens"}, "gradients": {"logps"}}
SECONDS = 30.0  # CPU seconds to search for the cause of wrong numbers, per stage


@dataclass
class Finding:
    """Comparison of recorded and recomputed numbers in one stage of a step, such as the loss."""

    stage: str
    error: float
    numbers: int
    where: Sequence[str] = ()  # number of wrong values per tensor, then examples
    explained: Sequence[Bug] = ()
    again: bool = False  # explained by a bug found in an earlier stage
    groups: int = 0  # number of rows (for advantages: groups) with wrong values
    has_ended: bool = False  # search time limit reached

    @property
    def ok(self) -> bool:
        return self.error <= TOLERANCE

    def doubts(self) -> list[str]:
        """Return warnings, such as "only one row differs"."""
        if self.ok or self.again:
            return []
        unit = "group of completions" if self.stage == "advantages" else "row"
        count = len(self.explained)
        doubts = {
            f"only one {unit} differs, too few to tell causes apart; record a larger step": self.groups < 2,
            f"{count} causes give the same numbers, so this step cannot tell them apart": count > SHOWN,
            "the CPU seconds were used before all causes were tried; a larger --seconds tries more": self.has_ended,
        }
        return [text for text, holds in doubts.items() if holds]


def audit(d: Dump, seconds: float = math.inf) -> list[Finding]:
    """Recompute each stage of a step, such as advantages and loss, and compare with the recorded numbers.

    seconds: CPU time limit for the bug search in each stage.
    """
    findings = []
    for name, stage in STAGES.items():
        differing = {finding.stage: finding for finding in findings if not finding.ok}
        if differing.keys() & WITHOUT.get(name, set()):
            continue
        try:
            answer = stage(d, Change(d, {}))
            if answer is None:
                continue
            finding = Finding(name, error(answer), len(all_gaps(answer)))
        except (ValueError, *DAMAGES) as bug:
            if name in THROUGH_A_MODEL and "pictures" in differing:
                continue  # the model cannot run: the recorded images do not match the token ids
            raise UserError(
                f"the stage {name!r} cannot be recomputed ({type(bug).__name__}: {bug}). "
                "Compare the types and shapes of its tensors and fields with docs/library.md."
            ) from bug
        findings.append(finding)
        if finding.ok:
            continue
        finding.where = where(answer)
        finding.groups = count_groups(name, answer, d)
        look_for_bugs(finding, d, differing, seconds)
        if name == "tokens":
            d.sampled = None  # input_ids differ from sampled ids: later stages must ignore sampled ids
    return findings


def look_for_bugs(finding: Finding, d: Dump, differing: dict[str, Finding], seconds: float = math.inf):
    """Search for known trainer bugs that explain the wrong numbers; store the bugs in `finding`."""
    names = names_of(finding.stage, d)
    for earlier in differing.values():
        # first try bugs found in earlier stages, such as the advantages: one bug is likelier than two
        known = [bug for bug in earlier.explained if names & bug.of.stage_names()]
        finding.explained = [again for bug in known for again in fits(finding.stage, d, bug)]
        if finding.explained:
            finding.again = True
            both = {bug.says for bug in finding.explained}
            earlier.explained = [bug for bug in earlier.explained if bug.says in both]
            return
    search = find_bugs(finding.stage, d, seconds)
    finding.explained, finding.has_ended = search.explained, search.has_ended


def where(answer: dict) -> list[str]:
    """Count wrong numbers per tensor, and show up to 4 of them."""
    wrong_counts = []
    lines = []
    for name, (theirs, ours, unit) in answer.items():
        is_wrong = gaps(theirs, ours, unit) > TOLERANCE
        if not is_wrong.any():
            continue
        wrong_counts.append(f"{name}: {int(is_wrong.sum())} of {is_wrong.numel()}")
        pairs = []
        for region in is_wrong.nonzero()[:4].tolist():
            index = tuple(region)
            pairs.append(f"{region}: {theirs[index]:.4g} instead of {ours[index]:.4g}")
        lines.append(f"{name} at {', '.join(pairs)}")
    if len(wrong_counts) > 3:
        wrong_counts[3:] = [f"and {len(wrong_counts) - 3} more"]
    return [", ".join(wrong_counts), *lines[:3]]


def report(findings: list[Finding], d: Dump) -> str:
    lines = []
    for finding in findings:
        lines += finding_lines(finding)
    lines += [f"note: {note}" for note in notes(d)]
    lines.append(f"not in this step: {', '.join(not_in_step(findings)) or 'nothing'}")
    return "\n".join(lines)


def notes(d: Dump) -> list[str]:
    """Return notes about autocast and sampling filters such as top_k."""
    filters = [f"{name} = {d.about[name]}" for name, off in step_format.FILTERS.items() if d.about.get(name) not in off]
    result = []
    if filters:
        result.append(
            f"tokens were sampled with {' and '.join(filters)}, but `parity` normalizes log-probabilities over the "
            "whole vocabulary, as TRL does, so they are not the sampler's log-probabilities (TRL #6789)"
        )
    if d.about.get("autocast"):
        allowed = TOLERANCE * model_stages.THROUGH_A_MODEL * model_stages.HALF
        result.append(
            f"the model ran in {d.about['autocast']} (autocast), so log-probabilities agree if they differ by less "
            f"than {allowed:g} nats, and gradients by less than {allowed:.0%} of the largest"
        )
    return result


def finding_lines(finding: Finding) -> list[str]:
    word = "agrees" if finding.ok else "DIFFERS"
    line = f"{finding.stage:20} {word:8}{finding.numbers:9} numbers, error {finding.error:.0e}"
    lines = ["  ".join([line, *finding.where[:1]])]
    if finding.again:
        return [*lines, f"{'':12}same cause as in an earlier stage: {finding.explained[0].says}"]
    lines += [f"{'':12}{text}" for text in finding.doubts()]
    if finding.explained:
        lines += [f"{'':12}{text}" for text in lines_of(finding.explained)]
    elif not finding.ok:
        lines.append(f"{'':12}no known cause explains the difference")
        lines += [f"{'':16}{text}" for text in finding.where[1:]]
    return lines


def not_in_step(findings: list[Finding]) -> list[str]:
    compared = {finding.stage for finding in findings}
    return [name for name in STAGES if name not in compared]


def checked(folder, seconds: float = math.inf) -> tuple[list[Finding], Dump]:
    """Read a recorded step from a folder, and compare it with recomputed numbers."""
    d = read(folder)
    with error_context(folder):
        findings = audit(d, seconds)
        compared = sum(finding.numbers for finding in findings) and d["completion_mask"].any()
        if all(finding.ok for finding in findings) and not compared:
            why = "no token is in the loss" if findings else "each stage lacks a tensor or a field"
            raise UserError(
                f"nothing was compared, because {why}. docs/library.md lists the tensors and fields that a step needs."
            )
    return findings, d


def as_json(findings: list[Finding], d: Dump) -> dict:
    """Convert comparison results to a JSON object; later versions may only add fields."""
    stages = []
    for finding in findings:
        explained = []
        for bug in finding.explained:
            name = ", ".join(name for name in bug.change if name != "inside")
            explained.append({"error": bug.error, "kind": bug.kind, "causes": [{"name": name, "says": bug.says}]})
        error = finding.error if math.isfinite(finding.error) else None
        others = {"agrees": finding.ok, "error": error, "explained": explained, "doubts": finding.doubts()}
        stages.append(vars(finding) | others)
    return {
        "schema": 1,
        "agrees": all(finding.ok for finding in findings),
        "stages": stages,
        "not_in_this_step": not_in_step(findings),
        "notes": notes(d),
    }
