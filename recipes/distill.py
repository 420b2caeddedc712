"""On-policy distillation: the student samples, a teacher scores its completions (arXiv 2306.13649).

The teacher may read a prompt of its own: a larger picture, an uncut one, a hint. At every position
it gives the distribution of the next token, so no reward is needed; a recipe's are metrics.

In a recipe beside this file, as shapes_distill.yaml:
    stages: [sft, distill.py:Distill]
    distill: {max_steps: 200, teacher_prompt: distill.py:uncut}

Derivation. With p = softmax(h W^T / T) of the student, q of the teacher and m = b q + (1 - b) p:

    b = 0  D = KL(q || p)                         dD/dz = (p - q) / T
    b = 1  D = KL(p || q)                         dD/dz = p (log p - log q - D) / T
    else   D = b KL(q || m) + (1 - b) KL(p || m)  dD/dz = (1 - b) p (log p - log m - KL(p || m)) / T
"""

import copy
import math
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivlmrl.config.import_utils import call_user_code, load_name
from minivlmrl.config.options import TrainingOptions
from minivlmrl.config.parsing import check_field
from minivlmrl.config.types import Code, FilePath
from minivlmrl.data.download import find_folder
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Prompt, Row
from minivlmrl.kernels.float32_matmul import float32_matmul
from minivlmrl.kernels.linear_log_softmax import accumulate_, rows_per_piece
from minivlmrl.losses.advantages import combine
from minivlmrl.model.logprobs import completion_states
from minivlmrl.model.packing import pack
from minivlmrl.trainers.base import Rollout, SampledBatch
from minivlmrl.trainers.grpo import GRPOTrainer, check_rollout_options
from minivlmrl.trainers.reference import SwappedParameters, load_frozen, swapped_in


@dataclass
class DistillConfig(TrainingOptions):
    """On-policy distillation; its rollouts are GRPO's."""

    num_generations: Annotated[int, ">= 1"] = 8  # completions of each prompt
    steps_per_generation: Annotated[int, ">= 1"] = 1  # optimizer steps with prompts of one rollout
    num_iterations: Annotated[int, ">= 1"] = 1  # passes over each rollout
    # tokens of one forward and backward, prompts once. None: any number
    max_tokens_per_micro_batch: Annotated[int, ">= 1"] | None = None
    teacher: FilePath | None = None  # the folder of a model; None: the policy as the stage found it
    teacher_prompt: Code | None = None  # "file.py:function", what the teacher sees of a Row
    teacher_beta: Annotated[float, "[0, 1]"] = 0.5  # 0: KL(teacher || student), 1: the other one

    max_num_gen_batches = 1  # no option: GRPO samples groups of equal rewards again if it is over 1


@dataclass(kw_only=True)
class DistillBatch(SampledBatch):
    teacher_states: Tensor = field(init=False)  # (M, D) before each completion token


class Distill(GRPOTrainer):
    """GRPO's rollouts; in place of advantages a divergence from the teacher.

    The teacher is a folder, or the reference.
    """

    stage = "distill"
    config_type = DistillConfig
    compares_groups = False

    @classmethod
    def check(cls, run):
        if not run.distill.teacher and not run.distill.teacher_prompt:
            raise ValueError("distill needs distill.teacher or distill.teacher_prompt, or both")
        if run.distill.teacher:
            find_folder(run.distill.teacher)  # refused now, not after the stages before
        check_rollout_options(run, cls.stage)

    @staticmethod
    def has_reference(config) -> bool:
        return True

    def __init__(self, run, model, processor, world, steps_done=0):
        super().__init__(run, model, processor, world, steps_done)
        self.show = lambda row: row
        if self.config.teacher_prompt:
            self.show = load_name(self.config.teacher_prompt)
        self.teacher = self.reference.model
        if self.config.teacher is not None:
            self.teacher = load_teacher(self.config.teacher, model, processor, world)
            self.reference = None
        # whose config and head the teacher has: copied adapters compute on the policy's
        self.teacher_base = model if isinstance(self.teacher, SwappedParameters) else self.teacher

    def prepare(self, rollout: Rollout, parts: list[range]) -> list[list[DistillBatch]]:
        rewards = self.world.all_gather(rollout.rewards)
        rollout.metrics = self.rollout_metrics(rollout, rewards, combine(rewards, self.reward_weights))
        steps = [self.pack_part(rollout, part, DistillBatch) for part in parts]
        for batch in chain(*steps):
            self.ask_teacher(batch, rollout)
        return steps

    @torch.no_grad()
    def ask_teacher(self, batch: DistillBatch, rollout: Rollout):
        """Compute the states of the teacher, after its own prompts and the same completions."""
        completions = rollout.by_prompt(batch.completion_index.tolist())
        prompts = [self.teacher_prompt(rollout.rows[index]) for index in completions]
        config = self.teacher_base.config
        group = pack(prompts, list(completions.values()), config, self.world.device)
        with swapped_in(self.teacher, self.policy) as teacher:
            states = completion_states(teacher, group)
            logits = F.linear(states[:1], teacher.lm_head.weight)
        if not (states.isfinite().all() and logits.isfinite().all()):
            path = self.config.teacher
            raise ValueError(f"distill.teacher: {path} computes numbers that are not finite")
        batch.teacher_states = states
        batch.advantages = torch.zeros(len(batch.completion_index), device=self.world.device)

    def teacher_prompt(self, row: Row) -> Prompt:
        """Make the prompt that the teacher reads of a row."""
        shown = call_user_code("teacher_prompt", self.show, row)
        check_field(isinstance(shown, Row), "what teacher_prompt returns", shown, "a Row")
        return Row.prompt(shown, self.processor)  # not the student's

    def loss(self, batch: DistillBatch) -> tuple[Tensor, dict[str, Tensor]]:
        states = completion_states(self.policy, batch.group)
        # after the forward, which has gathered a sharded head
        head = self.policy.lm_head.weight
        # the teacher's may have more rows: they are of no token
        teacher_head = self.teacher_base.lm_head.weight.detach()[: len(head)]
        weights = batch.group.policy_mask.to(torch.promote_types(states.dtype, torch.float32))
        loss, divergences = LinearDivergence.apply(
            states,
            head,
            batch.teacher_states,
            teacher_head,
            weights / batch.normalizer.tokens,
            self.config.teacher_beta,
            self.temperature,
        )
        return loss, {"divergence": batch.mean(divergences)}


