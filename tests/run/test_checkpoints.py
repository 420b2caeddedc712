"""Runs that are killed and resumed end with the bytes of one that was not; states that are hurt are not trusted."""

import contextlib
import errno
import functools
import gc
import itertools
import json
import os
import pickle
import shutil
import signal
import socket
import time
from pathlib import Path

import PIL.Image
import pytest
import torch
import tqdm
from children import exit_code, fork
from on_ranks import ONE, eager
from runs import leave_out, write_lines
from safetensors.torch import load, load_file, save_file

from minivlmrl.agents import tool_sampler
from minivlmrl.commands.train import train_recipe
from minivlmrl.config.options import RunConfig
from minivlmrl.data.loader import shuffled
from minivlmrl.data.processor import Processor
from minivlmrl.files import locked
from minivlmrl.generation import generate
from minivlmrl.model import checkpoint as checkpoint_file
from minivlmrl.rewards.registry import REWARDS
from minivlmrl.run import checkpoint_files, loop
from minivlmrl.run import checkpoints as resume_file
from minivlmrl.run import evaluate as evaluate_file
from minivlmrl.run.checkpoint_files import find_pieces
from minivlmrl.run.metrics import MetricsLog
from minivlmrl.run.signals import PREEMPTED
from minivlmrl.run.trainer_state import TrainerState
from minivlmrl.trainers import dpo as dpo_file

import tiny
from stages import write_recipe

pytestmark = pytest.mark.usefixtures("default_signals")
STAGE = {"max_steps": 6, "prompts_per_step": 4, "micro_batch_size": 2, "learning_rate": 3e-3}
RECIPE = tiny.recipe(
    STAGE,
    stages=["grpo"],
    timeout=30,
    data={"task": "shapes(demonstrations=10, pairs=10)", "eval_rows": 2},
    rewards={"letters": 1.0},
    # rollouts of two steps that are gone through twice
    grpo={
        "num_iterations": 2, "steps_per_generation": 2, "beta": 0.1, "top_entropy_quantile": 0.5,
        "rollout_correction": "token_truncate",
    },
    ppo={"num_mini_batches": 2, "num_ppo_epochs": 2},
)  # fmt: skip


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    write_recipe(folder, RECIPE)
    return folder / "recipe.yaml"


