"""The rest of the policy-gradient family, pure functions on top of losses.py: copy both.

More terms (a bound on the unclipped ratio, CISPO, SAPO, VESPO) and averages (LUSPO, BNPO), masks of
off-policy rows and of low-entropy tokens, weights for the sampler's mismatch, and an entropy bonus.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import torch
from torch import Tensor

from minivlmrl.losses import grpo
from minivlmrl.losses.grpo import Counts, PolicyLoss

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "rloo", "cispo", "sapo", "vespo"]
CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
CORRECTION_MODES = get_args(CorrectionMode)


@dataclass
class FamilyLoss(PolicyLoss):
    """Options of policy_loss: those of grpo_loss, and these; a recipe sets them in `grpo`."""

    loss_type: LossType = "dapo"  # term and average
    importance_sampling_level: Literal["token", "sequence", "sequence_token"] = "token"  # GSPO
    top_entropy_quantile: Annotated[float, "(0, 1]"] = 1.0  # upper share of entropies that counts
    entropy_coef: float = 0.0  # weight of the mean entropy, which is to grow


def policy_loss(
    per_token_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    options: FamilyLoss | None = None,
    *,
    entropies: Tensor | None = None,
    entropy_threshold: float | Tensor | None = None,
    num_entropy_tokens: float | Tensor | None = None,
    counts: Counts | None = None,
    **term_options,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss of the whole family; with PolicyLoss' own options it equals grpo_loss.

    Args:
        per_token_logps: (B, T) nats, with gradient.
        advantages: (B,) or (B, T).
        mask: (B, T), 1 for tokens that count.
        entropies: (B, T) nats, with gradient; for top_entropy_quantile and entropy_coef.
        entropy_threshold: of the whole step, see kept_tokens; None: this batch's quantile.
        num_entropy_tokens: tokens that the entropy's mean is over; None: see mean_entropy.
        counts: losses.Counts of the whole step; None: this batch is the step.
        term_options: keywords of policy_terms.
    Returns:
        loss; metrics: those of grpo_loss, cispo_clip_ratio, vespo/phi_seq_mean.
    Source: equals GRPOTrainer._compute_loss of TRL 1.16, and for rloo RLOOTrainer's. Entropy mask:
        arXiv 2506.01939; off-policy mask: DeepSeek-V3.2 (2512.02556).
    """
    options = options or FamilyLoss()
    if options.loss_type not in AVERAGES:
        raise ValueError(f"loss_type is {options.loss_type!r}; known are {', '.join(AVERAGES)}")
    counts = counts or grpo.counts_of(mask)
    if entropies is None and (options.entropy_coef or options.top_entropy_quantile < 1):
        raise ValueError("entropy_coef and top_entropy_quantile need entropies")
    kept = kept_tokens(entropies, mask, options.top_entropy_quantile, entropy_threshold)
    per_token_loss, metrics = policy_terms(
        per_token_logps, advantages, mask, options, kept=kept, **term_options
    )
    loss = AVERAGES[options.loss_type](per_token_loss * mask, mask, counts)
    if options.entropy_coef:
        bonus = mean_entropy(entropies, kept, counts, num_entropy_tokens)
        loss = loss - options.entropy_coef * bonus
    return loss, {name: grpo.mean_metric(value.detach(), mask) for name, value in metrics.items()}


