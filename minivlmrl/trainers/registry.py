"""The stages that a recipe can name, and the class of each."""

from minivlmrl.config.import_utils import find_named
from minivlmrl.config.parsing import naming, require
from minivlmrl.config.validation import check_effects
from minivlmrl.trainers.base import Algorithm
from minivlmrl.trainers.dpo import DPO
from minivlmrl.trainers.grpo_family import Family, needs_family
from minivlmrl.trainers.grpo_stage import GRPOStage
from minivlmrl.trainers.ppo import PPO
from minivlmrl.trainers.reward_model import RewardModel
from minivlmrl.trainers.sft import SFT

CLASSES = (SFT, DPO, RewardModel, GRPOStage, PPO)
ALGORITHMS: dict[str, type[Algorithm]] = {algorithm.stage: algorithm for algorithm in CLASSES}


def find_class(stage: str) -> type[Algorithm]:
    """Find the class that an item of `stages` names: of the table, or file.py:Class.

    Raises:
        ValueError: there is none, or it is no Algorithm with a name.
    """
    algorithm, options = find_named("stage", stage, ALGORITHMS)
    with naming(f"stages: {stage}"):
        is_algorithm = isinstance(algorithm, type) and issubclass(algorithm, Algorithm)
        require(is_algorithm, "it", algorithm, "an Algorithm of minivlmrl.trainers.base")
        name = getattr(algorithm, "stage", None)
        require(str(name).isidentifier(), "stage", name, "a name, that of its section")
        require(not options, "what is in brackets", options, "in its section of the recipe")
    return algorithm


def find_algorithm(stage: str, config) -> type[Algorithm]:
    """Find the class of a stage by its name, that of its section (ValueError: there is none).

    GRPO with options that the book does not have is Family.
    """
    if stage == "grpo" and needs_family(config.grpo):
        return Family
    classes = {algorithm.stage: algorithm for algorithm in map(find_class, config.stages)}
    return classes.get(stage) or find_class(stage)


def find_algorithms(config) -> dict[str, type[Algorithm]]:
    """Find the class of each stage of a recipe, and let it check the recipe (ValueError)."""
    algorithms = {stage: find_algorithm(stage, config) for stage in config.stage_names}
    check_effects(config, algorithms)
    for algorithm in algorithms.values():
        algorithm.check(config)
    return algorithms
