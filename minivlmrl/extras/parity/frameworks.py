"""Make a JAX or MLX loss callable with PyTorch tensors, so `parity` can check it."""

from collections.abc import Callable

import numpy
import torch

from minivlmrl.errors import UserError, optional_dependency
from minivlmrl.extras.parity.calling import Arguments, call

INSTALL = "--framework={0} needs the package {0}"


def as_torch(my_loss: Callable, framework: str) -> Callable:
    """Return a PyTorch function (batch, options) -> scalar tensor that calls a loss from another framework.

    Args:
        my_loss: loss in a form from config/loss_forms.py, for float64 arrays.
        framework: "torch", which returns my_loss unchanged, "jax" or "mlx".

    Raises:
        ValueError: the framework is unknown or not installed.
    """
    if framework not in FRAMEWORKS:
        raise UserError(f"framework is {framework!r}, but it must be one of {', '.join(FRAMEWORKS)}")
    return FRAMEWORKS[framework](my_loss)


def with_gradient(logps: torch.Tensor, value, gradient) -> torch.Tensor:
    """Return a scalar tensor with this value, and this gradient with respect to logps."""
    loss, slope = (torch.tensor(numpy.asarray(x), dtype=logps.dtype) for x in (value, gradient))
    return loss + (slope * (logps - logps.detach())).sum()


def from_jax(my_loss: Callable) -> Callable:
    """Call a JAX loss, compiled once per set of options and shapes; compiling takes most of the time."""
    with optional_dependency("jax", INSTALL.format("jax")):
        import jax

    functions = {}  # compiled loss and the arguments it reads, by options
    jit = jax.jit

    def function_of(options: dict) -> tuple[Callable, set[str]]:
        read = set()

        def value(logps, arrays):
            return call(my_loss, Arguments(arrays | {"per_token_logps": logps}, read), Arguments(options, read))

        return jit(jax.value_and_grad(value)), read

    def loss(batch, options):
        nonlocal jit
        logps = batch["per_token_logps"]
        values = dict(dict.items(options))
        # JAX default float32 is less accurate than the recorded numbers
        with jax.enable_x64(True):
            arrays = {name: jax.numpy.asarray(x.detach().numpy()) for name, x in dict.items(batch)}
            try:
                function, read = functions.setdefault(str(values), function_of(values))
                value, gradient = function(arrays["per_token_logps"], arrays)
            except (jax.errors.JAXTypeError, jax.errors.NonConcreteBooleanIndexError):
                if jit is not jax.jit:
                    raise
                # losses with conditions on numbers, as in `if mask.sum() > 3`, cannot be compiled
                jit = lambda function: function  # noqa: E731
                functions.clear()
                return loss(batch, options)
        options.read.update(read)
        return with_gradient(logps, value, gradient)

    return loss


def from_mlx(my_loss: Callable) -> Callable:
    with optional_dependency("mlx", INSTALL.format("mlx")):
        import mlx.core as mx

    def loss(batch, options):
        logps = batch["per_token_logps"]
        # MLX: float64 only on the CPU
        with mx.stream(mx.cpu):
            values = {name: mx.array(x.detach().numpy(), dtype=mx.float64) for name, x in dict.items(batch)}
            arrays = Arguments(values, batch.read)
            function = mx.value_and_grad(lambda x: call(my_loss, arrays | {"per_token_logps": x}, options))
            value, gradient = function(arrays["per_token_logps"])
            mx.eval(value, gradient)
        return with_gradient(logps, value, gradient)

    return loss


FRAMEWORKS = {"torch": lambda my_loss: my_loss, "jax": from_jax, "mlx": from_mlx}
