"""Capture the decode step as a CUDA graph, with one launch per token.

Without a graph, a decode step with 36 layers launches over a thousand kernels, and the GPU waits for the CPU. A CUDA
graph launches all kernels at once, but needs tensors with fixed addresses and sizes. Finished completions therefore
stay in the batch, and unused KV cache slots are masked. With a graph, the same random numbers are drawn as without;
logits may differ by rounding.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from minivlmrl.generation.generate import Decode
from minivlmrl.kernels.decode_attention import decode_attention, fits
from minivlmrl.model.attention import DecodeAttention

HEADROOM = 2**30  # minimum free GPU memory before a capture, in bytes
# initial KV cache size, in tokens per completion; doubled when full
KEYS = 256
# one stream for all captures, because each stream allocates workspaces
capture_stream = cache(lambda device: torch.cuda.Stream(device))


class StaticDecodeAttention(DecodeAttention):
    """Attention for decoding in a CUDA graph, with tensors at fixed addresses."""

    check_every = 16

    def __init__(self, prompts, prompt_index: Tensor, capacity: int, start: Tensor):
        super().__init__(prompts, prompt_index, min(KEYS, capacity), start)
        self.longest = 0  # length of the longest completion so far, in tokens; counted on the CPU
        self.capacity = capacity
        self.num_row_keys = min(KEYS, capacity)
        self.row_bias = F.pad(self.row_bias, (0, capacity - self.num_row_keys))

    def select(self, unfinished: Tensor) -> None:
        """Keep finished rows in the batch, because tensors in a CUDA graph have a fixed size."""

    def advance(self, tokens: int | Tensor = 1, growth: int = 1):
        super().advance(tokens, growth=0)
        self.longest += growth
        if self.num_row_keys < min(self.longest, self.capacity):
            self.num_row_keys = min(max(2 * self.num_row_keys, self.longest), self.capacity)
            # one layer at a time, so that only one layer's KV cache is in memory twice
            for layer in self.row_kv:
                layer[:] = [F.pad(x, (0, 0, 0, self.num_row_keys - x.shape[2])) for x in layer]

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not fits(q):
            return super().__call__(layer_index, q, k, v)
        self.remember(layer_index, k, v)
        prompt_k, prompt_v = self.prompt_kv[layer_index]
        row_k, row_v = self.row_kv[layer_index]
        return decode_attention(q, prompt_k, prompt_v, self.prompt_bias, row_k, row_v, self.row_bias[:, 0, 0])


class CapturedDecode(Decode):
    """Run decode steps as a CUDA graph on a GPU."""

    attention_type = StaticDecodeAttention

    def __init__(self):
        self.graph_key = None
        self.graph = None

    def __call__(self, model, ids: Tensor, attention) -> Tensor:
        # capture again for other prompts or a larger KV cache, because tensor addresses change
        graph_key = attention.slots, attention.num_row_keys
        is_new = graph_key != self.graph_key
        if is_new:
            self.graph_key = graph_key
            self.graph = None
            self.ids = ids.clone()
        self.ids.copy_(ids)
        if self.graph is not None:
            self.graph.replay()
        # run the first step without a graph, because kernels allocate workspaces
        elif is_new or ids.device.type != "cuda":
            self.step(model, attention)
        else:
            self.capture(model, attention)
        return self.logits

    def step(self, model, attention):
        self.logits = super().__call__(model, self.ids, attention)

    def capture(self, model, attention):
        # capture without torch.cuda.graph, which takes up to 0.4 s to empty the memory cache
        if torch.cuda.mem_get_info()[0] < HEADROOM:
            torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        stream = capture_stream(self.ids.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # thread_local: other threads may use the GPU during the capture
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self.step(model, attention)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = graph
        graph.replay()
