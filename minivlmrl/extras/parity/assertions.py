"""Assertions for testing your own trainer, with tensors or NumPy arrays."""

from collections.abc import Callable
from functools import partial

import torch

from minivlmrl.errors import UserError
from minivlmrl.extras.parity.audit import SECONDS, checked, report
from minivlmrl.extras.parity.examined import Examined
from minivlmrl.extras.parity.search import gaps
from minivlmrl.extras.parity.step import read


def assert_step(folder):
    """Assert that the numbers in a recorded step equal recomputed numbers.

    Raises ValueError if the folder contains no step, or nothing could be compared.
    """
    __tracebackhide__ = True
    findings, d = checked(folder, SECONDS)
    assert all(finding.ok for finding in findings), f"{folder}\n{report(findings, d)}"


def assert_split_invariant(gradients, rows: int, tolerance: float = 1e-6, sizes=None):
    """Assert that gradients do not depend on how rows are split into micro-batches or ranks.

    Args:
        gradients: your trainer's function from micro-batches of row indices, such as [[0, 2], [1, 3]], to
            {parameter name: accumulated gradient}.
        rows: number of rows in the step, at least 2.
        tolerance: maximum difference, relative to the largest gradient without micro-batches.
        sizes: numbers of micro-batches to test; default: 2, rows - 1 and rows.
    """
    __tracebackhide__ = True
    assert rows > 1, f"rows is {rows}, but at least 2 rows are needed to compare different splits"

    def split(parts: int) -> tuple[list[list[int]], dict[str, torch.Tensor]]:
        """Return micro-batches of row indices, such as [[0, 2, 4], [1, 3]], and accumulated gradients."""
        indices = [list(range(part, rows, parts)) for part in range(parts)]
        return indices, {name: torch.as_tensor(x).double() for name, x in gradients(indices).items()}

    _, whole_gradients = split(1)
    unit = max(gaps(x, 0.0, 1.0).max() for x in whole_gradients.values())
    assert unit > 0, "all gradients are zero, so nothing was compared; use rows with a nonzero loss"
    # unequal sizes (2, 1, 1, ... in rows - 1 micro-batches) reveal a mean that ignores micro-batch sizes
    for size in sizes or (2, rows - 1, rows):
        parts, split_gradients = split(size)
        names = sorted(whole_gradients.keys() ^ split_gradients.keys())
        assert not names, (
            f"micro-batches {parts}: the parameter {names[0]} has a gradient either only with this split, or only "
            "without it"
        )
        errors = {name: gaps(x, whole_gradients[name], unit).max() for name, x in split_gradients.items()}
        worst = max(errors, key=lambda name: errors[name])
        assert errors[worst] <= tolerance, (
            f"micro-batches {parts}: the gradient of {worst} differs from the gradient of the whole "
            f"step by {errors[worst]:.1e} times the largest gradient"
        )


def split_error(gradient: Callable, batch: dict[str, torch.Tensor], tolerance: float) -> str:
    """Return "" if the sum or mean of micro-batch gradients equals the whole batch's gradient, else an error message.

    Args:
        gradient: function from a batch to the loss gradient with respect to per_token_logps.
        batch: {name: tensor with B rows}.
    """
    if not gradient(batch).nan_to_num().any():
        return ""
    error = ""
    for is_mean in (False, True):
        try:
            assert_split_invariant(
                partial(accumulated, gradient, batch, is_mean=is_mean), len(batch["mask"]), tolerance
            )
            return ""
        except AssertionError as found:
            error = str(found)
    return error


def accumulated(gradient: Callable, batch: dict[str, torch.Tensor], parts: list[list[int]], is_mean: bool) -> dict:
    """Return the sum of micro-batch gradients, or with is_mean, their mean weighted by rows."""
    slope = torch.zeros_like(batch["per_token_logps"])
    for rows in parts:
        share = len(rows) / len(slope) if is_mean else 1.0
        slope[rows] = share * gradient({name: x[rows] for name, x in batch.items()}).nan_to_num()
    return {"per_token_logps": slope}


def assert_step_split_invariant(folder, my_loss: Callable, tolerance: float = 1e-6):
    """Assert equal sums or row-weighted means of micro-batch gradients for every split of a recorded GRPO step.

    Args:
        my_loss: see `check`; gets the options whole_step=False and `tokens`, the token count of the whole step.
    """
    __tracebackhide__ = True
    d = read(folder)
    if d.about["kind"] != "grpo":
        raise UserError(f"{folder} is a step of kind {d.about['kind']}, but only steps of kind grpo can be split")
    logps = d["per_token_logps"]
    batch = {"per_token_logps": logps, "mask": d["completion_mask"].double(), "advantages": d["advantages"]}
    batch |= {name: d.get(name, logps) for name in ("old_per_token_logps", "ref_per_token_logps")}
    options = {"whole_step": False, "tokens": int(batch["mask"].sum())}
    options["max_completion_length"] = d.about.get("max_completion_length") or d.width
    loss = Examined(my_loss, "grpo", d.about.get("loss", {}) | options)
    error = split_error(loss.gradient, batch, tolerance)
    assert not error, f"{folder}: {error}"
