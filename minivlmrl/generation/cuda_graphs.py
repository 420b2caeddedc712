"""Capture the decode step as a CUDA graph, so that the CPU launches only one graph per token.

Without a CUDA graph, the GPU waits for the CPU, because a decode step with 36 layers launches more than a thousand
kernels. A CUDA graph needs a single launch, and runs the same kernels on the same memory addresses every time. A CUDA
graph needs tensors of constant size: finished completions stay in the batch, and unused keys and values are masked.

Sampling uses the same random numbers with and without a CUDA graph. The logits with and without a CUDA graph may differ
by rounding errors.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from minivlmrl.generation.generate import Decode
from minivlmrl.kernels.decode_attention import decode_attention, fits
from minivlmrl.model.attention import DecodeAttention

HEADROOM = 2**30  # free bytes in GPU memory that a capture may request from the driver
# Initial size of the key and value buffers, in tokens per completion. The size is doubled when the buffers are full.
KEYS = 256
# All CUDA graphs are captured on one stream, because every additional stream would need its own workspaces.
capture_stream = cache(lambda device: torch.cuda.Stream(device))


class StaticDecodeAttention(DecodeAttention):
    """Attention for decoding in a CUDA graph, whose tensors must stay at the same memory addresses."""

    check_every = 16

    def __init__(self, prompts, prompt_index: Tensor, capacity: int, start: Tensor):
        super().__init__(prompts, prompt_index, min(KEYS, capacity), start)
        self.longest = 0  # the longest completion's token count, counted on the host
        self.capacity = capacity
        self.num_row_keys = min(KEYS, capacity)
        self.row_bias = F.pad(self.row_bias, (0, capacity - self.num_row_keys))

    def select(self, unfinished: Tensor) -> None:
        """Do nothing: finished rows stay in the batch, because a CUDA graph needs tensors of constant size."""

    def advance(self, tokens: int | Tensor = 1, growth: int = 1):
        super().advance(tokens, growth=0)
        self.longest += growth
        if self.num_row_keys < min(self.longest, self.capacity):
            self.num_row_keys = min(max(2 * self.num_row_keys, self.longest), self.capacity)
            # Buffers are enlarged layer by layer, so that only one layer's buffers are in memory twice.
            for layer in self.row_kv:
                layer[:] = [F.pad(x, (0, 0, 0, self.num_row_keys - x.shape[2])) for x in layer]

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not fits(q):
            return super().__call__(layer_index, q, k, v)
        self.remember(layer_index, k, v)
        prompt_k, prompt_v = self.prompt_kv[layer_index]
        row_k, row_v = self.row_kv[layer_index]
        row_bias = self.row_bias[:, 0, 0]
        return decode_attention(q, prompt_k, prompt_v, self.prompt_bias, row_k, row_v, row_bias)


class CapturedDecode(Decode):
    """Run the decode steps of one rollout as a CUDA graph; on a CPU, run them without a graph."""

    attention_type = StaticDecodeAttention

    def __init__(self):
        self.graph_key = None
        self.graph = None

    def __call__(self, model, ids: Tensor, attention) -> Tensor:
        # different prompts or longer buffers have different memory addresses, and need a new CUDA graph
        graph_key = attention.slots, attention.num_row_keys
        is_new = graph_key != self.graph_key
        if is_new:
            self.graph_key = graph_key
            self.graph = None
            self.ids = ids.clone()
        self.ids.copy_(ids)
        if self.graph is not None:
            self.graph.replay()
        # The first step is not captured, because kernels allocate workspaces at their first use.
        elif is_new or ids.device.type != "cuda":
            self.step(model, attention)
        else:
            self.capture(model, attention)
        return self.logits

    def step(self, model, attention):
        self.logits = super().__call__(model, self.ids, attention)

    def capture(self, model, attention):
        # torch.cuda.graph would empty PyTorch's memory cache before each capture, which takes up to 0.4 s.
        if torch.cuda.mem_get_info()[0] < HEADROOM:
            torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        stream = capture_stream(self.ids.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # With thread_local, other threads may use the GPU during a capture, for example to load images.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self.step(model, attention)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = graph
        graph.replay()
