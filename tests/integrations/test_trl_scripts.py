"""The scripts for TRL on docs/public_task.md and docs/trl.md run, and are what benchmarks/public_task.py measured."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
import trl
from links import ROOT
from trl_fixtures import model, write_model

from minivlmrl.__main__ import main
from minivlmrl.commands import task
from minivlmrl.tasks import shapes
from recipes import shapes_reward

PAGES = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("public_task.md", "trl.md")]
# the first script in Python of each page
SCRIPT, OUR_TRAINER = (re.search(r"```python\n(.*?)```", page, re.DOTALL)[1] for page in PAGES)
THEIR_TRAINER = re.search(r"^trl\.GRPOTrainer\(.*\n", SCRIPT, re.MULTILINE)[0]


@pytest.fixture
def folder(tmp_path):
    """A folder like that of `python -m minivlmrl task shapes`, with fewer rows and a tiny untrained model."""
    for split, count in (("train", 32), ("eval", 4)):
        task.write_split(tmp_path, split, shapes.Shapes(count, split))
    shutil.copy(shapes_reward.__file__, tmp_path / "reward.py")
    write_model(tmp_path)
    return tmp_path


def test_the_script_is_what_the_benchmark_measured(folder, monkeypatch):
    """Both give TRL's trainer the same weights, options, processor, rows and reward, but for files and progress."""
    calls, threads = [], []

    class Recorder:
        def __init__(self, model, reward, config, train_dataset, processing_class, callbacks=()):
            options = config.to_dict()
            for name in ("output_dir", "disable_tqdm"):
                del options[name]
            schedule = options["lr_scheduler_kwargs"]  # the benchmark computes lr_end, which is rounded
            options["lr_scheduler_kwargs"] = schedule | {"lr_end": round(schedule["lr_end"], 12)}
            images = [bytes_of(row["images"]) for row in train_dataset]
            columns = [[row[name] for row in train_dataset] for name in ("prompt", "solution")]
            calls.append({
                "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
                "rewards": reward([[{"content": text}] for text in ANSWERS], ["red square"] * len(ANSWERS)),
                "options": options,
                "rows": [columns, images],
                "processor": processing_class.to_dict() | {"template": processing_class.chat_template},
                "padding": [processing_class.tokenizer.padding_side, processing_class.tokenizer.special_tokens_map],
            })  # fmt: skip

        def train(self):
            pass

    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setitem(sys.modules, "reward", shapes_reward)
    monkeypatch.setattr(trl, "GRPOTrainer", Recorder)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    exec(SCRIPT, {"__name__": "script"})
    import public_task

    public_task.train_with_trl(folder, seed=0, options=[])
    printed, measured = calls
    assert threads == [1]
    assert all(weight.dtype == torch.float32 for weight in printed["weights"].values())
    torch.testing.assert_close(printed.pop("weights"), measured.pop("weights"), rtol=0, atol=0)
    assert printed == measured


ANSWERS = ["<think>I see</think><answer>red square</answer>", "red square", "<answer>red square</answer>"]


def bytes_of(images):
    return [(image.size, image.convert("RGB").tobytes()) for image in images]


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    assert main(["task", "shapes", str(folder)]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [THEIR_TRAINER, OUR_TRAINER], ids=["TRL's trainer", "our trainer"])
def test_the_script_trains_and_its_model_is_evaluated(task_folder, tmp_path, trainer, monkeypatch):
    """With two steps instead of 160; the command for the evaluation is also that of the page."""
    folder = shutil.copytree(task_folder, tmp_path / "task")
    script = SCRIPT.replace("max_steps=160", "max_steps=2").replace("warmup_steps=5", "warmup_steps=0")
    (folder / "script.py").write_text(script.replace(THEIR_TRAINER, trainer))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "script.py"], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    weights = [dict(model(folder / name).named_parameters()) for name in ("model", "out/model")]
    assert max((weights[0][name] - weights[1][name]).abs().max() for name in weights[0]) > 1e-4
    [command] = re.findall(r"python -m minivlmrl (evaluate .*)", PAGES[0])
    monkeypatch.chdir(folder)
    assert main(command.split()) == 0
