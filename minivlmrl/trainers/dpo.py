"""Direct preference optimization (arXiv 2305.18290); MPO, IPO and others are its loss types."""

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
from minivlmrl.trainers.offline import AnswerBatch, PairTrainer, split

# columns of a row with what the reference says of its answers: sums of log-probabilities, in nats
REF_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")


@dataclass(kw_only=True)
class DPOBatch(AnswerBatch):
    """Pairs, with what the reference says of each answer as a whole."""

    ref_logps: Tensor  # (R / 2, 2) nats: answer_logps by the reference


class DPOTrainer(PairTrainer):
    """Pairs of answers, held against the policy as the stage found it."""

    stage = "dpo"
    config_type = DPOOptions
    config: DPOOptions
    counted = slice(0, None, 2)  # the chosen ones: `sft` is a mean over their tokens

    @staticmethod
    def has_reference(config: DPOOptions) -> bool:
        return not config.precompute_ref_log_probs and not config.reference_free

    def begin(
        self, batches: Batches, held_out: Dataset | None, kept: dict[str, list[float]] | None
    ) -> dict[str, list[float]]:
        """Score all pairs, unless a resumed run has done so."""
        self.precomputed = kept or {}  # pair_key: ref_logps of the pair
        if kept is None and self.config.precompute_ref_log_probs:
            self.score(batches.dataset, batches.row)
            if held_out is not None:
                self.score(held_out, held_out.__getitem__)
        return self.precomputed

    @torch.no_grad()
    def score(self, rows: Dataset, make_row: Callable[[int], Row]):
        """Let the policy, which is the reference before its first step, score rows, on all ranks.

        Rows that bring their scores are left out.
        """
        unscored = [index for index in self.answered(rows) if self.brought(rows[index]) is None]
        share, _ = self.world.shard_evenly(unscored)
        parts = split(share, self.config.micro_batch_size)
        scores = {}
        for part in tqdm(parts, "reference", disable=None if self.world.is_main else True):
            self.world.stop_if_preempted()
            prompts, answers = self.encode([make_row(index) for index in part])
            batch = super().pack(prompts, answers)
            logps, _ = per_token_logps(self.policy, batch.group)
            sums = self.summed(batch.loss_mask, batch.group.pad(logps)).tolist()
            scores.update(zip(map(pair_key, prompts, answers), sums, strict=True))
        reshard(self.policy)
        for rank_scores in self.world.gather_objects(scores):
            self.precomputed.update(rank_scores)

    def brought(self, row: Row) -> list[float] | None:
        """Read the ref_logps that a row brings (ValueError: this recipe cannot use them)."""
        values = [row.columns[name] for name in REF_COLUMNS if row.columns.get(name) is not None]
        if not values:
            return None
        config = self.config
        if len(values) < 2 or not config.precompute_ref_log_probs or config.ld_alpha is not None:
            raise ValueError(
                f"{row.where}: {' and '.join(REF_COLUMNS)} are sums over whole answers, for "
                "dpo.precompute_ref_log_probs=true without dpo.ld_alpha: give both, or leave both out"
            )
        return values

    def pack(self, prompts: Sequence[Prompt], answers: Sequence[list[Completion]]) -> DPOBatch:
        batch = super().pack(prompts, answers)
        scores = [self.ref_logps(*pair) for pair in zip(prompts, answers, strict=True)]
        ref_logps = torch.tensor(scores, dtype=torch.float64, device=self.world.device)
        if batch.ref_per_token_logps is not None:
            ref_logps = self.summed(batch.loss_mask, batch.ref_per_token_logps)
        return DPOBatch(
            batch.group, batch.loss_mask, batch.ref_per_token_logps, ref_logps=ref_logps
        )

    def ref_logps(self, prompt: Prompt, pair: list[Completion]) -> list[float]:
        """Find the ref_logps that a row brings or that `score` computed; 0 without either."""
        values = self.brought(prompt.row) if prompt.row else None  # made without its row
        if values is None and self.config.precompute_ref_log_probs:
            values = self.precomputed.get(pair_key(prompt, pair))
            if values is None:
                where = prompt.row.where if prompt.row else "a prompt"
                raise ValueError(
                    f"{where}: dpo.precompute_ref_log_probs: not scored before the "
                    "first step: resume with the rows that the run began with"
                )
        return values or [0.0, 0.0]

    def summed(self, mask: Tensor, per_token_logps: Tensor) -> Tensor:
        """Sum (R, T) log-probabilities over each answer: (R / 2, 2)."""
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
            self.config,
            ref_logps=batch.ref_logps.to(logps.dtype),
            log_sum_sq_probs=log_sum_sq_probs,
            normalizer=batch.normalizer,
        )
        return loss, metrics | {"entropy": batch.mean(entropies)}

    def margins(self, rows: Sequence[Row]) -> Tensor:
        """Measure by how many nats the policy moved further to the chosen answers, (B,)."""
        batch = self.pack(*self.encode(rows))
        logps, _ = per_token_logps(self.policy, batch.group)
        log_ratio = self.summed(batch.loss_mask, batch.group.pad(logps)) - batch.ref_logps
        return log_ratio[:, 0] - log_ratio[:, 1]


def by_pair(rows: Tensor) -> Tensor:
    """(2B, T) -> (B, 2, T)."""
    return rows.unflatten(0, (-1, 2))


def pair_key(prompt: Prompt, answers: list[Completion]) -> str:
    """Tell a pair from all others: a hash of its tokens, and of its pictures and their sizes."""
    tensors = [prompt.input_ids, prompt.pixel_values, prompt.image_grid_thw]
    tensors += [answer.ids for answer in answers]
    return digest(tensor.numpy().tobytes() for tensor in tensors)
