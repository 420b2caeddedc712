"""Check your own loss against values and gradients recorded from TRL 1.16, without installing TRL.

In a clone, `pytest tests/parity` compares minivlmrl's losses and options with the installed TRL.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minivlmrl.errors import UserError
from minivlmrl.extras.parity.all_laws import LawReport, examine
from minivlmrl.extras.parity.binding import EPSILONS
from minivlmrl.extras.parity.calling import loss_forms
from minivlmrl.extras.parity.examined import DEFAULTS
from minivlmrl.extras.parity.reads import NUMBERS, NUMBERS_OF, asked_options, kind_of, reads_of
from minivlmrl.extras.parity.recomputed import Case, recomputed, term_options
from minivlmrl.extras.parity.search import NO_NAME, case_of, examples, find_names, rows_of
from minivlmrl.extras.parity.vectors import read_cases, read_options
from minivlmrl.losses.preference import DPO_LOSSES

SHOWN = 4  # number of differing cases to print
TRIED = 3  # number of TRL losses, closest first, in which causes are searched
SETTINGS = ("loss_type", "importance_sampling_level", "use_bias_correction_kl")  # options that select a loss in TRL
# {loss_type: option that a right loss of this type reads}
READ_BY = {"dapo": "tokens", "cispo": "epsilon_high", "robust": "label_smoothing", "exo_pair": "label_smoothing"}
RARE = {"cispo", "sapo", "vespo", *DPO_LOSSES} - {"sigmoid", "ipo"}  # losses that few projects have
# {word in a function's name: TRL loss that it must be}
NAMED = {name: {"loss_type": name} for name in ("dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")}
NAMED |= {"drgrpo": NAMED["dr_grpo"], "gspo": {"importance_sampling_level": "sequence"}}
NAMED |= {name: {"kind": "dpo", "loss_type": name} for name in ("hinge", "ipo", "robust", "discopop", "apo_zero")}
NAMED |= {"dft": {"kind": "sft", "loss_type": "dft"}}


def check(my_loss, tolerance: float = 1e-6, kind: str | None = None, framework: str = "torch", **only) -> int:
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
        my_loss: function (batch, options), or one with other arguments (calling.py); returns the loss, or loss and
            metrics. The gradient with respect to per_token_logps is also compared.
        tolerance: maximum error in value and gradient, relative to max(1, TRL's largest absolute value); 1e-5 for
            float32 losses.
        kind: grpo, dpo or sft, None = find out.
        framework: "torch", "jax" or "mlx"; JAX and MLX losses get float64 arrays.
        only: options of the test cases to compare, such as loss_type="dapo", or delta=3.0 for TRL's dual clip. Without
            loss_type, a loss that does not read it is compared with the closest loss in TRL.

    Raises:
        ValueError: no recorded test case has these options; the message lists recorded values.
        AssertionError: the loss has a mistake, an unknown difference, or lacks a property of every correct loss. The
        message lists differing test cases and known causes.
    """
    __tracebackhide__ = True
    verdict = judge(my_loss, tolerance, kind, framework, **only)
    if not verdict.passes:
        raise AssertionError(str(verdict))
    return verdict.cases


@dataclass
class Verdict:
    """Comparison of a user's loss with TRL's, in all test cases.

    A difference is a "design" if a public project does the same on purpose, and only its value or a deliberate variant
    of training changes; else a "mistake".
    """

    cases: int
    differences: list[str]  # one line per differing case
    of: str = ""  # TRL loss that the user's loss was compared with, if not all: " of loss_type=dapo"
    kinds: Sequence[str] = ()  # "mistake" or "design" per cause found
    names: Sequence[str] = ()  # report lines about causes of differences from TRL
    broken: Sequence[str] = ()  # missing properties of correct losses
    notes: list[str] = field(default_factory=list)  # what was not tested, and properties that may be wanted

    @property
    def agrees(self) -> bool:
        return not (self.differences or self.broken or self.kinds)

    @property
    def passes(self) -> bool:
        """Return whether the loss agrees with TRL, except for designs."""
        return self.agrees or (not self.broken and {*self.kinds} == {"design"})

    def __str__(self) -> str:
        differing = len(self.differences)
        lines = [f"all {self.cases} cases{self.of} agree with TRL in value and gradient"]
        if differing:
            lines = [f"{differing} of {self.cases} cases{self.of} differ from TRL", *self.differences[:SHOWN]]
        if differing > SHOWN:
            lines.append(f"... and {differing - SHOWN} more")
        laws = [f"broken law: {says}" for says in self.broken]
        return "\n".join([*lines, *self.names, *laws, *self.notes])