@pytest.fixture(scope="module", autouse=True)
def lively():
    """Let an untrained model earn different rewards at different lengths."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(REWARDS, "letters", "on_ranks:letters")
        patch.setattr(Processor, "stop_token_ids", property(lambda self: tuple(range(7, len(self.tokenizer), 8))))
        leave_out(patch)
        patch.setattr(tool_sampler, "find_calls", eager)
        patch.setattr(tool_sampler.ToolEpisode, "closes_a_call", lambda *_: True)
        patch.setattr(tqdm.tqdm, "monitor_interval", 0)  # its thread would not live on in a forked child
        yield


def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def counted(owner, name, number, before=lambda *_: None, after=lambda *_: None):
    """Do something around the number-th call of a function, counted from 1."""
    original, calls = getattr(owner, name), []

    @functools.wraps(original)
    def call(*arguments, **options):
        calls.append(1)
        if len(calls) == number:
            before(*arguments)
        result = original(*arguments, **options)
        if len(calls) == number:
            after(*arguments)
        return result

    setattr(owner, name, call)


PLACES = {
    "in a rollout": (generate, "inverse_cdf", {"before": kill}),
    "in backward": (torch.Tensor, "backward", {"after": kill}),
    "in the optimizer": (torch.optim.AdamW, "step", {"after": kill}),
    "when metrics are written": (MetricsLog, "step", {"after": kill}),
    "before the tensors of a state": (checkpoint_files, "save_tensors", {"before": kill}),
    "after the tensors of a state": (checkpoint_files, "save_tensors", {"after": kill}),
    "before the rename": (Path, "rename", {"before": kill}),
    "between the rename and the cleanup": (resume_file, "flush_file", {"after": kill}),
    "in the cleanup": (shutil, "rmtree", {"before": kill}),
    "in the precomputing": (dpo_file, "pair_key", {"before": kill}),
    "while resuming": (resume_file.CheckpointManager, "restore", {"after": kill}),
}


def attempt(recipe, output, *options, ranks=1, die=None, number=1, rank=None):
    """Train in forked children, one a rank; their exit codes, negative for signals.

    Args:
        die: the place where `rank`, by default all of them, is killed at the number-th time.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def begin(me):
        gc.freeze()  # a process group of the parent, whose threads a fork does not have, must not be collected
        os.environ.update(RANK=str(me), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        if die and rank in (None, me):
            owner, name, moment = PLACES[die]
            counted(owner, name, number, **moment)
        return train_recipe([str(recipe), f"--output_dir={output}", *options])

    children = [fork(functools.partial(begin, me)) for me in range(ranks)]
    return [exit_code(child) for child in children]


def states(output):
    """Names of the states that a run has."""
    return sorted(path.name for path in (output / "states").iterdir())


def outcome(output):
    """What a run leaves that must not depend on when it was killed."""
    summary = json.loads((output / "summary.json").read_text())
    summary.pop("seconds")
    saved = [*output.glob("checkpoint/*.safetensors"), *output.glob("best/checkpoint/*.safetensors")]
    weights = {str(file.relative_to(output)): file.read_bytes() for file in sorted(saved)}
    names = "metrics", "warnings", "evaluations", "completions"
    logs = {name: (output / f"{name}.jsonl").read_text() for name in names if (output / f"{name}.jsonl").exists()}
    return {**logs, "summary": summary} | weights


@pytest.fixture(scope="module")
def straight(recipe):
    """The outcome of a run that is never stopped and writes no states, each made once."""

    @functools.cache
    def straight(*options, ranks=1):
        output = recipe.parent / f"straight-{len(list(recipe.parent.iterdir()))}"
        assert attempt(recipe, output, *options, ranks=ranks) == [0] * ranks
        assert not (output / "states").exists()
        return outcome(output)

    return straight


STATES = ["--checkpoint_steps=2", "--resume=auto"]
DROPOUT = ["--adapter.r=4", "--adapter.dropout=0.3"]
BEST = "--best_metric=eval/accuracy_sampled"
KILLS = {  # two micro-batches a step; a rollout of grpo is four steps, and its state comes with the last
    "grpo": (["--grpo.max_steps=8"], [("in backward", 9), ("in a rollout", 3), ("in the optimizer", 2)]),
    "sft": (["--optimizer.name=adamw_8bit", "--sft.max_steps=8", "--eval_steps=3", BEST], [
        ("before the tensors of a state", 1), ("after the tensors of a state", 1), ("before the rename", 1),
        ("between the rename and the cleanup", 4), ("while resuming", 1), ("in backward", 3), ("before the rename", 1),
        ("in the cleanup", 2),
    ]),
    "dpo": (["--dpo.precompute_ref_log_probs=true", *DROPOUT, "--optimizer.name=torch.optim:NAdam"], [
        ("in the precomputing", 2), ("when metrics are written", 3), ("in backward", 3),
    ]),
    "sft, grpo": (["--sft.max_steps=1", "--sampling.environment=on_ranks:Eye", "--sampling.history=1",
                   "--sampling.max_new_tokens=20", "--grpo.max_steps=8", "--log_completions=1"], [
        ("in a rollout", 40), ("in the optimizer", 3),
    ]),
    "sft, ppo": (["--sft.max_steps=2", "--ppo.critic=separate"], [("in the optimizer", 4), ("in the optimizer", 5)]),
    "sft, reward_model": ([], [("in backward", 20)]),
    "grpo, sft": (["--model.config=FOLDER/qwen3_5.json"], [("in the optimizer", 4)]),
    "grpo, dpo": (["--model.config=FOLDER/qwen3_vl_moe.json", "--dpo.max_steps=1"], [("in the optimizer", 4)]),
}  # fmt: skip


@pytest.mark.parametrize(
    "stages", [pytest.param(name, marks=[pytest.mark.slow] * (number > 3)) for number, name in enumerate(KILLS)]
)
def test_a_run_killed_anywhere_ends_like_one_that_was_not(recipe, straight, tmp_path, stages):
    options, kills = KILLS[stages]
    options = [f"--stages=[{stages}]", *(option.replace("FOLDER", str(recipe.parent)) for option in options)]
    for die, number in kills:
        assert attempt(recipe, tmp_path, *options, *STATES, die=die, number=number) == [-signal.SIGKILL], die
    assert attempt(recipe, tmp_path, *options, *STATES) == [0]
    assert outcome(tmp_path) == straight(*options)
    assert len(states(tmp_path)) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "attempts"), [("grpo", [(2, 3), (4, 2)]), ("dpo", [(1, 2), (2, 2)])])
