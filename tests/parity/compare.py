"""What a cell is, how two results are compared, and what is said about a family of cells. Knows nothing of TRL."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from pathlib import Path

import torch
import yaml
from torch import Tensor

from minivlmrl.audit.parity import distance

FAMILIES = yaml.safe_load((Path(__file__).parent / "families.yaml").read_text(encoding="utf-8"))
NOTES = yaml.safe_load((Path(__file__).parent / "notes.yaml").read_text(encoding="utf-8"))  # on versions of TRL
METRIC_TOLERANCE = 1e-6  # TRL logs float32 means
WORDS = {"agrees": "agree", "absent": "not in this version", "differs": "differ"}
Result = dict[str, Tensor]  # names of metrics begin with "metric "


@dataclass
class Cell:
    """One question that both sides answer: a loss, its options and a batch."""

    family: str  # the row of the table
    name: str  # its options, unique in the family
    ours: Callable[[], Result]
    theirs: Callable[[], Result]  # imports TRL only when it is called
    tolerance: float = 1e-10  # of value and gradient, relative to the larger of 1 and TRL's largest entry


@dataclass
class Question:
    """A cell as families.yaml has it: options, the kind and the seed of its batch, and what only TRL is told."""

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
    """The cells of a section of families.yaml."""
    for row in FAMILIES[kind]:
        for options, (batch, seeds) in product(grid(**row["options"]), row.get("batches", {"plain": 2}).items()):
            for seed in range(seeds) if isinstance(seeds, int) else seeds:
                yield Question(row["family"].format(**options), options, batch, seed, row.get("ask", {}))


def grid(**choices) -> list[dict]:
    """All choices of options; a map is several: grid(a=(1, 2), more=[{"b": 3}]) is [{"a": 1, "b": 3}, ...]."""
    of = [[x if isinstance(x, dict) else {name: x} for x in values] for name, values in choices.items()]
    return [dict(chain(*(part.items() for part in parts))) for parts in product(*of)]


@dataclass
class Outcome:
    """What became of one cell."""

    name: str
    kind: str  # "agrees", "differs", "absent": TRL gave no answer
    error: float = 0.0
    text: str = ""


@dataclass
class Row:
    """What became of a family."""

    family: str
    cells: int
    kind: str  # as in Outcome; "differs" when any cell differs, "agrees" when none does and one was compared
    error: float | None  # the worst that was measured, None for none
    verdict: str
    example: str = ""  # the cell that differs most
    note: str = ""  # what is known about this version, for a row that does not agree
    excused: bool = True  # nothing differs, or a note explains every cell that does


def loss_cell(q: Question, batch: dict, ours, theirs, leaves=("per_token_logps",), tolerance=1e-10) -> Cell:
    """A cell about (loss, metrics), which both sides compute from the batch, and the gradients to its `leaves`."""

    def answer(loss_of: Callable) -> Result:
        given = {leaf: batch[leaf].clone().requires_grad_() for leaf in leaves}
        loss, metrics = loss_of(batch | given)
        gradients = [torch.zeros_like(leaf) for leaf in given.values()]  # of a loss that depends on no leaf
        if loss.requires_grad:
            gradients = torch.autograd.grad(loss, list(given.values()), materialize_grads=True)
        result = {f"d loss / d {leaf}": gradient for leaf, gradient in zip(leaves, gradients, strict=True)}
        result |= {f"metric {metric}": torch.as_tensor(value).detach() for metric, value in metrics.items()}
        return {"loss": loss.detach()} | result

    return Cell(q.family, q.name, partial(answer, ours), partial(answer, theirs), tolerance)


def ask(cell: Cell) -> Outcome:
    """Ask TRL about a cell and compare."""
    try:
        theirs = cell.theirs()
    except Exception as error:  # this version lacks something, or asks for something that the oracle does not have
        return Outcome(cell.name, "absent", text=f"{type(error).__name__}: {error}".splitlines()[0])
    return compare(cell, theirs)


def compare(cell: Cell, theirs: Result) -> Outcome:
    """Hold our result of a cell against one of TRL's; metrics count where both sides have them."""
    try:
        ours = cell.ours()
    except Exception as error:  # ours must answer whatever TRL answers
        return Outcome(cell.name, "differs", math.inf, f"ours raised {type(error).__name__}: {error}")
    errors = {name: distance(ours[name], theirs[name]) for name in ours.keys() & theirs.keys()}
    metrics = {name: errors.pop(name) for name in [*errors] if name.startswith("metric ")}
    lone = [name for name in ours.keys() ^ theirs.keys() if not name.startswith("metric ")]
    error = math.inf if lone else max(errors.values())
    if error > cell.tolerance:
        return Outcome(cell.name, "differs", error)
    wrong = [name for name, gap in metrics.items() if gap > METRIC_TOLERANCE]
    return Outcome(cell.name, "differs", metrics[wrong[0]], wrong[0]) if wrong else Outcome(cell.name, "agrees", error)


def judge(family: str, outcomes: list[Outcome], version: str) -> Row:
    """One row of the table from the outcomes of a family's cells."""
    of = {kind: [o for o in outcomes if o.kind == kind] for kind in ("differs", "agrees", "absent")}
    kind, total = next(kind for kind, found in of.items() if found), len(outcomes)
    worst = max(of[kind], key=lambda o: o.error)
    if kind == "absent":
        return Row(family, total, kind, None, f"{WORDS[kind]} ({worst.text})", note="; ".join(known(family, version)))
    silent = of["absent"]
    rest = f" ({len(silent)} of {total} cells had no answer: {silent[0].text})" if silent else ""
    if kind == "agrees":
        return Row(family, total, kind, worst.error, f"agrees to {digits(worst.error)} digits{rest}")
    size = f"by {worst.error:.1e}" if math.isfinite(worst.error) else "in shape or NaN"
    what = f" ({worst.text})" if worst.text else ""  # a metric, or what ours raised
    verdict = f"differs {size}{what} in {len(of[kind])} of {total} cells{rest}"
    notes = [known(f"{family}: {o.name}", version) for o in of[kind]]
    note = "; ".join(dict.fromkeys(chain(*notes)))
    return Row(family, total, kind, worst.error, verdict, worst.name, note, all(notes))


def digits(error: float) -> int:
    """Decimal digits to which two numbers agree: 3e-12 -> 11; at most 16, those of a float64."""
    return 16 if error < 1e-16 else math.floor(-math.log10(error))


def known(title: str, version: str) -> list[str]:
    """What notes.yaml says of a version for a cell ("family: options"), or for a family by its name."""
    here = [int(part) for part in re.findall(r"\d+", version)[:3]]  # 1.16.0.dev0 is [1, 16, 0]
    return [text for title_of, since, below, text in NOTES if re.search(title_of, title) and since <= here < below]


def table(rows: list[Row]) -> list[str]:
    """Write the rows as lines."""
    lines = []
    for row in rows:
        lines.append(f"{row.family:40}{row.cells:5}  {row.verdict}")
        lines += [f"{'':47}most in: {row.example}"] * bool(row.example)
        lines += [f"{'':47}known: {row.note}"] * bool(row.note)
    return lines


def summary(rows: list[Row]) -> str:
    """Count how the families ended."""
    counts = Counter(row.kind for row in rows)
    ends = ", ".join(f"{counts[kind]} {word}" for kind, word in WORDS.items() if counts[kind])
    excused = sum(row.kind == "differs" and row.excused for row in rows)
    ends += f" ({excused} of them as known)" if excused else ""
    return f"{len(rows)} families, {sum(row.cells for row in rows)} cells: {ends}"
