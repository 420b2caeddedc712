"""Memory and CPU time of log-probabilities and entropies from hidden states, forward and backward.

python benchmarks/cpu_logprobs.py                  # N=2048, V=32000, D=256; a table, about three minutes
python benchmarks/cpu_logprobs.py --json FILE      # and its numbers
python benchmarks/cpu_logprobs.py --quick          # a small case

Every way runs in a process of its own, with one thread, on the same random float32 states, head and upstream gradients.
Each first says how far its results are from those of the naive way in float64 on 64 of the rows.

    CPU time    the median of the repetitions, of one forward and backward, gradients of the states and of the head
    peak        the most memory held during the first of them, above what the process held before: with both gradients
                (33 MB for the head), without the inputs. glibc's malloc is told to return what it frees
                (MALLOC_MMAP_THRESHOLD_), or the numbers of some peers would be those of its fragments.

`naive` makes all logits and lets autograd keep what it needs. Peers run where they can be imported, and the table says
which could not: TRL's ChunkedLogProbFunction with the tile its trainer uses, Liger's LigerFusedLinearGRPOLoss (without
entropies, and gradients in the forward), F.linear_cross_entropy in chunks (without entropies). The ways "without
entropy" leave out its gradient, and those that can also the entropy.
"""

import argparse
import datetime
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from minivlmrl.kernels.linear_log_softmax import linear_log_softmax

THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"}
SEQUENCE = 128  # tokens that share an advantage: what Liger takes at a time
TRL_TILE = 32768  # ids, what TRL's trainers pass


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, nargs=3, default=(2048, 32000, 256), metavar=("N", "V", "D"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="N=512, V=4000, D=32, one repetition")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="those alone, and the naive ones")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # the way that this process is for
    options = parser.parse_args()
    size, repeats = ((512, 4000, 32), 1) if options.quick else (options.size, options.repeats)
    if options.child:
        print(json.dumps(measure(options.child, *size, repeats)))
        return
    print(f"torch {torch.__version__}, N={size[0]}, V={size[1]}, D={size[2]}, float32, one thread, median of {repeats}")
    print(f"{'':34} {'CPU s':>7} {'of naive':>8} {'peak MiB':>9} {'naive is':>8} {'max error':>9}")
    rows = {}
    for name in [name for name in WAYS if name in options.ways or name.startswith("naive")]:
        rows[name] = row = run_child(name, size, repeats)
        if "missing" in row:
            print(f"{name:34} not importable: {row['missing']}")
            continue
        base = rows["naive" if WAYS[name].entropy else "naive, without entropy"]
        row |= {"time_ratio": row["seconds"] / base["seconds"], "memory_divisor": base["peak_mib"] / row["peak_mib"]}
        cells = f"{row['seconds']:7.2f} {row['time_ratio']:8.2f} {row['peak_mib']:9.0f} {row['memory_divisor']:8.1f}"
        print(f"{name:34} {cells} {row['error']:9.0e}", flush=True)
    if options.json:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        about = {"size": size, "repeats": repeats, "threads": 1, "versions": {"torch": torch.__version__}, "date": date}
        options.json.write_text(json.dumps({"ways": rows, **about}, indent=2) + "\n")


def run_child(name: str, size: tuple[int, int, int], repeats: int) -> dict:
    command = [sys.executable, __file__, "--child", name, "--repeats", str(repeats), "--size", *map(str, size)]
    result = subprocess.run(command, env=os.environ | THREADS, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{name}:\n{result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])


def measure(name: str, rows: int, vocab: int, width: int, repeats: int) -> dict:
    """Seconds, peak and error of one way, in this process."""
    torch.set_num_threads(1)
    way = WAYS[name]
    try:
        function = way.load()
    except ImportError as error:
        return {"missing": str(error)}
    hidden, weight, ids, upstream = inputs(rows, vocab, width)
    function(hidden[:1], weight, ids[:1], upstream[:, :1])  # what is loaded once
    before = resident_mib()
    seconds = []
    for repetition in range(repeats):
        begin = time.process_time()
        function(hidden, weight, ids, upstream)
        seconds.append(time.process_time() - begin)
        if repetition == 0:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
    error = error_of(function, naive if way.entropy else naive_without_entropy, hidden, weight, ids, upstream)
    return {"seconds": statistics.median(seconds), "all_seconds": seconds, "peak_mib": peak, "error": error}


