"""Direct preference optimization (arXiv 2305.18290); MPO, IPO and other losses are options."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from minivlmrl.config.options import DPOOptions
from minivlmrl.data.loader import Batches
from minivlmrl.data.rows import Completion, Dataset, Prompt, Row
from minivlmrl.distributed.weights import reshard
from minivlmrl.files import digest
from minivlmrl.kernels.linear_log_softmax import linear_log_sum_sq_probs
from minivlmrl.losses.preference import answer_logps, dpo_loss
from minivlmrl.model.logprobs import completion_states, logps_of_states, per_token_logps
from minivlmrl.trainers.functions import loss_arguments
from minivlmrl.trainers.offline import AnswerBatch, PairTrainer, split


@dataclass(kw_only=True)
class DPOBatch(AnswerBatch):
    """A micro-batch of pairs, with the reference's log-probability of each whole answer."""

    # (R / 2, 2) log-probabilities of each pair's chosen and rejected answer, in nats
    ref_logps: Tensor


class DPOTrainer(PairTrainer):
    """Trainer for DPO, which trains the policy on pairs of a chosen and a rejected answer.

    The reference model is a copy of the policy at the stage's start, unless the section `reference` names another
    model.
    """

    stage = "dpo"
    config_type = DPOOptions
    config: DPOOptions
    # Even rows are chosen answers. Only chosen tokens are counted, because only the loss `sft` needs the count, and it
    # averages over chosen tokens.
    counted_rows = slice(0, None, 2)

    @staticmethod
    def has_reference(config: DPOOptions) -> bool:
        return not config.precompute_ref_log_probs and not config.reference_free

    def on_stage_begin(
        self, batches: Batches, held_out: Dataset | None, saved_state: dict[str, list[float]] | None
    ) -> dict[str, list[float]]:
        """Compute the log-probabilities of all pairs under the reference, if the recipe asks for this in advance.

        Returns:
            {pair_key: log-probabilities of the chosen and the rejected answer}.
        """
        self.precomputed = saved_state or {}
        if saved_state is None and self.config.precompute_ref_log_probs:
            self.precompute_ref_logps(batches.dataset, batches.row)
            if held_out is not None:
                self.precompute_ref_logps(held_out, held_out.__getitem__)
        return self.precomputed

    @torch.no_grad()
    def precompute_ref_logps(self, rows: Dataset, make_row: Callable[[int], Row]):
        """Compute the log-probabilities of all pairs in a dataset with the policy, which still equals the reference."""
        local_indices, _ = self.shard_rows_with_answers(rows)
        parts = split(local_indices, self.config.micro_batch_size)
        ref_logps = {}
        for part in tqdm(parts, "reference", disable=None if self.world.is_main else True):
            self.world.stop_if_preempted()
            prompts, answers = self.encode([make_row(index) for index in part])
            batch = super().pack(prompts, answers)
            logps, _ = per_token_logps(self.policy, batch.group)
            sums = self.sum_logps(batch.loss_mask, batch.group.pad(logps)).tolist()
            ref_logps.update(zip(map(pair_key, prompts, answers), sums, strict=True))
        reshard(self.policy)
        for logps_of_rank in self.world.gather_objects(ref_logps):
            self.precomputed.update(logps_of_rank)

    def pack(self, prompts: Sequence[Prompt], answers: Sequence[list[Completion]]) -> DPOBatch:
        batch = super().pack(prompts, answers)
        if batch.ref_per_token_logps is not None:
            ref_logps = self.sum_logps(batch.loss_mask, batch.ref_per_token_logps)
        elif self.config.precompute_ref_log_probs:
            known = [self.known_ref_logps(*pair) for pair in zip(prompts, answers, strict=True)]
            ref_logps = torch.tensor(known, dtype=torch.float64, device=self.world.device)
        else:  # the loss is reference-free
            ref_logps = torch.zeros(len(prompts), 2, dtype=torch.float64, device=self.world.device)
        return DPOBatch(**vars(batch), ref_logps=ref_logps)

    def known_ref_logps(self, prompt: Prompt, pair: list[Completion]) -> list[float]:
        """Return a pair's log-probabilities from precompute_ref_logps."""
        values = self.precomputed.get(pair_key(prompt, pair))
        if values is None:
            where = prompt.row.where if prompt.row else "prompt without a row"
            raise ValueError(
                f"{where}: the reference's log-probabilities of this pair were not precomputed when the stage began; "
                "resume the run with the same rows"
            )
        return values

    def sum_logps(self, mask: Tensor, per_token_logps: Tensor) -> Tensor:
        """Sum log-probabilities (R, T) over each answer's tokens, and return (R / 2, 2)."""
        return answer_logps(by_pair(per_token_logps), by_pair(mask), self.config.ld_alpha)

    def loss(self, batch: DPOBatch) -> tuple[Tensor, dict[str, Tensor]]:
        group = batch.group
        states = completion_states(self.policy, group)
        logps, entropies = logps_of_states(self.policy, states, group)
        log_sum_sq_probs = None
        if self.config.use_weighting:
            flat = linear_log_sum_sq_probs(states, self.policy.lm_head.weight)  # (M,)
            log_sum_sq_probs = by_pair(group.pad(flat))
        loss, metrics = dpo_loss(
            by_pair(group.pad(logps)),
            by_pair(batch.loss_mask),
            **loss_arguments(self.config, dpo_loss),
            ref_logps=batch.ref_logps.to(logps.dtype),
            log_sum_sq_probs=log_sum_sq_probs,
            normalizer=batch.normalizer,
        )
        return loss, metrics | {"entropy": batch.mean(entropies)}

    def margins(self, rows: Sequence[Row]) -> Tensor:
        """Compute each pair's implicit reward margin, (B,), in nats."""
        batch = self.pack(*self.encode(rows))
        logps, _ = per_token_logps(self.policy, batch.group)
        log_ratio = self.sum_logps(batch.loss_mask, batch.group.pad(logps)) - batch.ref_logps
        return log_ratio[:, 0] - log_ratio[:, 1]


def by_pair(rows: Tensor) -> Tensor:
    """Reshape the rows of 2B answers, (2B, T), to B pairs, (B, 2, T); chosen answers come first."""
    return rows.unflatten(0, (-1, 2))


def pair_key(prompt: Prompt, answers: list[Completion]) -> str:
    """Hash a pair's token ids, its images and the image sizes."""
    tensors = [prompt.input_ids, prompt.pixel_values, prompt.image_grid_thw]
    tensors += [answer.ids for answer in answers]
    # The pixels are viewed as bytes, because numpy has no bfloat16.
    return digest(tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors)
