"""Check any loss for NaN, and for wrong effects of masked tokens, padding, row order or micro-batches."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn.functional import pad

from minivlmrl.extras.parity.assertions import split_error
from minivlmrl.extras.parity.examined import MASKS, Examined, Finding, Law, described, numbers, smallest


@smallest
def numbers_are_finite(loss: Examined) -> Iterator[Finding]:
    """Require a finite loss and gradient in all batches."""
    for batch, options in loss.batches():
        value, slope = loss(batch, **options)
        if not (value.isfinite() and slope.isfinite().all()):
            yield Finding(
                f"the loss or its gradient is not a number. Smallest batch: {described(batch, options)}; the loss is "
                f"{numbers(value)}, and its gradient is {numbers(slope)}"
            )


def changed_by(loss: Examined, vary: Callable, says: str) -> Iterator[Finding]:
    """Yield an error if a batch change that must have no effect, such as more padding, changes loss or gradient.

    Args:
        vary: generator of (changed batch, function that maps its gradient back to the original batch, description).
    """
    for batch, options in loss.batches():
        value, slope = loss(batch, **options)
        for other_batch, restored, how in vary(batch):
            other_value, other_slope = loss(other_batch, **options)
            where = f"{described(batch, options)}; {how},"
            yield from loss.unequal(says, f"{where} the loss is", other_value, value)
            yield from loss.unequal(says, f"{where} the gradient is", restored(other_slope), slope)


@smallest
def masked_tokens_are_inert(loss: Examined) -> Iterator[Finding]:
    """Require that masked tokens have no gradient, and no effect on others."""
    for batch, options in loss.batches():
        of_masked = loss.gradient(batch, **options) * (1 - batch["mask"])
        where = f"{described(batch, options)}; their gradient is"
        yield from loss.unequal("masked tokens are trained", where, of_masked, torch.zeros_like(of_masked))
    yield from changed_by(loss, other_masked_tokens, "masked tokens change the loss")


def other_masked_tokens(batch: dict) -> Iterator[tuple]:
    """Lower log-probabilities of masked tokens, one tensor at a time."""
    mask = batch["mask"]
    for name in ("per_token_logps", "old_per_token_logps", "ref_per_token_logps"):
        if name in batch:
            lower = batch | {name: batch[name] - 1.7 * (1 - mask)}
            yield lower, mask.mul, f"if {name} is 1.7 nats lower at masked tokens"


@smallest
def padding_changes_nothing(loss: Examined) -> Iterator[Finding]:
    """Require the same loss and gradient with more padding."""
    yield from changed_by(loss, padded, "padding changes the loss")


def padded(batch: dict) -> Iterator[tuple]:
    """Append three masked columns."""
    values = {name: 0.0 if name == "mask" else -0.9 for name, x in batch.items() if x.dim() > 1}
    longer = batch | {name: pad(batch[name], (0, 3), value=value) for name, value in values.items()}
    yield longer, lambda slope: slope[..., :-3], "with three more columns of padding"


@smallest
def rows_have_no_order(loss: Examined) -> Iterator[Finding]:
    """Require the same loss and gradient if rows are reversed."""
    yield from changed_by(loss, in_reverse, "the order of the rows changes the loss")


def in_reverse(batch: dict) -> Iterator[tuple]:
    """Reverse the order of the rows."""
    yield {name: x.flip(0) for name, x in batch.items()}, lambda slope: slope.flip(0), "in reverse order"


@smallest
def micro_batches_add_up(loss: Examined) -> Iterator[Finding]:
    """Require the sum or mean of micro-batch gradients to equal the gradient of the whole batch.

    The sum is right for losses divided by a whole-step count, such as all tokens, the mean for other losses.
    """
    if loss.given.get("whole_step"):
        return  # the user asked with whole_step=True to test only whole steps
    rows = [mask for mask in MASKS if len(mask) > 1]
    for batch, options in loss.batches([*rows, 2 * rows[-1]]):
        step = {"whole_step": False, "tokens": int(batch["mask"].sum())} if loss.kind == "grpo" else {}
        error = split_error(partial(loss.gradient, **options, **step), batch, loss.tolerance)
        if not error:
            continue
        says = f"micro-batches change the gradient. Smallest batch: {described(batch, options)}; {error}"
        # only a note for losses (except DAPO) that ignore `tokens` and whole_step: a trainer may weight micro-batches
        parts = [{name: x[i : i + 1] for name, x in batch.items()} for i in range(len(batch["mask"]))]
        reads_totals = any(
            loss.differ(loss.gradient(part, **options), loss.gradient(part, **options, **step)) for part in parts
        )
        if loss.kind != "grpo" or not (reads_totals or loss.given.get("loss_type") == "dapo"):
            yield Finding(f"{says}. Each micro-batch is averaged by itself, as in BNPO", "note")
        else:
            yield Finding(says)


COMMON_LAWS: tuple[Law, ...] = (
    numbers_are_finite,
    masked_tokens_are_inert,
    padding_changes_nothing,
    rows_have_no_order,
)
