"""PPO's two losses, policy and value, on (B, T) tensors. Imports torch alone."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor


@dataclass
class PPOLoss:
    """Options of ppo_loss, and of the section `ppo` of a recipe."""

    # the ratio is clipped to [1 - cliprange, 1 + cliprange], a value to old value -+ cliprange
    cliprange: Annotated[float, ">= 0"] = 0.2
    vf_coef: Annotated[float, ">= 0"] = 0.1  # weight of the value loss


@dataclass
class PPORollout:
    """What stays fixed while a rollout is trained on; each (B, T)."""

    old_per_token_logps: Tensor  # nats, of the policy that drew the tokens
    old_values: Tensor  # of the critic at that time
    advantages: Tensor
    returns: Tensor  # see gae


def ppo_loss(
    per_token_logps: Tensor,
    values: Tensor,
    mask: Tensor,
    rollout: PPORollout,
    options: PPOLoss | None = None,
    *,
    value_mask: Tensor | None = None,
    counts=None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy loss plus vf_coef times the clipped value loss.

        policy   max(-A r, -A clip(r, 1 - eps, 1 + eps))                        r = pi(o_t) / pi_old(o_t)
        value    max((V - R)^2, (clip(V, V_old - eps_v, V_old + eps_v) - R)^2) / 2

    Example: one token with ratio 1, advantage 2, value 1, old value 1, return 3: policy -2, value
    2; with vf_coef 0.1 the loss is -1.8.

    Args:
        per_token_logps, values: (B, T), nats and reward; they carry the gradient.
        mask: (B, T), 1 for tokens that are trained on.
        rollout: anything with the fields of PPORollout.
        value_mask: (B, T), where values are trained, by default mask.
        counts: an object with `tokens` of the optimizer step, by default those of the masks.
    Returns:
        loss; metrics: policy_loss, value_loss, approx_kl (nats per token), ratio, clip_ratio/...
    Source: PPO eq. 7 and 9 (arXiv 1707.06347); equals PPOTrainer of TRL 1.12, the last with one.
    """
    o, advantages, returns = options or PPOLoss(), rollout.advantages, rollout.returns
    value_mask = mask if value_mask is None else value_mask
    # 0 for padding: exp of it stays finite
    log_ratio = (per_token_logps - rollout.old_per_token_logps) * mask
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - o.cliprange, 1 + o.cliprange)
    per_token_policy = torch.max(unclipped, clipped)

    moved, most = values - rollout.old_values, o.cliprange
    near = rollout.old_values + moved.clamp(-most, most)
    squared, squared_near = (values - returns).square(), (near - returns).square()
    per_token_value = 0.5 * torch.max(squared, squared_near)

    num_tokens, num_values = (x.sum().clamp(min=1) for x in (mask, value_mask))
    if counts is not None:
        num_tokens = num_values = max(counts.tokens, 1)
    policy_loss = (per_token_policy * mask).sum() / num_tokens
    value_loss = (per_token_value * value_mask).sum() / num_values
    with torch.no_grad():
        metrics = {
            "policy_loss": _mean(per_token_policy, mask),
            "value_loss": _mean(per_token_value, value_mask),
            "approx_kl": _mean(0.5 * log_ratio.square(), mask),
            "clip_ratio/policy": _mean(clipped > unclipped, mask),
            "clip_ratio/value": _mean(squared_near > squared, value_mask),
            "ratio": _mean(ratio, mask),
        }
    return policy_loss + o.vf_coef * value_loss, metrics


def _mean(value: Tensor, mask: Tensor) -> Tensor:
    return (value * mask).sum() / mask.sum().clamp(min=1)
