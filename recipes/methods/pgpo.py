"""PGPO (arXiv 2604.01840): move the advantage of a completion to the tokens that depend on the picture.

python train.py recipes/fashion.yaml "--stages=[sft, recipes/methods/pgpo.py:PGPO]"

A gate by threshold weights the tokens, and the sum of advantages in a completion stays as it is, as the abstract says.
On 2026-12-01 the authors' repository had no code, so the shape of the gate and its constants are a reading of the text,
not compared with theirs. Left out: the KL over the whole vocabulary, estimated from the sampled token here.
"""

from dataclasses import dataclass
from typing import Annotated

from blind import dependency

from minivlmrl.config.options import GRPOOptions
from minivlmrl.trainers.grpo import GRPOTrainer


@dataclass
class PGPOOptions(GRPOOptions):
    threshold: Annotated[float, "[0, 1]"] = 0.1  # dependency, relative to the completion's largest, that is amplified
    boost: Annotated[float, "[0, inf)"] = 1.0  # additional weight of the token that depends most
    damp: Annotated[float, "[0, 1]"] = 0.9  # weight of tokens below the threshold


class PGPO(GRPOTrainer):
    stage = "pgpo"
    config_type = PGPOOptions

    def prepare(self, batches):
        for batch in batches:
            depends = dependency(self, batch.group, share=1.0)  # as without a picture
            weights = gate(depends, batch.loss_mask, self.options.threshold, self.options.boost, self.options.damp)
            batch.advantages = batch.advantages[:, None] * weights


def gate(depends, mask, threshold, boost, damp):
    """Return weights (R, T): 1 + boost * d where d, relative to the completion's largest, reaches the threshold.

    Other tokens get damp. Weights are scaled so that they add up to the completion's tokens.
    """
    relative = depends * mask
    relative = relative / relative.amax(1, keepdim=True).clamp(min=1e-8)
    weights = (1 + boost * relative).where(relative >= threshold, damp) * mask
    return weights * mask.sum(1, keepdim=True) / weights.sum(1, keepdim=True).clamp(min=1e-8)
