"""Run GRPO steps of models of real size on a CPU: measure time and peak memory, and load the exported model again.

python benchmarks/real_size.py 3b      # recipes/own_data.yaml with LoRA in bfloat16; 15 GB of memory, 20 GB of disk
python benchmarks/real_size.py 7b      # the same with an NF4 base model; 50 minutes, 25 GB more of disk
python benchmarks/real_size.py trl     # 182 million parameters in float32 and TRL's GRPOTrainer; 24 GB of memory

The weights are random, because nothing can be downloaded. They are sampled in bfloat16 and written shard by shard, so
that they are never in memory together. A step has 2 prompts with an image of 448 x 336 and 4 completions of 16 tokens
each. The measured peak is compared with the memory estimate. `trl` runs grpo_step.py with 2 prompts of 288 tokens and 8
completions of 16 tokens.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

import grpo_step
import PIL.Image
import torch
from sizes import HUB, small_model

from minivlmrl.config.loading import load_config
from minivlmrl.diagnostics.memory import RESERVE, MemoryEstimator, estimate_phases, peak_bytes
from minivlmrl.files import INDEX, save_tensors
from minivlmrl.json_files import read_json, read_lines, write_json
from minivlmrl.model import config_json
from minivlmrl.model.checkpoint import save_model
from minivlmrl.model.plain_weights import plain_weights
from minivlmrl.run.rollout_log import LogLine

SHARD = 5 * 10**8  # approximate number of weights in a file
PICTURE = (448, 336)  # size in pixels
TOKENS = (94, 192)  # number of text and image tokens in a prompt
LORA = ["--adapter.r=16", "--model.dtype=bfloat16", "--model.compute_dtype=null"]
SIZES = {"toy": LORA, "3b": LORA, "7b": [*LORA, "--adapter.quantize=nf4"]}
STEP = ["--grpo.prompts_per_step=2", "--grpo.num_generations=4", "--sampling.max_new_tokens=16", "--data.eval_rows=2"]
# a meaningless reward that differs within a group, because otherwise the gradient would be 0
REWARD = """
def first_token(completions, completion_ids, **columns):
    return [float(ids[0] % 7) for ids in completion_ids]
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("size", choices=[*SIZES, "trl"])
    parser.add_argument("--steps", type=int, default=3, help="timed steps")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    o = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        way = beside_trl if o.size == "trl" else measure
        numbers = way(o.size, Path(folder), o.steps)
    print(json.dumps(numbers, indent=1))
    if o.json:
        o.json.write_text(json.dumps(numbers) + "\n")


def small_config() -> dict:
    """Return the config of the default recipe's model, enlarged to 182 million parameters."""
    config = json.loads(grpo_step.MODEL_CONFIG.read_text())
    config.update(
        hidden_size=1024,
        intermediate_size=2848,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        rope_scaling={"type": "mrope", "mrope_section": [8, 12, 12]},
    )
    config["vision_config"].update(
        depth=12,
        hidden_size=512,
        intermediate_size=1376,
        num_heads=8,
        out_hidden_size=1024,
        fullatt_block_indexes=[3, 7, 11],
    )
    return config


def beside_trl(_size: str, folder: Path, steps: int) -> dict:
    """Measure the median time of a step in minivlmrl and in TRL, with grpo_step.py."""
    (folder / "config.json").write_text(json.dumps(small_config()))
    return grpo_step.measure(224, 2, steps, folder / "config.json", 16, warmup=1)


def measure(size: str, folder: Path, steps: int) -> dict:
    """Write a model folder, train, and generate with the exported model; return times and memory."""
    model = folder / "model"
    run = folder / "run"
    export = run / "checkpoint"
    picture = folder / "picture.png"
    rows = folder / "rows.jsonl"
    write_folder(model, HUB[size])
    PIL.Image.effect_noise(PICTURE, 80).convert("RGB").save(picture)
    row = {"image": picture.name, "problem": "What is it?", "solution": "noise"}
    rows.write_text(f"{json.dumps(row)}\n" * 2)
    (folder / "reward.py").write_text(REWARD)
    options = [
        *SIZES[size],
        *STEP,
        f"--data.train_file={rows}",
        f"--data.eval_file={rows}",
        f"--model.path={model}",
        f"--output_dir={run}",
        f"--grpo.max_steps={steps + 1}",
        f"--rewards={{{folder / 'reward.py'}:first_token: 1.0}}",
    ]
    minivlmrl("train", "own_data.yaml", *options)
    peak = getrusage(RUSAGE_CHILDREN).ru_maxrss * 1024  # bytes of the training process
    question = ["--image", str(picture), "--prompt", row["problem"]]
    minivlmrl("chat", "--model", str(export), *question, "--max_new_tokens", "2")
    seconds = [line["step_time"] for line in read_lines(run / "timings.jsonl", LogLine)]
    costs = MemoryEstimator(config_json.from_dict(read_json(model / "config.json")))
    phases = estimate_phases(load_config("own_data.yaml", options), "grpo", costs, 1, *TOKENS)
    return {
        "seconds": statistics.median(seconds[1:]),
        "all_seconds": seconds,
        "peak_gb": peak / 1e9,
        "export_gb": sum(path.stat().st_size for path in export.glob("*.safetensors")) / 1e9,
        "planned_gb": (peak_bytes(phases) - RESERVE) / 1e9,
    }


def minivlmrl(*arguments: str):
    subprocess.run([sys.executable, "-m", "minivlmrl", *arguments], check=True)


@torch.no_grad()
def write_folder(folder: Path, values: dict):
    """Write a model folder in the layout of the hub, with a small tokenizer and random weights in bfloat16."""
    small, processor, token_ids = small_model(folder.parent)
    save_model(folder, small, processor)
    (folder / "model.safetensors").unlink()
    vocab_size = max(values["vocab_size"], small.config.vocab_size)
    config = values | token_ids | {"vocab_size": vocab_size, "torch_dtype": "bfloat16"}
    write_json(folder / "config.json", config)
    generator = torch.Generator().manual_seed(0)
    shards = [[]]
    weights = plain_weights(MemoryEstimator(config_json.from_dict(config)).model)
    for name in weights:
        if sum(weights[other].numel() for other in shards[-1]) > SHARD:
            shards.append([])
        shards[-1].append(name)
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"part-{number:05d}.safetensors"
        save_tensors({name: draw(name, weights[name].shape, generator) for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    write_json(folder / INDEX, {"weight_map": weight_map})


def draw(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Sample a weight in bfloat16: matrices from N(0, 1 / fan_in), norms 1, biases 0."""
    weight = torch.full(shape, float(not name.endswith("bias")), dtype=torch.bfloat16)
    if len(shape) > 1:
        weight.normal_(0, 1 / math.sqrt(weight[0].numel()), generator=generator)
    return weight


if __name__ == "__main__":
    main()
