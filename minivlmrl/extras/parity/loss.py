"""Check your own loss against values and gradients recorded from TRL 1.16, without installing TRL.

In a clone, `pytest tests/parity` compares minivlmrl's losses and options with the installed TRL.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from minivlmrl.errors import UserError
from minivlmrl.extras.parity.calling import loss_and_gradient, loss_form
from minivlmrl.extras.parity.examined import DEFAULTS
from minivlmrl.extras.parity.laws import examine
from minivlmrl.extras.parity.policy_laws import NO_KL
from minivlmrl.extras.parity.reads import NUMBERS, kind_of, knows, needs, reads_of, refuse_random
from minivlmrl.extras.parity.recomputed import Case, name_of_loss, our_loss, term_options
from minivlmrl.extras.parity.search import case_of, find_names
from minivlmrl.extras.parity.vectors import read_cases, read_options
from minivlmrl.extras.parity.verdict import Verdict
from minivlmrl.losses.preference import DPO_LOSSES

NO_NAME = "no name: no known mistake or deliberate variant reproduces the loss in all cases"
TRIED = 3  # closest TRL losses in which to search for mistakes
EPSILONS = {"epsilon_low", "epsilon_high"}
SETTINGS = ("loss_type", "importance_sampling_level", "use_bias_correction_kl")  # options that select a loss in TRL
# {loss_type: option that a correct loss must read}
READ_BY = {"dapo": "tokens", "cispo": "epsilon_high", "robust": "label_smoothing", "exo_pair": "label_smoothing"}
RARE = {"cispo", "sapo", "vespo", *DPO_LOSSES} - {"sigmoid", "ipo"}  # loss types that few projects implement
# {word in the name of the user's function: options of the TRL loss to compare with}
NAMED = {name: {"loss_type": name} for name in ("dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")}
NAMED |= {
    "dpo": {"kind": "dpo", "loss_type": "sigmoid"},
    "drgrpo": NAMED["dr_grpo"],
    "gspo": {"importance_sampling_level": "sequence"},
    "dft": {"kind": "sft", "loss_type": "dft"},
}
NAMED |= {name: {"kind": "dpo", "loss_type": name} for name in ("hinge", "ipo", "robust", "discopop", "apo_zero")}


def check(my_loss, tolerance: float = 1e-6, kind: str | None = None, framework: str = "torch", **only) -> int:
    """Compare a loss with values and gradients recorded from TRL; return the number of test cases.

    `my_loss` gets a batch of B completions with T tokens, or B answer pairs in DPO, as a dict of float64 tensors:

        per_token_logps: (B, T), in DPO (B, 2, T), with the chosen answer first
        mask: shape of per_token_logps, 1 for completion tokens
        ref_per_token_logps: shape of per_token_logps, in GRPO and DPO
        old_per_token_logps: (B, T), in GRPO
        advantages: (B,), in GRPO

    Test batches include log-ratios of 25 nats, and completions without tokens. A mean over completions includes these
    empty completions. `options` is a dict of loss options:

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
        kind: grpo, dpo or sft, None = infer from the tensors that the loss reads.
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
    return verdict.count


def judge(my_loss, tolerance: float = 1e-6, kind: str | None = None, framework: str = "torch", **only) -> Verdict:
    """Compare a loss with losses recorded from TRL, and name known mistakes."""
    named = named_by(my_loss, kind)
    loss = loss_form(my_loss, framework)
    named_kind = named.pop("kind", None)
    return Judged(loss, kind or named_kind or kind_of(loss), tolerance, only, named).verdict()


def named_by(my_loss, kind: str | None) -> dict:
    """Return loss options implied by a function's name, such as loss_type=dapo for my_dapo_loss."""
    name = getattr(my_loss, "__qualname__", type(my_loss).__name__).lower()
    found = []
    for word, promised in NAMED.items():
        if word in name and kind in (None, promised.get("kind", "grpo")):
            found.append(promised)
    return dict(found[0]) if len(found) == 1 else {}


