"""PPO: rewards of tokens, advantages by a critic (GAE), and the loss. It imports torch alone."""

from dataclasses import dataclass
from typing import Annotated, Protocol

import torch
from torch import Tensor


def token_rewards(
    scores: Tensor,
    logps: Tensor,
    ref_logps: Tensor,
    mask: Tensor,
    kl_coef: float = 0.05,
    kl_estimator: str = "k1",
) -> Tensor:
    """Reward each token in PPO: minus kl_coef times its KL to the reference, a score at the end.

    Args:
        scores: (B,), of whole completions; logps, ref_logps, mask: (B, T).
        kl_estimator: "k1", log pi - log pi_ref; or "k3", pi_ref/pi - 1 - log(pi_ref/pi).
    Source: InstructGPT eq. 2 (arXiv 2203.02155); TRL 1.12's PPOTrainer, which scores a token later.
    """
    log_ref_ratio = (ref_logps - logps) * mask
    if kl_estimator not in ("k1", "k3"):
        raise ValueError(f"kl_estimator is {kl_estimator!r}; PPO's rewards know k1 and k3")
    kl = -log_ref_ratio if kl_estimator == "k1" else log_ref_ratio.exp() - 1 - log_ref_ratio
    last_token = mask.sum(1, keepdim=True).long() - 1  # (B, 1) index
    return (-kl_coef * kl).scatter_add(1, last_token, scores[:, None].to(kl.dtype))


def gae(
    rewards: Tensor, values: Tensor, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Estimate advantages from values, generalised advantage estimation.

        delta_t = r_t + gamma V_{t+1} - V_t             A_t = delta_t + gamma lam A_{t+1}

    Example: rewards 0, 1, values 0.5, 0.5, gamma = lam = 1: advantages 0.5, 0.5, returns 1, 1.

    Args:
        rewards, values: (B, T), 0 after the end of a row; values[:, t] is the forecast before token
            t.
    Returns:
        advantages and returns (advantages + values), (B, T) each.
    Source: arXiv 1506.02438 eq. 16; TRL 1.12's PPOTrainer.
    """
    advantages = []
    following = torch.zeros_like(rewards[:, 0])
    next_value = torch.zeros_like(rewards[:, 0])
    for reward, value in zip(reversed(rewards.unbind(1)), reversed(values.unbind(1)), strict=True):
        following = reward + gamma * next_value - value + gamma * lam * following
        next_value = value
        advantages.append(following)
    advantages = torch.stack(advantages[::-1], dim=1)
    return advantages, advantages + values


def whiten(
    parts: list[Tensor], masks: list[Tensor], shift_mean: bool = True, all_ranks=None
) -> list[Tensor]:
    """Bring the tokens of a rollout to mean 0 (if shift_mean) and variance 1.

    Args:
        parts, masks: of the micro-batches, (B, T) each.
        all_ranks: World.sum, which adds numbers over the ranks; None: there is one.
    Source: TRL 1.12's masked_whiten (variance with n - 1, 1e-8 under the root).
    """
    add = all_ranks or (lambda *values: values)
    pairs = list(zip(parts, masks, strict=True))
    total = sum((part * mask).double().sum().item() for part, mask in pairs)
    count = sum(mask.double().sum().item() for mask in masks)
    total, count = add(total, count)
    mean = total / max(count, 1)
    squares = sum(((part.double() - mean).square() * mask).sum().item() for part, mask in pairs)
    [squares] = add(squares)
    variance = parts[0].new_tensor(squares / max(count - 1, 1))

    mean = parts[0].new_tensor(mean)
    scale = (variance + 1e-8).rsqrt()
    kept_mean = 0.0 if shift_mean else mean
    return [((part - mean) * scale + kept_mean) * mask for part, mask in pairs]


class PPOLossFields(Protocol):
    """What ppo_loss reads of its options: PPOLossOptions, or the section `ppo` of a recipe."""

    @property
    def cliprange(self) -> float: ...
    @property
    def vf_coef(self) -> float: ...


@dataclass
class PPOLossOptions:
    """Options of ppo_loss, and of the section `ppo` of a recipe."""

    # the ratio is clipped to [1 - cliprange, 1 + cliprange], a value to old value -+ cliprange
    cliprange: Annotated[float, ">= 0"] = 0.2
    vf_coef: Annotated[float, ">= 0"] = 0.1  # weight of the value loss


def ppo_loss(
    per_token_logps: Tensor,
    values: Tensor,
    mask: Tensor,
    options: PPOLossFields | None = None,
    *,
    old_per_token_logps: Tensor,
    old_values: Tensor,
    advantages: Tensor,
    returns: Tensor,
    normalizer=None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the clipped policy loss plus vf_coef times the clipped value loss.

        policy   max(-A r, -A clip(r, 1 - eps, 1 + eps))             r = pi(o_t) / pi_old(o_t)
        value    max((V - R)^2, (clip(V, V_old - eps_v, V_old + eps_v) - R)^2) / 2

    Example: one token with ratio 1, advantage 2, value 1, old value 1, return 3: policy -2, value
    2; with vf_coef 0.1 the loss is -1.8.

    Args:
        per_token_logps, values: (B, T), nats and reward; they carry the gradient.
        mask: (B, T), 1 for tokens that are trained on.
        old_per_token_logps, old_values: (B, T), of the policy and the critic that sampled.
        advantages, returns: (B, T), see gae.
        normalizer: an object with `tokens` of the optimizer step, by default those of the mask.
    Returns:
        loss; metrics: policy_loss, value_loss, approx_kl (nats per token), ratio, clip_ratio/...
    Source: PPO eq. 7 and 9 (arXiv 1707.06347); equals PPOTrainer of TRL 1.12, the last with one.
    """
    options = options or PPOLossOptions()
    eps = options.cliprange
    log_ratio = (per_token_logps - old_per_token_logps) * mask  # 0 for padding: exp stays finite
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - eps, 1 + eps)
    per_token_policy = torch.max(unclipped, clipped)

    clipped_values = old_values + (values - old_values).clamp(-eps, eps)
    squared = (values - returns).square()
    squared_clipped = (clipped_values - returns).square()
    per_token_value = 0.5 * torch.max(squared, squared_clipped)

    num_tokens = mask.sum().clamp(min=1) if normalizer is None else max(normalizer.tokens, 1)
    policy_loss = (per_token_policy * mask).sum() / num_tokens
    value_loss = (per_token_value * mask).sum() / num_tokens
    with torch.no_grad():
        metrics = {
            "policy_loss": _mean(per_token_policy, mask),
            "value_loss": _mean(per_token_value, mask),
            "approx_kl": _mean(0.5 * log_ratio.square(), mask),
            "clip_ratio/policy": _mean(clipped > unclipped, mask),
            "clip_ratio/value": _mean(squared_clipped > squared, mask),
            "ratio": _mean(ratio, mask),
        }
    return policy_loss + options.vf_coef * value_loss, metrics


def _mean(value: Tensor, mask: Tensor) -> Tensor:
    return (value * mask).sum() / mask.sum().clamp(min=1)
