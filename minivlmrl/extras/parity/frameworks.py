"""Make a JAX or MLX loss callable with PyTorch tensors, so `parity` can check it."""

from collections.abc import Callable

import numpy
import torch

from minivlmrl.errors import optional_dependency
from minivlmrl.extras.parity.calling import Arguments, call

INSTALL = "--framework={0} needs the package {0}"


def as_torch(my_loss: Callable, framework: str) -> Callable:
    """Return a PyTorch function (batch, options) -> scalar tensor for a loss in another framework.

    Args:
        my_loss: function (batch, options), or one with the arguments of grpo_loss; it gets float64 arrays.
        framework: "jax", "mlx" or "torch" (no conversion).
    """
    return FRAMEWORKS[framework](my_loss)


def from_jax(my_loss: Callable) -> Callable:
    with optional_dependency("jax", INSTALL.format("jax")):
        import jax

    def loss(batch, options):
        with jax.enable_x64(True):  # JAX's default: float32
            return differentiable(my_loss, batch, options, jax.numpy.asarray, jax.value_and_grad)

    return loss


def from_mlx(my_loss: Callable) -> Callable:
    with optional_dependency("mlx", INSTALL.format("mlx")):
        import mlx.core as mx

    def loss(batch, options):
        with mx.stream(mx.cpu):  # MLX: float64 only on the CPU
            return differentiable(my_loss, batch, options, lambda x: mx.array(x, mx.float64), mx.value_and_grad)

    return loss


def differentiable(my_loss: Callable, batch, options, array: Callable, value_and_grad: Callable) -> torch.Tensor:
    """Call a JAX or MLX loss; return a PyTorch scalar with the same value and gradient.

    Args:
        array: function that converts a NumPy array to JAX or MLX.
    """
    values = {name: array(x.detach().numpy()) for name, x in dict.items(batch)}
    arrays = Arguments(values, batch.read)
    function = value_and_grad(lambda x: call(my_loss, arrays | {"per_token_logps": x}, options))
    logps = batch["per_token_logps"]
    results = function(values["per_token_logps"])
    loss, slope = (torch.tensor(numpy.asarray(x), dtype=logps.dtype) for x in results)
    return loss + (slope * (logps - logps.detach())).sum()


FRAMEWORKS = {"torch": lambda my_loss: my_loss, "jax": from_jax, "mlx": from_mlx}
