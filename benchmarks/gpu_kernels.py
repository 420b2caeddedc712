"""The kernels on one NVIDIA GPU: results first, then time and memory, beside PyTorch's own ways.

python benchmarks/gpu_kernels.py --json FILE     # tables and numbers, under eight minutes
python benchmarks/gpu_kernels.py --toy           # everything once at toy size, on a CPU too: that it runs, not how fast

In this order: card and versions; two ceilings of this card, measured (bytes a second of a large copy, operations a
second of a bfloat16 product of 8192^3 random numbers); then for each size every way on the same fresh random bfloat16
inputs. A way's results are compared before it is timed, on 64 random rows in float64, with uninitialised memory filled
with NaN; one that is wrong is not timed. Times are the median of triton.testing.do_bench (50 ms of warm-up, 300 ms of
repetitions) with the 20th and 80th percentile, taken twice; the JSON has the second median too, to judge the spread.
`share` is the time that the ceilings allow, divided by the median: for bytes that have to be read and written once, or
operations that have to be done. Peak memory is that of one call, without its inputs.
"""

import argparse
import contextlib
import datetime
import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from gpu_step import CARD, card, versions
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from minivlmrl.attention import DecodeAttention, GroupAttention, GroupLayout
from minivlmrl.kernels.backend import triton
from minivlmrl.kernels.linear_log_softmax import linear_log_softmax
from minivlmrl.kernels.window_attention import Segments, batched_attention, window_attention
from minivlmrl.sampling.captured import StaticDecodeAttention

TEMPERATURE = 0.9
CHECKED = 64  # rows, and ids of the head's gradient


@dataclass
class Way:
    """One implementation: a call without gradients, a call that returns gradients, or both."""

    name: str
    forward: Callable[[], list[Tensor]] | None = None
    both: Callable[[], list[Tensor]] | None = None


@dataclass
class Ceilings:
    """Of the card, measured: bytes and bfloat16 operations a second."""

    bytes: float
    operations: float

    def milliseconds(self, bytes: float = 0, operations: float = 0) -> float:
        return 1e3 * max(bytes / self.bytes, operations / self.operations)


@dataclass
class Run:
    """What all tables share.

    Args:
        toy: sizes that a CPU runs in seconds, each way once.
        deadline: time.monotonic() after which ways are skipped.
    """

    ceilings: Ceilings
    toy: bool
    deadline: float
    rows: list[dict]

    def table(self, title: str, ways: list[Way], error: Callable, tolerance: float, floors: dict[str, float]) -> None:
        """Check and time ways on one set of inputs, and print a line for each.

        Args:
            error: (phase, results of a way's call) -> how far they are off.
            floors: phase ("forward", "both") -> milliseconds that the ceilings allow.
        """
        print(f"\n{title}; allowed " + ", ".join(f"{k} {v:.2f} ms" for k, v in floors.items()))
        print(f"{'':32} {'phase':8} {'error':>8} {'ms':>9} {'p20':>8} {'p80':>8} {'share':>6} {'peak MiB':>9}")
        for way in ways:
            for phase in ("forward", "both"):
                if call := getattr(way, phase):
                    row = {"table": title, "way": way.name, "phase": phase, "floor_ms": floors[phase]}
                    self.rows.append(row | self.measure(call, partial(error, phase), tolerance, floors[phase]))
                    show(self.rows[-1])

    def measure(self, call: Callable, error: Callable, tolerance: float, floor: float) -> dict:
        if time.monotonic() > self.deadline:
            return {"skipped": "no time left"}
        try:
            with nan_in_new_memory():
                off = error(call())
            if not off <= tolerance:
                return {"error": off, "skipped": f"wrong: more than {tolerance}"}
            peak = peak_mib(call)
            first, second = (milliseconds(call, self.toy) for _ in range(2))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return {"skipped": "out of memory"}
        except Exception as exception:  # the other ways go on
            return {"skipped": f"{type(exception).__name__}: {exception}".splitlines()[0][:100]}
        median, p20, p80 = first
        return {
            "error": off, "ms": median, "p20": p20, "p80": p80, "second_ms": second[0], "share": floor / median,
            "peak_mib": peak,
        }  # fmt: skip


