"""Test and time the kernels on one NVIDIA GPU, in comparison with plain PyTorch.

python benchmarks/gpu_kernels.py --json FILE     # tables and numbers, under eight minutes
python benchmarks/gpu_kernels.py --toy           # test of the script: everything once at toy size, also on a CPU

The script prints the GPU and versions. Then it measures two ceilings of the GPU: bytes per second of a large copy, and
operations per second of a bfloat16 product of 8192^3 random numbers. Then it runs every implementation on the same
random bfloat16 inputs of several sizes. Before timing, results are compared with plain PyTorch in float32 (for decoding
with the torch path), while uninitialised memory is filled with NaN. An implementation with wrong results is not timed.
Times are medians of triton.testing.do_bench (50 ms of warm-up, 300 ms of repetitions). `share` is the time that the
ceilings allow for the necessary bytes and operations, divided by the median. Peak memory is the memory of one call
without inputs.
"""

import contextlib
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from gpu_step import CARD, about, peak_gib, read_options, seconds_of, write_numbers
from torch import Tensor

from minivlmrl.generation.cuda_graphs import StaticDecodeAttention
from minivlmrl.kernels.backend import triton
from minivlmrl.kernels.linear_log_softmax import linear_log_softmax
from minivlmrl.kernels.window_attention import Segments, batched_attention, window_attention
from minivlmrl.model.attention import DecodeAttention, GroupAttention, GroupLayout

TEMPERATURE = 0.9
CHUNK = 1024  # number of rows whose float32 logits fit into memory
Call = Callable[[], list[Tensor]]


@dataclass
class Run:
    """Settings and results of all tables.

    Args:
        toy: use sizes that a CPU runs in seconds, and run each implementation once.
        deadline: time.monotonic() after which implementations are skipped.
        bytes_per_second, operations_per_second: measured ceilings of the GPU.
        rows: results so far.
    """

    toy: bool
    deadline: float
    bytes_per_second: float
    operations_per_second: float
    rows: list[dict] = field(default_factory=list)

    def allowed_ms(self, size: float, operations: float) -> float:
        """Return the time in milliseconds that memory traffic and operations take at the measured ceilings."""
        return 1e3 * max(size / self.bytes_per_second, operations / self.operations_per_second)

    def table(self, title: str, ways: dict[str, Call], expected: list[Tensor], tolerance: float, allowed_ms: float):
        """Check and time all implementations (`ways`) on one set of inputs, and print a line for each."""
        print(f"\n{title}; allowed {allowed_ms:.2f} ms")
        print(f"{'':32} {'error':>8} {'ms':>9} {'share':>6} {'peak GiB':>9}")
        for way, call in ways.items():
            row = {"table": title, "way": way, "allowed_ms": allowed_ms}
            row |= self.measure(call, expected, tolerance)
            self.rows.append(row)
            show(row)

    def measure(self, call: Call, expected: list[Tensor], tolerance: float) -> dict:
        """Compare a call with the expected results, then measure its time and peak memory."""
        if time.monotonic() > self.deadline:
            return {"skipped": "no time left"}
        try:
            with nan_in_new_memory():
                difference = farthest(call(), expected)
            if not difference <= tolerance:
                return {"error": difference, "skipped": f"wrong: more than {tolerance}"}
            peak = peak_gib(call)
            median = milliseconds(call, self.toy)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return {"skipped": "out of memory"}
        except Exception as exception:  # continue with the next implementation
            return {"skipped": f"{type(exception).__name__}: {exception}".splitlines()[0][:100]}
        return {"error": difference, "ms": median, "peak_gib": peak}


def show(row: dict):
    error = f"{row['error']:8.1e}" if "error" in row else 8 * " "
    if "skipped" in row:
        print(f"{row['way']:32} {error} {row['skipped']}", flush=True)
        return
    share = row["allowed_ms"] / row["ms"]
    print(f"{row['way']:32} {error} {row['ms']:9.3f} {share:6.2f} {row['peak_gib']:9.3f}", flush=True)


def main():
    options = read_options(__doc__, "--minutes", 8.0, "start nothing new after so long")
    begin = time.monotonic()
    print(json.dumps(about()))
    run = Run(options.toy, begin + 60 * options.minutes, *measure_ceilings(options.toy))
    copied = run.bytes_per_second / 1e12
    print(f"ceilings: {copied:.2f} TB/s copied, {run.operations_per_second / 1e12:.0f} TFLOP/s in bfloat16")
    states_table(run)
    windows_table(run)
    decode_table(run)
    print(f"\n{time.monotonic() - begin:.0f} s")
    write_numbers(options.json, vars(run))


