"""What one GRPO step would cost on a card, from shapes alone: neither a GPU nor weights are needed.

python benchmarks/roofline.py --model 3b --card h100 --cards 8 --top 5

The real code runs on the meta device. Every operation is counted and put on the ceilings of a card:
    GPU seconds of an operation    max(bytes / bandwidth, FLOPs / peak, 2 us)
    host seconds                   launches x 9 us, what PyTorch's eager mode spends on one
    seconds of a phase             the larger of the two sums; of decoding the first alone: a step is one CUDA graph

Kernels that a card has and the meta device lacks are replaced by their cost. docs/gpu.md says what is left out.
"""

import argparse
import contextlib
import math
import sys
from typing import NamedTuple
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

FREE = {"detach", "alias", "empty", "empty_like", "new_empty", "new_empty_strided", "_unsafe_view", "promote_types"}
READ_WHAT_THEY_GIVE = {"embedding", "index", "gather", "index_select"}
WRITE_WHAT_THEY_GET = {"index_copy_", "index_put_", "scatter_"}  # their last argument
HOST = 9e-6  # seconds of a launch
REPLACED = {"dense_attention", "window_attention", "float32_matmul", "decode_attention", "fits"}  # see CardKernels
SORTED = {"index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_"}


class Cost(NamedTuple):
    """What operations take together."""

    launches: int = 0
    size: float = 0.0  # bytes
    flops: float = 0.0
    seconds: float = 0.0  # of the GPU

    def plus(self, other: "Cost") -> "Cost":
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))


