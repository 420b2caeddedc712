"""The stages that a recipe can name, and the class of each."""

from minivlmrl.config.import_utils import find_stage
from minivlmrl.config.parsing import check_field, error_context
from minivlmrl.config.validation import check_effects
from minivlmrl.trainers.base import Trainer

# name of a stage: its class, which is imported when `stages` names it
TRAINERS = {
    "sft": "minivlmrl.trainers.sft:SFTTrainer",
    "dpo": "minivlmrl.trainers.dpo:DPOTrainer",
    "reward_model": "minivlmrl.trainers.reward_model:RewardTrainer",
    "grpo": "minivlmrl.trainers.grpo:GRPOTrainer",
    "ppo": "minivlmrl.trainers.ppo:PPOTrainer",
}


def find_class(stage: str) -> type[Trainer]:
    """Find the class that an item of `stages` names: of the table, or file.py:Class.

    Raises:
        ValueError: there is none, or it is no Trainer with a name.
    """
    trainer = find_stage(stage, TRAINERS)
    with error_context(f"stages: {stage}"):
        is_trainer = isinstance(trainer, type) and issubclass(trainer, Trainer)
        check_field(is_trainer, "it", trainer, "a Trainer of minivlmrl.trainers.base")
    return trainer


def find_trainer(stage: str, config) -> type[Trainer]:
    """Find the class of a stage by its name, that of its section (ValueError: there is none)."""
    classes = {algorithm.stage: algorithm for algorithm in map(find_class, config.stages)}
    return classes.get(stage) or find_class(stage)


def find_trainers(config) -> dict[str, type[Trainer]]:
    """Find the class of each stage of a recipe, and let it check the recipe (ValueError)."""
    algorithms = {stage: find_trainer(stage, config) for stage in config.stage_names}
    # without stages nothing is known about a reference, so that its options are not refused
    references = [cls.has_reference(getattr(config, name)) for name, cls in algorithms.items()]
    check_effects(config, has_reference=any(references) or not algorithms)
    for algorithm in algorithms.values():
        algorithm.check(config)
    return algorithms
