"""Find what a loss reads: the tensors and options that change its value or gradient."""

from collections.abc import Callable

import torch

from minivlmrl.errors import UserError
from minivlmrl.extras.parity.calling import loss_and_gradient
from minivlmrl.extras.parity.examined import DEFAULTS, MASKS, random_batch
from minivlmrl.extras.parity.recomputed import TERM_OPTIONS

# {option: values to try} for options that select a loss, and for the token count
SELECTS = {
    "grpo": {
        "loss_type": ("grpo", "dr_grpo", "cispo", "sapo"),
        "importance_sampling_level": ("sequence",),
        "use_bias_correction_kl": (True,),
        "whole_step": (False,),
        "tokens": (31,),
    },
    "dpo": {"loss_type": (["ipo"], ["sppo_hard"])},
    "sft": {"loss_type": ("dft",)},
}
# {number option: two values that differ from the recorded ones, then extreme values}
NUMBERS = {
    "grpo": {
        "beta": (0.23, 0.06),
        "epsilon_low": (0.05, 0.45, 0.0, 0.9),
        "epsilon_high": (0.6, 0.5, 0.0, 9.0),
        "max_completion_length": (14, 8),
        "delta": (1.7, 4.0),
        **{name: (0.7 * x, 1.4 * x) for name, x in TERM_OPTIONS.items() if x},  # options of SAPO and VESPO
    },
    "dpo": {"beta": (0.17, 0.62), "label_smoothing": (0.15, 0.05)},
    "sft": {},
}


def probe(kind: str, only: dict) -> tuple[dict, dict]:
    """Return a test batch and loss options.

    The batch has ratios on both sides of all clip bounds. For GRPO losses, the options include a KL.
    """
    batch = random_batch(kind, 4 * MASKS[-1], off_policy=1.5)
    options = {"kind": kind, **DEFAULTS[kind], "tokens": int(batch["mask"].sum())}
    if kind == "grpo":
        options |= {"beta": 0.1, "loss_type": "dapo"}
    return batch, options | only


def outcome(loss: Callable, batch: dict, options: dict) -> str | None:
    """Return loss and gradient as text, in which NaN equals NaN; None if the user's loss raises an exception."""
    try:
        return str([x.tolist() for x in loss_and_gradient(loss, batch, options)])
    except Exception:  # any error in the user's code
        return None


def reads_of(loss: Callable, kind: str, only: dict) -> set[str]:
    """Return names of tensors and options that change the user's loss or its gradient.

    Args:
        only: options that select the loss, such as loss_type.
    """
    batch, options = probe(kind, only)
    loss_and_gradient(loss, batch, options)  # raise exceptions of the user's loss here: outcome() hides them
    usual = outcome(loss, batch, options)
    found = set()
    for name, values in (SELECTS[kind] | NUMBERS[kind]).items():
        if any(outcome(loss, batch, options | {name: value}) != usual for value in values):
            found.add(name)
    for name, x in batch.items():
        changed = {"mask": x.flip(-1), "advantages": -2 * x}
        moved = changed.get(name, x + torch.linspace(0.1, 0.9, x.numel()).view(x.shape))
        if outcome(loss, batch | {name: moved}, options) != usual:
            found.add(name)
    return found


def knows(loss: Callable, kind: str, loss_type: str) -> bool:
    """Return whether a loss supports a loss_type, instead of treating it like an unknown name."""

    def outcome_of(name: str) -> str | None:
        return outcome(loss, *probe(kind, {"loss_type": [name] if kind == "dpo" else name}))

    found = outcome_of(loss_type)
    is_usual = loss_type in ("grpo", "sigmoid", "nll")  # defaults, allowed for unknown names
    return found is not None and (is_usual or found != outcome_of("unknown"))


def needs(loss: Callable, kind: str, name: str) -> bool:
    """Return whether a loss raises an exception without this option."""
    batch, options = probe(kind, {})
    del options[name]
    return outcome(loss, batch, options) is None


def refuse_random(loss: Callable, kind: str):
    """Raise an exception if two calls with the same batch differ."""
    given = probe(kind, {})
    if outcome(loss, *given) != outcome(loss, *given):
        raise UserError("my_loss is random: two calls with the same batch differ; seed it, or leave out its dropout")


def kind_of(loss: Callable) -> str:
    """Return the batch kind for a loss: grpo if it reads advantages, sft if it reads no reference, or dpo.

    If no kind fits, the first exception of the loss is raised.
    """
    first_error = None
    for kind, needed in (("grpo", "advantages"), ("sft", "per_token_logps"), ("dpo", "per_token_logps")):
        try:
            if needed in reads_of(loss, kind, {}):
                return kind
        except Exception as error:  # raised by the user loss for another batch kind
            first_error = first_error or error
    if first_error:
        raise first_error
    return "grpo"