# ------------------------------------------------------------------------------------------------ hidden states


def states_table(run: Run):
    """Measure linear_log_softmax: log-probabilities from hidden states, and their gradients."""
    sizes = [(8192, 151936, 2048), (2048, 151936, 2048), (32768, 151936, 2048), (8192, 152064, 3584)]
    for rows, vocab, width in [(50, 700, 32)] if run.toy else sizes:
        torch.manual_seed(rows)
        hidden = torch.randn(rows, width, device=CARD, dtype=torch.bfloat16).requires_grad_()
        weight = (3 * width**-0.5 * torch.randn(vocab, width, device=CARD)).bfloat16().requires_grad_()
        ids = torch.randint(0, vocab, (rows,), device=CARD)
        advantages = torch.randn(rows, device=CARD)
        inputs = (hidden, weight, ids, advantages)
        ways = {
            "ours": partial(states_step, ours_of_states, *inputs),
            "torch, float32": partial(states_step, naive_states, *inputs),
        }
        allowed = run.allowed_ms(0, 6 * rows * vocab * width)
        run.table(f"states {rows} x {width}, head {vocab}", ways, expected_states(*inputs), 0.05, allowed)


def states_step(function: Callable, hidden: Tensor, weight: Tensor, ids: Tensor, advantages: Tensor) -> list[Tensor]:
    """Compute log-probabilities, and the gradients of hidden states and head."""
    logps = function(hidden, weight, ids)
    return [logps.detach(), *torch.autograd.grad(logps, (hidden, weight), advantages.to(logps.dtype))]


