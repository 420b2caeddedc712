"""Call a loss function of any common form; return its value and gradient.

Forms: f(batch, options), f(batch), the arguments of grpo_loss, and functions or classes of other trainers, whose
arguments are bound by name (binding.py). JAX and MLX losses get float64 arrays.
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
from minivlmrl.extras.parity.binding import bound_forms
from minivlmrl.extras.parity.recomputed import TERM_OPTIONS, term_options
from minivlmrl.losses.grpo import LossNormalizer

FRAMEWORKS = ("torch", "jax", "mlx")
INSTALL = "--framework={0} needs the package {0}"
OF_A_CASE = ("kind", "whole_step", "tokens", "max_completion_length")  # options that grpo_loss does not accept
Loss = Callable[[dict, dict], Any]


def loss_forms(my_loss: Callable, framework: str = "torch") -> list[Loss]:
    """Return functions (batch, options) -> scalar tensor that call the user's loss.

    Several functions differ in the shape of advantages: (B, T), (B,) or (B, 1).

    Args:
        framework: torch, jax or mlx.
    """
    forms = bound_forms(my_loss)
    if forms is None:
        forms = [with_batch if takes_batch(my_loss) else like_grpo_loss]
        forms = [partial(form, my_loss) for form in forms]
    convert = {"torch": lambda loss: loss, "jax": from_jax, "mlx": from_mlx}[framework]
    return [convert(partial(scalar_of, form)) for form in forms]


def with_batch(my_loss: Callable, batch: dict, options: dict) -> Any:
    """Call f(batch, options), f(batch, **options), f(*both) or f(batch)."""
    parameters = [*inspect.signature(my_loss).parameters.values()]
    last = parameters[-1]
    if last.kind is last.VAR_KEYWORD and len(parameters) == 2:
        return my_loss(batch, **options)
    takes_options = len(parameters) > 1 or last.kind is last.VAR_POSITIONAL
    return my_loss(batch, options) if takes_options else my_loss(batch)


def like_grpo_loss(my_loss: Callable, batch: dict, options: dict) -> Any:
    """Call a loss with the arguments of grpo_loss; as in training, it gets only the options in its signature."""
    if "advantages" not in batch:
        return with_batch(my_loss, batch, options)
    parameters = inspect.signature(my_loss).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    options = dict(options)  # names that are passed on are not asked for one by one
    foreign = TERM_OPTIONS.keys() - term_options(options["loss_type"]).keys()  # of other loss types
    names = [name for name in batch if name.startswith(("old_", "ref_"))]
    names += [name for name in options if name not in OF_A_CASE and name not in foreign]
    given = {x: batch[x] if x in batch else options[x] for x in names if takes_all or x in parameters}
    if takes_all or "normalizer" in parameters:
        length = options["max_completion_length"]
        given["normalizer"] = LossNormalizer(len(batch["mask"]), options["tokens"], length)
    return my_loss(batch["per_token_logps"], batch["advantages"], batch["mask"], **given)


def scalar_of(form: Loss, batch: dict, options: dict) -> Any:
    """Return the loss without metrics."""
    loss = form(batch, options)
    if isinstance(loss, tuple) and loss:
        loss = loss[0]
    if isinstance(loss, dict) and "loss" in loss:
        loss = loss["loss"]
    shape = getattr(loss, "shape", None)
    if shape == ():
        return loss
    if shape is not None:
        raise UserError(
            f"the loss is not averaged: my_loss returned a tensor of shape {tuple(shape)}, but it must return one of "
            "shape ()"
        )
    raise UserError(f"my_loss returned {truncate(loss, 60)}, but it must return a tensor of shape ()")


def loss_and_gradient(loss: Loss, batch: dict[str, Tensor], options: dict) -> tuple[Tensor, Tensor]:
    """Return the scalar loss and its gradient with respect to per_token_logps, both detached."""
    logps = batch["per_token_logps"].detach().requires_grad_()
    # copies: the loss may change its arguments in place
    copies = {name: x.clone() for name, x in (batch | {"per_token_logps": logps}).items()}
    try:
        value = loss(copies, dict(options))
    except Exception as error:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in batch.items())
        error.add_note(f"my_loss got a batch of kind={options['kind']}: {shapes}; kinds: grpo, dpo, sft (--only kind=)")
        raise
    # + 0 * logps: autograd would fail for a loss that does not use logps
    [gradient] = torch.autograd.grad(value + 0 * logps.sum(), logps)
    return value.detach(), gradient


def from_jax(loss: Loss) -> Loss:
    """Wrap a JAX loss, which gets float64 arrays."""
    with optional_dependency("jax", INSTALL.format("jax")):
        import jax

    def in_jax(batch: dict, options: dict) -> Tensor:
        with jax.enable_x64(True):  # JAX's default: float32
            return differentiable(loss, batch, options, jax.numpy.asarray, jax.value_and_grad)

    return in_jax


def from_mlx(loss: Loss) -> Loss:
    """Wrap an MLX loss, which gets float64 arrays."""
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
    function = value_and_grad(lambda x: loss(arrays | {"per_token_logps": x}, options))
    logps = batch["per_token_logps"]
    results = function(arrays["per_token_logps"])
    value, slope = (torch.tensor(numpy.asarray(x), dtype=logps.dtype) for x in results)
    return value + (slope * (logps - logps.detach())).sum()
