"""PPO's two losses, policy and value, on (B, T) tensors. Imports torch alone."""

import torch
from torch import Tensor


def ppo_loss(
    per_token_logps: Tensor,
    values: Tensor,
    completion_mask: Tensor,
    *,
    old_per_token_logps: Tensor,
    old_values: Tensor,
    advantages: Tensor,
    returns: Tensor,
    cliprange: float = 0.2,
    cliprange_value: float = 0.2,
    vf_coef: float = 0.1,
    value_mask: Tensor | None = None,
    num_tokens: float | Tensor | None = None,
    num_values: float | Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy loss plus vf_coef times the clipped value loss.

        policy   max(-A r, -A clip(r, 1 - eps, 1 + eps))                        r = pi(o_t) / pi_old(o_t)
        value    max((V - R)^2, (clip(V, V_old - eps_v, V_old + eps_v) - R)^2) / 2

    Example: one token with ratio 1, advantage 2, value 1, old value 1, return 3: policy -2, value 2; with vf_coef 0.1
    the loss is -1.8.

    Args:
        per_token_logps, values: (B, T), nats and reward; they carry the gradient.
        completion_mask: (B, T), 1 for real tokens.
        old_per_token_logps, old_values: (B, T), of the policy and the critic when the tokens were drawn.
        advantages, returns: (B, T), see advantages.gae.
        value_mask: (B, T), where values are trained, by default completion_mask.
        num_tokens, num_values: tokens and values of the optimizer step, by default those of the masks.
    Returns:
        loss, a scalar; and diagnostics: policy_loss, value_loss, approx_kl (nats per token), clip_ratio/policy,
        clip_ratio/value (shares of tokens), ratio.
    Source: PPO eq. 7 and 9 (arXiv 1707.06347); equals PPOTrainer of TRL 1.12, the last version that had it.
    """
    value_mask = completion_mask if value_mask is None else value_mask
    log_ratio = (per_token_logps - old_per_token_logps) * completion_mask  # 0 for padding: exp of it stays finite
    ratio = log_ratio.exp()
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    per_token_policy = torch.max(unclipped, clipped)

    near = old_values + (values - old_values).clamp(-cliprange_value, cliprange_value)
    squared, squared_near = (values - returns).square(), (near - returns).square()
    per_token_value = 0.5 * torch.max(squared, squared_near)

    policy_loss = (per_token_policy * completion_mask).sum() / _count(completion_mask, num_tokens)
    value_loss = (per_token_value * value_mask).sum() / _count(value_mask, num_values)
    with torch.no_grad():
        diagnostics = {
            "policy_loss": _mean(per_token_policy, completion_mask),
            "value_loss": _mean(per_token_value, value_mask),
            "approx_kl": _mean(0.5 * log_ratio.square(), completion_mask),
            "clip_ratio/policy": _mean(clipped > unclipped, completion_mask),
            "clip_ratio/value": _mean(squared_near > squared, value_mask),
            "ratio": _mean(ratio, completion_mask),
        }
    return policy_loss + vf_coef * value_loss, diagnostics


def _count(mask: Tensor, given: float | Tensor | None) -> float | Tensor:
    return mask.sum().clamp(min=1) if given is None else given


def _mean(value: Tensor, mask: Tensor) -> Tensor:
    return (value * mask).sum() / mask.sum().clamp(min=1)