def ours_of_states(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return linear_log_softmax(hidden, weight, ids, TEMPERATURE)[0]


def naive_states(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    log_p = ((hidden @ weight.T).float() / TEMPERATURE).log_softmax(-1)
    return log_p.gather(-1, ids[:, None])[:, 0]


def expected_states(hidden: Tensor, weight: Tensor, ids: Tensor, advantages: Tensor) -> list[Tensor]:
    """Compute the results of states_step in float32 with plain PyTorch, some rows at a time."""
    wide_weight = weight.detach().float().requires_grad_()
    logps = []
    grad_hidden = []
    grad_weight = 0
    for rows in torch.arange(len(ids), device=CARD).split(CHUNK):
        wide_hidden = hidden[rows].detach().float().requires_grad_()
        found = states_step(naive_states, wide_hidden, wide_weight, ids[rows], advantages[rows])
        logps.append(found[0])
        grad_hidden.append(found[1])
        grad_weight = grad_weight + found[2]
    return [torch.cat(logps), torch.cat(grad_hidden), grad_weight]


# ------------------------------------------------------------------------------------------------ windows


HEADS, HEAD_DIM = 16, 80  # Qwen2.5-VL's vision tower


def windows_table(run: Run):
    """Measure window_attention, forward and backward, for 512 full windows and eight photographs (58 x 70 patches)."""
    # windows of 8 x 8 patches; at the edges 8 x 6, 2 x 8 and 2 x 6
    photograph = 7 * (8 * [64] + [48]) + 8 * [16] + [12]
    for lengths in [[64, 20, 64]] if run.toy else [512 * [64], 8 * photograph]:
        tokens = sum(lengths)
        torch.manual_seed(tokens)
        # q and k are contiguous as after the rotary embedding; v is a slice of the projection
        q, k, grad = (torch.randn(tokens, HEADS, HEAD_DIM, device=CARD, dtype=torch.bfloat16) for _ in range(3))
        v = torch.randn(tokens, 3, HEADS, HEAD_DIM, device=CARD, dtype=torch.bfloat16)[:, 2]
        inputs = [x.requires_grad_() for x in (q, k, v)]
        segments = Segments(lengths, CARD)
        ways = {
            "ours": partial(windows_step, window_attention, inputs, segments, grad),
            "ours, torch path": partial(windows_step, batched_attention, inputs, segments, grad),
        }
        wide = [x.detach().float().requires_grad_() for x in inputs]
        expected = windows_step(batched_attention, wide, segments, grad.float())
        size = q.numel() * q.element_size()
        products = 2 * sum(n * n for n in lengths) * HEADS * HEAD_DIM
        allowed = run.allowed_ms(11 * size, 7 * products)
        run.table(f"windows {len(lengths)}, {tokens} patches", ways, expected, 0.02, allowed)


def windows_step(function: Callable, inputs: list[Tensor], segments: Segments, grad: Tensor) -> list[Tensor]:
    """Compute function(q, k, v, segments), (T, H, D), and the gradients of q, k and v."""
    out = function(*inputs, segments)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


# ------------------------------------------------------------------------------------------------ decoding


def decode_table(run: Run):
    """Measure attention of one layer in a decode step of the 3B model, including writing the new keys.

    Prompts have 1,100 tokens, and rows have 200 of 256 tokens.
    """
    sizes = (50, 8, 5, 4, 2, 16) if run.toy else (1100, 256, 200, 16, 2, 128)
    (P, _, done, _, K, D) = sizes
    for prompts, rows_of_each in [(2, 3)] if run.toy else [(1, 1), (1, 8), (8, 8), (64, 8)]:
        R = prompts * rows_of_each
        torch.manual_seed(R)
        static, q, new_keys = decode_case(prompts, rows_of_each, *sizes)
        ways = {
            "ours": partial(decode_step, StaticDecodeAttention.__call__, static, q, new_keys),
            "ours, torch path": partial(decode_step, DecodeAttention.__call__, static, q, new_keys),
        }

        numbers = 2 * K * D * (prompts * P + R * (done + 1)) + 2 * q.numel()
        title = f"decode {prompts} x {rows_of_each} rows, {P} + {done + 1} keys"
        run.table(title, ways, ways["ours, torch path"](), 0.02, run.allowed_ms(q.element_size() * numbers, 0))


def decode_case(prompts: int, rows_of_each: int, P: int, C: int, done: int, H: int, K: int, D: int):
    """Create decoding attention for rows that have `done` of C tokens, and q and (k, v) of the next token."""
    R = prompts * rows_of_each
    prefill = GroupAttention(GroupLayout([P] * prompts, [[]] * prompts, CARD), keep_keys=True)
    q, new_k, new_v = (torch.randn(R, heads, D, device=CARD, dtype=torch.bfloat16) for heads in (H, K, K))
    prefill.keys.append([q.new_empty(prompts * P, K, D).normal_() for _ in range(2)])
    start = torch.zeros(prompts, dtype=torch.long, device=CARD)
    static = StaticDecodeAttention(prefill, torch.arange(prompts).repeat_interleave(rows_of_each), C, start)
    static.advance(done + 1, growth=done + 1)
    for x in static.row_kv[0]:
        x[:, :, :done].normal_()
    return static, q, (new_k, new_v)


@torch.no_grad()
def decode_step(call: Callable, static: StaticDecodeAttention, q: Tensor, new_keys: tuple) -> list[Tensor]:
    return [call(static, 0, q, *new_keys)]


# ------------------------------------------------------------------------------------------------ shared


def farthest(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference of a tensor relative to its norm; NaN if a result has NaN."""
    differences = [(a.float() - b).norm() / b.norm() for a, b in zip(found, expected, strict=True)]
    return torch.stack(differences).max().item()


@contextlib.contextmanager
def nan_in_new_memory():
    """Fill uninitialised memory with NaN, so that values which a kernel fails to write are found.

    This uses torch.utils.deterministic.fill_uninitialized_memory.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # operations without a deterministic implementation warn
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def milliseconds(call: Callable, once: bool) -> float:
    """Return the median time of a call in milliseconds, or the time of a single call if `once`."""
    if once:
        return 1e3 * seconds_of(call)
    return triton.testing.do_bench(call, warmup=50, rep=300, return_mode="median")


def measure_ceilings(toy: bool) -> tuple[float, float]:
    """Measure bytes per second of a copy, and operations per second of a bfloat16 matrix product."""
    numbers, side = (2**16, 64) if toy else (2**30, 8192)
    source = torch.randn(numbers, device=CARD).to(torch.bfloat16)
    target = torch.empty_like(source)
    copy_ms = milliseconds(lambda: target.copy_(source), toy)
    a, b = (torch.randn(side, side, device=CARD).to(torch.bfloat16) for _ in range(2))
    product_ms = milliseconds(lambda: a @ b, toy)
    return 1e3 * 2 * source.nbytes / copy_ms, 1e3 * 2 * side**3 / product_ms


if __name__ == "__main__":
    main()
