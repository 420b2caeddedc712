"""On-policy distillation: the student samples, a teacher scores its completions (arXiv 2306.13649).

The teacher may read a prompt of its own: a larger picture, an uncut one, a hint. At every position
it gives the distribution of the next token, so no reward is needed; a recipe's are metrics.
"""

from dataclasses import dataclass
from itertools import chain
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivlmrl.adapters.lora import ParameterCopy
from minivlmrl.advantages import combine
from minivlmrl.algorithms.grpo_stage import GRPOStage
from minivlmrl.algorithms.reference import computing, load_frozen
from minivlmrl.batch import MicroBatch, pack
from minivlmrl.grpo import Rollout
from minivlmrl.hub.code_names import load_name
from minivlmrl.hub.recipe_values import Code, FilePath, require
from minivlmrl.kernels.linear_divergence import LinearDivergence
from minivlmrl.logprobs import completion_states
from minivlmrl.reward_functions.names import guarded
from minivlmrl.rows import Processor, Prompt, Row


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

    stage = "distill"
    batch_type = DistillBatch
    compares_groups = False

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
        self.show = lambda row: row
        if run.reference.teacher_prompt:
            self.show = load_name(run.reference.teacher_prompt)
        self.teacher = self.reference.model
        if run.reference.teacher is not None:
            self.teacher = load_teacher(run.reference.teacher, model, processor, world)
            self.reference = None
        # whose config and head the teacher has: copied adapters compute on the policy's
        self.teacher_base = model if isinstance(self.teacher, ParameterCopy) else self.teacher

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
        completions = rollout.by_prompt(batch.completion_index.tolist())
        prompts = [self.teacher_prompt(rollout.rows[index]) for index in completions]
        config = self.teacher_base.config
        group = pack(prompts, list(completions.values()), config, self.world.device)
        with computing(self.teacher, self.policy) as teacher:
            states = completion_states(teacher, group)
            logits = F.linear(states[:1], teacher.lm_head.weight)
        if not (states.isfinite().all() and logits.isfinite().all()):
            path = self.run.reference.teacher
            raise ValueError(f"reference.teacher: {path} computes numbers that are not finite")
        batch.teacher_states = states
        batch.advantages = torch.zeros(len(batch.completion_index), device=self.world.device)

    def teacher_prompt(self, row: Row) -> Prompt:
        """Make the prompt that the teacher reads of a row."""
        shown = guarded("teacher_prompt", self.show, row)
        require(isinstance(shown, Row), "what teacher_prompt returns", shown, "a Row")
        return Row.prompt(shown, self.processor)  # not the student's

    def loss(self, batch: DistillBatch) -> tuple[Tensor, dict[str, Tensor]]:
        states = completion_states(self.policy, batch.group)
        # after the forward, which has gathered a sharded head
        head = self.policy.lm_head.weight
        # the teacher's may have more rows: they are of no token
        teacher_head = self.teacher_base.lm_head.weight.detach()[: len(head)]
        weights = batch.group.written.to(torch.promote_types(states.dtype, torch.float32))
        loss, divergences = LinearDivergence.apply(
            states,
            head,
            batch.teacher_states,
            teacher_head,
            weights / batch.counts.tokens,
            self.run.reference.teacher_beta,
            self.temperature,
        )
        return loss, {"divergence": batch.mean(divergences)}


def load_teacher(path: str, student: nn.Module, processor: Processor, world) -> nn.Module:
    """Load a model with a row of its head for each of the student's (ValueError: it has fewer)."""
    teacher = load_frozen(path, student, processor, world)
    size = teacher.config.vocab_size
    student_size = student.config.vocab_size
    require(
        size >= student_size, f"{path}: vocab_size", size, f"the student's {student_size} or more"
    )
    return teacher
