"""Losses as pure functions of log-probabilities: (B, T) in, a scalar and its diagnostics out. Imports torch alone.

Dimension letters: B completions, T tokens of the longest. A row's tokens stand on the left; completion_mask says which
are real. Everywhere `per_token_logps` carries the gradient; old, reference and advantages are constants.

Each loss divides by a count that the caller may give: the count of the whole optimizer step. Then the gradients of
micro-batches, however the step is split, add up to the gradient of the step.
"""

import torch
from torch import Tensor

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")


def sft_loss(per_token_logps: Tensor, completion_mask: Tensor, num_tokens: float | Tensor | None = None) -> Tensor:
    """Mean negative log-probability of the demonstrated tokens.

    Example: two rows of 1 and 3 tokens, all with log-probability -2: loss 2.0 (4 tokens share the mean, not 2 rows).

    Args:
        per_token_logps: (B, T) float, nats.
        completion_mask: (B, T), 1 for tokens to learn.
        num_tokens: tokens of the optimizer step, by default those of the mask (at least 1).
    Source: TRL's SFTTrainer, loss_type nll, with num_items_in_batch = num_tokens.
    """
    if num_tokens is None:
        num_tokens = completion_mask.sum().clamp(min=1)
    return -(per_token_logps * completion_mask).sum() / num_tokens