def show(row: dict) -> None:
    error = f"{row['error']:8.1e}" if "error" in row else 8 * " "
    if "skipped" in row:
        numbers = row["skipped"]
    else:
        numbers = f"{row['ms']:9.3f} {row['p20']:8.3f} {row['p80']:8.3f} {row['share']:6.2f} {row['peak_mib']:9.0f}"
    print(f"{row['way']:32} {row['phase']:8} {error} {numbers}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="sizes for a CPU, each way once")
    parser.add_argument("--minutes", type=float, default=8, help="start nothing new after so long")
    parser.add_argument("--only", choices=TABLES, nargs="+", default=list(TABLES))
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args()
    if CARD.type == "cpu" and not options.toy:
        sys.exit("no GPU here: --toy runs everything once at toy size")
    begin = time.monotonic()
    about = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "card": card(), "versions": versions()}
    print(json.dumps(about))
    ceilings = measure_ceilings(options.toy)
    print(f"ceilings: {ceilings.bytes / 1e12:.2f} TB/s copied, {ceilings.operations / 1e12:.0f} TFLOP/s in bfloat16")
    run = Run(ceilings, options.toy, begin + 60 * options.minutes, [])
    for name in options.only:
        TABLES[name](run)
    seconds = time.monotonic() - begin
    print(f"\n{seconds:.0f} s")
    if options.json:
        numbers = about | {"ceilings": vars(ceilings), "toy": options.toy, "seconds": seconds, "rows": run.rows}
        options.json.write_text(json.dumps(numbers, indent=1) + "\n")


# ------------------------------------------------------------------------------------------------ hidden states


def states_table(run: Run) -> None:
    """linear_log_softmax: log-probability and entropy from hidden states; backward of log-probabilities."""
    sizes = [(8192, 151936, 2048), (2048, 151936, 2048), (32768, 151936, 2048), (8192, 152064, 3584)]
    for rows, vocab, width in [(50, 700, 32)] if run.toy else sizes:
        states_of_size(run, rows, vocab, width)


def states_of_size(run: Run, rows: int, vocab: int, width: int) -> None:
    torch.manual_seed(rows)
    hidden = torch.randn(rows, width, device=CARD, dtype=torch.bfloat16).requires_grad_()
    weight = (3 * width**-0.5 * torch.randn(vocab, width, device=CARD)).bfloat16().requires_grad_()
    ids = torch.randint(0, vocab, (rows,), device=CARD)
    advantages = torch.randn(rows, device=CARD)
    inputs = (hidden, weight, ids, advantages)
    ways = [
        states_way("ours", lambda h, w, y: linear_log_softmax(h, w, y, TEMPERATURE), inputs),
        states_way("torch, float32", naive_states, inputs),
        states_way("torch.compile", compiled(naive_states), inputs),
        states_way("torch, checkpointed 1024 rows", checkpointed, inputs),
    ]
    pick, some = (torch.randperm(n, device=CARD)[:CHECKED] for n in (rows, vocab))
    expected = exact_states(*inputs, pick, some)
    products = 2 * rows * vocab * width
    floors = {"forward": run.ceilings.milliseconds(0, products), "both": run.ceilings.milliseconds(0, 3 * products)}
    title = f"states {rows} x {width}, head {vocab}"
    run.table(title, ways, lambda phase, got: off_states(phase, got, expected, pick, some), 0.05, floors)


def states_way(name: str, function: Callable, inputs: tuple[Tensor, ...]) -> Way:
    """function (hidden, weight, ids) -> log-probabilities and whatever else it has."""
    hidden, weight, ids, advantages = inputs

    def both():
        logps = function(hidden, weight, ids)[0]
        return torch.autograd.grad(logps, (hidden, weight), advantages.to(logps.dtype))

    @torch.no_grad()
    def forward():
        return function(hidden, weight, ids)

    return Way(name, forward, both)


