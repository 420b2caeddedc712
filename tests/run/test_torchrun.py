"""Test runs under torchrun: a dead rank, a restart, and a signal from a scheduler."""

import contextlib
import json
import os
import re
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
# in the first attempt, rank 1 runs ACTION in its fourth backward
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

# rank 1 is killed in PHASE during the third step, which is the first step after states/000002 has been written
KILLED = """
import contextlib, os, signal, sys, threading, time
from pathlib import Path
import torch
from minivlmrl.commands.train import main
from minivlmrl.generation.sampler import Sampler
from minivlmrl.run import checkpoints

rank = int(os.environ["RANK"])
folder = Path([text for text in sys.argv if text.startswith("--output_dir=")][-1].partition("=")[2])

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def patch(owner, name, before=None, after=None):
    original = getattr(owner, name)

    def patched(*arguments, **options):
        is_third = (folder / "states" / "000002").is_dir()
        if is_third and before is not None:
            before()
        result = original(*arguments, **options)
        if is_third and after is not None:
            after()
        return result

    setattr(owner, name, patched)

def await_end_of_rank_1():
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(int(process_id.read_text()), 0)
            time.sleep(0.1)

process_id = folder.with_suffix(".pid")
if rank == 1:
    process_id.write_text(str(os.getpid()))
if "PHASE" == "waiting":
    if rank == 0:
        patch(Sampler, "__call__", before=await_end_of_rank_1)
    if rank == 1:
        patch(Sampler, "__call__", before=lambda: threading.Timer(1, kill).start())
elif rank == 1:
    if "PHASE" == "sampling":
        patch(Sampler, "record_tokens", after=kill)
    if "PHASE" == "backward":
        patch(torch.Tensor, "backward", after=kill)
    if "PHASE" == "saving":
        patch(checkpoints, "write_tensors", after=kill)
main(sys.argv[1:])
"""
PHASES = ("sampling", "waiting", "backward", "saving")


@pytest.fixture
def torchrun(tmp_path):
    """Return a function that starts a recipe on two ranks under torchrun."""
    (tmp_path / "model.json").write_text(json.dumps(RUN_MODEL))
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))

    def torchrun(*options, action="pass", launcher=(), script=SCRIPT):
        (tmp_path / "script.py").write_text(script.replace("ACTION", action))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *launcher]
        command += [tmp_path / "script.py", tmp_path / "recipe.yaml", f"--output_dir={tmp_path / 'run'}", *options]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True, start_new_session=True)

    return torchrun


def test_a_dead_rank_leads_to_a_restart_that_resumes(torchrun, tmp_path):
    action = "os.kill(os.getpid(), signal.SIGKILL)"
    process = torchrun("--checkpoint_steps=1", "--resume=auto", action=action, launcher=["--max-restarts=1"])
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors[-3000:]
    assert "states/000003: 3 steps of sft are done" in out
    train_recipe([str(tmp_path / "recipe.yaml"), f"--output_dir={tmp_path / 'alone'}"])
    two = metrics(tmp_path / "run")
    one = metrics(tmp_path / "alone")
    assert [line["step"] for line in two] == list(range(6))
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], rel=1e-4)


@pytest.mark.parametrize(("action", "named", "summary"), [
    ("os.kill(os.getpid(), signal.SIGKILL)", "a rank", "Signal 9 (SIGKILL) received by PID"),
    ("import time; time.sleep(600)", "rank 1", "did not answer in time"),
])  # fmt: skip
def test_a_lost_rank_is_named_in_one_sentence(torchrun, action, named, summary):
    """Rank 1 is dead or hangs; rank 0 ended with a gloo traceback. torchrun's summary names a dead rank."""
    process = torchrun("--checkpoint_steps=1", "--timeout=4", action=action)
    try:
        _, errors = process.communicate(timeout=90)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0
    sentence = f"{named} ended or did not answer in time, so rank 0 ends too; look for an earlier error of that rank"
    assert any(line.startswith(sentence) for line in errors.splitlines()), errors[-3000:]
    assert "gloo" not in errors and summary in errors.partition("Root Cause")[2], errors[-3000:]


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
    assert f"preempted: the steps before this are saved in {state}: continue" in out, errors[-3000:]
    assert f"{number.name}: the run saves a checkpoint as soon as possible" in errors
    assert "KeyboardInterrupt" not in errors


def test_a_rank_that_is_killed_in_any_phase_costs_no_bytes(torchrun, tmp_path):
    """Torchrun ends the job and names rank 1 and its signal; a resumed run has the bytes of an uninterrupted run."""
    options = ["--stages=[grpo]", "--grpo.max_steps=4", "--grpo.prompts_per_step=4", "--grpo.num_generations=2",
               "--data.eval_rows=1", "--sharding.enabled=true", "--checkpoint_steps=1", "--resume=auto"]  # fmt: skip
    results = {}
    for phase in ("none", *PHASES):
        folder = tmp_path / phase
        arguments = {"launcher": ["--nproc_per_node=4"], "script": KILLED.replace("PHASE", phase)}
        process = torchrun(*options, f"--output_dir={folder}", **arguments)
        begin = time.monotonic()
        try:
            _, errors = process.communicate(timeout=150)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        print(f"{phase}: the job ended after {time.monotonic() - begin:.0f} s")
        if phase != "none":
            assert process.returncode != 0 and not (folder / "checkpoint").exists(), phase
            told = errors[errors.rindex("Root Cause") :]
            assert re.search(r"rank +: 1 ", told) and "Signal 9 (SIGKILL)" in told, (phase, told)
            assert [path.name for path in sorted(folder.glob("states/0*[0-9]"))] == ["000001", "000002"], phase
            process = torchrun(*options, f"--output_dir={folder}", launcher=["--nproc_per_node=4"])
            _, errors = process.communicate(timeout=150)
        assert process.returncode == 0, (phase, errors[-3000:])
        files = ("checkpoint/model.safetensors", "completions.jsonl")
        results[phase] = [(folder / name).read_bytes() for name in files]
    for phase in PHASES:
        assert results[phase] == results["none"], phase
