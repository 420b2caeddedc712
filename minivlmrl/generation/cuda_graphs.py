"""Capture the decode step as a CUDA graph, so that the host launches only once per token.

Without a graph, the GPU waits for the host, because a step of 36 layers has more than a thousand
kernel launches. A graph takes a single launch, and it runs the same kernels on the same memory
every time. Therefore all values that change from step to step are stored in tensors, and all
tensors keep their addresses. Completion keys and values are in buffers that are longer than
needed, a mask hides the unused part, and finished rows are computed until the whole batch is
finished. A new graph is captured only when the buffers have to grow.

The random numbers are the same as without a graph. The logits' last bits differ, because the
sums also include masked keys.

In addition, the attention layers launch fewer kernels, see FusedAttention.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivlmrl.generation.generate import Decode
from minivlmrl.kernels.backend import backend_for
from minivlmrl.kernels.decode_attention import decode_attention, fits
from minivlmrl.kernels.rotary_cache import rotary_cache
from minivlmrl.model.attention import Attention, DecodeAttention
from minivlmrl.model.decoder import SelfAttention, VisionLanguageModel
from minivlmrl.model.rope import apply_rotary

HEADROOM = 2**30  # free bytes in GPU memory that a capture may request from the driver
# Initial size of the key and value buffers, in tokens per completion. It is doubled when the
# buffers are full.
KEYS = 256
# All captures share one stream, because a GPU keeps separate workspaces for every stream.
capture_stream = cache(lambda device: torch.cuda.Stream(device))


class StaticDecodeAttention(DecodeAttention):
    """Attention for decoding whose tensors keep their addresses until a longer buffer is needed."""

    check_every = 16

    def __init__(self, prompts, prompt_index: Tensor, capacity: int, start: Tensor):
        super().__init__(prompts, prompt_index, min(KEYS, capacity), start)
        self.longest = 0  # the longest completion's token count, counted on the host
        self.capacity = capacity
        self.num_row_keys = min(KEYS, capacity)
        self.row_bias = F.pad(self.row_bias, (0, capacity - self.num_row_keys))

    def select(self, unfinished: Tensor) -> None:
        """Keep all rows in the batch, because a graph also computes the finished rows."""

    def advance(self, tokens: int | Tensor = 1, growth: int = 1):
        """Count the new tokens, also on the host, and enlarge full key and value buffers."""
        super().advance(tokens, growth=0)
        self.longest += growth
        if self.num_row_keys < min(self.longest, self.capacity):
            self.num_row_keys = min(max(2 * self.num_row_keys, self.longest), self.capacity)
            # Layers are enlarged one by one, so that only one layer is in memory twice.
            for layer in self.row_kv:
                layer[:] = [F.pad(x, (0, 0, 0, self.num_row_keys - x.shape[2])) for x in layer]

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not fits(q):
            return super().__call__(layer_index, q, k, v)
        self.remember(layer_index, k, v)
        return self.attend(layer_index, q)

    def rotate_and_attend(
        self, layer_index: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Apply rotary embeddings to q and k, and compute the attention output as __call__ does."""
        if not (fits(q) and backend_for(q, "rotary_cache") == "triton"):
            return self(layer_index, apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v)
        row_k, row_v = self.row_kv[layer_index]
        q = rotary_cache(q, k, v, cos, sin, row_k, row_v, self.newest)
        return self.attend(layer_index, q)

    def attend(self, layer_index: int, q: Tensor) -> Tensor:
        """Compute the attention output from rotated q and the cached keys, with a Triton kernel."""
        prompt_k, prompt_v = self.prompt_kv[layer_index]
        row_k, row_v = self.row_kv[layer_index]
        row_bias = self.row_bias[:, 0, 0]
        return decode_attention(q, prompt_k, prompt_v, self.prompt_bias, row_k, row_v, row_bias)