def test_another_number_of_ranks_resumes(recipe, straight, tmp_path, stages, attempts):
    """2 ranks that share the weights, others with all of them each, at the end 1; killed in the middle of a rollout."""
    options = [f"--stages=[{stages}]", "--model.dtype=float64", "--data.eval_rows=1"]
    options += ["--dpo.precompute_ref_log_probs=true"] * (stages == "dpo")
    for ranks, steps in attempts:
        more = [f"--sharding.enabled={str(ranks == 2).lower()}", "--checkpoint_steps=1", "--resume=auto"]
        die = "when metrics are written"
        assert -signal.SIGKILL in attempt(recipe, tmp_path, *options, *more, ranks=ranks, die=die, number=steps)
    assert attempt(recipe, tmp_path, *options, *STATES) == [0]
    found, expected = outcome(tmp_path), straight(*options)
    for line, other in zip(*(map(json.loads, x["metrics"].splitlines()) for x in (found, expected)), strict=True):
        assert line.pop("stage") == other.pop("stage")
        assert line == pytest.approx(other, rel=1e-6, abs=1e-9)
    weights = [load(result["checkpoint/model.safetensors"]) for result in (found, expected)]
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_timeout_is_how_long_a_rank_waits_for_another(recipe, tmp_path):
    PLACES["hanging"] = (torch.Tensor, "backward", {"before": lambda *_: time.sleep(6)})
    options = ["--stages=[sft]", "--sft.max_steps=1", "--timeout=3"]
    assert attempt(recipe, tmp_path, *options, ranks=2, die="hanging", rank=1) == [1, 1]  # with the recipe's 30: [0, 0]


@pytest.mark.slow
def test_a_save_may_take_longer_than_timeout(recipe, tmp_path, monkeypatch):
    """Of a state, and of the checkpoint."""
    for owner in (checkpoint_files, checkpoint_file):

        def slow(*arguments, save=owner.save_tensors, **options):
            time.sleep(5 if os.environ["RANK"] == "0" else 0)
            return save(*arguments, **options)

        monkeypatch.setattr(owner, "save_tensors", slow)
    options = ["--stages=[sft]", "--sft.max_steps=1", "--timeout=3", "--checkpoint_steps=1"]
    assert attempt(recipe, tmp_path, *options, ranks=2) == [0, 0]


def test_a_signal_ends_the_run_after_its_rollout_with_a_state(recipe, straight, tmp_path):
    """One rank gets two signals in the second step; a rollout is four steps and checkpoint_steps is 0."""
    PLACES["signal"] = (MetricsLog, "step", {"before": lambda *_: [os.kill(os.getpid(), signal.SIGTERM) for _ in "12"]})
    assert attempt(recipe, tmp_path, ranks=2, die="signal", number=2, rank=1) == [PREEMPTED] * 2
    assert states(tmp_path) == ["000004"]
    assert attempt(recipe, tmp_path, "--resume=auto", ranks=2) == [0, 0]
    assert outcome(tmp_path) == straight(ranks=2)


