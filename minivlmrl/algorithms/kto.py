"""KTO (arXiv 2402.01306): learn from single answers with a label, good or bad, instead of pairs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minivlmrl.algorithms.answers import AnswerAlgorithm, AnswerBatch, pieces
from minivlmrl.algorithms.base import TrainingConfig
from minivlmrl.batch import Step
from minivlmrl.logprobs import per_token_logps
from minivlmrl.objectives.preference_losses import KTOLoss, kto_kl, kto_loss
from minivlmrl.rows import Prompt, Row


@dataclass
class KTOConfig(KTOLoss, TrainingConfig):
    """KTO on single answers with a label."""


@dataclass
class KTOBatch(AnswerBatch):
    labels: Tensor | None = None  # (R,) bool, True for good
    shares: tuple[float, float] = (1.0, 1.0)  # of good and of bad answers in the whole step
    kl: Tensor | None = None  # of the whole step


class KTO(AnswerAlgorithm):
    """Rows with a completion and a boolean column `label`.

    kto_loss's KL is of prompts with the answers of rows before, as in TRL, but over a whole step.
    """

    stage, needs, batch_type = "kto", "labels", KTOBatch

    @staticmethod
    def check(run):
        if run.kto.loss_type == "kto" and run.kto.prompts_per_step < 2:
            raise ValueError("kto.prompts_per_step is 1, it must be 2 or more, for the KL")

    @staticmethod
    def has_reference(config) -> bool:
        return True

    def steps(self, batches: Iterator[Sequence[Row]]) -> Iterator[Step]:
        for rows in batches:
            labels = torch.tensor([row.columns["label"] for row in rows])
            packed = []
            total, good = self.world.sum(len(rows), int(labels.sum()))
            prompts, answers = self.encode(rows)
            kl = self.measure_kl(prompts, answers) if self.config.loss_type == "kto" else None
            size = self.config.micro_batch_size
            parts = (pieces(items, size) for items in (prompts, answers, labels))
            for *encoded, marks in zip(*parts, strict=True):
                batch = self.pack(*encoded)
                batch.labels = marks.to(self.world.device)
                batch.kl = kl
                batch.shares = good / total, 1 - good / total
                packed.append(batch)
            yield self.step(packed)

    @torch.no_grad()
    def measure_kl(self, prompts: list[Prompt], answers: list[list]) -> Tensor:
        """Estimate the KL to the reference on prompts with the answer of the row before each."""
        last = self.world.gather_objects(answers[-1])
        others = [last[self.world.rank - 1], *answers[:-1]]
        # of whole answers, of policy and reference
        size = self.config.micro_batch_size
        logps = []
        for part in zip(pieces(prompts, size), pieces(others, size), strict=True):
            batch = self.pack(*part)
            policy = batch.group.pad(per_token_logps(self.policy, batch.group)[0])
            both = [(x * batch.loss_mask).sum(1) for x in (policy, batch.ref_per_token_logps)]
            logps.append(torch.stack(both, 1))
        policy, ref = self.world.all_gather(torch.cat(logps)).split(1, 1)  # (N, 1) each
        return kto_kl(policy, ref, torch.ones_like(policy))

    def loss(self, batch: KTOBatch) -> tuple[Tensor, dict[str, Tensor]]:
        logps, entropies = per_token_logps(self.policy, batch.group)
        loss, metrics = kto_loss(
            *(batch.group.pad(logps), batch.loss_mask, batch.labels, self.config),
            ref_per_token_logps=batch.ref_per_token_logps,
            kl=batch.kl,
            counts=batch.counts,
        )
        good = batch.labels.float().mean()
        shares = {"chosen": good, "rejected": 1 - good}
        for (name, here), in_step in zip(shares.items(), batch.shares, strict=True):
            # so weighed these add up to the mean over all good, or bad, answers of the step
            mean = metrics[f"rewards/{name}"].nan_to_num(0.0)
            metrics[f"rewards/{name}"] = mean * here / in_step if in_step else mean
        return loss, metrics | {"entropy": batch.mean(entropies)}
