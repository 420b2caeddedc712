"""Variants of the GRPO loss: GSPO-token, RLOO, CISPO, SAPO, VESPO, LUSPO and BNPO.

grpo_variants.py imports only torch and grpo.py, and adds the variants to the tables in grpo.py.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from minivlmrl.losses.grpo import AVERAGES, RATIOS, TERMS, LossNormalizer, TermInputs, check_known, clipped, row_mean

CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
CORRECTION_MODES = get_args(CorrectionMode)


RATIOS |= {
    # GSPO-token (arXiv 2507.18071 eq. 14): same value as GSPO's ratio, but per-token gradients
    "sequence_token": lambda log_ratio, mask: (
        row_mean(log_ratio, mask).detach() + log_ratio - log_ratio.detach()
    ).exp(),
    # RLOO (arXiv 2402.14740): product of token ratios in a completion
    "sequence_sum": lambda log_ratio, mask: (log_ratio * mask).sum(-1, keepdim=True).exp(),
}


def rloo_term(inputs: TermInputs, *, delta: float | None = None) -> tuple[Tensor, dict]:
    """Compute PPO's clipped loss with one ratio per completion."""
    inputs.ratio = RATIOS["sequence_sum"](inputs.log_ratio, inputs.mask)
    return clipped(inputs, delta=delta)


def cispo_term(inputs: TermInputs) -> tuple[Tensor, dict]:
    """Compute CISPO's token loss: -min(r, epsilon_high) A log pi, with the clipped ratio detached.

    Clipped tokens keep their gradient, unlike in PPO.

    Source: MiniMax-M1 eq. 4 (arXiv 2506.13585).
    """
    ratio = inputs.ratio
    advantages = inputs.advantages
    weight = ratio.clamp(max=inputs.epsilon_high).detach()
    is_clipped = (ratio > inputs.epsilon_high) & (advantages > 0)
    return -weight * advantages * inputs.logps, {"cispo_clip_ratio": is_clipped}


def sapo_term(
    inputs: TermInputs, *, sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05
) -> tuple[Tensor, dict]:
    """Compute SAPO's token loss: -(4 / tau) sigmoid(tau (r - 1)) A, a soft gate instead of clipping.

    tau is sapo_temperature_pos for A > 0, otherwise sapo_temperature_neg.

    Source: SAPO eq. 5 and 6 (arXiv 2511.20347).
    """
    ratio = inputs.ratio
    advantages = inputs.advantages
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
    """Compute VESPO's token loss: -phi(W) A log pi, with phi(W) = W^k exp(lambda (1 - W)) detached.

    W is the product of token ratios in a completion. Negative advantages use vespo_k_neg and vespo_lambda_neg.

    Args:
        importance_sampling_ratio: trainer probability / sampler probability, (B, T) or (B, 1); multiplied into the
            product W, while other GRPO losses multiply the token loss.
    Source: VESPO (arXiv 2602.10693).
    """
    advantages = inputs.advantages
    log_weight = vespo_log_weight(inputs.log_ratio.detach(), importance_sampling_ratio, inputs.mask)
    k = torch.where(advantages >= 0, vespo_k_pos, vespo_k_neg)
    lam = torch.where(advantages >= 0, vespo_lambda_pos, vespo_lambda_neg).clamp(min=1e-4)
    phi = (lam + k * log_weight - lam * log_weight.exp()).exp().nan_to_num(0.0, 0.0, 0.0)
    return -phi * advantages * inputs.logps, {"vespo/phi_seq_mean": phi}


def vespo_log_weight(log_ratio: Tensor, importance_sampling_ratio: Tensor | None, mask: Tensor) -> Tensor:
    """Compute log W, the sum of log-ratios over a completion: (B, 1)."""
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
    # BNPO as in TRL: mean over tokens in a micro-batch, so the gradient depends on the micro-batch size
    "bnpo": lambda terms, mask, normalizer: terms.sum() / mask.sum().clamp(min=1) * (len(mask) / normalizer.sequences),
    # LUSPO (arXiv 2602.05261): sum over tokens, then mean over completions, so long completions weigh more
    "luspo": lambda terms, mask, normalizer: terms.sum() / normalizer.sequences,
    "rloo": AVERAGES["grpo"],
    "cispo": AVERAGES["dapo"],
    "sapo": AVERAGES["grpo"],
    "vespo": AVERAGES["dapo"],
}


def kept_tokens(
    entropies: Tensor | None, mask: Tensor, quantile: float, threshold: float | Tensor | None = None
) -> Tensor:
    """Return a mask for the tokens with the highest entropies: (B, T).

    Args:
        entropies: (B, T), in nats; required if quantile < 1.
        mask: (B, T), 1 for tokens to train on.
        quantile: fraction of tokens to keep; 1 keeps all.
        threshold: lowest entropy to keep, by default computed from this batch.
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
    """Compute the lowest entropy among the top `quantile` of tokens: 0.2 is the top 20 %.

    Args:
        entropies: (n,) in nats; for n = 0, the result is infinity.
    """
    entropies = entropies.detach().float()
    if not len(entropies):
        return entropies.new_tensor(math.inf)
    return torch.quantile(entropies, 1 - quantile)


def mean_entropy(
    entropies: Tensor, kept: Tensor, normalizer: LossNormalizer, num_tokens: float | Tensor | None = None
) -> Tensor:
    """Compute the entropy bonus, the mean entropy over the `kept` tokens.

    GRPOTrainer subtracts this bonus, times grpo.entropy_coef, from the loss.

    Args:
        entropies: (B, T), in nats.
        kept: (B, T), 1 for tokens to average over.
        num_tokens: number of kept tokens in the optimizer step, by default estimated from this batch, as in TRL.
    """
    if num_tokens is None:
        num_tokens = kept.sum().clamp(min=1) * normalizer.sequences / len(kept)
    return (entropies * kept).sum() / num_tokens


def off_policy_mask(
    per_token_logps: Tensor, sampling_per_token_logps: Tensor, advantages: Tensor, mask: Tensor, threshold: float
) -> Tensor:
    """Mask out completions with negative advantage that have become much less likely since sampling.

    Args:
        sampling_per_token_logps: (B, T) log-probabilities from the sampler, NaN where unknown.
        threshold: maximum of log pi_sampler - log pi, averaged over a completion, in nats per token.
    Returns:
        (B, 1) bool, or (B, T) for advantages per token; True for tokens to keep.
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
    """Compute pi_trainer / pi_sampler, a loss factor that corrects for samplers such as vLLM.

    Args:
        old_per_token_logps: (B, T) log-probabilities from the trainer, in nats.
        sampling_per_token_logps: (B, T) log-probabilities from the sampler; NaN gives ratio 1.
        mode: "token_..." for ratios per token, "sequence_..." for their product over a completion. "..._truncate" clips
            ratios to [clip_min, clip_max]; "..._mask" sets ratios outside this range to 0.
        clip_max, clip_min: bounds on the ratio, None = no bound.
    Returns:
        ratios (B, T), or (B, 1) for modes "sequence_...".
    Source: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025); TRL's
        vllm_importance_sampling_mode.
    """
    check_known("mode", mode, CORRECTION_MODES)
    log_ratio = ((old_per_token_logps - sampling_per_token_logps) * mask).nan_to_num(0.0)
    if mode.startswith("sequence"):
        log_ratio = log_ratio.sum(-1, keepdim=True)  # (B, 1)
    ratio = log_ratio.exp()
    low = clip_min or 0.0
    high = math.inf if clip_max is None else clip_max
    if mode.endswith("truncate"):
        return ratio.clamp(low, high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)
