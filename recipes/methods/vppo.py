"""VPPO (arXiv 2510.09285): train on the tokens that depend most on the picture, and more on completions that do.

python train.py recipes/fashion.yaml "--stages=[sft, recipes/methods/vppo.py:VPPO]"

Left out: the entropy penalty (set vppo.entropy_coef=-0.06), patches hidden before instead of after resizing, and the
authors' mean scale of 1 in each micro-batch, which is 1 over the step here.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from blind import dependency

from minivlmrl.config.options import GRPOOptions
from minivlmrl.trainers.grpo import GRPOTrainer


@dataclass
class VPPOOptions(GRPOOptions):
    hidden: Annotated[float, "(0, 1]"] = 0.5  # share of black patches
    kept: Annotated[float, "(0, 1]"] = 0.4  # share of tokens to train on, in each completion
    least: Annotated[float, "[0, 1]"] = 0.9  # factor for the completion that depends least on its picture


class VPPO(GRPOTrainer):
    stage = "vppo"
    config_type = VPPOOptions

    def prepare(self, batches):
        depends = [dependency(self, batch.group, self.options.hidden) * batch.loss_mask for batch in batches]
        sums = [(x.sum(1) / batch.loss_mask.sum(1).clamp(min=1)) for x, batch in zip(depends, batches, strict=True)]
        everywhere = torch.cat(self.world.gather_objects(torch.cat(sums).cpu()))  # completions of the step
        for batch, tokens, mean in zip(batches, depends, sums, strict=True):
            scale = completion_scale(mean, everywhere.to(mean), self.options.least)
            batch.advantages = (
                batch.advantages[:, None] * scale[:, None] * top_tokens(tokens, batch.loss_mask, self.options.kept)
            )


def top_tokens(depends, mask, share):
    """Return (R, T), 1 for the share of each completion's tokens with the largest values, rounded up."""
    ranks = depends.masked_fill(mask == 0, -1).argsort(dim=1, descending=True, stable=True).argsort(1)
    return (ranks < (mask.sum(1, keepdim=True) * share).ceil()) * mask


def completion_scale(means, everywhere, least):
    """Map the completions' mean dependency linearly to [least, most], with a mean of 1 over the step."""
    low, high = everywhere.min(), everywhere.max()
    if high - low <= 1e-6:
        return torch.ones_like(means)
    normalized = (everywhere - low) / (high - low)
    most = least + (1 - least) / normalized.mean()
    return least + (most - least) * (means - low) / (high - low)
