"""Test that `reproduce` accepts unchanged runs, also resumed runs, and names forged files."""

import contextlib
import functools
import gc
import json
import os
import re
import shutil
import socket

import pytest
import torch
from children import exit_code, fork
from runs import leave_out
from safetensors.torch import load_file, save_file

from minivlmrl.__main__ import main
from minivlmrl.commands.train import train_recipe
from minivlmrl.data.processor import Processor
from minivlmrl.files import digest
from minivlmrl.rewards.registry import REWARDS
from minivlmrl.run import loop

import tiny
from stages import write_recipe

STAGE = {"max_steps": 6, "prompts_per_step": 4, "micro_batch_size": 4, "learning_rate": 3e-3}
RECIPE = tiny.recipe(
    STAGE,
    stages=["grpo"],
    data={"eval_rows": 1, "task": "shapes(demonstrations=8)"},
    rewards={"letters": 1.0},
    log_completions=1,
)


@pytest.fixture(scope="module", autouse=True)
def lively():
    """Make completions of an untrained model differ in length and reward.

    Every eighth token is a stop token, and the reward counts letters.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(REWARDS, "letters", "on_ranks:letters")
        patch.setattr(Processor, "stop_token_ids", property(lambda self: tuple(range(7, len(self.tokenizer), 8))))
        leave_out(patch)
        yield


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    home = tmp_path_factory.mktemp("recipe")
    write_recipe(home, RECIPE)
    return home / "recipe.yaml"


def run(recipe, folder, *options):
    train_recipe([str(recipe), f"--output_dir={folder}", *options])
    return folder


@pytest.fixture(scope="module")
def trained(recipe):
    """Train with a checkpoint every two of six steps, so that the run keeps its last two states."""
    return run(recipe, recipe.parent / "run", "--checkpoint_steps=2")


@pytest.fixture
def copy(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def verify(capsys):
    """Return a function that runs `reproduce` on a folder.

    The function returns the exit status and the printed lines, except lines about files that are
    not compared.
    """

    def verify(folder, *options):
        shutil.rmtree(f"{folder}.again", ignore_errors=True)
        capsys.readouterr()
        code = main(["reproduce", str(folder), *options])
        out = capsys.readouterr()
        lines = (out.err if code == 2 else out.out).splitlines()
        return code, [line for line in lines if not line.startswith("not compared: ")]

    return verify


HONEST = 0, ["nothing differs"]


def test_an_unchanged_run_is_reproduced_and_its_folder_stays_unchanged(trained, verify):
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    assert verify(trained) == HONEST
    assert verify(trained, "--state=000004") == HONEST
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before
    assert main(["reproduce", str(trained)]) == 2, "RUN.again exists already"


class Killed(BaseException):
    pass


def test_a_run_that_was_killed_and_resumed_with_other_options(recipe, tmp_path, verify, monkeypatch):
    original, calls = torch.optim.AdamW.step, []

    def step(*arguments):
        calls.append(1)
        if len(calls) == 4:
            raise Killed
        return original(*arguments)

    with monkeypatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(torch.optim.AdamW, "step", step)
        run(recipe, tmp_path / "run", "--checkpoint_steps=1")
    run(recipe, tmp_path / "run", "--resume=auto", "--checkpoint_steps=5", "--timeout=77")
    assert sorted(path.name for path in (tmp_path / "run" / "states").iterdir()) == ["000005", "000006"]
    assert verify(tmp_path / "run") == HONEST


def edit(file, number, change):
    """Call `change` on one line of a JSONL file, as a dict, and write the file again."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    change(lines[number])
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def other_weights(file):
    save_file(
        {name: torch.randn(x.shape).to(x) if x.is_floating_point() else x for name, x in load_file(file).items()}, file
    )


def swap_pictures(run):
    one, two = sorted((run / "images").iterdir())[:2]
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)


def remove(name):
    return lambda run: (run / name).unlink()


def weights(name):
    return lambda run: other_weights(run / name)


def text(name, pattern, replacement):
    def forge(run):
        old = (run / name).read_text()
        new = re.sub(pattern, replacement, old, count=1)
        assert new != old
        (run / name).write_text(new)

    return forge


def copy_of(source, name):
    def forge(run):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (run / source).is_dir() else shutil.copy)(run / source, run / name)

    return forge


