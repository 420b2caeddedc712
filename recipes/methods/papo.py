"""PAPO (arXiv 2507.06448): a term that grows with the KL between the policy and the policy with hidden pictures.

python train.py recipes/fashion.yaml "--stages=[sft, recipes/methods/papo.py:PAPO]"

The loss is GRPO's minus gamma times the mean KL, plus eta times the mean of -log pi of the sampled tokens (the "double
entropy" loss, whose half with hidden pictures has no gradient in the authors' code, and only shifts the loss).
Left out: that half, clipping and annealing of gamma, and patches hidden before instead of after resizing.
"""

from dataclasses import dataclass
from typing import Annotated

from blind import hidden_logps, visual_kl
from torch import Tensor

from minivlmrl.config.options import GRPOOptions
from minivlmrl.trainers.grpo import GRPOBatch, GRPOTrainer


@dataclass
class PAPOOptions(GRPOOptions):
    hidden: Annotated[float, "(0, 1]"] = 0.6  # share of black patches
    gamma: Annotated[float, "[0, inf)"] = 0.01  # weight of the KL
    eta: Annotated[float, "[0, inf)"] = 0.0  # weight of the entropy loss; the authors use 0.03 for large gamma


@dataclass(kw_only=True)
class PAPOBatch(GRPOBatch):
    hidden_logps: Tensor | None = None  # (R, T), before the step


class PAPO(GRPOTrainer):
    stage = "papo"
    config_type = PAPOOptions
    batch_type = PAPOBatch

    def prepare(self, batches):
        for batch in batches:
            batch.hidden_logps = hidden_logps(self, batch.group, self.options.hidden)

    def extra_loss(self, batch, logps, entropies):
        kl = visual_kl(logps, batch.hidden_logps) * batch.loss_mask
        surprise = -logps * batch.loss_mask
        term = (self.options.eta * surprise - self.options.gamma * kl).sum() / batch.normalizer.tokens
        return term, {"papo/kl": kl.detach().sum() / batch.loss_mask.sum().clamp(min=1)}
