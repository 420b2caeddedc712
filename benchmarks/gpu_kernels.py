"""Measure kernels on a GPU, and compare them with the GPU's limits.

python benchmarks/gpu_kernels.py kernels          # each Triton kernel at the sizes of Qwen2.5-VL-3B
python benchmarks/gpu_kernels.py kernels --toy    # tests this script at toy size in float32, even on a CPU

first_gpu_hour.py runs all parts. A kernel's limit is the longer of two times: moving its bytes at the speed of a large
copy, and computing its FLOPs at the speed of a large product, on the same GPU.
"""

import statistics
import time
from collections.abc import Callable
from functools import cache, partial

import torch
from common import CARD, part, report, report_skipped, run_part, synchronize
from torch import Tensor

from minivlmrl.kernels.backend import backend_for
from minivlmrl.kernels.decode_attention import decode_attention, fits
from minivlmrl.kernels.linear_log_softmax import linear_log_softmax
from minivlmrl.kernels.nf4_unpack import BLOCK, GROUP, nf4_unpack
from minivlmrl.kernels.window_attention import Segments, window_attention

CALLS, REPEATS = 20, 5


def milliseconds(call: Callable, in_graph: bool = True) -> float:
    """Return a call's milliseconds: median over REPEATS measurements with CALLS calls.

    Args:
        in_graph: whether to replay calls in a CUDA graph, without kernel launches from Python.
    """
    if CARD.type == "cpu":
        begin = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - begin)
    call()  # compiles kernels, and allocates workspaces
    repeat = partial(repeated, CALLS, call)
    if in_graph:
        repeat = captured(repeat).replay
    times = []
    for _ in range(REPEATS):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        repeat()
        after.record()
        synchronize()
        times.append(before.elapsed_time(after) / CALLS)
    return statistics.median(times)


def repeated(count: int, call: Callable):
    for _ in range(count):
        call()


