"""Seconds of a training step of the vision tower on one large image, windows batched here and one by one in a loop.

python benchmarks/vision_windows.py                  # a table, about a minute
python benchmarks/vision_windows.py --json FILE      # and its numbers
python benchmarks/vision_windows.py --heads 16 --depth 1 --repeats 2   # as wide as the hub's tower, two minutes

The image has 4,064 patches, 16 x 254: 62 windows of 64 patches and 2 of 48. The tower has heads of 80 as on the hub,
but fewer of them and fewer blocks, all with windows. Time is the CPU time of one thread for forward and backward, the
ways in turn in one process, the median of each. First, in float64, outputs and gradients are compared.

Peers are loops over windows with torch's scaled_dot_product_attention, in the same tower:

    split       q, k and v cut up by torch.split, the pieces' outputs put together by torch.cat, as transformers does
    slices      the same with q[a:b]: the gradient of each slice is a tensor of the size of q
    in place    q[a:b] again, and out[a:b] = ...: the backward copies the whole gradient once for each window
"""

import argparse
import datetime
import json
import statistics
import time
from itertools import pairwise
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from minivlmrl import vision
from minivlmrl.hub.model_config import VisionConfig
from minivlmrl.kernels.window_attention import Segments, window_attention
from minivlmrl.vision import VisionTransformer

HEAD_DIM, GRID = 80, (1, 16, 254)


def split(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
    lengths = segments.cu_seqlens.diff().tolist()
    return torch.cat([attend(*window) for window in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)])


def slices(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
    ends = segments.cu_seqlens.tolist()
    return torch.cat([attend(q[a:b], k[a:b], v[a:b]) for a, b in pairwise(ends)])


def in_place(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
    ends, out = segments.cu_seqlens.tolist(), torch.empty_like(q)
    for a, b in pairwise(ends):
        out[a:b] = attend(q[a:b], k[a:b], v[a:b])
    return out


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One window, (L, H, D)."""
    return F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)))[0].transpose(0, 1)


WAYS = {"batched": window_attention, "split": split, "slices": slices, "in place": in_place}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=2, help="heads of 80 numbers; the hub's tower has 16")
    parser.add_argument("--depth", type=int, default=4, help="blocks")
    parser.add_argument("--repeats", type=int, default=9, help="timed steps of each way")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--quick", action="store_true", help="an image of 192 patches")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    grid = (1, 16, 12) if options.quick else GRID
    tower, (pixel_values, image_grid_thw) = make(options.heads, options.depth, grid)
    dtype = getattr(torch, options.dtype)
    tower, image = tower.to(dtype), (pixel_values.to(dtype), image_grid_thw)
    difference = compare(*make(1, 2, (1, 16, 12)))
    size = f"{grid[1] * grid[2]} patches, {options.heads} heads, {options.depth} blocks"
    print(f"{size}, {options.dtype}, torch {torch.__version__}")
    print(f"float64, largest difference of output and gradients over the ways: {difference:.1e}")
    milliseconds = measure(tower, image, options.repeats)
    for way, spent in milliseconds.items():
        print(f"{way:9} {spent:9.1f} ms   {spent / milliseconds['batched']:5.2f}")
    if options.json:
        about = {"patches": grid[1] * grid[2], "heads": options.heads, "depth": options.depth}
        about |= {"dtype": options.dtype, "threads": 1}
        about |= {"float64_max_difference": difference, "repeats": options.repeats, "torch": torch.__version__}
        about |= {"date": datetime.datetime.now(datetime.UTC).date().isoformat()}
        options.json.write_text(json.dumps({"milliseconds": milliseconds, **about}, indent=2) + "\n")


def make(heads: int, depth: int, grid: tuple[int, int, int]) -> tuple[VisionTransformer, tuple[Tensor, Tensor]]:
    """A tower with random weights in the hub's proportions, and a random image."""
    width = heads * HEAD_DIM
    config = VisionConfig(
        depth=depth, hidden_size=width, intermediate_size=round(2.67 * width), num_heads=heads,
        out_hidden_size=round(1.6 * width), fullatt_block_indexes=(),
    )  # fmt: skip
    torch.manual_seed(0)
    return VisionTransformer(config), (torch.randn(grid[1] * grid[2], config.patch_dim), torch.tensor([grid]))


def step(tower: VisionTransformer, image: tuple[Tensor, Tensor], way: str) -> Tensor:
    with mock.patch.object(vision, "window_attention", WAYS[way]):
        tower.zero_grad()
        out = tower(*image)
        out.square().mean().backward()
    return out.detach()


def compare(tower: VisionTransformer, image: tuple[Tensor, Tensor]) -> float:
    """Largest difference from the batched way in float64, relative to the largest number of each tensor."""
    tower, results = tower.double(), []
    for way in WAYS:
        out = step(tower, image, way)
        results.append([out, *(p.grad for p in tower.parameters())])
    ours, *theirs = results
    return max(
        ((a - b).abs().max() / a.abs().max()).item() for other in theirs for a, b in zip(ours, other, strict=True)
    )


def measure(tower: VisionTransformer, image: tuple[Tensor, Tensor], repeats: int) -> dict[str, float]:
    """Median CPU milliseconds of a step in each way."""
    seconds = {way: [] for way in WAYS}
    for _ in range(repeats + 1):
        for way, spent in seconds.items():
            begin = time.process_time()
            step(tower, image, way)
            spent.append(time.process_time() - begin)
    return {way: round(statistics.median(spent[1:]) * 1e3, 1) for way, spent in seconds.items()}  # the first warms up


if __name__ == "__main__":
    main()