def judge(my_loss, tolerance: float = 1e-6, kind: str | None = None, framework: str = "torch", **only) -> Verdict:
    """Compare a loss with losses recorded from TRL, and name known mistakes."""
    asked = only if {"loss_type", "importance_sampling_level"} & only.keys() else named_by(my_loss, kind) | only
    kind = asked.pop("kind", kind)
    judged, errors = [], []
    for loss in loss_forms(my_loss, framework):  # several, if the shape of advantages is not known
        try:
            judged.append(Judged(loss, kind or kind_of(loss), tolerance, asked))
        except Exception as error:  # raised by the user's loss for another shape
            errors.append(error)
    if not judged:
        raise errors[0]
    best = min(judged, key=lambda one: (one.closest.share > 0, one.closest.gap))
    return best.verdict()


def named_by(my_loss, kind: str | None) -> dict:
    """Return what a function's name promises, such as loss_type=dapo for my_dapo_loss."""
    name = getattr(my_loss, "__qualname__", type(my_loss).__name__).lower()
    found = [NAMED[word] for word in NAMED if word in name and kind in (None, NAMED[word].get("kind", "grpo"))]
    return dict(found[0]) if len(found) == 1 else {}


@dataclass
class Comparison:
    """User's loss and TRL's in one test case."""

    case: Case  # user's loss and gradient
    constant: float  # loss minus TRL's loss
    loss_error: float
    gradient_error: float
    cosine: float  # between the gradients, without sign
    scale: float  # log of the ratio of their norms

    @property
    def error(self) -> float:
        return max(self.loss_error, self.gradient_error)

    def says(self, varied: list[str]) -> str:
        """Describe errors in a test case; `varied` names options that differ between test cases."""
        chosen = ", ".join(f"{name}={self.case.options.get(name)}" for name in varied)
        where = f"{self.case.name} ({chosen})" if chosen else self.case.name
        return f"{where}: value differs by {self.loss_error:.1e}, gradient by {self.gradient_error:.1e}"


