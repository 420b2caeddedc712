"""The piece that papers about pictures share: how much a token depends on the picture.

The policy scores its own tokens again with some patches black. A token depends on the picture as far as its
log-probability changes: the k3 estimate of KL(pi(. | picture) || pi(. | hidden picture)), in nats per token.
"""

from dataclasses import replace

import torch
from torch import Tensor

from minivlmrl.data.image import ImageProcessor
from minivlmrl.model.packing import GroupBatch
from minivlmrl.trainers.grpo import GRPOTrainer


def hide(group: GroupBatch, share: float, images: ImageProcessor) -> GroupBatch:
    """Return the group with about a share of its image patches black; draws from torch, which `seed` repeats."""
    patches = group.pixel_values
    black = torch.tensor([-mean / std for mean, std in zip(images.image_mean, images.image_std, strict=True)])
    black = black.repeat_interleave(patches.shape[1] // 3).to(patches)  # (patch_dim,), color by color
    hidden = torch.rand(len(patches), 1).to(patches.device) < share
    return replace(group, pixel_values=torch.where(hidden, black, patches), vision_embeds=None)


@torch.no_grad()
def hidden_logps(trainer: GRPOTrainer, group: GroupBatch, share: float) -> Tensor:
    """Return the policy's log-probabilities (R, T) for the same completions beside hidden pictures."""
    return group.pad(trainer.logps(hide(group, share, trainer.processor.image_processor))[0])


def visual_kl(logps: Tensor, hidden: Tensor, largest: float = 10.0) -> Tensor:
    """Return the k3 estimate of KL(pi || pi with hidden pictures) per token: (R, T), from 0 to `largest` nats."""
    log_ratio = (hidden - logps).clamp(-20, 20)
    return (log_ratio.expm1() - log_ratio).clamp(0, largest)


def dependency(trainer: GRPOTrainer, group: GroupBatch, share: float) -> Tensor:
    """Return how much each token depends on the picture, before the update: (R, T), in nats."""
    with torch.no_grad():
        return visual_kl(group.pad(trainer.logps(group)[0]), hidden_logps(trainer, group, share))
