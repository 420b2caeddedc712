"""Registry of the stages that a recipe can name, with the trainer class of each."""

from minivlmrl.config.import_utils import find_stage
from minivlmrl.config.parsing import check_field, error_context
from minivlmrl.config.validation import check_effects
from minivlmrl.trainers.base import Trainer

# {name of a stage: its trainer}; a class is only imported if the recipe's `stages` names it
TRAINERS = {
    "sft": "minivlmrl.trainers.sft:SFTTrainer",
    "dpo": "minivlmrl.trainers.dpo:DPOTrainer",
    "reward_model": "minivlmrl.trainers.reward_model:RewardTrainer",
    "grpo": "minivlmrl.trainers.grpo:GRPOTrainer",
    "ppo": "minivlmrl.trainers.ppo:PPOTrainer",
}


def find_class(stage: str) -> type[Trainer]:
    """Import the trainer class that an item of `stages` names: a key of TRAINERS, or file.py:Class.

    Raises:
        ValueError: there is no such class, or it is not a Trainer with a stage name.
    """
    trainer = find_stage(stage, TRAINERS)
    with error_context(f"stages: {stage}"):
        is_trainer = isinstance(trainer, type) and issubclass(trainer, Trainer)
        check_field(is_trainer, "it", trainer, "a Trainer of minivlmrl.trainers.base")
    return trainer


def find_trainer(stage: str, config) -> type[Trainer]:
    """Return the trainer class of a stage, given the name of its section in the recipe.

    Raises:
        ValueError: there is no such stage.
    """
    classes = {trainer.stage: trainer for trainer in map(find_class, config.stages)}
    return classes.get(stage) or find_class(stage)


def find_trainers(config) -> dict[str, type[Trainer]]:
    """Return the trainer class of each stage of a recipe, after all checks of the recipe.

    Raises:
        ValueError: a stage does not exist, or the recipe does not suit it.
    """
    trainers = {stage: find_trainer(stage, config) for stage in config.stage_names}
    # a recipe without stages does not show whether it needs a reference, so reference options pass
    references = [cls.has_reference(getattr(config, name)) for name, cls in trainers.items()]
    check_effects(config, has_reference=any(references) or not trainers)
    for trainer in trainers.values():
        trainer.check(config)
    return trainers
