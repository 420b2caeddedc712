"""GRPO's loss as one pure function of log-probabilities. It imports torch alone: copy it out.

B completions, T tokens of the longest; rows are filled up on the right.

    ratio      r_t = pi(o_t) / pi_old(o_t), by token or for a whole row       RATIOS
    term       -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)                TERMS
    KL         + beta * KL(pi || pi_ref) of tokens, from the drawn one        kl_term
    average    over tokens and rows: all in which GRPO, DAPO and Dr. GRPO differ   AVERAGES

Every average divides by counts of the whole optimizer step, so the gradients of micro-batches,
however the step is split, add up to the gradient of the step. The rest of the family (RLOO, CISPO,
SAPO, ...) is in grpo_variants.py, which adds entries to the three tables.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Protocol

import torch
from torch import Tensor


class LossOptions(Protocol):
    """What grpo_loss reads of its options: GRPOLossOptions, or the section `grpo` of a recipe."""

    @property
    def loss_type(self) -> str: ...
    @property
    def importance_sampling_level(self) -> str: ...
    @property
    def epsilon_low(self) -> float: ...
    @property
    def epsilon_high(self) -> float: ...
    @property
    def beta(self) -> float: ...
    @property
    def kl_estimator(self) -> str: ...
    @property
    def use_bias_correction_kl(self) -> bool: ...


@dataclass
class GRPOLossOptions:
    """Options of grpo_loss for its callers in Python.

    A recipe sets the section `grpo`, GRPOOptions in config/options.py, with the same names and
    defaults; a test compares the two.
    """

    loss_type: str = "dapo"  # the term and the average, see TERMS and AVERAGES
    importance_sampling_level: str = "token"  # see RATIOS; "sequence" is GSPO
    epsilon_low: Annotated[float, ">= 0"] = 0.2  # the ratio is clipped at 1 - epsilon_low
    epsilon_high: Annotated[float, ">= 0"] = 0.2  # and at 1 + epsilon_high
    beta: Annotated[float, ">= 0"] = 0.0  # weight of the KL; 0: there is no reference model
    kl_estimator: str = "k3"  # see kl_term
    use_bias_correction_kl: bool = True  # weigh the KL with the ratio, which corrects its gradient

    def __post_init__(self):
        if not 0 <= self.epsilon_low <= self.epsilon_high:  # refuses NaN too
            raise ValueError(
                f"epsilon_low is {self.epsilon_low}, it must be from 0 to epsilon_high, "
                f"{self.epsilon_high}"
            )
        if not self.beta >= 0:
            raise ValueError(f"beta is {self.beta}, it must be at least 0")


@dataclass
class LossNormalizer:
    """What losses divide by: totals of an optimizer step, over its micro-batches and ranks."""

    sequences: float  # completions
    tokens: float | Tensor  # completion tokens that count
    max_completion_length: int | None = None  # the constant of dr_grpo


def grpo_loss(
    per_token_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    options: LossOptions | None = None,
    *,
    old_per_token_logps: Tensor | None = None,
    ref_per_token_logps: Tensor | None = None,
    token_weights: Tensor | None = None,
    normalizer: LossNormalizer | None = None,
    **term_options,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy-gradient loss of a batch of completions.

    Example: one row of two tokens, on-policy (ratio 1), advantage 0.5, beta 0: each term is -0.5,
    and so are the losses "grpo" and "dapo"; "dr_grpo" with max_completion_length 4 gives -0.25.

    Args:
        per_token_logps: (B, T) float, nats, of the policy that is trained, with gradient.
        advantages: (B,) or (B, T).
        mask: (B, T), 1 for tokens that count. A row of zeros still counts as a sequence.
        old_per_token_logps: (B, T), of the policy that sampled; None: the present one (ratio 1).
        ref_per_token_logps: (B, T), of the reference; needed with beta.
        token_weights: (B, T) or (B, 1), factors of the policy's term, but not of the KL: a mask of
            high-entropy tokens, a correction of the sampler's mismatch; None: 1 for all.
        normalizer: of the whole step; None: this batch is the step.
        term_options: keywords of the loss_type's entry in TERMS.
    Returns:
        loss, a scalar; and metrics without gradient: clip_ratio/..., kl (nats per token), and
        those of the term.
    Source: DeepSeekMath eq. 3 (arXiv 2402.03300), DAPO (2503.14476), Dr. GRPO (2503.20783), GSPO
        (2507.18071); equals GRPOTrainer._compute_loss of TRL 1.16, value and gradient.
    """
    if len(advantages) != len(mask):
        raise ValueError(f"{len(advantages)} advantages for {len(mask)} rows: one for each row")
    options = options or GRPOLossOptions()
    check_known("loss_type", options.loss_type, AVERAGES)
    normalizer = normalizer or batch_normalizer(mask)
    if advantages.dim() == 1:
        advantages = advantages[:, None]  # (B, 1), else (B, T)
    if old_per_token_logps is None:
        old_per_token_logps = per_token_logps.detach()
    log_ratio = per_token_logps - old_per_token_logps  # (B, T)
    ratio = importance_ratio(log_ratio, mask, options.importance_sampling_level)
    inputs = TermInputs(per_token_logps, log_ratio, ratio, advantages, mask)
    per_token_loss, metrics = TERMS[options.loss_type](inputs, options, **term_options)
    if token_weights is not None:
        per_token_loss = per_token_loss * token_weights
    if options.beta:
        kl = kl_term(per_token_logps, ref_per_token_logps, options.kl_estimator)
        kl = correct_kl(kl, ratio, options)
        metrics["kl"] = kl
        per_token_loss = per_token_loss + options.beta * kl
    loss = AVERAGES[options.loss_type](per_token_loss * mask, mask, normalizer)
    return loss, {name: mean_metric(value.detach(), mask) for name, value in metrics.items()}