@pytest.mark.parametrize(("options", "backward", "kept"), [
    (["--stages=[sft]", "--sft.micro_batch_size=1", "--eval_steps=1", BEST], 5, "000002"),
    (["--grpo.micro_batch_size=1"], 9, "000004"),
    (["--stages=[sft, grpo]", "--sft.max_steps=2", "--data.eval_rows=1", "--grpo.micro_batch_size=1"], 3, "000002"),
], ids=["sft", "a rollout of four steps", "the first of a stage"])  # fmt: skip
def test_a_signal_within_a_step_is_obeyed_after_its_micro_batch(recipe, straight, tmp_path, options, backward, kept):
    """Of two in a step; with weights as at the step's begin. What was evaluated with these is there once."""
    signalled = {"after": lambda *_: os.kill(os.getpid(), signal.SIGTERM)}
    PLACES["signal"] = (torch.Tensor, "backward", signalled)
    assert attempt(recipe, tmp_path, *options, ranks=2, die="signal", number=backward, rank=1) == [PREEMPTED] * 2
    assert states(tmp_path) == [kept]
    assert attempt(recipe, tmp_path, "--resume=auto", *options, ranks=2) == [0, 0]
    assert outcome(tmp_path) == straight(*options, ranks=2)


INFERENCE_CONFIG = []


def fails_on_the_second_rank(completions, completion_ids, **columns):
    """Fail in the call of a run that FAILS_AT names; the first one tries the reward."""
    INFERENCE_CONFIG.append(1)
    if os.environ["RANK"] == "1" and os.environ["FAILS_AT"] == str(len(INFERENCE_CONFIG)):
        raise KeyError("rank 1")
    return [float(sum(ids) % 7) for ids in completion_ids]


def test_a_reward_that_fails_on_one_rank_ends_all_with_a_state(recipe, straight, tmp_path, monkeypatch, capfd):
    """In the second rollout."""
    monkeypatch.setitem(REWARDS, "letters", fails_on_the_second_rank)
    monkeypatch.setenv("FAILS_AT", "never")
    expected = straight("--checkpoint_minutes=0", ranks=2)
    monkeypatch.setenv("FAILS_AT", "3")
    assert attempt(recipe, tmp_path, "--checkpoint_minutes=0", ranks=2) == [1, 1]  # run_training without the line
    assert capfd.readouterr().err.count("states/000004: fix the cause, then continue with --resume=auto") >= 2
    assert (tmp_path / "states" / "000004" / "complete.json").is_file()
    monkeypatch.setenv("FAILS_AT", "never")
    assert attempt(recipe, tmp_path, "--checkpoint_minutes=0", "--resume=auto", ranks=2) == [0, 0]
    assert outcome(tmp_path) == expected


def test_a_signal_in_the_first_evaluation_ends_the_run_at_once_and_loses_nothing(recipe, straight, tmp_path):
    PLACES["signal"] = (
        evaluate_file,
        "generate_and_score",
        {"before": lambda *_: os.kill(os.getpid(), signal.SIGTERM)},
    )
    options = ["--stages=[sft]", "--sft.max_steps=2", "--checkpoint_minutes=10", "--data.eval_rows=2"]
    assert attempt(recipe, tmp_path, *options, die="signal") == [PREEMPTED]
    assert not (tmp_path / "summary.json").exists()
    assert attempt(recipe, tmp_path, *options, "--resume=auto") == [0]
    assert outcome(tmp_path) == straight(*options[:-2])


SHORT = ["--grpo.max_steps=3", "--grpo.num_iterations=1", "--grpo.steps_per_generation=1"]


@pytest.fixture(scope="module")
def finished(recipe):
    """A short run with its states of steps 2 and 3: each rollout feeds one step."""
    output = recipe.parent / "finished"
    assert attempt(recipe, output, "--checkpoint_steps=1", *SHORT) == [0]
    assert states(output) == ["000002", "000003"]
    return output


