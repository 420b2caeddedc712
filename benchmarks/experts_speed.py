"""Seconds of a processor that a layer with experts takes, beside a dense MLP of the active size and torch's grouped_mm.

python benchmarks/experts_speed.py    # forward and backward in float32, one thread; grouped_mm: its products alone
"""

import time
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from minivlmrl.hub.experts import Experts, ExpertsConfig
from minivlmrl.vision import MLP


def seconds(function, times: int = 20) -> float:
    """Least processor time of a call; another process on the machine does not count."""
    taken = []
    for _ in range(times):
        start = time.process_time()
        function()
        taken.append(time.process_time() - start)
    return min(taken)


def grouped(x, gate, up, down, ends):
    """The products of all experts at once: tokens sorted by expert, `ends` of each expert's."""
    return F.grouped_mm(F.silu(F.grouped_mm(x, gate, offs=ends)) * F.grouped_mm(x, up, offs=ends), down, offs=ends)


def measure(tokens: int, width: int, size: int, count: int, k: int):
    """Print a line for one size."""
    torch.manual_seed(0)
    block = Experts(SimpleNamespace(hidden_size=width, experts=ExpertsConfig(count, k, size)))
    dense = MLP(width, k * size, bias=False)
    x = torch.randn(tokens, width)
    row = {"experts": seconds(lambda: block(x).sum().backward()), "dense": seconds(lambda: dense(x).sum().backward())}
    with torch.no_grad():
        _, ids = block.route(x)
        sorted_x = x.repeat_interleave(k, 0)[ids.flatten().argsort(stable=True)]
        counts = block.counts(ids)
        ends = torch.tensor(counts).cumsum(0).int()
        names = ("gate_proj", "up_proj", "down_proj")
        weights = [torch.stack([getattr(e, name).weight.T for e in block.experts]) for name in names]
        parts = sorted_x.split(counts)
        loop = lambda: torch.cat([expert(part) for expert, part in zip(block.experts, parts, strict=True)])  # noqa: E731
        row["products, a loop"] = seconds(loop)
        row["products, grouped_mm"] = seconds(lambda: grouped(sorted_x, *weights, ends))
        row["they differ by"] = (loop() - grouped(sorted_x, *weights, ends)).abs().max().item() * 1e-3
        alike = [torch.equal(torch.cat([block(part) for part in x.split(n)]), block(x)) for n in (1, 7, tokens // 2)]
    shown = ", ".join(f"{name} {value * 1e3:.3g}" for name, value in row.items())
    print(f"{tokens} tokens, {(width, size, count, k)}: ms {shown}; same bits in batches of 1, 7, half: {alike}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    measure(600, 128, 72, 8, 2)
    measure(64, 128, 72, 8, 2)
    measure(600, 512, 256, 32, 4)
