"""Direct preference optimization and its family (arXiv 2305.18290): MPO, IPO and the others are its loss types."""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import fields
from types import SimpleNamespace

import torch
from torch import Tensor
from tqdm import tqdm

from minivlmrl.algorithms.algorithm import Step
from minivlmrl.algorithms.pairs import Pair, PairAlgorithm, PairBatch, learnt_mask
from minivlmrl.algorithms.preference_losses import DPOLoss, dpo_loss
from minivlmrl.algorithms.reference import Reference
from minivlmrl.batch import GroupBatch, pack
from minivlmrl.decoder import Qwen2_5_VL
from minivlmrl.kernels.linear_log_softmax import linear_log_sum_sq_probs
from minivlmrl.logprobs import completion_states, logps_of_states, per_token_logps
from minivlmrl.run.config import RunConfig
from minivlmrl.scale.sharding import reshard


class DPO(PairAlgorithm):
    """Both answers stand in one group: their prompt and its images are computed once.

    With precompute_ref_log_probs all rows that the stage will meet are scored before its first step, by the policy
    itself, which then still is the reference: no second model is kept.
    """

    stage = "dpo"

    @staticmethod
    def check(run: RunConfig):
        config = run.dpo
        try:
            loss_options(config)
        except ValueError as error:
            raise ValueError(f"dpo.{error}") from error
        for name in ("sync_ref_model", "num_shared_layers"):
            if getattr(config, name) and (config.precompute_ref_log_probs or config.reference_free):
                raise ValueError(f"dpo.{name} needs a reference model, which precomputing or reference_free leaves out")
        if config.precompute_ref_log_probs and config.reference_free:
            raise ValueError("dpo.precompute_ref_log_probs: with reference_free there is no reference to score")

    def __init__(self, *args):
        super().__init__(*args)
        self.config = self.run.dpo
        self.precomputed: dict[bytes, Tensor] = {}
        if not self.config.precompute_ref_log_probs and not self.config.reference_free:
            self.reference = Reference(self.model, self.config)

    def begin(self):
        if self.config.precompute_ref_log_probs:
            self.precompute()

    def batches(self) -> Iterator[Step]:
        config = self.config
        for rows in self.rows(config.prompts_per_step):
            pairs = self.pairs(rows)
            chosen_tokens = sum(int(pair.learnt[0].sum()) for pair in pairs)
            counts = self.world.sum(2 * len(pairs), chosen_tokens)
            pieces = self.in_step(config.micro_batch_size, pairs, self.spare_pair())
            yield Step([self.micro_batch(some, counts, idle) for some, idle in pieces])

    def state_dict(self) -> dict:
        return super().state_dict() | {"precomputed": self.precomputed}

    def load_state_dict(self, parts: list[dict]):
        super().load_state_dict(parts)
        for part in parts:  # with another number of ranks this one meets other rows
            self.precomputed |= part["precomputed"]

    def micro_batch(self, pairs: Sequence[Pair], counts: Sequence[float], idle: bool = False) -> PairBatch:
        group = pack([p.prompt for p in pairs], [p.answers for p in pairs], self.model.config, self.world.device)
        ref_per_token_logps = self.ref_logps(pairs, group)
        return PairBatch(group, learnt_mask(pairs, group), *counts, idle, ref_per_token_logps=ref_per_token_logps)

    @torch.no_grad()
    def ref_logps(self, pairs: Sequence[Pair], group: GroupBatch) -> Tensor | None:
        """(R, T) of the reference, from memory where they were precomputed; None without a reference."""
        if self.precomputed:
            known = [self.precomputed.get(key(pair)) for pair in pairs]
            if any(logps is None for logps in known):
                raise ValueError(
                    "dpo.precompute_ref_log_probs: a row was not scored before the first step of this run; "
                    "resume with the rows and dpo.max_steps that it began with"
                )
            return group.pad(torch.cat(known).to(group.input_ids.device))
        if self.reference is None:
            return None
        logps = self.score(self.reference.model, group)
        reshard(self.reference.model)
        return logps

    def score(self, model: Qwen2_5_VL, group: GroupBatch) -> Tensor:
        return group.pad(per_token_logps(model, group)[0])

    @torch.no_grad()
    def precompute(self):
        """Score what this stage will meet, held-out rows included, with the policy as it is now."""
        config = self.config
        steps = itertools.islice(self.numbers(config.prompts_per_step), config.max_steps)
        numbers = sorted(set(itertools.chain.from_iterable(steps)))
        held_out = range(self.world.rank, len(self.held_out or ()), self.world.size)
        places = [(self.dataset, number) for number in numbers] + [(self.held_out, number) for number in held_out]
        bar = tqdm(total=len(places), desc="dpo: reference", disable=not self.world.is_main, dynamic_ncols=True)
        spare = self.spare_pair()
        for some, idle in self.in_step(config.micro_batch_size, places, None):
            rows = [] if idle else [dataset[number] for dataset, number in some]  # images are read as they are needed
            pairs = self.pairs([row for row in rows if row.chosen is not None and row.rejected is not None]) or [spare]
            group = pack([p.prompt for p in pairs], [p.answers for p in pairs], self.model.config, self.world.device)
            logps = group.split(per_token_logps(self.model, group)[0].cpu())
            for pair, two in zip(pairs, zip(logps[::2], logps[1::2], strict=True), strict=True):
                self.precomputed[key(pair)] = torch.cat(two)
            bar.update(len(rows))
        bar.close()
        self.precomputed[key(spare)] = torch.zeros(2)  # also for one rank: more may resume the run
        self.drawn = 0  # looking ahead has used nothing up

    def loss(self, batch: PairBatch) -> tuple[Tensor, dict[str, Tensor]]:
        config, group = self.config, batch.group
        states = completion_states(self.model, group)
        logps, entropies = logps_of_states(self.model, states, group)
        weighting = (
            group.pad(linear_log_sum_sq_probs(states, self.model.lm_head.weight)) if config.use_weighting else None
        )
        loss, metrics = dpo_loss(
            by_pair(group.pad(logps)),
            by_pair(batch.completion_mask),
            loss_options(config),
            ref_per_token_logps=by_pair(batch.ref_per_token_logps),
            log_sum_sq_probs=by_pair(weighting),
            counts=SimpleNamespace(sequences=batch.num_sequences, tokens=batch.num_tokens),
        )
        per_answer = (group.pad(entropies.detach()) * batch.completion_mask).sum(1) / batch.completion_mask.sum(1)
        return loss, {**metrics, "entropy": per_answer.mean()}

    def margins(self, pairs: Sequence[Pair]) -> Tensor:
        """(B,) u - v: how much further the policy has moved towards the chosen answer than towards the rejected one."""
        batch = self.micro_batch(pairs, (2 * len(pairs), 0))
        moved = self.score(self.model, batch.group)
        if batch.ref_per_token_logps is not None:
            moved = moved - batch.ref_per_token_logps
        u, v = (by_pair(moved * batch.completion_mask)).sum(-1).unbind(1)
        return u - v


def loss_options(config) -> DPOLoss:
    return DPOLoss(**{field.name: getattr(config, field.name) for field in fields(DPOLoss)})


def by_pair(rows: Tensor | None) -> Tensor | None:
    """(2B, T) -> (B, 2, T)."""
    return None if rows is None else rows.unflatten(0, (-1, 2))


def key(pair: Pair) -> bytes:
    """What tells a row from others: a digest of its prompt, pixels and answers."""
    digest = hashlib.sha256()
    for part in (pair.prompt.input_ids, pair.prompt.pixel_values, pair.prompt.image_grid_thw, *pair.answers):
        digest.update(str(part.shape).encode() + part.numpy().tobytes())
    return digest.digest()
