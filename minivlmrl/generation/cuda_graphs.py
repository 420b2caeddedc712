"""Capture the decode step as a CUDA graph, so that each token needs one launch by the host.

Without a graph the GPU waits for the host, because a step of 36 layers has over a thousand kernel
launches. A graph is one launch, and runs the same kernels on the same memory every time. Therefore
all values that change from step to step are in tensors, and tensors keep their addresses: the keys
and values of completions are in buffers with free room, a mask hides the unused part, and finished
rows run on to the end of the batch. A new graph is captured only when the buffers have to grow.
The random numbers are those of the eager step. The last bits of the logits differ, because sums
also include masked keys.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from minivlmrl.generation.generate import Decode
from minivlmrl.kernels.decode_attention import decode_attention, fits
from minivlmrl.model.attention import DecodeAttention

HEADROOM = 2**30  # free bytes of GPU memory that a capture may need from the driver
# initial size of the key and value buffers, in tokens of a completion; doubled when they are full
KEYS = 256
# one stream for all captures, because a GPU keeps the workspaces of every stream
capture_stream = cache(lambda device: torch.cuda.Stream(device))


class StaticDecodeAttention(DecodeAttention):
    """Attention of decoding whose tensors keep their addresses until a longer buffer is needed."""

    check_every = 16

    def __init__(self, prompts, prompt_index: Tensor, capacity: int, start: Tensor):
        super().__init__(prompts, prompt_index, min(KEYS, capacity), start)
        self.longest = 0  # tokens of the longest completion, counted on the host
        self.capacity = capacity
        self.num_row_keys = min(KEYS, capacity)
        self.row_bias = F.pad(self.row_bias, (0, capacity - self.num_row_keys))

    def select(self, unfinished: Tensor) -> None:
        """Keep all rows, because a graph also computes the rows that have finished."""

    def advance(self, tokens: int | Tensor = 1, growth: int = 1):
        """Count the new tokens, also on the host, and enlarge the key and value buffers if full."""
        super().advance(tokens, growth=0)
        self.longest += growth
        if self.num_row_keys < min(self.longest, self.capacity):
            self.num_row_keys = min(max(2 * self.num_row_keys, self.longest), self.capacity)
            for layer in self.row_kv:  # layer by layer, so that only one layer is copied at once
                layer[:] = [F.pad(x, (0, 0, 0, self.num_row_keys - x.shape[2])) for x in layer]

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not fits(q):
            return super().__call__(layer_index, q, k, v)
        prompt_k, prompt_v = self.prompt_kv[layer_index]
        row_k, row_v = self.remember(layer_index, k, v)
        row_bias = self.row_bias[:, 0, 0]
        return decode_attention(q, prompt_k, prompt_v, self.prompt_bias, row_k, row_v, row_bias)


class CapturedDecode(Decode):
    """Run the decode step as a CUDA graph, or on a CPU the same step without a graph."""

    attention_type = StaticDecodeAttention

    def __init__(self):
        self.graph_key = None  # attention slots and buffer size that the graph was captured with
        self.graph = None

    def __call__(self, model, ids: Tensor, attention) -> Tensor:
        # a graph is only valid for these tensors, because it reads fixed addresses
        graph_key = attention.slots, attention.num_row_keys
        is_new = graph_key != self.graph_key
        if is_new:
            self.graph_key = graph_key
            self.graph = None
            self.ids = ids.clone()
        self.ids.copy_(ids)
        if self.graph is not None:
            self.graph.replay()
        # the first step runs without a graph, because a capture must not allocate workspaces
        elif is_new or ids.device.type != "cuda":
            self.step(model, attention)
        else:
            self.capture(model, attention)
        return self.logits

    def step(self, model, attention):
        self.logits = super().__call__(model, self.ids, attention)

    def capture(self, model, attention):
        """Capture the kernels of a step in a graph, then replay the graph to run the step."""
        # not torch.cuda.graph, which first returns all free memory to the driver (0.1 to 0.4 s)
        if torch.cuda.mem_get_info()[0] < HEADROOM:
            torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        stream = capture_stream(self.ids.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # thread_local, because other threads load images
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self.step(model, attention)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = graph
        graph.replay()
