"""Verify: honest runs pass, killed and resumed ones too; what was forged is named by its file."""

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

from minivlmrl import train
from minivlmrl.__main__ import main
from minivlmrl.reward_functions.names import REWARDS
from minivlmrl.rows import Processor

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
    """Let an untrained model earn different rewards at different lengths."""
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
    train.main([str(recipe), f"--output_dir={folder}", *options])
    return folder


@pytest.fixture(scope="module")
def trained(recipe):
    """A run with states after its second, fourth and sixth step, of which it keeps two."""
    return run(recipe, recipe.parent / "run", "--state_steps=2")


@pytest.fixture
def copy(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def verify(capsys):
    """verify(folder, options) -> exit status and lines, without those of files that it does not compare."""

    def verify(folder, *options):
        shutil.rmtree(f"{folder}.again", ignore_errors=True)
        capsys.readouterr()
        code = main(["verify", str(folder), *options])
        out = capsys.readouterr()
        lines = (out.err if code == 2 else out.out).splitlines()
        return code, [line for line in lines if not line.startswith("not compared: ")]

    return verify


HONEST = 0, ["nothing differs"]


def test_an_honest_run_and_nothing_is_written_in_its_folder(trained, verify):
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    assert verify(trained) == HONEST
    assert verify(trained, "--state=000004") == HONEST
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before
    assert main(["verify", str(trained)]) == 2, "RUN.again is there"


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
        run(recipe, tmp_path / "run", "--state_steps=1")
    run(recipe, tmp_path / "run", "--resume=auto", "--state_steps=5", "--timeout=77")
    assert sorted(path.name for path in (tmp_path / "run" / "states").iterdir()) == ["000005", "000006"]
    assert verify(tmp_path / "run") == HONEST


def edit(file, number, change):
    """Change a line of a file."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    change(lines[number])
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def other_weights(file):
    save_file(
        {name: torch.randn(x.shape).to(x) if x.is_floating_point() else x for name, x in load_file(file).items()}, file
    )


def forge_reward(run):
    edit(run / "metrics.jsonl", 3, lambda line: line.update(reward=9.0))
    return {"metrics.jsonl"}


def forge_pictures(run):
    one, two = sorted((run / "images").iterdir())[:2]
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    return {f"images/{one.name}", f"images/{two.name}"}


def forge_summary(run):
    (run / "summary.json").unlink()
    return {"summary.json"}


def forge_weights(run):
    other_weights(run / "checkpoint" / "model.safetensors")
    return {"checkpoint/model.safetensors"}


def add_weights(run):
    """A file that loaders take before the others."""
    shutil.copy(run / "checkpoint" / "model.safetensors", run / "checkpoint" / "other.safetensors")
    return {"checkpoint/other.safetensors"}


def forge_state(run):
    other_weights(run / "states" / "000004" / "0000_0000.safetensors")
    return {"states/000004/0000_0000.safetensors"}


def test_what_was_forged_is_named(trained, tmp_path, verify, monkeypatch):
    """The second run is the same each time: it is trained once."""
    assert verify(trained) == HONEST
    again = tmp_path / "again"
    shutil.copytree(f"{trained}.again", again)

    def start(config, see):
        shutil.copytree(again, config.output_dir, dirs_exist_ok=True)
        return 0

    monkeypatch.setattr(train, "start", start)
    for forge in (forge_reward, forge_pictures, forge_summary, forge_weights, add_weights, forge_state):
        folder = shutil.copytree(trained, tmp_path / "run")
        files = forge(folder)
        code, lines = verify(folder)
        named = {line.removeprefix("DIFFERS: ").partition(":")[0] for line in lines if line.startswith("DIFFERS")}
        assert (code, named) == (1, files) and lines[-1] == "this is not what the recipe trains"
        shutil.rmtree(folder)


def on_two_ranks(work):
    """Call work() in two forked ranks; their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def begin(rank):
        gc.freeze()
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        return work()

    return [exit_code(child) for child in [fork(functools.partial(begin, rank)) for rank in range(2)]]


@pytest.mark.slow
def test_two_ranks_are_verified_by_two_and_nearly_by_one(recipe, tmp_path, verify):
    folder = tmp_path / "run"
    assert on_two_ranks(lambda: train.main([str(recipe), f"--output_dir={folder}", "--state_steps=3"])) == [0, 0]
    assert on_two_ranks(lambda: main(["verify", str(folder)])) == [0, 0]
    code, lines = verify(folder)
    assert code == 3 and re.match(
        r"rows are the same; numbers of the first steps differ by [\d.]+e-0[5-9]: ", lines[-1]
    )
    assert any(re.match(r"DIFFERS: checkpoint/model.safetensors: .* by [\d.]+e-0[4-9]", line) for line in lines)
    for forge in (forge_pictures, forge_summary):
        other = shutil.copytree(folder, tmp_path / "forged")
        forge(other)
        assert verify(other)[0] == 1
        shutil.rmtree(other)
