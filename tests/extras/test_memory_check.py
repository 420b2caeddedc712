"""Test that a run that needs too much memory is refused, with options that make the run fit."""

import re
import shutil
from types import SimpleNamespace

import PIL.Image
import pytest
import torch

from minivlmrl.config.loading import load_config
from minivlmrl.distributed.process_group import World
from minivlmrl.extras.memory.estimate import (
    GB,
    MemoryEstimator,
    MemoryQuestion,
    estimate_phases,
    peak_bytes,
    state_bytes,
)
from minivlmrl.extras.memory.memory_check import MemoryCheck, cause
from minivlmrl.json_files import read_json
from minivlmrl.model import config_json
from minivlmrl.run import setup
from minivlmrl.run.callbacks import default_callbacks
from minivlmrl.run.loop import run_training
from minivlmrl.trainers.registry import find_trainers
from tests.helpers.runs import write_lines


def refusal_of(options, home, free, monkeypatch, check=None):
    check = check or MemoryCheck()
    world = World(device=torch.device("cuda", 0))
    run = load_config(home / "recipe.yaml", ["--model.config=null", "--data.task=null", "--stages=[grpo]", *options])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free), 10**12))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(setup, "build_weights", None)  # a call of None raises TypeError
    try:
        setup.prepare(run, find_trainers(run), world, [check])
    except ValueError as error:
        return str(error)
    except TypeError:
        return None


LARGE = {
    "image": ({"image": "large.png"}, r"an image of 2000 x 1500 pixels", ("--data.max_pixels=", "")),
    "video": (
        {"video": ["frame.png"] * 60},
        r"a video of 60 frames of 640 x 480",
        ('"--data.video={max_pixels: ', '}"'),
    ),
}


@pytest.mark.parametrize("kind", LARGE)
@pytest.mark.usefixtures("cached_activations")
def test_a_large_row_is_refused_with_a_cure_that_fits(kind, checkpoint, home, tmp_path, monkeypatch):
    columns, media, (option, end) = LARGE[kind]
    PIL.Image.new("L", (2000, 1500)).save(tmp_path / "large.png")
    PIL.Image.new("L", (640, 480)).save(tmp_path / "frame.png")
    small = {"problem": "a", "solution": "b"}
    write_lines(tmp_path / "rows.jsonl", [small, small | columns, small])
    files = [f"--data.train_file={tmp_path / 'rows.jsonl'}", f"--model.path={checkpoint}"]
    write_lines(tmp_path / "held_out.jsonl", [small])
    files += [f"--data.eval_file={tmp_path / 'held_out.jsonl'}", "--data.eval_rows=1"]
    files += ["--grpo.micro_batch_size=2", "--grpo.prompts_per_step=2"]
    fitting = MemoryCheck()
    assert refusal_of(files, home, 1e12, monkeypatch, fitting) is None
    needed = peak_bytes(estimate_phases(fitting.plans["grpo"][0])) / GB  # the memory for the measured rows
    assert needed > 3.1  # 3 GB are kept in reserve
    free = (3 + needed) / 2 * GB
    message = refusal_of(files, home, free, monkeypatch)
    assert f"needs about {needed:.1f} GB" in message
    assert re.search(rf"rows\.jsonl:2, with a prompt of [\d,]+ tokens, of which [\d,]+ show {media}", message)
    pixels = re.search(rf"The stage fits with {re.escape(option)}(\d+){end}\. ", message)[1]
    cured, not_cured = (f"{option}{n}{end}".strip('"') for n in (pixels, 2 * int(pixels)))
    assert refusal_of([*files, cured], home, free, monkeypatch) is None
    assert refusal_of([*files, not_cured], home, free, monkeypatch)  # not far too small
    *cures, _ = re.search(r"Try (.*)\. docs/", message)[1].split(", then ")
    assert cures[:2] == ["--model.activation_checkpointing=true", "--grpo.micro_batch_size=1"]
    assert refusal_of([*files, *cures], home, free, monkeypatch) is None
    # without the large row, the run fits
    write_lines(tmp_path / "rows.jsonl", [small, small])
    assert refusal_of(files, home, free, monkeypatch) is None


@pytest.mark.parametrize(("phase", "largest", "found"), [
    ("rollout", "gathered", "gathered"), ("train", "gathered", "forward"), ("train", "gradients", "gradients"),
    ("score", "reference", "weights"), ("evaluation", "keys and values", "evaluation"),
])  # fmt: skip
def test_the_cause_is_the_largest_item(phase, largest, found):
    items = dict.fromkeys(("weights", "optimizer", "gradients", "gathered", "keys and values"), 1.0)
    assert cause(phase, items | {largest: 2.0}) == found


def test_only_recipes_with_a_checkpoint_are_checked(checkpoint, home):
    given = [f"--model.path={checkpoint}", "--model.config=null"]
    for options in ([*given, "--check_memory=false"], []):
        callbacks = default_callbacks(load_config(home / "recipe.yaml", options))
        assert callbacks and not any(isinstance(callback, MemoryCheck) for callback in callbacks)
    assert any(isinstance(x, MemoryCheck) for x in default_callbacks(load_config(home / "recipe.yaml", given)))


def test_a_run_whose_checkpoints_do_not_fit_on_the_disk_is_refused(checkpoint, home, tmp_path, monkeypatch):
    """Earlier checkpoints in the folder of the run count as free space."""
    folder = tmp_path / "run"
    given = ["--model.config=null", "--stages=[sft]", "--state_steps=2", f"--output_dir={folder}"]
    run = load_config(home / "recipe.yaml", [*given, f"--model.path={checkpoint}", "--data.eval_rows=1"])
    run_training(run)
    estimator = MemoryEstimator(config_json.from_dict(read_json(checkpoint / "config.json")))
    size, weights = state_bytes(MemoryQuestion(run, "sft", estimator)), estimator.parameters * 4
    for state in folder.glob("states/*"):
        assert sum(file.stat().st_size for file in state.glob("*.safetensors")) == pytest.approx(size, rel=0.1)
    assert (folder / "checkpoint" / "model.safetensors").stat().st_size == pytest.approx(weights, rel=0.1)
    sizes = r"sft writes \S+ GB of training states and \S+ GB of weights, but only \S+ GB are free for \S+/new/run\."

    def is_refused(output, free):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        run.output_dir = str(tmp_path / output)
        try:
            MemoryCheck().on_setup(run, World())
        except ValueError as error:
            assert re.match(sizes, str(error))
            return True
        return False

    # the run needs space for three training states and the final weights
    assert is_refused("new/run", 3 * size + 0.9 * weights) and not is_refused("new/run", 3 * size + 1.1 * weights)
    assert not is_refused("run", 1.1 * size + 1.1 * weights)  # the folder already has two states and weights
    # with save_steps, new weights are written beside the earlier weights
    run.save_steps = 1
    assert is_refused("new/run", 3 * size + 1.9 * weights) and not is_refused("new/run", 3 * size + 2.1 * weights)
    run.state_steps = run.state_minutes = 0
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1.9 * weights))
    run.adapter.r = 2
    with pytest.raises(ValueError, match="set save to adapter, or skip"):
        MemoryCheck().on_setup(run, World())
    run.save = "adapter"
    MemoryCheck().on_setup(run, World())
