"""Trackers get what metrics.jsonl and evaluations.jsonl say; a run without their packages names the extra."""

import json
import math
import shutil
import sys
from importlib.machinery import PathFinder
from types import SimpleNamespace

import pytest
import torch
from runs import LETTERS, metrics

from minivlmrl.run import trackers as file
from minivlmrl.run.config import RunConfig
from minivlmrl.run.metrics import MetricsLog
from minivlmrl.run.resume import Progress

pytest.importorskip("tensorboard", reason="extra missing: pip install tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from stages import ONE

# what minivlmrl calls of wandb: writes it down in the folder of the run
WANDB = """
import json, pathlib
class Run:
    def __init__(self, **settings):
        self.file = (pathlib.Path(settings["dir"]) / "said.jsonl").open("w")
        self.say("init", settings)
    def say(self, *what):
        self.file.write(json.dumps(what) + chr(10))
    def log(self, values, step):
        self.say(step, values)
    def finish(self):
        self.say("finish")
        self.file.close()
def init(**settings):
    return Run(**settings)
"""
STEPS = ("--sft.max_steps=2", "--grpo.max_steps=2")
OPTIONS = ("--stages=[sft, grpo]", "--eval_steps=2", LETTERS, *STEPS)


def curves(folder):
    """Name -> [(step, value), ...] in the event files of a run."""
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def expected(folder):
    """The same from metrics.jsonl and evaluations.jsonl; grpo follows two steps of sft."""
    found, before = {}, {"sft": 0, "grpo": 2}
    for prefix, lines, offset in (("", metrics(folder), 1), ("eval/", metrics(folder, "evaluations.jsonl"), 0)):
        for line in lines:
            step = before[line.pop("stage")] + line.pop("step") + offset
            for name, value in line.items():
                found.setdefault(prefix + name, []).append((step, pytest.approx(value, rel=1e-6)))
    return found


@pytest.mark.usefixtures("plain", "lively")
def test_tensorboard_has_what_the_files_say_also_of_a_resumed_run(run):
    folder = run(*OPTIONS, "--report_to=[tensorboard]", "--state_steps=1")
    assert curves(folder) == expected(folder)
    assert [step for step, _ in curves(folder)["eval/sampled"]] == [0, 2, 4]
    shutil.rmtree(folder / "states" / "000004")
    run(*OPTIONS, "--report_to=[tensorboard]", "--state_steps=1", "--resume=auto")
    assert curves(folder) == expected(folder)
    run("--stages=[sft]", "--sft.max_steps=1", "--report_to=[tensorboard]", "--resume=never")
    assert curves(folder) == expected(folder)  # nothing of the run before


@pytest.mark.usefixtures("plain", "lively")
def test_wandb_has_what_the_files_say(run, monkeypatch, tmp_path):
    (tmp_path / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    folder = run(*OPTIONS, "--report_to=[wandb]")
    monkeypatch.delitem(sys.modules, "wandb")
    first, *said, last = [json.loads(line) for line in (folder / "said.jsonl").read_text().splitlines()]
    assert first[1]["project"] == "minivlmrl" and first[1]["name"] == "run" and first[1]["config"]["seed"] == 0
    assert last == ["finish"] and [step for step, _ in said] == sorted(step for step, _ in said)
    found = {}
    for step, values in said:
        for name, value in values.items():
            found.setdefault(name, []).append((step, value))
    assert found == expected(folder)


def test_what_is_no_number_is_left_out_and_names_have_no_spaces(tmp_path):
    said = []
    log = MetricsLog(RunConfig(output_dir=str(tmp_path)), ONE, Progress(0, ["sft"], "", steps=4))
    log.trackers = [lambda *arguments: said.append(arguments)]
    algorithm = SimpleNamespace(stage="sft", config=SimpleNamespace(max_steps=9), run=RunConfig())
    algorithm.trained = torch.nn.Module()
    log.stage(algorithm, None, 4)
    log.step(4, {"reward": math.nan, "loss": 1.5}, SimpleNamespace(micro_batches=[], rollout=None))
    log.evaluation("sft", 5, {"iou greedy": 0.5}, 0.0)
    assert said == [({"loss": 1.5}, 5), ({"eval/iou_greedy": 0.5}, 5)]


@pytest.mark.parametrize("name", sorted(file.TRACKERS))
def test_a_missing_package_is_named_before_anything_is_loaded(run, tmp_path, monkeypatch, name):
    """A folder of this name, as wandb leaves it where a run was started, is no package."""
    (tmp_path / name).mkdir()
    monkeypatch.setattr(file.importlib.util, "find_spec", lambda name: PathFinder.find_spec(name, [str(tmp_path)]))
    with pytest.raises(ValueError, match=rf"^report_to: {name} is not installed; pip install 'minivlmrl\[{name}\]'$"):
        file.check_trackers([name])
    with pytest.raises(ValueError, match=rf"^report_to: {name} is not installed"):
        run(f"--report_to=[{name}]")
