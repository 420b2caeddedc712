"""Products and softmax sums whose bits do not depend on the other rows in a batch.

The sampler computes one token for many completions at a time, and the trainer all tokens in a few
completions. Both compute the same formulas, but a matrix product adds its terms in an order that
depends on the matrix shapes, so the log-probabilities differ in the last digits. In
`batch_invariant_mode`, this package's sampler and trainer compute equal bits, because of
four rules:

1.  A product is computed in tiles of ROWS rows; the last tile is padded. The inner size and
    the output count are padded to multiples of ALIGNED, because libraries compute the rest in
    another order. Therefore all products with the same weight have the same shape, and a row does
    not depend on other rows.
2.  Attention's sums over keys are computed in blocks of KEYS keys, which are added one after
    the other. The prompt's keys and the completion's keys fill separate blocks. The padding
    adds exact zeros, so other prompts' and completions' lengths have no influence.
3.  Activation functions are written out with exp, tanh and erf, which torch computes alike for all
    numbers in a tensor. Its own silu, gelu and sigmoid use another formula for the last numbers.
4.  The sampler computes log-probabilities with score_rows_, the trainer's formula.

The gradients need no rules: the backward pass is the usual functions' backward pass.

The model does not know the mode: it calls torch functions, and the table RULES replaces them
inside a `with batch_invariant_mode()` block by the rules 1 and 3. Attention and the sampler ask
is_batch_invariant() for the rules 2 and 4, because a torch function does not know where a prompt
ends. The kernels float32_matmul and sum_rows ask, too, because they are not torch functions.
docs/notes/exact.md shows how much each rule contributes, and how much time it takes.
Source: He et al., Defeating Nondeterminism in LLM Inference (Thinking Machines, 2025), which calls
such kernels batch-invariant.
"""

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

ROWS = 16  # rows per tile
ALIGNED = 16  # inner sizes and output counts are padded to multiples of this number
KEYS = 32  # keys per block
CHUNK = 2**14  # numbers that torch adds in one call; it never divides so few among threads

_enabled = False


class batch_invariant_mode:  # a class, so that checkpoint_contexts can be entered several times
    """Follow the rules inside a `with` block, if `enabled`; otherwise do not follow them.

    The rules hold on a CPU. On a GPU, some kernels in other files do not follow them.
    """

    def __init__(self, enabled: bool = True):
        self.enabled = enabled

    def __enter__(self):
        global _enabled
        self.rules = _Rules() if self.enabled else nullcontext()
        self.rules.__enter__()
        self.before = _enabled
        _enabled = self.enabled

    def __exit__(self, *error: object):
        global _enabled
        _enabled = self.before
        self.rules.__exit__(*error)


def is_batch_invariant() -> bool:
    """Return True inside a `with batch_invariant_mode()` block."""
    return _enabled


def checkpoint_contexts() -> tuple[AbstractContextManager, batch_invariant_mode]:
    """Return the argument context_fn for torch's checkpoint: recompute as in the forward pass.

    The backward pass may run outside the mode's `with` block, or in another thread.
    """
    return nullcontext(), batch_invariant_mode(is_batch_invariant())


class _Rules(TorchFunctionMode):
    """Replace each torch function that has a rule in RULES with its rule.

    torch switches a mode off while the mode handles a call. Therefore a rule can call the function
    that it replaces. Tensor.backward is such a call, too, so recomputed activations have to enter
    the mode again, see checkpoint_contexts.
    """

    def __torch_function__(
        self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ):
        rule = RULES.get(func, func) if _enabled else func
        return rule(*args, **(kwargs or {}))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute F.linear by rule 1.

    Args:
        x: (..., n).
        weight: (m, n).
        bias: (m,).
    """
    out = _TiledLinear.apply(x.reshape(-1, x.shape[-1]), weight, bias)
    return out.view(*x.shape[:-1], len(weight))


def addmm(total: Tensor, a: Tensor, b: Tensor, *, alpha: float = 1) -> Tensor:
    """Compute torch.addmm, total + alpha * a @ b, by rule 1."""
    return total + alpha * linear(a, b.T)


def silu(x: Tensor, inplace: bool = False) -> Tensor:
    """Compute F.silu, x / (1 + exp(-x)), by rule 3."""
    if inplace:
        raise ValueError("batch_invariant_mode: silu has inplace=True; leave inplace out")
    return _activate(x, F.silu, lambda x: x / (1 + (-x).exp()))


def sigmoid(x: Tensor) -> Tensor:
    """Compute torch.sigmoid, 1 / (1 + exp(-x)), by rule 3."""
    return _activate(x, torch.sigmoid, lambda x: 1 / (1 + (-x).exp()))


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Compute F.gelu by rule 3.

    Args:
        approximate: "none" for x / 2 (1 + erf(x / sqrt(2))), or "tanh" for
            x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), as in torch.
    """

    def written_out(x: Tensor) -> Tensor:
        if approximate == "none":
            return x * 0.5 * (1 + torch.erf(x * 0.5**0.5))
        return x * 0.5 * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * (x * x * x))))

    return _activate(x, functools.partial(F.gelu, approximate=approximate), written_out)