def naive_states(hidden, weight, ids):
    log_p = ((hidden @ weight.T).float() / TEMPERATURE).log_softmax(-1)
    return log_p.gather(-1, ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def checkpointed(hidden, weight, ids):
    pieces = zip(hidden.split(1024), ids.split(1024), strict=True)
    scored = [checkpoint(naive_states, h, weight, y, use_reentrant=False) for h, y in pieces]
    return [torch.cat(part) for part in zip(*scored, strict=True)]


@torch.no_grad()
def exact_states(hidden, weight, ids, advantages, pick, some) -> dict[str, list[Tensor]]:
    """Of picked rows values and dh in float64; of some ids dW, with the rows' sums in float32."""
    h = hidden[pick].double()
    w = weight.double()
    log_p = (h @ w.T / TEMPERATURE).log_softmax(-1)
    values = torch.stack([log_p.gather(-1, ids[pick, None])[:, 0], -(log_p.exp() * log_p).sum(-1)])
    one_hot = F.one_hot(ids[pick], len(weight))
    grad_hidden = (advantages[pick, None] * (one_hot - log_p.exp()) / TEMPERATURE) @ w
    grad_weight = 0
    for rows in torch.arange(len(ids), device=CARD).split(1024):
        p = (hidden[rows].float() @ weight.float().T / TEMPERATURE).softmax(-1)[:, some].double()
        dz = advantages[rows, None] * ((ids[rows, None] == some).double() - p) / TEMPERATURE
        grad_weight = grad_weight + dz.T @ hidden[rows].double()
    return {"forward": [values], "both": [grad_hidden, grad_weight]}


def off_states(phase, got, expected, pick, some) -> float:
    if phase == "forward":
        mine = torch.stack(list(got))[:, pick]
        return relative(mine, expected[phase][0][: len(mine)])
    return max(relative(a, b) for a, b in zip((got[0][pick], got[1][some]), expected[phase], strict=True))


# ------------------------------------------------------------------------------------------------ windows


HEADS, HEAD_DIM = 16, 80  # of Qwen2.5-VL's vision tower


def windows_table(run: Run) -> None:
    """window_attention: 512 whole windows, and eight photographs of 58 x 70 patches with their narrow windows."""
    photograph = 7 * (8 * [64] + [48]) + 8 * [16] + [12]  # 8 x 8 patches, at the edges 8 x 6, 2 x 8 and 2 x 6
    for lengths in [[64, 20, 64]] if run.toy else [512 * [64], 8 * photograph]:
        T = sum(lengths)
        torch.manual_seed(T)
        # q and k as rotary leaves them, v as a slice of the projection
        q, k, grad = (torch.randn(T, HEADS, HEAD_DIM, device=CARD, dtype=torch.bfloat16) for _ in range(3))
        v = torch.randn(T, 3, HEADS, HEAD_DIM, device=CARD, dtype=torch.bfloat16)[:, 2]
        inputs = [x.requires_grad_() for x in (q, k, v)]
        segments = Segments(lengths, CARD)
        ways = [
            windows_way("ours", window_attention, inputs, segments, grad),
            windows_way("ours, torch path", batched_attention, inputs, segments, grad),
            windows_way("loop, as in transformers", split_loop, inputs, segments, grad),
            windows_way("torch's varlen_attn", varlen, inputs, segments, grad),
        ]
        pick = sorted({0, len(lengths) - 1, *torch.randperm(len(lengths))[: CHECKED // 8].tolist()})
        expected, rows = exact_windows(inputs, grad, segments.cu_seqlens.tolist(), pick)
        size = q.numel() * q.element_size()
        products = 2 * sum(n * n for n in lengths) * HEADS * HEAD_DIM
        floors = {
            "forward": run.ceilings.milliseconds(4 * size, 2 * products),
            "both": run.ceilings.milliseconds(11 * size, 7 * products),
        }
        error = partial(off_windows, expected=expected, rows=rows)
        run.table(f"windows {len(lengths)}, {T} patches", ways, error, 0.02, floors)


def windows_way(name: str, function: Callable, inputs: list[Tensor], segments: Segments, grad: Tensor) -> Way:
    """function (q, k, v, segments) -> (T, H, D)."""

    @torch.no_grad()
    def forward():
        return [function(*inputs, segments)]

    return Way(name, forward, lambda: torch.autograd.grad(function(*inputs, segments), inputs, grad))


def split_loop(q, k, v, segments):
    windows = zip(*(x.split(segments.cu_seqlens.diff().tolist()) for x in (q, k, v)), strict=True)
    return torch.cat([sdpa(*(x[None] for x in window))[0] for window in windows])


def sdpa(q, k, v, mask=None):
    """(S, L, H, D) -> (S, L, H, D)."""
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask).transpose(1, 2)


def varlen(q, k, v, segments):
    from torch.nn.attention.varlen import varlen_attn  # it needs flash attention, which a CPU lacks

    return varlen_attn(q, k, v, segments.cu_seqlens, segments.cu_seqlens, segments.longest, segments.longest)


def exact_windows(inputs: list[Tensor], grad: Tensor, ends: list[int], pick: list[int]) -> tuple[dict, Tensor]:
    """Outputs and gradients of some windows in float64, by the formula, and their rows."""
    rows = [torch.arange(ends[i], ends[i + 1], device=grad.device) for i in pick]
    outputs = []
    gradients = []
    for index in rows:
        q, k, v = (x.detach()[index].double().transpose(0, 1).requires_grad_() for x in inputs)  # (H, L, D)
        out = (q @ k.mT * HEAD_DIM**-0.5).softmax(-1) @ v
        outputs.append(out.detach().transpose(0, 1))
        of_window = torch.autograd.grad(out, (q, k, v), grad[index].double().transpose(0, 1))
        gradients.append([x.transpose(0, 1) for x in of_window])
    return {"forward": [torch.cat(outputs)], "both": [torch.cat(x) for x in zip(*gradients, strict=True)]}, torch.cat(
        rows
    )


def off_windows(phase: str, got: list[Tensor], expected: dict[str, list[Tensor]], rows: Tensor) -> float:
    return max(relative(a[rows], b) for a, b in zip(got, expected[phase], strict=True))


# ------------------------------------------------------------------------------------------------ decoding


def decode_table(run: Run) -> None:
    """A layer of 3B's decode step: prompts of 1,100 tokens, rows with 200 of 256 tokens, whose keys are written too."""
    P, C, done, H, K, D = (50, 8, 5, 4, 2, 16) if run.toy else (1100, 256, 200, 16, 2, 128)
    for prompts, slots in [(2, 3)] if run.toy else [(1, 1), (1, 8), (8, 8), (64, 8)]:
        R = prompts * slots
        torch.manual_seed(R)
        prefill = GroupAttention(GroupLayout([P] * prompts, [[]] * prompts, CARD), keep_keys=True)
        new = [torch.randn(R, heads, D, device=CARD, dtype=torch.bfloat16) for heads in (H, K, K)]
        prefill.keys.append([new[0].new_empty(prompts * P, K, D).normal_() for _ in range(2)])
        start = torch.zeros(prompts, dtype=torch.long, device=CARD)
        static = StaticDecodeAttention(prefill, torch.arange(prompts).repeat_interleave(slots), C, start)
        for x in static.row_kv[0]:
            x[:, :, :done] = torch.randn_like(x[:, :, :done])
        static.newest.fill_(done)
        static.row_bias[..., done + 1 :] = float("-inf")
        # each row with keys of its own, as where prompts are not shared
        of_rows = [
            torch.cat([static.slots.spread(x), y], 2)
            for x, y in zip(static.prompt_kv[0], static.row_kv[0], strict=True)
        ]
        for x, y in zip(of_rows, new[1:], strict=True):
            x[:, :, P + done] = y
        hidden = torch.cat([static.prompt_bias[:1], static.row_bias[0, 0]], 1)
        ways = [
            Way("ours", partial(decode_way, static, new)),
            Way("ours, torch path", partial(decode_way, static, new, DecodeAttention.__call__)),
            Way("sdpa, prompts copied to rows", lambda q=new[0], kv=of_rows, m=hidden: [on_rows(q, *kv, m)]),
        ]
        pick = torch.randperm(R)[:CHECKED].to(CARD)
        expected = on_rows(*(x[pick].double() for x in (new[0], *of_rows)), hidden.double())
        size = new[0].element_size() * (2 * K * D * (prompts * P + R * (done + 1)) + 2 * new[0].numel())
        floors = {"forward": run.ceilings.milliseconds(size)}
        error = lambda phase, got, e=expected, p=pick: relative(got[0][p], e)  # noqa: E731
        run.table(f"decode {prompts} x {slots} rows, {P} + {done + 1} keys", ways, error, 0.02, floors)
        ours, plain = (row.get("ms") for row in run.rows[-3:-1])
        if ours and plain:
            print(f"torch path / ours: {plain / ours:.2f}")


@torch.no_grad()
def decode_way(static, new: list[Tensor], call=StaticDecodeAttention.__call__) -> list[Tensor]:
    return [call(static, 0, *new)]


def on_rows(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """q (R, H, D), k and v (R, K, T, D), hidden (1, T) -> (R, H, D)."""
    return F.scaled_dot_product_attention(q[:, :, None], k, v, hidden, enable_gqa=True)[:, :, 0]


TABLES = {"states": states_table, "windows": windows_table, "decode": decode_table}


# ------------------------------------------------------------------------------------------------ shared


def compiled(function: Callable) -> Callable:
    """By inductor on a GPU; on a CPU only traced, as inductor would look for a C++ compiler."""
    return torch.compile(function, dynamic=False, backend="inductor" if CARD.type == "cuda" else "eager")


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b).norm() / b.norm()).item()


@contextlib.contextmanager
def nan_in_new_memory():
    """What a kernel does not write shows as NaN: torch.utils.deterministic.fill_uninitialized_memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # operations that know no deterministic form say so
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def milliseconds(call: Callable, once: bool) -> list[float]:
    """Median, 20th and 80th percentile."""
    if once:
        begin = time.perf_counter()
        call()
        return [1e3 * (time.perf_counter() - begin)] * 3
    return triton.testing.do_bench(call, warmup=50, rep=300, quantiles=(0.5, 0.2, 0.8))


def peak_mib(call: Callable) -> float:
    """0 without a GPU."""
    if CARD.type != "cuda":
        return 0.0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure_ceilings(toy: bool) -> Ceilings:
    numbers, side = (2**16, 64) if toy else (2**30, 8192)
    source = torch.randn(numbers, device=CARD).to(torch.bfloat16)
    target = torch.empty_like(source)
    copy = milliseconds(lambda: target.copy_(source), toy)[0]
    a, b = (torch.randn(side, side, device=CARD).to(torch.bfloat16) for _ in range(2))
    product = milliseconds(lambda: a @ b, toy)[0]
    return Ceilings(2 * source.nbytes / copy * 1e3, 2 * side**3 / product * 1e3)


if __name__ == "__main__":
    main()
