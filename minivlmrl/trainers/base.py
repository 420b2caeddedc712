"""The base class of all trainers, one for each stage of a recipe, and what they train on."""

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
    """What one forward and backward of training works on."""

    group: GroupBatch
    loss_mask: Tensor  # (R, T) float32, 1 for tokens that are trained on
    # of the whole optimizer step: what its loss divides by; set when its micro-batches are packed
    normalizer: LossNormalizer = field(init=False)
    ref_per_token_logps: Tensor | None = None  # (R, T); None: there is no reference

    @property
    def weight(self) -> float:
        """How much its metrics weigh in those of the step: by the tokens that are trained on."""
        return float(self.loss_mask.sum())

    def mean(self, per_token: Tensor) -> Tensor:
        """Mean of a flat (M,) tensor over the tokens that are trained on."""
        total = (self.group.pad(per_token.detach()) * self.loss_mask).sum()
        return total / self.loss_mask.sum().clamp(min=1)


@dataclass(kw_only=True)
class SampledBatch(MicroBatch):
    """Completions of a rollout."""

    completion_index: Tensor  # (R,) of each row among this rank's n completions
    sampler_logps: Tensor  # (R, T) recorded while sampling
    sampler_routes: Tensor | None = None  # (M,) experts of the tokens while sampling
    advantages: Tensor = field(init=False)  # (R,) or (R, T), set when rewards have been compared
    old_per_token_logps: Tensor | None = None  # (R, T); None: the policy has not moved since
    old_entropies: Tensor | None = None  # (R, T)
    importance_sampling_ratio: Tensor | None = None  # (R, T) or (R, 1), corrects the sampler
    entropy_threshold: float | None = None  # of the whole optimizer step ...
    num_entropy_tokens: float | None = None  # ... and how many tokens reach it


@dataclass
class Rollout:
    """Completions of this rank's prompts and their rewards."""

    rows: Sequence[Row]  # B
    prompts: list[Prompt]
    completions: list[list[Completion]]  # B lists of G
    rewards: Tensor  # (n, K) float32 on the CPU, NaN where a reward could not judge
    metrics: dict[str, float] = field(default_factory=dict)  # of all ranks' completions

    def by_prompt(self, indices: Iterable[int]) -> dict[int, list[Completion]]:
        """Sort some of the n completions by their prompts: {index of prompt: completions}."""
        groups = {}
        for index in indices:
            prompt, number = divmod(index, len(self.completions[0]))
            groups.setdefault(prompt, []).append(self.completions[prompt][number])
        return groups


@dataclass
class Step:
    """One optimizer step."""

    micro_batches: Sequence[MicroBatch]
    metrics: dict[str, float] = field(default_factory=dict)  # the same on all ranks
    ends_rollout: bool = True  # a state of the run is only written after such a step
    rollout: Rollout | None = None  # the rollout that this step trains on ...
    prompts: range = range(0)  # ... and the range of its prompts


class Trainer:
    """What run/loop.py trains with; a stage is a class that defines `steps` and `loss`.

    Args:
        steps_done: optimizer steps of the stage before a resume, for those that count them.
    """

    stage: str  # its name, and that of its section in a recipe
    config_type = TrainingOptions  # the dataclass of that section
    needs = "prompts"  # what its rows must have, a key of NEEDS in run/datasets.py
    answers: tuple[str, ...] = ()  # names of a row's answers; none: it samples completions
    trains_policy = True  # or a model of its own, and the policy stays as it is
    steps_per_rollout = 1  # optimizer steps with prompts of one draw of rows
    trained: nn.Module  # whose parameters the optimizer moves

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
        """Refuse a recipe (ValueError) before anything is loaded."""

    @staticmethod
    def has_reference(config) -> bool:
        """Say whether a stage of this section keeps a reference model."""
        return False

    def begin(self, batches, held_out, kept: dict | None) -> dict[str, list[float]]:
        """Prepare the first step; returns what states keep beside weights.

        Args:
            batches, held_out: the rows of the stage and those that are evaluated, if any.
            kept: what this returned before a resume; None: the stage begins.
        """
        return {}

    def steps(self, batches: Iterator[Sequence[Row]]) -> Iterator[Step]:
        """Yield optimizer steps on batches of rows."""
        raise NotImplementedError

    def loss(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute a micro-batch's share of the loss of its step, and metrics."""
        raise NotImplementedError

    def dropout(self, step: int, micro_batch: int):
        """Let adapters drop inputs while a micro-batch is trained on (a context)."""
        if not self.run.adapter.dropout:
            return nullcontext()
        from minivlmrl.model.lora import dropout  # here, because few runs have adapters

        key = f"{self.run.seed}/{self.stage}/{step}/{micro_batch}/{self.world.rank}"
        return dropout(self.trained, self.run.adapter.dropout, key)

    def training_loss(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute loss(batch); of a model with experts also how its routers balance the tokens.

        As a transformers model's, the balance loss is of all tokens of a micro-batch together.
        Those of a step's micro-batches are averaged, weighed by their shares of its completions.
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
        """List all that has weights which a resumed run needs."""
        modules: dict[str, nn.Module] = {"policy": self.policy}
        if self.reference is not None:
            modules["reference"] = self.reference.model
        return modules

    def after_step(self, steps: int):
        """Do what follows an update; steps: optimizer steps of this stage so far."""
        if self.reference is not None:
            self.reference.after_step(steps)

    def save(self, folder: Path):
        """Write what was trained into the run's folder; all ranks call it."""
        base = self.run.model.path
        gather_and_save_model(folder / "checkpoint", self.policy, self.processor, self.world, base)

    def evaluate(self, rows) -> dict[str, float]:
        """Measure what held-out rows say besides answers: `pairs` or `loss`."""
        return {}
