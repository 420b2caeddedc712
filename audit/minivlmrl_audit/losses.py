"""Name the mistake in a loss function that `minivlmrl.losses.parity.check` rejects."""

import torch
from torch import Tensor

from minivlmrl_audit.audit import SECONDS, computed, explain, fits, where
from minivlmrl_audit.dump import Dump
from minivlmrl_audit.step_format import options_of

SEARCHES = 3  # maximum number of searches for a mistake, because each search takes seconds
TIED = 4  # maximum number of printed mistakes that give the same numbers


def as_step(batch: dict, options: dict, value: Tensor, gradient: Tensor) -> Dump:
    """Convert a test case to a Dump, so that the audit can search for its mistake.

    Args:
        batch: the test case's tensors, by name.
        options: the loss's options, by name.
        value: loss that the checked function returned.
        gradient: this loss's gradient with respect to the log-probabilities.
    """
    rows = {}
    for name, x in {**batch, "logps_gradient": gradient}.items():
        rows[name] = x.detach().flatten(0, -2) if x.dim() > 1 else x
    mask = rows.pop("mask")
    zeros = torch.zeros_like(mask, dtype=torch.long)
    tensors = {**rows, "completion_mask": mask, "input_ids": zeros, "prompt_mask": zeros, "loss": value.view(1)}
    if options["kind"] == "dpo":  # other losses have no pairs, by which a mistake could divide
        number = torch.arange(len(mask))
        tensors |= {"pair": number // 2, "chosen": 1 - number % 2}
    about = {**options, "loss": options_of(options["kind"], options), "rollout_tokens": options.get("tokens")}
    return Dump(about, tensors)


def mistakes(cases: list[tuple]) -> list[str]:
    """Return text lines that name known mistakes which explain the given cases.

    cases: (batch, options, loss, gradient) for each case whose loss or gradient differs.
    """
    steps = [as_step(*case) for case in cases]
    lines = []
    while steps and len(lines) < SEARCHES:
        left = {}  # for each mistake, the steps that it leaves unexplained
        for cause in explain("loss", steps[0], SECONDS):
            left[cause.says] = [step for step in steps[1:] if not fits("loss", step, cause)]
        if not left:
            left["no known mistake explains the numbers"] = steps[1:]
        other_steps = min(left.values(), key=len)
        tied_names = [name for name, others in left.items() if len(others) == len(other_steps)]
        lines.append(f"{len(steps) - len(other_steps)} of the differing cases: {'; or '.join(tied_names[:TIED])}")
        # if no mistake is known, describe the first differing numbers instead
        if "no known mistake explains the numbers" in left:
            lines += [f"  {line}" for line in where(computed("loss", steps[0], {}))]
        steps = other_steps
    return lines
