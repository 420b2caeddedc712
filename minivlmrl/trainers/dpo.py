"""Direct preference optimization (arXiv 2305.18290), with MPO, IPO and other losses as options."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minivlmrl.config.options import DPOOptions, RunConfig
from minivlmrl.data.rows import Row
from minivlmrl.losses.preference import answer_logps, check_dpo_options, dpo_loss
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.trainers.base import MicroBatch
from minivlmrl.trainers.offline import PairTrainer

# options to pass to dpo_loss and check_dpo_options
LOSS_OPTIONS = (
    "loss_type", "loss_weights", "beta", "label_smoothing", "f_divergence_type", "f_alpha_divergence_coef", "ld_alpha",
)  # fmt: skip


class DPOTrainer(PairTrainer):
    """Trainer for DPO."""

    stage = "dpo"
    config_type = DPOOptions
    options: DPOOptions
    # rows whose tokens are counted: chosen answers (0, 2, 4, ...), for the mean over tokens in an SFT term
    counted_rows = slice(0, None, 2)

    @classmethod
    def check(cls, config: RunConfig):
        options = getattr(config, cls.stage)
        check_dpo_options(**loss_options(options), prefix=f"{cls.stage}.")

    @staticmethod
    def has_reference(options: DPOOptions) -> bool:
        return not (options.reference_free or options.precompute_ref_log_probs)

    def loss(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        group = batch.group
        logps, entropies = per_token_logps(self.policy, group)
        loss, metrics = dpo_loss(
            by_pair(group.pad(logps)),
            by_pair(batch.loss_mask),
            **loss_options(self.options),
            ref_per_token_logps=reference_logps(batch),
            normalizer=batch.normalizer,
        )
        return loss, metrics | {"entropy": batch.mean(entropies)}

    def margins(self, rows: Sequence[Row]) -> Tensor:
        """Compute DPO's implicit reward margins, chosen minus rejected: (pairs,), in nats."""
        batch = self.micro_batch(rows)
        logps, _ = per_token_logps(self.policy, batch.group)
        log_ratio = by_pair(batch.group.pad(logps)) - reference_logps(batch)  # (pairs, 2 answers, tokens) log-ratios
        chosen, rejected = answer_logps(log_ratio, by_pair(batch.loss_mask), self.options.ld_alpha).unbind(1)
        return chosen - rejected


def loss_options(options: DPOOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in LOSS_OPTIONS}


def reference_logps(batch: MicroBatch) -> Tensor:
    """Return reference log-probabilities (pairs, 2, tokens), zeros without a reference model."""
    logps = batch.ref_per_token_logps
    return by_pair(torch.zeros_like(batch.loss_mask) if logps is None else logps)


def by_pair(rows: Tensor) -> Tensor:
    """Reshape (2 * pairs, tokens) to (pairs, 2, tokens), chosen answer first."""
    return rows.unflatten(0, (-1, 2))
