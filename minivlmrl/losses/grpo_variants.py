"""Variants of the GRPO loss: GSPO-token, RLOO, CISPO, SAPO, VESPO, LUSPO and BNPO.

They are entries of the tables RATIOS, TERMS and AVERAGES of grpo.py. The file also computes token
weights (for off-policy rows, high-entropy tokens and the sampler's mismatch) and an entropy bonus.
To use it in your own project, copy grpo.py too.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from minivlmrl.losses.grpo import (
    AVERAGES,
    RATIOS,
    TERMS,
    LossNormalizer,
    LossOptions,
    TermInputs,
    clipped,
    row_mean,
)

CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
CORRECTION_MODES = get_args(CorrectionMode)


RATIOS |= {
    # same value as "sequence", but the gradient flows through each token's own log-probability:
    # GSPO-token, arXiv 2507.18071 eq. 14
    "sequence_token": lambda log_ratio, mask: (
        row_mean(log_ratio, mask).detach() + log_ratio - log_ratio.detach()
    ).exp(),
    # prod_t r_t, the ratio of the whole completion: RLOO, arXiv 2402.14740
    "sequence_sum": lambda log_ratio, mask: (log_ratio * mask).sum(-1, keepdim=True).exp(),
}


def rloo_term(
    inputs: TermInputs, options: LossOptions, *, delta: float | None = None
) -> tuple[Tensor, dict]:
    """Compute RLOO's term: the clipped term with the ratio of the whole completion.

    importance_sampling_level is ignored.
    """
    inputs.ratio = RATIOS["sequence_sum"](inputs.log_ratio, inputs.mask)
    return clipped(inputs, options, delta=delta)


def cispo_term(inputs: TermInputs, options: LossOptions) -> tuple[Tensor, dict]:
    """Compute CISPO's term: -sg(min(r, epsilon_high)) A log pi, where sg is detach.

    In contrast to PPO's clip, all tokens keep a gradient. Source: MiniMax-M1 eq. 4 (2506.13585).
    """
    ratio, advantages = inputs.ratio, inputs.advantages
    weight = ratio.clamp(max=options.epsilon_high).detach()
    is_clipped = (ratio > options.epsilon_high) & (advantages > 0)
    return -weight * advantages * inputs.logps, {"cispo_clip_ratio": is_clipped}


def sapo_term(
    inputs: TermInputs,
    options: LossOptions,
    *,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
) -> tuple[Tensor, dict]:
    """Compute SAPO's term: -(4 / tau) sigmoid(tau (r - 1)) A, a soft gate instead of a clip.

    tau is sapo_temperature_pos where the advantage is positive, otherwise sapo_temperature_neg.
    Source: SAPO eq. 5 and 6 (2511.20347).
    """
    ratio, advantages = inputs.ratio, inputs.advantages
    tau = torch.where(advantages > 0, sapo_temperature_pos, sapo_temperature_neg)
    return -(torch.sigmoid(tau * (ratio - 1)) * 4 / tau) * advantages, {}


def vespo_term(
    inputs: TermInputs,
    options: LossOptions,
    *,
    importance_sampling_ratio: Tensor | None = None,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
) -> tuple[Tensor, dict]:
    """Compute VESPO's term: -sg(phi(W)) A log pi with phi(W) = W^k exp(lambda (1 - W)).

    W is the importance weight of a whole row, and sg is detach. k and lambda are the options
    ..._neg where the advantage is negative, otherwise ..._pos.

    Args:
        importance_sampling_ratio: (B, T) or (B, 1), correction of the sampler's mismatch. It is a
            factor of W, whereas the other losses multiply the term by it.
    Source: VESPO (arXiv 2602.10693).
    """
    advantages = inputs.advantages
    log_weight = vespo_log_weight(inputs.log_ratio.detach(), importance_sampling_ratio, inputs.mask)
    k = torch.where(advantages >= 0, vespo_k_pos, vespo_k_neg)
    lam = torch.where(advantages >= 0, vespo_lambda_pos, vespo_lambda_neg).clamp(min=1e-4)
    phi = (lam + k * log_weight - lam * log_weight.exp()).exp().nan_to_num(0.0, 0.0, 0.0)
    return -phi * advantages * inputs.logps, {"vespo/phi_seq_mean": phi}


def vespo_log_weight(
    log_ratio: Tensor, importance_sampling_ratio: Tensor | None, mask: Tensor
) -> Tensor:
    """Compute log W (B, 1) of VESPO: sum the log-ratios (B, T) over the tokens of each row.

    The logarithms of importance_sampling_ratio, (B, T) or (B, 1), are added unless it is None.
    """
    lowest = math.log(1e-8)
    highest = 20.0
    total = (log_ratio.clamp(-highest, highest) * mask).sum(-1, keepdim=True)
    if importance_sampling_ratio is not None:
        total = total + importance_sampling_ratio.log().clamp(lowest, highest).sum(-1, keepdim=True)
    return total.clamp(lowest, highest)


TERMS |= {
    "bnpo": clipped,
    "luspo": clipped,
    "rloo": rloo_term,
    "cispo": cispo_term,
    "sapo": sapo_term,
    "vespo": vespo_term,
}
AVERAGES |= {
    # mean over the tokens of this micro-batch, weighted by its share of the rows of the step. As in
    # TRL, the gradient depends on how the step is split into micro-batches.
    "bnpo": lambda terms, mask, normalizer: (
        terms.sum() / mask.sum().clamp(min=1) * (len(mask) / normalizer.sequences)
    ),
    # sum over the tokens of each row, so that a long row has more weight (arXiv 2602.05261)
    "luspo": lambda terms, mask, normalizer: terms.sum() / normalizer.sequences,
    "rloo": AVERAGES["grpo"],
    "cispo": AVERAGES["dapo"],
    "sapo": AVERAGES["grpo"],
    "vespo": AVERAGES["dapo"],
}


# ------------------------------------------------------------- token weights and an entropy bonus


def kept_tokens(
    entropies: Tensor | None, mask: Tensor, quantile: float, threshold: float | Tensor | None = None
) -> Tensor:
    """Compute a mask (B, T) that keeps only the tokens with the highest entropies.

    Args:
        entropies: (B, T) nats; needed if quantile is below 1.
        quantile: share of the tokens to keep; 1 keeps all tokens.
        threshold: smallest entropy to keep; by default computed from this batch with `quantile`.
    Source: arXiv 2506.01939; TRL's top_entropy_quantile.
    """
    if quantile == 1:
        return mask
    if entropies is None:
        raise ValueError("A top_entropy_quantile below 1 needs the argument entropies; give it")
    if threshold is None:
        threshold = top_entropy_threshold(entropies[mask.bool()], quantile)
    return mask * (entropies >= threshold)


def top_entropy_threshold(entropies: Tensor, quantile: float) -> Tensor:
    """Compute the entropy that a share `quantile` of the tokens (n,) reach; inf without tokens."""
    entropies = entropies.detach().float()
    if not len(entropies):
        return entropies.new_tensor(math.inf)
    return torch.quantile(entropies, 1 - quantile)


def mean_entropy(
    entropies: Tensor,
    kept: Tensor,
    normalizer: LossNormalizer,
    num_tokens: float | Tensor | None = None,
) -> Tensor:
    """Compute the mean entropy of the kept tokens, the entropy bonus of the loss.

    The caller subtracts it, times entropy_coef, from the loss, so that the entropy grows.

    Args:
        entropies, kept: (B, T), nats, and 1 for tokens that are averaged.
        num_tokens: number of kept tokens of the whole step. None uses the number of this batch,
            divided by its share of the rows of the step, as TRL does.
    """
    if num_tokens is None:
        num_tokens = kept.sum().clamp(min=1) * normalizer.sequences / len(kept)
    return (entropies * kept).sum() / num_tokens


def off_policy_mask(
    per_token_logps: Tensor,
    sampling_per_token_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    threshold: float,
) -> Tensor:
    """Mask out rows with a negative advantage on which the policy moved far from the sampler.

    Args:
        sampling_per_token_logps: (B, T), log-probabilities recorded by the sampler, NaN where there
            are none.
        threshold: largest allowed mean of log pi_sampler - log pi over a row, in nats per token.
    Returns:
        (B, 1) bool, or (B, T) for advantages (B, T); True where the loss keeps the token.
    Source: DeepSeek-V3.2 (arXiv 2512.02556); TRL's off_policy_mask_threshold.
    """
    if advantages.dim() == 1:
        advantages = advantages[:, None]
    drift = (sampling_per_token_logps - per_token_logps.detach()).nan_to_num(0.0)
    is_near = row_mean(drift, mask) <= threshold  # (B, 1)
    return (advantages >= 0) | is_near


def rollout_importance_ratio(
    old_per_token_logps: Tensor,
    sampling_per_token_logps: Tensor,
    mask: Tensor,
    mode: str = "sequence_mask",
    clip_max: float | None = 3.0,
    clip_min: float | None = None,
) -> Tensor:
    """Compute the ratio of the trainer's to the sampler's probabilities, as a loss weight.

    The ratio corrects for a sampler (such as vLLM) that computes slightly different probabilities;
    it is 1 where both agree.

    Args:
        old_per_token_logps: (B, T), log-probabilities that the trainer computed, in nats.
        sampling_per_token_logps: (B, T), log-probabilities recorded by the sampler; NaN where there
            are none, which gives the ratio 1.
        mode: "token_..." computes one ratio for each token, "sequence_..." their product over the
            row. "..._truncate" clips ratios to [clip_min, clip_max]; "..._mask" sets ratios outside
            of that range to 0.
    Returns:
        (B, T), or (B, 1) for "sequence_...".
    Source: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training"
        (2025); TRL's vllm_importance_sampling_mode.
    """
    if mode not in CORRECTION_MODES:
        raise ValueError(f"mode is {mode!r}, it must be one of {', '.join(CORRECTION_MODES)}")
    log_ratio = ((old_per_token_logps - sampling_per_token_logps) * mask).nan_to_num(0.0)
    if mode.startswith("sequence"):
        log_ratio = log_ratio.sum(-1, keepdim=True)  # (B, 1)
    ratio = log_ratio.exp()
    low = clip_min or 0.0
    high = math.inf if clip_max is None else clip_max
    if mode.endswith("truncate"):
        return ratio.clamp(low, high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)
