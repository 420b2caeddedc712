"""The GRPO loss as a pure function that takes log-probabilities.

grpo.py imports only torch, so you can copy the file into your own project.

B is the number of completions, and T is the longest completion's length; shorter completions are padded on the right.
The loss is computed in four steps. For three of the steps, the value of an option selects a function from a table:

    ratio      r_t = pi(o_t) / pi_old(o_t), per token or per completion       RATIOS
    term       -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)                TERMS
    KL         + beta * KL(pi || pi_ref), estimated from the sampled tokens   kl_term
    average    over tokens and rows                                           AVERAGES

GRPO, DAPO and Dr. GRPO differ only in the average. Every average divides by the number of tokens or completions in the
whole optimizer step, so the gradients of the micro-batches add up to the step's gradient. The file grpo_variants.py
adds RLOO, CISPO, SAPO and other losses.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# names in AVERAGES; grpo_variants.py adds those after dr_grpo
LossType = Literal["grpo", "dapo", "dr_grpo", "bnpo", "luspo", "rloo", "cispo", "sapo", "vespo"]


@dataclass
class LossNormalizer:
    """Numbers of completions and tokens in a whole optimizer step; losses are divided by one of them."""

    sequences: float  # completion count in the optimizer step
    # number of tokens with mask 1 in the optimizer step, which TRL calls num_items_in_batch
    tokens: float | Tensor
    max_completion_length: int | None = None  # constant divisor in Dr. GRPO


def grpo_loss(
    per_token_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    loss_type: LossType = "dapo",
    importance_sampling_level: Literal["token", "sequence", "sequence_token"] = "token",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
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

    Example: one completion of 2 tokens with ratio 1 and advantage 0.5, and beta 0:
        grpo, dapo    -(0.5 + 0.5) / 2 = -0.5
        dr_grpo       -(0.5 + 0.5) / 4 = -0.25       with max_completion_length 4

    Args:
        per_token_logps: (B, T) float, log-probabilities in nats under the trained policy, with gradient.
        advantages: (B,), one advantage for each completion, or (B, T), one for each token.
        mask: (B, T), 1 for tokens that are trained on. A row of zeros still counts as a sequence.
        loss_type: selects the term and the average; see TERMS and AVERAGES.
        importance_sampling_level: selects the ratio (see RATIOS); "sequence" is GSPO.
        epsilon_low, epsilon_high: the ratio is clipped to [1 - epsilon_low, 1 + epsilon_high].
        beta: KL weight, at least 0.
        kl_estimator: estimator of the KL, see kl_term.
        use_bias_correction_kl: if True, multiply the KL by the ratio; see correct_kl.
        old_per_token_logps: (B, T), log-probabilities under the policy that sampled the completions. None means that
            the trained policy itself sampled them, so the ratio is 1.
        ref_per_token_logps: (B, T), log-probabilities under the reference model; required if beta is not 0.
        token_weights: (B, T) or (B, 1), factors that multiply the policy term (but not the KL), for example a mask of
            high-entropy tokens, or importance ratios that correct for the sampler. None means 1.
        normalizer: totals over the whole optimizer step. None means that this batch is the whole step.
        term_options: options of the term for loss_type, such as delta.
    Returns:
        The loss, which is a scalar, and a dictionary of metrics without gradient: `kl` in nats per token, and the
        term's metrics, such as clip_ratio/low_mean.
    Raises:
        ValueError: an option has an unknown or impossible value, or a needed tensor is missing.
    Source: DeepSeekMath eq. 3 (arXiv 2402.03300), DAPO (2503.14476), Dr. GRPO (2503.20783), GSPO (2507.18071); equals
        GRPOTrainer._compute_loss in TRL 1.16 in value and gradient. The defaults are also TRL's.
    """
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
        advantages = advantages[:, None]  # (B, 1), because all tokens of a row have the same one
    if old_per_token_logps is None:
        old_per_token_logps = per_token_logps.detach()
    log_ratio = per_token_logps - old_per_token_logps  # (B, T): each token's log-ratio
    ratio = importance_ratio(log_ratio, mask, importance_sampling_level)
    kl = None
    if beta:  # before the term, so that autograd adds gradients in the same order as in TRL
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
    """Compute the ratio pi / pi_old for each token, (B, T), or for each completion, (B, 1).

    Args:
        log_ratio: (B, T), each token's log pi - log pi_old, in nats.
        level: key in RATIOS, for example "token" or "sequence".
    """
    check_known("importance_sampling_level", level, RATIOS)
    return RATIOS[level](log_ratio, mask)


# functions (log_ratio, mask) that return the ratio pi / pi_old, (B, T) or (B, 1)
RATIOS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    # r_t = pi(o_t) / pi_old(o_t)
    "token": lambda log_ratio, mask: log_ratio.exp(),
    # geometric mean of a completion's n token ratios, (r_1 r_2 ... r_n)^(1/n); GSPO eq. 7
    "sequence": lambda log_ratio, mask: row_mean(log_ratio, mask).exp(),
}


@dataclass
class TermInputs:
    """Tensors and clipping bounds from which each token's policy loss is computed."""

    logps: Tensor  # (B, T) log-probabilities in nats, with gradient
    log_ratio: Tensor  # (B, T) each token's log pi - log pi_old, for any importance_sampling_level
    ratio: Tensor  # ratio pi / pi_old, (B, T) or (B, 1), depending on importance_sampling_level
    advantages: Tensor  # (B, 1), one advantage for each completion, or (B, T), one for each token
    mask: Tensor  # (B, T), 1 for tokens that are trained on
    epsilon_low: float
    epsilon_high: float


