"""Test that resumed runs give the same bytes as uninterrupted runs, and refuse bad states."""

import errno
import functools
import itertools
import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import PIL.Image
import pytest
import torch
from safetensors.torch import load, load_file, save_file

from minivlmrl.commands.train import train_recipe
from minivlmrl.config.options import RunConfig
from minivlmrl.data.loader import Batches, shuffled
from minivlmrl.data.processor import Processor
from minivlmrl.extras.agents import tool_sampler
from minivlmrl.generation import generate
from minivlmrl.rewards.registry import REWARDS
from minivlmrl.run import evaluate, loop, state_files, states
from minivlmrl.run.lock import LOCK, locked
from minivlmrl.run.metrics import MetricsLog
from minivlmrl.run.recipe_changes import changes, file_hashes
from minivlmrl.run.signals import PREEMPTED
from minivlmrl.run.trainer_state import TrainerState, read_trainer_state
from tests.helpers import tiny
from tests.helpers.children import fork_processes, hook_call
from tests.helpers.on_ranks import ONE, eager
from tests.helpers.runs import leave_out, write_lines
from tests.helpers.stages import write_recipe

pytestmark = pytest.mark.usefixtures("default_signals")
STAGE = {"max_steps": 6, "prompts_per_step": 4, "micro_batch_size": 2, "learning_rate": 3e-3}
RECIPE = tiny.recipe(
    STAGE,
    stages=["grpo"],
    timeout=30,
    data={"task": "shapes(demonstrations=10, pairs=10)", "eval_rows": 2, "eval_rewards": ["accuracy", "format"]},
    rewards={"letters": 1.0},
    # each rollout feeds two steps, and is trained on twice
    grpo={
        "num_iterations": 2, "steps_per_generation": 2, "beta": 0.1, "top_entropy_quantile": 0.5,
        "rollout_correction": "token_truncate",
    },
    ppo={"steps_per_generation": 2, "num_iterations": 2},
)  # fmt: skip


COUNTING = """
import torch

class Counting(torch.optim.SGD):
    def __init__(self, parameters, learning_rate, betas, weight_decay):
        super().__init__([{"params": parameters, "count": 0}], learning_rate)

    def step(self):
        [group] = self.param_groups
        group["count"] += 1
        for parameter in group["params"]:
            parameter.data.mul_(1 + 1e-3 * group["count"])
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    write_recipe(folder, RECIPE)
    (folder / "counting.py").write_text(COUNTING)
    return folder / "recipe.yaml"


@pytest.fixture(scope="module", autouse=True)
def varied_rollouts():
    """Patch rewards and stop tokens so that an untrained model gets varied rewards and lengths."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(REWARDS, "letters", "tests.helpers.stages:letters")
        patch.setattr(Processor, "stop_token_ids", property(lambda self: tuple(range(7, len(self.tokenizer), 8))))
        leave_out(patch)
        patch.setattr(tool_sampler, "find_calls", eager)
        patch.setattr(tool_sampler.ToolEpisode, "closes_a_call", lambda *_: True)
        yield


def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


PLACES = {
    "in a rollout": (generate, "inverse_cdf", {"before": kill}),
    "in backward": (torch.Tensor, "backward", {"after": kill}),
    "in the optimizer": (torch.optim.AdamW, "step", {"after": kill}),
    "when metrics are written": (MetricsLog, "step", {"after": kill}),
    "before the tensors of a state": (state_files, "save_tensors", {"before": kill}),
    "after the tensors of a state": (state_files, "save_tensors", {"after": kill}),
    "before the rename": (Path, "rename", {"before": kill}),
    "between the rename and the cleanup": (states, "flush_file", {"after": kill}),
    "in the cleanup": (shutil, "rmtree", {"before": kill}),
    "while resuming": (loop, "load_state", {"after": kill}),
}


def attempt(recipe, output, *options, ranks=1, die=None, number=1, rank=None):
    """Train in forked children, one per rank, and return their exit codes, which are negative for signals.

    Args:
        die: a place, or its key in PLACES, at which `rank` is killed, or all ranks if `rank` is None.
        number: the call at this place that kills the run, from 1.
    """

    def train(me):
        if die and rank in (None, me):
            owner, name, moment = PLACES[die] if isinstance(die, str) else die
            hook_call(owner, name, number, **moment)
        return train_recipe([str(recipe), f"--output_dir={output}", *options])

    return fork_processes(ranks, train)


def slow_after(count, cases):
    return [pytest.param(name, marks=[pytest.mark.slow] * (i >= count)) for i, name in enumerate(cases)]


def saved_states(output):
    return sorted(path.name for path in (output / "states").iterdir())


