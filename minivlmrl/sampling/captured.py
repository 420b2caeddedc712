"""Decoding with one launch a token: on a GPU the book's decode step is captured as a CUDA graph.

A step that the host starts kernel by kernel waits for the host: 36 layers are over a thousand
launches. A graph is one launch, and runs the same kernels on the same memory every time. So what
changes from step to step is in tensors, and what the model computes with stays where it is: own
keys are in buffers with room, a mask hides what is not there yet, and every few steps rows that
have ended are dropped. For that, and for more room, a new graph is made. Draws are those of the
eager step, from logits whose last bits differ: sums go over masked keys too.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from minivlmrl.attention import DecodeAttention
from minivlmrl.generate import Decode
from minivlmrl.kernels.decode_attention import decode_attention, fits

HEADROOM = 2**30  # bytes of a card that a capture may need of the driver
KEYS = 256  # own keys that a step reads at first; twice as many when they are full
SIZES = 1, 2, 4, 8  # rows that read a prompt's keys together, when rows have moved
SHRINK = 4 / 3  # they move when a step reads so many times more than it would
# one for all captures: a card keeps the workspaces of each
capture_stream = cache(lambda device: torch.cuda.Stream(device))


class StaticDecodeAttention(DecodeAttention):
    """DecodeAttention on tensors that stay where they are, with equally many slots for each prompt;
    when rows have moved a prompt that many of them read is there more than once."""

    select_every = 16

    def __init__(self, prompts, prompt_index: Tensor, capacity: int, start: Tensor):
        super().__init__(prompts, prompt_index, min(KEYS, capacity), start)
        self.most = 0
        self.read = min(KEYS, capacity)
        self.capacity = capacity
        self.row_bias = F.pad(self.row_bias, (0, capacity - self.read))
        self.prompts = torch.arange(len(self.prompt_bias))  # of each group of slots

    def advance(self, tokens: int | Tensor = 1, most: int = 1):
        """Count tokens, on the host too, and make room for more own keys if it is full."""
        super().advance(tokens, 0)
        self.most += most
        if self.read < min(self.most, self.capacity):
            self.read = min(max(2 * self.read, self.most), self.capacity)
            for layer in self.row_kv:  # one after the other: never two copies of all keys
                layer[:] = [F.pad(x, (0, 0, 0, self.read - x.shape[2])) for x in layer]

    def select(self, going_on: Tensor) -> Tensor | None:
        """Move rows together where a step then reads a quarter fewer keys: in slots of 1, 2, 4 or 8
        rows that read one prompt together; what no row fills runs one that has ended."""
        prompts = self.prompts[self.prompt_index[going_on]]
        rows = going_on.nonzero()[:, 0]
        counts = prompts.bincount()
        sizes = [size for size in SIZES if size <= self.slots.slots]
        costs = [self.cost(int((-(-counts // size)).sum()), size) for size in sizes]
        if self.cost(len(self.prompt_bias), self.slots.slots) < SHRINK * min(costs):
            return None
        size = sizes[costs.index(min(costs))]
        ended = int(going_on.byte().argmin())
        of_prompts = rows.split(counts[counts > 0].tolist())  # rows of a prompt are neighbours
        groups = [group for some in of_prompts for group in some.split(size)]
        kept = torch.stack([F.pad(x, (0, size - len(x)), value=ended) for x in groups])
        owners = self.prompt_index[kept[:, 0]]
        self.prompts = self.prompts[owners]
        index = torch.arange(len(owners)).repeat_interleave(size)
        return self.move(kept.flatten(), owners, index)

    def cost(self, groups: int, slots: int) -> int:
        """Count the keys that a step reads: a prompt's once in a group, own ones in each slot."""
        return groups * (self.prompt_bias.shape[1] + slots * self.read)

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not fits(q):
            return super().__call__(layer_index, q, k, v)
        prompt_kv = self.prompt_kv[layer_index]
        kv = self.remember(layer_index, k, v)
        return decode_attention(q, *prompt_kv, self.prompt_bias, *kv, self.row_bias[:, 0, 0])


class CapturedDecode(Decode):
    """The book's decode step as a CUDA graph; on a CPU the same static step without one."""

    attention_type = StaticDecodeAttention

    def __init__(self):
        self.form = self.graph = None

    def __call__(self, model, ids: Tensor, attention) -> Tensor:
        form = attention.slots, attention.read  # with others the graph would read other tensors
        first = form != self.form
        if first:
            self.form, self.graph = form, None
            self.ids = ids.clone()
        self.ids.copy_(ids)
        if self.graph is not None:
            self.graph.replay()
        elif first or ids.device.type != "cuda":  # prepares what a capture must not: workspaces
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
