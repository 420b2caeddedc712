"""The stages that a recipe can name, and the class of each."""

from minivlmrl.algorithms.base import Algorithm
from minivlmrl.algorithms.distill import Distill
from minivlmrl.algorithms.dpo import DPO
from minivlmrl.algorithms.grpo_family import Family, needs_family
from minivlmrl.algorithms.grpo_stage import GRPOStage
from minivlmrl.algorithms.kto import KTO
from minivlmrl.algorithms.ppo import PPO
from minivlmrl.algorithms.reward_model import RewardModel
from minivlmrl.algorithms.sft import SFT

CLASSES = (SFT, DPO, KTO, RewardModel, GRPOStage, PPO, Distill)
ALGORITHMS: dict[str, type[Algorithm]] = {algorithm.stage: algorithm for algorithm in CLASSES}


def find_algorithm(stage: str, config) -> type[Algorithm]:
    """Find the class of a stage (ValueError: there is none).

    GRPO with options that the book does not have is Family.
    """
    if stage not in ALGORITHMS:
        raise ValueError(f"stages: unknown algorithm {stage!r}; known are {', '.join(ALGORITHMS)}")
    if stage == "grpo" and needs_family(config.grpo):
        return Family
    return ALGORITHMS[stage]


def find_algorithms(config) -> dict[str, type[Algorithm]]:
    """Find the class of each stage of a recipe, and let it check the recipe (ValueError)."""
    algorithms = {stage: find_algorithm(stage, config) for stage in config.stages}
    for algorithm in algorithms.values():
        algorithm.check(config)
    return algorithms
