"""Define cells, compare their two results, and summarise each cell family. This file does not use TRL."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from pathlib import Path

import torch
import yaml
from torch import Tensor

from minivlmrl.extras.parity.loss import distance

FAMILIES = yaml.safe_load((Path(__file__).parent / "families.yaml").read_text(encoding="utf-8"))
METRIC_TOLERANCE = 1e-6  # TRL logs float32 means
Result = dict[str, Tensor]  # metric names begin with "metric "


@dataclass
class Cell:
    """A comparison between our result and TRL's: a loss, its options and a batch."""

    family: str  # the table row
    name: str  # its options, unique in the family
    ours: Callable[[], Result]
    theirs: Callable[[], Result]  # imports TRL only when it is called
    tolerance: float = 1e-10  # for value and gradient, relative to max(1, TRL's largest entry)


@dataclass
class Question:
    """A cell as in families.yaml: options, the batch's kind and seed, and options that only TRL gets (`asked`)."""

    family: str
    options: dict
    kind: str
    seed: int
    asked: dict

    @property
    def name(self) -> str:
        options = [f"{name}={value}" for name, value in self.options.items()]
        return ", ".join([*options, f"seed={self.seed}", *([self.kind] if self.kind != "plain" else [])])


def questions(kind: str) -> Iterator[Question]:
    """Yield the cells in a families.yaml section."""
    for row in FAMILIES[kind]:
        for options, (batch, seeds) in product(grid(**row["options"]), row.get("batches", {"plain": 2}).items()):
            for seed in range(seeds) if isinstance(seeds, int) else seeds:
                yield Question(row["family"].format(**options), options, batch, seed, row.get("ask", {}))


def grid(**choices) -> list[dict]:
    """Return all option combinations; values can be maps: grid(a=(1, 2), more=[{"b": 3}]) is [{"a": 1, "b": 3}, ...]"""
    of = [[x if isinstance(x, dict) else {name: x} for x in values] for name, values in choices.items()]
    return [dict(chain(*(part.items() for part in parts))) for parts in product(*of)]


@dataclass
class Outcome:
    """The result from comparing one cell."""

    name: str
    agrees: bool
    error: float = 0.0
    text: str = ""  # the metric that differs


@dataclass
class Row:
    """The summary of a family."""

    family: str
    cells: int
    agrees: bool  # whether all cells agree
    error: float  # the largest error
    verdict: str
    example: str = ""  # the cell that differs most


def loss_cell(q: Question, batch: dict, ours, theirs, leaves=("per_token_logps",), tolerance=1e-10) -> Cell:
    """Create a cell that compares the loss, the metrics, and the gradients with respect to the batch's `leaves`."""

    def answer(loss_of: Callable) -> Result:
        given = {leaf: batch[leaf].clone().requires_grad_() for leaf in leaves}
        loss, metrics = loss_of(batch | given)
        gradients = [torch.zeros_like(leaf) for leaf in given.values()]  # for a loss that depends on no leaf
        if loss.requires_grad:
            gradients = torch.autograd.grad(loss, list(given.values()), materialize_grads=True)
        result = {f"d loss / d {leaf}": gradient for leaf, gradient in zip(leaves, gradients, strict=True)}
        result |= {f"metric {metric}": torch.as_tensor(value).detach() for metric, value in metrics.items()}
        return {"loss": loss.detach()} | result

    return Cell(q.family, q.name, partial(answer, ours), partial(answer, theirs), tolerance)


def ask(cell: Cell) -> Outcome:
    """Compute both results for a cell and compare them; metrics are compared if both sides have them."""
    ours, theirs = cell.ours(), cell.theirs()
    errors = {name: distance(ours[name], theirs[name]) for name in ours.keys() & theirs.keys()}
    metrics = {name: errors.pop(name) for name in [*errors] if name.startswith("metric ")}
    lone = [name for name in ours.keys() ^ theirs.keys() if not name.startswith("metric ")]
    error = math.inf if lone else max(errors.values())
    if error > cell.tolerance:
        return Outcome(cell.name, False, error)
    wrong = [name for name, gap in metrics.items() if gap > METRIC_TOLERANCE]
    return Outcome(cell.name, False, metrics[wrong[0]], wrong[0]) if wrong else Outcome(cell.name, True, error)


def judge(family: str, outcomes: list[Outcome]) -> Row:
    """Create a table row from the outcomes for a family's cells."""
    wrong, total = [outcome for outcome in outcomes if not outcome.agrees], len(outcomes)
    worst = max(wrong or outcomes, key=lambda o: o.error)
    if not wrong:
        return Row(family, total, True, worst.error, f"agrees to {digits(worst.error)} digits")
    size = f"by {worst.error:.1e}" if math.isfinite(worst.error) else "in shape or NaN"
    what = f" ({worst.text})" if worst.text else ""
    return Row(family, total, False, worst.error, f"differs {size}{what} in {len(wrong)} of {total} cells", worst.name)


def digits(error: float) -> int:
    """Return the decimal digits to which two numbers agree: 3e-12 -> 11; at most 16, the digits of a float64."""
    return 16 if error < 1e-16 else math.floor(-math.log10(error))


def table(rows: list[Row]) -> list[str]:
    """Format the rows as lines."""
    lines = []
    for row in rows:
        lines.append(f"{row.family:40}{row.cells:5}  {row.verdict}")
        lines += [f"{'':47}most in: {row.example}"] * bool(row.example)
    return lines


def summary(rows: list[Row]) -> str:
    """Count the families that agree and differ."""
    differ = sum(not row.agrees for row in rows)
    ends = f"{len(rows) - differ} agree" + f", {differ} differ" * bool(differ)
    return f"{len(rows)} families, {sum(row.cells for row in rows)} cells: {ends}"