# ------------------------------------------------------------- the ways: (hidden, weight, ids, upstream) -> gradients


def naive(hidden: Tensor, weight: Tensor, ids: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    log_p = (hidden @ weight.T).log_softmax(-1)
    logps = log_p.gather(-1, ids[:, None])[:, 0]
    return backward(hidden, weight, upstream, logps, -(log_p.exp() * log_p).sum(-1))


def naive_without_entropy(hidden, weight, ids, upstream):
    logps = (hidden @ weight.T).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    return backward(hidden, weight, upstream, logps)


def ours(hidden, weight, ids, upstream):
    return backward(hidden, weight, upstream, *linear_log_softmax(hidden, weight, ids))


def ours_without_entropy(hidden, weight, ids, upstream):
    return backward(hidden, weight, upstream, linear_log_softmax(hidden, weight, ids)[0])


def load_trl(outputs: tuple[str, ...]) -> Callable:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    def trl(hidden, weight, ids, upstream):
        logps, entropies, *_ = ChunkedLogProbFunction.apply(
            hidden, weight, None, ids, 1.0, TRL_TILE, None, 1.0, outputs
        )
        return backward(hidden, weight, upstream, logps, *([entropies] if outputs else []))

    return trl


def load_liger() -> Callable:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, compiled=False, loss_type="bnpo")

    def liger(hidden, weight, ids, upstream):
        """Its loss is -mean(advantage * ratio), with a ratio of exp(logp - logp.detach())."""
        sequences = len(ids) // min(SEQUENCE, len(ids))
        states, tokens = hidden.unflatten(0, (sequences, -1)), ids.unflatten(0, (sequences, -1))
        advantages = upstream[0].unflatten(0, (sequences, -1))[:, 0]
        value = loss(states, weight, tokens, torch.ones_like(tokens), -len(ids) * advantages)[0]
        return torch.autograd.grad(value, (hidden, weight))

    return liger


def load_torch() -> Callable:
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    options = LinearCrossEntropyOptions()  # in chunks, of a size that PyTorch chooses

    def linear_cross_entropy(hidden, weight, ids, upstream):
        losses = F.linear_cross_entropy(hidden, weight, ids, reduction="none", options=options)
        return backward(hidden, weight, upstream, -losses)

    return linear_cross_entropy


@dataclass
class Way:
    load: Callable[[], Callable]
    entropy: bool = True


WAYS = {
    "naive": Way(lambda: naive),
    "ours": Way(lambda: ours),
    "TRL": Way(lambda: load_trl(("entropy",))),
    "naive, without entropy": Way(lambda: naive_without_entropy, False),
    "ours, without entropy": Way(lambda: ours_without_entropy, False),
    "TRL, without entropy": Way(lambda: load_trl(()), False),
    "Liger, without entropy": Way(load_liger, False),
    "torch, without entropy": Way(load_torch, False),
}


def backward(hidden: Tensor, weight: Tensor, upstream: Tensor, *outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients with the first rows of upstream for the outputs: logps, and entropies where there are."""
    return torch.autograd.grad(outputs, (hidden, weight), list(upstream[: len(outputs)].to(outputs[0].dtype)))


def inputs(rows: int, vocab: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden (N, D), weight (V, D), ids (N,), upstream (2, N): logits of standard deviation 1."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator).requires_grad_()
    weight = (torch.randn(vocab, width, generator=generator) * width**-0.5).requires_grad_()
    ids = torch.randint(0, vocab, (rows,), generator=generator)
    advantages = torch.randn(-(-rows // SEQUENCE), generator=generator).repeat_interleave(SEQUENCE)[:rows]
    return hidden, weight, ids, torch.stack([advantages, torch.randn(rows, generator=generator)])


def error_of(function: Callable, reference: Callable, hidden: Tensor, weight: Tensor, ids: Tensor, upstream: Tensor):
    """Largest difference of the gradients of 64 rows from those in float64, as a share of the largest gradient."""
    some = [hidden[:64].detach().requires_grad_(), weight, ids[:64], upstream[:, :64]]
    exact = [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in some]
    pairs = zip(function(*some), reference(*exact), strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def resident_mib() -> float:
    """Memory of this process now (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


if __name__ == "__main__":
    main()
