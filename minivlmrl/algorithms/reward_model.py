"""The reward model (InstructGPT, step 2): a copy of the policy that learns to number answers as people rank them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from minivlmrl.algorithms.algorithm import Step
from minivlmrl.algorithms.pairs import Pair, PairAlgorithm, PairBatch
from minivlmrl.algorithms.preference_losses import reward_loss
from minivlmrl.algorithms.value_model import pack_to_end
from minivlmrl.scale.saving import save_scalar_model

FOLDER = "reward_model"  # the name of the stage, of its reward, and of what it leaves in the run's folder


class RewardModel(PairAlgorithm):
    """The policy stays as it is. Rows may have a column `margin`: by how much the chosen answer is better."""

    stage = "reward_model"

    def __init__(self, *args):
        super().__init__(*args)
        self.trained = self.scalar_model()

    def modules(self) -> dict[str, nn.Module]:
        return super().modules() | {"trained": self.trained}

    def save(self, folder: Path):
        save_scalar_model(folder / FOLDER, self.trained, self.processor, self.world)

    def batches(self) -> Iterator[Step]:
        config = self.run.reward_model
        for rows in self.rows(config.prompts_per_step):
            pairs = self.pairs(rows)
            counts = self.world.sum(2 * len(pairs), sum(len(ids) for pair in pairs for ids in pair.answers))
            items = list(zip(pairs, (row.columns.get("margin") for row in rows), strict=True))
            pieces = self.in_step(config.micro_batch_size, items, (self.spare_pair(), None))
            yield Step([self.micro_batch(*zip(*some, strict=True), counts, idle) for some, idle in pieces])

    def micro_batch(
        self, pairs: Sequence[Pair], margins: Sequence[float | None], counts: Sequence[float], idle: bool = False
    ) -> PairBatch:
        answers = [pair.answers for pair in pairs]
        group = pack_to_end([p.prompt for p in pairs], answers, self.model.config, self.world.device)
        margin = torch.tensor([m or 0.0 for m in margins], device=self.world.device)
        return PairBatch(group, group.completion_mask, *counts, idle, margin=margin)

    def loss(self, batch: PairBatch) -> tuple[Tensor, dict[str, Tensor]]:
        chosen, rejected = self.trained.at_end(batch.group).view(-1, 2).unbind(1)
        counts = SimpleNamespace(sequences=batch.num_sequences)
        config = self.run.reward_model
        return reward_loss(chosen, rejected, config, margin=batch.margin.to(chosen.dtype), counts=counts)

    def margins(self, pairs: Sequence[Pair]) -> Tensor:
        batch = self.micro_batch(pairs, [None] * len(pairs), (1, 1))
        chosen, rejected = self.trained.at_end(batch.group).view(-1, 2).unbind(1)
        return chosen - rejected
