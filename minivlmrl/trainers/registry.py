"""Registry of training stages, named in the option `stages`."""

from minivlmrl.config.import_utils import find_stage
from minivlmrl.errors import UserError, error_context
from minivlmrl.trainers.base import Trainer

# built-in trainers, imported when a recipe names the stage
TRAINERS = {
    "sft": "minivlmrl.trainers.sft:SFTTrainer",
    "dpo": "minivlmrl.trainers.dpo:DPOTrainer",
    "reward_model": "minivlmrl.extras.reward_model:RewardTrainer",
    "grpo": "minivlmrl.trainers.grpo:GRPOTrainer",
    "ppo": "minivlmrl.trainers.ppo:PPOTrainer",
}


def find_class(stage: str) -> type[Trainer]:
    """Import the trainer class for a stage: a key in TRAINERS, or file.py:Class."""
    trainer = find_stage(stage, TRAINERS)
    with error_context(f"stages: {stage}"):
        for method in ("steps", "loss"):
            if getattr(trainer, method) is getattr(Trainer, method):
                raise UserError(
                    f"the class {trainer.__name__} has no method {method}; "
                    "define this method; see minivlmrl/trainers/base.py"
                )
    return trainer


def find_trainer(stage: str, config) -> type[Trainer]:
    """Return the trainer for a stage name."""
    classes = {trainer.stage: trainer for trainer in map(find_class, config.stages)}
    return classes.get(stage) or find_class(stage)


def find_trainers(config) -> dict[str, type[Trainer]]:
    """Return {stage: trainer class}, after every trainer has checked the recipe."""
    trainers = {stage: find_trainer(stage, config) for stage in config.stage_names}
    if trainers and "float16" in (config.model.dtype, config.model.compute_dtype):
        raise UserError(
            "model.dtype or model.compute_dtype is float16, in which small gradients become 0, because there is no "
            "loss scaling; train in bfloat16, or in float32 on GPUs without bfloat16 (T4, V100)"
        )
    for trainer in trainers.values():
        trainer.check(config)
    return trainers
