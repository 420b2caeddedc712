"""What an algorithm is: two methods, and the loop in train.py knows nothing else.

batches()     endless optimizer steps, each a list of micro-batches (offline: the data; online: rollouts)
loss(batch)   of one micro-batch, divided by the count of the whole step, with diagnostics

What it keeps from one optimizer step to the next it gives to modules() and state_dict(), so that a run can be resumed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from minivlmrl.algorithms.reference import Reference
from minivlmrl.algorithms.value_model import ScalarModel
from minivlmrl.batch import GroupBatch
from minivlmrl.decoder import Qwen2_5_VL
from minivlmrl.rows import Dataset, Processor, Prompt, Row
from minivlmrl.run.batches import shuffled
from minivlmrl.run.config import RunConfig
from minivlmrl.scale.ranks import SPARE, World
from minivlmrl.scale.saving import save_model
from minivlmrl.scale.sharding import copy_model, is_sharded


@dataclass
class MicroBatch:
    """What one forward and backward works on."""

    group: GroupBatch
    completion_mask: Tensor  # (R, T) float32, 1 for tokens that are learnt from
    num_sequences: float  # completions of the whole optimizer step, all ranks
    num_tokens: float  # their tokens that are learnt from
    idle: bool = False  # nothing to learn from: this rank only keeps pace with the others, see Algorithm.in_step

    @property
    def weight(self) -> float:
        """How much this micro-batch's figures count in the step's: they are means over tokens that are learnt from."""
        return 0.0 if self.idle else float(self.completion_mask.sum())

    def mean(self, per_token: Tensor) -> Tensor:
        """Mean of a flat (M,) tensor over the tokens that are learnt from."""
        mask = self.completion_mask
        return (self.group.pad(per_token.detach()) * mask).sum() / mask.sum().clamp(min=1)


@dataclass
class Step:
    """One optimizer step."""

    batches: list[MicroBatch]
    metrics: dict[str, float] = field(default_factory=dict)  # already global


class Algorithm:
    """What every algorithm is given. A subclass says what its rows need to have (datasets.NEEDS).

    Args:
        dataset: the rows to train on.
        held_out: rows that are evaluated, if there are any.
    """

    stage: str  # its name in a recipe
    needs = "prompts"

    @staticmethod
    def check(run: RunConfig):
        """Refuse, before anything is computed, a recipe that this algorithm cannot follow (ValueError)."""

    def __init__(
        self,
        run: RunConfig,
        model: Qwen2_5_VL,
        processor: Processor,
        dataset: Dataset,
        world: World,
        held_out: Dataset | None = None,
    ):
        self.run, self.model, self.processor, self.world = run, model, processor, world
        self.dataset, self.held_out = dataset, held_out
        self.train_all(model)
        self.trained: nn.Module = model  # what the optimizer updates
        self.reference: Reference | None = None  # made by those that measure from one
        self.drawn = 0  # rows of the data that steps have used so far, over all ranks

    def train_all(self, model: Qwen2_5_VL):
        """Have all weights trained, also those that an earlier stage has frozen, but for what this one freezes."""
        model.requires_grad_(True)
        model.visual.requires_grad_(not getattr(self.run, self.stage).freeze_vision_tower)

    def scalar_model(self) -> ScalarModel:
        """A copy of the policy that says a number, to be trained."""
        backbone = copy_model(self.model)
        self.train_all(backbone)
        model = ScalarModel(backbone)
        self.shard_like_policy(model.score)
        return model

    def shard_like_policy(self, head: nn.Module):
        """Cut what works on the policy's states, if the policy is cut."""
        if is_sharded(self.model):
            self.model.sharding.shard_alone(head)

    def begin(self):
        """Compute what the first step needs. A resumed run has it in its state instead."""

    def batches(self) -> Iterator[Step]:
        """The optimizer steps from here on: from the first one, or from where load_state_dict has put us."""
        raise NotImplementedError

    def loss(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        raise NotImplementedError

    def after_step(self):
        """What follows from an optimizer step; called as soon as its update is made."""
        if self.reference is not None:
            self.reference.after_step()

    def modules(self) -> dict[str, nn.Module]:
        """Whatever has weights that a resumed run cannot find elsewhere."""
        return {"policy": self.model} | ({} if self.reference is None else {"reference": self.reference.model})

    def state_dict(self) -> dict:
        """This rank's part of everything else, between two steps: plain data."""
        steps = None if self.reference is None else self.reference.steps
        return {"seed": self.run.seed, "rows": len(self.dataset), "drawn": self.drawn, "reference_steps": steps}

    def load_state_dict(self, parts: list[dict]):
        """Go on from the state_dicts of all ranks that there were, in their order; there may be another number now."""
        for name, value in (("seed", self.run.seed), ("rows", len(self.dataset))):
            if parts[0][name] != value:
                raise ValueError(f"resume: the state is of a run with {name} {parts[0][name]}, this one has {value}")
        self.drawn = parts[0]["drawn"]
        if self.reference is not None:
            self.reference.steps = parts[0]["reference_steps"]

    def save(self, folder: Path):
        """Write what is trained into the run's folder; all ranks call it."""
        save_model(folder / "checkpoint", self.model, self.processor, self.world)

    def pair_accuracy(self) -> float | None:
        """Share of held-out pairs whose chosen answer wins; None: there are none, or this algorithm cannot tell."""
        return None

    def in_step(self, size: int, items: Sequence, spare) -> list[tuple[Sequence, bool]]:
        """Cut items into pieces of at most `size`, as many as the rank with most of them has.

        A forward and backward of sharded weights is a joint work of all ranks, so all must do equally many: a rank with
        fewer items gets pieces of one spare item each, from which nothing is learnt.

        Returns:
            (piece, whether it is a spare one) pairs.
        """
        pieces = [items[start : start + size] for start in range(0, len(items), size)]
        idle = self.world.most(len(pieces)) - len(pieces)
        return [(piece, False) for piece in pieces] + [([spare], True)] * idle

    def spare_prompt(self) -> Prompt:
        """A prompt for work whose result is not used."""
        return self.processor(SPARE, [])

    def spare_completion(self) -> Tensor:
        """(1,) int64, to go with it."""
        return torch.tensor([self.processor.special["<|im_end|>"]])

    def numbers(self, prompts_per_step: int) -> Iterator[list[int]]:
        """This rank's row numbers of each step."""
        for numbers in shuffled(len(self.dataset), prompts_per_step, self.run.seed, self.drawn):
            self.drawn += prompts_per_step
            yield self.world.share(numbers)

    def rows(self, prompts_per_step: int) -> Iterator[list[Row]]:
        """This rank's rows of each step."""
        for numbers in self.numbers(prompts_per_step):
            yield [self.dataset[number] for number in numbers]
