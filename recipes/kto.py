"""KTO (arXiv 2402.01306): train on single answers that are labelled good or bad, instead of pairs.

Use it in a recipe in the same folder, see shapes_kto.yaml:
    stages: [sft, kto.py:KTO]
    kto: {max_steps: 150, beta: 1.0}
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from minivlmrl.config.options import TrainingOptions
from minivlmrl.data.rows import Prompt, Row
from minivlmrl.losses.preference import KTOType, kto_kl, kto_loss
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.trainers.base import Step
from minivlmrl.trainers.functions import loss_arguments
from minivlmrl.trainers.offline import AnswerBatch, OfflineTrainer


@dataclass
class KTOConfig(TrainingOptions):
    """Options for KTO."""

    loss_type: KTOType = "kto"  # see kto_loss
    beta: Annotated[float, "(0, inf)"] = 0.1  # factor for the log-ratio
    desirable_weight: Annotated[float, "[0, inf)"] = 1.0  # weight for answers whose label is true
    undesirable_weight: Annotated[float, "[0, inf)"] = 1.0  # weight for answers whose label is false


@dataclass(kw_only=True)
class KTOBatch(AnswerBatch):
    """Micro-batch with labelled answers."""

    labels: Tensor  # (R,) bool, True for good answers
    shares: tuple[float, float]  # fraction of good and of bad answers in the whole step
    kl: Tensor | None  # KL estimate for the whole step, see kto_kl


class KTO(OfflineTrainer):
    """KTO trainer for rows with a completion and a boolean column `label`.

    The KL in kto_loss is estimated by pairing each prompt with the preceding row's answer, as in TRL, but over the
    whole optimizer step instead of a micro-batch.
    """

    stage = "kto"
    config_type = KTOConfig
    needs = "labels"

    @classmethod
    def check(cls, run):
        config = run.kto
        if config.loss_type == "kto" and config.prompts_per_step < 2:
            raise ValueError("kto.prompts_per_step is 1, but must be at least 2, because the KL pairs different rows")

    @staticmethod
    def has_reference(config) -> bool:
        return True

    def steps(self, batches: Iterator[Sequence[Row]]) -> Iterator[Step]:
        size = self.config.micro_batch_size
        for rows in batches:
            labels = torch.tensor([row.columns["label"] for row in rows])
            total, good = self.world.sum(len(rows), int(labels.sum()))
            prompts, answers = self.encode(rows)
            kl = None
            if self.config.loss_type == "kto":
                kl = self.measure_kl(prompts, answers)
            micro_batches = []
            for start in range(0, len(rows), size):
                part = slice(start, start + size)
                batch = self.pack(prompts[part], answers[part])
                micro_batch = KTOBatch(
                    **vars(batch),
                    labels=labels[part].to(self.world.device),
                    shares=(good / total, 1 - good / total),
                    kl=kl,
                )
                micro_batches.append(micro_batch)
            yield self.step(micro_batches)

    @torch.no_grad()
    def measure_kl(self, prompts: list[Prompt], answers: list[list]) -> Tensor:
        """Estimate the KL to the reference from each prompt with the preceding row's answer."""
        last_of_ranks = self.world.gather_objects(answers[-1])
        others = [last_of_ranks[self.world.rank - 1], *answers[:-1]]
        if any(answer.turns for group in others for answer in group):
            raise ValueError(
                "the KL of kto pairs prompts with answers of other rows, but the chat template renders each turn of "
                "an answer after a prompt of its own; set data.train_answers to last"
            )
        size = self.config.micro_batch_size
        sums = []  # whole answers' log-probabilities under policy and reference, (R, 2) per micro-batch
        for start in range(0, len(prompts), size):
            part = slice(start, start + size)
            batch = self.pack(prompts[part], others[part])
            logps, _ = per_token_logps(self.policy, batch.group)
            policy = (batch.group.pad(logps) * batch.loss_mask).sum(1)
            reference = (batch.ref_per_token_logps * batch.loss_mask).sum(1)
            sums.append(torch.stack([policy, reference], 1))
        policy, reference = self.world.all_gather(torch.cat(sums)).split(1, 1)  # (N, 1) each
        return kto_kl(policy, reference, torch.ones_like(policy))

    def loss(self, batch: KTOBatch) -> tuple[Tensor, dict[str, Tensor]]:
        logps, entropies = per_token_logps(self.policy, batch.group)
        loss, metrics = kto_loss(
            batch.group.pad(logps),
            batch.loss_mask,
            batch.labels,
            **loss_arguments(self.config, kto_loss),
            ref_per_token_logps=batch.ref_per_token_logps,
            kl=batch.kl,
            normalizer=batch.normalizer,
        )
        good = batch.labels.float().mean()
        shares = {"rewards/chosen": good, "rewards/rejected": 1 - good}
        for (name, share), share_of_step in zip(shares.items(), batch.shares, strict=True):
            # with these weights, the micro-batches sum to the mean over all good (or bad) answers in the step
            metrics[name] = metrics[name].nan_to_num(0.0) * share / (share_of_step or 1.0)
        return loss, metrics | {"entropy": batch.mean(entropies)}
