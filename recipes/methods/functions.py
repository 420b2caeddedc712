"""Papers that are one function: NSR and pairwise trajectory sampling as `advantages`, ASPO as `loss_type`.

python train.py recipes/fashion.yaml --grpo.advantages=recipes/methods/functions.py:nsr
python train.py recipes/fashion.yaml --grpo.advantages=recipes/methods/functions.py:pairwise
python train.py recipes/fashion.yaml --grpo.loss_type=recipes/methods/functions.py:aspo --grpo.num_iterations=2
"""

import torch

from minivlmrl.losses.advantages import group_advantages


def nsr(rewards, right=1.0, positive=0.1):
    """Weighted REINFORCE (arXiv 2506.01347): +positive for right completions, -1 for wrong ones; NSR is positive=0.

    Args:
        right: total reward from which a completion is right.
    """
    advantages = torch.where(rewards >= right, positive, -1.0)
    return advantages.masked_fill(rewards.isnan(), 0.0)


def pairwise(rewards, num_generations, scale_rewards, share=0.5):
    """Pairwise trajectory sampling (Shuffle-R1, arXiv 2508.05612): train on the pairs of a group that differ most.

    The best completion is paired with the worst, the second with the second worst, and so on. Left out: shuffling the
    batch by advantage.

    Args:
        share: fraction of pairs to train on.
    """
    advantages = group_advantages(rewards, num_generations, scale_rewards)
    ranks = advantages.view(-1, num_generations).argsort(dim=1, stable=True).argsort(1)
    pairs = torch.minimum(ranks, num_generations - 1 - ranks).flatten()  # 0: best and worst
    return advantages * (pairs < max(1, round(share * (num_generations // 2))))


def aspo(logps, advantages, mask, *, normalizer, old_per_token_logps, epsilon_low, epsilon_high, largest=3.0):
    """ASPO (arXiv 2510.06062): where the advantage is positive, weight tokens by pi_old / pi instead of pi / pi_old.

    Tokens outside of PPO's clipping range have no gradient. Left out: the value of the loss is that of the weights.

    Args:
        largest: bound of the flipped weight, which keeps its gradient (a soft dual clip).
    """
    old = logps.detach() if old_per_token_logps is None else old_per_token_logps
    ratio = (logps - old).exp()
    fixed = ratio.detach()
    advantages = advantages.view(len(mask), -1)
    flipped = ratio / fixed.square()  # value pi_old / pi, gradient of log pi times this value
    flipped = flipped * (largest / flipped.detach()).clamp(max=1)
    positive = torch.where(fixed > 1 + epsilon_high, flipped.detach(), flipped)
    negative = torch.where(fixed < 1 - epsilon_low, fixed.clamp(min=1 - epsilon_low), ratio)
    terms = -torch.where(advantages > 0, positive, negative) * advantages * mask
    return terms.sum() / normalizer.tokens, {"aspo/weight": (positive.detach() * mask).sum() / mask.sum().clamp(min=1)}
