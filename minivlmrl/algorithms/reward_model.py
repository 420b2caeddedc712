"""The reward model (InstructGPT, step 2): a copy of the policy that learns to score answers as people rank them."""

from dataclasses import dataclass


@dataclass
class RewardModelConfig:
    """Options of the reward model."""

    path: str | None = None  # what rewards.reward_model asks: a folder of this stage's; None: the one trained here
    center_rewards_coefficient: float | None = None  # weight of (chosen + rejected)^2
