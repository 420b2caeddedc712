"""Check your own loss against values and gradients recorded from TRL 1.16, without installing TRL.

In a clone, `pytest tests/parity` compares minivlmrl's losses and options with the installed TRL.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minivlmrl.errors import UserError
from minivlmrl.extras.parity.calling import loss_and_gradient, loss_form
from minivlmrl.extras.parity.examined import DEFAULTS
from minivlmrl.extras.parity.laws import LawReport, examine
from minivlmrl.extras.parity.reads import NUMBERS, kind_of, needs, reads_of
from minivlmrl.extras.parity.recomputed import Case, our_loss, term_options
from minivlmrl.extras.parity.search import case_of, find_names
from minivlmrl.extras.parity.vectors import read_cases, read_options
from minivlmrl.losses.preference import DPO_LOSSES

SHOWN = 4  # number of differing cases to print
NO_NAME = "no name: no known mistake or deliberate variant reproduces the loss in all cases"
TRIED = 3  # TRL losses, closest first, in which to search causes
EPSILONS = {"epsilon_low", "epsilon_high"}
SETTINGS = ("loss_type", "importance_sampling_level", "use_bias_correction_kl")  # options that select a loss in TRL
# {loss_type: option read by a right loss}
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
    names: Sequence[str] = ()  # report lines about causes of differences from TRL, such as "mistake: beta is 0.1"
    broken: Sequence[str] = ()  # missing properties of correct losses
    notes: list[str] = field(default_factory=list)  # what was not tested, and properties that may be wanted

    @property
    def kinds(self) -> list[str]:
        """List "mistake" or "design" for each cause found."""
        return [kind for kind in (line.partition(":")[0] for line in self.names) if kind in ("mistake", "design")]

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
    loss = loss_form(my_loss, framework)
    return Judged(loss, kind or kind_of(loss), tolerance, asked).verdict()


def named_by(my_loss, kind: str | None) -> dict:
    """Return what a function's name promises, such as loss_type=dapo for my_dapo_loss."""
    name = getattr(my_loss, "__qualname__", type(my_loss).__name__).lower()
    found = [NAMED[word] for word in NAMED if word in name and kind in (None, NAMED[word].get("kind", "grpo"))]
    return dict(found[0]) if len(found) == 1 else {}


class Judged:
    """User loss, compared with recorded TRL losses of one kind.

    Args:
        only: options to select cases.
    """

    def __init__(self, loss: Callable, kind: str, tolerance: float, only: dict):
        self.loss, self.kind, self.tolerance = loss, kind, tolerance
        asked = {"loss_type": next(cases(kind=kind, **only))[1]["loss_type"]} if "loss_type" in only else {}
        self.read = reads_of(loss, kind, asked)
        self.has_no_kl = kind == "grpo" and not {"beta", "ref_per_token_logps"} & self.read and not only.get("beta")
        self.has_idle_kl = self.has_no_kl and "beta" not in only and needs(loss, kind, "beta")
        if self.has_no_kl:  # recorded cases without a KL have no use_bias_correction_kl
            only = {name: x for name, x in only.items() if name != "use_bias_correction_kl"} | {"beta": 0.0}
        self.only = only
        recorded = [*cases(kind=kind, **only)]
        second = [self.second_case(*numbered) for numbered in enumerate(recorded)]
        about = {"tolerance": tolerance, "read": self.read}
        self.cases = [case_of(loss, *case, **about) for case in recorded + second]
        self.close = self.sorted_losses()
        self.closest = self.close[0]

    def sorted_losses(self) -> list["CloseLoss"]:
        """Sort TRL's losses, closest first; of those with equal numbers, one that breaks no law."""
        settings = SETTINGS if self.kind == "grpo" else SETTINGS[:1]
        if self.kind == "grpo" and self.only.get("loss_type") not in ("sapo", "vespo") and not EPSILONS & self.read:
            settings = (*settings, "epsilon_high")  # a constant of its own: compare with cases that have it
        close = closest_losses(self.cases, [name for name in settings if name not in self.read])
        equal = [loss for loss in close if not loss.share]
        if len(equal) > 1:
            close.sort(key=lambda loss: (loss.share > 0, not loss.share and len(self.laws(loss.only).broken_laws())))
        return close

    def second_case(self, number: int, case: tuple) -> tuple:
        """Change the options that the loss reads; our loss, which equals TRL's, gives the right numbers."""
        name, options, batch, *_ = case
        wanted = self.read | (EPSILONS if EPSILONS & self.read else set())
        wanted |= {"beta"} if "ref_per_token_logps" in self.read else set()  # also if the loss has its own beta
        names = NUMBERS[self.kind].keys() & wanted & options.keys() - self.only.keys()
        others = {name: NUMBERS[self.kind][name][number % 2] for name in names if options[name] or name != "beta"}
        if self.kind == "grpo":
            batch = batch | {"advantages": 6 * batch["advantages"]}
        right = loss_and_gradient(our_loss, batch, options | others)
        return f"{name} changed", options | others, batch, *right

    def laws(self, only: dict) -> LawReport:
        """Check laws for a loss with these options."""
        known = {name: x for name, x in only.items() if name in DEFAULTS[self.kind]}
        return examine(self.loss, self.kind, self.tolerance, **known)

    def verdict(self) -> Verdict:
        """Judge the loss by its closest TRL loss."""
        judged = self.closest.cases
        first = judged[0].options
        varied = [name for name in first if any(case.options.get(name) != first[name] for case in judged)]
        differences = [difference(case, varied) for case in judged if not case.is_explained({})]
        verdict = Verdict(len(judged), differences, f" of {self.closest}" if self.closest.only else "")
        if differences:
            verdict.names = self.causes() or [NO_NAME]
        if "mistake" not in verdict.kinds:
            has_own_length = (
                self.closest.only.get("loss_type") == "dr_grpo" and "max_completion_length" not in self.read
            )
            report = self.laws(self.only | (self.closest.only if has_own_length or not differences else {}))
            verdict.broken = report.sentences("broken")
            verdict.notes = [f"note: {says}" for says in report.sentences("note")]
        if self.has_idle_kl:
            verdict.names = [*verdict.names, "mistake: the KL never acts: beta is read, but changes nothing"]
        elif self.has_no_kl:
            verdict.notes.append("no KL: neither beta nor the reference changes the loss")
        unread = NUMBERS[self.kind].keys() & reads_of(our_loss, self.kind, first) - self.read
        unread -= {"delta"} if self.kind == "dpo" else {"delta", "beta"}
        if unread and "loss_type" not in self.read:
            names = ", ".join(sorted(unread))
            verdict.notes.append(f"not read: {names}; the loss was tested only with its own values of them")
        return verdict

    def causes(self) -> list[str]:
        """Find causes for differences from the closest TRL loss, or else the next; return lines to print."""
        names = names_without_search(self.closest.cases) or find_names(self.closest.cases)
        close = self.close[1:]
        if not close:  # the loss reads all options to select a loss: perhaps only one is wrong
            close = [loss for loss in closest_losses(self.cases, [*SETTINGS]) if loss.share]
        for loss in close[: TRIED - 1]:
            if not names and (others := find_names(loss.cases)):
                names = [*others, f"  in the cases of {loss}"]
        return names


