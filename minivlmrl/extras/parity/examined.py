"""Wrap a user's loss, and generate random batches to test its properties ("laws")."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from minivlmrl.extras.parity.calling import loss_and_gradient
from minivlmrl.extras.parity.recomputed import TERM_OPTIONS, name_of_loss

# masks of test batches, smallest batch first; 0 = masked token, such as padding
MASKS = (
    [[1]],
    [[1, 0]],
    [[0, 1]],
    [[1, 1], [1, 0]],
    [[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0], [0, 1, 1, 1, 0, 0], [1, 0, 1, 0, 1, 0]],
)
# Default loss options in tests. CISPO needs epsilon_high above 1, because it bounds the ratio itself. EXO needs
# label_smoothing above 0, because it computes log(label_smoothing).
DEFAULTS = {
    "grpo": {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 5.0,
        "use_bias_correction_kl": False,
        "max_completion_length": 9,
        "whole_step": True,
        **TERM_OPTIONS,
    },
    "dpo": {"loss_type": ["sigmoid"], "beta": 0.1, "label_smoothing": 0.1},
    "sft": {"loss_type": "nll"},
}


class Examined:
    """User's loss function with loss options. Call it with a batch to get loss and gradient."""

    def __init__(self, my_loss: Callable, kind: str, options: dict, tolerance: float):
        self.my_loss = my_loss
        self.kind = kind
        self.tolerance = tolerance
        self.options = {"kind": kind, **DEFAULTS[kind], **options}
        self.loss_type = name_of_loss(self.options)
        if kind == "dpo":
            self.options["loss_type"] = [self.loss_type]  # DPO's loss_type is a list, as in TRL

    def __call__(self, batch: dict[str, Tensor], **options) -> tuple[Tensor, Tensor]:
        options = {**self.options, **options}
        if self.kind == "grpo":
            options.setdefault("tokens", int(batch["mask"].sum()))
        return loss_and_gradient(self.my_loss, batch, options)

    def gradient(self, batch: dict[str, Tensor], **options) -> Tensor:
        """Return the loss gradient with respect to log-probs."""
        return self(batch, **options)[1]

    def differ(self, a: Tensor, b: Tensor) -> bool:
        """Return whether two tensors differ by more than rounding errors; ignore NaN."""
        allowed = self.tolerance * b.nan_to_num(0.0).abs().max().clamp(min=1)
        return bool(((a - b).nan_to_num(0.0).abs() > allowed).any())

    def unequal(self, says: str, where: str, found: Tensor, right: Tensor) -> Iterator[str]:
        """Yield an error message if `found` differs from `right`.

        Args:
            says: what is wrong.
            where: batch and compared quantity, such as "one token; the loss is".
        """
        if self.differ(found, right):
            yield f"{says}. Smallest batch: {where} {numbers(found)} instead of {numbers(right)}"

    def batches(self) -> Iterator[tuple[dict[str, Tensor], dict]]:
        """Yield (random batch, loss options), smallest batch first.

        GRPO losses get each batch twice: without and with a KL.
        """
        several = [{"beta": 0.0}, {"beta": 0.1}] if self.kind == "grpo" else [{}]
        for mask in MASKS:
            for options in several:
                yield random_batch(self.kind, mask), options


# test of one law: yields an error message per failing batch, smallest batch first; only the first one is printed
Law = Callable[[Examined], Iterator[str]]


def random_batch(kind: str, rows: Sequence, off_policy: float = 0.05) -> dict[str, Tensor]:
    """Return a random batch with the tensors listed in `check` (loss.py).

    Args:
        rows: (B, T) mask, 1 for trained tokens. In DPO, the mask of chosen answers; reversed for rejected answers.
        off_policy: standard deviation of log pi - log pi_old, in nats.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = torch.tensor(rows, dtype=torch.float64)
    if kind == "dpo":
        mask = torch.stack([mask, mask.flip(1)], 1)
    logps = -normal(*mask.shape).abs() - 0.5
    batch = {"per_token_logps": logps, "mask": mask}
    if kind != "sft":
        batch["ref_per_token_logps"] = logps + 0.3 * normal(*mask.shape)
    if kind == "grpo":
        batch["old_per_token_logps"] = logps - off_policy * normal(*mask.shape)
        advantages = normal(len(mask))
        batch["advantages"] = advantages + 0.3 * advantages.sign()  # away from 0, so that all tokens have a gradient
    return batch


def described(batch: dict[str, Tensor], options: dict) -> str:
    """Format a batch's mask and loss options for error messages, such as "mask [[1, 0]], beta 0.1"."""
    mask = batch["mask"].int().tolist()
    return ", ".join([f"mask {mask}", *(f"{name} {x}" for name, x in options.items())])


def numbers(x: Tensor) -> str:
    """Format a tensor for error messages, such as "[[1.0, 0.25]]"."""
    return str((x + 0.0).round(decimals=6).tolist())  # + 0.0 turns -0.0 into 0.0
