"""Time our kernels on a GPU beside kernels from PyTorch and Liger. first_gpu_hour.py runs all parts.

python benchmarks/gpu_kernels.py attention         # windows, and attention in a decode step
python benchmarks/gpu_kernels.py logits            # log-probabilities from hidden states
python benchmarks/gpu_kernels.py products          # the GPU's ceilings, products with odd widths, and adapters
python benchmarks/gpu_kernels.py logits --toy      # tests the part: toy size, also on a CPU

Inputs are random, in bfloat16, and a number is the median over many calls. Except for `logits`, whose kernels take many
milliseconds, the calls are replayed inside a CUDA graph (triton.testing.do_bench_cudagraph), so that launches from
Python do not count. `python -m minivlmrl.kernels.self_test` checks the results.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
from common import CARD, part, peak_gib, report, report_skipped, run_part, seconds_of
from torch import Tensor
from torch.nn.functional import linear

from minivlmrl.generation.cuda_graphs import StaticDecodeAttention
from minivlmrl.kernels.backend import triton
from minivlmrl.kernels.linear_log_softmax import linear_log_softmax
from minivlmrl.kernels.window_attention import Segments, batched_attention, window_attention
from minivlmrl.model.attention import DecodeAttention, GroupAttention, GroupLayout

# a photograph of 58 x 70 patches: windows with 8 x 8 patches, and at the edges with 8 x 6, 2 x 8 and 2 x 6
PHOTOGRAPH = 7 * (8 * [64] + [48]) + 8 * [16] + [12]
HEADS, HEAD_DIM = 16, 80  # Qwen2.5-VL's tower


def milliseconds(call: Callable, in_graph: bool = True) -> float:
    """Return a call's median time in milliseconds. On a CPU, call it once.

    Args:
        in_graph: False for a call that a graph cannot capture, or whose memory a graph should not keep.
    """
    if CARD.type == "cpu":
        return 1e3 * seconds_of(call)
    if in_graph:
        return triton.testing.do_bench_cudagraph(call, return_mode="median")
    return triton.testing.do_bench(call, return_mode="median")


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=CARD).to(torch.bfloat16)


# ---- attention -----------------------------------------------------------------------------------------------------


@part
def attention(toy: bool):
    """Time attention inside windows and in a decode step."""
    for label, lengths in {"512 windows of 64": 512 * [64], "8 photographs": 8 * PHOTOGRAPH}.items():
        time_windows(label, [64, 20, 64] if toy else lengths)
    for prompts, generations in [(2, 3)] if toy else [(1, 1), (1, 8), (8, 8), (64, 8)]:
        time_decode_attention(prompts, generations, *((50, 8, 5, 4, 2, 16) if toy else (1100, 256, 200, 16, 2, 128)))


def time_windows(label: str, lengths: list[int]):
    """Time ways to compute attention within segments with these lengths, forward and with gradients."""
    tokens = sum(lengths)
    # q and k are contiguous, as after the rotary embedding; v is a slice of the projection
    q, k, grad = (normal(tokens, HEADS, HEAD_DIM) for _ in range(3))
    v = normal(tokens, 3, HEADS, HEAD_DIM)[:, 2]
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    segments = Segments(lengths, CARD)
    ways = {
        "ours": lambda *x: window_attention(*x, segments),
        "torch, by length": lambda *x: batched_attention(*x, segments),
        "torch, varlen_attn": lambda *x: varlen(*x, segments.cu_seqlens, max(lengths)),
    }
    for way, function in ways.items():
        if way == "torch, varlen_attn" and CARD.type == "cpu":
            report_skipped(f"{label}, {way}", "varlen_attn needs a GPU")
            continue
        with torch.no_grad():
            report(f"{label}, {way}: forward", milliseconds(partial(function, *inputs)), "ms")
        report(f"{label}, {way}: with gradients", milliseconds(partial(gradients, function, inputs, grad)), "ms")


def varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest)


def gradients(function: Callable, inputs: list[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(function(*inputs), inputs, grad)


@torch.no_grad()
def time_decode_attention(prompts: int, generations: int, P: int, C: int, done: int, H: int, K: int, D: int):
    """Time one layer's attention in a decode step, including writing the new keys.

    Args:
        P, C: prompt length, and maximum completion length, in tokens.
        done: number of tokens that each completion already has.
        H, K, D: number of query heads, number of key heads, and their dimension.
    """
    R = prompts * generations
    prefill = GroupAttention(GroupLayout([P] * prompts, [[]] * prompts, CARD), keep_keys=True)
    q, new_k, new_v = (normal(R, heads, D) for heads in (H, K, K))
    prefill.keys.append([normal(prompts * P, K, D) for _ in range(2)])
    start = torch.zeros(prompts, dtype=torch.long, device=CARD)
    static = StaticDecodeAttention(prefill, torch.arange(prompts).repeat_interleave(generations), C, start)
    static.advance(done + 1, growth=done + 1)
    for x in static.row_kv[0]:
        x[:, :, :done].normal_()
    for way, kind in {"ours": StaticDecodeAttention, "torch": DecodeAttention}.items():
        name = f"decode step, {prompts} x {generations} rows, {P} + {done + 1} keys, {way}"
        report(name, milliseconds(lambda kind=kind: kind.__call__(static, 0, q, new_k, new_v)), "ms")


# ---- logits --------------------------------------------------------------------------------------------------------


@part
def logits(toy: bool):
    """Time log-probabilities from hidden states with their gradients, and measure their memory."""
    vocab, width, tokens = (700, 32, 8) if toy else (151936, 2048, 256)
    for rows in (16,) if toy else (2048, 8192):
        hidden = normal(rows, width).requires_grad_()
        weight = (3 * width**-0.5 * normal(vocab, width)).requires_grad_()
        ids = torch.randint(vocab, (rows,), device=CARD)
        advantages = torch.randn(rows // tokens, device=CARD)

        def loss(logps, advantages=advantages):
            return -(logps.view(-1, tokens) * advantages[:, None]).mean()

        ways = {"ours": lambda h, w, ids=ids: loss(linear_log_softmax(h, w, ids)[0]),
                "torch, bfloat16 logits": lambda h, w, ids=ids: loss(log_softmax(h, w, ids))}  # fmt: skip
        if find_spec("liger_kernel"):
            ways["Liger"] = partial(liger_loss, ids=ids.view(-1, tokens), advantages=advantages)
        else:
            report_skipped(f"{rows} rows, Liger", "liger_kernel is not installed")
        for way, function in ways.items():
            call = partial(gradients, function, [hidden, weight], None)
            report(f"{rows} rows, {way}", milliseconds(call, in_graph=False), "ms")
            report(f"{rows} rows, {way}: memory", peak_gib(call), "GiB")


def log_softmax(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return (hidden @ weight.T).float().log_softmax(-1).gather(-1, ids[:, None])[:, 0]


def liger_loss(hidden: Tensor, weight: Tensor, ids: Tensor, advantages: Tensor) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="grpo", compiled=False)
    mask = torch.ones(ids.shape, device=CARD)
    return loss(hidden.view(*ids.shape, -1), weight, ids, mask, advantages)[0]


# ---- products ------------------------------------------------------------------------------------------------------


@part
def products(toy: bool):
    """Measure the GPU's ceilings, the vision tower's MLP products by width, and the adapters' products by dtype."""
    side = 64 if toy else 8192
    source = normal(2**16 if toy else 2**30)
    report(
        "copy of 2 GiB", 2e-9 * source.nbytes / milliseconds(partial(torch.empty_like(source).copy_, source)), "TB/s"
    )
    a, b = normal(side, side), normal(side, side)
    report(f"product of {side}^3", 2e-9 * side**3 / milliseconds(lambda: a @ b), "TFLOP/s")
    patches, width = (64, 16) if toy else (32768, 1280)
    for columns in (20, 24) if toy else (3420, 3424, 3456):
        time_tower_mlp(patches, width, columns)
    for rows in (4,) if toy else (48, 128, 3072):
        time_adapter(rows, *((16, 32, 4) if toy else (2048, 11008, 64)))


