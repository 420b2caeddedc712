"""LoRA adapters (arXiv 2106.09685): train two small matrices A and B for each frozen linear layer.

Layer output: x W^T + scaling * x A^T B^T.

Dimensions: N tokens, r adapter rank.
"""

import math
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import cast

import torch
from torch import Tensor, nn

from minivlmrl.config.options import LoRAOptions
from minivlmrl.data.rows import random_numbers
from minivlmrl.errors import UserError, require
from minivlmrl.kernels.backend import at_least_float32, is_half_on_gpu
from minivlmrl.kernels.float32_matmul import tf32_products
from minivlmrl.model.build import assign
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.families.registry import family_of
from minivlmrl.model.plain_weights import (
    PARTS,
    PackedLinear,
    ReplacedLinear,
    gather_full_tensor,
    packed_layers,
    part_of,
)


def inject_adapters(model: VisionLanguageModel, options: LoRAOptions):
    """Freeze a model and add LoRALinear layers with zero weights; if r = 0, unfreeze the model instead.

    Afterward, select_trained must unfreeze options.modules_to_save.
    """
    model.requires_grad_(not options.r)
    if not options.r:
        return
    model.modules_to_save = options.modules_to_save
    # two adapter.target entries may match the same layer
    for name in dict.fromkeys(chain(*(target_layers(model, target) for target in options.target))):
        if part_of(name) in options.modules_to_save:
            raise UserError(
                f"adapter.target selects {name}, but modules_to_save trains the part {part_of(name)} in full; leave "
                "this part out of one of the two"
            )
        add_lora(model, name, options.r, options.alpha / options.r, options.dropout)
    if options.quantize:
        quantize_base(model)


class LoRALinear(ReplacedLinear):
    """A linear layer with a LoRA adapter; A and B are float32 even on a bfloat16 base, as in PEFT."""

    def __init__(self, base: nn.Linear | PackedLinear, r: int, scaling: float, dropout: float = 0.0):
        super().__init__()
        self.base = base
        self.shape = base.weight.shape
        self.out_features, self.in_features = self.shape
        self.r = r
        self.scaling = scaling
        self.dropout = dropout
        dtype = at_least_float32(base.weight.dtype)
        self.lora_A = nn.Parameter(base.weight.new_zeros(r, self.in_features, dtype=dtype))
        self.lora_B = nn.Parameter(base.weight.new_zeros(self.out_features, r, dtype=dtype))
        # dropout function, set only inside `with dropout(...)`
        self.drop: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Compute base plus adapter: x (N, in_features) -> (N, out_features), in the base dtype."""
        base_result = self.base(x)
        adapter_input = self.drop(x.to(self.lora_A.dtype)) if self.drop else x
        is_half = is_half_on_gpu(base_result.device, base_result.dtype)
        products = tf32_products if is_half and not torch.version.hip else nullcontext
        return AdapterSum.apply(base_result, adapter_input, self.lora_A, self.lora_B, self.scaling, products)

    @property
    def dtype(self) -> torch.dtype:
        base = self.base
        return base.dtype if isinstance(base, PackedLinear) else base.weight.dtype

    @torch.no_grad()
    def plain_weight(self) -> Tensor:
        """Return the merged weight W + scaling * B A, in the dtype of W; all ranks must call this."""
        A = gather_full_tensor(self.lora_A)
        B = gather_full_tensor(self.lora_B)
        weight = gather_full_tensor(self.base.weight).to(A.device)
        return (weight + self.scaling * (B @ A)).to(weight.dtype)


class AdapterSum(torch.autograd.Function):
    """Compute base_result + scaling * x A^T B^T.

    With 16-bit base weights on a GPU, matrix products use TF32, which rounds inputs to 11 significant bits, so bfloat16
    inputs (8 bits) stay exact. TF32 sums are float32.

    Shapes: base_result (N, out_features), x (N, in_features), A (r, in_features), B (out_features, r).
    """

    @staticmethod
    def forward(ctx, base_result: Tensor, x: Tensor, A: Tensor, B: Tensor, scaling: float, products) -> Tensor:
        with products():
            low_rank = x.to(A.dtype) @ A.T  # (N, r)
            adapted = torch.addmm(base_result.to(A.dtype), low_rank, B.T, alpha=scaling)
        ctx.save_for_backward(x, A, B, low_rank)
        ctx.scaling = scaling
        ctx.products = products
        return adapted.to(base_result.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, A, B, low_rank = ctx.saved_tensors
        _, needs_x, needs_A, needs_B, *_ = ctx.needs_input_grad
        wide_grad = grad.to(A.dtype)
        with ctx.products():
            low_rank_grad = (wide_grad @ B).mul_(ctx.scaling)  # (N, r)
            return (
                grad,
                (low_rank_grad @ A).to(x.dtype) if needs_x else None,
                low_rank_grad.T @ x.to(A.dtype) if needs_A else None,
                (wide_grad.T @ low_rank).mul_(ctx.scaling) if needs_B else None,
                None,
                None,
            )


def adapters(model: nn.Module) -> dict[str, LoRALinear]:
    """Return {layer name: adapted layer}."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LoRALinear)}


