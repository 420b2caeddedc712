"""GRPO loss as a pure function of log-probabilities.

grpo.py imports only torch, so you can copy it into your own project.

B completions are right-padded to T tokens. The loss is computed in four steps:

    RATIOS: ratio r_t = pi(o_t) / pi_old(o_t), per token or per completion.
    TERMS: policy term -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A).
    kl_term: add beta * KL(pi || pi_ref), estimated from the sampled tokens.
    AVERAGES: average these terms over tokens and completions.

The losses grpo, dapo and dr_grpo differ only in the average. Averages divide by tokens or completions in the whole
optimizer step, so that micro-batch gradients can be summed. RLOO, CISPO, SAPO and others are in grpo_variants.py.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass
class LossNormalizer:
    """Loss denominators: completions and tokens in a whole optimizer step."""

    sequences: float
    # number of tokens to train on; TRL calls it num_items_in_batch
    tokens: float | Tensor
    max_completion_length: int | None = None  # maximum tokens per completion, for loss_type dr_grpo


def grpo_loss(
    per_token_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    loss_type: str = "dapo",
    importance_sampling_level: Literal["token", "sequence", "sequence_token"] = "token",
    epsilon_low: float = 0.2,
    epsilon_high: float | None = None,
    beta: float = 0.0,
    kl_estimator: Literal["k1", "k2", "k3", "k1+", "k2+", "k3+"] = "k3",
    use_bias_correction_kl: bool = True,
    old_per_token_logps: Tensor | None = None,
    ref_per_token_logps: Tensor | None = None,
    token_weights: Tensor | None = None,
    normalizer: LossNormalizer | None = None,
    **term_options,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the policy-gradient loss for a batch of completions.

    Example: one completion with 2 tokens, ratio 1, advantage 0.5, beta 0:
        grpo, dapo    -(0.5 + 0.5) / 2 = -0.5
        dr_grpo       -(0.5 + 0.5) / 4 = -0.25       with max_completion_length 4

    Args:
        per_token_logps: (B, T) float, policy log-probabilities in nats, with gradient.
        advantages: (B,) or per token (B, T).
        mask: (B, T), 1 for tokens to train on. Completions with mask 0 everywhere count in means over completions.
        loss_type: key in TERMS and AVERAGES; minimal.py, whose other defaults are equal, averages as "grpo".
        importance_sampling_level: key in RATIOS; "sequence" is GSPO.
        epsilon_low, epsilon_high: clip the ratio to [1 - epsilon_low, 1 + epsilon_high]. None = 0.2, except for cispo,
            where epsilon_high itself is the bound, and is required.
        beta: KL weight, at least 0.
        kl_estimator: see kl_term.
        use_bias_correction_kl: whether to multiply the KL by the ratio; see correct_kl.
        old_per_token_logps: (B, T) log-probabilities at sampling time, None = policy unchanged since (ratio 1).
        ref_per_token_logps: (B, T) reference log-probabilities, required if beta is not 0.
        token_weights: (B, T) or (B, 1) factors for the policy term but not the KL, such as a mask for high-entropy
            tokens, or importance ratios that correct for the sampler. None = all 1.
        normalizer: totals for the optimizer step, None = count this batch.
        term_options: more arguments for the loss term TERMS[loss_type], such as delta.
    Returns:
        Scalar loss, and detached metrics: `kl` in nats per token, and metrics from TERMS, such as clip_ratio/low_mean.
    Raises:
        ValueError: unknown or invalid option value, or missing tensor.
    Source: DeepSeekMath eq. 3 (arXiv 2402.03300), DAPO (2503.14476), Dr.GRPO (2503.20783), GSPO (2507.18071); equals
        GRPOTrainer._compute_loss in TRL 1.16 in value, gradient and defaults.
    """
    if epsilon_high is None and loss_type == "cispo":
        raise ValueError("loss_type cispo needs epsilon_high, the largest weight of a token; pass 5.0, as in ScaleRL")
    epsilon_high = 0.2 if epsilon_high is None else epsilon_high
    check_bounds(epsilon_low, epsilon_high, beta)
    check_known("loss_type", loss_type, AVERAGES)
    known = TERMS[loss_type].__kwdefaults__ or {}
    for name in term_options.keys() - known.keys():
        hint = "; epsilon is epsilon_low and epsilon_high" if name == "epsilon" else ""
        raise TypeError(f"grpo_loss has no option {name!r} if loss_type is {loss_type!r}{hint}")
    if len(advantages) != len(mask):
        raise ValueError(
            f"grpo_loss got {len(advantages)} advantages for {len(mask)} completions; pass one "
            "advantage for each completion"
        )
    normalizer = normalizer or batch_normalizer(mask)
    if advantages.dim() == 1:
        advantages = advantages[:, None]  # (B, 1)
    # mask out padding tokens before exp, which could overflow there
    is_padding = mask == 0
    per_token_logps = per_token_logps.masked_fill(is_padding, 0.0)
    if ref_per_token_logps is not None:
        ref_per_token_logps = ref_per_token_logps.masked_fill(is_padding, 0.0)
    if old_per_token_logps is None:
        old_per_token_logps = per_token_logps.detach()
    log_ratio = (per_token_logps - old_per_token_logps).masked_fill(is_padding, 0.0)  # (B, T)
    ratio = importance_ratio(log_ratio, mask, importance_sampling_level)
    kl = None
    if beta:  # compute the KL first, as in TRL, so that autograd sums gradients in the same order
        kl = kl_term(per_token_logps, ref_per_token_logps, kl_estimator)
        if use_bias_correction_kl:
            kl = correct_kl(kl, ratio, kl_estimator)
    inputs = TermInputs(per_token_logps, log_ratio, ratio, advantages, mask, epsilon_low, epsilon_high)
    per_token_loss, metrics = TERMS[loss_type](inputs, **term_options)
    if token_weights is not None:
        per_token_loss = per_token_loss * token_weights
    if kl is not None:
        metrics["kl"] = kl
        per_token_loss = per_token_loss + beta * kl
    loss = AVERAGES[loss_type](per_token_loss * mask, mask, normalizer)
    return loss, {name: mean_metric(value.detach(), mask) for name, value in metrics.items()}


