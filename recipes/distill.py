"""On-policy distillation: the student samples completions, and a teacher scores them (arXiv 2306.13649).

The teacher may get a different prompt, for example with a larger image or a hint. For every position in a completion,
the teacher computes the next token's distribution. Therefore a reward is not needed, and the recipe's rewards are only
logged.

Use it in a recipe in the same folder, see shapes_distill.yaml:
    stages: [sft, distill.py:Distill]
    distill: {max_steps: 200, teacher_prompt: distill.py:uncut}

Derivation. Let p = softmax(h W^T / T) be the student's distribution, q the teacher's, and m = b q + (1 - b) p. The
divergence D and its gradient to the student's logits z are

    b = 0  D = KL(q || p)                         dD/dz = (p - q) / T
    b = 1  D = KL(p || q)                         dD/dz = p (log p - log q - D) / T
    else   D = b KL(q || m) + (1 - b) KL(p || m)  dD/dz = (1 - b) p (log p - log m - KL(p || m)) / T
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivlmrl.config.import_utils import call_user_code, load_name
from minivlmrl.config.options import TrainingOptions
from minivlmrl.config.types import Code, FilePath
from minivlmrl.data.download import find_folder
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Prompt, Row
from minivlmrl.errors import check_field
from minivlmrl.kernels.float32_matmul import float32_matmul
from minivlmrl.kernels.linear_log_softmax import accumulate_, rows_per_piece
from minivlmrl.losses.advantages import combine
from minivlmrl.model.logprobs import completion_states
from minivlmrl.model.packing import GroupBatch, pack
from minivlmrl.trainers.base import Rollout, Sample, SampledBatch
from minivlmrl.trainers.reference import SwappedParameters, load_frozen, swapped_in
from minivlmrl.trainers.rollout import RolloutTrainer


@dataclass
class DistillConfig(TrainingOptions):
    """Options for on-policy distillation."""

    num_generations: Annotated[int, ">= 1"] = 8  # completions per prompt
    steps_per_generation: Annotated[int, ">= 1"] = 1  # optimizer steps per rollout
    num_iterations: Annotated[int, ">= 1"] = 1  # passes over each rollout
    # maximum tokens in a micro-batch, where each prompt counts once; None means that there is no limit
    max_tokens_per_micro_batch: Annotated[int, ">= 1"] | None = None
    teacher: FilePath | None = None  # model folder; by default the policy at the start of the stage
    teacher_prompt: Code | None = None  # "file.py:function" that maps a Row to the Row for the teacher
    teacher_beta: Annotated[float, "[0, 1]"] = 0.5  # 0 gives KL(teacher || student), 1 KL(student || teacher)


@dataclass(kw_only=True)
class DistillBatch(SampledBatch):
    """Micro-batch with samples, together with the teacher's hidden states."""

    teacher_states: Tensor  # (M, D), the states that predict each completion token


