"""Define a cell, which compares a result of ours with TRL's. This file does not import TRL."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from pathlib import Path

import torch
import yaml
from torch import Tensor

FAMILIES = yaml.safe_load((Path(__file__).parent / "families.yaml").read_text(encoding="utf-8"))
Result = dict[str, Tensor]  # metric names begin with "metric "


@dataclass
class Cell:
    """A comparison of our result with TRL's: a loss, its options and a batch."""

    name: str  # options as text, unique in its family
    ours: Callable[[], Result]
    theirs: Callable[[], Result]  # imports TRL only when it is called
    tolerance: float = 1e-10  # for value and gradient, relative to max(1, TRL's largest entry)


@dataclass
class Question:
    """An entry of families.yaml: options, kind and seed of the batch, and options that only TRL gets (`asked`)."""

    family: str
    options: dict
    kind: str
    seed: int
    requested: dict

    @property
    def name(self) -> str:
        options = [f"{name}={value}" for name, value in self.options.items()]
        return ", ".join([*options, f"seed={self.seed}", *([self.kind] if self.kind != "plain" else [])])


def questions(kind: str) -> Iterator[Question]:
    """Yield a question for each combination of options, batch and seed in a section of families.yaml."""
    for row in FAMILIES[kind]:
        for options, (batch, seeds) in product(grid(**row["options"]), row.get("batches", {"plain": 2}).items()):
            for seed in range(seeds) if isinstance(seeds, int) else seeds:
                yield Question(row["family"].format(**options), options, batch, seed, row.get("ask", {}))


def grid(**choices) -> list[dict]:
    """Return all combinations of options: grid(a=(1, 2), more=[{"b": 3}]) is [{"a": 1, "b": 3}, {"a": 2, "b": 3}]."""
    of = [[x if isinstance(x, dict) else {name: x} for x in values] for name, values in choices.items()]
    return [dict(chain(*(part.items() for part in parts))) for parts in product(*of)]


def loss_cell(q: Question, batch: dict, ours, theirs, leaves=("per_token_logps",), tolerance=1e-10) -> Cell:
    """Compare loss, metrics, and gradients with respect to the `leaves` of a batch."""

    def answer(loss_of: Callable) -> Result:
        given = {leaf: batch[leaf].clone().requires_grad_() for leaf in leaves}
        loss, metrics = loss_of(batch | given)
        gradients = [torch.zeros_like(leaf) for leaf in given.values()]  # for a loss that depends on no leaf
        if loss.requires_grad:
            gradients = torch.autograd.grad(loss, list(given.values()), materialize_grads=True)
        result = {f"d loss / d {leaf}": gradient for leaf, gradient in zip(leaves, gradients, strict=True)}
        result |= {f"metric {metric}": torch.as_tensor(value).detach() for metric, value in metrics.items()}
        return {"loss": loss.detach()} | result

    return Cell(q.name, partial(answer, ours), partial(answer, theirs), tolerance)


def difference(cell: Cell) -> str:
    """Describe how the results of a cell differ ("" if they agree), for metrics only if both sides have them."""
    ours, theirs = cell.ours(), cell.theirs()
    if lone := {name for name in ours.keys() ^ theirs.keys() if not name.startswith("metric ")}:
        return f"{cell.name}: only one side has {', '.join(lone)}"
    for name in ours.keys() & theirs.keys():
        error = distance(ours[name], theirs[name])
        if error > (1e-6 if name.startswith("metric ") else cell.tolerance):  # TRL logs float32 means
            return f"{cell.name}: {name} differs by {error:.1e}"
    return ""


def distance(ours: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to max(1, largest |expected|); inf if NaN positions differ."""
    if not torch.equal(ours.isnan(), expected.isnan()):
        return math.inf
    scale = expected.nan_to_num(0.0).abs().max().clamp(min=1)
    return float((ours - expected).nan_to_num(0.0).abs().max() / scale)
