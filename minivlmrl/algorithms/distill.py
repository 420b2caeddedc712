"""On-policy distillation: the student samples, a teacher scores its completions (arXiv 2306.13649).

The teacher may read a prompt of its own: a larger picture, an uncut one, a hint. At every position
it gives the distribution of the next token, so no reward is needed; a recipe's are metrics.
"""

from dataclasses import dataclass
from itertools import chain
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from minivlmrl.adapters.lora import AdapterCopy
from minivlmrl.advantages import combine
from minivlmrl.algorithms.grpo_stage import GRPOStage
from minivlmrl.algorithms.reference import computing
from minivlmrl.batch import MicroBatch, pack
from minivlmrl.grpo import Rollout
from minivlmrl.hub.code_names import load_name
from minivlmrl.hub.folder import find_folder
from minivlmrl.hub.recipe_values import Code, FilePath, require
from minivlmrl.hub.tokenizer import load_tokenizer
from minivlmrl.kernels.linear_divergence import LinearDivergence
from minivlmrl.logprobs import completion_states
from minivlmrl.reward_functions.names import guarded
from minivlmrl.rows import Row
from minivlmrl.scale.checkpoint import load_model


@dataclass
class TeacherSection:
    """The section `reference`: who teaches in the stage distill."""

    teacher: FilePath | None = None  # the folder of a model; None: the policy as the stage found it
    teacher_prompt: Code | None = None  # "file.py:function", what the teacher sees of a Row
    teacher_beta: Annotated[float, "[0, 1]"] = 0.5  # 0: KL(teacher || student), 1: the other one


@dataclass
class DistillBatch(MicroBatch):
    teacher_states: Tensor | None = None  # (M, D) before each completion token


class Distill(GRPOStage):
    """GRPO's rollouts, by the section `grpo`; in place of advantages a divergence from the teacher.

    The teacher is a folder, or the reference.
    """

    stage, batch_type, compares_groups = "distill", DistillBatch, False

    @classmethod
    def check(cls, run):
        if not run.reference.teacher and not run.reference.teacher_prompt:
            raise ValueError("distill needs reference.teacher or reference.teacher_prompt, or both")
        super().check(run)

    @staticmethod
    def has_reference(config) -> bool:
        return True

    def __init__(self, run, model, processor, world):
        super().__init__(run, model, processor, world)
        name, self.path = run.reference.teacher_prompt, run.reference.teacher
        self.shown = load_name(name) if name else lambda row: row
        self.computed = self.reference.model
        if self.path is not None:
            self.reference, path = None, self.path
            options = model.lm_head.weight.dtype, world.device, getattr(model, "sharding", None)
            self.computed = load_model(path, *options).requires_grad_(False)
            ours = processor.tokenizer.backend.get_vocab()
            theirs = load_tokenizer(find_folder(path) / "tokenizer.json").backend.get_vocab()
            if others := [text for text in ours if theirs.get(text) != ours[text]]:
                cause = f"{len(others)} tokens of the student are others here"
                cure = f"such as {others[0]!r}; a teacher has the student's tokenizer"
                raise ValueError(f"{path}: {cause}, {cure}")
            size, least = self.computed.config.vocab_size, model.config.vocab_size
            require(size >= least, f"{path}: vocab_size", size, f"the student's {least} or more")
        self.teacher = model if isinstance(self.computed, AdapterCopy) else self.computed

    def prepare(self, rollout: Rollout, parts: list[range]) -> list[list[DistillBatch]]:
        rewards = self.world.all_gather(rollout.rewards)
        rollout.metrics = self.metrics(rollout, rewards, combine(rewards, self.reward_weights))
        steps = [self.micro_batches(rollout, part) for part in parts]
        for batch in chain(*steps):
            self.ask_teacher(batch, rollout)
        return steps

    def add_logps(self, batch: DistillBatch):
        """Add none: the divergence is of distributions, not of drawn tokens."""

    @torch.no_grad()
    def ask_teacher(self, batch: DistillBatch, rollout: Rollout):
        """Compute the states of the teacher, after its own prompts and the same completions."""
        G = self.config.num_generations
        rows = batch.completion_index.tolist()
        asked = dict.fromkeys(row // G for row in rows)
        completions = [
            [rollout.completions[i][row % G] for row in rows if row // G == i] for i in asked
        ]
        rows_shown = [guarded("teacher_prompt", self.shown, rollout.rows[i]) for i in asked]
        for row in rows_shown:
            require(isinstance(row, Row), "what teacher_prompt returns", row, "a Row")
        prompts = [Row.prompt(row, self.processor) for row in rows_shown]  # not the student's
        group = pack(prompts, completions, self.teacher.config, self.world.device)
        with computing(self.computed, self.policy) as teacher:
            batch.teacher_states = completion_states(teacher, group)
            logits = F.linear(batch.teacher_states[:1], teacher.lm_head.weight)
        if not (batch.teacher_states.isfinite().all() and logits.isfinite().all()):
            raise ValueError(f"reference.teacher: {self.path} computes numbers that are not finite")
        batch.advantages = torch.zeros(len(rows), device=self.world.device)

    def loss(self, batch: DistillBatch) -> tuple[Tensor, dict[str, Tensor]]:
        states = completion_states(self.policy, batch.group)
        # after the forward, which has gathered a sharded head
        ours = self.policy.lm_head.weight
        theirs = self.teacher.lm_head.weight.detach()
        theirs = theirs[: len(ours)]  # rows after these have no token
        weights = batch.group.written.to(torch.promote_types(states.dtype, torch.float32))
        options = self.run.reference.teacher_beta, self.sample.sampling.temperature
        tensors = states, ours, batch.teacher_states, theirs, weights / batch.counts.tokens
        loss, divergences = LinearDivergence.apply(*tensors, *options)
        return loss, {"divergence": batch.mean(divergences)}
