"""Decoding with as few launches as there are tokens: on a GPU a decode step is one CUDA graph.

A step that the host starts kernel by kernel waits for the host: 36 layers are over a thousand launches. A graph is one,
and runs the same kernels on the same memory every time. So what changes from step to step is in tensors: the number of
the step, the last tokens, which rows go on. Keys are in buffers of full length, and a mask hides what is not there yet.
The host is asked every few steps which rows have ended. When a quarter of the slots is enough for the others, they move
together; then, and when a step must read more keys, a new graph is made.

A step computes from the layers' weights, past the hooks of sharding and of recomputation; q, k and v are one product.
It draws what generate draws, with logits that differ in their last bits: sums go over masked keys too.

Dimension letters: B prompts, S slots of each, n = B * S rows, K key/value heads, h query heads of each, D head_dim,
P tokens of the longest prompt, C own keys that a step reads.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivlmrl.batch import pack
from minivlmrl.generate import Completion, SamplingConfig, next_tokens, prefill, stop_tokens
from minivlmrl.kernels.backend import to_device
from minivlmrl.kernels.float32_matmul import float32_matmul
from minivlmrl.kernels.swiglu import swiglu
from minivlmrl.rope import text_rotary
from minivlmrl.rows import Prompt
from minivlmrl.sampling.filters import Filters

ASK_EVERY = 16  # steps until a card is asked which rows have ended; what these draw is left out
KEYS = 256  # own keys that a step reads at first; twice as many when they are full
SHRINK = 4  # rows move together when one in so many slots is enough


def with_graph(sampling: SamplingConfig, device: torch.device, joint) -> bool:
    """Whether to decode by generate_captured; weights that are gathered layer by layer cannot (joint is not None)."""
    choice = getattr(sampling, "graph", "auto")  # a plain SamplingConfig has none
    if joint is not None and choice == "always":
        raise ValueError("sampling.graph is 'always', it needs rollout.gather_weights: true")
    return joint is None and (choice == "always" or (choice == "auto" and device.type == "cuda"))


@torch.no_grad()
def generate_captured(
    model, prompts: Sequence[Prompt], num_generations: int, sampling, stop_token_ids, draw: Callable, watch=None
) -> list[list[Completion]]:
    """Sample completions as generate does; full weights are on the device.

    Args:
        draw: of tensor operations alone; step is a tensor (1,).
        watch: is called between the graphs, and sees rows that have ended too.
    """
    device = model.lm_head.weight.device
    owner = torch.arange(len(prompts)).repeat_interleave(num_generations)  # (R,), on the host
    stop = to_device(stop_tokens(sampling, stop_token_ids, model), device)
    batch, filters = pack(prompts, [[] for _ in prompts], model.config, device), None
    limits, most = owner.new_full(owner.shape, sampling.max_new_tokens), sampling.max_new_tokens
    if sampling.filtered:
        filters = Filters(sampling, batch, to_device(owner, device), stop)
        limits, most = filters.limits, int(filters.limits.max())
    logits, decode, position = prefill(model, batch, owner, 0)
    choose = partial(next_tokens, temperature=sampling.temperature, draw=draw, filters=filters)
    s = DecodeState(model, decode, position, (choose, watch), stop, to_device(limits, device), most)
    s.logits = logits
    next_token(s)
    graph, every = None, ASK_EVERY if device.type == "cuda" and watch is None else 1
    for step in range(1, most):
        if step % every == 0:
            alive = s.alive[s.rows].view(len(s.bias), -1).cpu()
            if not alive.any():
                break
            if alive.any(1).sum() * alive.sum(1).max() * SHRINK <= alive.numel():
                s.keep(alive)
                graph = None
        if step > len(s.offsets):
            s.offsets = torch.arange(min(2 * len(s.offsets), most), device=device)
            graph = None
        graph = graph or Graph(partial(decode_step, s), device)
        graph()
        if watch is not None:
            next_token(s)
    if not s.logps.isfinite().all():
        raise FloatingPointError("the model's logits are not finite")
    rows = zip(s.tokens.cpu(), s.logps.cpu(), s.lengths.tolist(), s.stopped.tolist(), strict=True)
    rows = [Completion(ids[:n], scored[:n], ended) for ids, scored, n, ended in rows]
    return [rows[i : i + num_generations] for i in range(0, len(rows), num_generations)]


class Graph:
    """A function of static tensors, called again and again: on a GPU a CUDA graph from the second call on."""

    def __init__(self, function: Callable, device: torch.device):
        self.function, self.on_gpu, self.replay = function, device.type == "cuda", None

    def __call__(self):
        if self.replay is None:
            self.function()  # the first call prepares what a capture must not: workspaces, compiled kernels
            self.replay = self.capture if self.on_gpu else self.function
        else:
            self.replay()

    def capture(self):
        """Record the kernels, which does not run them, and run them."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads load images
            self.function()
        self.replay = graph.replay
        graph.replay()


