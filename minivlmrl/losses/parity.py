"""For other people's tests: hold a loss against values and gradients that were recorded from TRL
1.16, and name its mistake; needs no TRL. docs/audit.md says what `batch` and `options` have.
`sees` says whether a trainer's log-probabilities come from the pictures of their row.

`pytest tests/parity`, in a clone, holds every loss and option of ours against the TRL that is
installed.
"""

import importlib
import importlib.util
import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

# of TRL 1.16 and transformers 5.23; tests/record/record_fixtures.py of commit cfba8c8 wrote them
FIXTURES = Path(__file__).parent / "fixtures"


def check(my_loss, tolerance: float = 1e-6, kind: str = "grpo", **only) -> int:
    """Hold a loss against TRL's recorded values and gradients; returns the number of cases.

    Args:
        my_loss: (batch, options) -> scalar; tensors are float64 (B, T), of dpo (B, 2, T).
        tolerance: of the value and of the gradient, relative to the larger of 1 and TRL's largest.
        kind: grpo, dpo or sft.
        only: options that a case must have, such as loss_type="dapo", whole_step=True.

    Raises:
        ValueError: no case has these options; it lists what there is.
        AssertionError: names each case that differs, and the known mistakes that explain it.
    """
    count = 0
    differences = []  # a line for each case that differs
    steps = []  # and what `known_mistakes` needs of it
    for case, options, batch, value, slope in cases(kind=kind, **only):
        logps = batch["per_token_logps"].requires_grad_()
        loss = my_loss(batch, options)
        if not isinstance(loss, Tensor) or loss.dim():
            raise ValueError(f"my_loss gave {loss!r:.60}, not one number: a tensor of shape ()")
        [gradient] = torch.autograd.grad(loss + 0 * logps.sum(), logps)  # 0 of a detached loss
        value_error = distance(loss.detach(), value)
        gradient_error = distance(gradient, slope)
        count += 1
        if not max(value_error, gradient_error) <= tolerance:
            differences.append(
                f"{case} {options}: "
                f"value differs by {value_error:.1e}, gradient by {gradient_error:.1e}"
            )
            steps.append((batch, options, loss.detach(), gradient))
    if differences:
        head = f"{len(differences)} of {count} cases differ from TRL"
        raise AssertionError("\n".join([head, *differences, *known_mistakes(steps)]))
    return count


def cases(**only) -> Iterator[tuple[str, dict, dict[str, Tensor], Tensor, Tensor]]:
    """Read recorded cases with these options: name, options, batch, value, gradient.

    ValueError: there is none, and what there is.
    """
    with safe_open(FIXTURES / "losses.safetensors", framework="pt") as file:
        tensor_names = list(file.keys())
        recorded = json.loads(file.metadata()["cases"])  # {case: options}
        chosen = {case: options for case, options in recorded.items() if has(options, only)}
        if not chosen:
            kind = [options for options in recorded.values() if options["kind"] == only["kind"]]
            recorded_values = {}
            for key in only:
                values = [str(options.get(key)) for options in kind or recorded.values()]
                recorded_values[key] = list(dict.fromkeys(values))
            raise ValueError(f"no recorded case has {only}; there are {recorded_values}")
        for case, options in chosen.items():
            batch = {}
            for name in tensor_names:
                if name.startswith(f"{case}/"):
                    batch[name.partition("/")[2]] = file.get_tensor(name)
            yield case, options, batch, batch.pop("loss"), batch.pop("gradient")


def has(options: dict, only: dict) -> bool:
    """Tell whether a case has these options; of dpo loss_type is a list of one."""
    return all(key in options and options[key] in (x, [x]) for key, x in only.items())


def known_mistakes(steps: list[tuple]) -> list[str]:
    """Name the known mistakes that give these losses, in lines, or say what has to be installed.

    Args:
        steps: (batch, options, loss, gradient) of each case that differs.
    """
    if importlib.util.find_spec("minivlmrl_audit") is None:  # a distribution of its own
        return ["minivlmrl-audit names the mistake: pip install ./audit, in a clone"]
    return importlib.import_module("minivlmrl_audit.losses").mistakes(steps)


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Measure the largest difference, relative to the larger of 1 and |theirs|; inf for NaN."""
    ours, theirs = ours.double(), theirs.double()
    if ours.shape != theirs.shape or not torch.equal(ours.isnan(), theirs.isnan()):
        return math.inf
    if not theirs.numel():
        return 0.0
    difference = (ours - theirs).nan_to_num(0.0).abs().max()
    scale = theirs.nan_to_num(0.0).abs().max().clamp(min=1)
    return (difference / scale).item()


def sees(
    my_logps,
    input_ids: Tensor,
    pixel_values: Tensor,
    image_grid_thw: Tensor,
    image_token_id: int,
    tolerance: float = 1e-3,
) -> str:
    """Say which picture of a row does not reach a trainer's log-probabilities, or in another order.

    Each picture in turn is replaced by its negative. That changes what comes after the picture and
    nothing before it; and rows that differ in one picture give the same in one batch as alone.

    Args:
        my_logps: (input_ids (B, L), pixel_values (B * P, D), image_grid_thw (B * N, 3)) -> (B, T),
            log-probabilities of each row's last T tokens; with T = L - 1 the order is seen too.
        input_ids: (L,), a row as a processor of Qwen's gives it, with N pictures.
        pixel_values: (P, D), the patches of one picture after the other.
        image_grid_thw: (N, 3); wrong orders show where pictures differ in size.
        tolerance: nats, the rounding of my_logps; about 0.1 in bfloat16.

    Returns:
        What is wrong and by how many nats; "" if each picture is seen where it belongs.

    Raises:
        ValueError: the row has no picture, or another number than image_grid_thw has.
    """
    starts = 1 + ((input_ids == image_token_id).int().diff() == 1).nonzero()  # of placeholders
    N = len(image_grid_thw)
    if not len(starts) == N > 0:
        raise ValueError(f"input_ids have {len(starts)} pictures, image_grid_thw has {N}")
    signs = 1 - 2 * torch.eye(N + 1, N).to(pixel_values)  # the last row is as it was
    rows = pixel_values * signs.repeat_interleave(image_grid_thw.prod(1), 1)[:, :, None]
    alone = torch.cat([my_logps(input_ids[None], row, image_grid_thw) for row in rows])
    batch = my_logps(
        input_ids.repeat(N + 1, 1), rows.flatten(0, 1), image_grid_thw.repeat(N + 1, 1)
    )
    changes = (alone[:-1] - alone[-1]).abs()  # (N, T) by each picture
    for picture in range(N):
        change = changes[picture]
        largest_change = change.max()
        if not largest_change > tolerance:
            return f"does not see picture {picture}: its negative changes {largest_change:.1e} nats"
        early_change = change[: starts[picture] + 1 - len(input_ids)].sum()
        if early_change > tolerance:
            return (
                f"sees pictures in another order: picture {picture} "
                f"changes what comes before it by {early_change:.1e} nats"
            )
    difference = (batch - alone).abs().max()
    if difference > changes.amax(1).min() / 2:
        return f"sees another row's pictures: a batch is {difference:.1e} nats from its rows alone"
    return ""
