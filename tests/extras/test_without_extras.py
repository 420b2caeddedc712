"""Test that a copy of the package without extras/ and monitor/ trains recipes without extras to the same bytes."""

import json
import re
import shutil
import subprocess
import sys

import PIL.Image
import pytest

from minivlmrl.commands.train import train_recipe
from tests.helpers.links import ROOT

# the reward of own.py varies already after two steps of SFT, so that GRPO and PPO have a gradient
SHAPES = ["--data.eval_rows=4", "--sft.max_steps=2", "--rewards={own.py:letters: 1, format: 0.5, accuracy: 1}"]
SMALL = ["--sft.prompts_per_step=4", "--grpo.prompts_per_step=2", "--sampling.max_new_tokens=8"]
RECIPES = {
    "default": ["recipes/shapes.yaml", *SHAPES, *SMALL, "--grpo.max_steps=2"],
    "mpo": ["recipes/shapes_mpo.yaml", *SHAPES, "--dpo.max_steps=2"],
    "ppo": ["recipes/shapes_ppo.yaml", *SHAPES, "--ppo.max_steps=2", "--ppo.critic=separate"],
    "vlm_r1": [
        "recipes/rec_qwen2_5_vl_3b_one_card.yaml", "--data.train_file=rows.jsonl", "--data.eval_file=rows.jsonl",
        "--rewards={own.py:letters: 1, iou: 1, box_format: 1}", "--adapter.quantize=nf4",
        "--grpo.importance_sampling_level=sequence", "--grpo.num_iterations=2", "--grpo.max_steps=2",
        "--grpo.prompts_per_step=2", "--grpo.num_generations=4", "--sampling.max_new_tokens=12",
    ],
}  # fmt: skip
COMPARED = ("checkpoint/model.safetensors", "metrics.jsonl", "evaluations.jsonl", "completions.jsonl")
TRAIN = ["train", "recipes/shapes.yaml"]
USES = {  # {beginning of the error message: arguments of a command}
    "minivlmrl check: the command check": ["check", "recipes/shapes.yaml"],
    "minivlmrl convert: the command convert": ["convert", "rows.json"],
    "minivlmrl memory: the command memory": ["memory", "recipes/shapes.yaml"],
    "sampling.engine vllm: vllm": [*TRAIN, "--sampling.engine=vllm"],
    "optimizer.name adamw_8bit: adamw_8bit": [*TRAIN, "--optimizer.name=adamw_8bit"],
    "report_to wandb: wandb": [*TRAIN, "--report_to=[wandb]"],
    "report_to trackio: trackio": [*TRAIN, "--report_to=[trackio]"],
    "reference.sync_ref_model": [*TRAIN, "--reference.sync_ref_model=true"],
    "dpo.precompute_ref_log_probs": [*TRAIN, "--stages=[dpo]", "--dpo.precompute_ref_log_probs=true"],
    "sampling.environment": [*TRAIN, "--sampling.environment=recipes/zoom.py:Zoom"],
    "model_type qwen3_5": [*TRAIN, "--model.config=recipes/shapes_qwen3_5_model.json"],
    "model_type qwen3_vl_moe": [*TRAIN, "--model.config=recipes/shapes_qwen3_vl_moe_model.json"],
}
SCRIPT = """
import importlib, json, pkgutil, sys
import minivlmrl
from minivlmrl.__main__ import main
for arguments in json.load(sys.stdin):
    try:
        main(arguments)
    except SystemExit:
        pass
for module in pkgutil.walk_packages(minivlmrl.__path__, "minivlmrl."):
    importlib.import_module(module.name)
    print(module.name)
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    copy = tmp_path_factory.mktemp("without") / "clone"
    for name in ("minivlmrl", "kernels", "recipes"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "extras", "monitor"))
    lines = []
    for i in range(4):
        PIL.Image.new("RGB", (90, 50), (60 * i, 40, 90)).save(copy / f"{i}.png")
        box = [9 * i, 5, 9 * i + 30, 25]
        lines.append(json.dumps({"image": f"{i}.png", "problem": "Where is the dog?", "solution": box}) + "\n")
    (copy / "rows.jsonl").write_text("".join(lines))
    code = "def letters(completions, **columns):\n    return [len({*x}) / 9 for x in completions]\n"
    (copy / "own.py").write_text(code)
    return copy


@pytest.mark.parametrize("name", ["default", *(pytest.param(n, marks=pytest.mark.slow) for n in [*RECIPES][1:])])
def test_the_bytes_of_a_run_do_not_depend_on_extras(copy, tmp_path, monkeypatch, name, request):
    """Without extras/, each use of an extra is refused in one line, and all modules of the core can be imported."""
    monkeypatch.chdir(copy)
    options = [*RECIPES[name], "--num_threads=1"]
    if name == "vlm_r1":
        options.append(f"--model.path={request.getfixturevalue('checkpoint')}")
    train_recipe([*options, f"--output_dir={tmp_path / 'complete'}"])
    commands = json.dumps([["train", *options, f"--output_dir={tmp_path / 'without'}"], *USES.values()])
    done = subprocess.run([sys.executable, "-c", SCRIPT], input=commands, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for file in COMPARED:
        assert (tmp_path / "complete" / file).read_bytes() == (tmp_path / "without" / file).read_bytes(), file
    lines = [json.loads(line) for line in (tmp_path / "without" / "metrics.jsonl").open()]
    assert all(line["grad_norm"] > 0 for line in lines)
    refused = [line for line in done.stderr.splitlines() if "which this copy lacks" in line]
    folders = ["monitor" if arguments[0] in ("check", "memory") else "extras" for arguments in USES.values()]
    assert refused == [
        f"{use} needs minivlmrl/{x}, which this copy lacks" for use, x in zip(USES, folders, strict=True)
    ]
    assert "minivlmrl.run.loop" in done.stdout.split() and not re.search(r"minivlmrl\.(extras|monitor)", done.stdout)
