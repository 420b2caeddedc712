"""Decoding with one launch a token: on a GPU the book's decode step is captured as a CUDA graph.

A step that the host starts kernel by kernel waits for the host: 36 layers are over a thousand
launches. A graph is one launch, and runs the same kernels on the same memory every time. So what
changes from step to step is in tensors, and what the model computes with stays where it is: own
keys are in buffers of full length, a mask hides what is not there yet, and the host is asked every
few steps which rows have ended. When a quarter of the slots is enough for the others, they move
together; then, and when a step must read more keys, a new graph is made.

Draws are those of the eager step, from logits whose last bits differ: sums go over masked keys too.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from minivlmrl.attention import DecodeAttention, GroupAttention
from minivlmrl.generate import Decode

KEYS = 256  # own keys that a step reads at first; twice as many when they are full
SHRINK = 4  # rows move together when one in so many slots is enough


class StaticDecodeAttention(DecodeAttention):
    """DecodeAttention on tensors that stay where they are;
    every prompt has the same number of slots."""

    ask_every = 16

    def __init__(self, prompts: GroupAttention, prompt_index: Tensor, capacity: int):
        super().__init__(prompts, prompt_index, capacity)
        self.length = torch.zeros(1, dtype=torch.long, device=self.device)
        self.steps, self.read, self.capacity = 0, min(KEYS, capacity), capacity
        self.mask = self.bias.new_full((1, capacity + 1), float("-inf"))  # of own keys
        self.mask[:, 0] = 0.0

    @property
    def unseen(self) -> Tensor:
        """(1, C): -inf for own keys that are not there yet."""
        return self.mask[:, : self.read]

    def grow(self):
        """Count a step on the host, and read more own keys if they are full."""
        if self.steps == self.read:
            self.read = min(2 * self.read, self.capacity)
        self.steps += 1

    def select(self, going_on: Tensor) -> Tensor | None:
        """Move rows together if a quarter of the slots is enough for those that go on."""
        going_on = going_on.view(len(self.bias), -1)  # (B, slots)
        prompts, slots = going_on.any(1).nonzero()[:, 0], int(going_on.sum(1).max())
        if len(prompts) * slots * SHRINK > going_on.numel():
            return None
        order = going_on[prompts].byte().argsort(dim=1, descending=True, stable=True)[:, :slots]
        return self.keep((prompts[:, None] * going_on.shape[1] + order).flatten())

    def advance(self):
        self.length += 1
        self.mask.index_fill_(1, self.length, 0.0)

    def remember(self, layer_index: int, k: Tensor, v: Tensor) -> list[Tensor]:
        for keys, new in zip(self.own[layer_index], (k, v), strict=True):
            keys.index_copy_(2, self.length, new.unsqueeze(2))
        return [keys[:, :, : self.read] for keys in self.own[layer_index]]


class CapturedDecode(Decode):
    """The book's decode step as a CUDA graph; on a CPU the same static step without one."""

    attention_type = StaticDecodeAttention

    def __init__(self):
        self.form = self.run = None

    def __call__(self, model, ids: Tensor, position: Tensor, attention) -> Tensor:
        attention.grow()
        form = attention.slots, attention.read  # with others the graph would read other tensors
        if form != self.form:
            self.form, self.run = form, None
            self.ids, self.position = ids.clone(), position.clone()
        self.ids.copy_(ids)
        self.position.copy_(position)
        if self.run is None:  # the first step prepares what a capture must not: workspaces, kernels
            self.step(model, attention)
            on_gpu = ids.device.type == "cuda"
            self.run = self.capture if on_gpu else self.step
        else:
            self.run(model, attention)
        return self.logits

    def step(self, model, attention):
        self.logits = super().__call__(model, self.ids, self.position, attention)

    def capture(self, model, attention):
        """Record the kernels, which does not run them, and run them."""
        graph = torch.cuda.CUDAGraph()
        # other threads load images
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.step(model, attention)
        self.run: Callable = lambda *_: graph.replay()
        graph.replay()
