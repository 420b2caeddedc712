"""Check a loss function against laws: properties of every correct loss, such as "padding changes nothing".

The checks need no reference implementation. Error messages show the smallest batch on which the loss fails.

    laws.py: all losses (NaN, inputs changed in place, masked tokens, padding, row order, micro-batches)
    policy_laws.py: policy losses (advantages, importance ratios, KL)
    preference_laws.py: DPO losses (gradient signs, beta, averages) and SFT losses (average)
"""

from collections.abc import Callable, Iterator

import torch
from torch.nn.functional import pad

from minivlmrl.errors import UserError
from minivlmrl.extras.parity.calling import loss_form
from minivlmrl.extras.parity.examined import DEFAULTS, MASKS, Examined, Law, described, numbers, random_batch
from minivlmrl.extras.parity.policy_laws import KL_LAWS, ON_POLICY_LAWS, no_kl_note, weights_note
from minivlmrl.extras.parity.preference_laws import DPO_LAWS, tokens_are_averaged
from minivlmrl.extras.parity.reads import kind_of, refuse_random
from minivlmrl.extras.parity.verdict import Verdict


def numbers_are_finite(loss: Examined) -> Iterator[str]:
    """Require a finite loss and gradient in all batches."""
    for batch, options in loss.batches():
        value, slope = loss(batch, **options)
        if not (value.isfinite() and slope.isfinite().all()):
            yield (
                f"the loss or its gradient is not a number. Smallest batch: {described(batch, options)}; the loss is "
                f"{numbers(value)}, and its gradient is {numbers(slope)}"
            )


def inputs_stay_unchanged(loss: Examined) -> Iterator[str]:
    """Require that the loss changes no tensor of its batch in place."""
    batch = random_batch(loss.kind, MASKS[-1])
    copies = {name: x.clone() for name, x in batch.items()}
    loss.my_loss(copies, {**loss.options, "tokens": 9})
    for name, x in batch.items():
        if not copies[name].equal(x):
            yield f"the loss changes {name} in place"


def changed_by(loss: Examined, vary: Callable, says: str) -> Iterator[str]:
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


def masked_tokens_are_inert(loss: Examined) -> Iterator[str]:
    """Require that masked tokens have no gradient, and do not change the loss."""

    def lowered(batch: dict) -> Iterator[tuple]:
        for name, x in batch.items():
            if name.endswith("logps"):
                lower = batch | {name: x - 1.7 * (1 - batch["mask"])}
                yield lower, batch["mask"].mul, f"if {name} is 1.7 nats lower at masked tokens"

    yield from changed_by(loss, lowered, "masked tokens change the loss, or are trained")


def padding_changes_nothing(loss: Examined) -> Iterator[str]:
    """Require the same loss and gradient after adding three columns of padding."""

    def padded(batch: dict) -> Iterator[tuple]:
        longer = {name: pad(x, (0, 3), value=-0.9) for name, x in batch.items() if x.dim() > 1}
        longer["mask"] = pad(batch["mask"], (0, 3))
        yield batch | longer, lambda slope: slope[..., :-3], "with three more columns of padding"

    yield from changed_by(loss, padded, "padding changes the loss")


def rows_have_no_order(loss: Examined) -> Iterator[str]:
    """Require the same loss and gradient for rows in reverse order."""

    def in_reverse(batch: dict) -> Iterator[tuple]:
        yield {name: x.flip(0) for name, x in batch.items()}, lambda slope: slope.flip(0), "in reverse order"

    yield from changed_by(loss, in_reverse, "the order of the rows changes the loss")


def micro_batch_note(loss: Examined) -> Iterator[str]:
    """Report if a batch's gradient is neither the sum nor the mean of its micro-batch gradients.

    The sum is right for losses that divide by a count over the whole optimizer step, such as all tokens. The mean is
    right for other losses.
    """
    batch = random_batch(loss.kind, MASKS[-1])
    options = {}
    if loss.kind == "grpo":
        options = {"whole_step": False, "tokens": int(batch["mask"].sum())}
    count = len(batch["mask"])
    added = []
    averaged = []
    for rows in (slice(1), slice(1, count)):
        slope = loss.gradient({name: x[rows] for name, x in batch.items()}, **options)
        added.append(slope)
        averaged.append(slope * len(slope) / count)
    whole = loss.gradient(batch, **options)
    if loss.differ(torch.cat(added), whole) and loss.differ(torch.cat(averaged), whole):
        yield "micro-batches change the gradient; each is averaged by itself, as in BNPO"


COMMON_LAWS: tuple[Law, ...] = (
    numbers_are_finite,
    inputs_stay_unchanged,
    masked_tokens_are_inert,
    padding_changes_nothing,
    rows_have_no_order,
)
# {loss kind: groups of laws}; testing of a group stops at the first broken law, because later laws assume it
LAWS: dict[str, tuple[tuple[Law, ...], ...]] = {
    "grpo": ((*COMMON_LAWS, *ON_POLICY_LAWS), KL_LAWS),
    "dpo": (COMMON_LAWS, DPO_LAWS),
    "sft": (COMMON_LAWS, (tokens_are_averaged,)),
}
NOTES: dict[str, tuple[Law, ...]] = {
    "grpo": (weights_note, no_kl_note, micro_batch_note),
    "dpo": (micro_batch_note,),
    "sft": (micro_batch_note,),
}


def laws(
    my_loss: Callable, kind: str | None = None, tolerance: float = 1e-6, framework: str = "torch", **options
) -> int:
    """Check that a loss has the properties ("laws") of every correct loss; return the number of laws.

    Args:
        my_loss: loss function, see `check`.
        kind: grpo, dpo or sft, None = infer as in `check`.
        tolerance: maximum rounding error; float32 losses need 1e-5.
        framework: torch, jax or mlx, see `check`.
        options: loss options, such as beta=0.1. In DPO, loss_type selects the laws.

    Raises:
        AssertionError: the loss lacks required properties; the message lists each, with the smallest failing batch.
        ValueError: unknown `kind` or option, or a loss that is not a scalar tensor.
    """
    __tracebackhide__ = True
    report = examine(my_loss, kind, tolerance, framework, **options)
    if not report.passes:
        raise AssertionError(str(report))
    return report.count


def examine(
    my_loss: Callable, kind: str | None = None, tolerance: float = 1e-6, framework: str = "torch", **options
) -> Verdict:
    """Test a loss like `laws`, but return a report instead of raising AssertionError."""
    loss = loss_form(my_loss, framework)
    kind = kind or kind_of(loss)
    if kind not in LAWS:
        raise UserError(f"kind is {kind!r}, but it must be one of {', '.join(LAWS)}")
    for name in options:
        if name not in DEFAULTS[kind]:
            known = ", ".join(DEFAULTS[kind])
            raise UserError(f"{name!r} is not an option of the kind {kind}; the options are {known}")
    refuse_random(loss, kind)
    loss = Examined(loss, kind, options, tolerance)
    tested = 0
    broken = {}
    for group in LAWS[kind]:
        tested += len(group)
        for law in group:
            says = next(law(loss), None)
            if says:
                broken[law.__name__] = says
                break
    notes = []
    for note in NOTES[kind]:
        notes += note(loss)
    head = f"the loss breaks {len(broken)} of {tested} laws" if broken else f"the loss obeys all {tested} laws"
    return Verdict(tested, head, broken=broken, notes=notes)
