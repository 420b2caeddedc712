"""The reward model (InstructGPT, step 2): a copy of the policy learns to rank answers as people."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from minivlmrl.algorithms.answers import AnswerBatch, PairAlgorithm
from minivlmrl.algorithms.base import TrainingConfig
from minivlmrl.algorithms.preference_losses import RewardLoss, reward_loss
from minivlmrl.algorithms.reward_model_scores import FOLDER
from minivlmrl.algorithms.value_model import copy_as_value_model, pack_to_end, save_value_model
from minivlmrl.rows import Row


@dataclass
class RewardModelConfig(RewardLoss, TrainingConfig):
    """The reward model."""

    # what rewards.reward_model asks: a folder of this stage's; None: the one trained here
    path: str | None = None


class RewardModel(PairAlgorithm):
    """The policy stays as it is. Rows may say by how much the chosen answer is better: `margin`."""

    stage, trains_policy = "reward_model", False

    def __init__(self, *args):
        super().__init__(*args)
        self.trained = copy_as_value_model(self.policy, self.run.model.freeze)

    def modules(self) -> dict[str, nn.Module]:
        return super().modules() | {"trained": self.trained}

    def save(self, folder: Path):
        save_value_model(folder / FOLDER, self.trained, self.processor, self.world)

    def micro_batch(self, rows: Sequence[Row]) -> AnswerBatch:
        prompts, answers = self.encode(rows)
        group = pack_to_end(prompts, answers, self.policy.config, self.world.device)
        margins = torch.tensor([row.columns.get("margin") or 0.0 for row in rows])
        margins = margins.to(self.world.device)
        return AnswerBatch(group, group.completion_mask, None, margin=margins)

    def rewards(self, batch: AnswerBatch) -> tuple[Tensor, Tensor]:
        """(B,) of the chosen answers and (B,) of the rejected ones."""
        return self.trained.at_end(batch.group).view(-1, 2).unbind(1)

    def loss(self, batch: AnswerBatch) -> tuple[Tensor, dict[str, Tensor]]:
        chosen, rejected = self.rewards(batch)
        fixed = {"margin": batch.margin.to(chosen.dtype), "counts": batch.counts}
        return reward_loss(chosen, rejected, self.config, **fixed)

    def margins(self, rows: Sequence[Row]) -> Tensor:
        chosen, rejected = self.rewards(self.micro_batch(rows))
        return chosen - rejected