def difference(case: Case, varied: list[str]) -> str:
    """Describe errors in a test case; `varied` names options that differ between test cases."""
    chosen = ", ".join(f"{name}={case.options.get(name)}" for name in varied)
    where = f"{case.name} ({chosen})" if chosen else case.name
    error = case.error({})
    return f"{where}: value differs by {error[-1]:.1e}, gradient by {error[:-1].max():.1e}"


def names_without_search(cases: list[Case]) -> list[str]:
    """Return a line to print if the gradients are right or missing."""
    if all(case.error({})[:-1].max() <= case.tolerance for case in cases):
        return ["design: the values differ, but the gradients are equal in all cases"]
    return [] if any(case.gradient.any() for case in cases) else ["mistake: no gradient reaches the policy"]


@dataclass
class CloseLoss:
    """TRL loss, such as loss_type=dapo, compared with the user's loss."""

    only: dict  # options that select this loss
    cases: list[Case]  # test cases with these options
    share: float  # fraction of `cases` in which the user's loss differs
    gap: float  # mean distance of gradients, whatever their scale, plus penalties

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
        pairs = [(case.gradient.flatten().nan_to_num(0.0), case.right[1].flatten()) for case in group]
        gap = 1 - statistics.mean(float(torch.cosine_similarity(*pair, 0).abs()) for pair in pairs)
        # scales that vary from case to case
        scales = [float((x.norm() / y.norm().clamp(min=1e-12)).clamp(min=1e-12).log()) for x, y in pairs]
        gap += 0.1 * min(1.0, statistics.pstdev(scales)) if group[0].options["kind"] == "grpo" else 0.0
        close.append(CloseLoss(only, group, share, gap + rarity(only, group[0])))

    def order(loss: CloseLoss) -> tuple:
        # test cases with beta=0 all have use_bias_correction_kl=True and would favor it: average over both values
        corrected = {"use_bias_correction_kl": True}
        both = [other.gap for other in close if other.only | corrected == loss.only | corrected]
        # a loss that agrees in all cases first; then the nearest gradients; if similar, TRL's defaults
        is_usual = loss.only.get("loss_type") in ("dapo", "sigmoid")
        is_corrected = bool(loss.only.get("use_bias_correction_kl"))
        return loss.share > 0, round(statistics.mean(both), 2), not is_usual, is_corrected, -len(loss.cases)

    return sorted(close, key=order)


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
