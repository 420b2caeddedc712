"""Registry of training stages, which a recipe names in the `stages` option, and their trainer classes."""

from minivlmrl.config.import_utils import find_stage
from minivlmrl.config.options import RunConfig
from minivlmrl.errors import error_context, require
from minivlmrl.trainers.base import Trainer

# trainer classes of the built-in stages; a stage's module is imported only if a recipe names the stage
TRAINERS = {
    "sft": "minivlmrl.trainers.sft:SFTTrainer",
    "dpo": "minivlmrl.trainers.dpo:DPOTrainer",
    "reward_model": "minivlmrl.extras.reward_model:RewardTrainer",
    "grpo": "minivlmrl.trainers.grpo:GRPOTrainer",
    "ppo": "minivlmrl.trainers.ppo:PPOTrainer",
}


def find_class(stage: str) -> type[Trainer]:
    """Import the trainer class that an item of the `stages` option names: a key in TRAINERS, or file.py:Class."""
    trainer = find_stage(stage, TRAINERS)
    with error_context(f"stages: {stage}"):
        is_trainer = isinstance(trainer, type) and issubclass(trainer, Trainer)
        require(is_trainer, "the class", trainer, "a subclass of minivlmrl.trainers.base.Trainer")
        for method in ("steps", "loss"):
            if getattr(trainer, method) is getattr(Trainer, method):
                raise ValueError(
                    f"the class {trainer.__name__} has no method {method}; "
                    "define this method; see minivlmrl/trainers/base.py"
                )
    return trainer


def find_trainer(stage: str, config) -> type[Trainer]:
    """Return the trainer class of a stage: a built-in class, or a class in a user's file."""
    classes = {trainer.stage: trainer for trainer in map(find_class, config.stages)}
    return classes.get(stage) or find_class(stage)


def find_trainers(config) -> dict[str, type[Trainer]]:
    """Let each stage's trainer class check the recipe, and return {stage: trainer class}."""
    trainers = {stage: find_trainer(stage, config) for stage in config.stage_names}
    check_dtypes(config)
    for trainer in trainers.values():
        trainer.check(config)
    return trainers


def check_dtypes(config: RunConfig):
    """Raise ValueError if a recipe trains in float16, whose gradients would need loss scaling."""
    for option in ("dtype", "compute_dtype"):
        if config.stage_names and getattr(config.model, option) == "float16":
            raise ValueError(
                f"model.{option} is 'float16', in which small gradients become 0, because there is no "
                "loss scaling; train in bfloat16, or in float32 on GPUs without bfloat16 (T4, V100)"
            )
