"""For other people's tests: hold a loss against values and gradients that were recorded from TRL
1.16, and name its mistake; needs no TRL. docs/audit.md says what `batch` and `options` have.

`pytest tests/parity`, in a clone, holds every loss and option of ours against the TRL that is
installed.
"""

import json
import math
from collections.abc import Iterator

import torch
from safetensors import safe_open
from torch import Tensor

from minivlmrl.algorithms.policy_losses import FamilyLoss
from minivlmrl.algorithms.preference_losses import DPOLoss
from minivlmrl.audit.audit import Cause, explain, fits
from minivlmrl.audit.checks import FIXTURES
from minivlmrl.audit.dump import Dump

OPTIONS = {"grpo": FamilyLoss, "dpo": DPOLoss}  # of a kind, as the audit takes them
SEARCHES = 3  # for a mistake that explains cases: each takes seconds


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
    wrong, steps, count = [], [], 0
    for case, options, batch, value, slope in cases(kind=kind, **only):
        logps = batch["per_token_logps"].requires_grad_()
        loss = my_loss(batch, options)
        [gradient] = torch.autograd.grad(loss + 0 * logps.sum(), logps)  # 0 of a detached loss
        errors = distance(loss.detach(), value), distance(gradient, slope)
        count += 1
        if not max(errors) <= tolerance:
            of = f"value differs by {errors[0]:.1e}, gradient by {errors[1]:.1e}"
            wrong.append(f"{case} {options}: {of}")
            steps.append(as_step(batch, options, loss.detach(), gradient))
    head = f"{len(wrong)} of {count} cases differ from TRL"
    assert not wrong, "\n".join([head, *wrong, *mistakes(steps)])
    return count


def cases(**only) -> Iterator[tuple[str, dict, dict[str, Tensor], Tensor, Tensor]]:
    """Recorded cases with these options: name, options, batch, value, gradient; or a ValueError."""
    with safe_open(FIXTURES / "losses.safetensors", framework="pt") as file:
        names, every = [*file.keys()], json.loads(file.metadata()["cases"])
        chosen = {  # loss_type of dpo is a list of one
            case: options
            for case, options in every.items()
            if all(key in options and options[key] in (x, [x]) for key, x in only.items())
        }
        if not chosen:
            same = [of for of in every.values() if of["kind"] == only["kind"]] or every.values()
            there = {key: list(dict.fromkeys(str(of.get(key)) for of in same)) for key in only}
            raise ValueError(f"no recorded case has {only}; there are {there}")
        for case, options in chosen.items():
            own = [name for name in names if name.startswith(f"{case}/")]
            batch = {name.partition("/")[2]: file.get_tensor(name) for name in own}
            yield case, options, batch, batch.pop("loss"), batch.pop("gradient")


def as_step(batch: dict, options: dict, loss: Tensor, gradient: Tensor) -> Dump:
    """A case with the loss and the gradient that someone's function gave, as the audit takes it."""
    kind, given = options["kind"], batch | {"logps_gradient": gradient}
    rows = {name: x.detach().flatten(0, -2) if x.dim() > 1 else x for name, x in given.items()}
    rows["completion_mask"] = mask = rows.pop("mask")
    rows |= dict.fromkeys(("input_ids", "prompt_mask"), torch.zeros_like(mask, dtype=torch.long))
    number = torch.arange(len(mask))
    rows |= {"pair": number // 2, "chosen": 1 - number % 2} if kind == "dpo" else {}
    rows["loss"] = loss.view(1)
    known = OPTIONS[kind].__dataclass_fields__ if kind in OPTIONS else ["loss_type"]
    about = {"kind": kind, "loss": {name: options[name] for name in known if name in options}}
    if kind == "grpo":
        about["max_completion_length"] = options["max_completion_length"]
        about["rollout_tokens"] = options["tokens"]
    return Dump(about, rows)


def mistakes(steps: list[Dump]) -> list[str]:
    """Lines that name the known mistakes which give the numbers of these steps."""
    lines = []
    while steps and len(lines) < SEARCHES:
        found = [causes for causes, _ in explain("loss", steps[0])] or [[]]
        best = max(found, key=lambda causes: sum(explains(causes, step) for step in steps))
        rest = [step for step in steps[1:] if not explains(best, step)]
        says = " and ".join(f"{cause.says} ({cause.name})" for cause in best)
        lines.append(f"{len(steps) - len(rest)} of them: {says or 'no known mistake'}")
        steps = rest
    return lines


def explains(causes: list[Cause], step: Dump) -> bool:
    """Whether these causes, with a factor if one of them is that, give the numbers of a step."""
    own = [cause for cause in causes if cause.change]
    return bool(causes) and fits("loss", step, own, scaled=len(own) < len(causes)) is not None


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
