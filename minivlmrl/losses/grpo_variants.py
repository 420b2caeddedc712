"""Variants of the GRPO loss (GSPO-token, RLOO, CISPO, SAPO, VESPO, LUSPO and BNPO).

Importing grpo_variants.py adds the variants to the losses of grpo.py. If you copy grpo_variants.py into your own
project, copy grpo.py too.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from minivlmrl.losses.grpo import AVERAGES, RATIOS, TERMS, LossNormalizer, TermInputs, check_known, clipped, row_mean

CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
CORRECTION_MODES = get_args(CorrectionMode)


RATIOS |= {
    # GSPO-token (arXiv 2507.18071 eq. 14): the value of GSPO's ratio, with a gradient through each token's own
    # log-probability
    "sequence_token": lambda log_ratio, mask: (
        row_mean(log_ratio, mask).detach() + log_ratio - log_ratio.detach()
    ).exp(),
    # RLOO (arXiv 2402.14740) has one ratio for a whole completion, the product of the token ratios.
    "sequence_sum": lambda log_ratio, mask: (log_ratio * mask).sum(-1, keepdim=True).exp(),
}


def rloo_term(inputs: TermInputs, *, delta: float | None = None) -> tuple[Tensor, dict]:
    """Compute PPO's clipped loss with the ratio of the whole completion."""
    inputs.ratio = RATIOS["sequence_sum"](inputs.log_ratio, inputs.mask)
    return clipped(inputs, delta=delta)


def cispo_term(inputs: TermInputs) -> tuple[Tensor, dict]:
    """Compute CISPO's token loss: -min(r, epsilon_high) A log pi, in which the clipped ratio is detached.

    Unlike PPO's clipping, CISPO keeps every token's gradient.

    Source: MiniMax-M1 eq. 4 (arXiv 2506.13585).
    """
    ratio, advantages = inputs.ratio, inputs.advantages
    weight = ratio.clamp(max=inputs.epsilon_high).detach()
    is_clipped = (ratio > inputs.epsilon_high) & (advantages > 0)
    return -weight * advantages * inputs.logps, {"cispo_clip_ratio": is_clipped}


def sapo_term(
    inputs: TermInputs, *, sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05
) -> tuple[Tensor, dict]:
    """Compute SAPO's token loss: -(4 / tau) sigmoid(tau (r - 1)) A, with a soft gate instead of clipping.

    The temperature tau is sapo_temperature_pos for positive advantages A, and sapo_temperature_neg for others.

    Source: SAPO eq. 5 and 6 (arXiv 2511.20347).
    """
    ratio, advantages = inputs.ratio, inputs.advantages
    tau = torch.where(advantages > 0, sapo_temperature_pos, sapo_temperature_neg)
    return -(torch.sigmoid(tau * (ratio - 1)) * 4 / tau) * advantages, {}


def vespo_term(
    inputs: TermInputs,
    *,
    importance_sampling_ratio: Tensor | None = None,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
) -> tuple[Tensor, dict]:
    """Compute VESPO's token loss: -phi(W) A log pi, where phi(W) = W^k exp(lambda (1 - W)) is detached.

    The importance weight W is the product of a completion's token ratios. VESPO's constants k and lambda each have one
    value for negative advantages and one for all others.

    Args:
        importance_sampling_ratio: (B, T) or (B, 1), ratio of the trainer's to the sampler's probabilities. W is
            multiplied by this ratio, whereas the other losses multiply the term by it.
    Source: VESPO (arXiv 2602.10693).
    """
    advantages = inputs.advantages
    log_weight = vespo_log_weight(inputs.log_ratio.detach(), importance_sampling_ratio, inputs.mask)
    k = torch.where(advantages >= 0, vespo_k_pos, vespo_k_neg)
    lam = torch.where(advantages >= 0, vespo_lambda_pos, vespo_lambda_neg).clamp(min=1e-4)
    phi = (lam + k * log_weight - lam * log_weight.exp()).exp().nan_to_num(0.0, 0.0, 0.0)
    return -phi * advantages * inputs.logps, {"vespo/phi_seq_mean": phi}