class Judged:
    """User's loss, compared with TRL's recorded losses of one kind.

    Args:
        only: options of the cases to compare.
    """

    def __init__(self, loss: Callable, kind: str, tolerance: float, only: dict):
        self.loss, self.kind, self.tolerance = loss, kind, tolerance
        self.read = reads_of(loss, kind, **only)
        self.has_no_kl = kind == "grpo" and not {"beta", "ref_per_token_logps"} & self.read and not only.get("beta")
        self.has_idle_kl = self.has_no_kl and "beta" not in only and "beta" in asked_options(loss, kind)
        if self.has_no_kl:  # recorded cases without a KL have no use_bias_correction_kl
            only = {name: x for name, x in only.items() if name != "use_bias_correction_kl"} | {"beta": 0.0}
        self.only = only
        recorded = [*cases(kind=kind, **only)]
        second = [self.second_case(*numbered) for numbered in enumerate(recorded)]
        self.results = [self.compare(*case) for case in recorded + second]
        self.close = self.sorted_losses()
        self.closest = self.close[0]

    def compare(self, name: str, options: dict, batch: dict, value: Tensor, gradient: Tensor) -> Comparison:
        """Compare loss and gradient with TRL's for one batch."""
        case = case_of(self.loss, name, batch, options, self.tolerance, self.read)
        error = distance(case.value, value)
        gradient_error = distance(case.gradient, gradient.flatten(0, -2))
        ours, theirs = case.gradient.flatten().nan_to_num(0.0), gradient.flatten().nan_to_num(0.0)
        cosine = float(torch.cosine_similarity(ours, theirs, 0).abs())
        scale = float((ours.norm() / theirs.norm().clamp(min=1e-12)).clamp(min=1e-12).log())
        return Comparison(case, (case.value - value).item(), error, gradient_error, cosine, scale)

    def settings(self) -> list[str]:
        """List the options that select a loss of TRL, and that the loss does not read."""
        names = SETTINGS[:1] if self.kind != "grpo" else SETTINGS
        if self.kind == "grpo" and self.only.get("loss_type") not in ("sapo", "vespo") and not EPSILONS & self.read:
            names = (*names, "epsilon_high")  # a constant of its own: compare with cases that have it
        return [name for name in names if name not in self.read]

    def sorted_losses(self) -> list["CloseLoss"]:
        """Sort TRL's losses, closest first; of those with equal numbers, one that breaks no law."""
        close = closest_losses(self.results, self.settings(), self.tolerance)
        equal = [loss for loss in close if not loss.share]
        if len(equal) > 1:
            close.sort(key=lambda loss: (loss.share > 0, not loss.share and len(self.laws(loss.only).broken_laws())))
        return close

    def second_case(self, number: int, case: tuple) -> tuple:
        """Change the options that the loss reads; our loss, which equals TRL's, gives the right numbers."""
        name, options, batch, _, gradient = case
        wanted = self.read | (EPSILONS if EPSILONS & self.read else set())
        wanted |= {"beta"} if options.get("beta") and "ref_per_token_logps" in self.read else set()
        wanted -= set() if options.get("beta") else {"beta"}
        names = NUMBERS[self.kind].keys() & wanted & options.keys() - self.only.keys()
        others = {name: NUMBERS[self.kind][name][number % 2] for name in names}
        if options["loss_type"] == "cispo" and "epsilon_high" in others:
            others["epsilon_high"] += 1
        if self.kind == "grpo":
            batch = batch | {"advantages": 6 * batch["advantages"]}
        zero = Case(name, options | others, rows_of(batch), torch.zeros(()), gradient)
        value, gradient = recomputed(zero, {})
        return f"{name} changed", options | others, batch, value, gradient.view_as(batch["mask"])

    def laws(self, only: dict) -> LawReport:
        """Check laws of a loss with these options."""
        known = {name: x for name, x in only.items() if name in DEFAULTS[self.kind]}
        return examine(self.loss, self.kind, self.tolerance, **known)

    def verdict(self) -> Verdict:
        """Judge the loss by its closest loss of TRL."""
        results = [self.results[i] for i in self.closest.cases]
        first = results[0].case.options
        varied = [name for name in first if any(result.case.options.get(name) != first[name] for result in results)]
        verdict = Verdict(
            len(results),
            [result.says(varied) for result in results if result.error > self.tolerance],
            f" of {self.closest}" if self.closest.only else "",
        )
        only = self.only | self.closest.only
        if verdict.differences:
            verdict.kinds, verdict.names = self.causes(results)
            own_length = self.closest.only.get("loss_type") == "dr_grpo" and "max_completion_length" not in self.read
            only = self.only | ({"loss_type": "dr_grpo"} if own_length else {})
        has_no_name = NO_NAME in verdict.names
        if has_no_name or "mistake" not in verdict.kinds:
            report = self.laws(only)
            verdict.broken = report.sentences("broken")
            verdict.notes = [f"note: {says}" for says in report.sentences("note")]
            if has_no_name and not verdict.broken:
                verdict.names = [*verdict.names, *examples([result.case for result in results])]
        if self.has_idle_kl:
            verdict.kinds = [*verdict.kinds, "mistake"]
            verdict.names = [*verdict.names, "mistake: the KL never acts: beta is read, but changes nothing"]
        elif self.has_no_kl:
            verdict.notes.append("no KL: neither beta nor the reference changes the loss")
        unread = self.unread(results)
        if unread:
            verdict.notes.append(f"not read: {', '.join(unread)}; the loss was tested only with its own values of them")
        return verdict

    def unread(self, results: list[Comparison]) -> list[str]:
        """List numbers in TRL's loss that the user's loss does not read."""
        loss_types = {result.case.loss_type for result in results}
        if len(loss_types) > 1:  # the loss reads loss_type
            return []
        return sorted({*NUMBERS_OF.get(loss_types.pop(), ())} - self.read)

    def causes(self, results: list[Comparison]) -> tuple[list[str], list[str]]:
        """Find causes of differences from TRL's closest loss, or else from one of the next."""
        kinds, names = names_without_search(results, self.tolerance)
        if kinds:
            return kinds, names
        kinds, names = find_names([result.case for result in results])
        close = self.close[1:]
        if not close:  # the loss reads all options that select a loss: perhaps only one of its losses is wrong
            close = [loss for loss in closest_losses(results, [*SETTINGS], self.tolerance) if loss.share]
        for loss in close[: TRIED - 1] if not kinds else ():
            kinds, others = find_names([self.results[i].case for i in loss.cases])
            if kinds:
                return kinds, [*others, f"  in the cases of {loss}"]
        return kinds, names


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
    if not any(result.case.gradient.any() for result in results):
        return ["mistake"], ["mistake: no gradient reaches the policy", "  effect: training changes nothing"]
    return [], []