class DecodeState:
    """The tensors of decode_step and next_token; what was drawn is there for all R rows, the rest for n slots."""

    def __init__(self, model, decode, position: Tensor, calls: tuple, stop: Tensor, limits: Tensor, most: int):
        # calls: choose(logits (n, V), rows=, step=) -> ids, logps (n,), and watch; the others as in generate
        self.model, self.position, self.stop, self.limits = model, position, stop, limits
        self.choose, self.watch = calls
        self.tokens = torch.zeros(len(limits), most, dtype=torch.long, device=limits.device)
        self.logps, self.lengths = torch.zeros_like(self.tokens, dtype=torch.float32), torch.zeros_like(limits)
        self.stopped, self.alive = torch.zeros_like(limits, dtype=torch.bool), limits > 0
        self.step = torch.full_like(limits[:1], -1)  # (1,) of the last token that was drawn
        self.rows = torch.arange(len(limits), device=limits.device)  # (n,) row of each slot
        self.ids = torch.zeros_like(limits)  # (n,) last tokens
        self.offsets = torch.arange(min(KEYS, most), device=limits.device)  # (C,)
        self.bias = decode.bias  # (B, P)
        B, K, _, D = decode.prompt[0][0].shape
        shape = 2, B, K, len(limits) // B, most, D
        self.keys = [(*layer, layer[0].new_zeros(shape)) for layer in decode.prompt]
        self.qkv = [joined(x.self_attn.q_proj, x.self_attn.k_proj, x.self_attn.v_proj) for x in model.model.layers]

    def end(self, ended: Tensor):
        """Let rows end that drew the last token while they were alive; ended (n,) bool."""
        self.stopped[self.rows] |= ended & (self.lengths[self.rows] == self.step + 1)
        self.alive[self.rows] &= ~ended

    def keep(self, alive: Tensor):
        """Keep the prompts that have rows alive, (B, S) bool on the host, and of each as many slots as any needs."""
        prompts = alive.any(1).nonzero()[:, 0]
        slots = alive[prompts].byte().argsort(dim=1, descending=True, stable=True)[:, : alive.sum(1).max()]  # (b, s)
        at = (prompts[:, None] * alive.shape[1] + slots).flatten()  # (b * s,)
        at, prompts, slots = (to_device(x, self.rows.device) for x in (at, prompts, slots))
        self.rows, self.ids, self.bias = self.rows[at], self.ids[at], self.bias[prompts]
        heads = torch.arange(self.keys[0][0].shape[1], device=at.device)[:, None]
        for i, (k, v, own) in enumerate(self.keys):  # one after the other: never two copies of all keys
            self.keys[i] = k[prompts], v[prompts], own[:, prompts[:, None, None], heads, slots[:, None]]


def joined(*layers: nn.Linear) -> Callable:
    """Linear layers of one input as one product; with adapters, or in 4 bits, each for itself."""
    if any(type(layer) is not nn.Linear for layer in layers):
        return lambda x: torch.cat([layer(x) for layer in layers], dim=-1)
    weight, bias = (torch.cat([getattr(layer, name) for layer in layers]) for name in ("weight", "bias"))
    return partial(F.linear, weight=weight, bias=bias)


def add_linear(x: Tensor, layer: nn.Linear, y: Tensor) -> Tensor:
    """x + layer(y), in place and as one kernel where the layer is a plain product."""
    plain = type(layer) is nn.Linear and layer.bias is None
    return x.addmm_(y, layer.weight.T) if plain else x + layer(y)