class Distill(RolloutTrainer):
    """Trainer that samples completions and minimises the divergence from a teacher.

    The teacher is loaded from the folder distill.teacher. By default it is the reference model.
    """

    stage = "distill"
    config_type = DistillConfig

    @classmethod
    def check(cls, run):
        if not run.distill.teacher and not run.distill.teacher_prompt:
            raise ValueError("distill needs distill.teacher or distill.teacher_prompt; set one of them or both")
        if run.distill.teacher:
            find_folder(run.distill.teacher)  # raise an error now, not after earlier stages have run
        super().check(run)

    @staticmethod
    def has_reference(config) -> bool:
        return True

    def __init__(self, run, model, processor, world, steps_done=0):
        super().__init__(run, model, processor, world, steps_done)
        self.steps_per_rollout = self.config.steps_per_generation
        self.passes_per_rollout = self.config.num_iterations
        self.show = lambda row: row
        if self.config.teacher_prompt:
            self.show = load_name(self.config.teacher_prompt)
        self.teacher = self.reference.model
        if self.config.teacher is not None:
            self.teacher = load_teacher(self.config.teacher, model, processor, world)
            self.reference = None
        # model that holds the teacher's config and head; for copied adapters this is the policy
        self.teacher_base = model if isinstance(self.teacher, SwappedParameters) else self.teacher

    @torch.no_grad()
    def prepare(self, rollout: Rollout, parts: Sequence[Sequence[list[Sample]]]) -> list[list[DistillBatch]]:
        rewards = self.world.all_gather(rollout.rewards)
        rollout.metrics = self.rollout_metrics(rollout, rewards, combine(rewards, self.reward_weights))
        steps = []
        for groups in parts:
            normalizer = self.count_tokens(groups)
            packed = [self.pack(samples, normalizer) for samples in self.split(groups)]
            steps.append([DistillBatch(**vars(batch), teacher_states=self.ask_teacher(batch)) for batch in packed])
        return steps

    def ref_logps(self, group: GroupBatch) -> None:
        """Return no log-probabilities, because the loss needs the teacher's hidden states instead."""

    def ask_teacher(self, batch: SampledBatch) -> Tensor:
        """Compute the teacher's hidden states for its own prompts and the sampled completions."""
        by_prompt = groupby(batch.samples, lambda sample: id(sample.prompt))
        groups = [list(samples) for _, samples in by_prompt]
        prompts = [self.teacher_prompt(samples[0].row) for samples in groups]
        completions = [[sample.completion for sample in samples] for samples in groups]
        group = pack(prompts, completions, self.teacher_base.config, self.world.device)
        with swapped_in(self.teacher, self.policy) as teacher:
            states = completion_states(teacher, group)
            logits = F.linear(states[:1], teacher.lm_head.weight)
        if not (states.isfinite().all() and logits.isfinite().all()):
            path = self.config.teacher
            raise ValueError(f"distill.teacher: the model {path} computes NaN or inf; check its weights")
        return states

    def teacher_prompt(self, row: Row) -> Prompt:
        """Build the teacher's prompt for a row."""
        shown = call_user_code("teacher_prompt", self.show, row)
        check_field(isinstance(shown, Row), "what teacher_prompt returns", shown, "a Row")
        return Row.prompt(shown, self.processor)  # not cached with the student's prompt

    def loss(self, batch: DistillBatch) -> tuple[Tensor, dict[str, Tensor]]:
        states = completion_states(self.policy, batch.group)
        # The head is read after the forward pass, because the forward pass gathers a sharded head.
        head = self.policy.lm_head.weight
        # The teacher's head may have additional rows, which do not belong to a token.
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
    """Give the teacher the image in full size, while data.max_pixels limits the student's image."""
    messages = copy.deepcopy(row.messages)
    messages[-1]["content"][0]["max_pixels"] = 1003520
    return replace(row, messages=messages)


def load_teacher(path: str, student: nn.Module, processor: Processor, world) -> nn.Module:
    """Load a teacher whose vocabulary is at least as large as the student's.

    Raises:
        ValueError: if the teacher's vocabulary is smaller.
    """
    teacher = load_frozen(path, student, processor, world)
    size = teacher.config.vocab_size
    student_size = student.config.vocab_size
    check_field(size >= student_size, f"{path}: vocab_size", size, f"the student's {student_size} or more")
    return teacher


class LinearDivergence(torch.autograd.Function):
    """Compute the weighted sum of divergences, and each divergence (M,), in nats.

    The sum is differentiable with respect to the student. The forward pass computes logits and gradients for a few rows
    at a time, so that the logits (M, V) are never stored as a whole.

    Arguments of apply:
        h, w: the student's hidden states (M, D) and head (V, D).
        teacher_h, teacher_w: the same for the teacher, with any D.
        weights: (M,), float32 (float64 for float64 states).
        beta, temperature: b and T in the derivation.

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
    """Compute the divergences (m,) between log-probabilities (m, V), and their gradients (m, V) to z / T."""
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
