"""Measure time and memory of one GRPO step of Qwen2.5-VL-3B on one GPU, and compare with the memory estimate.

python benchmarks/gpu_grpo.py --json FILE
python benchmarks/gpu_grpo.py --toy          # test of the script: toy size in float32, also on a CPU

The weights are random, because nothing can be downloaded, and of the real size. Everything is bfloat16, including
AdamW. A step has 8 prompts with an image of 1,024 tokens and 8 completions of exactly 256 tokens each. A prompt with
its completions is a micro-batch. There is no reference (beta 0); the reward is the one of grpo_step.py.
"""

import statistics
import tempfile
from pathlib import Path

import torch
from gpu_step import CARD, build, read_options, seconds_of, write_numbers
from grpo_step import make_rows, our_side
from sizes import HUB, small_model

from minivlmrl.diagnostics.memory import RESERVE, MemoryEstimator, peak_bytes, plan
from minivlmrl.model.config import ModelConfig

WARMUP = 1  # number of steps that are not timed


def main():
    options = read_options(__doc__, "--steps", 3, "timed steps")
    with tempfile.TemporaryDirectory() as folder:
        numbers = measure(options.toy, options.steps, Path(folder))
    print(", ".join(f"{name} {x:.3f}" for name, x in numbers.items() if isinstance(x, float)))
    write_numbers(options.json, numbers)


def measure(toy: bool, steps: int, folder: Path) -> dict:
    """Measure the seconds of each step and their median, and on a GPU the peak memory."""
    (pixels, prompts, new_tokens) = (56, 2, 4) if toy else (896, 8, 256)
    dtype = torch.float32 if toy else torch.bfloat16
    rows = make_rows(pixels, prompts)
    _, processor, token_ids = small_model(folder)
    config = ModelConfig.from_dict(HUB["toy" if toy else "3b"] | token_ids)
    model = build(config, dtype)
    if CARD.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    ours = our_side(model, processor, rows, new_tokens, micro_batch_size=1, beta=0.0, learning_rate=1e-6)
    seconds = [seconds_of(ours.step) for _ in range(WARMUP + steps)]
    numbers = {"seconds": statistics.median(seconds[WARMUP:]), "all_seconds": seconds}
    if CARD.type == "cuda":
        numbers["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    run = ours.trainer.run
    tokens = len(processor(rows[0].messages, rows[0].images).input_ids)
    run.model.dtype = str(dtype).removeprefix("torch.")
    return numbers | {"planned_gb": planned_gb(run, config, tokens, (pixels // 28) ** 2)}


def planned_gb(run, config: ModelConfig, prompt_tokens: int, image_tokens: int) -> float:
    """Return the estimated memory of the step in GB (diagnostics.memory.plan), without the reserve."""
    phases = plan(run, "grpo", MemoryEstimator(config), 1, prompt_tokens - image_tokens, image_tokens)
    return (peak_bytes(phases) - RESERVE) / 1e9


if __name__ == "__main__":
    main()