def grpo_loss(
    per_token_logps: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    *,
    old_per_token_logps: Tensor | None = None,
    ref_per_token_logps: Tensor | None = None,
    loss_type: str = "dapo",
    importance_sampling_level: str = "token",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    beta: float = 0.0,
    use_bias_correction_kl: bool = True,
    max_completion_length: int | None = None,
    num_sequences: float | Tensor | None = None,
    num_tokens: float | Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy-gradient loss of a batch of completions, with a KL penalty.

    Example: one row of two tokens, on-policy (ratio 1), advantage 0.5, beta 0: every per-token loss is -0.5, so the
    loss is -0.5 for grpo, bnpo and dapo; dr_grpo with max_completion_length 4 gives -0.25.

    Args:
        per_token_logps: (B, T) float, nats, of the policy that is trained.
        advantages: (B,) or (B, T).
        completion_mask: (B, T), 1 for real tokens.
        old_per_token_logps: (B, T), of the policy that sampled; None: the present one (ratio 1, its gradient kept).
        ref_per_token_logps: (B, T), of the reference; needed with beta > 0.
        loss_type: how per-token losses are averaged, see `aggregate`.
        importance_sampling_level: "token": a ratio for each token (GRPO); "sequence": the geometric mean of a row's
            ratios for all its tokens (GSPO).
        epsilon_low, epsilon_high: the ratio is clipped to [1 - epsilon_low, 1 + epsilon_high].
        delta: bound of the ratio on the unclipped side too ("two-sided clipping"), over 1 + epsilon_high to matter.
        beta: weight of the KL term.
        use_bias_correction_kl: weight each token's KL by the ratio, which makes its gradient that of the KL itself.
        max_completion_length, num_sequences, num_tokens: see `aggregate`.
    Returns:
        loss, a scalar; and diagnostics, scalars without gradient: kl, clip_ratio/low_mean, clip_ratio/high_mean,
        clip_ratio/region_mean (shares of tokens, of rows at level "sequence").
    Raises:
        ValueError: beta > 0 without ref_per_token_logps, or an option with no meaning.
    Source: DeepSeekMath eq. 3 and 4 (arXiv 2402.03300), GSPO eq. 5 and 7 (2507.18071), DAPO (2503.14476), Dr. GRPO
        (2503.20783); equals GRPOTrainer._compute_loss of TRL 1.16 for these options.
    """
    if beta and ref_per_token_logps is None:
        raise ValueError(f"beta is {beta}: the KL term needs ref_per_token_logps")
    if advantages.dim() == 1:
        advantages = advantages[:, None]  # (B, 1): one advantage for all tokens of a row
    if old_per_token_logps is None:
        old_per_token_logps = per_token_logps.detach()

    # r_t = pi(o_t) / pi_old(o_t), or s = (prod_t r_t)^(1/|o|) for the whole row
    log_ratio = per_token_logps - old_per_token_logps
    if importance_sampling_level == "sequence":
        lengths = completion_mask.sum(-1, keepdim=True).clamp(min=1)
        log_ratio = (log_ratio * completion_mask).sum(-1, keepdim=True) / lengths  # (B, 1)
    elif importance_sampling_level != "token":
        raise ValueError(f"importance_sampling_level is {importance_sampling_level!r}; use 'token' or 'sequence'")
    ratio = log_ratio.exp()

    # -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    per_token_loss = -torch.min(bounded * advantages, clipped * advantages)

    low = (bounded < 1 - epsilon_low) & (advantages < 0)
    high = (bounded > 1 + epsilon_high) & (advantages > 0)
    diagnostics = {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low | high}

    if beta:
        # k3 estimator: D = pi_ref / pi - log(pi_ref / pi) - 1, never negative
        log_ref_ratio = ref_per_token_logps - per_token_logps
        per_token_kl = log_ref_ratio.exp() - log_ref_ratio - 1
        if use_bias_correction_kl:
            per_token_kl = per_token_kl * ratio
        per_token_loss = per_token_loss + beta * per_token_kl
        diagnostics["kl"] = per_token_kl

    loss = aggregate(per_token_loss, completion_mask, loss_type, max_completion_length, num_sequences, num_tokens)
    return loss, {name: _masked_mean(value.detach(), completion_mask) for name, value in diagnostics.items()}


def aggregate(
    per_token_loss: Tensor,
    completion_mask: Tensor,
    loss_type: str,
    max_completion_length: int | None = None,
    num_sequences: float | Tensor | None = None,
    num_tokens: float | Tensor | None = None,
) -> Tensor:
    """Average per-token losses, which decides how much a long completion weighs.

        grpo      mean over rows of each row's token mean        a token of a long row weighs less
        dr_grpo   sum over tokens / (rows * max_completion_length)   a constant divisor: no length bias
        dapo      sum over tokens / tokens of the optimizer step     all tokens of the step weigh the same
        bnpo      token mean of this micro-batch, weighted by its share of rows: the only one that depends on how the
                  step is split (it does so in TRL too)

    Args:
        per_token_loss: (B, T), or (B, 1) for one value for all tokens of a row.
        num_sequences: rows of the optimizer step, by default B.
        num_tokens: completion tokens of the optimizer step, by default those of the mask.
    Raises:
        ValueError: an unknown loss_type, or dr_grpo without max_completion_length.
    Source: TRL 1.16 with num_sequences = B * gradient_accumulation_steps and
        num_tokens = num_items_in_batch / num_processes * gradient_accumulation_steps / steps_per_generation.
    """
    B = len(completion_mask)
    num_sequences = B if num_sequences is None else num_sequences
    tokens_here = completion_mask.sum().clamp(min=1)
    masked = per_token_loss * completion_mask
    if loss_type == "grpo":
        return (masked.sum(-1) / completion_mask.sum(-1).clamp(min=1)).sum() / num_sequences
    if loss_type == "bnpo":
        return masked.sum() / tokens_here * (B / num_sequences)
    if loss_type == "dapo":
        return masked.sum() / (tokens_here if num_tokens is None else num_tokens)
    if loss_type == "dr_grpo":
        if max_completion_length is None:
            raise ValueError("loss_type dr_grpo divides by max_completion_length; give it")
        return masked.sum() / (num_sequences * max_completion_length)
    raise ValueError(f"loss_type is {loss_type!r}; known are {', '.join(LOSS_TYPES)}")


def _masked_mean(value: Tensor, mask: Tensor) -> Tensor:
    """Mean over real tokens of a (B, T) tensor, over rows of a (B, 1) one."""
    value = value.to(mask.dtype if mask.is_floating_point() else torch.float32)
    return value.mean() if value.shape[1] == 1 else (value * mask).sum() / mask.sum().clamp(min=1)