def importance_ratio(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """Compute pi / pi_old per token (B, T) or per completion (B, 1).

    Args:
        log_ratio: (B, T), log pi - log pi_old, in nats.
        level: "token", "sequence" or another key in RATIOS.
    """
    check_known("importance_sampling_level", level, RATIOS)
    return RATIOS[level](log_ratio, mask)


# functions (log_ratio, mask) -> pi / pi_old (B, T) or (B, 1)
RATIOS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda log_ratio, mask: log_ratio.exp(),
    # geometric mean over a completion, (r_1 r_2 ... r_n)^(1/n); GSPO eq. 7
    "sequence": lambda log_ratio, mask: row_mean(log_ratio, mask).exp(),
}


@dataclass
class TermInputs:
    """Inputs for the functions in TERMS."""

    logps: Tensor  # (B, T) policy log-probabilities
    log_ratio: Tensor  # (B, T) log pi - log pi_old, always per token
    ratio: Tensor  # pi / pi_old, (B, T) or (B, 1), depending on importance_sampling_level
    advantages: Tensor  # (B, 1) per completion, or (B, T) per token
    mask: Tensor  # (B, T)
    epsilon_low: float
    epsilon_high: float


def clipped(inputs: TermInputs, *, delta: float | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute PPO's clipped term (eq. 7): -min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A).

    Args:
        delta: upper bound on the unclipped ratio, usually above 1 + epsilon_high (INTELLECT-2, arXiv 2505.07291).
    """
    ratio = inputs.ratio
    advantages = inputs.advantages
    low = 1 - inputs.epsilon_low
    high = 1 + inputs.epsilon_high
    at_low = (ratio < low) & (advantages < 0)
    at_high = (ratio > high) & (advantages > 0)
    metrics = {
        "clip_ratio/low_mean": at_low,
        "clip_ratio/high_mean": at_high,
        "clip_ratio/region_mean": at_low | at_high,
    }
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    return -torch.min(bounded * advantages, ratio.clamp(low, high) * advantages), metrics


# functions (TermInputs, options such as delta) -> (per-token losses (B, T), metrics)
TERMS: dict[str, Callable[..., tuple[Tensor, dict[str, Tensor]]]] = {
    "grpo": clipped,
    "dapo": clipped,
    "dr_grpo": clipped,
}


def kl_term(logps: Tensor, ref_logps: Tensor | None, estimator: str) -> Tensor:
    """Estimate KL(pi || pi_ref) per token from the sampled token: (B, T), in nats.

    The table shows whether an estimator is biased, and its expected gradient without bias correction:

        estimator                             value                    expected gradient
        k1   log pi - log pi_ref              unbiased                 0
        k2   (log pi - log pi_ref)^2 / 2      biased                   gradient of KL(pi || pi_ref)
        k3   pi_ref/pi - log(pi_ref/pi) - 1   unbiased, not negative   gradient of KL(pi_ref || pi)

    The estimators k1+, k2+ and k3+ have the values of k1, k2 and k3, but the gradient of k2.

    With use_bias_correction_kl=True, the default, all estimators have the gradient of KL(pi || pi_ref). The recipe
    option grpo.kl_estimator accepts only k1, k2 and k3.

    Source: k1, k2 and k3 in Schulman, "Approximating KL divergence" (2020); gradients in arXiv 2506.09477; k1+, k2+ and
        k3+ in verl.
    """
    if ref_logps is None:
        raise ValueError("beta is not 0, so grpo_loss needs ref_per_token_logps")
    d = ref_logps - logps
    kl = KL_ESTIMATORS[estimator.removesuffix("+")](d)
    if estimator.endswith("+"):
        k2 = KL_ESTIMATORS["k2"](d)
        kl = kl.detach() + k2 - k2.detach()
    return kl


# KL estimators, functions of d = log pi_ref - log pi
KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: -d,
    "k2": lambda d: 0.5 * d.square(),
    # expm1: d.exp() - 1 would round small d to 0
    "k3": lambda d: d.expm1() - d,
}


def correct_kl(kl: Tensor, ratio: Tensor, kl_estimator: str) -> Tensor:
    """Multiply a KL estimate by pi / pi_old, so that its expected gradient is the gradient of KL(pi || pi_ref).

    The ratio also corrects for tokens sampled by an older policy.
    """
    # no gradient through the ratio: k2, k1+, k2+ and k3+ already have the gradient of KL(pi || pi_ref)
    if kl_estimator == "k2" or kl_estimator.endswith("+"):
        return kl * ratio.detach()
    return kl * ratio


# functions (masked per-token losses (B, T), mask (B, T), normalizer) -> scalar loss
AVERAGES: dict[str, Callable[[Tensor, Tensor, LossNormalizer], Tensor]] = {
    # mean over tokens per completion, then over completions in the step
    "grpo": lambda terms, mask, normalizer: (terms.sum(-1) / mask.sum(-1).clamp(min=1)).sum() / normalizer.sequences,
    # mean over all tokens in the step: all tokens have the same weight
    "dapo": lambda terms, mask, normalizer: terms.sum() / normalizer.tokens,
    # divide by a constant instead of completion lengths, to avoid length bias
    "dr_grpo": lambda terms, mask, normalizer: terms.sum() / (normalizer.sequences * max_length(normalizer)),
}


def max_length(normalizer: LossNormalizer) -> int:
    if normalizer.max_completion_length is None:
        raise ValueError("loss_type dr_grpo needs a normalizer with max_completion_length")
    return normalizer.max_completion_length


def batch_normalizer(mask: Tensor) -> LossNormalizer:
    """Count completions and tokens in one batch."""
    return LossNormalizer(len(mask), mask.sum().clamp(min=1))


def row_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Average each row over tokens with mask 1: (B, T) -> (B, 1)."""
    return (x * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def mean_metric(x: Tensor, mask: Tensor) -> Tensor:
    """Average a metric over tokens with mask 1, or over completions if its shape is (B, 1)."""
    if x.dtype == torch.bool:
        x = x.double()  # float64, for exact sums over micro-batches
    if x.shape[1] == 1:
        return x.mean()
    return (x * mask).sum() / mask.sum().clamp(min=1)


def check_bounds(epsilon_low: float, epsilon_high: float, beta: float):
    """Raise ValueError if epsilon or beta is out of range."""
    if not 0 <= epsilon_low <= epsilon_high:  # also rejects NaN, because comparisons with NaN are False
        raise ValueError(
            f"epsilon_low is {epsilon_low}, but it must be between 0 and epsilon_high, which is {epsilon_high}"
        )
    if not 0 <= beta < float("inf"):
        raise ValueError(f"beta is {beta}, but it must be at least 0 and finite")


def check_known(option: str, name: str, known_names: Collection[str]):
    """Raise ValueError for an unknown option value."""
    if name not in known_names:
        raise ValueError(f"{option} is {name!r}, but it must be one of {', '.join(known_names)}")
