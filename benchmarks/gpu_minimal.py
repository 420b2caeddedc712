"""Train Qwen2.5-VL-3B with minimal.py on a GPU, and report seconds and peak memory per phase.

python benchmarks/gpu_minimal.py minimal grpo          # or dpo, sft
python benchmarks/gpu_minimal.py minimal grpo --toy    # tests this script with the tiny model, even on a CPU

Weights are random, in the real size. A row has an image with 484 tokens.
"""

import json
import sys
import tempfile
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from unittest import mock

import torch
from common import CARD, part, report, run_part, seconds_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
one_file = import_module("minimal")


@part
def minimal(toy: bool, stage: str):
    """Run `minimal.py FOLDER rows.jsonl` for two steps with one row each, without saving."""
    phases = {
        "load": (one_file, "load"), "sample": (one_file, "sample"),
        "log-probabilities": (one_file, "log_probabilities"), "backward": (torch.Tensor, "backward"),
        "AdamW": (torch.optim.AdamW, "step"),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        model = write_model(folder, toy)
        write_row(folder, 56 if toy else 616)
        words = [str(model), str(folder / "rows.jsonl"), "--max_steps=2", "--warmup_steps=1", "--prompts_per_step=1"]
        words += [f"--output_dir={folder / 'out'}", *([] if stage == "grpo" else [f"--{stage}"])]
        words += ["--max_new_tokens=4"] if toy else []
        for label, (owner, function) in phases.items():
            stack.enter_context(mock.patch.object(owner, function, reported(getattr(owner, function), label)))
        stack.enter_context(mock.patch.object(one_file, "save", lambda *_: None))
        stack.enter_context(mock.patch.object(sys, "argv", ["minimal.py", *words]))
        one_file.main()


def reported(function, label: str):
    """Return a function that also reports seconds and peak memory per call."""

    def call(*arguments, **options):
        results = []
        if CARD.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        spent = seconds_of(lambda: results.append(function(*arguments, **options)))
        report(label, spent, "s")
        if CARD.type == "cuda":
            report(f"{label}: peak memory", torch.cuda.max_memory_allocated() / 1e9, "GB")
        return results[0]

    return call


def write_model(folder: Path, toy: bool) -> Path:
    """Write minimal.py's tiny model, or a 3B model with its tokenizer and random weights; return the folder."""
    tiny = folder / "tiny"
    one_file.make_folder(tiny)
    if toy:
        return tiny
    from gpu import build, read_config

    from minivlmrl.model import config_json

    path = folder / "model"
    path.mkdir()
    small = json.loads((tiny / "config.json").read_text())
    config = read_config("3B") | {name: value for name, value in small.items() if name.endswith("_token_id")}
    one_file.write_json(path / "config.json", config)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (path / name).write_bytes((tiny / name).read_bytes())
    images = json.loads((tiny / "preprocessor_config.json").read_text())
    one_file.write_json(path / "preprocessor_config.json", images | {"patch_size": 14, "min_pixels": 3136})
    weights = build(config_json.from_dict(config), torch.bfloat16).state_dict()
    weights = {name: x for name, x in weights.items() if name != "lm_head.weight"}  # lm_head is tied
    one_file.save_file(weights, path / "model.safetensors", {"format": "pt"})
    del weights
    torch.cuda.empty_cache()
    return path


def write_row(folder: Path, side: int):
    one_file.draw_row()["images"][0].resize((side, side)).save(folder / "a.png")
    answers = {"completion": "red " * 60, "chosen": "red " * 60, "rejected": "blue " * 60}
    row = {"image": "a.png", "problem": "What is it?", "solution": "red"} | answers
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")


if __name__ == "__main__":
    run_part(__doc__, globals())
