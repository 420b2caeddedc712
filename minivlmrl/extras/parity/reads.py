"""Find out what a loss really reads: tensors and options that change its value or gradient."""

from collections.abc import Callable

import torch

from minivlmrl.extras.parity.calling import loss_and_gradient
from minivlmrl.extras.parity.examined import DEFAULTS, MASKS, random_batch
from minivlmrl.extras.parity.recomputed import TERM_OPTIONS, term_options
from minivlmrl.losses.grpo import TERMS, clipped
from minivlmrl.losses.preference import DPO_LOSSES, SMOOTHED

# other values of options that select a loss, or count
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
# two other values of numbers, most of which have one value in all recorded cases, then extremes
NUMBERS = {
    "grpo": {
        "beta": (0.23, 0.06),
        "epsilon_low": (0.05, 0.45, 0.0, 0.9),
        "epsilon_high": (0.6, 0.5, 0.0, 9.0),
        "max_completion_length": (14, 8),
        "delta": (1.7, 4.0),
        **{name: (0.7 * x, 1.4 * x) for name, x in TERM_OPTIONS.items() if x},  # of SAPO and VESPO
    },
    "dpo": {"beta": (0.17, 0.62), "label_smoothing": (0.15, 0.05)},
    "sft": {},
}
# {loss_type: numbers in TRL's loss}
NUMBERS_OF = {name: ("epsilon_low", "epsilon_high") for name, term in TERMS.items() if term is clipped}
NUMBERS_OF |= {name: tuple(NUMBERS["grpo"].keys() & term_options(name).keys()) for name in ("sapo", "vespo")}
NUMBERS_OF |= {"cispo": ("epsilon_high",), "dr_grpo": (*NUMBERS_OF["dr_grpo"], "max_completion_length")}
NUMBERS_OF |= {name: ("beta",) for name in DPO_LOSSES} | {name: ("beta", "label_smoothing") for name in SMOOTHED}


def probe(kind: str, only: dict) -> tuple[dict, dict]:
    """Return a batch with ratios on both sides of all clip bounds, and options with a KL."""
    batch = random_batch(kind, 4 * MASKS[-1], off_policy=1.5)
    options = {"kind": kind, **DEFAULTS[kind]}
    if kind == "grpo":
        options |= {"beta": 0.1, "tokens": int(batch["mask"].sum())}
        options["loss_type"] = only["loss_type"] if only.get("loss_type") in TERMS else "dapo"
    return batch, options


def reads_of(loss: Callable, kind: str, **only) -> set[str]:
    """Return the names of tensors and options that change the loss or its gradient.

    Args:
        only: options of the loss that is asked for, such as loss_type="sapo".
    """
    batch, options = probe(kind, only)

    def outcome(batch: dict, options: dict) -> tuple | None:
        try:
            return tuple(x.tolist() for x in loss_and_gradient(loss, batch, options))
        except Exception:  # any error in the user's code: the value that caused it was read
            return None

    usual = tuple(x.tolist() for x in loss_and_gradient(loss, batch, options))
    found = {
        name
        for name, values in (SELECTS[kind] | NUMBERS[kind]).items()
        if any(outcome(batch, options | {name: value}) != usual for value in values)
    }
    for name, x in batch.items():
        changed = {"mask": x.flip(-1), "advantages": -2 * x}
        moved = changed.get(name, x + torch.linspace(0.1, 0.9, x.numel()).view(x.shape))
        if outcome(batch | {name: moved}, options) != usual:
            found.add(name)
    return found


class Asked(dict):
    """Options that record names which a loss asks for; `SimpleNamespace(**options)` asks for none."""

    def __init__(self, options: dict):
        super().__init__(options)
        self.names = set()

    def __getitem__(self, name: str):
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default=None):
        self.names.add(name)
        return super().get(name, default)


def asked_options(loss: Callable, kind: str) -> set[str]:
    """Return the names of options that a loss asks for, whether or not they change anything."""
    batch, options = probe(kind, {})
    asked = Asked(options)
    loss(batch, asked)
    return asked.names


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
