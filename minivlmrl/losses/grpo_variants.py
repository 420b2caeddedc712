"""The rest of the policy-gradient family, as entries of the tables of grpo.py: copy both files.

More ratios (GSPO-token, RLOO), terms (CISPO, SAPO, VESPO) and averages (LUSPO, BNPO); token weights
for off-policy rows, low-entropy tokens and the sampler's mismatch; and an entropy bonus.
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
    # the value of "sequence", with the gradient of each token's own log-probability: GSPO-token,
    # arXiv 2507.18071 eq. 14
    "sequence_token": lambda log_ratio, mask: (
        row_mean(log_ratio, mask).detach() + log_ratio - log_ratio.detach()
    ).exp(),
    # prod_t r_t, the ratio of whole completions: RLOO, arXiv 2402.14740
    "sequence_sum": lambda log_ratio, mask: (log_ratio * mask).sum(-1, keepdim=True).exp(),
}


def rloo_term(
    inputs: TermInputs, options: LossOptions, *, delta: float | None = None
) -> tuple[Tensor, dict]:
    """Clip the ratio of whole completions, whatever importance_sampling_level is."""
    inputs.ratio = RATIOS["sequence_sum"](inputs.log_ratio, inputs.mask)
    return clipped(inputs, options, delta=delta)


def cispo_term(inputs: TermInputs, options: LossOptions) -> tuple[Tensor, dict]:
    """-sg(min(r, eps_high)) A log pi: all tokens keep a gradient. MiniMax-M1 eq. 4 (2506.13585)."""
    ratio, advantages = inputs.ratio, inputs.advantages
    weight = ratio.clamp(max=options.epsilon_high).detach()
    cut = (ratio > options.epsilon_high) & (advantages > 0)
    return -weight * advantages * inputs.logps, {"cispo_clip_ratio": cut}


def sapo_term(
    inputs: TermInputs,
    options: LossOptions,
    *,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
) -> tuple[Tensor, dict]:
    """-(4 / tau) sigmoid(tau (r - 1)) A: a soft gate, no clip. SAPO eq. 5 and 6 (2511.20347).

    tau is ..._pos where the advantage is over 0, else ..._neg.
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
    """-sg(phi(W)) A log pi, phi(W) = W^k exp(lambda (1 - W)), W of a row. VESPO (2602.10693).

    k and lambda are ..._neg where the advantage is below 0, else ..._pos. The sampler's mismatch,
    importance_sampling_ratio (B, T) or (B, 1), is a factor of W rather than of the term.
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
    """Sum log ratios over tokens, and the sampler's mismatch if there is one: log W, (B, 1)."""
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
    # token mean of this micro-batch, by its share of rows: depends on the split, in TRL too
    "bnpo": lambda terms, mask, normalizer: (
        terms.sum() / mask.sum().clamp(min=1) * (len(mask) / normalizer.sequences)
    ),
    # rows' sums: a long row weighs more (arXiv 2602.05261)
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
    """Keep this upper share of tokens by entropy, (B, T), or those that reach a threshold.

    Source: arXiv 2506.01939; TRL's top_entropy_quantile.
    """
    if quantile == 1:
        return mask
    if entropies is None:
        raise ValueError("top_entropy_quantile below 1 needs entropies")
    if threshold is None:
        threshold = top_entropy_threshold(entropies[mask.bool()], quantile)
    return mask * (entropies >= threshold)


def top_entropy_threshold(entropies: Tensor, quantile: float) -> Tensor:
    """Find the entropy that this upper share of tokens (n,) reaches; infinite for no tokens."""
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
    """Average the entropy over so many kept tokens; None: this batch's, by its share of rows.

    Times entropy_coef it is subtracted from the loss, so that the entropy grows.
    """
    if num_tokens is None:  # as in TRL
        num_tokens = kept.sum().clamp(min=1) * normalizer.sequences / len(kept)
    return (entropies * kept).sum() / num_tokens


def off_policy_mask(
    per_token_logps: Tensor,
    sampling_per_token_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    threshold: float,
) -> Tensor:
    """Leave out rows with A < 0 whose policy drifted from the sampler: (B, 1) or (B, T) bool.

    Args:
        sampling_per_token_logps: (B, T), as the sampler recorded them; NaN where it has none.
        threshold: nats a token that a row may drift.
    Source: DeepSeek-V3.2 (arXiv 2512.02556); TRL's off_policy_mask_threshold.
    """
    if advantages.dim() == 1:
        advantages = advantages[:, None]
    drift = (sampling_per_token_logps - per_token_logps.detach()).nan_to_num(0.0)
    stayed = row_mean(drift, mask) <= threshold  # (B, 1)
    return (advantages >= 0) | stayed


def rollout_importance_ratio(
    old_per_token_logps: Tensor,
    sampling_per_token_logps: Tensor,
    mask: Tensor,
    mode: str = "sequence_mask",
    clip_max: float | None = 3.0,
    clip_min: float | None = None,
) -> Tensor:
    """Compute the ratio of trainer's to sampler's probabilities, (B, T) or (B, 1); 1: they agree.

    Args:
        sampling_per_token_logps: (B, T), as the sampler recorded them; NaN where it has none (ratio
            1).
        mode: "token_..." one ratio a token, "sequence_..." their product for the row;
            "..._truncate" clips it to [clip_min, clip_max], "..._mask" sets it to 0 outside.
    Source: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training"
        (2025); TRL's vllm_importance_sampling_mode.
    """
    if mode not in CORRECTION_MODES:
        raise ValueError(f"mode is {mode!r}; known are {', '.join(CORRECTION_MODES)}")
    log_ratio = ((old_per_token_logps - sampling_per_token_logps) * mask).nan_to_num(0.0)
    if mode.startswith("sequence"):
        log_ratio = log_ratio.sum(-1, keepdim=True)  # (B, 1)
    ratio = log_ratio.exp()
    low = clip_min or 0.0
    high = math.inf if clip_max is None else clip_max
    if mode.endswith("truncate"):
        return ratio.clamp(low, high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)
