"""Find out what a loss really reads: tensors and options that change its value or gradient."""

from collections.abc import Callable

import torch

from minivlmrl.extras.parity.calling import loss_and_gradient
from minivlmrl.extras.parity.examined import DEFAULTS, MASKS, random_batch

# other values to try of each option
OTHERS = {
    "grpo": {
        "loss_type": ("grpo", "dr_grpo", "cispo", "sapo"),
        "importance_sampling_level": ("sequence",),
        "beta": (0.0, 0.3),
        "epsilon_low": (0.0, 0.9),
        "epsilon_high": (0.0, 9.0),
        "use_bias_correction_kl": (True,),
        "max_completion_length": (14,),
        "whole_step": (False,),
        "tokens": (31,),
    },
    "dpo": {"loss_type": (["ipo"], ["sppo_hard"]), "beta": (0.4,), "label_smoothing": (0.2,)},
    "sft": {"loss_type": ("dft",)},
}


def probe(kind: str) -> tuple[dict, dict]:
    """Return a batch with ratios on both sides of all clip bounds, and options with a KL."""
    batch = random_batch(kind, MASKS[-1], off_policy=1.5)
    options = {"kind": kind, **DEFAULTS[kind]}
    if kind == "grpo":
        options |= {"loss_type": "dapo", "beta": 0.1, "tokens": int(batch["mask"].sum())}
    return batch, options


def reads_of(loss: Callable, kind: str) -> set[str]:
    """Return the names of tensors and options that change the loss or its gradient."""
    batch, options = probe(kind)

    def outcome(batch: dict, options: dict) -> tuple | None:
        try:
            return tuple(x.tolist() for x in loss_and_gradient(loss, batch, options))
        except Exception:  # any error in the user's code: the value that caused it was read
            return None

    usual = tuple(x.tolist() for x in loss_and_gradient(loss, batch, options))
    found = {
        name
        for name, values in OTHERS[kind].items()
        if any(outcome(batch, options | {name: value}) != usual for value in values)
    }
    for name, x in batch.items():
        changed = {"mask": x.flip(-1), "advantages": -2 * x}
        moved = changed.get(name, x + torch.linspace(0.1, 0.9, x.numel()).view(x.shape))
        if outcome(batch | {name: moved}, options) != usual:
            found.add(name)
    return found


def kind_of(loss: Callable) -> str:
    """Return the kind of batches that a loss takes: grpo if it reads advantages, sft if it reads no reference, or dpo.

    Raises the error of the first call if no kind fits.
    """
    first_error = None
    for kind, needed in (("grpo", "advantages"), ("sft", "per_token_logps"), ("dpo", "per_token_logps")):
        try:
            if needed in reads_of(loss, kind):
                return kind
        except Exception as error:  # raised by the user's loss for a batch of another kind
            first_error = first_error or error
    if first_error:
        raise first_error
    return "grpo"
