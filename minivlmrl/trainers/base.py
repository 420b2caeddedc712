"""The base class of all trainers, and dataclasses for micro-batches, rollouts and optimizer steps.

Each stage in a recipe (sft, dpo, grpo, ...) is implemented by a Trainer subclass.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minivlmrl.config.options import RunConfig, TrainingOptions
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Completion, Prompt, Row
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.saving import save_model
from minivlmrl.errors import error_phase, truncate
from minivlmrl.losses.advantages import combine
from minivlmrl.losses.grpo import LossNormalizer
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.packing import GroupBatch
from minivlmrl.model.trainable import select_trained
from minivlmrl.trainers.phase_timer import PhaseTimer


@dataclass
class MicroBatch:
    """Prompts and completions of one forward and backward pass, packed into one sequence."""

    group: GroupBatch
    loss_mask: Tensor  # (R, T) float32: 1 for each completion token that is trained on, else 0
    normalizer: LossNormalizer  # the step's numbers of completions and tokens, one of which divides the loss
    ref_per_token_logps: Tensor | None = None  # (R, T) log-probabilities of the reference model, if any, in nats

    def counts(self, names: Iterable[str]) -> dict[str, float]:
        """Return how many tokens each named metric was averaged over, so that micro-batches can be averaged."""
        return dict.fromkeys(names, float(self.loss_mask.sum()))

    def mean(self, per_token: Tensor) -> Tensor:
        """Average per-token values, (tokens,), over the tokens that are trained on."""
        total = (self.group.pad(per_token.detach()) * self.loss_mask).sum()
        return total / self.loss_mask.sum().clamp(min=1)


@dataclass
class Sample:
    """A sampled completion with its prompt and its rewards."""

    index: int  # index among the samples of all ranks; those in rank 0's rollout come first
    row: Row  # the dataset row from which the prompt was made
    prompt: Prompt
    completion: Completion
    rewards: Tensor  # (K,) float32 on the CPU; NaN where a reward function returned None


@dataclass(kw_only=True)
class SampledBatch(MicroBatch):
    """A micro-batch of sampled completions; subclasses add the tensors that their losses need."""

    samples: Sequence[Sample]
    sampler_logps: Tensor  # (R, T) log-probabilities that the sampler recorded, in nats

    @property
    def completion_index(self) -> Tensor:
        """Return each sample's index among the samples of all ranks: (samples,)."""
        return torch.tensor([sample.index for sample in self.samples])

    def completion_advantages(self) -> list[float]:
        """Return the advantage of each sample for completions.jsonl, or zeros if the loss has no advantages."""
        return [0.0] * len(self.samples)


@dataclass
class Rollout:
    """This rank's n = B * G samples: G completions for each of B prompts."""

    groups: list[list[Sample]]  # each prompt's G samples
    metrics: dict[str, float] = field(default_factory=dict)  # metrics over the completions of all ranks

    @classmethod
    def join(
        cls,
        rows: Iterable[Row],
        prompts: Iterable[Prompt],
        completions: Iterable[Iterable[Completion]],
        rewards: Tensor,
        first_sample: int = 0,
    ) -> "Rollout":
        """Build a rollout from rows, prompts and completions; `rewards` has shape (completions, reward functions)."""
        numbered_rewards = enumerate(rewards, first_sample)
        groups = []
        for row, prompt, answers in zip(rows, prompts, completions, strict=True):
            groups.append([])
            for completion in answers:
                index, own_rewards = next(numbered_rewards)
                groups[-1].append(Sample(index, row, prompt, completion, own_rewards))
        return cls(groups)

    @property
    def samples(self) -> list[Sample]:
        return list(chain(*self.groups))

    @property
    def rewards(self) -> Tensor:
        """Return each sample's K rewards: (n, K)."""
        return torch.stack([sample.rewards for sample in self.samples])


@dataclass
class Step:
    """The micro-batches and the metrics of one optimizer step."""

    micro_batches: Sequence[MicroBatch]
    metrics: dict[str, float] = field(default_factory=dict)  # identical on all ranks
    ends_rollout: bool = True  # True for the last optimizer step on a rollout, after which a checkpoint can be saved
    rollout: Rollout | None = None  # the rollout that this step trains on
    groups: Sequence[list[Sample]] = ()  # the step's groups that this rank sampled; other ranks may train on them