class Judged:
    """Compare a user's loss with recorded TRL losses of the same kind (grpo, dpo or sft).

    Args:
        only: options that select test cases.
        named: options implied by the function's name, ignored if the loss reads loss_type.
    """

    def __init__(self, loss: Callable, kind: str, tolerance: float, only: dict, named: dict):
        self.loss = loss
        self.kind = kind
        self.tolerance = tolerance
        self.notes = []
        self.only = named | only
        wanted = {}
        if "loss_type" in self.only:
            wanted["loss_type"] = next(cases(kind=kind, **self.only))[1]["loss_type"]
        refuse_random(loss, kind)
        self.read = reads_of(loss, kind, wanted)
        if "loss_type" in self.read:
            self.only = only
        self.is_named = "loss_type" in self.only and "loss_type" not in only
        reads_kl = {"beta", "ref_per_token_logps"} & self.read
        self.has_no_kl = kind == "grpo" and not reads_kl and not self.only.get("beta")
        self.has_idle_kl = self.has_no_kl and "beta" not in self.only and needs(loss, kind, "beta")
        if self.has_no_kl:  # without a KL, use_bias_correction_kl has no effect
            self.only = {**self.only, "beta": 0.0}
            self.only.pop("use_bias_correction_kl", None)
        recorded = self.known_cases()
        second = [self.second_case(*numbered) for numbered in enumerate(recorded)]
        about = {"tolerance": tolerance, "read": self.read}
        self.cases = [case_of(loss, *case, **about) for case in recorded + second]
        settings = SETTINGS if kind == "grpo" else ("loss_type",)
        has_bounds = kind == "grpo" and self.only.get("loss_type") not in ("sapo", "vespo")
        if has_bounds and not EPSILONS & self.read:  # hard-coded epsilons: look for the closest recorded ones
            settings = (*settings, "epsilon_high")
        self.close = closest_losses(self.cases, [name for name in settings if name not in self.read])
        self.closest = self.close[0]

    def known_cases(self) -> list[tuple]:
        """List recorded cases, except those with a loss_type that the user's loss does not support."""
        recorded = [*cases(kind=self.kind, **self.only)]
        if "loss_type" not in self.read or "loss_type" in self.only:
            return recorded
        names = {name_of_loss(options) for _, options, *_ in recorded}
        unknown = {name for name in names if not knows(self.loss, self.kind, name)}
        if unknown:
            listed = ", ".join(sorted(unknown))
            self.notes.append(f"not tested: {listed}; the loss does not know these loss types")
        return [case for case in recorded if name_of_loss(case[1]) not in unknown]

    def second_case(self, number: int, case: tuple) -> tuple:
        """Return a test case with other values for the options that the user's loss reads.

        Compute its correct loss and gradient with minivlmrl's loss, which equals TRL's.
        """
        name, options, batch, *_ = case
        wanted = set(self.read)
        if EPSILONS & wanted:
            wanted |= EPSILONS
        if "ref_per_token_logps" in wanted:  # the loss has a KL, perhaps with a hard-coded beta
            wanted.add("beta")
        options = dict(options)
        for option, values in NUMBERS[self.kind].items():
            has_kl = option != "beta" or options.get("beta")
            if option in wanted and option in options and option not in self.only and has_kl:
                options[option] = values[number % 2]
        batch = dict(batch)
        if self.kind == "grpo":
            batch["advantages"] = 6 * batch["advantages"]
        return f"{name} changed", options, batch, *loss_and_gradient(our_loss, batch, options)

    def verdict(self) -> Verdict:
        """Compare the user's loss with the closest TRL loss."""
        judged = self.closest.cases
        first = judged[0].options
        varied = [name for name in first if any(case.options.get(name) != first[name] for case in judged)]
        differences = [difference(case, varied) for case in judged if not case.is_explained({})]
        of = f" of {self.closest}" if self.closest.only else ""
        says = f"all {len(judged)} cases{of} agree with TRL in value and gradient"
        if differences:
            says = f"{len(differences)} of {len(judged)} cases{of} differ from TRL"
        names = []
        if differences:
            names = self.causes() or [NO_NAME]
        if self.is_named and any("averaged as in" in line for line in names):
            names.append(f"mistake: by its name, the loss is averaged as in {self.only['loss_type']}")
        if self.has_idle_kl:
            names.append("mistake: the KL never acts: beta is read, but changes nothing")
        verdict = Verdict(len(judged), says, differences, names, notes=self.notes)
        if not verdict.kinds:  # named mistakes and designs need no test of laws
            options = {**self.only, **self.closest.only}
            known = {name: x for name, x in options.items() if name in DEFAULTS[self.kind]}
            report = examine(self.loss, self.kind, self.tolerance, **known)
            verdict.broken = report.broken
            verdict.notes += report.notes
        elif self.has_no_kl:
            verdict.notes.append(NO_KL)
        unread = NUMBERS[self.kind].keys() & reads_of(our_loss, self.kind, first) - self.read
        if self.kind == "grpo":
            unread -= {"delta", "beta"}
        if unread and "loss_type" not in self.read:
            listed = ", ".join(sorted(unread))
            verdict.notes.append(f"without effect: {listed}; the loss was tested only with its own values of them")
        return verdict

    def causes(self) -> list[str]:
        """Find mistakes that explain the differences from TRL; return lines to print.

        Try the closest TRL loss first, then the next closest.
        """
        names = names_without_search(self.closest.cases) or find_names(self.closest.cases)
        close = self.close[1:]
        if not close:  # the user's loss supports several TRL losses: perhaps one is wrong
            close = [loss for loss in closest_losses(self.cases, [*SETTINGS]) if loss.share]
        for loss in close[: TRIED - 1]:
            if names:
                break
            names = find_names(loss.cases)
            if names:
                names.append(f"  in the cases of {loss}")
        return names


