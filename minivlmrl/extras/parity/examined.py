"""What all laws share: the loss with its options, batches from small to large, and findings."""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from minivlmrl.extras.parity.calling import loss_and_gradient

SHOWN_NUMBERS = 12  # larger tensors are described by their shapes
# Masks of the batches, from small to large. Padding is on the right, and some completions also leave out other tokens.
MASKS = (
    [[1]],
    [[1, 0]],
    [[0, 1]],
    [[1, 1, 0]],
    [[1, 1], [1, 0]],
    [[1, 1, 1], [1, 0, 0], [0, 1, 1], [1, 0, 1]],
    [[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0], [0, 1, 1, 1, 0, 0], [1, 0, 1, 0, 1, 0]],
)
DEFAULTS = {
    "grpo": {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "use_bias_correction_kl": False,
        "max_completion_length": 9,
        "whole_step": True,
    },
    "dpo": {"loss_type": ["sigmoid"], "beta": 0.1, "label_smoothing": 0.0},
    "sft": {"loss_type": "nll"},
}
OPTIONS = {kind: {*defaults} for kind, defaults in DEFAULTS.items()}
OPTIONS["grpo"] |= {"delta"}  # TRL's dual clip; only losses that have it get this option
# defaults of single losses: CISPO's epsilon_high is the largest weight itself, and EXO takes the logarithm of the label
# smoothing
DEFAULTS_OF = {"cispo": {"epsilon_high": 5.0}, "exo_pair": {"label_smoothing": 0.1}}


class Finding(NamedTuple):
    """A sentence about a loss. A note describes a property that some losses have on purpose."""

    says: str
    kind: Literal["broken", "note", "not tested"] = "broken"


class Examined:
    """A user's loss with its options. Calling it gives the value and the gradient for a batch."""

    def __init__(self, my_loss: Callable, kind: str, given: dict, tolerance: float = 1e-6):
        self.my_loss = my_loss
        self.kind = kind
        self.tolerance = tolerance
        self.given = given  # options that the user has named, for example loss_type="dapo"
        self.read = set()  # names of the options and tensors that the loss has read
        loss_type = given.get("loss_type", DEFAULTS[kind]["loss_type"])
        self.loss_type = loss_type if isinstance(loss_type, str) else loss_type[0]
        self.options = {"kind": kind, **DEFAULTS[kind], **DEFAULTS_OF.get(self.loss_type, {}), **given}
        if kind == "dpo":
            self.options["loss_type"] = [self.loss_type]  # a list, as in the recorded cases

    def __call__(self, batch: dict[str, Tensor], **options) -> tuple[Tensor, Tensor]:
        """Return the loss, a scalar, and its gradient with respect to per_token_logps, without a graph."""
        options = {**self.options, **options}
        if self.kind == "grpo":
            options.setdefault("tokens", int(batch["mask"].sum()))
        return loss_and_gradient(self.my_loss, batch, options, self.read)

    def gradient(self, batch: dict[str, Tensor], **options) -> Tensor:
        return self(batch, **options)[1]

    def differ(self, a: Tensor, b: Tensor, tolerance: float | None = None) -> bool:
        """Return whether two tensors differ by more than rounding. NaN is left to another law.

        Args:
            tolerance: largest difference, relative to 1 or the largest number, whichever is larger; None means that of
                the loss.
        """
        scale = max(1.0, b.nan_to_num(0.0).abs().max().item()) if b.numel() else 1.0
        allowed = (self.tolerance if tolerance is None else tolerance) * scale
        return bool(((a - b).nan_to_num(0.0).abs() > allowed).any())

    def batches(self) -> Iterator[tuple[dict[str, Tensor], dict]]:
        """Yield random batches with options, from small to large; those of policy losses without and with a KL."""
        for mask in MASKS:
            batch = random_batch(self.kind, mask)
            if self.kind == "grpo":
                yield batch, {"beta": 0.0}
                yield batch, {"beta": 0.1}
            else:
                yield batch, {}


Law = Callable[[Examined], Iterator[Finding]]


def random_batch(kind: str, rows: Sequence, off_policy: float = 0.05) -> dict[str, Tensor]:
    """Return a batch with random numbers, in the form that `check` in loss.py describes.

    Args:
        rows: (B, T) mask, 1 for tokens that are trained on. In a batch of pairs, the rejected answers have the masks of
            the chosen answers in reverse order.
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
        batch["advantages"] = advantages + 0.3 * advantages.sign()  # not near 0, so that each token has a gradient
    return batch


def rows_of(batch: dict[str, Tensor], rows: slice | Tensor) -> dict[str, Tensor]:
    return {name: x[rows] for name, x in batch.items()}


def described(batch: dict[str, Tensor], options: dict | None = None) -> str:
    """Describe a batch: "mask [[1, 0]], advantages [-0.5], ratios [[1.1, 0.9]], beta 0.1"."""
    mask = batch["mask"]
    if mask.numel() > SHOWN_NUMBERS:
        parts = [f"a mask of shape {tuple(mask.shape)}"]
    else:
        parts = [f"mask {numbers(mask)}"]
        if "advantages" in batch:
            ratios = (batch["per_token_logps"] - batch["old_per_token_logps"]).exp()
            parts += [f"advantages {numbers(batch['advantages'])}", f"ratios {numbers(ratios)}"]
    if options and options.get("beta"):
        parts.append(f"beta {options['beta']:g}")
    return ", ".join(parts)


def numbers(x: Tensor, digits: int = 3) -> str:
    """Return a tensor as text: "[[1, 0.25]]"."""
    if x.dim() == 0:
        return f"{x.item() + 0.0:.{digits}g}"  # 0 instead of -0
    return f"[{', '.join(numbers(row, digits) for row in x)}]"


def contrast(wrong: Tensor, right: Tensor) -> list[str]:
    """Return two tensors as texts with as many digits as show that they differ, at least three."""
    texts = []
    for digits in range(3, 16):
        texts = [numbers(x, digits) for x in (wrong, right)]
        if texts[0] != texts[1]:
            break
    return texts