def outcome(output):
    """Return the results of a run that must not depend on when the run was killed."""
    summary = json.loads((output / "summary.json").read_text())
    summary.pop("seconds")
    saved = [*output.glob("checkpoint/*.safetensors"), *output.glob("best/checkpoint/*.safetensors")]
    weights = {str(file.relative_to(output)): file.read_bytes() for file in sorted(saved)}
    names = "metrics", "warnings", "evaluations", "completions"
    logs = {name: (output / f"{name}.jsonl").read_text() for name in names if (output / f"{name}.jsonl").exists()}
    return {**logs, "summary": summary} | weights


@pytest.fixture(scope="module")
def uninterrupted(recipe):
    """Return a cached function that trains without kills or states, and returns the outcome."""

    @functools.cache
    def uninterrupted(*options, ranks=1):
        output = recipe.parent / f"uninterrupted-{len(list(recipe.parent.iterdir()))}"
        assert attempt(recipe, output, *options, ranks=ranks) == [0] * ranks
        assert not (output / "states").exists()
        return outcome(output)

    return uninterrupted


STATES = ["--state_steps=2", "--resume=auto"]
DROPOUT = ["--adapter.r=4", "--adapter.dropout=0.3"]
BEST = "--best_metric=eval/accuracy_sampled"
# a step has two micro-batches; a GRPO rollout feeds four steps, and a state follows the fourth
KILLS = {  # case: (stages, options, kills); the first five cases are fast
    "grpo": ("grpo", ["--grpo.max_steps=8"], [("in backward", 9), ("in a rollout", 3), ("in the optimizer", 2)]),
    "sft": ("sft", ["--optimizer.name=adamw_8bit", "--sft.max_steps=8", "--eval_steps=3", BEST], [
        ("before the tensors of a state", 1), ("after the tensors of a state", 1), ("before the rename", 1),
        ("between the rename and the cleanup", 4), ("while resuming", 1), ("in backward", 3), ("before the rename", 1),
        ("in the cleanup", 2),
    ]),
    "dpo": ("dpo", [*DROPOUT, "--adapter.modules_to_save=[merger]", "--optimizer.name=torch.optim:NAdam"], [
        ("when metrics are written", 3), ("in backward", 3),
    ]),
    "a second stage": ("sft, grpo", ["--sft.max_steps=2", "--grpo.max_steps=8"], [("in the optimizer", 8)]),
    "a count in the parameter groups": ("sft", ["--optimizer.name=FOLDER/counting.py:Counting"], [("in backward", 9)]),
    "tools": ("sft, grpo", ["--sft.max_steps=1", "--sampling.environment=tests.helpers.on_ranks:Eye",
              "--sampling.history=1", "--sampling.max_new_tokens=20", "--grpo.max_steps=8", "--log_completions=1"], [
        ("in a rollout", 40), ("in the optimizer", 3),
    ]),
    "ppo": ("sft, ppo", ["--sft.max_steps=2", "--ppo.critic=separate"], [
        ("in the optimizer", 4), ("in the optimizer", 5),
    ]),
    "reward_model": ("sft, reward_model", [], [("in backward", 20)]),
    "Qwen3.5": ("grpo, sft", ["--model.config=FOLDER/qwen3_5.json"], [("in the optimizer", 4)]),
    "Qwen3-VL, experts": (
        "grpo, dpo", ["--model.config=FOLDER/qwen3_vl_moe.json", "--dpo.max_steps=1"], [("in the optimizer", 4)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_after(5, KILLS))
def test_a_killed_and_resumed_run_gives_the_same_result(recipe, uninterrupted, tmp_path, name):
    stages, options, kills = KILLS[name]
    options = [f"--stages=[{stages}]", *(option.replace("FOLDER", str(recipe.parent)) for option in options)]
    for die, number in kills:
        assert attempt(recipe, tmp_path, *options, *STATES, die=die, number=number) == [-signal.SIGKILL], die
    assert attempt(recipe, tmp_path, *options, *STATES) == [0]
    assert outcome(tmp_path) == uninterrupted(*options)
    assert len(saved_states(tmp_path)) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "attempts"), [("grpo", [(2, 3), (4, 2)]), ("dpo", [(1, 2), (2, 2)])])
