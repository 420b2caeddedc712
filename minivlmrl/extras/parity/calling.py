"""Call a user's loss function, and return its value and gradient.

Supported arguments: f(batch, options), f(batch), f(batch, **options), and those of grpo_loss. JAX and MLX losses get
float64 arrays.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor

from minivlmrl.config.loss_forms import takes_batch
from minivlmrl.errors import UserError, optional_dependency, truncate
from minivlmrl.extras.parity.recomputed import TERM_OPTIONS, term_options
from minivlmrl.losses.grpo import LossNormalizer

FRAMEWORKS = ("torch", "jax", "mlx")
INSTALL = "--framework={0} needs the package {0}"
OF_A_CASE = {"kind", "whole_step", "tokens", "max_completion_length"}  # options that grpo_loss does not accept
Loss = Callable[[dict, dict], Any]


def loss_form(my_loss: Callable, framework: str = "torch") -> Loss:
    """Return a function (batch, options) -> scalar tensor that calls the user's loss.

    Args:
        framework: torch, jax or mlx.
    """
    form = with_batch if takes_batch(my_loss) else like_grpo_loss
    loss = partial(scalar_of, partial(form, my_loss))
    if framework == "jax":
        return from_jax(loss)
    if framework == "mlx":
        return from_mlx(loss)
    return loss


def with_batch(my_loss: Callable, batch: dict, options: dict) -> Any:
    """Call a loss as f(batch, options), f(batch, **options) or f(batch), depending on its signature."""
    parameters = [*inspect.signature(my_loss).parameters.values()]
    last = parameters[-1]
    if last.kind is last.VAR_KEYWORD and len(parameters) == 2:
        return my_loss(batch, **options)
    if len(parameters) > 1 or last.kind is last.VAR_POSITIONAL:
        return my_loss(batch, options)
    return my_loss(batch)


def like_grpo_loss(my_loss: Callable, batch: dict, options: dict) -> Any:
    """Call a loss that has the arguments of grpo_loss.

    As in training, pass only the options in its signature.
    """
    if "advantages" not in batch:
        return with_batch(my_loss, batch, options)
    parameters = inspect.signature(my_loss).parameters
    kinds = [parameter.kind for parameter in parameters.values()]
    if [*parameters][1:3] != ["advantages", "mask"] and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise UserError(
            f"my_loss has the arguments {', '.join(parameters)}; write a function (batch, options) that calls it"
        )
    values = batch | options
    values["normalizer"] = LossNormalizer(len(batch["mask"]), options["tokens"], options["max_completion_length"])
    first = [values.pop(name) for name in ("per_token_logps", "advantages", "mask")]
    # leave out options of other loss types
    unwanted = OF_A_CASE | (TERM_OPTIONS.keys() - term_options(options["loss_type"]).keys())
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        unwanted = unwanted | (values.keys() - parameters.keys())
    return my_loss(*first, **{name: x for name, x in values.items() if name not in unwanted})


def scalar_of(form: Loss, batch: dict, options: dict) -> Any:
    """Return the user's scalar loss without metrics."""
    loss = form(batch, options)
    if isinstance(loss, tuple) and loss:
        loss = loss[0]
    if isinstance(loss, dict) and "loss" in loss:
        loss = loss["loss"]
    shape = getattr(loss, "shape", None)
    if shape == ():
        return loss
    found = truncate(loss, 60) if shape is None else f"a tensor of shape {tuple(shape)}, which is not averaged"
    raise UserError(f"my_loss returned {found}, but it must return a tensor of shape ()")


def loss_and_gradient(loss: Loss, batch: dict[str, Tensor], options: dict) -> tuple[Tensor, Tensor]:
    """Return the scalar loss and its gradient with respect to per_token_logps, both detached."""
    logps = batch["per_token_logps"].detach().requires_grad_()
    tensors = batch | {"per_token_logps": logps}
    try:
        # copies: the loss may change its arguments in place
        value = loss({name: x.clone() for name, x in tensors.items()}, dict(options))
    except Exception as error:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in batch.items())
        error.add_note(f"my_loss got a batch of kind={options['kind']}: {shapes}; kinds: grpo, dpo, sft (--only kind=)")
        raise
    # + 0 * logps: autograd would fail for a loss that does not use logps
    [gradient] = torch.autograd.grad(value + 0 * logps.sum(), logps)
    return value.detach(), gradient


def from_jax(loss: Loss) -> Loss:
    """Wrap a JAX loss as a function of PyTorch tensors.

    The JAX loss gets float64 arrays.
    """
    with optional_dependency("jax", INSTALL.format("jax")):
        import jax

    def in_jax(batch: dict, options: dict) -> Tensor:
        with jax.enable_x64(True):  # JAX's default: float32
            return differentiable(loss, batch, options, jax.numpy.asarray, jax.value_and_grad)

    return in_jax


def from_mlx(loss: Loss) -> Loss:
    """Wrap an MLX loss as a function of PyTorch tensors.

    The MLX loss gets float64 arrays.
    """
    with optional_dependency("mlx", INSTALL.format("mlx")):
        import mlx.core as mx

    def in_mlx(batch: dict, options: dict) -> Tensor:
        with mx.stream(mx.cpu):  # MLX: float64 only on the CPU
            return differentiable(loss, batch, options, lambda x: mx.array(x, mx.float64), mx.value_and_grad)

    return in_mlx


def differentiable(loss: Loss, batch: dict, options: dict, array: Callable, value_and_grad: Callable) -> Tensor:
    """Call a JAX or MLX loss; return a PyTorch scalar with the same value and gradient.

    Args:
        array: function that converts a NumPy array to JAX or MLX.
    """
    arrays = {name: array(x.detach().numpy()) for name, x in batch.items()}

    def of_logps(logps: Any) -> Any:
        return loss(arrays | {"per_token_logps": logps}, options)

    value, slope = value_and_grad(of_logps)(arrays["per_token_logps"])
    logps = batch["per_token_logps"]
    value = torch.tensor(numpy.asarray(value), dtype=logps.dtype)
    slope = torch.tensor(numpy.asarray(slope), dtype=logps.dtype)
    return value + (slope * (logps - logps.detach())).sum()
