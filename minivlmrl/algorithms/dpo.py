"""Direct preference optimization (arXiv 2305.18290); MPO, IPO and others are its loss types."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from tqdm import tqdm

from minivlmrl.algorithms.answers import (
    AnswerBatch,
    PairAlgorithm,
    equal_share,
    pieces,
    with_answers,
)
from minivlmrl.algorithms.base import TrainingConfig
from minivlmrl.algorithms.reference import Reference
from minivlmrl.data.mix import shuffled
from minivlmrl.kernels.linear_log_softmax import linear_log_sum_sq_probs
from minivlmrl.logprobs import completion_states, logps_of_states, per_token_logps
from minivlmrl.losses import row_mean
from minivlmrl.objectives.preference_losses import DPOLoss, dpo_loss
from minivlmrl.rows import Dataset, Row


@dataclass
class DPOConfig(DPOLoss, TrainingConfig):
    """Preference losses on pairs."""

    # score all rows before the first step; then no reference is kept in memory
    precompute_ref_log_probs: bool = False


class DPO(PairAlgorithm):
    """With precompute_ref_log_probs the policy, before its first step, is its own reference."""

    stage, counted = "dpo", slice(0, None, 2)  # chosen tokens

    @staticmethod
    def check(run):
        config = run.dpo
        for name in ("sync_ref_model", "num_shared_layers"):
            if getattr(run.reference, name) and config.precompute_ref_log_probs:
                without = "dpo leaves out with precompute_ref_log_probs"
                raise ValueError(f"reference.{name} needs a reference model, which {without}")

    @staticmethod
    def has_reference(config) -> bool:
        return not config.precompute_ref_log_probs

    def __init__(self, *args):
        super().__init__(*args)
        # dataset -> index of a row -> log-probabilities of both answers
        self.precomputed: dict[str, dict[int, Tensor]] = {"train": {}, "held_out": {}}
        if self.has_reference(self.config):
            self.reference = Reference(self.policy, self.run.reference)

    def begin(self, batches, held_out: Dataset | None):
        if self.config.precompute_ref_log_probs:
            order = shuffled(len(batches.dataset), self.config.prompts_per_step, self.run.seed)
            met = set(itertools.chain(*itertools.islice(order, self.config.max_steps)))
            self.precomputed["train"] = self.precompute(lambda i: batches.row(i, ""), sorted(met))
            if held_out is not None:
                indices = with_answers(held_out, self.world)
                self.precomputed["held_out"] = self.precompute(
                    lambda i: replace(held_out[i], index=i), indices
                )

    @torch.no_grad()
    def precompute(self, row: Callable[[int], Row], indices: list[int]) -> dict[int, Tensor]:
        """Score rows with the policy as it is now: index -> log-probabilities of both answers."""
        own = {}
        share = pieces(equal_share(indices, self.world), self.config.micro_batch_size)
        hidden = not self.world.is_main
        for piece in tqdm(share, desc="dpo: reference", disable=hidden, dynamic_ncols=True):
            self.world.leave()
            rows = [row(index) for index in piece]
            group = super().micro_batch(rows).group  # images of one piece
            logps = group.split(per_token_logps(self.policy, group)[0].cpu())
            own |= {row.index: torch.cat(logps[2 * i : 2 * i + 2]) for i, row in enumerate(rows)}
        return dict(pair for part in self.world.gather_objects(own) for pair in part.items())

    def micro_batch(self, rows: Sequence[Row], dataset: str = "train") -> AnswerBatch:
        batch = super().micro_batch(rows)
        if self.config.precompute_ref_log_probs:
            known = [self.precomputed[dataset].get(row.index) for row in rows]
            if any(logps is None for logps in known):
                cause = "a row was not scored before the first step"
                cure = "resume with the rows and dpo.max_steps that this run began with"
                raise ValueError(f"dpo.precompute_ref_log_probs: {cause}; {cure}")
            batch.ref_per_token_logps = batch.group.pad(torch.cat(known).to(self.world.device))
        return batch

    def loss(self, batch: AnswerBatch) -> tuple[Tensor, dict[str, Tensor]]:
        group, mask = batch.group, batch.loss_mask
        states = completion_states(self.policy, group)
        logps, entropies = logps_of_states(self.policy, states, group)
        fixed = {"ref_per_token_logps": by_pair(batch.ref_per_token_logps), "counts": batch.counts}
        if self.config.use_weighting:
            log_sum_sq_probs = linear_log_sum_sq_probs(states, self.policy.lm_head.weight)
            fixed["log_sum_sq_probs"] = by_pair(group.pad(log_sum_sq_probs))
        loss, metrics = dpo_loss(by_pair(group.pad(logps)), by_pair(mask), self.config, **fixed)
        return loss, metrics | {"entropy": row_mean(group.pad(entropies.detach()), mask).mean()}

    def margins(self, rows: Sequence[Row]) -> Tensor:
        """How much further the policy has moved towards the chosen answers than the others."""
        batch = self.micro_batch(rows, "held_out")
        moved = batch.group.pad(per_token_logps(self.policy, batch.group)[0])
        moved = (moved - batch.ref_per_token_logps) * batch.loss_mask
        u, v = by_pair(moved).sum(-1).unbind(1)
        return u - v

    def state_dict(self) -> dict[str, Tensor]:
        state = {}
        for name, known in self.precomputed.items():
            if known:
                lengths = [[index, len(logps)] for index, logps in known.items()]
                state[f"{name}/lengths"] = torch.tensor(lengths)
                state[f"{name}/logps"] = torch.cat(list(known.values()))
        return state

    def load_state_dict(self, state: dict[str, Tensor]):
        for name in ("train", "held_out"):
            if f"{name}/lengths" in state:
                indices, lengths = state[f"{name}/lengths"].unbind(1)
                logps = state[f"{name}/logps"].split(lengths.tolist())
                self.precomputed[name] = dict(zip(indices.tolist(), logps, strict=True))


def by_pair(rows: Tensor | None) -> Tensor | None:
    """(2B, T) -> (B, 2, T)."""
    return None if rows is None else rows.unflatten(0, (-1, 2))
