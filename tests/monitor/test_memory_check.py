"""Test that a run that needs too much disk space is refused."""

import re
import shutil
from types import SimpleNamespace

import pytest

from minivlmrl.config.loading import load_config
from minivlmrl.distributed.process_group import World
from minivlmrl.json_files import read_json
from minivlmrl.model import config_json
from minivlmrl.monitor.memory.estimate import MemoryEstimator, MemoryQuestion, state_bytes
from minivlmrl.monitor.memory.memory_check import MemoryCheck
from minivlmrl.run.callbacks import default_callbacks
from minivlmrl.run.loop import run_training


def test_only_recipes_with_a_checkpoint_are_checked(checkpoint, home):
    given = [f"--model.path={checkpoint}", "--model.config=null"]
    for options in ([*given, "--check_memory=false"], []):
        callbacks = default_callbacks(load_config(home / "recipe.yaml", options))
        assert callbacks and not any(isinstance(callback, MemoryCheck) for callback in callbacks)
    assert any(isinstance(x, MemoryCheck) for x in default_callbacks(load_config(home / "recipe.yaml", given)))


def test_a_run_whose_states_do_not_fit_on_the_disk_is_refused(checkpoint, home, tmp_path, monkeypatch):
    """A run in a folder with states replaces them, so it needs no further space."""
    folder = tmp_path / "run"
    given = ["--model.config=null", "--stages=[sft]", "--state_steps=2", f"--output_dir={folder}"]
    run = load_config(home / "recipe.yaml", [*given, f"--model.path={checkpoint}", "--data.eval_rows=1"])
    run_training(run)
    estimator = MemoryEstimator(config_json.from_dict(read_json(checkpoint / "config.json")))
    size, weights = state_bytes(MemoryQuestion(run, "sft", estimator)), estimator.parameters * 4
    for state in folder.glob("states/*"):
        assert sum(file.stat().st_size for file in state.glob("*.safetensors")) == pytest.approx(size, rel=0.1)
    assert (folder / "checkpoint" / "model.safetensors").stat().st_size == pytest.approx(weights, rel=0.1)
    message = r"sft writes \S+ GB of states and weights, but only \S+ GB are free for \S+/new/run\."

    def is_refused(output, free):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        run.output_dir = str(tmp_path / output)
        try:
            MemoryCheck().on_setup(run, World())
        except ValueError as error:
            assert re.match(message, str(error))
            return True
        return False

    # the run needs space for three training states and the final weights
    assert is_refused("new/run", 3 * size + 0.9 * weights) and not is_refused("new/run", 3 * size + 1.1 * weights)
    assert not is_refused("run", 0)
    run.state_steps = run.state_minutes = 0
    assert is_refused("new/run", 0.9 * weights) and not is_refused("new/run", 1.1 * weights)