def policy_terms(
    per_token_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    options: FamilyLoss,
    *,
    kept: Tensor,
    old_per_token_logps: Tensor | None = None,
    ref_per_token_logps: Tensor | None = None,
    sampling_per_token_logps: Tensor | None = None,
    importance_sampling_ratio: Tensor | None = None,
    delta: float | None = None,
    kl_straight_through: bool = False,
    off_policy_mask_threshold: float | None = None,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute what policy_loss averages, losses of tokens (B, T), and metrics.

    Args:
        kept: (B, T), 1 for tokens whose term counts; the KL counts for all.
        old_per_token_logps: (B, T), of the policy that sampled; None: the present one (ratio 1).
        ref_per_token_logps: (B, T), of the reference; needed with beta.
        sampling_per_token_logps: (B, T), as the sampler recorded them; None: the old ones.
        importance_sampling_ratio: (B, T) or (B, 1), see rollout_importance_ratio.
        delta: upper bound of the unclipped ratio; keep it over 1 + epsilon_high.
        kl_straight_through: the KL estimator's value, with the gradient of k2.
        off_policy_mask_threshold: nats a token; rows with A < 0 whose policy drifted further from
            the sampler do not count.
        sapo_..., vespo_...: tau, k and lambda of sapo_term and vespo_term: ..._neg for advantages
            below 0, ..._pos for those over 0; 0 itself is _neg for sapo and _pos for vespo.
    """
    if advantages.dim() == 1:
        advantages = advantages[:, None]  # (B, 1), else (B, T)
    if old_per_token_logps is None:
        old_per_token_logps = per_token_logps.detach()
    log_ratio = per_token_logps - old_per_token_logps  # (B, T)
    level = options.importance_sampling_level
    if options.loss_type == "rloo":
        level = "sequence_sum"
    ratio = importance_ratio(log_ratio, mask, level)
    if options.loss_type == "cispo":
        per_token_loss, metrics = cispo_term(
            per_token_logps, ratio, advantages, options.epsilon_high
        )
    elif options.loss_type == "sapo":
        temperature = torch.where(advantages > 0, sapo_temperature_pos, sapo_temperature_neg)
        per_token_loss, metrics = sapo_term(ratio, advantages, temperature)
    elif options.loss_type == "vespo":
        log_weight = vespo_log_weight(log_ratio.detach(), importance_sampling_ratio, mask)
        k = torch.where(advantages >= 0, vespo_k_pos, vespo_k_neg)
        lam = torch.where(advantages >= 0, vespo_lambda_pos, vespo_lambda_neg)
        per_token_loss, metrics = vespo_term(per_token_logps, log_weight, advantages, k, lam)
    else:
        per_token_loss, metrics = two_sided(ratio, advantages, options, delta)
    if off_policy_mask_threshold is not None:
        if sampling_per_token_logps is None:
            sampling_per_token_logps = old_per_token_logps
        drift = (sampling_per_token_logps - per_token_logps.detach()).nan_to_num(0.0)
        stayed = grpo.row_mean(drift, mask) <= off_policy_mask_threshold  # (B, 1)
        per_token_loss = per_token_loss * ((advantages >= 0) | stayed)
    per_token_loss = per_token_loss * kept
    if importance_sampling_ratio is not None and options.loss_type != "vespo":
        per_token_loss = per_token_loss * importance_sampling_ratio
    if options.beta:
        kl = family_kl(per_token_logps, ref_per_token_logps, ratio, options, kl_straight_through)
        metrics["kl"] = kl
        per_token_loss = per_token_loss + options.beta * kl
    return per_token_loss, metrics


def kept_tokens(entropies: Tensor | None, mask: Tensor, quantile: float, threshold=None) -> Tensor:
    """Keep this upper share of tokens by entropy, (B, T), or those that reach a threshold."""
    if quantile == 1:
        return mask
    if threshold is None:
        threshold = top_entropy_threshold(entropies[mask.bool()], quantile)
    return mask * (entropies >= threshold)


def importance_ratio(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """Compute losses' ratio, GSPO-token's (arXiv 2507.18071 eq. 14) or RLOO's (2402.14740)."""
    if level == "sequence_token":
        # the value of "sequence", with the gradient of each token's own log-probability
        return (grpo.row_mean(log_ratio, mask).detach() + log_ratio - log_ratio.detach()).exp()
    if level == "sequence_sum":  # prod_t r_t, the ratio of whole completions
        return (log_ratio * mask).sum(-1, keepdim=True).exp()
    return grpo.importance_ratio(log_ratio, mask, level)


def two_sided(
    ratio: Tensor, advantages: Tensor, options: FamilyLoss, delta: float | None = None
) -> tuple[Tensor, dict]:
    """Clip as losses.clipped; delta bounds the unclipped ratio too (INTELLECT-2, 2505.07291)."""
    term, metrics = grpo.clipped(ratio, advantages, options)
    if delta is not None:
        within = ratio.clamp(1 - options.epsilon_low, 1 + options.epsilon_high)
        term = -torch.min(ratio.clamp(max=delta) * advantages, within * advantages)
    return term, metrics


def cispo_term(
    logps: Tensor, ratio: Tensor, advantages: Tensor, epsilon_high: float
) -> tuple[Tensor, dict]:
    """-sg(min(r, eps_high)) A log pi: all tokens keep a gradient. MiniMax-M1 eq. 4 (2506.13585)."""
    weight = ratio.clamp(max=epsilon_high).detach()
    cut = (ratio > epsilon_high) & (advantages > 0)
    return -weight * advantages * logps, {"cispo_clip_ratio": cut}


def sapo_term(ratio: Tensor, advantages: Tensor, tau: Tensor) -> tuple[Tensor, dict]:
    """-(4 / tau) sigmoid(tau (r - 1)) A: a soft gate, no clip. SAPO eq. 5 and 6 (2511.20347)."""
    return -(torch.sigmoid(tau * (ratio - 1)) * 4 / tau) * advantages, {}


def vespo_term(
    logps: Tensor, log_weight: Tensor, advantages: Tensor, k: Tensor, lam: Tensor
) -> tuple[Tensor, dict]:
    """-sg(phi(W)) A log pi, phi(W) = W^k exp(lambda (1 - W)), W of a row. VESPO (2602.10693)."""
    lam = lam.clamp(min=1e-4)
    phi = (lam + k * log_weight - lam * log_weight.exp()).exp().nan_to_num(0.0, 0.0, 0.0)
    return -phi * advantages * logps, {"vespo/phi_seq_mean": phi}


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


def family_kl(
    logps: Tensor, ref_logps: Tensor, ratio: Tensor, options: FamilyLoss, straight_through: bool
) -> Tensor:
    """Correct the KL; with straight_through its value has k2's gradient (as in verl)."""
    kl = grpo.kl_term(logps, ref_logps, options.kl_estimator)
    if not straight_through:
        return grpo.correct_kl(kl, ratio, options)
    k2 = grpo.kl_term(logps, ref_logps, "k2")
    kl = kl.detach() + k2 - k2.detach()
    if options.use_bias_correction_kl:
        kl = kl * ratio.detach()
    return kl


def mean_entropy(entropies: Tensor, kept: Tensor, counts: Counts, num_tokens=None) -> Tensor:
    """Average the entropy over so many kept tokens; None: this batch's, by its share of rows."""
    if num_tokens is None:  # as in TRL
        num_tokens = kept.sum().clamp(min=1) * counts.sequences / len(kept)
    return (entropies * kept).sum() / num_tokens


AVERAGES = grpo.AVERAGES | {
    # rows' sums: a long row weighs more (arXiv 2602.05261)
    "luspo": lambda terms, mask, counts: terms.sum() / counts.sequences,
    # token mean of this micro-batch, by its share of rows: depends on the split, in TRL too
    "bnpo": lambda terms, mask, counts: (
        terms.sum() / mask.sum().clamp(min=1) * (len(mask) / counts.sequences)
    ),
    "sapo": grpo.AVERAGES["grpo"],
    "rloo": grpo.AVERAGES["grpo"],
    "cispo": grpo.AVERAGES["dapo"],
    "vespo": grpo.AVERAGES["dapo"],
}


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


def top_entropy_threshold(entropies: Tensor, quantile: float) -> Tensor:
    """Find the entropy that this upper share of tokens (n,) reaches; infinite for no tokens."""
    entropies = entropies.detach().float()
    if not len(entropies):
        return entropies.new_tensor(math.inf)
    return torch.quantile(entropies, 1 - quantile)
