"""Base class for trainers, and classes for micro-batches, rollouts and optimizer steps.

A training stage of a recipe (sft, dpo, grpo, ...) is a Trainer subclass.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from minivlmrl.config.options import RunConfig, TrainingOptions
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Completion, Prompt, Row
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.saving import save_model
from minivlmrl.errors import UserError, error_phase, truncate
from minivlmrl.losses.advantages import combine
from minivlmrl.losses.grpo import LossNormalizer
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.packing import GroupBatch
from minivlmrl.model.trainable import select_trained
from minivlmrl.trainers.phase_timer import PhaseTimer

Item = TypeVar("Item")


@dataclass
class MicroBatch:
    """Prompts and completions for one forward and backward pass, packed into one sequence."""

    group: GroupBatch
    loss_mask: Tensor  # (R, T) float32: 1 for completion tokens to train on
    normalizer: LossNormalizer
    ref_per_token_logps: Tensor | None = None  # (R, T) reference log-probabilities, in nats

    def counts(self, names: Iterable[str]) -> dict[str, float]:
        """Return the weights for averaging metrics over micro-batches: {metric: token count}."""
        return dict.fromkeys(names, float(self.loss_mask.sum()))

    def mean(self, per_token: Tensor) -> Tensor:
        """Average `per_token`, shape (tokens,), over the tokens with loss mask 1."""
        return (self.group.pad(per_token.detach()) * self.loss_mask).sum() / self.loss_mask.sum().clamp(min=1)


@dataclass
class Sample:
    """A sampled completion with its prompt and rewards."""

    index: int  # index among the samples on all ranks, rank 0 first
    row: Row
    prompt: Prompt
    completion: Completion
    rewards: Tensor  # (K reward functions,) float32 on the CPU, NaN where a function returned None


@dataclass(kw_only=True)
class SampledBatch(MicroBatch):
    """Micro-batch of completions that the policy sampled."""

    samples: Sequence[Sample]
    sampler_logps: Tensor  # (R, T) log-probabilities from the sampler, in nats

    @classmethod
    def extend(cls, batch: "SampledBatch", **fields) -> Self:
        """Convert a batch of a base class to this class; `fields` are the additional fields."""
        return cls(**vars(batch), **fields)

    @property
    def completion_index(self) -> Tensor:
        """Return Sample.index for all samples: (samples,)."""
        return torch.tensor([sample.index for sample in self.samples])

    def completion_advantages(self) -> list[float]:
        """Return one advantage per sample for completions.jsonl: the mean over tokens, 0 if there are no advantages."""
        advantages = getattr(self, "advantages", None)
        if advantages is None:
            return [0.0] * len(self.samples)
        if advantages.dim() == 2:
            advantages = (advantages * self.loss_mask).sum(1) / self.loss_mask.sum(1).clamp(min=1)
        return advantages.tolist()


@dataclass
class Rollout:
    """The samples of one rollout on this rank: B prompts, G samples per prompt."""

    groups: list[list[Sample]]
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def join(
        cls,
        rows: Iterable[Row],
        prompts: Iterable[Prompt],
        completions: Iterable[Iterable[Completion]],
        rewards: Tensor,
        first_sample: int = 0,
    ) -> "Rollout":
        """Build a rollout; `rewards` has shape (completions, reward functions)."""
        index = count(first_sample)
        values = iter(rewards)
        groups = []
        for row, prompt, answers in zip(rows, prompts, completions, strict=True):
            groups.append([Sample(next(index), row, prompt, completion, next(values)) for completion in answers])
        return cls(groups)

    @property
    def samples(self) -> list[Sample]:
        return list(chain(*self.groups))

    @property
    def rewards(self) -> Tensor:
        """Return rewards for all samples: (n, K)."""
        return torch.stack([sample.rewards for sample in self.samples])


@dataclass
class Step:
    """Micro-batches and metrics for one optimizer step."""

    micro_batches: Sequence[MicroBatch]
    metrics: dict[str, float] = field(default_factory=dict)  # {metric: value}, identical on all ranks
    ends_rollout: bool = True  # whether this is the last step on its rollout, so a state may be saved
    rollout: Rollout | None = None
    groups: Sequence[list[Sample]] = ()  # the step's samples on this rank, one list per prompt


class Trainer:
    """Base class for training stages; run/loop.py runs them.

    Subclasses define `steps` and `loss`. Micro-batch losses are summed, so `loss` must divide by tokens or completions
    in the whole step.

    Args:
        config: recipe, with a section named after the stage.
        steps_done: optimizer steps done before the run was resumed.
    """

    stage: str  # stage name and recipe section
    config_type = TrainingOptions  # dataclass with the stage's options
    needs = "prompts"  # kind of training rows, a key in NEEDS (run/datasets.py)
    answers: tuple[str, ...] = ()  # Row fields with the answers to train on, such as ("chosen", "rejected")
    samples_completions = False
    trains_policy = True  # False if the stage trains a model other than the policy
    trained: nn.Module  # module to optimize

    def __init__(
        self, config: RunConfig, model: VisionLanguageModel, processor: Processor, world: World, steps_done: int = 0
    ):
        self.config = config
        self.options = getattr(config, self.stage)
        self.world = world
        self.policy = model
        self.trained = model
        self.processor = processor
        self.timer = PhaseTimer(world.device)
        # set requires_grad again, because an earlier stage may have frozen parameters
        select_trained(model, config.model.freeze)
        self.reference = None
        if self.has_reference(self.options):
            from minivlmrl.trainers.reference import Reference

            self.reference = Reference(model, config.reference, processor, world)

    @classmethod
    def check(cls, config: RunConfig):
        """Raise UserError if the stage cannot train with the recipe; called before a model is loaded."""

    @staticmethod
    def has_reference(options) -> bool:
        """Return True if the stage needs a reference model."""
        return False

    @staticmethod
    def columns(options) -> tuple[str, ...]:
        """Return optional dataset columns that the stage reads."""
        return ()

    def steps(self, batches: Iterator[Sequence[Row]]) -> Iterator[Step]:
        """Yield optimizer steps, one or more per batch of rows."""
        raise NotImplementedError

    def trial_batches(self, rows: Sequence[Row]) -> Sequence[MicroBatch]:
        """Build the largest possible micro-batches, to test whether a step fits in memory."""
        return ()

    def loss(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute loss and metrics."""
        raise NotImplementedError

    def phase(self, name: str, rows: Sequence[Row] = ()) -> AbstractContextManager[None]:
        """Time a phase such as "sampling", and add its name and rows to error messages."""
        self.timer.start(name)
        return error_phase(name, rows)

    def total_rewards(self, samples: Sequence[Sample]) -> Tensor:
        """Compute the weighted sum of rewards per sample: (samples,)."""
        rewards = torch.stack([sample.rewards for sample in samples])  # (n, K)
        return combine(rewards, torch.tensor(list(self.config.rewards.values())))

    def dropout(self, step: int, micro_batch: int):
        """Return a context manager to apply adapter dropout to a micro-batch."""
        if not self.config.adapter.dropout:
            return nullcontext()
        from minivlmrl.model.lora import dropout

        return dropout(
            self.trained,
            self.config.adapter.dropout,
            f"{self.config.seed}/{self.stage}/{step}/{micro_batch}/{self.world.rank}",
        )

    def training_loss(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute loss and metrics, and check their types."""
        return checked_loss(f"the method loss of the stage {self.stage}", self.loss(batch))

    def modules(self) -> dict[str, nn.Module]:
        """Return modules to save in states, by name."""
        modules: dict[str, nn.Module] = {"policy": self.policy}
        if self.reference is not None:
            modules["reference"] = self.reference.model
        return modules

    def save(self, folder: Path, merge: bool = True):
        """Save the weights, or only adapters if not `merge`; all ranks must call this."""
        base = self.config.model.path
        save_model(folder / "checkpoint", self.policy, self.processor, self.world, base, merge=merge)

    def evaluate(self, rows) -> dict[str, float]:
        """Compute metrics that need no sampling, such as the loss on held-out rows."""
        return {}


def checked_loss(name: str, result: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Raise UserError unless `result` is a scalar, or a scalar and a dict of metrics."""
    with suppress(AttributeError, TypeError, ValueError):
        loss, metrics = (result, {}) if isinstance(result, Tensor) else result
        is_scalar = all(value.dim() == 0 for value in (loss, *metrics.values()))
        # reject metrics named like other fields in metrics.jsonl
        if is_scalar and not metrics.keys() & {"stage", "step", "loss"}:
            return loss, metrics
    raise UserError(
        f"{name} returned {truncate(result, 200)}, but it must return the loss, or the loss and a dictionary of "
        "metrics, as in `return loss, {}`. The loss and the metrics must be tensors without dimensions, and no metric "
        "may be named stage, step or loss"
    )


def split(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """Split a list into parts with `size` items; the last part may be shorter."""
    return [items[start : start + size] for start in range(0, len(items), size)]
