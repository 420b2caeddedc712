"""Compare the log-probabilities of the sampler and the trainer bit by bit, with and without rollout.batch_invariant.

    python benchmarks/batch_invariant.py bits                    # families x dtypes x ways of batching
    python benchmarks/batch_invariant.py rules                   # what each rule removes, and how long it takes
    python benchmarks/batch_invariant.py seconds --repeats 3     # whole runs of the default recipe, in turn
    python benchmarks/batch_invariant.py curves --seeds 0 1 2    # the default recipe with and without the option

`bits` and `rules` sample 8 completions of at most 20 tokens for each of 6 prompts with images and questions of
several sizes, and score them with the trainer. A token is equal if its float32 log-probability has the same bits.
`rules` leaves out one rule of kernels/batch_invariant.py at a time. Its seconds are CPU time of sampling 16 x 8
completions of the default recipe, and of a forward and backward pass over them, on one thread. It is the median of
calls in turn.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from minivlmrl.config.options import SamplingOptions
from minivlmrl.generation.sampler import Sampler
from minivlmrl.kernels import batch_invariant
from minivlmrl.kernels.batch_invariant import batch_invariant_mode
from minivlmrl.model.build import random_model
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.packing import pack
from minivlmrl.tasks.shapes import TASK, Shapes

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "recipes"
DTYPES = (torch.float32, torch.bfloat16)
FAMILIES = {
    "Qwen2-VL": "qwen2_vl",
    "Qwen2.5-VL": "shapes_model.json",
    "Qwen3-VL": "shapes_qwen3_vl_model.json",
    "Qwen3-VL-MoE": "shapes_qwen3_vl_moe_model.json",
}
# the differences between Qwen2-VL and shapes_model.json
QWEN2_VISION = {
    "depth": 2, "embed_dim": 64, "hidden_size": 128, "mlp_ratio": 2, "num_heads": 4, "in_chans": 3, "patch_size": 7,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
KERNELS = "minivlmrl.kernels."
FUNCTIONS = {1: (F.linear, torch.addmm), 3: (F.silu, F.gelu, torch.sigmoid, Tensor.sigmoid)}  # of torch, by rule


@contextmanager
def without(*rules: int) -> Iterator[None]:
    """Leave out some of the four rules inside a `with` block."""
    off = {"return_value": False}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(batch_invariant.RULES))  # restores the table
        for rule in rules:
            for function in FUNCTIONS.get(rule, ()):
                del batch_invariant.RULES[function]
        if 1 in rules:
            stack.enter_context(mock.patch(KERNELS + "float32_matmul.is_batch_invariant", **off))
        if 2 in rules:
            stack.enter_context(mock.patch(KERNELS + "dense_attention.is_batch_invariant", **off))
            stack.enter_context(mock.patch(KERNELS + "shared_prefix.is_batch_invariant", **off))
        if 4 in rules:
            stack.enter_context(mock.patch("minivlmrl.generation.generate.is_batch_invariant", **off))
        yield


def build(family: str, dtype: torch.dtype) -> tuple:
    """Build a random model of a family, and its processor."""
    file = RECIPES / FAMILIES[family]
    if not file.is_file():
        values = json.loads((RECIPES / "shapes_model.json").read_text())
        values |= {"model_type": FAMILIES[family], "vision_config": QWEN2_VISION}
        file = Path(tempfile.mkdtemp()) / "config.json"
        file.write_text(json.dumps(values))
    model, processor = random_model(file, TASK.tokenizer(), 0)
    return model.to(dtype), processor


def varied_prompts(processor, count: int = 6) -> list:
    """Make prompts whose images and questions have several sizes."""
    prompts = []
    for i, row in enumerate(Shapes(count, "varied", prompt_template="{problem}")):
        side = 42 + 14 * (i % 4)
        question = " ".join([row.columns["problem"]] * (1 + i % 3))
        row = next(iter(Shapes(1, f"varied {i}", prompt_template=question)))
        row.images = [row.images[0].resize((side, side + 14 * (i % 2)))]
        prompts.append(row.prompt(processor))
    return prompts


def sample(model, processor, prompts: list, num_generations: int = 8) -> list:
    sampler = Sampler(model, processor, SamplingOptions(max_new_tokens=20))
    return sampler(prompts, num_generations, [f"row {i}" for i in range(len(prompts))])


def score(model, prompts: list, completions: list) -> torch.Tensor:
    """Compute the trainer's log-probabilities of all tokens in one batch."""
    return per_token_logps(model, pack(prompts, completions, model.config))[0]


def ways_to_batch(prompts: list, completions: list) -> dict[str, list[tuple[list, list]]]:
    """Return the batches of each way to divide the completions; all ways keep the order of the tokens."""
    groups = list(zip(prompts, completions, strict=True))
    half = len(prompts) // 2
    return {
        "one batch": [(prompts, completions)],
        "two batches": [(prompts[:half], completions[:half]), (prompts[half:], completions[half:])],
        "one prompt each": [([prompt], [group]) for prompt, group in groups],
        "one completion each": [([prompt], [[c]]) for prompt, group in groups for c in group],
    }


@torch.no_grad()
def differences(model, processor) -> dict[str, torch.Tensor]:
    """Sample, then score in each way: {way: absolute differences of the log-probabilities (M,)}."""
    prompts = varied_prompts(processor)
    completions = sample(model, processor, prompts)
    sampled = torch.cat([c.sampled_logps for c in chain(*completions)])
    result = {}
    for way, batches in ways_to_batch(prompts, completions).items():
        result[way] = (torch.cat([score(model, *batch) for batch in batches]) - sampled).abs()
    return result


def share(difference: torch.Tensor) -> str:
    return f"{100 * (difference == 0).double().mean():.2f} %, {difference.max():.1e}"