@dataclass
class CloseLoss:
    """TRL loss, such as loss_type=dapo, compared with the user's loss."""

    only: dict  # options that select this loss
    cases: list[int]  # indices of test cases with these options
    share: float  # fraction of `cases` in which the user's loss differs
    gap: float  # mean distance of gradients, from 0 to 1.1, whatever their scale

    def __str__(self) -> str:
        return " ".join(f"{name}={x}" for name, x in self.only.items())


def closest_losses(results: list[Comparison], settings: list[str], tolerance: float) -> list[CloseLoss]:
    """Sort TRL's losses by agreement with the user's loss, best first."""
    groups = defaultdict(list)
    for i, result in enumerate(results):
        options = result.case.options | {"loss_type": result.case.loss_type}
        groups[tuple(options.get(name) for name in settings)].append(i)
    close = []
    for values, group in groups.items():
        only = dict(zip(settings, values, strict=True))
        ours = [results[i] for i in group]
        share = statistics.mean(result.error > tolerance for result in ours)
        # different directions, and scales that vary from case to case
        gap = 1 - statistics.mean(result.cosine for result in ours)
        if ours[0].case.options["kind"] == "grpo":
            gap += 0.1 * min(1.0, statistics.pstdev(result.scale for result in ours))
        close.append(CloseLoss(only, group, share, gap + rarity(only, ours[0].case)))

    def difference(loss: CloseLoss) -> tuple:
        # test cases with beta=0 all have use_bias_correction_kl=True and would favor it: average over both values
        corrected = {"use_bias_correction_kl": True}
        both = [other.gap for other in close if other.only | corrected == loss.only | corrected]
        # a loss that agrees in all cases first; then the nearest gradients; if similar, TRL's defaults
        is_usual = loss.only.get("loss_type") in ("dapo", "sigmoid")
        is_corrected = bool(loss.only.get("use_bias_correction_kl"))
        return loss.share > 0, round(statistics.mean(both), 2), not is_usual, is_corrected, -len(loss.cases)

    return sorted(close, key=difference)


def rarity(only: dict, case: Case) -> float:
    """Return a penalty for losses that are rarely meant, or whose option the user's loss does not read."""
    name = only.get("loss_type")
    penalty = 0.0
    if name in RARE:
        penalty += 0.3
    if name in READ_BY and READ_BY[name] not in case.read:
        penalty += 0.2
    if only.get("importance_sampling_level") == "sequence":
        penalty += 0.3
    return penalty


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
        more = term_options(case.options["loss_type"]) if case.options["kind"] == "grpo" else {}
        yield case.name, more | case.options, batch, loss, torch.from_numpy(case.gradient)
