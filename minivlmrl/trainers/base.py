"""The base class Trainer, and the data classes of its batches, rollouts and optimizer steps.

Each stage of a recipe (sft, dpo, grpo, ...) has one subclass of Trainer.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn

from minivlmrl.config.options import RunConfig, TrainingOptions
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Completion, Prompt, Row
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.weights import gather_and_save_model
from minivlmrl.losses.grpo import LossNormalizer
from minivlmrl.model.decoder import Qwen2_5_VL
from minivlmrl.model.families.registry import family_of
from minivlmrl.model.packing import GroupBatch
from minivlmrl.model.trainable import select_trained
from minivlmrl.trainers.reference import Reference


@dataclass
class MicroBatch:
    """Completions of one forward and backward pass, packed after their prompts.

    An optimizer step adds up the gradients of one or more micro-batches.
    """

    group: GroupBatch
    loss_mask: Tensor  # (R, T) float32, 1 for tokens that are trained on
    # token and sequence counts of the whole optimizer step, by which the loss is divided; set once
    # all micro-batches of the step are packed
    normalizer: LossNormalizer = field(init=False)
    ref_per_token_logps: Tensor | None = None  # (R, T) nats; None without a reference model

    @property
    def weight(self) -> float:
        """Weight of this micro-batch in the metrics of its step: the number of trained tokens."""
        return float(self.loss_mask.sum())

    def mean(self, per_token: Tensor) -> Tensor:
        """Average a flat (M,) tensor over the tokens that are trained on."""
        total = (self.group.pad(per_token.detach()) * self.loss_mask).sum()
        return total / self.loss_mask.sum().clamp(min=1)


@dataclass(kw_only=True)
class SampledBatch(MicroBatch):
    """A micro-batch of sampled completions, with the tensors that a policy-gradient loss needs."""

    completion_index: Tensor  # (R,) index of each row among this rank's n completions
    sampler_logps: Tensor  # (R, T) log-probabilities recorded while sampling
    sampler_routes: Tensor | None = None  # (M,) experts chosen for the tokens while sampling
    advantages: Tensor = field(init=False)  # (R,) or (R, T), set once all rewards are known
    # (R, T) log-probabilities before the first update on the rollout; None if the current ones
    # can be used, because the policy has not been updated since
    old_per_token_logps: Tensor | None = None
    old_entropies: Tensor | None = None  # (R, T) entropies of the same forward pass
    # (R, T) or (R, 1) ratio that corrects differences between the sampler and the trainer
    importance_sampling_ratio: Tensor | None = None
    # lowest entropy of the tokens that are trained on, over the whole optimizer step
    entropy_threshold: float | None = None
    num_entropy_tokens: float | None = None  # number of tokens of the step that reach the threshold


@dataclass
class Rollout:
    """Prompts of this rank, with their sampled completions and rewards."""

    rows: Sequence[Row]  # B rows of the dataset
    prompts: list[Prompt]  # B prompts
    completions: list[list[Completion]]  # B lists of G completions
    rewards: Tensor  # (n, K) float32 on the CPU, NaN where a reward function returned None
    metrics: dict[str, float] = field(default_factory=dict)  # over the completions of all ranks

    def by_prompt(self, indices: Iterable[int]) -> dict[int, list[Completion]]:
        """Group completions by prompt.

        Args:
            indices: of completions, below n.
        Returns:
            {index of a prompt: its completions}.
        """
        groups = {}
        for index in indices:
            prompt, number = divmod(index, len(self.completions[0]))
            groups.setdefault(prompt, []).append(self.completions[prompt][number])
        return groups


@dataclass
class Step:
    """Micro-batches and metrics of one optimizer step."""

    micro_batches: Sequence[MicroBatch]
    metrics: dict[str, float] = field(default_factory=dict)  # the same on all ranks
    # True for the last step on a rollout; a checkpoint is only written after such a step
    ends_rollout: bool = True
    rollout: Rollout | None = None  # the rollout that this step trains on
    prompts: range = range(0)  # indices of the rollout's prompts that this step trains on


class Trainer:
    """Base class of all training stages, which run/loop.py runs.

    A subclass defines `steps`, which yields optimizer steps, and `loss`, which returns the loss of
    one micro-batch, already divided by the totals of the step.

    Args:
        run: the whole recipe; the options of the stage are its section `stage`.
        model: the policy.
        steps_done: optimizer steps that the stage has already made if the run is resumed, else 0.
    """

    stage: str  # name of the stage, and of its section in a recipe
    config_type = TrainingOptions  # dataclass of that section
    needs = "prompts"  # columns that the rows must have, as a key of NEEDS in run/datasets.py
    # fields of Row that hold the answers to train on; empty if the stage samples completions
    answers: tuple[str, ...] = ()
    # False if the stage trains a separate model and leaves the policy unchanged
    trains_policy = True
    steps_per_rollout = 1  # optimizer steps per batch of rows, in one pass over its prompts
    trained: nn.Module  # module whose parameters the optimizer updates

    def __init__(
        self,
        run: RunConfig,
        model: Qwen2_5_VL,
        processor: Processor,
        world: World,
        steps_done: int = 0,
    ):
        self.run = run
        self.config = getattr(run, self.stage)
        self.world = world
        self.policy = model
        self.trained = model
        self.processor = processor
        select_trained(model, run.model.freeze)  # unfreezes what an earlier stage froze
        routing = family_of(model).routing
        self.router_log = None if routing is None else routing.log(model.config, world)
        self.reference = None
        if self.has_reference(self.config):
            self.reference = Reference(model, run.reference, processor, world)

    @staticmethod
    def check(run):
        """Raise ValueError if the stage cannot run this recipe; called before models are loaded."""

    @staticmethod
    def has_reference(config) -> bool:
        """Return True if a stage with these options needs a reference model."""
        return False

    def on_stage_begin(self, batches, held_out, saved_state: dict | None) -> dict[str, list[float]]:
        """Prepare the first optimizer step, and return values to save in every checkpoint.

        Args:
            batches: training rows of the stage.
            held_out: rows for evaluation, or None.
            saved_state: values that this method returned before the run was resumed; None if the
                stage starts.
        """
        return {}

    def steps(self, batches: Iterator[Sequence[Row]]) -> Iterator[Step]:
        """Yield optimizer steps on batches of rows."""
        raise NotImplementedError

    def loss(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss of a micro-batch, divided by the totals of its step, and metrics."""
        raise NotImplementedError

    def dropout(self, step: int, micro_batch: int):
        """Return a context in which adapters drop inputs, with a seed for this micro-batch."""
        if not self.run.adapter.dropout:
            return nullcontext()
        from minivlmrl.model.lora import dropout  # here, because few runs have adapters

        key = f"{self.run.seed}/{self.stage}/{step}/{micro_batch}/{self.world.rank}"
        return dropout(self.trained, self.run.adapter.dropout, key)

    def training_loss(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute loss(batch), plus the load-balancing loss if the model has experts.

        As in transformers, the load-balancing loss uses all tokens of a micro-batch. Over a step it
        is averaged, weighted by the number of completions of each micro-batch.
        """
        if self.router_log is None:
            return self.loss(batch)
        with self.router_log.watch(self.policy if self.trains_policy else self.trained) as chosen:
            loss, metrics = self.loss(batch)
        by_layer = chosen()
        if by_layer:
            metrics = metrics | self.router_log.add(batch.group, by_layer)
            if isinstance(batch, SampledBatch) and batch.sampler_routes is not None:
                differs = self.router_log.differing_routes(
                    batch.group, by_layer, self.policy.model, batch.sampler_routes
                )
                metrics["rollout/route_mismatch"] = batch.mean(differs)
        if self.config.router_aux_loss_coef:
            share = len(batch.loss_mask) / batch.normalizer.sequences
            loss = loss + self.config.router_aux_loss_coef * share * metrics["aux_loss"]
        return loss, metrics

    def modules(self) -> dict[str, nn.Module]:
        """Return the modules whose weights a checkpoint must contain, by name."""
        modules: dict[str, nn.Module] = {"policy": self.policy}
        if self.reference is not None:
            modules["reference"] = self.reference.model
        return modules

    def after_step(self, steps: int):
        """Run after each optimizer step, for example to update the reference model.

        Args:
            steps: number of optimizer steps of this stage so far.
        """
        if self.reference is not None:
            self.reference.after_step(steps)

    def save(self, folder: Path):
        """Save the trained weights into the folder of the run; all ranks must call this."""
        base = self.run.model.path
        gather_and_save_model(folder / "checkpoint", self.policy, self.processor, self.world, base)

    def evaluate(self, rows) -> dict[str, float]:
        """Compute metrics of held-out rows that need no sampling, for example their loss."""
        return {}
