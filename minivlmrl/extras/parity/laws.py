"""Check a loss function against laws: properties of every correct loss, such as "padding changes nothing".

The checks need no reference implementation. Error messages show the smallest batch on which the loss fails.

    laws.py: all losses (NaN, masked tokens, padding, row order, micro-batches)
    policy_laws.py: policy losses (advantages, importance ratios, clipping, averages, KL)
    preference_laws.py: DPO losses (gradient signs, beta, label smoothing, averages) and SFT losses (average)
"""

from collections.abc import Callable, Iterator

import torch
from torch.nn.functional import pad

from minivlmrl.errors import UserError
from minivlmrl.extras.parity.calling import loss_form
from minivlmrl.extras.parity.examined import DEFAULTS, MASKS, Examined, Finding, Law, described, numbers
from minivlmrl.extras.parity.policy_laws import (
    KL_LAWS,
    ON_POLICY_LAWS,
    ratios_act_as_in_a_known_loss,
    the_average_is_that_of_the_loss_type,
    use_its_own_numbers,
)
from minivlmrl.extras.parity.preference_laws import DPO_LAWS, recognize_ipo, tokens_are_averaged


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


def masked_tokens_are_inert(loss: Examined) -> Iterator[Finding]:
    """Require that masked tokens have no gradient, and no effect on others."""

    def lowered(batch: dict) -> Iterator[tuple]:
        for name in batch.keys() & {"per_token_logps", "old_per_token_logps", "ref_per_token_logps"}:
            lower = batch | {name: batch[name] - 1.7 * (1 - batch["mask"])}
            yield lower, batch["mask"].mul, f"if {name} is 1.7 nats lower at masked tokens"

    yield from changed_by(loss, lowered, "masked tokens change the loss, or are trained")


def padding_changes_nothing(loss: Examined) -> Iterator[Finding]:
    """Require the same loss and gradient with three masked columns more."""

    def padded(batch: dict) -> Iterator[tuple]:
        longer = {name: pad(x, (0, 3), value=-0.9) for name, x in batch.items() if x.dim() > 1}
        longer["mask"] = pad(batch["mask"], (0, 3))
        yield batch | longer, lambda slope: slope[..., :-3], "with three more columns of padding"

    yield from changed_by(loss, padded, "padding changes the loss")


def rows_have_no_order(loss: Examined) -> Iterator[Finding]:
    """Require the same loss and gradient if rows are reversed."""

    def in_reverse(batch: dict) -> Iterator[tuple]:
        yield {name: x.flip(0) for name, x in batch.items()}, lambda slope: slope.flip(0), "in reverse order"

    yield from changed_by(loss, in_reverse, "the order of the rows changes the loss")


def micro_batches_add_up(loss: Examined) -> Iterator[Finding]:
    """Require the sum or mean of micro-batch gradients to equal the gradient of the whole batch.

    The sum is right for losses divided by a whole-step count, such as all tokens, the mean for other losses.
    """
    # the user asks with whole_step=True to test only whole steps
    for batch, options in loss.batches(() if loss.given.get("whole_step") else [*MASKS[3:], 2 * MASKS[-1]]):
        step = {"whole_step": False, "tokens": int(batch["mask"].sum())} if loss.kind == "grpo" else {}
        count = len(batch["mask"])
        parts = [{name: x[rows] for name, x in batch.items()} for rows in (slice(1), slice(1, count))]
        slopes = [loss.gradient(part, **options, **step) for part in parts]
        added = torch.cat(slopes)
        averaged = torch.cat([slope * len(slope) / count for slope in slopes])
        whole = loss.gradient(batch, **options, **step)
        if loss.differ(added, whole) and loss.differ(averaged, whole):
            says = f"micro-batches change the gradient. Smallest batch: {described(batch, options)}; the first row"
            if loss.given.get("loss_type") == "dapo":
                yield Finding(f"{says} is one of them")
            yield Finding(f"{says} is one of them. Each micro-batch is averaged by itself, as in BNPO", "note")