def time_tower_mlp(patches: int, width: int, columns: int):
    """Time the six products in an up and a down projection; 3,420 columns are no multiple of 16 bytes."""
    x, g = normal(patches, width), normal(patches, columns)
    up, down = normal(columns, width), normal(width, columns)
    calls = (lambda: linear(x, up), lambda: linear(g, down), lambda: g @ up, lambda: x @ down, lambda: g.T @ x,
             lambda: x.T @ g)  # fmt: skip
    spent = sum(map(milliseconds, calls))
    report(f"MLP of the tower with {columns} columns", 12e-9 * patches * width * columns / spent, "TFLOP/s")


def time_adapter(rows: int, width: int, in_features: int, r: int):
    """Time an adapter's two products in float32, TF32 and bfloat16."""
    for kind in ("float32", "TF32", "bfloat16"):
        dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
        shapes = (rows, in_features), (r, in_features), (width, r), (rows, width)
        x, A, B, out = (normal(*shape).to(dtype) for shape in shapes)
        torch.backends.cuda.matmul.allow_tf32 = kind == "TF32"
        spent = milliseconds(lambda x=x, A=A, B=B, out=out: torch.addmm(out, linear(x, A), B.T))
        report(f"adapter, {rows} rows, {kind}", spent, "ms")
    torch.backends.cuda.matmul.allow_tf32 = False


if __name__ == "__main__":
    run_part(__doc__, globals())