class Count(TorchDispatchMode):
    """The cost of the operations in this context, by name."""

    def __init__(self, card: str):
        super().__init__()
        self.card = card
        self.ops = {}

    def add(self, name: str, size: float, flops: float = 0.0, launches: int = 1, rate=1.0, walked=0.0):
        """rate: of the speed of products; walked: seconds in which one block walks through all."""
        memory, peak, _ = CARDS[self.card]
        seconds = max(size / (memory * MEMORY), flops / (peak * PRODUCTS * rate), launches * FLOOR, walked)
        self.ops[name] = self.ops.get(name, Cost()).plus(Cost(launches, size, flops, seconds))

    def total(self) -> Cost:
        total = Cost()
        for cost in self.ops.values():
            total = total.plus(cost)
        return total

    def element_wise_seconds(self) -> float:
        """Of norms, rotary, activations, copies."""
        return sum(cost.seconds for cost in self.ops.values() if not cost.flops)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if name.startswith("linear_log_softmax"):
            tensors = args[0] if isinstance(args[0], list) else args
            self.count_head(name, tensors[0], tensors[1])
        elif not is_view and name not in FREE:
            packet = getattr(torch.ops.aten, name.rstrip("_"), None)  # in place the FLOPs are the same
            flops = flop_registry[packet](*args, **kwargs, out_val=out) if packet in flop_registry else 0.0
            size = size_of((args, kwargs, out))
            if name in READ_WHAT_THEY_GIVE:
                size = 2 * size_of(out)
            if name in WRITE_WHAT_THEY_GET:
                size = 2 * size_of(args[-1])
            walked = 0.0
            if name == "embedding_dense_backward":
                walked = WALKED[name] * args[1].numel()
            if name == "cumsum":
                walked = WALKED[name] * out.shape[-1]
            self.add(name, size, flops, SORT if name in SORTED else 1, walked=walked)
        return out

    def count_head(self, name: str, hidden: Tensor, weight: Tensor):
        """By tiles, whose logits stay in the L2 cache; the backward computes them again."""
        (M, D) = hidden.shape
        V = len(weight)
        tiles = math.ceil(V / (TILE // 2)) * math.ceil(M / TILE)
        products = 3 if name.endswith("backward") else 1
        size = products * tiles * D * (min(M, TILE) + TILE // 2) * hidden.element_size()
        if name.endswith("backward"):
            size += 10 * V * D  # dW
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


class CardKernels:
    """In place of functions that compute otherwise on the meta device: their costs on a card."""

    def __init__(self, count: Count):
        self.count = count

    def dense_attention(self, q, k, v, is_causal=False):
        (S, H, L, D) = q.shape
        T = k.shape[2]
        seen = T - (L - 1) / 2 if is_causal else T  # keys of a query
        return Kernel.apply(self.count, "attention", 4.0 * S * H * L * D * seen, q, k, v)

    def window_attention(self, q, k, v, segments):
        if segments.longest > MOST_TOKENS:
            return batched_attention(q, k, v, segments)
        return Kernel.apply(self.count, "window attention", 4.0 * segments.longest * q.numel(), q, k, v)

    def float32_matmul(self, a, b, out=None):
        result = torch.empty(*a.shape[:-1], b.shape[-1], device="meta")
        self.count.add("float32 product", size_of((a, b, result)), 2.0 * a.shape[-1] * result.numel())
        return result

    def fits(self, q):
        return q.shape[-1] in WARPS

    def decode_attention(self, q, k, v, hidden, own_k, own_v, unseen):
        (R, H, D) = q.shape
        (B, K, P, _) = k.shape
        C = own_k.shape[2]
        parts = cut(k, R // B * H // K).parts + cut(own_k, H // K).parts
        between = 2 * 4 * parts * R * H * (D + 1)  # what the parts write and the second kernel reads
        size = size_of((q, q, k, v, own_k, own_v, hidden, unseen)) + between
        self.count.add("decode attention", size, 4.0 * q.numel() * (P + C), launches=2, rate=FLASH)
        return torch.empty_like(q)


@contextlib.contextmanager
def on_card(card: str):
    """Count what runs here, with a card's kernels in place of those that the meta device would take."""
    count = Count(card)
    kernels = CardKernels(count)

    def rms_norm(self, x):
        return Kernel.apply(count, "rms norm", 0.0, x, self.weight)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(RMSNorm, "forward", rms_norm))
        for name, module in list(sys.modules.items()):
            if not name.startswith("minivlmrl"):
                continue
            for function in REPLACED & vars(module).keys():
                if callable(getattr(module, function)):  # not the file of that name
                    stack.enter_context(mock.patch.object(module, function, getattr(kernels, function)))
        yield stack.enter_context(count)


def phases(config: ModelConfig, card: str, work: Work) -> dict[str, Count]:
    """Count the prefill of one card's prompts, a decode step (as a graph captures it, and eager) and its draw; a
    forward of one prompt as the reference scores it, and forward and backward.
    """
    with torch.device("meta"):
        model = Qwen2_5_VL(config).bfloat16()
    lengths = (work.text_tokens, work.image_tokens)
    counts = {}
    prompts = meta_batch(config, Work(work.prompts, 0, *lengths, 0))
    keys = GroupAttention(prompts.layout, keep_keys=True)
    with torch.no_grad(), on_card(card) as counts["prefill"]:
        model.lm_head(model(prompts, keys, prompts.layout.last_index))

    rows = work.prompts * work.num_generations
    prompt_index = torch.arange(rows) // work.num_generations
    ids = torch.empty(rows, device="meta").long()
    given = (keys, prompt_index, work.completion_tokens, ids[: work.prompts])
    eager = DecodeAttention(*given)
    static = captured.StaticDecodeAttention(*given)
    eager.advance(growth=work.completion_tokens // 2 + 1)
    for name, attention in (("decode step", static), ("decode step, eager", eager)):
        with torch.no_grad(), on_card(card) as counts[name]:
            logits = generate.Decode()(model, ids, attention)
    draw = generate.draw_by(torch.empty(rows, 1, device="meta").double(), "meta")
    choose = generate.make_choose(generate.SamplingConfig(), [0], draw, device="meta")
    with torch.no_grad(), on_card(card) as counts["draw"]:
        choose(logits, ids, ids)

    batch = meta_batch(config, Work(1, work.num_generations, *lengths, work.completion_tokens))
    with torch.no_grad(), on_card(card) as counts["scoring"]:
        per_token_logps(model, batch)
    with on_card(card) as counts["train"]:
        per_token_logps(model, batch)[0].sum().backward()
    return counts


def grpo_step(
    counts: dict[str, Count], config: ModelConfig, cards: int, work: Work, fsdp: bool = True
) -> dict[str, float]:
    """Seconds of each phase of a step on one of several cards; without FSDP everything is in bfloat16."""
    memory, _, link = CARDS[counts["train"].card]
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Qwen2_5_VL(config).parameters())
    gpu = {name: count.total().seconds for name, count in counts.items()}
    host = {name: HOST * count.total().launches for name, count in counts.items()}
    copied = 0
    adamw = ADAMW / 2
    if fsdp:
        copied = COPIED
        adamw = ADAMW
        host["decode step, eager"] += HOOKS * config.num_hidden_layers
    eager = {name: max(gpu[name], host[name]) for name in gpu}
    sent = parameters * SENT / (link * LINK) if cards > 1 else 0.0
    updated = parameters * (copied * work.prompts + adamw / cards) / (memory * MEMORY)
    tokens = work.completion_tokens
    # the first step of a graph is eager, and capturing is as much work for the host
    graph = tokens * (gpu["decode step"] + eager["draw"]) + 2 * host["decode step"]
    train = work.prompts * max(eager["train"], sent) + updated
    return {
        "prefill": eager["prefill"],
        "decode": graph,
        "train": train,
        "sum": eager["prefill"] + graph + train,
        "decode, eager": tokens * (eager["decode step, eager"] + eager["draw"]),
    }


def show(name: str, cost: Cost, element_wise: str = ""):
    numbers = f"{cost.size / 1e9:.1f} | {cost.flops / 1e12:.2f} | {1e3 * cost.seconds:.1f}"
    print(f"| {name} | {cost.launches} | {numbers} | {1e3 * HOST * cost.launches:.1f} | {element_wise} |")


def main(arguments: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--card", default="h100", choices=CARDS)
    parser.add_argument("--model", default="3b", choices=HUB)
    parser.add_argument("--cards", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--text", type=int, default=100, help="tokens of a prompt")
    parser.add_argument("--image", type=int, default=1000, help="tokens of a prompt")
    parser.add_argument("--completion", type=int, default=256, help="tokens")
    parser.add_argument("--top", type=int, default=0, help="show so many operations of each phase")
    o = parser.parse_args(arguments)
    config = config_of(o.model)
    work = Work(math.ceil(o.prompts / o.cards), o.generations, o.text, o.image, o.completion)
    counts = phases(config, o.card, work)
    print("| phase | launches | GB | TFLOP | GPU ms | host ms | element-wise |\n" + "|---" * 7 + "|")
    for phase, count in counts.items():
        total = count.total()
        show(phase, total, f"{count.element_wise_seconds() / total.seconds:.0%}")
        by_seconds = sorted(count.ops.items(), key=lambda op: -op[1].seconds)
        for name, cost in by_seconds[: o.top]:
            show(name, cost)
    captured_step, eager_step = (
        counts[name].total().launches / config.num_hidden_layers for name in ("decode step", "decode step, eager")
    )
    print(f"\nlaunches a layer of a decode step: {captured_step:.1f}, and eager {eager_step:.1f}")
    seconds = grpo_step(counts, config, o.cards, work)
    print(f"{o.model}, {o.cards} x {o.card}: " + ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items()))


if __name__ == "__main__":
    main()