def print_table(columns: list[str], rows: list[list[str]]):
    for cells in [columns, ["---"] * len(columns), *rows]:
        print(f"| {' | '.join(cells)} |", flush=True)


def bits(options: argparse.Namespace) -> list[dict]:
    """Print the share of equal tokens, and the largest difference in nats, usual -> batch-invariant."""
    numbers = []
    for family in FAMILIES:
        for dtype in DTYPES:
            model, processor = build(family, dtype)
            usual = differences(model, processor)
            with batch_invariant_mode():
                invariant = differences(model, processor)
            for way, difference in usual.items():
                numbers.append({
                    "family": family, "dtype": str(dtype)[6:], "way": way, "tokens": len(difference),
                    "usual": share(difference), "batch_invariant": share(invariant[way]),
                })  # fmt: skip
    print_table(list(numbers[0]), [[str(x) for x in row.values()] for row in numbers])
    return numbers


def rules(options: argparse.Namespace) -> list[dict]:
    """Print the share of equal tokens and the CPU seconds without each of the rules."""
    torch.set_num_threads(1)
    model, processor = build("Qwen2.5-VL", torch.float32)
    rows = [row.prompt(processor) for row in Shapes(16, "seconds")]
    cases: dict[str, tuple[int, ...]] = {"all rules": ()}
    cases |= {f"without rule {rule}": (rule,) for rule in (1, 2, 3, 4)} | {"no rule": (1, 2, 3, 4)}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for _ in range(options.repeats):
        for name, left_out in cases.items():
            with batch_invariant_mode(), without(*left_out):
                seconds[name].append(timed_step(model, processor, rows))
    numbers = []
    for name, left_out in cases.items():
        with batch_invariant_mode(), without(*left_out):
            difference = torch.cat(list(differences(model, processor).values()))
        sampling, training = (statistics.median(column) for column in zip(*seconds[name], strict=True))
        numbers.append({"rules": name, "equal": share(difference), "sampling_s": sampling, "training_s": training})
    lines = [[row["rules"], row["equal"], f"{row['sampling_s']:.3f}", f"{row['training_s']:.3f}"] for row in numbers]
    print_table(["rules", "equal tokens, largest difference", "sampling, s", "forward and backward, s"], lines)
    return numbers


def timed_step(model, processor, prompts: list) -> tuple[float, float]:
    """Return the CPU seconds of sampling, and those of a forward and backward pass."""
    start = time.process_time()
    completions = sample(model, processor, prompts)
    middle = time.process_time()
    score(model, prompts, completions).sum().backward()
    model.zero_grad()
    return middle - start, time.process_time() - middle


def train(folder: Path, enabled: bool, *options: str) -> str:
    """Train the default recipe and return the output."""
    command = [sys.executable, str(ROOT / "train.py"), f"--output_dir={folder}", "--resume=never", *options]
    command.append(f"--rollout.batch_invariant={str(enabled).lower()}")
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def seconds(options: argparse.Namespace) -> list[dict]:
    """Print the seconds of the stage grpo in whole runs, with and without the option in turn."""
    numbers = []
    for _ in range(options.repeats):
        for enabled in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                output = train(Path(folder), enabled, f"--grpo.max_steps={options.steps}", "--data.eval_rows=16")
            found = re.search(r"grpo ([\d.]+) s", output)
            assert found, output
            numbers.append({"batch_invariant": enabled, "grpo_s": float(found[1])})
    medians = [
        statistics.median(row["grpo_s"] for row in numbers if row["batch_invariant"] is x) for x in (False, True)
    ]
    lines = [[str(row["batch_invariant"]), f"{row['grpo_s']:.1f}"] for row in numbers]
    print_table(["rollout.batch_invariant", f"{options.steps} GRPO steps, s"], lines)
    print(f"medians {medians[0]:.1f} and {medians[1]:.1f} s, ratio {medians[1] / medians[0]:.2f}")
    return numbers


def curves(options: argparse.Namespace) -> list[dict]:
    """Print the held-out accuracy after GRPO, and how many steps have the same rewards with and without the option."""
    numbers = []
    for seed in options.seeds:
        steps = []  # of both runs: the metrics of each GRPO step
        accuracies = []
        for enabled in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                train(Path(folder), enabled, f"--seed={seed}", "--num_threads=1", *options.options)
                rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
                summary = json.loads((Path(folder) / "summary.json").read_text())
            steps.append([row for row in rows if row["stage"] == "grpo"])
            accuracies.append(summary["after_grpo"]["eval/accuracy_sampled"])
        rewards = [[row["reward"] for row in log] for log in steps]
        equal_steps = next((i for i, (a, b) in enumerate(zip(*rewards, strict=True)) if a != b), len(rewards[0]))
        mismatches = [max(row["rollout/logp_mismatch"] for row in log) for log in steps]
        numbers.append({
            "seed": seed, "accuracy without": accuracies[0], "accuracy with": accuracies[1],
            "mismatch without": mismatches[0], "mismatch with": mismatches[1],
            "steps with equal rewards": equal_steps,
        })  # fmt: skip
        print(numbers[-1], flush=True)
    print_table(list(numbers[0]), [[str(x) for x in row.values()] for row in numbers])
    return numbers


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", choices=("bits", "rules", "seconds", "curves"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="of `seconds`")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of `curves`")
    parser.add_argument("--options", type=str.split, default=[], help="more options of train.py, for `curves`")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args()
    tables: dict[str, Callable] = {"bits": bits, "rules": rules, "seconds": seconds, "curves": curves}
    numbers = tables[options.table](options)
    if options.json:
        options.json.write_text(json.dumps({"rows": numbers}, indent=1))


if __name__ == "__main__":
    main()
