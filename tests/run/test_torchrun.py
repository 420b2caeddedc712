"""Test runs under torchrun: a dead rank, a restart, and a signal from a scheduler."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml

from minivlmrl.commands.train import train_recipe
from tests.helpers.links import ROOT
from tests.helpers.runs import metrics
from tests.helpers.tiny import RUN_MODEL, recipe

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("default_signals")]
STAGE = {"max_steps": 6, "prompts_per_step": 4, "micro_batch_size": 2, "learning_rate": 3e-3}
DATA = {"task": "shapes(demonstrations=8)", "eval_rows": 2}
RECIPE = recipe(STAGE, stages=["sft"], timeout=20, data=DATA)
# in the first attempt, rank 1 runs ACTION in its fourth backward pass
SCRIPT = """
import os, signal, sys, traceback
import torch
from minivlmrl.commands.train import main

calls, original = [], torch.Tensor.backward

def backward(loss, **options):
    calls.append(1)
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], len(calls)) == ("1", "0", 4):
        ACTION
    original(loss, **options)

torch.Tensor.backward = backward
main(sys.argv[1:])
"""


@pytest.fixture
def torchrun(tmp_path):
    (tmp_path / "model.json").write_text(json.dumps(RUN_MODEL))
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))

    def torchrun(*options, action="pass", launcher=()):
        (tmp_path / "script.py").write_text(SCRIPT.replace("ACTION", action))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *launcher]
        command += [tmp_path / "script.py", tmp_path / "recipe.yaml", f"--output_dir={tmp_path / 'run'}", *options]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True, start_new_session=True)

    return torchrun


def test_a_dead_rank_leads_to_a_restart_that_resumes(torchrun, tmp_path):
    action = "os.kill(os.getpid(), signal.SIGKILL)"
    process = torchrun("--state_steps=1", "--resume=auto", action=action, launcher=["--max-restarts=1"])
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors[-3000:]
    assert "states/000003: 3 steps of sft done" in out
    train_recipe([str(tmp_path / "recipe.yaml"), f"--output_dir={tmp_path / 'alone'}"])
    two = metrics(tmp_path / "run")
    one = metrics(tmp_path / "alone")
    assert [line["step"] for line in two] == list(range(6))
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], rel=1e-4)


@pytest.mark.parametrize(("action", "summary"), [
    ("os.kill(os.getpid(), signal.SIGKILL)", "Signal 9 (SIGKILL) received by PID"),
    ("import time; time.sleep(600)", "did not answer in time"),
])  # fmt: skip
def test_a_lost_rank_is_told_in_one_sentence(torchrun, action, summary):
    process = torchrun("--state_steps=1", "--timeout=4", action=action)
    try:
        _, errors = process.communicate(timeout=90)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0
    sentence = "rank 0 lost the connection to another rank, which ended or did not answer in time ("
    assert any(line.startswith(sentence) for line in errors.splitlines()), errors[-3000:]
    assert summary in errors.partition("Root Cause")[2], errors[-3000:]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_torchrun_saves_the_state(torchrun, tmp_path, number):
    """A scheduler sends SIGTERM only to torchrun; a terminal sends SIGINT also to the ranks."""
    process = torchrun("--sft.max_steps=100000")
    written = tmp_path / "run" / "metrics.jsonl"
    while not (written.is_file() and written.read_text()):
        time.sleep(0.05)
        assert process.poll() is None, process.communicate()[1][-3000:]
    (os.kill if number == signal.SIGTERM else os.killpg)(process.pid, number)
    out, errors = process.communicate(timeout=40)
    assert process.returncode != 0
    [state] = (tmp_path / "run" / "states").glob("0*")
    assert (state / "complete.json").is_file()
    assert f" in {state}: continue with --resume=auto" in out, errors[-3000:]
    assert f"{number.name}: the run stops as soon as possible, and saves a state" in errors
    assert "KeyboardInterrupt" not in errors