def test_resuming_with_another_number_of_ranks(recipe, uninterrupted, tmp_path, stages, attempts):
    """Two ranks shard the weights, and other numbers of ranks replicate the weights."""
    options = [f"--stages=[{stages}]", "--model.dtype=float64", "--data.eval_rows=1"]
    for ranks, steps in attempts:
        more = [f"--sharding.enabled={str(ranks == 2).lower()}", "--state_steps=1", "--resume=auto"]
        die = "when metrics are written"
        assert -signal.SIGKILL in attempt(recipe, tmp_path, *options, *more, ranks=ranks, die=die, number=steps)
    assert attempt(recipe, tmp_path, *options, *STATES) == [0]
    found, expected = outcome(tmp_path), uninterrupted(*options)
    for line, other in zip(*(map(json.loads, x["metrics"].splitlines()) for x in (found, expected)), strict=True):
        assert line.pop("stage") == other.pop("stage")
        assert line == pytest.approx(other, rel=1e-6, abs=1e-9)
    weights = [load(result["checkpoint/model.safetensors"]) for result in (found, expected)]
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=1e-6, atol=1e-9)


def stop(*_):
    os.kill(os.getpid(), signal.SIGTERM)


SIGNALS = {  # options, place, number of its call, state
    "twice in the second of four steps of a rollout": (
        [], (MetricsLog, "step", {"before": lambda *_: (stop(), stop())}), 2, "000004",
    ),
    "in the first step of a stage": (
        ["--stages=[sft, grpo]", "--sft.max_steps=2", "--data.eval_rows=1", "--grpo.micro_batch_size=1"],
        (torch.Tensor, "backward", {"after": stop}), 3, "000002",
    ),
    "in a step of sft": (
        ["--stages=[sft]", "--sft.micro_batch_size=1", "--eval_steps=1", BEST],
        (torch.Tensor, "backward", {"after": stop}), 5, "000002",
    ),
    "in a step of a rollout, sharded": (
        ["--grpo.micro_batch_size=1", "--sharding.enabled=true"],
        (torch.Tensor, "backward", {"after": stop}), 9, "000004",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_after(2, SIGNALS))
def test_a_signal_to_one_rank(recipe, uninterrupted, tmp_path, name):
    """A signal ends a run after a rollout, or within a step that the resumed run repeats."""
    options, place, number, kept = SIGNALS[name]
    assert attempt(recipe, tmp_path, *options, ranks=2, die=place, number=number, rank=1) == [PREEMPTED] * 2
    assert saved_states(tmp_path) == [kept]
    assert attempt(recipe, tmp_path, "--resume=auto", *options, ranks=2) == [0, 0]
    assert outcome(tmp_path) == uninterrupted(*options, ranks=2)


REWARD_CALLS = []


def fails_on_the_second_rank(completions, completion_ids, **columns):
    """Raise on rank 1 in call FAILS_AT of the reward; the first two calls are trials before training."""
    REWARD_CALLS.append(1)
    if os.environ["RANK"] == "1" and os.environ["FAILS_AT"] == str(len(REWARD_CALLS)):
        raise KeyError("rank 1")
    return [float(sum(ids) % 7) for ids in completion_ids]


def test_a_reward_that_fails_on_one_rank(recipe, uninterrupted, tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(REWARDS, "letters", fails_on_the_second_rank)
    monkeypatch.setenv("FAILS_AT", "never")
    expected = uninterrupted("--state_minutes=0", ranks=2)
    monkeypatch.setenv("FAILS_AT", "4")
    assert attempt(recipe, tmp_path, "--state_minutes=0", ranks=2) == [1, 1]
    assert capfd.readouterr().err.count("states/000004: continue with --resume=auto") >= 2
    assert (tmp_path / "states" / "000004" / "complete.json").is_file()
    monkeypatch.setenv("FAILS_AT", "never")
    assert attempt(recipe, tmp_path, "--state_minutes=0", "--resume=auto", ranks=2) == [0, 0]
    assert outcome(tmp_path) == expected


def out_of_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory")


BACKWARD = torch.Tensor, "backward", {"before": out_of_memory}
SFT = ["--stages=[sft]", "--sft.max_steps=4"]  # two micro-batches in each step
ERRORS = {  # options, place, number of its call, state
    "a backward pass": (SFT, BACKWARD, 6, "000002"),
    "reading a row": (SFT, (Batches, "wait_for", {"before": out_of_memory}), 3, "000002"),
    "the first backward pass of a rollout": (["--grpo.max_steps=8"], BACKWARD, 9, "000004"),
    "the first step of a stage": (["--stages=[sft, grpo]", "--sft.max_steps=2"], BACKWARD, 5, "000002"),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_after(4, ERRORS))
def test_an_error_between_two_updates_saves_the_steps_before(recipe, uninterrupted, tmp_path, capfd, name):
    options, place, number, kept = ERRORS[name]
    no_others = "--state_minutes=1000"
    assert attempt(recipe, tmp_path, *options, no_others, die=place, number=number) == [1]
    assert f"states/{kept}: continue with --resume=auto" in capfd.readouterr().err
    assert kept in saved_states(tmp_path)
    assert attempt(recipe, tmp_path, *options, no_others, "--resume=auto") == [0]
    assert outcome(tmp_path) == uninterrupted(*options)


SHARDED = "--sharding.enabled=true"


@pytest.mark.parametrize(("options", "rank"), [([], 1), pytest.param([SHARDED], None, marks=pytest.mark.slow)])
def test_an_error_that_ranks_do_not_share_saves_no_state(recipe, tmp_path, capfd, options, rank):
    options = [*SFT, "--sft.micro_batch_size=1", *options, "--state_minutes=1000", "--timeout=60"]
    assert attempt(recipe, tmp_path, *options, ranks=2, die=BACKWARD, number=6, rank=rank) == [1, 1]
    assert not (tmp_path / "states").exists()
    assert "no state was saved yet: start the run again" in capfd.readouterr().err


def test_a_resume_shortens_no_log_next_to_a_link_to_the_states(recipe, finished, copy, tmp_path):
    elsewhere = tmp_path / "other" / "disk"
    elsewhere.parent.mkdir()
    shutil.move(copy / "states", elsewhere)
    (copy / "states").symlink_to(elsewhere)
    resume(recipe, copy, "--resume=auto", "--log_completions=1")
    assert outcome(copy) == outcome(finished)
    resume(recipe, copy, f"--resume={elsewhere / '000002'}")
    assert outcome(copy) == outcome(finished)
    assert [*(copy / "images").iterdir()]


def test_a_signal_in_the_first_evaluation_ends_the_run_at_once(recipe, uninterrupted, tmp_path, capfd):
    place = evaluate, "generate_and_score", {"before": stop}
    options = ["--stages=[sft]", "--sft.max_steps=2", "--state_minutes=10", "--data.eval_rows=2"]
    assert attempt(recipe, tmp_path, *options, die=place) == [PREEMPTED]
    assert "preempted: no state was saved yet: start the run again\n" in capfd.readouterr().out
    assert not (tmp_path / "summary.json").exists()
    assert attempt(recipe, tmp_path, *options, "--resume=auto") == [0]
    assert outcome(tmp_path) == uninterrupted(*options[:-2])


SHORT = ["--grpo.max_steps=3", "--grpo.num_iterations=1", "--grpo.steps_per_generation=1"]


@pytest.fixture(scope="module")
def finished(recipe):
    """Return the folder of a run whose rollouts feed one step, with states after steps 2 and 3."""
    output = recipe.parent / "finished"
    assert attempt(recipe, output, "--state_steps=1", *SHORT) == [0]
    assert saved_states(output) == ["000002", "000003"]
    return output


@pytest.fixture
def copy(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "copy"))


@pytest.fixture(scope="module")
def untrained(recipe):
    """Return the options of a run that begins with a saved model."""
    folder = recipe.parent / "untrained"
    assert attempt(recipe, folder, "--stages=[]") == [0]
    return [f"--model.path={folder / 'checkpoint'}", "--model.config=null"]


def resume(recipe, output, *options):
    return train_recipe([str(recipe), f"--output_dir={output}", *SHORT, *options])


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut(file):
    file.write_bytes(file.read_bytes()[:-2])


def rewrite(state, name, content):
    """Replace a file of a state, and correct its checksum."""
    (state / name).write_bytes(content)
    sums = json.loads((state / "complete.json").read_text()) | {name: states.checksum(state / name)}
    (state / "complete.json").write_text(json.dumps(sums))


def rewritten(change):
    """Return a function that changes the values of run.json."""
    return lambda file: rewrite(file.parent, file.name, json.dumps(change(json.loads(file.read_text()))).encode())


HARMS = {  # damage: (file, function, sentence that the run prints)
    "a changed bit": ("0000_0000.safetensors", flip, ""),
    "a missing file": ("run.json", Path.unlink, ""),
    "a cut list of files": ("complete.json", cut, ""),
    "a wrong value": (
        "run.json", rewritten(lambda values: values | {"results": {"start": {"greedy": "x"}}}),
        "results.start.greedy is 'x', but it must be of type float",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMS)
def test_a_damaged_state_is_skipped(recipe, copy, capsys, monkeypatch, name):
    file, harm, sentence = HARMS[name]
    harm(copy / "states" / "000003" / file)
    monkeypatch.setattr(loop, "train_stage", lambda *_: None)
    resume(recipe, copy, "--resume=auto")
    message = capsys.readouterr().out
    assert "states/000003 is damaged and is ignored" in message and sentence in message
    assert "resuming from" in message and "states/000002: 2 steps of grpo done" in message
    assert saved_states(copy) == ["000002"]


@pytest.mark.parametrize(("owner", "name", "number", "message"), [
    (states, "checksum", errno.EIO, "error"),
    (state_files, "save_tensors", errno.ENOSPC, r"No space left(.|\n)*saved in .*000002: continue with --resume=auto"),
], ids=["a read that fails once", "a full disk"])  # fmt: skip
def test_an_error_of_the_disk_loses_no_state(recipe, finished, copy, monkeypatch, owner, name, number, message):
    def fail(path, *_):
        raise OSError(number, os.strerror(number), str(path))

    shutil.rmtree(copy / "states" / "000003")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(OSError, match=message):
            resume(recipe, copy, "--resume=auto", "--state_steps=1")
    assert saved_states(copy) == ["000002"]
    resume(recipe, copy, "--resume=auto", "--state_steps=1")
    assert outcome(copy) == outcome(finished)


def test_a_state_may_be_a_link(recipe, finished, copy, tmp_path):
    """The link is deleted together with the states of the abandoned steps, but not its target."""
    for name in ("000002", "000003"):
        shutil.move(copy / "states" / name, tmp_path / name)
        (copy / "states" / name).symlink_to(tmp_path / name)
    resume(recipe, copy, f"--resume={copy / 'states' / '000002'}")
    assert outcome(copy) == outcome(finished)
    assert (tmp_path / "000003" / "run.json").is_file()


@pytest.mark.parametrize("selected", ["auto", "FOLDER/states/000002"])
def test_without_an_intact_state_nothing_is_resumed(recipe, copy, selected):
    before = (copy / "metrics.jsonl").read_bytes()
    for path in (copy / "states").iterdir():
        flip(path / "run.json")
    with pytest.raises(ValueError, match="every state that it selects is damaged; --resume=never"):
        resume(recipe, copy, f"--resume={selected.replace('FOLDER', str(copy))}")
    assert (copy / "metrics.jsonl").read_bytes() == before and len(saved_states(copy)) == 2


AUTO = "--resume=auto"
RESTARTS = "resume: torchrun's --max-restarts only works with --resume=auto"
REFUSED = [  # options, restarts of torchrun, sentence
    ([], 0, "contains states of an earlier run, of which 000003 is the newest"),
    (["--resume=/gone"], 0, "/gone is not the folder of a state; use auto, never, or a folder such as RUN"),
    ([AUTO, "--seed=1"], 0, r"to a run with stages \['grpo'\] and seed 0; use the same stages and seed"),
    ([AUTO, "--grpo.beta=0"], 0, r"a different model or recipe: .* is only in the state or only in the run"),
    ([AUTO, "--data.task=shapes(pairs=11)"], 0,
     r"data\.task was .* and is now 'shapes.*rows would be skipped or repeated; .* --resume=.*/000003"),
    ([AUTO, "--grpo.prompts_per_step=2"], 0, "grpo.prompts_per_step was 4 and is now 2, so rows would be skipped or"),
    (["--resume=never"], 3, RESTARTS),  # a restart would delete the earlier states
    (["--resume=null"], 3, RESTARTS),  # a restart would refuse to start
    (["--resume=OLDER", "--seed=1"], 0, "use the same stages and seed"),
    (["--resume=OLDER", "--grpo.beta=0"], 0, "is only in the state or only in the run"),
    (["--resume=OLDER", "--report_to=[TRACKER]"], 0, "cannot connect"),
    (["--resume=never", "--report_to=[tensorboard, TRACKER]"], 0, "cannot connect"),  # and keeps earlier curves
    (["--resume=never", "--reference.path=/gone"], 0, "/gone: this folder does not exist"),
]  # fmt: skip


def contents(folder):
    """Return {file: content} of a run, without the lock and the page, which every start writes."""
    files = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {str(name): path.read_bytes() for name, path in files.items() if name.name not in (LOCK, "report.html")}


@pytest.mark.parametrize(("options", "restarts", "sentence"), REFUSED)
def test_resumptions_that_are_refused(recipe, copy, monkeypatch, options, restarts, sentence):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", str(restarts))
    tracker = copy.parent / "my_tracker.py"
    tracker.write_text("def tracker(config, steps, closing):\n    raise ValueError('cannot connect')\n")
    places = {"OLDER": f"{copy}/states/000002", "TRACKER": f"{tracker}:tracker"}
    for name, place in places.items():
        options = [option.replace(name, place) for option in options]
    (copy / "tensorboard").mkdir()
    (copy / "tensorboard" / "events").touch()
    before = contents(copy)
    with pytest.raises(ValueError, match=sentence) as error:
        resume(recipe, copy, *options)
    assert not hasattr(error.value, "__notes__")  # no note says that the run continues with --resume=auto
    assert contents(copy) == before


def test_the_option_resume_selects_the_states(recipe, copy):
    options = ["--grpo.max_steps=4", "--data.task=shapes(pairs=11)", "--grpo.prompts_per_step=2"]
    before, state = (copy / "metrics.jsonl").read_bytes(), copy / "states" / "000003"
    with locked(copy, ONE), pytest.raises(ValueError, match=r"another run is writing into .*/copy\. Wait until that"):
        resume(recipe, copy, "--resume=never")
    assert (copy / "metrics.jsonl").read_bytes() == before and len(saved_states(copy)) == 2
    resume(recipe, copy, f"--resume={state}", *options)  # a state that is named accepts other rows
    assert len((copy / "metrics.jsonl").read_text().splitlines()) == 4
    resume(recipe, copy, "--resume=never")
    assert not saved_states(copy) and (copy / "metrics.jsonl").read_bytes() == before


def test_resuming_from_an_earlier_state_deletes_later_ones(recipe, finished, copy, tmp_path):
    new = tmp_path / "new"
    for folder in (new, copy):
        resume(recipe, folder, f"--resume={copy / 'states' / '000002'}")
        assert len(saved_states(copy)) == (1 if folder == copy else 2)
    assert outcome(copy) == outcome(finished)
    other, expected = outcome(new), outcome(finished)
    assert other.pop("metrics") == expected.pop("metrics").splitlines(keepends=True)[-1]  # a new folder has new logs
    assert {name: part for name, part in other.items() if isinstance(part, bytes | dict)}.items() <= expected.items()


@pytest.mark.parametrize(("options", "has_best"), [
    ([BEST], False), (["--best_metric=eval/accuracy_greedy"], True), ([BEST, "--data.eval_rows=1"], True),
])  # fmt: skip
def test_a_best_evaluation_of_something_else_is_forgotten(recipe, copy, tmp_path, monkeypatch, options, has_best):
    """The earlier run's best score, 5, is above all accuracies, so it would keep best/ as it is."""
    state = read_trainer_state(copy / "states" / "000003")
    state.best, state.recipe["best_metric"] = 5.0, "eval/accuracy_sampled"
    monkeypatch.setattr(states, "select_state", lambda *_: (copy / "states" / "000003", state))
    monkeypatch.setattr(loop, "load_state", lambda *_: None)
    for folder, expected in ((copy, has_best), (tmp_path / "new", True)):
        (copy / "best").mkdir(exist_ok=True)
        resume(recipe, folder, f"--resume={copy / 'states' / '000003'}", *options)
        assert (folder / "best" / "checkpoint").exists() == expected


def test_states_are_saved_every_ten_minutes(recipe, finished, tmp_path, monkeypatch):
    """The clock of the run advances by four minutes at the start, at each step and after each state."""
    minutes = itertools.count(0, 4)
    monkeypatch.setattr(states, "clock", lambda: 60 * next(minutes))
    monkeypatch.setattr(states, "NUM_KEPT_STATES", 9)
    resume(recipe, tmp_path, "--state_minutes=10", "--grpo.max_steps=7")
    assert saved_states(tmp_path) == ["000003", "000006", "000007"]
    assert RunConfig().state_minutes == 10


FROZEN = "--model.freeze=[language, embeddings]"


def state_names(output, steps):
    return {name.partition("/")[0] for name in state_files.find_shards(output / "states" / steps)}


@pytest.mark.parametrize("options", [[], [SHARDED], ["--model.compute_dtype=bfloat16", "--grpo.beta=0"]])
def test_a_state_holds_what_is_trained(recipe, uninterrupted, tmp_path, options):
    """Frozen weights are in no state; the resumed run gives the same bytes."""
    options = [FROZEN, "--grpo.max_steps=8", *options]
    assert attempt(recipe, tmp_path, *options, *STATES, die="in the optimizer", number=6) == [-signal.SIGKILL]
    names = state_names(tmp_path, "000004")
    assert "policy.visual.merger.mlp.0.weight" in names
    assert not any(name.startswith(("policy.model.", "policy.lm_head", "optimizer.model.")) for name in names)
    assert attempt(recipe, tmp_path, *options, *STATES) == [0]
    assert outcome(tmp_path) == uninterrupted(*options)


def test_a_resumed_run_may_train_frozen_weights_but_not_freeze_trained_ones(recipe, tmp_path):
    options = ["--stages=[sft]", *STATES]
    resume(recipe, tmp_path, *options, "--sft.max_steps=2", FROZEN)
    few = state_names(tmp_path, "000002")
    resume(recipe, tmp_path, *options, "--sft.max_steps=4")
    assert few < state_names(tmp_path, "000004")
    with pytest.raises(ValueError, match="is only in the state or only in the run"):
        resume(recipe, tmp_path, *options, "--sft.max_steps=6", FROZEN)


def test_a_longer_run_keeps_the_evaluation_at_its_old_end(recipe, tmp_path):
    options = ["--stages=[sft]", "--eval_steps=2", *STATES]
    for last, expected in ((3, [0, 2, 3]), (5, [0, 2, 3, 4, 5]), (5, [0, 2, 3, 4, 5])):
        resume(recipe, tmp_path, *options, f"--sft.max_steps={last}")
        lines = (tmp_path / "evaluations.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == expected


@pytest.mark.parametrize("part", ["--adapter.r=2", FROZEN])
def test_changed_frozen_weights_are_refused(recipe, tmp_path, part):
    assert attempt(recipe, tmp_path / "start", "--stages=[]") == [0]
    base = tmp_path / "start" / "checkpoint"
    options = [f"--model.path={base}", "--model.config=null", part, "--state_steps=1"]
    resume(recipe, tmp_path / "run", *options)
    file = base / "model.safetensors"
    before, weights = file.read_bytes(), load_file(file)
    save_file({name: 1.3 * value for name, value in weights.items()}, file, {"format": "pt"})
    changed = "the frozen weights, which a state does not contain, have changed since .*000003 was saved; restore"
    with pytest.raises(ValueError, match=changed):
        resume(recipe, tmp_path / "run", *options, "--resume=auto")
    file.write_bytes(before)
    resume(recipe, tmp_path / "run", *options, "--resume=auto")
    if part != FROZEN:
        with pytest.raises(ValueError, match=changed):
            resume(recipe, tmp_path / "run", *options, "--resume=auto", "--adapter.quantize=nf4")


def test_changed_options_are_reported(recipe, copy, monkeypatch, capsys):
    monkeypatch.setattr(loop, "train_stage", lambda *_: None)
    resume(recipe, copy, "--resume=auto", "--state_steps=1")
    assert " and is now " not in capsys.readouterr().out
    options = ["--state_steps=1", "--grpo.learning_rate=1e-5", "--rewards={letters: 2.0}"]
    resume(recipe, copy, "--resume=auto", *options, "--data.eval_rows=1")
    message = ["data.eval_rows was 2 and is now 1", "grpo.learning_rate was 0.003 and is now 1e-05",
            "rewards.letters was 1.0 and is now 2.0"]  # fmt: skip
    assert [line for line in capsys.readouterr().out.splitlines() if " and is now " in line] == message


ROW = {"problem": "1 + 1?", "solution": "2"}
FILES = {  # option that names a file of rows: what a resume says if the rows have changed
    "data.train_file={}": r"rows of data.train_file \(train.jsonl\) changed, so rows would be skipped or repeated",
    "data.train=[{{file: {}}}]": r"rows of data.train\[0\].file \(train.jsonl\) changed, so rows would be",
    "data.files={{grpo: {}}}": r"rows of data.files.grpo \(train.jsonl\) changed, so rows would be skipped or repeated",
}


@pytest.mark.parametrize("option", FILES)
def test_changed_rows_are_refused(recipe, untrained, tmp_path, option, capsys, monkeypatch):
    rows = [ROW | {"solution": str(number), "image": "red.png"} for number in range(8)]
    PIL.Image.new("RGB", (28, 28), "red").save(tmp_path / "red.png")
    for name in ("train", "eval"):
        write_lines(tmp_path / f"{name}.jsonl", rows)
    options = [*untrained, "--data.task=null", f"--{option.format(tmp_path / 'train.jsonl')}", "--state_steps=1"]
    options.append(f"--data.eval_file={tmp_path / 'eval.jsonl'}")
    resume(recipe, tmp_path / "run", *options)
    monkeypatch.setattr(loop, "train_stage", lambda *_: None)
    resume(recipe, tmp_path / "run", *options, "--resume=auto")
    assert " changed" not in capsys.readouterr().out
    write_lines(tmp_path / "eval.jsonl", rows[::-1])
    PIL.Image.effect_noise((28, 28), 9).save(tmp_path / "red.png")
    resume(recipe, tmp_path / "run", *options, "--resume=auto")
    message = capsys.readouterr().out
    assert "rows of data.eval_file (eval.jsonl) changed\n" in message
    assert "an image or a video of the rows for grpo changed\n" in message
    write_lines(tmp_path / "train.jsonl", rows[::-1])
    with pytest.raises(ValueError, match=FILES[option]):
        resume(recipe, tmp_path / "run", *options, "--resume=auto")


@pytest.mark.parametrize(("option", "file", "kind"), [
    ("model", "config.json", "settings"), ("model", "chat_template.jinja", "settings"),
    ("model", "merges.txt", "settings"), ("model", "README.md", None), ("reward_model", "model.safetensors", "weights"),
])  # fmt: skip
def test_changed_model_files_are_reported(tmp_path, option, file, kind):
    config = RunConfig()
    config.model.config = str(tmp_path / "random.json")
    for name in ("random.json", "model.safetensors"):
        (tmp_path / name).touch()
    getattr(config, option).path = str(tmp_path)
    pair = []
    for text in ("old", "new"):
        (tmp_path / file).write_text(text)
        pair.append(TrainerState(0, ["grpo"], hashes=file_hashes(config, {})))
    assert [name for name, _ in changes(*pair)] == ([f"{kind} of {option}.path"] if kind else [])


def test_stages_may_be_added_and_the_state_interval_stays(recipe, copy):
    resume(recipe, copy, "--resume=auto", "--stages=[grpo, sft]", "--sft.max_steps=2", "--state_steps=3")
    assert saved_states(copy) == ["000003", "000005"]
    config = RunConfig(state_steps=3, state_minutes=0)
    manager = SimpleNamespace(config=config, world=ONE, saved_steps=2, saved_time=0.0, stage_ends=False)
    due = []
    for steps in (2, 3, 4):
        manager.state = SimpleNamespace(steps=steps)
        due.append(states.StateSaver.is_due(manager))
    assert due == [False, True, True]  # is due at step 4 if step 3 was within a rollout


def test_a_parameter_without_gradients_resumes_without_moments(recipe, untrained, uninterrupted, tmp_path):
    """The first rows have no images, so AdamW has no moments for the vision tower when the run is killed."""
    rows = [{"problem": f"{i} + 1?", "completion": "more"} for i in range(4)]
    red = {"problem": "Name it.", "completion": "a red square", "image": "red.png"}
    PIL.Image.new("RGB", (28, 28), "red").save(tmp_path / "red.png")
    order = next(shuffled(8, 8, 0))
    numbered = {number: rows[place] if place < 4 else red for place, number in enumerate(order)}
    write_lines(tmp_path / "rows.jsonl", [numbered[i] for i in range(8)])
    options = [
        *untrained, "--data.task=null", "--stages=sft", "--data.eval_rows=256", "--data.eval_rewards=null",
        f"--data.train_file={tmp_path / 'rows.jsonl'}", "--sft.prompts_per_step=2", "--sft.max_steps=4",
    ]  # fmt: skip
    codes = attempt(recipe, tmp_path / "run", *options, "--state_steps=1", die="in backward", number=3)
    assert codes == [-signal.SIGKILL]
    keys = state_files.find_shards(tmp_path / "run" / "states" / "000002")
    assert "optimizer.model.norm.weight/exp_avg" in keys
    assert "policy.visual.merger.ln_q.weight" in keys
    assert not any(key.startswith("optimizer.visual.") for key in keys)
    assert attempt(recipe, tmp_path / "run", *options, "--resume=auto") == [0]
    assert outcome(tmp_path / "run") == uninterrupted(*options)


def test_a_changed_number_of_rows_is_refused(recipe, copy):
    folder = copy / "states" / "000003"
    content = json.loads((folder / "run.json").read_text())
    content["hashes"]["rows of data.* for grpo"] = "9 rows"
    rewrite(folder, "run.json", json.dumps(content).encode())
    with pytest.raises(ValueError, match=r"rows of data\.\* for grpo changed, so rows would be skipped or repeated"):
        resume(recipe, copy, "--resume=auto")
    resume(recipe, copy, f"--resume={folder}", "--stages=[grpo, sft]", "--sft.max_steps=1", "--state_steps=1")
    assert read_trainer_state(copy / "states" / "000004").hashes["rows of data.* for grpo"] != "9 rows"


def test_files_that_no_stage_reads_may_be_missing(tmp_path):
    config = RunConfig(stages=["grpo"])
    config.model.config = str(tmp_path / "random.json")
    (tmp_path / "random.json").touch()
    config.data.files = {"sft": str(tmp_path / "gone.jsonl")}
    config.ppo.critic_path = str(tmp_path / "written_by_an_earlier_stage")
    assert [name for name in file_hashes(config, {}) if name.startswith("rows")] == []
    config.stages, config.data.train_file = ["sft"], str(tmp_path / "gone_as_well.jsonl")
    (tmp_path / "gone.jsonl").touch()
    assert [name for name in file_hashes(config, {}) if name.startswith("rows")] == [
        "rows of data.files.sft (gone.jsonl)"
    ]