class Trainer:
    """Base class for all training stages, which are run by the training loop in run/loop.py.

    A trainer defines the methods `steps`, which yields optimizer steps, and `loss`, which returns a micro-batch's loss.
    The losses of micro-batches are added up, so each loss is divided by the number of tokens or completions in the
    whole optimizer step.

    Args:
        run: the whole recipe; the section named after the stage contains the stage's options.
        steps_done: number of optimizer steps that a resumed stage has already done.
    """

    stage: str  # the stage's name, and its section's name in a recipe
    config_type = TrainingOptions  # dataclass with the stage section's options
    needs = "prompts"  # key in NEEDS in run/datasets.py: the columns that each row must have
    answers: tuple[str, ...] = ()  # fields of Row with the answers to train on; empty if completions are sampled
    samples_completions = False  # True if the stage samples completions and scores them
    trains_policy = True  # False if the stage trains a separate model instead of the policy
    trained: nn.Module  # module whose parameters the optimizer updates

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
        # Parameters that an earlier stage froze may be trained in this stage.
        select_trained(model, config.model.freeze)
        self.reference = None
        if self.has_reference(self.options):
            from minivlmrl.trainers.reference import Reference

            self.reference = Reference(model, config.reference, processor, world)

    @classmethod
    def check(cls, config: RunConfig):
        """Raise ValueError if the stage cannot train with the recipe; called before any model is loaded."""

    @staticmethod
    def has_reference(options) -> bool:
        """Return True if the stage needs a reference model with the given options."""
        return False

    @staticmethod
    def columns(options) -> tuple[str, ...]:
        """Return the optional columns that the stage reads with the given options."""
        return ()

    def steps(self, batches: Iterator[Sequence[Row]]) -> Iterator[Step]:
        """Yield the optimizer steps of a stage, one or more for each batch of rows."""
        raise NotImplementedError

    def trial_batches(self, rows: Sequence[Row]) -> Sequence[MicroBatch]:
        """Build the largest possible micro-batches from the given rows, to test whether a step fits in memory."""
        return ()

    def loss(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss and the metrics of a micro-batch."""
        raise NotImplementedError

    def phase(self, name: str, rows: Sequence[Row] = ()) -> error_phase:
        """Measure the time of a phase, for example "sampling"; errors raised in it carry the phase and its rows."""
        self.timer.start(name)
        return error_phase(name, rows)

    def total_rewards(self, samples: Sequence[Sample]) -> Tensor:
        """Compute the weighted sum of each sample's rewards: (samples,)."""
        rewards = torch.stack([sample.rewards for sample in samples])  # (n, K)
        return combine(rewards, torch.tensor(list(self.config.rewards.values())))

    def dropout(self, step: int, micro_batch: int):
        """Return a context manager that enables adapter dropout for one micro-batch."""
        if not self.config.adapter.dropout:
            return nullcontext()
        from minivlmrl.model.lora import dropout

        key = f"{self.config.seed}/{self.stage}/{step}/{micro_batch}/{self.world.rank}"
        return dropout(self.trained, self.config.adapter.dropout, key)

    def training_loss(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss and the metrics of a micro-batch, and check their types."""
        return checked_loss(f"the method loss of the stage {self.stage}", self.loss(batch))

    def modules(self) -> dict[str, nn.Module]:
        """Return {name: module} with all weights that a checkpoint must save."""
        modules: dict[str, nn.Module] = {"policy": self.policy}
        if self.reference is not None:
            modules["reference"] = self.reference.model
        return modules

    def save(self, folder: Path, merge: bool = True):
        """Save the weights, or only the adapters if `merge` is False; all ranks must call this method together."""
        base = self.config.model.path
        save_model(folder / "checkpoint", self.policy, self.processor, self.world, base, merge=merge)

    def evaluate(self, rows) -> dict[str, float]:
        """Compute metrics on held-out rows without sampling, for example their loss."""
        return {}


def checked_loss(name: str, result: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a loss and its metrics; raise ValueError unless `result` is a scalar, or a scalar and a dictionary."""
    pair: Any = (result, {}) if isinstance(result, Tensor) else result
    is_pair = isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[1], dict)
    values = [pair[0], *pair[1].values()] if is_pair else [None]
    is_scalar = all(isinstance(value, Tensor) and value.dim() == 0 for value in values)
    # No metric may be named stage, step or loss, because each line of metrics.jsonl has these fields.
    if not is_scalar or pair[1].keys() & {"stage", "step", "loss"}:
        raise ValueError(
            f"{name} returned {truncate(result, 200)}, but it must return the loss, or the loss and a "
            "dictionary of metrics, as in `return loss, {}`. The loss and the metrics must be tensors without "
            "dimensions, and no metric may be named stage, step or loss"
        )
    loss, metrics = pair
    return loss, metrics
