"""Apply every diff of docs/developer_guide.md to a copy of the package, and call the code that the diffs add.

The test also calls recipes/fluent.py, which the developer guide recommends to copy.
"""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.helpers.links import ROOT

PAGE = (ROOT / "docs" / "developer_guide.md").read_text()
DIFFS = dict(re.findall(r"\n\*\*(.+?)\*\*(?:(?!\n\*\*).)*?\n```diff\n(.*?)```", PAGE, re.DOTALL))  # title -> diff
CALLS = """
import contextlib, io, json, math, os, runpy, sys

import torch
from PIL import Image

from minivlmrl.commands.train import train_recipe
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.config.import_utils import load_name
from minivlmrl.losses.grpo import LossNormalizer
from minivlmrl.rewards.registry import get_reward
from minivlmrl.model.checkpoint import load_model
from minivlmrl.config.loading import load_config
from minivlmrl.trainers.sft import SFTTrainer

def refusal(call, *arguments):
    try:
        call(*arguments)
    except ValueError as error:
        return str(error)

found = {}
one = torch.ones(1, 2)
out = io.StringIO()
own = ["--stages=[my_stage.py:Again, grpo]"]
own += ["--grpo.loss_type=my_loss.py:reinforce", "--grpo.beta=0"]
own += ["--optimizer.name=my_opt.py:sgd(momentum=0.5)", "--sampling.engine=my_engine.py:Telling", "--num_threads=1"]
own += ["--grpo.advantages=my_advantages.py:max_rl(least=0.1)"]
own += ["--data.eval_rows=2", "--again.max_steps=2", "--grpo.max_steps=1", "--grpo.prompts_per_step=2"]
with contextlib.redirect_stdout(out):
    train_recipe(["shapes.yaml", *own, "--again.prompts_per_step=2", "--output_dir=run"])
lines = [json.loads(line) for line in open("run/metrics.jsonl")]
found["A stage"] = [line["stage"] for line in lines] == ["again", "again", "grpo"]
with contextlib.redirect_stdout(out):
    size = ["--my_dpo.max_steps=2", "--my_dpo.prompts_per_step=2", "--my_dpo.learning_rate=1e-3", "--data.eval_rows=0"]
    train_recipe(["shapes.yaml", "--stages=[my_pairs.py:MyDPO]", *size, "--num_threads=1", "--output_dir=pairs"])
losses = [json.loads(line)["loss"] for line in open("pairs/metrics.jsonl")]
found["A stage for pairs"] = abs(losses[0] - math.log(2)) < 1e-6 and losses[1] != losses[0]
normalizer = LossNormalizer(1, 2)
loss, _ = load_name("my_loss.py:reinforce")(
    -3 * one, torch.tensor([0.5]), one, beta=0.0, old_per_token_logps=None, normalizer=normalizer
)
found["A loss"] = loss.item() == 1.5 and math.isfinite(lines[-1]["loss"])
groups = torch.tensor([1.0, 2.0, 3.0, math.nan, 0.0, 0.0])
advantages = load_name("my_advantages.py:max_rl")(groups, 3)
found["An advantage function"] = advantages.tolist() == [-0.5, 0, 0.5, 0, 0, 0] and lines[-1]["reward_std"] >= 0
Image.new("RGB", (56, 56)).save("a.png")
with open("nested.jsonl", "w") as file:
    turns = [{"text": "Which shape?"}, {"text": "red square"}]
    file.write(json.dumps({"turns": turns, "picture": {"path": "a.png"}}))
[row] = FileDataset("nested.jsonl", ["problem", "solution"], format="my_format.py:read")
found["A nested data format"] = row.columns["solution"] == "red square" and len(row.images) == 1
weight = torch.nn.Parameter(torch.ones(1))
weight.grad = torch.ones(1)
load_name("my_opt.py:sgd")([weight], 0.25, (0.9, 0.99), 0.0).step()
found["An optimizer"] = weight.item() == 0.75
found["A rollout engine"] = " for 2 prompts" in out.getvalue()
sys.argv = ["my_callback.py", "shapes.yaml", "--stages=[sft]", "--sft.max_steps=45", "--sft.prompts_per_step=1"]
sys.argv += ["--data.eval_rows=0", "--num_threads=1", "--output_dir=stopped"]
with contextlib.redirect_stdout(out):
    try:
        runpy.run_path("my_callback.py", run_name="__main__")
    except SystemExit as stop:
        found["A callback"] = stop.code == 75 and os.listdir("stopped/states") == ["000040"]
with contextlib.redirect_stdout(out):
    load_config("recipes/shapes.yaml", ["--sft.label_smoothing=0.5"])
    refusals = [refusal(load_config, "recipes/shapes.yaml", ["--sft.label_smoothing=1"])]
with open("weighted.jsonl", "w") as file:
    file.write(json.dumps({"problem": "a", "completion": "b", "weight": 0}))
refusals.append(refusal(FileDataset, "weighted.jsonl"))
found["An option"] = "label_smoothing is 1" in refusals[0] and "in [0, 1)" in refusals[0]
found["A data column"] = "column 'weight' is 0" in refusals[1] and SFTTrainer.columns(None) == ("weight",)
fluent = get_reward("recipes/fluent.py:fluent(path='run/checkpoint')")
both, alone = fluent(["red", "green square"]), fluent(["green square"])
found["recipes/fluent.py"] = both[1] < 0 and abs(both[1] - alone[0]) < 1e-5
found["A reward with a name"] = get_reward("one_line")(["a", "b" + chr(10)]) == [1, 0]
path = "run/checkpoint/config.json"
config = json.load(open(path))
json.dump(config | {"model_type": "my_vl"}, open(path, "w"))
found["A model family"] = load_model("run/checkpoint").config.model_type == "my_vl"
print(json.dumps({name: bool(value) for name, value in found.items()}))
"""


def apply(folder, diff):
    """Apply a diff: "+++" writes a new file, and "---" replaces the lines of a file that begin with "-" or a blank."""
    for hunk in filter(None, re.split(r"(?m)^@@\n|^(?=(?:\+\+\+|---) )", diff)):
        if hunk.startswith(("+++ ", "--- ")):
            first, _, hunk = hunk.partition("\n")
            path = folder / first[4:]
            assert path.exists() == (first[0] == "-"), first
        old, new = ("".join(f"{x[1:]}\n" for x in hunk.splitlines() if x[0] in kinds) for kinds in ("- ", "+ "))
        text = path.read_text() if path.exists() else ""
        assert text.count(old) == 1 if old else not text, (path, old)
        path.write_text(text.replace(old, new, 1) if old else new)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """Return a folder with a copy of the package to which all diffs were applied."""
    folder = tmp_path_factory.mktemp("copy")
    for name in ("minivlmrl", "kernels", "recipes"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for diff in DIFFS.values():
        apply(folder, diff)
    return folder


def test_every_diff_can_be_applied(copy):
    assert PAGE.count("```diff") == len(DIFFS)


@pytest.mark.slow
def test_each_diff_does_what_the_page_says(copy):
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CALLS], cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == dict.fromkeys([*DIFFS, "recipes/fluent.py"], True)