def cut(name):
    def forge(run):
        content = (run / name).read_bytes()
        (run / name).write_bytes(content[: len(content) // 2])

    return forge


def folder_instead(name):
    def forge(run):
        (run / name).unlink()
        (run / name).mkdir()

    return forge


def hash_again(state):
    hashes = {file.name: digest([file]) for file in state.iterdir() if file.name != "complete.json"}
    (state / "complete.json").write_text(json.dumps(hashes))


def in_state(forge):
    """Return a function that applies `forge` to a run, and then updates the hashes of its state."""

    def forge_state(run):
        forge(run)
        hash_again(run / "states" / "000004")

    return forge_state


STATE, WEIGHTS = "states/000004/run.json", "0000_0000.safetensors"
FILES_OF_A_STATE = (WEIGHTS, "complete.json", "run.json")
FORGERIES = {
    "reward": (lambda run: edit(run / "metrics.jsonl", 3, lambda line: line.update(reward=9.0)), ["metrics.jsonl"]),
    "pictures": (swap_pictures, ["images/grpo-15-0.webp", "images/grpo-158-0.webp"]),
    "a file is missing": (remove("summary.json"), ["summary.json"]),
    "weights": (weights("checkpoint/model.safetensors"), ["checkpoint/model.safetensors"]),
    "more weights": (
        copy_of("checkpoint/model.safetensors", "checkpoint/other.safetensors"),
        ["checkpoint/other.safetensors"],
    ),
    "weights that nothing wrote": (
        copy_of("checkpoint/config.json", "best/checkpoint/a.json"),
        ["best/checkpoint/a.json"],
    ),
    "a reward model that nothing wrote": (copy_of("checkpoint/config.json", "reward_model/a"), ["reward_model/a"]),
    "a folder of weights": (copy_of("checkpoint/config.json", "checkpoint/x/a.json"), ["checkpoint/x/a.json"]),
    "weights of a state": (in_state(weights(f"states/000004/{WEIGHTS}")), ["states/000004"]),
    "a file in a state": (copy_of("summary.json", "states/000004/more.json"), ["states/000004"]),
    "hashes of a state": (text("states/000004/complete.json", '"[0-9a-f]{8}', '"00000000'), ["states/000004"]),
    "lines of logs in a state": (in_state(text(STATE, '"metrics.jsonl": 4', '"metrics.jsonl": 3')), [STATE]),
    "texts of callbacks in a state": (in_state(text(STATE, "grad_norm", "grad_nrom")), [STATE]),
    "recipe of a state": (in_state(text(STATE, '"grpo.beta": 0.0', '"grpo.beta": 0.1')), [STATE]),
    "a first state": (
        copy_of("states/000004", "states/000000"),
        [f"states/000000/{name}" for name in FILES_OF_A_STATE],
    ),
    "a part of a state": (
        copy_of("states/000004", "states/000005.partial"),
        [f"states/000005.partial/{name}" for name in FILES_OF_A_STATE],
    ),
    "where a row is from": (text("completions.jsonl", '"where": "', '"where": "else'), ["completions.jsonl"]),
    "a time that is text": (text("timings.jsonl", r'"step_time": [\d.e-]+', '"step_time": "1"'), ["timings.jsonl"]),
    "a key twice": (text("summary.json", '"start"', '"start": {}, "start"'), ["summary.json"]),
    "half a log": (cut("metrics.jsonl"), ["metrics.jsonl"]),
    "half a log of timings": (cut("timings.jsonl"), ["timings.jsonl"]),
    "a log that is a folder": (folder_instead("completions.jsonl"), ["completions.jsonl"]),
    "half the weights": (cut("checkpoint/model.safetensors"), ["checkpoint/model.safetensors"]),
    "half the weights of a state": (in_state(cut(f"states/000004/{WEIGHTS}")), ["states/000004"]),
}


@pytest.fixture(scope="module")
def trained_again(trained, tmp_path_factory):
    """Run `reproduce` once, and return the folder with the repeated run."""
    again = tmp_path_factory.mktemp("again") / "run"
    shutil.rmtree(f"{trained}.again", ignore_errors=True)
    assert main(["reproduce", str(trained)]) == 0
    shutil.move(f"{trained}.again", again)
    return again


@pytest.fixture
def instant(trained_again, monkeypatch):
    """Make `reproduce` copy the repeated run instead of training it in each test."""

    def start(config, see):
        shutil.copytree(trained_again, config.output_dir, dirs_exist_ok=True)
        return 0

    monkeypatch.setattr(loop, "run_training", start)


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_file_is_named(name, copy, verify, instant):
    forge, files = FORGERIES[name]
    forge(copy)
    code, lines = verify(copy)
    named = [line.removeprefix("DIFFERS: ").partition(":")[0] for line in lines if line.startswith("DIFFERS")]
    assert (code, named) == (1, files) and lines[-1] == "training with this recipe gives a different run"


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoint", "states/000004"])
def test_symbolic_links_are_rejected(name, copy, verify, instant):
    """Links are rejected, because a link into RUN.again would compare that run with itself."""
    shutil.move(copy / name, copy.parent / "moved")
    (copy / name).symlink_to(copy.parent / "run.again" / name)
    code, [line] = verify(copy)
    assert code == 2 and f"{copy / name} is a symbolic link" in line


@pytest.mark.parametrize("name", ["warnings.jsonl", "checkpoint/pipe"])
def test_pipes_are_refused(name, copy, verify, instant):
    """Reading one waited forever."""
    (copy / name).unlink(missing_ok=True)
    os.mkfifo(copy / name)
    code, [line] = verify(copy)
    assert code == 2 and f"{copy / name} is a pipe, a socket or a device" in line


def test_a_run_can_be_given_by_different_paths(copy, verify, instant, monkeypatch):
    """RUN.again is written beside RUN, also if the run is given as RUN/ or as `.`."""
    before = {*copy.rglob("*")}
    assert verify(f"{copy}/") == HONEST
    monkeypatch.chdir(copy)
    assert (main(["reproduce", "."]), main(["reproduce", "../run/"])) == (2, 2), "run.again exists"
    assert {*copy.rglob("*")} == before


def rounded(run, share=1e-6):
    """Change losses and weights by rounding errors, as if another CPU had trained the run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["loss"] += share
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for file in run.rglob("*.safetensors"):
        save_file({name: x + share if x.is_floating_point() else x for name, x in load_file(file).items()}, file)
    for state in (run / "states").iterdir():
        hash_again(state)


def other_rows(run):
    """Change the row numbers of one step's completions, as if another seed had sampled them."""
    for number in range(8, 12):
        edit(run / "completions.jsonl", number, lambda line: line.update(row=line["row"] + 100))


def fewer_rows(run):
    """Remove every second completion, so that only one of two ranks seems to have logged."""
    lines = (run / "completions.jsonl").read_text().splitlines(keepends=True)
    (run / "completions.jsonl").write_text("".join(lines[0::2]))


@pytest.mark.parametrize(
    ("expected", "forge"),
    [
        (3, lambda run: None),
        (3, fewer_rows),
        (1, swap_pictures),
        (1, lambda run: (run / "completions.jsonl").write_text("")),
        (1, other_rows),
        (1, lambda run: edit(run / "metrics.jsonl", 0, lambda line: line.update(reward=0.99))),
    ],
    ids=["nothing else", "fewer rows", "other pictures", "no rows", "other rows", "another reward"],
)
def test_rounding_errors_with_equal_or_other_rows(expected, forge, copy, verify, instant):
    rounded(copy)
    forge(copy)
    assert verify(copy)[0] == expected


def test_rounded_metrics_of_equal_weights(copy, verify, instant):
    """If weights are equal, metrics may differ only by rounding errors in every step.

    The same run on fewer ranks gives such metrics.
    """
    weights = (copy / "checkpoint" / "model.safetensors").read_bytes()
    rounded(copy)
    (copy / "checkpoint" / "model.safetensors").write_bytes(weights)
    assert verify(copy)[0] == 3
    edit(copy / "metrics.jsonl", 5, lambda line: line.update(reward=0.99))
    assert verify(copy)[0] == 1


def on_two_ranks(work):
    """Call work() in two forked ranks, and return their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def begin(rank):
        gc.freeze()
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        return work()

    return [exit_code(child) for child in [fork(functools.partial(begin, rank)) for rank in range(2)]]


@pytest.mark.slow
def test_a_run_of_two_ranks_is_reproduced_by_two_ranks_and_nearly_by_one(recipe, tmp_path, verify):
    folder = tmp_path / "run"
    assert on_two_ranks(lambda: train_recipe([str(recipe), f"--output_dir={folder}", "--checkpoint_steps=3"])) == [0, 0]
    assert on_two_ranks(lambda: main(["reproduce", str(folder)])) == [0, 0]
    code, lines = verify(folder)
    assert code == 3 and re.match(
        r"both runs used the same rows, and numbers of the first steps differ by [\d.]+e-0[5-9]\. ", lines[-1]
    )
    assert any(re.match(r"DIFFERS: checkpoint/model.safetensors: .* by [\d.]+e-0[4-9]", line) for line in lines)
    for forge in (swap_pictures, remove("summary.json")):
        other = shutil.copytree(folder, tmp_path / "forged")
        forge(other)
        assert verify(other)[0] == 1
        shutil.rmtree(other)