def difference(case: Case, varied: list[str]) -> str:
    """Describe the errors of loss and gradient in a test case.

    Args:
        varied: options to print, because they differ between test cases.
    """
    where = case.name
    if varied:
        where += " (" + ", ".join(f"{name}={case.options.get(name)}" for name in varied) + ")"
    error = case.error({})
    return f"{where}: value differs by {error[-1]:.1e}, gradient by {error[:-1].max():.1e}"


def names_without_search(cases: list[Case]) -> list[str]:
    """Name causes that need no search: only the loss value differs, or all gradients are 0."""
    if all(case.error({})[:-1].max() <= case.tolerance for case in cases):
        return ["design: the values differ, but the gradients are equal in all cases"]
    if not any(case.gradient.any() for case in cases):
        return ["mistake: no gradient reaches the policy"]
    return []


@dataclass
class CloseLoss:
    """TRL loss, such as loss_type=dapo, compared with the user's loss."""

    only: dict  # options that select this loss
    cases: list[Case]  # test cases with these options
    share: float  # fraction of `cases` in which the user's loss differs
    gap: float  # mean gradient distance (scale ignored), plus penalties for unlikely losses

    def __str__(self) -> str:
        return " ".join(f"{name}={x}" for name, x in self.only.items())


def closest_losses(cases: list[Case], settings: list[str]) -> list[CloseLoss]:
    """Sort TRL's losses by agreement with the user's loss, best first."""
    groups = defaultdict(list)
    for case in cases:
        options = case.options | {"loss_type": case.loss_type}
        groups[tuple(options.get(name) for name in settings)].append(case)
    close = []
    for values, group in groups.items():
        only = dict(zip(settings, values, strict=True))
        share = statistics.mean(not case.is_explained({}) for case in group)
        close.append(CloseLoss(only, group, share, gradient_gap(group) + rarity(only, group[0])))

    def order(loss: CloseLoss) -> tuple:
        # recorded cases with beta=0 all have use_bias_correction_kl=True: average over True and False, to favor neither
        corrected = {"use_bias_correction_kl": True}
        both = [other.gap for other in close if other.only | corrected == loss.only | corrected]
        # order: full agreement, nearest gradients, TRL's default loss
        is_usual = loss.only.get("loss_type") in ("dapo", "sigmoid")
        is_corrected = bool(loss.only.get("use_bias_correction_kl"))
        return loss.share > 0, round(statistics.mean(both), 2), not is_usual, is_corrected, -len(loss.cases)

    return sorted(close, key=order)


def gradient_gap(cases: list) -> float:
    """Return the mean of 1 - |cosine similarity| between the user's and TRL's gradients.

    A constant factor between the gradients adds nothing. In GRPO, a factor that varies between cases adds up to 0.1.
    """
    angles = []
    scales = []
    for case in cases:
        found = case.gradient.flatten().nan_to_num(0.0)
        right = case.right[1].flatten()
        angles.append(1 - float(torch.cosine_similarity(found, right, 0).abs()))
        scale = found.norm() / right.norm().clamp(min=1e-12)
        scales.append(float(scale.clamp(min=1e-12).log()))
    gap = statistics.mean(angles)
    if cases[0].options["kind"] == "grpo":  # penalty for a scale that varies between cases
        gap += 0.1 * min(1.0, statistics.pstdev(scales))
    return gap


def rarity(only: dict, case: Case) -> float:
    """Return a penalty for TRL losses that the user's loss is unlikely to be.

    Unlikely: rare losses, and losses with an option that the user's loss does not read.
    """
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
        values = {}
        for name in only:
            values[name] = sorted({str(options.get(name)) for options in recorded})
        known = ", ".join(sorted(set().union(*recorded)))
        raise UserError(f"no recorded case has all of {only} together; recorded values: {values}; options: {known}")
    for case in chosen:
        options = dict(case.options)
        if options["kind"] == "grpo":
            options = term_options(options["loss_type"]) | options
        batch = {name: torch.from_numpy(x) for name, x in case.batch.items()}
        loss = torch.tensor(case.loss, dtype=torch.float64)
        yield case.name, options, batch, loss, torch.from_numpy(case.gradient)