def clipped(inputs: TermInputs, *, delta: float | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute PPO's clipped term (eq. 7): -min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A).

    Args:
        delta: upper bound on the unclipped ratio, which must be greater than 1 + epsilon_high (INTELLECT-2, arXiv
            2505.07291). None disables the bound.
    """
    ratio, advantages = inputs.ratio, inputs.advantages
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


# Functions that compute each token's policy loss, (B, T), and a dictionary of metrics. Their options, such as delta,
# are keyword arguments of grpo_loss.
TERMS: dict[str, Callable[..., tuple[Tensor, dict[str, Tensor]]]] = {
    "grpo": clipped,
    "dapo": clipped,
    "dr_grpo": clipped,
}


def kl_term(logps: Tensor, ref_logps: Tensor | None, estimator: str) -> Tensor:
    """Estimate KL(pi || pi_ref) at each position from the sampled token: (B, T), in nats.

        estimator                             value                    expected gradient without bias correction
        k1   log pi - log pi_ref              unbiased                 0
        k2   (log pi - log pi_ref)^2 / 2      biased                   that of KL(pi || pi_ref)
        k3   pi_ref/pi - log(pi_ref/pi) - 1   unbiased, not negative   that of KL(pi_ref || pi)
        k1+, k2+, k3+                         same as without a plus   that of KL(pi || pi_ref)

    With use_bias_correction_kl=True, the default, all KL estimators have the gradient of KL(pi || pi_ref).

    Recipes select the estimator k1, k2 or k3 with grpo.kl_estimator; only callers of grpo_loss can select k1+, k2+ or
    k3+.

    Source: k1, k2 and k3 in Schulman, "Approximating KL divergence" (2020); their gradients in arXiv 2506.09477; k1+,
        k2+ and k3+ in verl.
    """
    if ref_logps is None:
        raise ValueError("beta is not 0, so grpo_loss needs ref_per_token_logps")
    d = ref_logps - logps
    kl = KL_ESTIMATORS[estimator.removesuffix("+")](d)
    if estimator.endswith("+"):
        k2 = KL_ESTIMATORS["k2"](d)
        kl = kl.detach() + k2 - k2.detach()
    return kl


# KL estimators as functions of the log-ratio d = log pi_ref - log pi
KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: -d,
    "k2": lambda d: 0.5 * d.square(),
    # expm1(d) is accurate for small d, for which d.exp() - 1 would be rounded to 0
    "k3": lambda d: d.expm1() - d,
}


def correct_kl(kl: Tensor, ratio: Tensor, kl_estimator: str) -> Tensor:
    """Multiply a KL estimate by the ratio pi / pi_old. The expected gradient is then that of KL(pi || pi_ref).

    The ratio pi / pi_old also corrects the KL estimate if an older policy sampled the tokens.
    """
    # k2 and the estimators with a plus already have the gradient of KL(pi || pi_ref), so the ratio adds no gradient.
    if kl_estimator == "k2" or kl_estimator.endswith("+"):
        return kl * ratio.detach()
    return kl * ratio


# Functions that average token losses (B, T) to a scalar. A token loss is 0 where the mask is 0.
AVERAGES: dict[str, Callable[[Tensor, Tensor, LossNormalizer], Tensor]] = {
    # mean over each completion's tokens, then over the optimizer step's completions
    "grpo": lambda terms, mask, normalizer: (terms.sum(-1) / mask.sum(-1).clamp(min=1)).sum() / normalizer.sequences,
    # mean over all tokens in the optimizer step, which gives all tokens the same weight
    "dapo": lambda terms, mask, normalizer: terms.sum() / normalizer.tokens,
    # Dr. GRPO divides by a constant instead of by completion lengths, so the loss has no length bias.
    "dr_grpo": lambda terms, mask, normalizer: terms.sum() / (normalizer.sequences * max_length(normalizer)),
}


def max_length(normalizer: LossNormalizer) -> int:
    if normalizer.max_completion_length is None:
        raise ValueError("loss_type dr_grpo needs a normalizer with max_completion_length")
    return normalizer.max_completion_length


def batch_normalizer(mask: Tensor) -> LossNormalizer:
    """Return the LossNormalizer of an optimizer step that consists of one batch."""
    return LossNormalizer(len(mask), mask.sum().clamp(min=1))


def row_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Average each row over the tokens whose mask is 1: (B, T) -> (B, 1)."""
    return (x * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def mean_metric(x: Tensor, mask: Tensor) -> Tensor:
    """Average a metric over the tokens whose mask is 1, or over the completions if its shape is (B, 1)."""
    if x.dtype == torch.bool:
        x = x.double()  # float64, so that the fractions from several micro-batches add up exactly
    if x.shape[1] == 1:
        return x.mean()
    return (x * mask).sum() / mask.sum().clamp(min=1)


def check_bounds(epsilon_low: float, epsilon_high: float, beta: float):
    """Raise ValueError if epsilon_low, epsilon_high or beta is out of range."""
    if not 0 <= epsilon_low <= epsilon_high:  # also rejects NaN
        raise ValueError(
            f"epsilon_low is {epsilon_low}, but it must be between 0 and epsilon_high, which is {epsilon_high}"
        )
    if not 0 <= beta < float("inf"):
        raise ValueError(f"beta is {beta}, but it must be at least 0 and finite")


def check_known(option: str, name: str, known_names: Collection[str]):
    """Raise ValueError if an option's value is not one of the known names."""
    if name not in known_names:
        raise ValueError(f"{option} is {name!r}, but it must be one of {', '.join(known_names)}")
