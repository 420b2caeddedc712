"""Check your own loss against values and gradients recorded from TRL 1.16, without installing TRL.

In a clone, `pytest tests/parity` compares minivlmrl's losses and options with the installed TRL.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minivlmrl.errors import UserError
from minivlmrl.extras.parity.all_laws import LawReport, examine
from minivlmrl.extras.parity.examined import OPTIONS
from minivlmrl.extras.parity.frameworks import as_torch
from minivlmrl.extras.parity.progress import with_bar
from minivlmrl.extras.parity.recomputed import Case
from minivlmrl.extras.parity.search import NO_NAME, case_of, examples, find_names
from minivlmrl.extras.parity.vectors import read_cases, read_options

SHOWN = 4  # number of differing cases to print
SETTINGS = ("loss_type", "importance_sampling_level", "use_bias_correction_kl")  # options that select a loss in TRL


def check(my_loss, tolerance: float = 1e-6, kind: str = "grpo", framework: str = "torch", **only) -> int:
    """Compare a loss with values and gradients recorded from TRL; return the number of test cases.

    `my_loss` gets a batch of B completions with T tokens, or B answer pairs in DPO, as a dict of float64 tensors:

        per_token_logps: (B, T), in DPO (B, 2, T), with the chosen answer first
        mask: shape of per_token_logps, 1 for completion tokens
        ref_per_token_logps: shape of per_token_logps, in GRPO and DPO
        old_per_token_logps: (B, T), in GRPO
        advantages: (B,), in GRPO

    Test batches include log-ratios of 25 nats, and completions without tokens, which count in a mean over completions.
    `options` is a dict of loss options:

        grpo: loss_type, importance_sampling_level, beta, epsilon_low, epsilon_high, use_bias_correction_kl, whole_step
            (False for a micro-batch), and the loss divisors tokens (dapo: count in the whole step) and
            max_completion_length (dr_grpo)
        dpo: loss_type (a list with one name), beta, label_smoothing
        sft: loss_type (nll or dft)

    Args:
        my_loss: function (batch, options), or one with the arguments of grpo_loss; returns the loss, or loss and
            metrics. The gradient with respect to per_token_logps is also compared.
        tolerance: maximum error in value and gradient, relative to max(1, TRL's largest absolute value); 1e-5 for
            float32 losses.
        kind: grpo, dpo or sft.
        framework: "torch", "jax" or "mlx"; JAX and MLX losses get float64 arrays.
        only: options of the test cases to compare, such as loss_type="dapo", or delta=3.0 for TRL's dual clip. Without
            loss_type, a loss that ignores options["loss_type"] passes if it equals one of TRL's losses.

    Raises:
        ValueError: no recorded test case has these options; the message lists recorded values.
        AssertionError: the loss differs from TRL, or lacks a property of every correct loss (all_laws.py). The message
        lists differing test cases and known causes.
    """
    __tracebackhide__ = True
    verdict = judge(my_loss, tolerance, kind, framework, **only)
    if not verdict.agrees:
        raise AssertionError(str(verdict))
    return verdict.cases


@dataclass
class Verdict:
    """Comparison of a user's loss with TRL's, in all test cases.

    A difference is a "design" (deliberate variant) if all gradients agree, or if a public project does the same on
    purpose; else a "mistake".
    """

    cases: int
    differences: list[str]  # one line per differing case
    of: str = ""  # TRL loss that equals the user's loss, if that ignores loss_type: " of loss_type=dapo"
    kinds: Sequence[str] = ()  # "mistake" or "design" (deliberate) per cause found
    names: Sequence[str] = ()  # report lines about causes of differences from TRL
    broken: Sequence[str] = ()  # missing properties of correct losses
    untested: Sequence[str] = ()  # properties that could not be tested

    @property
    def agrees(self) -> bool:
        return not self.differences and not self.broken

    def __str__(self) -> str:
        differing = len(self.differences)
        lines = [f"all {self.cases} cases{self.of} agree with TRL in value and gradient"]
        if differing:
            lines = [f"{differing} of {self.cases} cases differ from TRL", *self.differences[:SHOWN]]
        if differing > SHOWN:
            lines.append(f"... and {differing - SHOWN} more")
        laws = [f"broken law: {says}" for says in self.broken]
        return "\n".join([*lines, *self.names, *laws, *(f"not tested: {says}" for says in self.untested)])


def judge(my_loss, tolerance: float = 1e-6, kind: str = "grpo", framework: str = "torch", **only) -> Verdict:
    """Compare a loss with losses recorded from TRL, and name known mistakes."""
    my_loss = as_torch(my_loss, framework)
    recorded = with_bar("cases", [*cases(kind=kind, **only)])
    results = [compare(my_loss, tolerance, *case) for case in recorded]
    first = results[0].options
    varied = [name for name in first if any(result.options.get(name) != first[name] for result in results)]
    verdict = Verdict(len(results), [result.says(varied) for result in results if result.error > tolerance])
    settings = [name for name in SETTINGS if name in varied or name in only]
    closest = closest_losses(results, settings, tolerance)[0]
    if verdict.differences and not closest.share and "loss_type" not in results[0].step.read:
        # the loss equals one TRL loss, such as DAPO: drop test cases of TRL's other losses
        only = only | closest.only
        verdict = Verdict(len(closest.cases), [], f" of {closest}")
    if not verdict.differences:
        report = laws_of(my_loss, tolerance, kind, only)  # TRL's test cases may miss mistakes that laws find
        verdict.broken, verdict.untested = report.sentences("broken"), report.sentences("not tested")
        return verdict
    verdict.kinds, verdict.names = names_without_search(results, tolerance)
    steps = [result.step for result in results]
    if not verdict.kinds:
        verdict.kinds, verdict.names = find_names_by_loss(steps, closest)
    if NO_NAME in verdict.names:
        report = laws_of(my_loss, tolerance, kind, only)
        verdict.broken = report.sentences("broken")
        if not verdict.broken:
            notes = [f"  note: {says}" for says in report.sentences("note")]
            verdict.names = [*verdict.names, *notes, *examples(steps)]
        if kind == "grpo" and not only:
            hint = "  If your loss is for DPO or SFT, add --only kind=dpo or --only kind=sft"
            verdict.names = [*verdict.names, hint]
    return verdict


@dataclass
class Comparison:
    case: str
    options: dict
    step: Case  # user's loss and gradient
    constant: float  # loss minus TRL's loss
    loss_error: float
    gradient_error: float

    @property
    def error(self) -> float:
        return max(self.loss_error, self.gradient_error)

    def says(self, varied: list[str]) -> str:
        """Describe errors in a test case; `varied` names options that differ between test cases."""
        chosen = ", ".join(f"{name}={self.options.get(name)}" for name in varied)
        where = f"{self.case} ({chosen})" if chosen else self.case
        return f"{where}: value differs by {self.loss_error:.1e}, gradient by {self.gradient_error:.1e}"


def compare(
    my_loss, tolerance: float, case: str, options: dict, batch: dict, value: Tensor, gradient: Tensor
) -> Comparison:
    """Compare loss and gradient with TRL's for one batch."""
    step = case_of(my_loss, case, batch, options, tolerance)
    error = distance(step.value, value)
    gradient_error = distance(step.gradient, gradient.flatten(0, -2))
    return Comparison(case, options, step, (step.value - value).item(), error, gradient_error)


def distance(ours: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to max(1, largest |expected|); inf if NaN positions differ."""
    if not torch.equal(ours.isnan(), expected.isnan()):
        return math.inf
    scale = expected.nan_to_num(0.0).abs().max().clamp(min=1)
    return float((ours - expected).nan_to_num(0.0).abs().max() / scale)


def names_without_search(results: list[Comparison], tolerance: float) -> tuple[list[str], list[str]]:
    """Return (kinds, report lines): kinds are ["mistake"] without gradients, ["design"] if only values differ."""
    if all(result.gradient_error <= tolerance for result in results):
        constants = [result.constant for result in results]
        says = "the values differ, but the gradients are equal in all cases"
        if max(constants) - min(constants) <= tolerance:
            says = f"the value has a constant of {constants[0]:.6g} without gradient"
        return ["design"], [f"design: {says}"]
    if not any(result.step.gradient.any() for result in results):
        return ["mistake"], ["mistake: no gradient reaches the policy", "  effect: training changes nothing"]
    return [], []


def laws_of(my_loss, tolerance: float, kind: str, only: dict) -> LawReport:
    known = {name: x for name, x in only.items() if name in OPTIONS[kind]}
    return examine(my_loss, kind, tolerance, **known)


@dataclass
class CloseLoss:
    """TRL loss, such as loss_type=dapo, compared with the user's loss."""

    only: dict  # options that select this loss
    cases: list[int]  # indices of test cases with these options
    share: float  # fraction of `cases` in which the user's loss differs

    def __str__(self) -> str:
        return " ".join(f"{name}={x}" for name, x in self.only.items() if name != "kind")


def closest_losses(results: list[Comparison], settings: list[str], tolerance: float) -> list[CloseLoss]:
    """Sort TRL's losses by agreement with the user's loss, best first."""
    names = "kind", *settings
    is_wrong = [result.error > tolerance for result in results]
    groups = defaultdict(list)
    for i, result in enumerate(results):
        values = (result.options[name] for name in names)
        groups[tuple(x[0] if isinstance(x, list) else x for x in values)].append(i)
    close = []
    for values, group in groups.items():
        share = statistics.mean(is_wrong[i] for i in group)
        close.append(CloseLoss(dict(zip(names, values, strict=True)), group, share))

    def difference(loss: CloseLoss) -> tuple:
        # test cases with beta=0 all have use_bias_correction_kl=True and would favor it: average over both values
        corrected = {"use_bias_correction_kl": True}
        both = [other.cases for other in close if other.only | corrected == loss.only | corrected]
        wrong = statistics.mean(is_wrong[i] for group in both for i in group)
        # a loss that agrees in all cases first; then the best agreement; if similar, TRL's defaults
        is_dapo, is_corrected = loss.only["loss_type"] == "dapo", bool(loss.only.get("use_bias_correction_kl"))
        return loss.share > 0, round(wrong, 1), not is_dapo, is_corrected, -len(loss.cases)

    return sorted(close, key=difference)


def find_names_by_loss(steps: list[Case], closest: CloseLoss) -> tuple[list[str], list[str]]:
    """Find known causes of differences from TRL; return "mistake" or "design" for each cause, and lines to print.

    If the loss reads loss_type, search in all test cases first; then only in cases of the TRL loss that agrees most.
    """
    kinds, names = [], []
    is_all = len(closest.cases) == len(steps)
    if is_all or "loss_type" in steps[0].read:
        kinds, names = find_names(steps)
    if is_all or (kinds and "mistake" not in kinds):
        return kinds, names
    of_closest = f"{len(closest.cases)} cases of --only kind={closest.only['kind']} {closest}"
    # a correct GSPO loss, for example, differs in test cases of DAPO
    if not closest.share:
        return [], [f"  Your loss agrees in all {of_closest}"]
    if kinds:
        return kinds, names
    kinds, names = find_names([steps[i] for i in closest.cases])
    return kinds, [*names, f"  Your loss is closest to the {of_closest}"]


def cases(**only) -> Iterator[tuple[str, dict, dict[str, Tensor], Tensor, Tensor]]:
    """Yield recorded test cases with the given options, as (name, options, batch, loss, gradient)."""
    chosen = read_cases(**only)
    if not chosen:
        recorded = [*read_options().values()]
        values = {name: sorted({str(options.get(name)) for options in recorded}) for name in only}
        known = ", ".join(sorted(set().union(*recorded)))
        raise UserError(f"no recorded case has all of {only} together; recorded values: {values}; options: {known}")
    for case in chosen:
        batch = {name: torch.from_numpy(x) for name, x in case.batch.items()}
        loss = torch.tensor(case.loss, dtype=torch.float64)
        yield case.name, case.options, batch, loss, torch.from_numpy(case.gradient)