def uncut(row: Row) -> Row:
    """Show the teacher the whole picture, a `teacher_prompt`: data.max_pixels is for the student."""
    messages = copy.deepcopy(row.messages)
    messages[-1]["content"][0]["max_pixels"] = 1003520
    return replace(row, messages=messages)


def load_teacher(path: str, student: nn.Module, processor: Processor, world) -> nn.Module:
    """Load a model with a row of its head for each of the student's (ValueError: it has fewer)."""
    teacher = load_frozen(path, student, processor, world)
    size = teacher.config.vocab_size
    student_size = student.config.vocab_size
    check_field(size >= student_size, f"{path}: vocab_size", size, f"the student's {student_size} or more")
    return teacher


class LinearDivergence(torch.autograd.Function):
    """Weighted sum of divergences, differentiable in the student, and each of them (M,), in nats.

    apply() takes the student's states h (M, D) and head w (V, D), those of the teacher, whose D may
    be another, weights (M,) in float32 (float64 of float64), b and the temperature. A few rows at a
    time are multiplied, with their gradient at once.

    Source: TRL's GKDTrainer.generalized_jsd_loss; arXiv 2306.13649 eq. 1.
    """

    @staticmethod
    def forward(ctx, h, w, teacher_h, teacher_w, weights, beta, temperature):
        grad_h = torch.zeros_like(h, dtype=weights.dtype)
        grad_w = torch.zeros_like(w, dtype=weights.dtype)
        values = torch.zeros_like(weights)
        size = rows_per_piece(len(h), len(w), h.device.type)
        for start in range(0, len(h), size):
            rows = slice(start, start + size)
            log_p = (float32_matmul(h[rows], w.T) / temperature).log_softmax(-1)
            log_q = (float32_matmul(teacher_h[rows], teacher_w.T) / temperature).log_softmax(-1)
            values[rows], dz = divergence(log_p, log_q, beta)
            dz = (dz * (weights[rows, None] / temperature)).to(h.dtype)
            accumulate_(grad_h[rows], dz, w)
            if ctx.needs_input_grad[1]:
                accumulate_(grad_w, dz.T, h[rows])
        ctx.save_for_backward(grad_h.to(h.dtype), grad_w.to(w.dtype))
        ctx.mark_non_differentiable(values)
        return (values * weights).sum(), values

    @staticmethod
    def backward(ctx, g, _):
        grad_h, grad_w = ctx.saved_tensors
        return grad_h * g, grad_w * g, None, None, None, None, None


def divergence(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """(m,) divergences of log-probabilities (m, V), and (m, V) their gradient to z / T."""
    p = log_p.exp()
    q = log_q.exp()
    if beta == 0:
        return (q * (log_q - log_p)).sum(-1), p - q
    if beta == 1:
        value = (p * (log_p - log_q)).sum(-1)
        return value, p * (log_p - log_q - value[:, None])
    log_m = torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
    student = (p * (log_p - log_m)).sum(-1)  # KL(p || m)
    teacher = (q * (log_q - log_m)).sum(-1)  # KL(q || m)
    gradient = (1 - beta) * p * (log_p - log_m - student[:, None])
    return beta * teacher + (1 - beta) * student, gradient
