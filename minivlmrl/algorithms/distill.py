"""On-policy distillation: the student samples, a teacher scores its completions (arXiv 2306.13649).

The teacher may read a prompt of its own: a larger picture, an uncut one, a hint. It says of every
token how likely each other one was, so no reward is needed; the rewards of a recipe are metrics.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from minivlmrl.adapters.lora import AdapterCopy
from minivlmrl.advantages import combine
from minivlmrl.algorithms.grpo_stage import GRPOStage
from minivlmrl.algorithms.reference import check_online
from minivlmrl.batch import MicroBatch, pack
from minivlmrl.grpo import Rollout
from minivlmrl.hub.checker import load_name
from minivlmrl.kernels.linear_divergence import LinearDivergence
from minivlmrl.logprobs import completion_states
from minivlmrl.rows import Row
from minivlmrl.scale.checkpoint import load_model
from minivlmrl.scale.sharding import reshard


@dataclass
class DistillBatch(MicroBatch):
    teacher_states: Tensor | None = None  # (M, D) before each completion token


class Distill(GRPOStage):
    """GRPO's rollouts, by the section `grpo`; in place of advantages a divergence from the teacher.

    The teacher is a folder, or the reference.
    """

    stage, batch_type, compares_groups = "distill", DistillBatch, False

    @staticmethod
    def check(run):
        if not run.reference.teacher and not run.reference.teacher_prompt:
            raise ValueError("distill needs reference.teacher or reference.teacher_prompt, or both")
        check_online("distill", run, not run.reference.teacher)

    @staticmethod
    def has_reference(config) -> bool:
        return True

    def __init__(self, run, model, processor, world):
        super().__init__(run, model, processor, world)
        name, path = run.reference.teacher_prompt, run.reference.teacher
        self.shown = load_name(name) if name else lambda row: row
        if path is not None:
            self.reference = None
            options = model.lm_head.weight.dtype, world.device, getattr(model, "sharding", None)
            self.teacher = load_model(path, *options).requires_grad_(False)
        else:
            copied = self.reference.model
            self.teacher = model if isinstance(copied, AdapterCopy) else copied
        if self.teacher.config.vocab_size != model.config.vocab_size:
            raise ValueError(f"{path}: this model has another vocabulary than the policy")

    def prepare(self, rollout: Rollout, parts: list[range]) -> list[list[DistillBatch]]:
        rewards = self.world.all_gather(rollout.rewards)
        rollout.metrics = self.metrics(rollout, rewards, combine(rewards, self.reward_weights))
        self.rollout = rollout
        return [self.micro_batches(rollout, part) for part in parts]

    def add_logps(self, batch: DistillBatch):
        """Compute the states of the teacher, after its own prompts and the same completions."""
        G, rollout, rows = self.config.num_generations, self.rollout, batch.completion_index
        groups = [(i, list(own)) for i, own in groupby(rows.tolist(), lambda row: row // G)]
        said = [[rollout.completions[i][row % G] for row in own] for i, own in groups]
        shown = [self.shown(rollout.rows[i]) for i, _ in groups]
        prompts = [Row.prompt(row, self.processor) for row in shown]  # not that of the student
        group = pack(prompts, said, self.teacher.config, self.world.device)
        reshard(self.policy)
        own = self.teacher is self.policy  # the reference is adapters alone
        with self.reference.model.computing() if own else nullcontext(self.teacher) as teacher:
            batch.teacher_states = completion_states(teacher, group)
            if own:
                reshard(teacher)
        batch.advantages = torch.zeros(len(rows), device=self.world.device)

    def loss(self, batch: DistillBatch) -> tuple[Tensor, dict[str, Tensor]]:
        states = completion_states(self.policy, batch.group)
        # after the forward, which has gathered a sharded head
        ours, theirs = self.policy.lm_head.weight, self.teacher.lm_head.weight.detach()
        weights = batch.group.written.to(torch.promote_types(states.dtype, torch.float32))
        options = self.run.reference.teacher_beta, self.sample.sampling.temperature
        given = states, ours, batch.teacher_states, theirs, weights / batch.counts.tokens
        loss, divergences = LinearDivergence.apply(*given, *options)
        return loss, {"divergence": batch.mean(divergences)}
