"""What one GRPO step would cost on a card, from shapes alone: neither a GPU nor weights are needed.

python benchmarks/roofline.py --model 3b --card h100 --cards 8 --top 5

The real code runs on the meta device. Every operation is counted and put on the ceilings of a card:
    GPU seconds of an operation    max(bytes / bandwidth, FLOPs / peak, 2 us)
    host seconds                   launches x --host-us, what PyTorch's eager mode spends on one
    seconds of a phase             the larger of the two sums; of decoding the first alone: a step is one CUDA graph

Kernels that a card has and the meta device lacks are replaced by their cost. docs/gpu.md says what is left out.
"""

import argparse
import contextlib
import math
import sys
from unittest import mock

import torch
from sizes import ADAMW, CARDS, COPIED, FLASH, FLOOR, HOOKS, HUB, LINK, MEMORY, PRODUCTS, SENT, SORT, WALKED, config_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from minivlmrl import generate
from minivlmrl.attention import DecodeAttention, GroupAttention
from minivlmrl.decoder import Qwen2_5_VL
from minivlmrl.hub.model_config import ModelConfig
from minivlmrl.kernels.decode_attention import WARPS, cut
from minivlmrl.kernels.linear_log_softmax import TILE
from minivlmrl.kernels.rms_norm import RMSNorm
from minivlmrl.kernels.window_attention import MOST_TOKENS, batched_attention
from minivlmrl.logprobs import per_token_logps
from minivlmrl.run.memory import Work, meta_batch
from minivlmrl.sampling import captured
from minivlmrl.scale.sharding import recompute_blocks

FREE = {"detach", "alias", "empty", "empty_like", "new_empty", "new_empty_strided", "_unsafe_view", "promote_types"}
READ_WHAT_THEY_GIVE = {"embedding", "index", "gather", "index_select"}
WRITE_WHAT_THEY_GET = {"index_copy_", "index_put_", "scatter_"}  # their last argument
SORTED = {"index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_"}


