"""Recompute TRL's loss step by step, with simulated mistakes in its quantities."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from minivlmrl.losses.grpo import AVERAGES, TERMS, LossNormalizer, TermInputs, correct_kl, importance_ratio, kl_term
from minivlmrl.losses.grpo_variants import RATIOS  # noqa: F401  the import adds all loss types to TERMS and AVERAGES
from minivlmrl.losses.preference import answer_logps, dpo_loss

PLACES = ("the policy's term", "the KL")  # parts of a GRPO loss: a mistake may be in only one of them
ALL_AVERAGES = AVERAGES | {"nll": AVERAGES["dapo"], "dft": AVERAGES["dapo"]}


@dataclass
class Case:
    """Test case: a batch, and value and gradient of the user's loss and of TRL's.

    Tensors have shape (R, T). In DPO, the rows of a pair are adjacent: chosen, rejected.
    """

    name: str
    options: dict
    batch: dict[str, Tensor]
    value: Tensor
    gradient: Tensor
    right: tuple[Tensor, Tensor] | None = None  # TRL's value and gradient, None = compute them with our loss
    tolerance: float = 1e-6
    read: set[str] = field(default_factory=set)  # tensors and options that the user's loss reads
    simpler: Callable[[], list] = list  # function that returns simplified cases, such as all advantages 1
    compares_value: bool = True  # False = compare only gradients

    @property
    def loss_type(self) -> str:
        """Name of the TRL loss."""
        return name_of_loss(self.options)

    def error(self, change: dict | None) -> Tensor:
        """Return relative errors of the user's gradients and value, compared with TRL's.

        The unit is max(1, TRL's largest absolute number). Errors are infinite if TRL's loss cannot be computed with the
        mistake.

        Args:
            change: simulated mistake in TRL's loss, {} = none.
        """
        simulated = with_mistake(self, change)
        if change == {} and self.right:
            simulated = self.right
        if simulated is None:
            return torch.tensor([math.inf])
        value, gradient = simulated
        errors = distance(self.gradient, gradient)
        if self.compares_value:
            errors = torch.cat([errors, distance(self.value, value)])
        return errors.nan_to_num(math.inf, math.inf)

    def is_explained(self, change: dict | None) -> bool:
        """Return whether TRL's loss with this mistake equals the user's."""
        return bool(self.error(change).max() <= self.tolerance)


def distance(found: Tensor, right: Tensor) -> Tensor:
    """Return absolute differences relative to max(1, largest right number), 0 where both are NaN."""
    error = (found - right).abs() / right.nan_to_num(0.0).abs().max().clamp(min=1)
    return error.masked_fill(found.isnan() & right.isnan(), 0.0).flatten()


def name_of_loss(options: dict) -> str:
    """Return the name in options["loss_type"], which is a list with one name for DPO losses."""
    name = options["loss_type"]
    return name if isinstance(name, str) else name[0]


def rows_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Flatten DPO's pairs to rows: (B, 2, T) becomes (2B, T)."""
    return {name: x.flatten(0, -2) if x.dim() > 1 else x for name, x in batch.items()}


def our_loss(batch: dict[str, Tensor], options: dict) -> Tensor:
    """Compute minivlmrl's loss, which equals TRL's, from the arguments of a user's loss."""
    rows = rows_of(batch)
    logps = rows["per_token_logps"]
    return KINDS[options["kind"]](logps, Case("", options, rows, logps, logps), {})


def with_mistake(case: Case, change: dict | None) -> tuple[Tensor, Tensor] | None:
    """Return TRL's loss and gradient with a simulated mistake; None if it cannot be computed."""
    try:
        return None if change is None else recomputed(case, change)
    except (ValueError, RuntimeError, IndexError, ArithmeticError, AttributeError):
        return None  # the mistake is impossible here: SFT, for example, has no beta


def recomputed(case: Case, change: dict) -> tuple[Tensor, Tensor]:
    """Return TRL's loss and gradient with a simulated mistake, {} = none."""
    leaf = case.batch["per_token_logps"].clone().requires_grad_()
    loss = KINDS[case.options["kind"]](leaf, case, change)
    if "factor" in change:
        loss = loss * Quantities(leaf.detach(), case, change).put("factor", 1.0)
    # + 0 * leaf: autograd would fail for a loss that does not use log-probs
    [gradient] = torch.autograd.grad(loss + 0 * leaf.sum(), leaf)
    return loss.detach(), gradient


class Quantities(SimpleNamespace):
    """Tensors and options of a loss, with a simulated mistake.

    Functions in mistakes.py get this as `s`. `s.x` is the right value of the quantity that they change.
    """

    def __init__(self, logps: Tensor, case: Case, change: dict):
        options = {"kl_estimator": "k3", "loss_weights": None, **case.options}
        super().__init__(**TERM_OPTIONS | options | case.batch)
        self.options = options
        self.change = change
        self.completion_mask = self.mask
        self.lengths = self.mask.sum(1)
        self.num_rows = len(self.mask)
        self.num_columns = self.mask.shape[1]
        replaced = {}
        for name in change.keys() & {*TERM_OPTIONS, *options}:
            replaced[name] = self.put(name, vars(self)[name])
        vars(self).update(replaced)
        self.mask = self.put("mask", self.mask)
        self.per_token_logps = self.put("logps", logps)
        reference = self.put("reference", vars(self).get("ref_per_token_logps", logps.detach()))
        old = self.put("old", vars(self).get("old_per_token_logps", logps.detach()))
        self.per_token_logps = self.put("policy", self.per_token_logps)
        self.old_per_token_logps, self.ref_per_token_logps = old, reference

    def put(self, name: str, x: Any) -> Any:
        """Return a quantity, or its wrong value if the simulated mistake changes it."""
        wrong = self.change.get(name, x)
        if not callable(wrong):
            return wrong
        self.x = x
        return wrong(self)

    @property
    def clipped_ratio(self) -> Tensor:
        return self.ratio.clamp(1 - self.epsilon_low, 1 + self.epsilon_high)


def policy(logps: Tensor, case: Case, change: dict) -> Tensor:
    """Compute a GRPO loss: average of the policy's term plus average of the KL."""
    total = torch.zeros((), dtype=logps.dtype)
    for place, term in zip(PLACES, (policy_term, kl_penalty), strict=True):
        is_wrong = change.get("inside", place) == place
        s = Quantities(logps, case, change if is_wrong else {})
        s.advantages = s.put("advantages", s.advantages[:, None])
        s.ref_log_ratio = s.per_token_logps - s.ref_per_token_logps
        s.log_ratio = s.put("log-ratio", s.per_token_logps - s.old_per_token_logps)
        s.ratio = s.put("ratio", importance_ratio(s.log_ratio, s.mask, s.importance_sampling_level))
        if term is policy_term or s.beta:
            total = total + averaged(term(s), s)
    return total


def policy_term(s: Quantities) -> Tensor:
    """Compute the policy's term per token, such as PPO's clipped one."""
    arguments = {name: getattr(s, name) for name in term_options(s.loss_type)}
    inputs = TermInputs(s.per_token_logps, s.log_ratio, s.ratio, s.advantages, s.mask, s.epsilon_low, s.epsilon_high)
    return s.put("terms", TERMS[s.loss_type](inputs, **arguments)[0])


def kl_penalty(s: Quantities) -> Tensor:
    """Compute beta times the KL per token."""
    kl = s.put("KL estimate", kl_term(s.per_token_logps, s.ref_per_token_logps, s.kl_estimator))
    if s.use_bias_correction_kl:
        kl = correct_kl(kl, s.ratio, s.kl_estimator)
    return s.beta * s.put("KL", kl)


def averaged(terms: Tensor, s: Quantities) -> Tensor:
    """Average terms (R, T) over tokens and rows."""
    s.unmasked = terms
    s.terms = terms = terms * s.put("weights", s.mask)
    tokens = s.mask.sum().clamp(min=1)
    if torch.equal(s.mask, s.completion_mask):
        tokens = s.options.get("tokens", tokens)
    normalizer = LossNormalizer(s.num_rows, tokens, s.options.get("max_completion_length"))
    average = ALL_AVERAGES[s.put("average", s.options["loss_type"])]
    return s.put("mean", average(terms, s.mask, normalizer))


def preferences(logps: Tensor, case: Case, change: dict) -> Tensor:
    """Compute a DPO loss."""
    s = Quantities(logps, case, change)
    index = s.put("index", torch.arange(s.num_rows).view(-1, 2))  # (chosen row, rejected row) per pair
    s.answer_lengths = s.mask[index].sum(-1)
    sums = answer_logps(s.per_token_logps[index], s.mask[index])
    ref_sums = s.put("summed reference", answer_logps(s.ref_per_token_logps[index], s.mask[index]))
    log_ratio = s.put("log-ratio", sums - ref_sums)
    value, _ = dpo_loss(
        s.per_token_logps[index],
        s.mask[index],
        loss_type=s.loss_type,
        loss_weights=s.loss_weights,
        beta=s.beta,
        label_smoothing=s.label_smoothing,
        ref_logps=sums - log_ratio,
    )
    s.margins = s.beta * (log_ratio[:, 0] - log_ratio[:, 1])
    return s.put("pair loss", value)


def demonstrations(logps: Tensor, case: Case, change: dict) -> Tensor:
    """Compute an SFT loss."""
    s = Quantities(logps, case, change)
    terms = -s.per_token_logps
    if s.loss_type == "dft":
        terms = terms * s.per_token_logps.detach().exp()
    return averaged(s.put("terms", terms), s)


def term_options(loss_type: str) -> dict:
    """Return {option: default} for the policy term of a loss type, such as SAPO's sapo_temperature_pos."""
    return TERMS[loss_type].__kwdefaults__ or {}


KINDS = {"grpo": policy, "dpo": preferences, "sft": demonstrations}
TERM_OPTIONS = {}
for loss_type in TERMS:
    TERM_OPTIONS |= term_options(loss_type)
