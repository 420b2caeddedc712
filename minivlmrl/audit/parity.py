"""For other people's tests: hold a loss against values and gradients that were recorded from TRL
1.16; needs no TRL.

`pytest tests/parity`, in a clone, holds every loss and option of ours against the TRL that is
installed.
"""

import json
import math

import torch
from safetensors import safe_open
from torch import Tensor

from minivlmrl.audit.checks import FIXTURES


def check(my_loss, tolerance: float = 1e-6, **only) -> int:
    """Hold a loss against TRL's recorded values and gradients; returns the number of cases.

    Args:
        my_loss: (batch, options) -> scalar; tensors are float64 (B, T), of dpo (B, 2, T).
        tolerance: of the value and of the gradient, relative to the larger of 1 and TRL's largest.
        only: options that a case must have, such as kind="grpo", loss_type="dapo".

    Raises:
        AssertionError: names each case that differs, with its options.
    """
    wrong, count = [], 0
    with safe_open(FIXTURES / "losses.safetensors", framework="pt") as file:
        names = [*file.keys()]
        for case, options in json.loads(file.metadata()["cases"]).items():
            if any(options.get(key) != value for key, value in only.items()):
                continue
            batch = {
                n.partition("/")[2]: file.get_tensor(n) for n in names if n.startswith(f"{case}/")
            }
            value, slope = batch.pop("loss"), batch.pop("gradient")
            logps = batch["per_token_logps"].requires_grad_()
            loss = my_loss(batch, options)
            [gradient] = torch.autograd.grad(loss, logps, allow_unused=True, materialize_grads=True)
            errors = distance(loss.detach(), value), distance(gradient, slope)
            count += 1
            if max(errors) > tolerance:
                of = f"value differs by {errors[0]:.1e}, gradient by {errors[1]:.1e}"
                wrong.append(f"{case} {options}: {of}")
    assert not wrong, "\n".join([f"{len(wrong)} of {count} cases differ from TRL", *wrong])
    return count


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Measure the largest difference, relative to the larger of 1 and |theirs|.

    It is infinite where shapes or NaNs do not match.
    """
    ours, theirs = ours.double(), theirs.double()
    if ours.shape != theirs.shape or not torch.equal(ours.isnan(), theirs.isnan()):
        return math.inf
    if not theirs.numel():
        return 0.0
    gap = (ours - theirs).nan_to_num(0.0).abs().max()
    return (gap / theirs.nan_to_num(0.0).abs().max().clamp(min=1)).item()
