"""Reference model that follows the policy (TR-DPO, arXiv 2404.09656), with TRL's option names.

The reference weights are updated every ref_model_sync_steps optimizer steps:

    reference <- alpha * policy + (1 - alpha) * reference

The weight alpha is the option ref_model_mixup_alpha. With alpha = 1, the policy replaces the reference, as in
DeepSeekMath's outer loop.
"""

import torch
from torch import Tensor
from torch.optim import Optimizer

from minivlmrl.errors import UserError
from minivlmrl.run.callbacks import Callback
from minivlmrl.run.trainer_state import TrainerState
from minivlmrl.trainers.base import Trainer
from minivlmrl.trainers.reference import Reference, SwappedParameters


class MovingReference(Callback):
    """Move the reference model towards the policy."""

    def on_stage_begin(self, trainer: Trainer, optimizer: Optimizer, state: TrainerState):
        if trainer.reference is None:
            return
        theirs, ours = parameters_of(trainer.reference)
        if [weight.shape for weight in theirs] != [weight.shape for weight in ours]:
            raise UserError(
                "reference.sync_ref_model moves each weight of the reference towards the policy's weight, but the "
                "model of reference.path has other weights, for example because the policy has adapters. Leave out "
                "reference.path or reference.sync_ref_model"
            )

    @torch.no_grad()
    def after_step(self, trainer: Trainer, number: int):
        """Move the reference every ref_model_sync_steps steps."""
        options = trainer.config.reference
        is_due = (number + 1) % options.ref_model_sync_steps == 0
        if trainer.reference is not None and is_due:
            for theirs, ours in zip(*parameters_of(trainer.reference), strict=True):
                if theirs is not ours:  # frozen weights are shared between policy and reference
                    theirs.lerp_(ours.to(theirs.dtype), options.ref_model_mixup_alpha)


def parameters_of(reference: Reference) -> tuple[list[Tensor], list[Tensor]]:
    """Return the reference weights, and the policy weights in the same order."""
    model = reference.model
    policy = model.originals() if isinstance(model, SwappedParameters) else reference.policy.parameters()
    return [*model.parameters()], [*policy]