def vespo_log_weight(log_ratio: Tensor, importance_sampling_ratio: Tensor | None, mask: Tensor) -> Tensor:
    """Compute the log of each completion's importance weight, (B, 1), as a sum over its tokens."""
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
    # As in TRL, BNPO averages over each micro-batch's tokens, so the gradient depends on the size of micro-batches.
    "bnpo": lambda terms, mask, normalizer: terms.sum() / mask.sum().clamp(min=1) * (len(mask) / normalizer.sequences),
    # LUSPO (arXiv 2602.05261): sum over each completion's tokens, then mean over completions, so that a long completion
    # has more weight than a short one
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
        entropies: (B, T), in nats; required if quantile is less than 1.
        mask: (B, T), 1 for tokens that are trained on.
        quantile: fraction of the tokens to keep; 1 keeps all tokens.
        threshold: lowest entropy of a token to keep. None computes it from this batch so that the fraction `quantile`
            of the tokens is kept.
    Source: arXiv 2506.01939; TRL's top_entropy_quantile.
    """
    if quantile == 1:
        return mask
    if entropies is None:
        raise ValueError("a top_entropy_quantile below 1 needs the tokens' entropies")
    if threshold is None:
        threshold = top_entropy_threshold(entropies[mask.bool()], quantile)
    return mask * (entropies >= threshold)


def top_entropy_threshold(entropies: Tensor, quantile: float) -> Tensor:
    """Compute the entropy threshold that keeps a fraction of the tokens: 0.2 keeps the top 20 %.

    Args:
        entropies: (n,), n token entropies. If n is 0, the result is infinity.
    """
    entropies = entropies.detach().float()
    if not len(entropies):
        return entropies.new_tensor(math.inf)
    return torch.quantile(entropies, 1 - quantile)


def mean_entropy(
    entropies: Tensor, kept: Tensor, normalizer: LossNormalizer, num_tokens: float | Tensor | None = None
) -> Tensor:
    """Compute the entropy bonus: the mean of token entropies under a mask.

    Trainers subtract grpo.entropy_coef times the entropy bonus from the loss, so that training increases the entropy.

    Args:
        entropies: (B, T), in nats.
        kept: (B, T), 1 for tokens to average over.
        num_tokens: number of kept tokens in the whole optimizer step. If None, it is estimated as in TRL: this batch's
            number, divided by this batch's share of the step's completions.
    """
    if num_tokens is None:
        num_tokens = kept.sum().clamp(min=1) * normalizer.sequences / len(kept)
    return (entropies * kept).sum() / num_tokens


def off_policy_mask(
    per_token_logps: Tensor, sampling_per_token_logps: Tensor, advantages: Tensor, mask: Tensor, threshold: float
) -> Tensor:
    """Mask out completions with a negative advantage that have become much less likely since they were sampled.

    Args:
        sampling_per_token_logps: (B, T), log-probabilities that the sampler recorded; NaN where it did not record any.
        threshold: largest allowed mean of log pi_sampler - log pi over a completion, in nats per token.
    Returns:
        A (B, 1) boolean tensor, or (B, T) if the advantages have this shape. It is True for tokens that the loss keeps.
    Source: DeepSeek-V3.2 (arXiv 2512.02556); TRL's off_policy_mask_threshold.
    """
    if advantages.dim() == 1:
        advantages = advantages[:, None]
    drift = (sampling_per_token_logps - per_token_logps.detach()).nan_to_num(0.0)
    is_near = row_mean(drift, mask) <= threshold  # (B, 1): one value for each completion
    return (advantages >= 0) | is_near


def rollout_importance_ratio(
    old_per_token_logps: Tensor,
    sampling_per_token_logps: Tensor,
    mask: Tensor,
    mode: str = "sequence_mask",
    clip_max: float | None = 3.0,
    clip_min: float | None = None,
) -> Tensor:
    """Compute the ratio pi_trainer / pi_sampler. With a sampler such as vLLM, the loss is multiplied by this ratio.

    Args:
        old_per_token_logps: (B, T), log-probabilities that the trainer computed, in nats.
        sampling_per_token_logps: (B, T), log-probabilities that the sampler recorded. Where they are NaN, the ratio is
            1.
        mode: "token_..." computes one ratio for each token, and "sequence_..." multiplies the ratios for all tokens in
            a completion. "..._truncate" clips the ratios to the range from clip_min to clip_max, and "..._mask" sets
            ratios outside of this range to 0.
        clip_max: upper bound on the ratio; None disables the bound.
        clip_min: lower bound on the ratio; None disables the bound.
    Returns:
        (B, T) ratios, or (B, 1) if mode is "sequence_...".
    Source: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025); TRL's
        vllm_importance_sampling_mode.
    """
    check_known("mode", mode, CORRECTION_MODES)
    log_ratio = ((old_per_token_logps - sampling_per_token_logps) * mask).nan_to_num(0.0)
    if mode.startswith("sequence"):
        log_ratio = log_ratio.sum(-1, keepdim=True)  # (B, 1): one ratio for each completion
    ratio = log_ratio.exp()
    low = clip_min or 0.0
    high = math.inf if clip_max is None else clip_max
    if mode.endswith("truncate"):
        return ratio.clamp(low, high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)