# torch function -> function with the same arguments that follows the rules
RULES: dict[Callable, Callable] = {
    F.linear: linear,
    torch.addmm: addmm,
    F.silu: silu,
    F.gelu: gelu,
    torch.sigmoid: sigmoid,
    Tensor.sigmoid: sigmoid,
}


def _activate(x: Tensor, usual: Callable, written_out: Callable) -> Tensor:
    def in_float32(x: Tensor) -> Tensor:
        return written_out(x.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype)

    return GradientOf.apply(in_float32, usual, x)


class _TiledLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = tiled_matmul(x, weight.T)
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            grad @ weight if needs_x else None,
            grad.T @ x if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )


def tiled_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Compute a @ b in tiles, each with ROWS rows from a (rule 1).

    Args:
        a: (..., L, n).
        b: (..., n, m), with the same leading dimensions as a.
    """
    length, inner = a.shape[-2:]
    columns = b.shape[-1]
    a = F.pad(a, (0, -inner % ALIGNED, 0, -length % ROWS))
    if inner % ALIGNED or columns % ALIGNED:
        b = F.pad(b, (0, -columns % ALIGNED, 0, -inner % ALIGNED))
    tiles = a.contiguous().unflatten(-2, (-1, ROWS))
    # Every tile is multiplied by the same b. It is only copied if there are leading dimensions.
    repeated = b.unsqueeze(-3).expand(*tiles.shape[:-2], *b.shape[-2:])
    out = torch.bmm(tiles.flatten(0, -3), repeated.flatten(0, -3))
    out = out.view(*tiles.shape[:-1], b.shape[-1]).flatten(-3, -2)
    return out[..., :length, :columns].contiguous()


def block_scores(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """Compute attention scores, padded with -inf to whole blocks with KEYS keys each (rule 2).

    See attention_scores for the arguments.

    Returns:
        (..., L, T') in float32 (float64 for float64 inputs), where T' is T rounded up.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k = q.to(dtype), k.to(dtype)
    T = k.shape[-2]
    blocks = [tiled_matmul(q, block.mT.contiguous()) for block in _blocks(k)]
    scores = torch.cat(blocks, dim=-1).mul_(q.shape[-1] ** -0.5)
    scores[..., T:] = float("-inf")
    if mask is not None:
        scores[..., :T] += mask
    return scores


def block_softmax(scores: Tensor) -> Tensor:
    """Compute the softmax over the last axis for scores from block_scores (..., T') (rule 2)."""
    exps = (scores - scores.amax(-1, keepdim=True)).exp_()
    sums = [block.sum(-1, keepdim=True) for block in exps.split(KEYS, dim=-1)]
    return exps / functools.reduce(torch.add, sums)


def block_weighted_sum(weights: Tensor, v: Tensor) -> Tensor:
    """Compute weights @ v, with weights (..., L, T') from block_softmax and v (..., T, D) (rule 2).

    The sums are float32 (float64 for float64 inputs), and the result has the weights' dtype.
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    pairs = zip(weights.to(dtype).split(KEYS, dim=-1), _blocks(v.to(dtype)), strict=True)
    products = [tiled_matmul(block_weights, block) for block_weights, block in pairs]
    return functools.reduce(torch.add, products).to(weights.dtype)


def _blocks(x: Tensor) -> list[Tensor]:
    """Split the keys x (..., T, D) into blocks of KEYS keys; the last block is padded with 0."""
    x = F.pad(x, (0, 0, 0, -x.shape[-2] % KEYS))
    return [block.contiguous() for block in x.split(KEYS, dim=-2)]


class GradientOf(torch.autograd.Function):
    """Compute one function, with the gradient from a function that is equal except for rounding.

    Arguments of apply:
        function: computes the result from the tensors.
        usual: a function whose gradient is used; it is called outside batch_invariant_mode.
        tensors: the arguments for both functions.
    """

    @staticmethod
    def forward(ctx, function: Callable, usual: Callable, *tensors: Tensor) -> Tensor:
        ctx.usual = usual
        ctx.save_for_backward(*tensors)
        return function(*tensors)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[2:]
        inputs = [
            x.detach().requires_grad_(need)
            for x, need in zip(ctx.saved_tensors, needs, strict=True)
        ]
        with torch.enable_grad(), batch_invariant_mode(False):
            out = ctx.usual(*inputs)
        needed = [x for x in inputs if x.requires_grad]
        grads = iter(torch.autograd.grad(out, needed, grad))
        return None, None, *(next(grads) if need else None for need in needs)


def sum_rows(x: Tensor) -> Tensor:
    """Compute x.sum(-1) for x (N, V), in batch_invariant_mode by adding parts of CHUNK columns.

    For a single long row, torch would divide the sum among its threads.
    """
    if not _enabled:
        return x.sum(-1)
    return functools.reduce(torch.add, [part.sum(-1) for part in x.split(CHUNK, dim=-1)])