@contextmanager
def dropout(model: nn.Module, p: float, key: str) -> Iterator[None]:
    """Apply dropout inside a `with` block, only to adapter inputs, as in PEFT.

    The mask depends only on `key` and layer name, so activation checkpointing recomputes the same mask.
    """
    layers = adapters(model) if p else {}
    for name, layer in layers.items():
        layer.drop = partial(drop, p, zlib.crc32(f"{key}/{name}".encode()))
    try:
        yield
    finally:
        for layer in layers.values():
            layer.drop = None


@contextmanager
def sampling_copies(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Use 16-bit copies of float32 adapters inside a `with` block, in GPU layers with 16-bit weights. Yield the copies.

    With few tokens, a float32 adapter takes longer than its 16-bit base layer. Merging adapters into 16-bit weights
    would round away most small updates. The copies stay at fixed addresses, as CUDA graphs require.
    """
    layers = [x for x in adapters(model).values() if is_half_on_gpu(x.lora_A.device, x.dtype)]
    originals = [(layer, layer.lora_A, layer.lora_B) for layer in layers]
    try:
        for layer, A, B in originals:
            layer.lora_A, layer.lora_B = (nn.Parameter(x.to(layer.dtype), requires_grad=False) for x in (A, B))
        yield [copy for layer in layers for copy in (layer.lora_A, layer.lora_B)]
    finally:
        for layer, A, B in originals:
            layer.lora_A = A
            layer.lora_B = B


def drop(p: float, seed: int, x: Tensor) -> Tensor:
    """Zero elements of x (N, in_features) with probability p, and divide others by 1 - p."""
    generator = None if x.is_meta else torch.Generator(x.device).manual_seed(seed)
    return x * torch.empty_like(x).bernoulli_(1 - p, generator=generator) / (1 - p)


def copy_adapter_layout(model: VisionLanguageModel, other: VisionLanguageModel):
    """Add adapters for the same layers as in another model, with the same r, scaling, dropout and quantization."""
    for name, layer in adapters(other).items():
        add_lora(model, name, layer.r, layer.scaling, layer.dropout)
    model.modules_to_save = other.modules_to_save
    for name in packed_layers(other):
        quantize_layer(model, name)


def quantize_base(model: VisionLanguageModel):
    """Quantize decoder layers, and all layers with adapters, to NF4, except Family.not_quantized."""
    # iterate over names, because a list of modules would keep replaced 16-bit weights in memory
    for name in [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]:
        keeps_dtype = name.removesuffix(".base").endswith(family_of(model).not_quantized)
        if not keeps_dtype and (name.startswith(PARTS["language"]) or name.endswith(".base")):
            quantize_layer(model, name)


def quantize_layer(model: nn.Module, name: str):
    # lazy import: few recipes use NF4
    from minivlmrl.model.nf4 import NF4Linear

    model.set_submodule(name, NF4Linear(cast(nn.Linear, model.get_submodule(name))))


def init_adapters(model: VisionLanguageModel, seed: int):
    """Initialize A uniformly in +-1/sqrt(in_features), B with zeros."""
    weights = {}
    for name, layer in adapters(model).items():
        bound = 1 / math.sqrt(layer.in_features)
        random_values = random_numbers(f"{seed}/{name}").uniform(-bound, bound, layer.lora_A.shape)
        weights[f"{name}.lora_A"] = torch.from_numpy(random_values)
        weights[f"{name}.lora_B"] = torch.zeros(layer.lora_B.shape)
    set_parameters(model, weights)


def set_parameters(model: VisionLanguageModel, weights: dict[str, Tensor]):
    """Set parameters from full tensors; ranks keep their own shard."""
    sharding = model.sharding
    device = model.lm_head.weight.device
    parameters = dict(model.named_parameters())
    new_parameters = {}
    for name, tensor in weights.items():
        like = parameters[name]
        new_parameters[name] = sharding.take_shard(tensor, like) if sharding else tensor.to(device, like.dtype)
    assign(model, new_parameters)


def target_layers(model: VisionLanguageModel, target: str) -> list[str]:
    """Return names of linear layers that match one adapter.target entry."""
    linear_names = [n for n, x in model.named_modules() if isinstance(x, nn.Linear) and n != "lm_head"]
    kinds = family_of(model).adapter_targets
    try:
        pattern = re.compile(target)
    except re.error as error:
        raise UserError(f"target is {target!r}, which is not a valid regular expression ({error})") from error
    target_names = []
    for name in linear_names:
        kind = next((kind for kind, of_kind in kinds.items() if of_kind.search(name)), part_of(name))
        if kind == target or pattern.fullmatch(name):
            target_names.append(name)
    require(
        bool(target_names),
        "target",
        target,
        f"{', '.join(['language', 'vision', 'merger', *kinds])} or a regular expression that matches the whole name "
        f"of at least one linear layer, such as {linear_names[-1]}",
    )
    return target_names


def add_lora(model: nn.Module, name: str, r: int, scaling: float, dropout: float = 0.0):
    """Put a zero-initialized LoRALinear in the place of a linear layer, discarding any old adapter."""
    layer = model.get_submodule(name)
    base = layer.base if isinstance(layer, LoRALinear) else cast(nn.Linear, layer)
    model.set_submodule(name, LoRALinear(base, r, scaling, dropout))