def decode_step(s: DecodeState):
    """Run the model on the last token of each slot, and draw the next."""
    decoder = s.model.model
    x = decoder.embed_tokens(s.ids)  # (n, hidden_size)
    cos, sin = text_rotary((s.position[s.rows] + s.step).expand(3, -1), s.model.config, x.dtype)
    unseen = torch.zeros_like(s.offsets, dtype=s.bias.dtype).masked_fill(s.offsets > s.step, float("-inf"))
    bias = torch.cat([s.bias, unseen.expand(len(s.bias), -1)], dim=1)[:, None]  # (B, 1, P + C)
    for layer, qkv, keys in zip(decoder.layers, s.qkv, s.keys, strict=True):
        heads = qkv(layer.input_layernorm(x))
        x = add_linear(x, layer.self_attn.o_proj, attend(heads, cos, sin, s.step, bias, keys))
        y = layer.post_attention_layernorm(x)
        x = add_linear(x, layer.mlp.down_proj, swiglu(layer.mlp.gate_proj(y), layer.mlp.up_proj(y)))
    s.logits = float32_matmul(decoder.norm(x), s.model.lm_head.weight.T)  # (n, V)
    if s.watch is None:
        next_token(s)


def next_token(s: DecodeState):
    """Draw the next token of each slot and write it down."""
    s.step += 1
    ids, logps = s.choose(s.logits, rows=s.rows, step=s.step)
    s.tokens[s.rows, s.step], s.logps[s.rows, s.step] = ids, logps
    s.lengths[s.rows] += s.alive[s.rows]
    s.end((ids[:, None] == s.stop).any(1))
    s.alive[s.rows] &= s.limits[s.rows] > s.step + 1
    s.ids.copy_(ids)
    if s.watch is not None:
        s.end(s.watch(s.rows, ids))


def attend(heads: Tensor, cos: Tensor, sin: Tensor, step: Tensor, bias: Tensor, keys: tuple) -> Tensor:
    """DecodeAttention with the rotary, for all slots.

    Args:
        heads: (n, (K * h + 2K) * D), queries, keys and values of the slots' last tokens.
        cos, sin: (n, 1, D).
        step: (1,), where the new keys are written.
        bias: (B, 1, P + C), -inf for what is not seen.
        keys: k, v (B, K, P, D) of the prompts; own (2, B, K, S, most, D).
    Returns:
        (n, K * h * D).
    """
    k, v, own = keys
    (B, K, P, D), S = k.shape, own.shape[3]
    heads = heads.view(B, S, -1, D)
    H = heads.shape[2] - 2 * K
    turned = heads[:, :, : H + K].flatten(0, 1)  # (n, H + K, D), a view
    partner = turned.roll(D // 2, dims=-1)
    turned.mul_(cos).addcmul_(partner, sin)
    new = heads[:, :, H:].unflatten(2, (2, K)).permute(2, 0, 3, 1, 4)  # (2, B, K, S, D)
    own.index_copy_(4, step, new.unsqueeze(4))
    own_k, own_v = own[..., : bias.shape[2] - P, :].flatten(1, 3)  # (B*K*S, C, D)
    q = heads[:, :, :H].unflatten(2, (K, -1)).transpose(1, 2).flatten(2, 3).flatten(0, 1)  # (B*K, S*h, D)
    to_prompt = float32_matmul(q, k.flatten(0, 1).mT)
    to_own = float32_matmul(q.view(B * K * S, -1, D), own_k.mT).view(*q.shape[:2], -1)
    scores = torch.cat([to_prompt, to_own], dim=-1).view(B, -1, bias.shape[2])
    weights = torch.add(bias, scores, alpha=D**-0.5).softmax(-1).to(q.dtype).view(*q.shape[:2], -1)
    out = weights[..., :P] @ v.flatten(0, 1)  # (B*K, S*h, D)
    out.view(B * K * S, -1, D).baddbmm_(weights[..., P:].unflatten(1, (S, -1)).flatten(0, 1), own_v)
    return out.view(B, K, S, -1).transpose(1, 2).reshape(B * S, -1)