def importance_ratio(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """Compute pi / pi_old of tokens, (B, T), or of whole rows, (B, 1), from log-ratios (B, T)."""
    check_known("importance_sampling_level", level, RATIOS)
    return RATIOS[level](log_ratio, mask)


# importance_sampling_level: (log_ratio (B, T), mask) -> ratio (B, T) or (B, 1)
RATIOS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    # r_t = pi(o_t) / pi_old(o_t)
    "token": lambda log_ratio, mask: log_ratio.exp(),
    # (prod_t r_t)^(1 / |o|), GSPO eq. 7
    "sequence": lambda log_ratio, mask: row_mean(log_ratio, mask).exp(),
}


@dataclass
class TermInputs:
    """What a term is computed from; (B, T) unless a shape is given."""

    logps: Tensor  # nats, with gradient
    log_ratio: Tensor  # of tokens, whatever importance_sampling_level is
    ratio: Tensor  # (B, T) or (B, 1), by importance_sampling_level
    advantages: Tensor  # (B, 1) or (B, T)
    mask: Tensor


def clipped(
    inputs: TermInputs, options: LossOptions, *, delta: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(r A, clip(r) A): no gain from moving further than the clip range (PPO eq. 7).

    delta: upper bound of the unclipped ratio too, over 1 + epsilon_high (INTELLECT-2, arXiv
    2505.07291); None: there is none.
    """
    ratio, advantages = inputs.ratio, inputs.advantages
    low = 1 - options.epsilon_low
    high = 1 + options.epsilon_high
    at_low = (ratio < low) & (advantages < 0)
    at_high = (ratio > high) & (advantages > 0)
    metrics = {
        "clip_ratio/low_mean": at_low,
        "clip_ratio/high_mean": at_high,
        "clip_ratio/region_mean": at_low | at_high,
    }
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    return -torch.min(bounded * advantages, ratio.clamp(low, high) * advantages), metrics


# loss_type: (TermInputs, options, **term_options) -> loss of tokens (B, T), metrics
TERMS: dict[str, Callable[..., tuple[Tensor, dict[str, Tensor]]]] = {
    "grpo": clipped,
    "dapo": clipped,
    "dr_grpo": clipped,
}


def kl_term(logps: Tensor, ref_logps: Tensor | None, estimator: str) -> Tensor:
    """Estimate the token KL(pi || pi_ref), prefixes held fixed, from the drawn token: (B, T) nats.

                                                 value                     expected gradient
        k1   log pi - log pi_ref                 unbiased                  0
        k2   (log pi - log pi_ref)^2 / 2         biased                    the token KL's
        k3   pi_ref/pi - log(pi_ref/pi) - 1      unbiased, not negative    that of KL(pi_ref || pi)
        k1+, k2+, k3+   as without the plus      as without the plus       the token KL's, as k2

    A recipe chooses k1, k2 or k3 with grpo.kl_estimator; names with a plus are for callers of
    grpo_loss. A new estimator is a branch here and a name in GRPOOptions.kl_estimator
    (config/options.py); correct_kl decides whether its gradient goes through the ratio.
    The table is for sums over tokens and without correct_kl, which gives k1 and k3 the gradient of
    the token KL and is on by default. No estimator has the gradient of whole completions' KL, in which a
    token also changes what follows: a KL in the reward has it (docs/bias.md).
    Source: Schulman, "Approximating KL divergence" (2020); gradients: arXiv 2506.09477; with a
        plus: verl's straight-through estimators.
    """
    if ref_logps is None:
        raise ValueError("with beta over 0 the KL term needs ref_per_token_logps")
    if estimator in ("k1+", "k2+", "k3+"):
        k2 = kl_term(logps, ref_logps, "k2")
        return kl_term(logps, ref_logps, estimator[:2]).detach() + k2 - k2.detach()
    d = ref_logps - logps
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return 0.5 * d.square()
    if estimator == "k3":
        return d.exp() - d - 1
    raise ValueError(f"kl_estimator is {estimator!r}; known are k1, k2, k3, k1+, k2+ and k3+")


def correct_kl(kl: Tensor, ratio: Tensor, options: LossOptions) -> Tensor:
    """Multiply the KL term by the ratio, so that its gradient is the token KL's, off-policy too.

    k1 and k3 get that gradient through the ratio. The ratio is detached for k2 and for names with a
    plus, because they have it already: the ratio only weighs tokens that an older policy sampled.
    """
    if not options.use_bias_correction_kl:
        return kl
    if options.kl_estimator == "k2" or options.kl_estimator.endswith("+"):
        return kl * ratio.detach()
    return kl * ratio


# loss_type: (per-token terms, 0 outside the mask; mask; Counts) -> scalar
AVERAGES: dict[str, Callable[[Tensor, Tensor, LossNormalizer], Tensor]] = {
    # each row by its own length, then by the number of rows
    "grpo": lambda terms, mask, normalizer: (
        (terms.sum(-1) / mask.sum(-1).clamp(min=1)).sum() / normalizer.sequences
    ),
    # all tokens of the step weigh the same
    "dapo": lambda terms, mask, normalizer: terms.sum() / normalizer.tokens,
    # no length bias: the divisor does not depend on what was written
    "dr_grpo": lambda terms, mask, normalizer: (
        terms.sum() / (normalizer.sequences * max_length(normalizer))
    ),
}


def max_length(normalizer: LossNormalizer) -> int:
    """Return the constant of dr_grpo, which the caller must give."""
    if normalizer.max_completion_length is None:
        raise ValueError("loss_type dr_grpo divides by normalizer.max_completion_length; give it")
    return normalizer.max_completion_length


def batch_normalizer(mask: Tensor) -> LossNormalizer:
    """Return the counts of a batch that is a whole optimizer step."""
    return LossNormalizer(len(mask), mask.sum().clamp(min=1))


def row_mean(x: Tensor, mask: Tensor) -> Tensor:
    """(B, T) -> (B, 1): mean over the tokens of each row that count."""
    return (x * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def mean_metric(x: Tensor, mask: Tensor) -> Tensor:
    """Average over tokens that count of a (B, T) tensor, over rows of a (B, 1) one."""
    if x.dtype == torch.bool:
        x = x.double()  # shares of micro-batches add up exactly
    if x.shape[1] == 1:
        return x.mean()
    return (x * mask).sum() / mask.sum().clamp(min=1)


def check_known(option: str, name: str, table: dict[str, Callable]):
    """Refuse a value of an option (ValueError) that its table does not have."""
    if name not in table:
        raise ValueError(f"{option} is {name!r}; known are {', '.join(table)}")