class FusedAttention:
    """Compute a decode step's attention layer with fewer kernels.

    q, k and v are one product, whose weight is concatenated once per rollout. They are three
    products if one of their layers has an adapter or is quantised. StaticDecodeAttention can then
    rotate q and k and write the cache with one kernel.

    Args:
        layer: the attention layer; its method `forward` computes the same result.
    """

    def __init__(self, layer: SelfAttention):
        self.layer = layer
        self.projections = layer.q_proj, layer.k_proj, layer.v_proj
        self.joined: tuple[Tensor, Tensor | None] | None = None  # weight and bias of q, k and v
        if is_joinable(layer):
            weights: list[Tensor] = [projection.weight for projection in self.projections]
            biases: list[Tensor] = [x.bias for x in self.projections if x.bias is not None]
            self.joined = torch.cat(weights), torch.cat(biases) if biases else None

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        assert isinstance(attention, StaticDecodeAttention)
        layer = self.layer
        if self.joined is None:
            products = [projection(x) for projection in self.projections]
        else:
            widths = [projection.out_features for projection in self.projections]
            products = F.linear(x, *self.joined).split(widths, dim=-1)
        q, k, v = (product.unflatten(-1, (-1, layer.head_dim)) for product in products)
        out = attention.rotate_and_attend(
            layer.index, layer.q_norm(q), layer.k_norm(k), v, cos, sin
        )
        return layer.o_proj(out.flatten(1))


def fusable_layers(model: VisionLanguageModel) -> list[SelfAttention]:
    """Return the attention layers for which FusedAttention is right.

    SelfAttention subclasses, such as Qwen3.5's, have another formula.
    """
    return [layer for layer in model.model.modules() if type(layer) is SelfAttention]


def is_joinable(layer: SelfAttention) -> bool:
    """Return whether a layer's q, k and v can be one product, which needs plain linear layers."""
    return all(type(x) is nn.Linear for x in (layer.q_proj, layer.k_proj, layer.v_proj))


def joined_bytes(model: VisionLanguageModel, dtype: torch.dtype) -> int:
    """Return the size in bytes of all weights that FusedAttention concatenates."""
    layers = [layer for layer in fusable_layers(model) if is_joinable(layer)]
    projections = [x for layer in layers for x in (layer.q_proj, layer.k_proj, layer.v_proj)]
    return sum(p.numel() for x in projections for p in x.parameters()) * dtype.itemsize


@contextmanager
def fused(layers: Sequence[FusedAttention]) -> Iterator[None]:
    """Replace attention layers' method `forward` inside a `with` block."""
    for fused_layer in layers:
        fused_layer.layer.forward = fused_layer.__call__
    try:
        yield
    finally:
        for fused_layer in layers:
            del fused_layer.layer.forward


class CapturedDecode(Decode):
    """Run one rollout's decode step as a CUDA graph, and on a CPU without a graph."""

    attention_type = StaticDecodeAttention

    def __init__(self):
        # replacements for the attention layers, which keep the joined weights that the graph reads
        self.fused_layers: list[FusedAttention] | None = None
        # the attention slots and the buffer size for which the graph was captured
        self.graph_key = None
        self.graph = None

    def __call__(self, model, ids: Tensor, attention) -> Tensor:
        # A graph reads fixed addresses, so it is only valid for the same slots and buffers.
        graph_key = attention.slots, attention.num_row_keys
        is_new = graph_key != self.graph_key
        if is_new:
            self.graph_key = graph_key
            self.graph = None
            self.ids = ids.clone()
        self.ids.copy_(ids)
        if self.graph is not None:
            self.graph.replay()
        # The first step runs without a graph and allocates the workspaces, because a capture must
        # not allocate them.
        elif is_new or ids.device.type != "cuda":
            self.step(model, attention)
        else:
            self.capture(model, attention)
        return self.logits

    def step(self, model, attention):
        if self.fused_layers is None:
            self.fused_layers = [FusedAttention(layer) for layer in fusable_layers(model)]
        with fused(self.fused_layers):
            self.logits = super().__call__(model, self.ids, attention)

    def capture(self, model, attention):
        """Capture a step's kernels in a graph, then replay the graph to run the step."""
        # torch.cuda.graph is not used, because it first returns all unused memory to the driver,
        # which takes 0.1 to 0.4 s. Here this is only done if little memory is free.
        if torch.cuda.mem_get_info()[0] < HEADROOM:
            torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        stream = capture_stream(self.ids.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # The mode thread_local allows other threads, which load images, to use the GPU.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self.step(model, attention)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = graph
        graph.replay()
