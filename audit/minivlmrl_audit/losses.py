"""Name the mistake of a loss function that `minivlmrl.losses.parity.check` found to differ."""

import torch
from torch import Tensor

from minivlmrl_audit.audit import computed, explain, fits, where
from minivlmrl_audit.dump import Dump
from minivlmrl_audit.options import options_of

SEARCHES = 3  # for a mistake that explains cases: each takes seconds
TIED = 4  # names that give the same numbers: as many are printed


def as_step(batch: dict, options: dict, value: Tensor, gradient: Tensor) -> Dump:
    """Make a step of a case, with the loss and the gradient that someone's function gave."""
    rows = {}
    for name, x in {**batch, "logps_gradient": gradient}.items():
        rows[name] = x.detach().flatten(0, -2) if x.dim() > 1 else x
    mask = rows.pop("mask")
    zeros = torch.zeros_like(mask, dtype=torch.long)
    number = torch.arange(len(mask))
    tensors = {
        **rows,
        "completion_mask": mask,
        "input_ids": zeros,
        "prompt_mask": zeros,
        "loss": value.view(1),
        # of dpo
        "pair": number // 2,
        "chosen": 1 - number % 2,
    }
    about = {
        **options,
        "loss": options_of(options["kind"], options),
        "rollout_tokens": options.get("tokens"),
    }
    return Dump(about, tensors)


def mistakes(cases: list[tuple]) -> list[str]:
    """Name, in lines, known mistakes that explain (batch, options, loss, gradient) of each case."""
    steps = [as_step(*case) for case in cases]
    lines = []
    while steps and len(lines) < SEARCHES:
        left = {}  # of each mistake: the steps that it does not explain
        for cause in explain("loss", steps[0]):
            name = f"{cause.says} ({cause.name})"
            left[name] = [step for step in steps[1:] if not fits("loss", step, cause)]
        if not left:
            left["no known mistake"] = steps[1:]
        other_steps = min(left.values(), key=len)
        tied_names = [name for name, others in left.items() if len(others) == len(other_steps)]
        lines.append(f"{len(steps) - len(other_steps)} of them: {'; or '.join(tied_names[:TIED])}")
        if "no known mistake" in left:  # where it differs first
            lines += [f"  {line}" for line in where(computed("loss", steps[0], {}))]
        steps = other_steps
    return lines
