"""Seconds of a processor that experts take, beside a dense MLP of the active size and torch's grouped_mm.

python benchmarks/experts_speed.py    # forward and backward in float32, one thread; grouped_mm: its products alone
"""

import json
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from minivlmrl.config.loading import load_config
from minivlmrl.model.families.experts import Experts, ExpertsConfig, choose_experts
from minivlmrl.model.vision import MLP
from minivlmrl.run.callbacks import Callback, default_callbacks
from minivlmrl.run.loop import start

RECIPES = Path(__file__).resolve().parents[1] / "recipes"


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
    block = Experts(SimpleNamespace(hidden_size=width, experts=ExpertsConfig(count, k, size)), 0)
    dense = MLP(width, k * size, bias=False)
    x = torch.randn(tokens, width)
    row = {"experts": seconds(lambda: block(x).sum().backward()), "dense": seconds(lambda: dense(x).sum().backward())}
    with torch.no_grad():
        _, ids = choose_experts(block.gate(x), k)
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


class StepClock(Callback):
    """Notes the processor time at which each update begins."""

    def __init__(self):
        self.times = []

    def on_step_begin(self, *_):
        self.times.append(time.process_time())


def whole_step(model: dict) -> float:
    """Median over ten steps of GRPO with a random model, which writes as much as it may: rollout and update."""
    clock = StepClock()
    with tempfile.TemporaryDirectory() as folder:
        model_file = Path(folder, "model.json")
        model_file.write_text(json.dumps(model))
        options = ["--stages=[grpo]", "--grpo.max_steps=11", "--num_threads=1", "--data.eval_rows=1"]
        options += [f"--model.config={model_file}", f"--output_dir={folder}/run"]
        config = load_config(RECIPES / "shapes.yaml", options)
        start(config, [*default_callbacks(config), clock])
    return statistics.median(end - begin for begin, end in pairwise(clock.times))


def measure_steps(name: str):
    """Print a line for a recipe's model with experts and a dense one of its active size."""
    model = json.loads((RECIPES / name).read_text())
    text = model["text_config"]
    size = text["num_experts_per_tok"] * text["moe_intermediate_size"] + text.get("shared_expert_intermediate_size", 0)
    dense = {"model_type": model["model_type"].removesuffix("_moe"), "text_config": text | {"intermediate_size": size}}
    print(f"{name}: a step of {whole_step(model):.3g} s, of the dense model {whole_step(model | dense):.3g} s")


if __name__ == "__main__":
    torch.set_num_threads(1)
    measure(600, 128, 72, 8, 2)
    measure(64, 128, 72, 8, 2)
    measure(600, 512, 256, 32, 4)
    measure_steps("shapes_qwen3_vl_moe_model.json")
    measure_steps("shapes_qwen3_5_moe_model.json")
