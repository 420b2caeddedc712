"""The rollout that is being trained on: its optimizer steps, and the same as plain data for the state of a run."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from minivlmrl.algorithms.algorithm import MicroBatch, Step
from minivlmrl.generate import Completion
from minivlmrl.run.evaluate import Rollout
from minivlmrl.scale.ranks import World

# What packing a rollout makes again; all other fields of its micro-batches were computed when it was new.
PACKED = {"group", "completion_mask", "num_sequences", "num_tokens", "idle", "rows", "sampler_logps", "fresh"}


@dataclass
class Buffer:
    """A rollout, gone through `times` times."""

    result: Rollout  # this rank's
    steps: list[list[MicroBatch]]  # for each optimizer step its micro-batches
    metrics: dict[str, float]
    times: int
    done: int = 0  # optimizer steps that are made

    def remaining(self) -> Iterator[Step]:
        """The optimizer steps that are still to be made."""
        for number in range(self.done, self.times * len(self.steps)):
            yield Step(self.steps[number % len(self.steps)], self.metrics)

    def after_step(self):
        """Call after every optimizer step: from here on the policy is no longer the one that sampled."""
        self.done += 1
        for batch in itertools.chain.from_iterable(self.steps):
            batch.fresh = False

    def state_dict(self) -> dict | None:
        """This rank's part as plain data; None if nothing remains to be done."""
        if self.done == self.times * len(self.steps):
            return None
        result, real = self.result, [[batch for batch in batches if not batch.idle] for batches in self.steps]
        computed = (row for batches in real for batch in batches for row in _per_completion(batch))
        groups = [
            {"place": place, "row": row, "completions": [(vars(completion), next(computed)) for completion in group]}
            for place, row, group in zip(result.places, result.rows, result.completions, strict=True)
        ]
        values = [_per_step(batches[0]) if batches else {} for batches in real]
        return {"groups": groups, "values": values, "metrics": self.metrics, "times": self.times, "done": self.done}


@dataclass
class Saved:
    """What all ranks had of a buffer, shared among the ranks that there are now."""

    groups: list[dict]  # this rank's
    values: list[dict[str, float]]  # of each optimizer step
    blank: dict[str, Tensor]  # what an idle micro-batch has of each tensor
    metrics: dict[str, float]
    times: int
    done: int

    @staticmethod
    def share(parts: list[dict], world: World) -> "Saved":
        """Take this rank's part of the state_dicts of all ranks: its own, or with another number of ranks its share."""
        groups = sorted((group for part in parts for group in part["groups"]), key=lambda group: group["place"])
        _, computed = groups[0]["completions"][0]
        blank = {name: x.new_zeros((1,) * (x.dim() + 1)) for name, x in computed.items()}
        steps = len(parts[0]["values"])
        values = [dict(pair for part in parts for pair in part["values"][step].items()) for step in range(steps)]
        if len(parts) == world.size:
            mine = parts[world.rank]["groups"]
        else:
            size = len(groups) // steps
            mine = [group for step in range(steps) for group in world.share(groups[step * size : (step + 1) * size])]
        return Saved(mine, values, blank, *(parts[0][name] for name in ("metrics", "times", "done")))

    @property
    def completions(self) -> list[list[Completion]]:
        return [[Completion(**completion) for completion, _ in group["completions"]] for group in self.groups]

    @property
    def learnt(self) -> Tensor:
        """(n,) bool: which completions are learnt from."""
        each = [computed["learnt"] for group in self.groups for _, computed in group["completions"]]
        return torch.tensor(each, dtype=torch.bool)

    def fill(self, steps: list[list[MicroBatch]]):
        """Give freshly packed micro-batches what was computed for them when the rollout was new."""
        rows = iter([computed for group in self.groups for _, computed in group["completions"]])
        for batches, values in zip(steps, self.values, strict=True):
            for batch in batches:
                own = [] if batch.idle else list(itertools.islice(rows, len(batch.completion_mask)))
                for name in self.blank.keys() - {"learnt"}:
                    column = _column([row[name] for row in own]) if own else self.blank[name]
                    setattr(batch, name, column.to(batch.completion_mask.device))
                for name, value in values.items():
                    setattr(batch, name, value)
                batch.fresh = False


def _column(rows: list[Tensor]) -> Tensor:
    """One tensor of what each completion has, a number or a number for each token."""
    return pad_sequence(rows, batch_first=True) if rows[0].dim() else torch.stack(rows)


def _per_completion(batch: MicroBatch) -> list[dict[str, Tensor]]:
    """What was computed for each completion of a micro-batch, without padding, and whether it is learnt from."""
    columns = {name: value.cpu() for name, value in _computed(batch).items() if isinstance(value, Tensor)}
    columns["learnt"] = batch.completion_mask.any(1).cpu()
    lengths = batch.group.layout.row_lengths
    return [
        {name: (x[i, : lengths[i]] if x.dim() > 1 else x[i]).clone() for name, x in columns.items()}
        for i in range(len(lengths))
    ]


def _per_step(batch: MicroBatch) -> dict[str, float]:
    """What was computed for all of an optimizer step."""
    return {name: value for name, value in _computed(batch).items() if not isinstance(value, Tensor)}


def _computed(batch: MicroBatch) -> dict:
    names = {field.name for field in fields(batch)} - PACKED
    return {name: getattr(batch, name) for name in sorted(names) if getattr(batch, name) is not None}
