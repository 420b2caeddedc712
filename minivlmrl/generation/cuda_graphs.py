"""Decoding with one launch a token: on a GPU the step of `Decode` is captured as a CUDA graph.

A step that the host starts kernel by kernel waits for the host: 36 layers are over a thousand
launches. A graph is one launch, and runs the same kernels on the same memory every time. So what
changes from step to step is in tensors, and what the model computes with stays where it is: own
keys are in buffers with room, a mask hides what is not there yet, and rows that have ended run on
to the end of the batch. Only for more room a new graph is made. Draws are those of the eager step,
from logits whose last bits differ: sums go over masked keys too.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from minivlmrl.generation.generate import Decode
from minivlmrl.kernels.decode_attention import decode_attention, fits
from minivlmrl.model.attention import DecodeAttention

HEADROOM = 2**30  # bytes of a card that a capture may need of the driver
KEYS = 256  # own keys that a step reads at first; twice as many whenever they are full
# one for all captures: a card keeps the workspaces of each
capture_stream = cache(lambda device: torch.cuda.Stream(device))


class StaticDecodeAttention(DecodeAttention):
    """DecodeAttention on tensors that stay where they are, until own keys need more room."""

    check_every = 16

    def __init__(self, prompts, prompt_index: Tensor, capacity: int, start: Tensor):
        super().__init__(prompts, prompt_index, min(KEYS, capacity), start)
        self.longest = 0  # own tokens of the longest row, counted on the host
        self.capacity = capacity
        self.own_keys = min(KEYS, capacity)
        self.row_bias = F.pad(self.row_bias, (0, capacity - self.own_keys))

    def select(self, going_on: Tensor) -> None:
        """Keep all rows: a graph computes those that have ended too."""

    def advance(self, tokens: int | Tensor = 1, growth: int = 1):
        """Count tokens, on the host too, and make room for more own keys if it is full."""
        super().advance(tokens, growth=0)
        self.longest += growth
        if self.own_keys < min(self.longest, self.capacity):
            self.own_keys = min(max(2 * self.own_keys, self.longest), self.capacity)
            for layer in self.row_kv:  # one after the other: never two copies of all keys
                layer[:] = [F.pad(x, (0, 0, 0, self.own_keys - x.shape[2])) for x in layer]

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not fits(q):
            return super().__call__(layer_index, q, k, v)
        prompt_k, prompt_v = self.prompt_kv[layer_index]
        row_k, row_v = self.remember(layer_index, k, v)
        row_bias = self.row_bias[:, 0, 0]
        return decode_attention(q, prompt_k, prompt_v, self.prompt_bias, row_k, row_v, row_bias)


class CapturedDecode(Decode):
    """The step of `Decode` as a CUDA graph; on a CPU the same static step without one."""

    attention_type = StaticDecodeAttention

    def __init__(self):
        self.form = None  # of what the graph was made
        self.graph = None

    def __call__(self, model, ids: Tensor, attention) -> Tensor:
        form = attention.slots, attention.own_keys  # with others it would read other tensors
        is_new = form != self.form
        if is_new:
            self.form = form
            self.graph = None
            self.ids = ids.clone()
        self.ids.copy_(ids)
        if self.graph is not None:
            self.graph.replay()
        elif is_new or ids.device.type != "cuda":  # prepares what a capture must not: workspaces
            self.step(model, attention)
        else:
            self.capture(model, attention)
        return self.logits

    def step(self, model, attention):
        self.logits = super().__call__(model, self.ids, attention)

    def capture(self, model, attention):
        """Record the kernels, which does not run them, and run them."""
        # torch.cuda.graph would give all free memory back to the driver first, .1 to .4 s
        if torch.cuda.mem_get_info()[0] < HEADROOM:
            torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        stream = capture_stream(self.ids.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")  # other threads load images
            try:
                self.step(model, attention)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = graph
        graph.replay()