@pytest.fixture
def copy(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def resume(recipe, output, *options):
    return train_recipe([str(recipe), f"--output_dir={output}", *SHORT, *options])


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut(file):
    file.write_bytes(file.read_bytes()[:-2])


@pytest.mark.parametrize(
    ("name", "hurt"), [("0000_0000.safetensors", flip), ("run.json", Path.unlink), ("complete.json", cut)]
)
def test_a_damaged_state_is_reported_and_the_one_before_it_used(recipe, copy, capsys, monkeypatch, name, hurt):
    hurt(copy / "states" / "000003" / name)
    monkeypatch.setattr(loop, "train_stage", lambda *_: None)
    resume(recipe, copy, "--resume=auto")
    said = capsys.readouterr().out
    assert "states/000003 is damaged and is ignored" in said
    assert "resuming from" in said and "states/000002: 2 steps of grpo are done" in said
    assert states(copy) == ["000002"]


class Attack:
    def __reduce__(self):
        return os.mkdir, (ATTACKED,)


ATTACKED = "attacked"


def rewrite(state, name, content):
    """Put other bytes into a state, and their checksum too."""
    (state / name).write_bytes(content)
    sums = json.loads((state / "complete.json").read_text()) | {name: resume_file._checksum(state / name)}
    (state / "complete.json").write_text(json.dumps(sums))


@pytest.mark.parametrize("name", ["0000_0000.safetensors", "run.json", ".metadata"])
def test_a_state_cannot_run_code(recipe, copy, tmp_path, monkeypatch, name):
    """Pickles of whoever wrote the folder, in the files of a state and in those of torch.distributed.checkpoint."""
    monkeypatch.chdir(tmp_path)
    rewrite(copy / "states" / "000003", name, pickle.dumps(Attack()))
    shutil.rmtree(copy / "states" / "000002")
    with contextlib.suppress(ValueError):
        resume(recipe, copy, "--resume=auto")
    assert not Path(ATTACKED).exists()
    pickle.loads(pickle.dumps(Attack()))
    assert Path(ATTACKED).exists()


@pytest.mark.parametrize(("change", "message"), [
    ({"results": {"start": {"greedy": "x"}}}, "results.start.greedy is 'x', but it must be of type float"),
    ([], "the file must contain a JSON object"),
])  # fmt: skip
def test_a_state_of_impossible_values_is_damaged(recipe, copy, monkeypatch, capsys, change, message):
    state = copy / "states" / "000003"
    values = json.loads((state / "run.json").read_text())
    rewrite(state, "run.json", json.dumps(values | change if change else change).encode())
    monkeypatch.setattr(loop, "train_stage", lambda *_: None)
    resume(recipe, copy, "--resume=auto")
    assert f"{message}" in capsys.readouterr().out


def test_without_a_whole_state_nothing_is_resumed(recipe, copy):
    for path in (copy / "states").iterdir():
        flip(path / "run.json")
    with pytest.raises(ValueError, match="every checkpoint that it selects is damaged; --resume=never"):
        resume(recipe, copy, "--resume=auto")


@pytest.mark.parametrize("owner, name", [(checkpoint_files, "save_tensors"), (Path, "rename")])
def test_a_full_disk_leaves_the_last_state_as_it_was(recipe, finished, copy, monkeypatch, owner, name):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(arguments[0]))

    shutil.rmtree(copy / "states" / "000003")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        said = r"000003 could not be written .*No space left.*earlier checkpoints are intact"
        with pytest.raises(ValueError, match=said):
            resume(recipe, copy, "--resume=auto", "--checkpoint_steps=1")
    assert states(copy) == ["000002"]
    resume(recipe, copy, "--resume=auto", "--checkpoint_steps=1")
    assert outcome(copy) == outcome(finished)


def test_states_are_never_overwritten_unasked(recipe, copy):
    before = (copy / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match="contains checkpoints of an earlier run, of which 000003 is the newest"):
        resume(recipe, copy)
    assert (copy / "metrics.jsonl").read_bytes() == before
    resume(recipe, copy, "--resume=never")
    assert not states(copy)
    assert (copy / "metrics.jsonl").read_bytes() == before


def test_completions_that_were_cut_are_reported(recipe, copy, capsys):
    shutil.rmtree(copy / "states" / "000003")
    whole, log = shutil.copytree(copy, copy.parent / "whole"), copy / "completions.jsonl"
    log.write_bytes(log.read_bytes()[:100])
    resume(recipe, copy, "--resume=auto")
    said = f"{log} has no completions of 1 earlier steps, the first is step 0 of grpo: the file was cut, or"
    assert said in capsys.readouterr().out
    resume(recipe, whole, "--resume=auto")
    assert "has no completions" not in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--resume=never", "--resume=null"])