def captured(call: Callable) -> torch.cuda.CUDAGraph:
    """Capture a call as a CUDA graph."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(CARD)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # allocates workspaces for this stream
        graph.capture_begin()
        call()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


@cache
def card_speeds() -> tuple[float, float]:
    """Return bytes per second of a large copy, reads and writes together, and FLOP/s of a large product."""
    if CARD.type == "cpu":
        return 1e10, 1e11
    size, width = 2**28, 8192
    source = torch.empty(size, dtype=torch.float64, device=CARD)
    target = torch.empty_like(source)
    moved = 2 * source.nbytes / (milliseconds(lambda: target.copy_(source)) / 1e3)
    a = torch.randn(width, width, device=CARD).bfloat16()
    computed = 2 * width**3 / (milliseconds(lambda: a @ a) / 1e3)
    report("copy", moved / 1e12, "TB/s")
    report(f"product of {width} x {width}", computed / 1e12, "TFLOP/s")
    return moved, computed


def report_kernel(name: str, call: Callable, moved: float, flops: float, in_graph: bool = True):
    """Report a kernel's time, and its limit on this GPU as a share of that time.

    Args:
        moved: bytes to read and write.
    """
    bandwidth, speed = card_speeds()
    spent = milliseconds(call, in_graph)
    report(name, spent, "ms")
    report(f"{name}: limit / time", 1e3 * max(moved / bandwidth, flops / speed) / spent, "")


@part
def kernels(toy: bool):
    """Measure all Triton kernels at the sizes of a 3B model."""
    dtype = torch.float32 if toy else torch.bfloat16
    measure_windows(toy, dtype)
    measure_decoding(toy, dtype)
    measure_log_probabilities(toy, dtype)
    measure_nf4(toy, dtype)


def normal(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, device=CARD).to(dtype)


def measure_windows(toy: bool, dtype: torch.dtype):
    # windows with 64 patches, or fewer at the right and lower edges
    photograph = 7 * (8 * [64] + [48]) + 8 * [16] + [12]
    cases = {"512 windows of 64": (2 if toy else 512) * [64], "8 photographs": (1 if toy else 8) * photograph}
    for name, lengths in cases.items():
        for head_dim in (80,) if toy else (72, 80, 128):
            heads, tokens = 2 if toy else 16, sum(lengths)
            q, k, v = (normal(dtype, tokens, heads, head_dim).requires_grad_() for _ in range(3))
            segments = Segments(lengths, CARD)
            size = tokens * heads * head_dim * dtype.itemsize
            flops = 4 * heads * head_dim * sum(n * n for n in lengths)
            label = f"{name}, heads of {head_dim}"
            with torch.no_grad():
                forward = partial(window_attention, q, k, v, segments)
                report_kernel(f"window forward, {label}", forward, 4 * size, flops)
            out = window_attention(q, k, v, segments)
            backward = partial(torch.autograd.grad, out, (q, k, v), torch.randn_like(out), retain_graph=True)
            report_kernel(f"window backward, {label}", backward, 8 * size, 2.5 * flops, in_graph=False)


def measure_decoding(toy: bool, dtype: torch.dtype):
    """Measure decode attention with B prompts of P tokens, and G completions per prompt with C own tokens each."""
    models = ((2, 8, 128),) if toy else ((2, 8, 128), (4, 7, 128), (2, 4, 256))
    sizes = ((1, 2, 40, 8),) if toy else ((1, 1, 1100, 256), (1, 8, 1100, 256), (8, 8, 1100, 256), (16, 8, 712, 256))
    for K, heads, D in models:
        for B, G, P, C in sizes:
            R = B * G
            name = f"decode attention, {K * heads}/{K} heads of {D}, {B} x {G} rows, {P} + {C} keys"
            q = normal(dtype, R, K * heads, D)
            keys, values = normal(dtype, B, K, P, D), normal(dtype, B, K, P, D)
            own_keys, own_values = normal(dtype, R, K, C, D), normal(dtype, R, K, C, D)
            masks = keys.new_zeros(B, P), keys.new_zeros(R, C)
            if not fits(q):
                report_skipped(name, "no Triton on this device")
                continue
            moved = 2 * (keys.nbytes + own_keys.nbytes + q.nbytes)
            decode = partial(decode_attention, q, keys, values, masks[0], own_keys, own_values, masks[1])
            report_kernel(name, decode, moved, 4 * R * K * heads * D * (P + C))


def measure_log_probabilities(toy: bool, dtype: torch.dtype):
    vocab, width = (300, 16) if toy else (151936, 2048)
    for tokens in (8,) if toy else (2048, 8192):
        hidden = normal(dtype, tokens, width).requires_grad_()
        weight = (3 * width**-0.5 * normal(dtype, vocab, width)).requires_grad_()
        ids = torch.randint(vocab, (tokens,), device=CARD)
        before = torch.cuda.memory_allocated() if CARD.type == "cuda" else 0

        def compute(hidden=hidden, weight=weight, ids=ids):
            return torch.autograd.grad(linear_log_softmax(hidden, weight, ids)[0].mean(), (hidden, weight))

        name = f"log-probabilities and gradients, {tokens} tokens"
        report_kernel(name, compute, 8 * tokens * vocab, 8 * tokens * vocab * width, in_graph=False)
        if CARD.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            compute()
            report(f"{name}: memory", (torch.cuda.max_memory_allocated() - before) / 1e9, "GB")


def measure_nf4(toy: bool, dtype: torch.dtype):
    size = 2**16 if toy else 2048 * 11008
    name = f"NF4 unpack of {size:,} weights"
    packed = torch.randint(256, (size // 2,), device=CARD).to(torch.uint8)
    indices = torch.randint(256, (size // BLOCK,), device=CARD).to(torch.uint8)
    scales = torch.rand(size // BLOCK // GROUP + 1, device=CARD)
    offset = torch.tensor(0.5, device=CARD)
    tables = torch.randn(256, device=CARD), torch.randn(16, device=CARD)
    if backend_for(scales, "nf4_unpack") == "torch":
        report_skipped(name, "no Triton on this device")
        return
    moved = packed.nbytes + indices.nbytes + size * dtype.itemsize
    report_kernel(name, lambda: nf4_unpack(packed, indices, scales, offset, tables, dtype), moved, size)


if __name__ == "__main__":
    run_part(__doc__, globals())
