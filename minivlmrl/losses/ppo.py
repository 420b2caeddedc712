"""PPO: token rewards, advantages from a critic (GAE), and loss. ppo.py imports only torch."""

import torch
from torch import Tensor


def token_rewards(
    scores: Tensor, logps: Tensor, ref_logps: Tensor, mask: Tensor, kl_coef: float = 0.05, kl_estimator: str = "k1"
) -> Tensor:
    """Compute PPO's token rewards (B, T): -kl_coef * KL(pi || pi_ref), plus the score at the last token.

    Args:
        scores: (B,) rewards for whole completions.
        logps, ref_logps: (B, T) policy and reference log-probabilities, in nats.
        mask: (B, T), 1 for completion tokens.
        kl_estimator: "k1", log pi - log pi_ref; or "k3", pi_ref/pi - 1 - log(pi_ref/pi).
    Source: InstructGPT eq. 2 (arXiv 2203.02155); TRL 1.12's PPOTrainer, which adds the score one token later.
    """
    log_ref_ratio = (ref_logps - logps) * mask
    if kl_estimator not in ("k1", "k3"):
        raise ValueError(f"kl_estimator is {kl_estimator!r}, but it must be k1 or k3 in the rewards of PPO")
    kl = -log_ref_ratio if kl_estimator == "k1" else log_ref_ratio.expm1() - log_ref_ratio
    last_token = mask.sum(1, keepdim=True).long() - 1  # (B, 1) index of the last completion token
    return (-kl_coef * kl).scatter_add(1, last_token, scores[:, None].to(kl.dtype))


def gae(rewards: Tensor, values: Tensor, gamma: float = 1.0, lam: float = 0.95) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns with generalized advantage estimation (GAE).

        delta_t = r_t + gamma V_{t+1} - V_t             A_t = delta_t + gamma lam A_{t+1}

    Example: rewards 0, 1 and values 0.5, 0.5 with gamma = lam = 1 give the advantages 0.5, 0.5 and the returns 1, 1.

    Args:
        rewards, values: (B, T), 0 at padding; values[:, t] is predicted before token t is sampled.
    Returns:
        Advantages and returns (advantages + values), both (B, T).
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


def whiten(parts: list[Tensor], masks: list[Tensor], all_ranks=None) -> list[Tensor]:
    """Normalize token values over a whole rollout to mean 0 and variance 1.

    Args:
        parts, masks: one (B, T) tensor per micro-batch.
        all_ranks: function that sums numbers over ranks, such as World.sum; None for a single rank.
    Source: TRL 1.12's masked_whiten (sample variance, 1e-8 inside the square root).
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
    return [(part - mean) * scale * mask for part, mask in pairs]


def ppo_loss(
    per_token_logps: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    cliprange: float = 0.2,
    vf_coef: float = 0.1,
    old_per_token_logps: Tensor,
    old_values: Tensor,
    advantages: Tensor,
    returns: Tensor,
    normalizer=None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the PPO loss: clipped policy loss plus vf_coef times clipped value loss.

        policy   max(-A r, -A clip(r, 1 - eps, 1 + eps))             r = pi(o_t) / pi_old(o_t)
        value    max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2) / 2

    Example: ratio 1, advantage 2, value 1, old value 1 and return 3 give policy loss -2, value loss 2 and, with vf_coef
    0.1, PPO loss -1.8.

    Args:
        per_token_logps, values: (B, T) policy log-probabilities in nats and critic predictions, with gradient.
        mask: (B, T), 1 for tokens to train on.
        cliprange: eps, at least 0; clips the ratio around 1, and values around old values.
        vf_coef: value loss weight.
        old_per_token_logps, old_values: (B, T) log-probabilities and critic predictions at sampling time.
        advantages, returns: (B, T), from the function gae.
        normalizer: LossNormalizer with the divisor `tokens`, by default mask.sum().
    Returns:
        Loss, and metrics policy_loss, value_loss, approx_kl (nats per token), ratio and clip_ratio/...
    Source: PPO eq. 7 and 9 (arXiv 1707.06347); equals PPOTrainer in TRL 1.12 (removed later).
    """
    eps = cliprange
    # mask out padding tokens before exp, which could overflow there
    log_ratio = (per_token_logps - old_per_token_logps) * mask
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
    return policy_loss + vf_coef * value_loss, metrics


def _mean(value: Tensor, mask: Tensor) -> Tensor:
    return (value * mask).sum() / mask.sum().clamp(min=1)