COMMON_LAWS: tuple[Law, ...] = (
    numbers_are_finite,
    masked_tokens_are_inert,
    padding_changes_nothing,
    rows_have_no_order,
)
# {kind: law groups}; in a group, a law needs those before it
LAWS: dict[str, tuple[tuple[Law, ...], ...]] = {
    "grpo": (
        (*COMMON_LAWS, *ON_POLICY_LAWS, the_average_is_that_of_the_loss_type),
        (*COMMON_LAWS, *ON_POLICY_LAWS, ratios_act_as_in_a_known_loss),
        KL_LAWS,
        (*COMMON_LAWS, micro_batches_add_up),
    ),
    "dpo": (COMMON_LAWS, DPO_LAWS, (micro_batches_add_up,)),
    "sft": (COMMON_LAWS, (tokens_are_averaged,), (micro_batches_add_up,)),
}


class LawReport:
    """First finding per tested law."""

    def __init__(self, findings: dict[str, Finding | None]):
        self.findings = findings

    def sentences(self, kind: str) -> list[str]:
        """List what findings say, for a kind such as "broken"."""
        return [finding.says for finding in self.findings.values() if finding and finding.kind == kind]

    def broken_laws(self) -> list[str]:
        return [law for law, finding in self.findings.items() if finding and finding.kind == "broken"]

    @property
    def passes(self) -> bool:
        return not self.broken_laws()

    @property
    def tested(self) -> int:
        return len(self.findings) - len(self.sentences("not tested"))

    def __str__(self) -> str:
        broken = len(self.broken_laws())
        head = f"the loss breaks {broken} of {self.tested} laws" if broken else f"the loss obeys all {self.tested} laws"
        lines = [f"{kind}: {says}" for kind in ("broken", "note", "not tested") for says in self.sentences(kind)]
        return "\n".join([head, *lines])


def laws(my_loss: Callable, kind: str = "grpo", tolerance: float = 1e-6, framework: str = "torch", **options) -> int:
    """Check that a loss has the properties of every correct loss (laws); return how many were tested.

    Args:
        my_loss: loss function, see `check`.
        kind: grpo, dpo or sft.
        tolerance: maximum rounding error; float32 losses need 1e-5.
        framework: torch, jax or mlx, see `check`.
        options: loss options; loss_type="dapo", for example, also requires DAPO's average and clipping.

    Raises:
        AssertionError: the loss lacks required properties; the message lists each, with the smallest failing batch.
        ValueError: unknown `kind` or option, or a loss that is not a scalar tensor.
    """
    __tracebackhide__ = True
    report = examine(my_loss, kind, tolerance, framework, **options)
    if not report.passes:
        raise AssertionError(str(report))
    return report.tested


def examine(
    my_loss: Callable, kind: str = "grpo", tolerance: float = 1e-6, framework: str = "torch", **options
) -> LawReport:
    """Check a loss for the properties that `laws` tests; return a report instead of raising AssertionError."""
    if kind not in LAWS:
        raise UserError(f"kind is {kind!r}, but it must be one of {', '.join(LAWS)}")
    for name in options:
        if name not in DEFAULTS[kind]:
            known = ", ".join(DEFAULTS[kind])
            raise UserError(f"{name!r} is not an option of the kind {kind}; the options are {known}")
    loss = Examined(loss_form(my_loss, framework), kind, options, tolerance)
    if kind == "grpo":
        use_its_own_numbers(loss)
    if kind == "dpo":
        recognize_ipo(loss)
    report = LawReport({})
    for group in LAWS[kind]:
        for law in group:
            name = law.__name__
            if name not in report.findings:
                report.findings[name] = next(law(loss), None)
            finding = report.findings[name]
            if finding and finding.kind != "note":
                break
    return report
