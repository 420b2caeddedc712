"""The GRPO loss as one pure function of log-probabilities.

The file imports only torch, so that you can copy it into your own project.

B is the number of completions and T the length of the longest one; shorter rows are padded on the
right. The loss is computed in four steps, and three of them are looked up in a table:

    ratio      r_t = pi(o_t) / pi_old(o_t), per token or per completion       RATIOS
    term       -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)                TERMS
    KL         + beta * KL(pi || pi_ref), estimated from the sampled tokens   kl_term
    average    over tokens and rows                                           AVERAGES

GRPO, DAPO and Dr. GRPO differ only in the average. Every average divides by totals of the whole
optimizer step, so that the gradients of its micro-batches add up to the gradient of the step,
however the step is split. grpo_variants.py adds RLOO, CISPO, SAPO and other losses to the tables.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Protocol

import torch
from torch import Tensor


class LossOptions(Protocol):
    """Options that `grpo_loss` reads: a GRPOLossOptions or the section `grpo` of a recipe."""

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
    """Options of `grpo_loss` for callers in Python.

    Recipes use GRPOOptions of config/options.py (section `grpo`) instead. A test checks that names
    and defaults are the same.
    """

    loss_type: str = "dapo"  # selects the term and the average, see TERMS and AVERAGES
    importance_sampling_level: str = "token"  # selects the ratio, see RATIOS; "sequence" is GSPO
    epsilon_low: Annotated[float, ">= 0"] = 0.2  # the ratio is clipped at 1 - epsilon_low
    epsilon_high: Annotated[float, ">= 0"] = 0.2  # and at 1 + epsilon_high
    beta: Annotated[float, ">= 0"] = 0.0  # weight of the KL; 0 needs no reference model
    kl_estimator: str = "k3"  # see kl_term
    use_bias_correction_kl: bool = True  # multiply the KL by the ratio, see correct_kl

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
    """Totals by which losses divide: sums over all micro-batches and ranks of an optimizer step."""

    sequences: float  # number of completions
    tokens: float | Tensor  # number of completion tokens whose mask is 1 (num_items_in_batch)
    max_completion_length: int | None = None  # constant length by which dr_grpo divides


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
    """Compute the policy-gradient loss of a batch of completions.

    Example: one row has two tokens, advantage 0.5 and ratio 1 (on-policy), and beta is 0. The term
    of each token is -0.5, so the losses "grpo" and "dapo" are -0.5 too; "dr_grpo" with
    max_completion_length 4 gives -0.25.

    Args:
        per_token_logps: (B, T) float, log-probabilities in nats under the trained policy, with
            gradient.
        advantages: (B,) or (B, T).
        mask: (B, T), 1 for tokens that are trained on. A row of zeros still counts as a sequence.
        old_per_token_logps: (B, T), log-probabilities under the policy that sampled. None means
            that the trained policy sampled, so that the ratio is 1.
        ref_per_token_logps: (B, T), log-probabilities under the reference; needed if beta is not 0.
        token_weights: (B, T) or (B, 1), factors of the policy term (the KL is not multiplied), for
            example a mask of high-entropy tokens or a correction of the sampler's mismatch.
            None means 1.
        normalizer: totals of the whole optimizer step. None means that this batch is the step.
        term_options: keyword arguments for the entry of TERMS.
    Returns:
        The loss, a scalar, and metrics without gradient: clip_ratio/..., kl (nats per token), and
        the metrics of the entry of TERMS.
    Source: DeepSeekMath eq. 3 (arXiv 2402.03300), DAPO (2503.14476), Dr. GRPO (2503.20783), GSPO
        (2507.18071); equals GRPOTrainer._compute_loss of TRL 1.16, value and gradient.
    """
    if len(advantages) != len(mask):
        raise ValueError(
            f"There are {len(advantages)} advantages for {len(mask)} rows; give one for each row"
        )
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
    """Compute the ratio pi / pi_old per token (B, T) or per completion (B, 1).

    Args:
        log_ratio: (B, T), log pi - log pi_old of each token, in nats.
        level: key of RATIOS, for example "token" or "sequence".
    """
    check_known("importance_sampling_level", level, RATIOS)
    return RATIOS[level](log_ratio, mask)


# importance_sampling_level: (log_ratio (B, T), mask) -> ratio (B, T) or (B, 1)
RATIOS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    # r_t = pi(o_t) / pi_old(o_t)
    "token": lambda log_ratio, mask: log_ratio.exp(),
    # (prod_t r_t)^(1 / |o|), the geometric mean over the tokens of a completion: GSPO eq. 7
    "sequence": lambda log_ratio, mask: row_mean(log_ratio, mask).exp(),
}


@dataclass
class TermInputs:
    """Tensors from which an entry of TERMS is computed; their shape is (B, T) unless given."""

    logps: Tensor  # log-probabilities in nats, with gradient
    log_ratio: Tensor  # log pi - log pi_old of each token, for any importance_sampling_level
    ratio: Tensor  # (B, T) or (B, 1), depending on importance_sampling_level
    advantages: Tensor  # (B, 1) or (B, T)
    mask: Tensor


def clipped(
    inputs: TermInputs, options: LossOptions, *, delta: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute PPO's clipped term (eq. 7): -min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A).

    Args:
        delta: upper bound of the unclipped ratio, larger than 1 + epsilon_high (INTELLECT-2, arXiv
            2505.07291). None means no bound.
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


# loss_type: (TermInputs, options, **term_options) -> per-token loss (B, T), metrics
TERMS: dict[str, Callable[..., tuple[Tensor, dict[str, Tensor]]]] = {
    "grpo": clipped,
    "dapo": clipped,
    "dr_grpo": clipped,
}


def kl_term(logps: Tensor, ref_logps: Tensor | None, estimator: str) -> Tensor:
    """Estimate KL(pi || pi_ref) of each token's distribution from the sampled token: (B, T) nats.

                                              value                    expected gradient is that of
        k1   log pi - log pi_ref              unbiased                 0
        k2   (log pi - log pi_ref)^2 / 2      biased                   KL(pi || pi_ref)
        k3   pi_ref/pi - log(pi_ref/pi) - 1   unbiased, not negative   KL(pi_ref || pi)
        k1+, k2+, k3+                         as without the plus      KL(pi || pi_ref), as k2

    The table holds for sums over tokens and without correct_kl. By default correct_kl is on and
    gives k1 and k3 the gradient of KL(pi || pi_ref), too. All these gradients hold the prefix
    fixed. The KL of whole completions also depends on how a token changes the tokens after it;
    only a KL in the reward has that gradient (docs/bias.md).

    Recipes choose k1, k2 or k3 with grpo.kl_estimator; the names with a plus are for callers of
    grpo_loss. To add an estimator, write a branch here, add its name to GRPOOptions.kl_estimator
    (config/options.py), and let correct_kl decide whether its gradient flows through the ratio.

    Source: Schulman, "Approximating KL divergence" (2020) for the values; arXiv 2506.09477 for the
        gradients; verl's straight-through estimators for the names with a plus.
    """
    if ref_logps is None:
        raise ValueError(
            "The KL term needs ref_per_token_logps if beta is not 0; give it, or set beta to 0"
        )
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
    raise ValueError(f"kl_estimator is {estimator!r}, it must be one of k1, k2, k3, k1+, k2+, k3+")


def correct_kl(kl: Tensor, ratio: Tensor, options: LossOptions) -> Tensor:
    """Multiply the KL estimate by the ratio, so that its expected gradient is KL(pi || pi_ref)'s.

    The correction also holds off-policy. For k1 and k3 the missing gradient flows through the
    ratio. For k2 and the names with a plus the ratio is detached, because their gradient is already
    right: here the ratio only reweights tokens that an older policy sampled.
    """
    if not options.use_bias_correction_kl:
        return kl
    if options.kl_estimator == "k2" or options.kl_estimator.endswith("+"):
        return kl * ratio.detach()
    return kl * ratio


# loss_type: (per-token terms (B, T), 0 outside the mask; mask; LossNormalizer) -> scalar
AVERAGES: dict[str, Callable[[Tensor, Tensor, LossNormalizer], Tensor]] = {
    # mean over the tokens of each row, then mean over rows
    "grpo": lambda terms, mask, normalizer: (
        (terms.sum(-1) / mask.sum(-1).clamp(min=1)).sum() / normalizer.sequences
    ),
    # mean over all tokens of the step, so that all tokens have the same weight
    "dapo": lambda terms, mask, normalizer: terms.sum() / normalizer.tokens,
    # no length bias, because the divisor does not depend on the lengths of the completions
    "dr_grpo": lambda terms, mask, normalizer: (
        terms.sum() / (normalizer.sequences * max_length(normalizer))
    ),
}


def max_length(normalizer: LossNormalizer) -> int:
    """Return the constant length by which dr_grpo divides; raise ValueError if it is None."""
    if normalizer.max_completion_length is None:
        raise ValueError(
            "loss_type dr_grpo divides by normalizer.max_completion_length, which is None; set it"
        )
    return normalizer.max_completion_length


def batch_normalizer(mask: Tensor) -> LossNormalizer:
    """Return the LossNormalizer of a batch that is a whole optimizer step."""
    return LossNormalizer(len(mask), mask.sum().clamp(min=1))


def row_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Average each row over the tokens whose mask is 1: (B, T) -> (B, 1)."""
    return (x * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def mean_metric(x: Tensor, mask: Tensor) -> Tensor:
    """Average a per-token metric (B, T) over the mask, or a per-row metric (B, 1) over the rows."""
    if x.dtype == torch.bool:
        x = x.double()  # float64, so that shares of micro-batches add up exactly
    if x.shape[1] == 1:
        return x.mean()
    return (x * mask).sum() / mask.sum().clamp(min=1)


def check_known(option: str, name: str, table: dict[str, Callable]):
    """Raise ValueError if the value `name` of an option is not a key of its table."""
    if name not in table:
        raise ValueError(f"{option} is {name!r}, it must be one of {', '.join(table)}")
