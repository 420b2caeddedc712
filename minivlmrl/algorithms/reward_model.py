"""The reward model (InstructGPT, step 2): a copy of the policy learns to number answers as people rank them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from minivlmrl.algorithms.answers import PAIR, PairBatch, encode, one_step, pair_accuracy, pieces
from minivlmrl.algorithms.preference_losses import RewardLoss, reward_loss
from minivlmrl.algorithms.value_model import copy_as_value_model, pack_to_end, save_value_model
from minivlmrl.batch import Step
from minivlmrl.grpo import Algorithm
from minivlmrl.reward_functions.reward_model_scores import FOLDER
from minivlmrl.rows import Dataset, Row


@dataclass
class RewardModelConfig(RewardLoss):
    """Options of the reward model."""

    path: str | None = None  # what rewards.reward_model asks: a folder of this stage's; None: the one trained here


class RewardModel(Algorithm):
    """The policy stays as it is. Rows may have a column `margin`: by how much the chosen answer is better."""

    stage, needs = "reward_model", "pairs"

    def __init__(self, *args):
        super().__init__(*args)
        self.trained = copy_as_value_model(self.policy)
        self.trained.backbone.visual.requires_grad_(not self.config.freeze_vision_tower)

    def modules(self) -> dict[str, nn.Module]:
        return super().modules() | {"trained": self.trained}

    def save(self, folder: Path):
        save_value_model(folder / FOLDER, self.trained, self.processor, self.world)

    def steps(self, batches: Iterator[Sequence[Row]]) -> Iterator[Step]:
        for rows in batches:
            parts = pieces(rows, self.config.micro_batch_size)
            yield one_step([self.micro_batch(part) for part in parts], self.world)

    def micro_batch(self, rows: Sequence[Row]) -> PairBatch:
        prompts, answers = encode(rows, PAIR, self.processor)
        ids = [[ids for ids, _ in row] for row in answers]
        group = pack_to_end(prompts, ids, self.policy.config, self.world.device)
        margin = torch.tensor([row.columns.get("margin") or 0.0 for row in rows], device=self.world.device)
        return PairBatch(group, group.completion_mask, None, margin=margin)

    def loss(self, batch: PairBatch) -> tuple[Tensor, dict[str, Tensor]]:
        chosen, rejected = self.trained.at_end(batch.group).view(-1, 2).unbind(1)
        return reward_loss(chosen, rejected, self.config, margin=batch.margin.to(chosen.dtype), counts=batch.counts)

    def pair_accuracy(self, rows: Dataset) -> float | None:
        """Count a pair if the chosen answer gets the larger number."""

        def margins(indices: Sequence[int]) -> Tensor:
            batch = self.micro_batch([rows[index] for index in indices])
            chosen, rejected = self.trained.at_end(batch.group).view(-1, 2).unbind(1)
            return chosen - rejected

        return pair_accuracy(self, rows, margins)
