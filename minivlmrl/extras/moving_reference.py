"""A reference model that follows the policy (TR-DPO, arXiv 2404.09656), with TRL's option names.

Every ref_model_sync_steps optimizer steps of a stage, each weight of the reference becomes

    alpha * policy + (1 - alpha) * reference

where alpha is ref_model_mixup_alpha. With alpha 1, the policy replaces the reference, as in the outer loop of
DeepSeekMath.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from minivlmrl.config.options import RunConfig
from minivlmrl.run.callbacks import Callback
from minivlmrl.trainers.base import Trainer
from minivlmrl.trainers.reference import Reference, SwappedParameters


class MovingReference(Callback):
    """Callback that moves the reference model towards the policy."""

    def on_recipe(self, config: RunConfig, trainers: dict[str, type[Trainer]]):
        self.config = config.reference

    @torch.no_grad()
    def after_step(self, trainer: Trainer, number: int):
        is_due = (number + 1) % self.config.ref_model_sync_steps == 0
        if trainer.reference is not None and is_due:
            for theirs, ours in weight_pairs(trainer.reference):
                theirs.lerp_(ours.to(theirs.dtype), self.config.ref_model_mixup_alpha)


def weight_pairs(reference: Reference) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each weight of the reference that is a copy, with the policy's weight of the same name."""
    model = reference.model
    policy = model.originals() if isinstance(model, SwappedParameters) else list(reference.policy.parameters())
    for theirs, ours in zip(model.parameters(), policy, strict=True):
        if theirs is not ours:  # a frozen weight is shared
            yield theirs, ours
