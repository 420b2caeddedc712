"""What a cell is, how two results are compared, and what is said about a family of cells. Knows nothing of TRL.

A result is a dictionary of tensors. Names that begin with "metric" are of numbers that TRL logs after a float32 mean:
they must agree to METRIC_TOLERANCE and say nothing about the digits of the rest.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from minivlmrl.audit.notes import known

METRIC_TOLERANCE = 1e-6
Result = dict[str, Tensor]


class NotInThisVersion(Exception):
    """The TRL that is installed has no such option, value or trainer; the message says which."""


@dataclass
class Cell:
    """One question that both sides answer: a loss, its options and a batch.

    Args:
        family: the row of the table that it belongs to.
        name: its options, unique in the family.
        ours: computes our result.
        theirs: computes TRL's; imports TRL only when it is called.
        tolerance: of value and gradient, relative to the larger of 1 and TRL's largest entry.
    """

    family: str
    name: str
    ours: Callable[[], Result]
    theirs: Callable[[], Result]
    tolerance: float = 1e-10


@dataclass
class Outcome:
    """What became of one cell. kind: "agrees", "differs", "absent" (not in this version), "failed" (not asked)."""

    name: str
    kind: str
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


def loss_cell(family: str, name: str, batch: dict, leaves: tuple[str, ...], ours, theirs, tolerance=1e-10) -> Cell:
    """A cell about a loss: value, gradients to the `leaves` of a batch, and metrics.

    Args:
        ours, theirs: take the batch, return (loss, metrics).
    """

    def answer(loss: Callable) -> Result:
        given = {name: batch[name].clone().requires_grad_() for name in leaves}
        value, metrics = loss(batch | given)
        return with_gradients(value, given, metrics)

    return Cell(family, name, partial(answer, ours), partial(answer, theirs), tolerance)


def with_gradients(loss: Tensor, leaves: dict[str, Tensor], metrics: dict[str, float | Tensor]) -> Result:
    """The result of a loss: its value, its gradient to each leaf (zeros where it does not depend on it), its metrics.

    Example: loss = (x * x).sum() with x = 3 and no metrics: {"loss": 9, "d loss / d x": 6}.
    """
    gradients = [None] * len(leaves)
    if loss.requires_grad:
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    result = {"loss": loss.detach()}
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        result[f"d loss / d {name}"] = torch.zeros_like(leaf).detach() if gradient is None else gradient
    return result | {f"metric {name}": torch.as_tensor(value).detach() for name, value in metrics.items()}


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference relative to the larger of 1 and |theirs|; infinite where shapes or NaNs do not match."""
    ours, theirs = ours.double(), theirs.double()
    if ours.shape != theirs.shape or not torch.equal(ours.isnan(), theirs.isnan()):
        return math.inf
    if not theirs.numel():
        return 0.0
    theirs, ours = theirs.nan_to_num(0.0), ours.nan_to_num(0.0)
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1)).item()


def ask(cell: Cell) -> Outcome:
    """Ask TRL about a cell and compare."""
    try:
        theirs = cell.theirs()
    except NotInThisVersion as reason:
        return Outcome(cell.name, "absent", text=str(reason))
    except Exception as error:  # the methods of this version ask for something that the oracle does not have
        return Outcome(cell.name, "failed", text=f"{type(error).__name__}: {error}".splitlines()[0])
    return compare(cell, theirs)


def compare(cell: Cell, theirs: Result) -> Outcome:
    """Hold our result of a cell against one of TRL's; metrics count where both sides have them."""
    try:
        ours = cell.ours()
    except Exception as error:  # ours must answer whatever TRL answers
        return Outcome(cell.name, "differs", math.inf, f"ours raised {type(error).__name__}: {error}")
    values = {name for name in ours.keys() | theirs.keys() if not name.startswith("metric ")}
    error = max(distance(ours[name], theirs[name]) if name in ours and name in theirs else math.inf for name in values)
    for name in (ours.keys() & theirs.keys()) - values:
        if error <= cell.tolerance and (gap := distance(ours[name], theirs[name])) > METRIC_TOLERANCE:
            return Outcome(cell.name, "differs", gap, name)
    return Outcome(cell.name, "agrees" if error <= cell.tolerance else "differs", error)


def judge(family: str, outcomes: list[Outcome], version: str) -> Row:
    """One row of the table from the outcomes of a family's cells.

    Example: two cells with errors 1e-15 and 3e-12 agree to 11 digits.
    """
    of = {kind: [o for o in outcomes if o.kind == kind] for kind in ("differs", "agrees", "failed", "absent")}
    kind, total = next(kind for kind, found in of.items() if found), len(outcomes)
    error = max((o.error for o in of["agrees"] + of["differs"]), default=None)
    silent = of["absent"] + of["failed"]
    rest = f" ({len(silent)} of {total} cells had no answer: {silent[0].text})" if silent else ""
    if kind == "agrees":
        return Row(family, total, kind, error, f"agrees to {digits(error)} digits{rest}")
    if kind == "differs":
        worst = max(of[kind], key=lambda o: o.error)
        size = f"by {worst.error:.1e}" if math.isfinite(worst.error) else "in shape or NaN"
        what = f" ({worst.text})" if worst.text else ""  # a metric, or what ours raised
        notes = [known(f"{family}: {o.name}", version) for o in of[kind]]
        note, verdict = (
            "; ".join(dict.fromkeys(chain(*notes))),
            f"differs {size}{what} in {len(of[kind])} of {total} cells",
        )
        return Row(family, total, kind, error, verdict + rest, worst.name, note, all(notes))
    verdict = f"{'not in this version' if kind == 'absent' else 'could not be asked'} ({of[kind][0].text})"
    return Row(family, total, kind, None, verdict, note="; ".join(known(family, version)))


def digits(error: float) -> int:
    """Decimal digits to which two numbers agree: 3e-12 -> 11; at most 16, those of a float64."""
    return 16 if error < 1e-16 else math.floor(-math.log10(error))