class Count(TorchDispatchMode):
    """Launches, bytes, FLOPs and GPU seconds of the operations in this context, by name."""

    def __init__(self, card: str):
        super().__init__()
        self.card = card
        self.ops = {}

    def add(self, name: str, size: float, flops: float = 0.0, launches: int = 1, rate=1.0, walked=0.0):
        memory, peak, _ = CARDS[self.card]
        seconds = max(size / (memory * MEMORY), flops / (peak * PRODUCTS * rate), launches * FLOOR, walked)
        row = zip(self.ops.get(name, (0, 0, 0, 0)), (launches, size, flops, seconds), strict=True)
        self.ops[name] = [before + more for before, more in row]

    def total(self) -> list[float]:
        """Launches, bytes, FLOPs, seconds, and seconds of element-wise work: norms, rotary, activations, copies."""
        return [*map(sum, zip(*self.ops.values(), strict=True)), sum(row[3] for row in self.ops.values() if not row[2])]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if name.startswith("linear_log_softmax"):
            self.count_head(name, *(args[0] if isinstance(args[0], list) else args)[:2])
        elif not is_view and name not in FREE:
            packet = getattr(torch.ops.aten, name.rstrip("_"), None)  # in place the FLOPs are the same
            flops = flop_registry.get(packet, lambda *_, **__: 0.0)(*args, **(kwargs or {}), out_val=out)
            size = size_of((args, kwargs, out))
            if name in READ_WHAT_THEY_GIVE | WRITE_WHAT_THEY_GET:
                size = 2 * size_of(out if name in READ_WHAT_THEY_GIVE else args[-1])
            values = {"embedding_dense_backward": lambda: args[1].numel(), "cumsum": lambda: out.shape[-1]}
            walked = WALKED[name] * values[name]() if name in WALKED else 0.0
            self.add(name, size, flops, SORT if name in SORTED else 1, walked=walked)
        return out

    def count_head(self, name: str, hidden: Tensor, weight: Tensor):
        """By tiles, whose logits stay in the L2 cache; the backward computes them again."""
        (M, D) = hidden.shape
        V = len(weight)
        backward = name.endswith("backward")
        tiles = math.ceil(V / (TILE // 2)) * math.ceil(M / TILE)
        products = 3 if backward else 1
        size = products * tiles * D * (min(M, TILE) + TILE // 2) * hidden.element_size() + 10 * V * D * backward
        self.add(name, size, products * 2.0 * M * V * D, 2 * products * tiles)


class Kernel(torch.autograd.Function):
    """A fused kernel of a card: its cost, and a result without numbers; its backward costs 2.5 times as much."""

    @staticmethod
    def forward(ctx, count, name, flops, *inputs):
        ctx.save_for_backward(*inputs)
        ctx.cost = count, name, flops, size_of((inputs, inputs[0]))
        count.add(name, ctx.cost[-1], flops, rate=FLASH)
        return torch.empty_like(inputs[0])

    @staticmethod
    def backward(ctx, grad):
        count, name, flops, size = ctx.cost
        count.add(f"{name} backward", 2.5 * size, 2.5 * flops, launches=2, rate=FLASH)
        return None, None, None, *(torch.empty_like(x) for x in ctx.saved_tensors)


def size_of(tensors) -> int:
    """Bytes; an expanded tensor has those of its storage."""
    found = [x for x in tree_leaves(tensors) if isinstance(x, Tensor)]
    return sum(min(x.numel() * x.element_size(), x.untyped_storage().nbytes()) for x in found)


@contextlib.contextmanager
def on_card(card: str):
    """Count what runs here, with a card's kernels in place of those that the meta device would take."""
    count = Count(card)

    def dense_attention(q, k, v, is_causal=False):
        (S, H, L, D) = q.shape
        T = k.shape[2]
        flops = 4.0 * S * H * L * D * (T - (L - 1) / 2 if is_causal else T)
        return Kernel.apply(count, "attention", flops, q, k, v)

    def window_attention(q, k, v, segments):
        if segments.longest > MOST_TOKENS:
            return batched_attention(q, k, v, segments)
        return Kernel.apply(count, "window attention", 4.0 * segments.longest * q.numel(), q, k, v)

    def float32_matmul(a, b, out=None):
        made = torch.empty(*a.shape[:-1], b.shape[-1], device="meta")
        count.add("float32 product", size_of((a, b, made)), 2.0 * a.shape[-1] * made.numel())
        return made

    def decode_attention(q, k, v, hidden, own_k, own_v, unseen):
        (R, H, D) = q.shape
        (B, K, P, _) = k.shape
        C = own_k.shape[2]
        parts = cut(k, R // B * H // K).parts + cut(own_k, H // K).parts
        between = 2 * 4 * parts * R * H * (D + 1)  # what the parts write and the second kernel reads
        size = size_of((q, q, k, v, own_k, own_v, hidden, unseen)) + between
        count.add("decode attention", size, 4.0 * q.numel() * (P + C), launches=2, rate=FLASH)
        return torch.empty_like(q)

    def rms_norm(self, x):
        return Kernel.apply(count, "rms norm", 0.0, x, self.weight)

    functions = {f.__name__: f for f in (dense_attention, window_attention, float32_matmul, decode_attention)}
    functions |= {"fits": lambda q: q.shape[-1] in WARPS}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(RMSNorm, "forward", rms_norm))
        for name, module in list(sys.modules.items()):
            for known in functions.keys() & vars(module).keys() if name.startswith("minivlmrl") else ():
                if callable(getattr(module, known)):
                    stack.enter_context(mock.patch.object(module, known, functions[known]))
        yield stack.enter_context(count)


def phases(config: ModelConfig, card: str, work: Work, micro: int = 1, recompute=False) -> dict[str, Count]:
    """Count the prefill of one card's prompts, a decode step and its draw, eager and static (what a graph captures);
    a forward of `micro` prompts as the reference scores them, and forward and backward.
    """
    with torch.device("meta"):
        model = Qwen2_5_VL(config).bfloat16()
    lengths = (work.text_tokens, work.image_tokens)
    R = work.prompts * work.num_generations
    prompts = meta_batch(config, Work(work.prompts, 0, *lengths, 0))
    keys = GroupAttention(prompts.layout, keep_keys=True)
    with torch.no_grad(), on_card(card) as prefill:
        model.lm_head(model(prompts, keys, prompts.layout.last_index))
    prompt_index = torch.arange(R) // work.num_generations
    ids = torch.empty(R, device="meta").long()
    given = keys, prompt_index, work.completion_tokens, ids[: work.prompts]
    eager = DecodeAttention(*given)
    static = captured.StaticDecodeAttention(*given)
    eager.advance(growth=work.completion_tokens // 2 + 1)
    counts = []
    for attention in (eager, static):
        with torch.no_grad(), on_card(card) as count:
            logits = generate.Decode()(model, ids, attention)
        counts.append(count)
    step, static = counts
    draw = generate.draw_by(torch.empty(R, 1, device="meta").double(), "meta")
    choose = generate.make_choose(generate.SamplingConfig(), [0], draw, device="meta")
    with torch.no_grad(), on_card(card) as draw:
        choose(logits, ids, ids)
    if recompute:
        recompute_blocks(model)
    batch = meta_batch(config, Work(micro, work.num_generations, *lengths, work.completion_tokens))
    with torch.no_grad(), on_card(card) as scoring:
        per_token_logps(model, batch)
    with on_card(card) as train:
        per_token_logps(model, batch)[0].sum().backward()
    eager = {"decode step, eager": step, "draw": draw}
    return {"prefill": prefill, "decode step": static, **eager, "scoring": scoring, "train": train}


def grpo_step(
    counts: dict[str, Count], config: ModelConfig, cards: int, work: Work, micro: int = 1, host_us=9.0, fsdp=True
) -> dict[str, float]:
    """Seconds of each phase of a step on one of several cards; without FSDP everything is in bfloat16."""
    card = counts["train"].card
    tokens = work.completion_tokens
    times = math.ceil(work.prompts / micro)
    memory, _, link = CARDS[card]
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Qwen2_5_VL(config).parameters())
    gpu = {name: count.total()[3] for name, count in counts.items()}
    host = {name: host_us * 1e-6 * count.total()[0] for name, count in counts.items()}
    hooks, copied, adamw = (HOOKS, COPIED, ADAMW) if fsdp else (0, 0, ADAMW / 2)
    host["decode step, eager"] += hooks * config.num_hidden_layers
    eager = {name: max(gpu[name], host[name]) for name in gpu}
    sent = parameters * SENT / (link * LINK) if cards > 1 else 0.0
    updated = parameters * (copied * times + adamw / cards) / (memory * MEMORY)
    # the first step of a graph is eager, and capturing is as much work for the host
    graph = tokens * (gpu["decode step"] + eager["draw"]) + 2 * host["decode step"]
    seconds = {"prefill": eager["prefill"], "decode": graph}
    seconds["train"] = times * max(eager["train"], sent) + updated
    one_by_one = tokens * (eager["decode step, eager"] + eager["draw"])
    return seconds | {"sum": sum(seconds.values()), "decode, eager": one_by_one}


def main(arguments: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--card", default="h100", choices=CARDS)
    parser.add_argument("--model", default="3b", choices=HUB)
    parser.add_argument("--recompute", action="store_true", help="model.activation_checkpointing")
    numbers = {"cards": 1, "prompts": 8, "generations": 8, "text": 100, "image": 1000, "completion": 256}
    for name, number in (numbers | {"micro": 1, "host-us": 9, "top": 0}).items():
        parser.add_argument(f"--{name}", type=int, default=number)
    o = parser.parse_args(arguments)
    config = config_of(o.model)
    lengths = (o.text, o.image, o.completion)
    work = Work(math.ceil(o.prompts / o.cards), o.generations, *lengths)
    counts = phases(config, o.card, work, o.micro, o.recompute)
    print("| phase | launches | GB | TFLOP | GPU ms | host ms | element-wise |\n" + "|---" * 7 + "|")
    for phase, count in counts.items():
        busiest = sorted(count.ops.items(), key=lambda op: -op[1][3])[: o.top]
        for name, (launches, size, flops, gpu, *rest) in [(phase, count.total()), *busiest]:
            numbers = f"{size / 1e9:.1f} | {flops / 1e12:.2f} | {1e3 * gpu:.1f} | {launches * o.host_us / 1e3:.1f}"
            print(f"| {name} | {launches} | {numbers} | {''.join(f'{x / gpu:.0%}' for x in rest)} |")
    launches = (counts[name].total()[0] / config.num_hidden_layers for name in ("decode step", "decode step, eager"))
    print("\nlaunches a layer of a decode step: {:.1f}, and eager {:.1f}".format(*launches))
    seconds = grpo_step(counts, config, o.cards, work, o.micro, o.host_us)
    print(f"{o.model}, {o.cards} x {o.card}: " + ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items()))


if __name__ == "__main__":
    main()
