"""Call a loss function; return its value and gradient, and record which arguments it reads."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from minivlmrl.config.loss_forms import takes_batch
from minivlmrl.errors import UserError, truncate
from minivlmrl.losses.grpo import LossNormalizer

OF_A_CASE = ("kind", "whole_step", "tokens", "max_completion_length")  # options that grpo_loss does not accept


class Arguments(dict):
    """Dict of loss arguments; names that the loss looks up are added to the set `read`."""

    def __init__(self, values: dict, read: set[str]):
        super().__init__(values)
        self.read = read

    def __getitem__(self, name: str):
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default=None):
        self.read.add(name)
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:
        """Iterate over names; without this method, `**arguments` would not call __getitem__."""
        return super().__iter__()

    def items(self):
        self.read.update(self)
        return super().items()

    def __or__(self, other: dict) -> "Arguments":
        return Arguments(dict(super().items()) | other, self.read)  # super(): a copy must not mark arguments as read


def loss_and_gradient(
    my_loss: Callable, batch: dict[str, Tensor], options: dict, read: set[str]
) -> tuple[Tensor, Tensor]:
    """Return the scalar loss and its gradient with respect to per_token_logps, both detached.

    Args:
        my_loss: function (batch, options), or one with the arguments of grpo_loss (config/loss_forms.py).
        read: set that collects the names of used tensors and options.
    """
    logps = batch["per_token_logps"].detach().requires_grad_()
    # copies: the loss may change its arguments in place
    copies = {name: x.clone() for name, x in (batch | {"per_token_logps": logps}).items()}
    try:
        loss = call(my_loss, Arguments(copies, read), Arguments(options, read))
    except Exception as error:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in batch.items())
        error.add_note(f"my_loss got a batch of kind={options['kind']}: {shapes}; kinds: grpo, dpo, sft (--only kind=)")
        raise
    # + 0 * logps: autograd would fail for a loss that does not use logps
    [gradient] = torch.autograd.grad(loss + 0 * logps.sum(), logps)
    return loss.detach(), gradient


def call(my_loss: Callable, batch: dict, options: dict) -> Any:
    """Call my_loss with (batch, options) or the arguments of grpo_loss; return the loss without metrics.

    As in training, a function like grpo_loss gets only the options in its signature.
    """
    if "advantages" not in batch or takes_batch(my_loss):
        returned = my_loss(batch, options)
    else:
        parameters = inspect.signature(my_loss).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        names = [name for name in batch if name.startswith(("old_", "ref_"))]
        names += [name for name in options if name not in OF_A_CASE]
        given = {x: batch[x] if x in batch else options[x] for x in names if takes_all or x in parameters}
        if takes_all or "normalizer" in parameters:
            length = options["max_completion_length"]
            given["normalizer"] = LossNormalizer(len(batch["mask"]), options["tokens"], length)
        returned = my_loss(batch["per_token_logps"], batch["advantages"], batch["mask"], **given)
    match returned:
        case [loss, {}]:  # my_loss returned (loss, metrics)
            returned = loss
    if getattr(returned, "shape", None) != ():
        raise UserError(f"my_loss returned {truncate(returned, 60)}, but it must return a tensor of shape ()")
    return returned
