"""KTO (arXiv 2402.01306) as a custom stage, for answers labeled good or bad.

python train.py recipes/own_pairs.yaml "--stages=[recipes/kto.py:KTO]" --model.path=FOLDER --data.train_file=rows.jsonl

Rows have columns `completion` and `label` (true for a good answer). Options are in section `kto`, for example
--kto.beta=0.2.
"""

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from minivlmrl.config.options import TrainingOptions
from minivlmrl.errors import UserError
from minivlmrl.extras.kto import kto_kl, kto_loss
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.trainers.base import MicroBatch
from minivlmrl.trainers.offline import AnswerBatch, OfflineTrainer


@dataclass
class KTOOptions(TrainingOptions):
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0


@dataclass
class KTOBatch(AnswerBatch):
    labels: Tensor | None = None  # (R,) True for good answers
    others: MicroBatch | None = None  # prompts with answers from other rows, for the KL

    def counts(self, names):
        """Return metric weights, such as the number of good answers."""
        num_good = int(self.labels.sum())
        of_rewards = {"rewards/chosen": num_good, "rewards/rejected": len(self.labels) - num_good}
        return super().counts(names) | of_rewards


class KTO(OfflineTrainer):
    stage = "kto"
    config_type = KTOOptions
    needs = "labels"
    batch_type = KTOBatch

    @staticmethod
    def has_reference(options) -> bool:
        return True

    @classmethod
    def check(cls, config):
        """Reject micro-batches with one row, as in TRL: the KL estimate needs another row's answer."""
        size = config.kto.micro_batch_size
        num_rows = config.kto.prompts_per_step // int(os.environ.get("WORLD_SIZE", 1))
        if size == 1 or num_rows % size == 1:
            raise UserError(
                f"kto: {num_rows} rows of a rank in micro-batches of {size} leave one with a single row, but the KL is "
                "estimated with the answer of another row. Change kto.micro_batch_size or kto.prompts_per_step"
            )

    def micro_batch(self, rows):
        prompts, answers = self.encode(rows)
        batch = self.pack(prompts, answers)
        batch.labels = torch.tensor([row.columns["label"] for row in rows], device=self.world.device)
        # previous row's answer, as in TRL
        batch.others = self.pack(prompts, answers[-1:] + answers[:-1])
        return batch

    def loss(self, batch):
        logps, entropies = per_token_logps(self.policy, batch.group)
        with torch.no_grad():
            other_logps, _ = per_token_logps(self.policy, batch.others.group)
        kl = kto_kl(batch.others.group.pad(other_logps), batch.others.ref_per_token_logps, batch.others.loss_mask)
        loss, metrics = kto_loss(
            batch.group.pad(logps),
            batch.loss_mask,
            batch.labels,
            beta=self.options.beta,
            desirable_weight=self.options.desirable_weight,
            undesirable_weight=self.options.undesirable_weight,
            ref_per_token_logps=batch.ref_per_token_logps,
            kl=kl,
            normalizer=batch.normalizer,
        )
        # metrics are NaN without good (or bad) answers
        metrics = {name: value.nan_to_num() for name, value in metrics.items()}
        return loss, metrics | {"entropy": batch.mean(entropies)}