def test_restarts_need_auto(recipe, copy, monkeypatch, option):
    """Else a restart would remove what the attempt before it has saved, or refuse to begin."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(ValueError, match="resume: torchrun's --max-restarts only works with --resume=auto"):
        resume(recipe, copy, option)
    assert states(copy) == ["000002", "000003"]


def test_going_back_to_a_state_gives_up_the_later_ones_of_its_own_folder(recipe, finished, copy, tmp_path):
    new = tmp_path / "new"
    for folder in (new, copy):
        resume(recipe, folder, f"--resume={copy / 'states' / '000002'}")
        assert len(states(copy)) == (1 if folder == copy else 2)
    assert outcome(copy) == outcome(finished)
    assert outcome(new) | {"completions": ""} == outcome(finished) | {"completions": ""}  # its pictures are not there


def test_a_failure_before_the_first_state_in_a_new_folder_leaves_one_there(recipe, copy, tmp_path, monkeypatch):
    def broken(*_):
        raise ValueError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(generate, "inverse_cdf", broken)
        with pytest.raises(
            ValueError, match=r"broken; the steps before this error are saved in .*/new/states/000002: fix the cause,"
        ):
            resume(recipe, tmp_path / "new", f"--resume={copy / 'states' / '000002'}")
    resume(recipe, tmp_path / "new", "--resume=auto")
    assert len((tmp_path / "new" / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(("options", "message"), [
    (["--resume=/gone"], "/gone is not the folder of a checkpoint; use auto, never, or a folder such as RUN"),
    (["--resume=auto", "--seed=1"], r"to a run with stages \['grpo'\] and seed 0; use the same stages and seed"),
    (["--resume=auto", "--grpo.beta=0"], r"another model or recipe \(.* is only in the checkpoint or only in the run"),
])  # fmt: skip
def test_what_cannot_be_resumed_is_refused(recipe, copy, options, message):
    with pytest.raises(ValueError, match=message):
        resume(recipe, copy, *options)


def test_states_are_saved_ten_minutes_apart_and_at_the_end_of_a_stage(recipe, finished, tmp_path, monkeypatch):
    """By a clock that goes on by four minutes whenever it is read: at the start, at each step and after each state."""
    minutes = itertools.count(0, 4)
    monkeypatch.setattr(resume_file, "clock", lambda: 60 * next(minutes))
    monkeypatch.setattr(resume_file, "NUM_KEPT_STATES", 9)
    options = ["--checkpoint_minutes=10", "--grpo.max_steps=7"]
    resume(recipe, tmp_path, *options)
    assert states(tmp_path) == ["000003", "000006", "000007"]
    assert RunConfig().checkpoint_minutes == 10


def test_two_runs_do_not_write_into_one_folder(recipe, copy):
    before = (copy / "metrics.jsonl").read_bytes()
    with (
        locked(copy, ONE),
        pytest.raises(ValueError, match=r"another run is writing into .*/copy; wait until it ends, or"),
    ):
        resume(recipe, copy, "--resume=never")
    assert (copy / "metrics.jsonl").read_bytes() == before and len(states(copy)) == 2
    resume(recipe, copy, "--resume=auto")


def test_other_rows_are_noticed_and_taken_if_the_state_is_named(recipe, copy):
    options = ["--grpo.max_steps=4", "--data.task=shapes(pairs=11)"]
    said = r"data\.task was .* and is now 'shapes.*rows would be skipped or repeated; .* --resume=.*/000003"
    with pytest.raises(ValueError, match=said):
        resume(recipe, copy, "--resume=auto", *options)
    resume(recipe, copy, f"--resume={copy / 'states' / '000003'}", *options)
    assert len((copy / "metrics.jsonl").read_text().splitlines()) == 4


def test_another_base_under_an_adapter_is_refused(recipe, tmp_path):
    """Its weights are in no state; that of a random model is drawn by config.json."""
    assert attempt(recipe, tmp_path / "start", "--stages=[]") == [0]
    base = tmp_path / "start" / "checkpoint"
    options = [f"--model.path={base}", "--model.config=null", "--adapter.r=2", "--checkpoint_steps=1"]
    resume(recipe, tmp_path / "run", *options)
    file = base / "model.safetensors"
    before, weights = file.read_bytes(), load_file(file)
    save_file({name: 1.3 * value for name, value in weights.items()}, file, {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"the base weights of the adapter have changed since .*000003 was saved; restore the earlier"
    ):
        resume(recipe, tmp_path / "run", *options, "--resume=auto")
    file.write_bytes(before)
    resume(recipe, tmp_path / "run", *options, "--resume=auto")
    with pytest.raises(ValueError, match="the base weights of the adapter have changed"):
        resume(recipe, tmp_path / "run", *options, "--resume=auto", "--adapter.quantize=nf4")


def test_what_a_recipe_says_otherwise_is_said(recipe, copy, monkeypatch, capsys):
    monkeypatch.setattr(loop, "train_stage", lambda *_: None)
    resume(recipe, copy, "--resume=auto", "--checkpoint_steps=1")
    assert " and is now " not in capsys.readouterr().out
    resume(
        recipe, copy, "--resume=auto", "--checkpoint_steps=1", "--grpo.learning_rate=1e-5", "--rewards={letters: 2.0}"
    )
    said = ["grpo.learning_rate was 0.003 and is now 1e-05", "rewards.letters was 1.0 and is now 2.0"]
    assert [line for line in capsys.readouterr().out.splitlines() if " and is now " in line] == said
    with pytest.raises(ValueError, match=r"grpo.prompts_per_step was 4 and is now 2, so rows would be skipped or"):
        resume(recipe, copy, "--resume=auto", "--grpo.prompts_per_step=2")
    resume(recipe, copy, f"--resume={copy / 'states' / '000003'}", "--grpo.prompts_per_step=2")


def test_stages_may_be_added_and_states_keep_their_beat(recipe, copy):
    """Every third step of all stages, also after the resumption, and at the end of the stage."""
    options = ["--stages=[grpo, sft]", "--sft.max_steps=2", "--checkpoint_steps=3"]
    resume(recipe, copy, "--resume=auto", *options)
    assert states(copy) == ["000003", "000005"]


def test_a_parameter_that_never_had_a_gradient_comes_back_without_moments(recipe, straight, tmp_path):
    """Text rows come first: the vision tower's first update must be the same whenever the run was resumed."""
    rows = [{"problem": f"{i} + 1?", "completion": "more"} for i in range(4)]
    red = {"problem": "Name it.", "completion": "a red square", "image": "red.png"}
    PIL.Image.new("RGB", (28, 28), "red").save(tmp_path / "red.png")
    order = next(shuffled(8, 8, 0))
    numbered = {number: rows[place] if place < 4 else red for place, number in enumerate(order)}
    write_lines(tmp_path / "rows.jsonl", [numbered[i] for i in range(8)])
    assert attempt(recipe, tmp_path / "start", "--stages=[]") == [0]
    options = [
        f"--model.path={tmp_path / 'start' / 'checkpoint'}", "--model.config=null", "--data.task=null", "--stages=sft",
        "--data.eval_rows=256",
        f"--data.train_file={tmp_path / 'rows.jsonl'}", "--sft.prompts_per_step=2", "--sft.max_steps=4",
    ]  # fmt: skip
    codes = attempt(recipe, tmp_path / "run", *options, "--checkpoint_steps=1", die="in backward", number=3)
    assert codes == [-signal.SIGKILL]
    keys = find_pieces(tmp_path / "run" / "states" / "000002")
    assert "optimizer.model.norm.weight/exp_avg" in keys
    assert "policy.visual.merger.ln_q.weight" in keys
    assert not any(key.startswith("optimizer.visual.") for key in keys)
    assert attempt(recipe, tmp_path / "run", *options, "--resume=auto") == [0]
    assert outcome(tmp_path / "run") == straight(*options)


def test_another_number_of_rows_is_refused():
    progress = TrainerState(0, ["sft", "grpo"])
    progress.check_rows(8)
    progress.check_rows(8)
    with pytest.raises(ValueError, match="the checkpoint was saved with 8 rows, but the dataset now has 9"):
        progress.check_rows(9)
    progress.begin_stage(1)
    progress.check_rows(9)
