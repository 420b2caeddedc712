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

    The function returns the exit status and the printed lines, except lines about files that are not compared.
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


def swap_pictures(run):
    one, two = sorted((run / "images").iterdir())[:2]
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)


def remove(file):
    file.unlink()


def weights(file):
    tensors = {name: torch.randn(x.shape).to(x) if x.is_floating_point() else x for name, x in load_file(file).items()}
    save_file(tensors, file)


def cut(file):
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def folder_instead(file):
    file.unlink()
    file.mkdir()


def text(pattern, replacement):
    def forge(file):
        old = file.read_text()
        new = re.sub(pattern, replacement, old, count=1)
        assert new != old
        file.write_text(new)

    return forge


def copy_of(source):
    def forge(file):
        run = next(folder for folder in file.parents if (folder / "config.yaml").exists())
        file.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (run / source).is_dir() else shutil.copy)(run / source, file)

    return forge


def hash_again(state):
    hashes = {file.name: digest([file]) for file in state.iterdir() if file.name != "complete.json"}
    (state / "complete.json").write_text(json.dumps(hashes))


def in_state(forge):
    """Return a function that applies `forge` to a file of a state, and then updates the hashes of the state."""

    def forge_state(file):
        forge(file)
        hash_again(file.parent)

    return forge_state


STATE, WEIGHTS = "states/000004", "0000_0000.safetensors"
MODEL = "checkpoint/model.safetensors"
# (forged file, function that forges it), or also the file that is named instead
FORGERIES = [
    ("metrics.jsonl", lambda file: edit(file, 3, lambda line: line.update(reward=9.0))),
    ("summary.json", remove), (MODEL, weights), ("checkpoint/other.safetensors", copy_of(MODEL)),
    # files that nothing wrote
    ("best/checkpoint/a.json", copy_of("checkpoint/config.json")),
    ("reward_model/a", copy_of("checkpoint/config.json")),
    ("checkpoint/x/a.json", copy_of("checkpoint/config.json")),
    (f"{STATE}/{WEIGHTS}", in_state(weights), STATE), (f"{STATE}/more.json", copy_of("summary.json"), STATE),
    (f"{STATE}/complete.json", text('"[0-9a-f]{8}', '"00000000'), STATE),
    (f"{STATE}/run.json", in_state(text('"metrics.jsonl": 4', '"metrics.jsonl": 3'))),
    (f"{STATE}/run.json", in_state(text("grad_norm", "grad_nrom"))),
    (f"{STATE}/run.json", in_state(text('"grpo.beta": 0.0', '"grpo.beta": 0.1'))),
    ("states/000000", copy_of(STATE)), ("states/000005.partial", copy_of(STATE)),
    ("completions.jsonl", text('"where": "', '"where": "else')),
    ("metrics.jsonl", cut), ("completions.jsonl", folder_instead),
    (f"{STATE}/{WEIGHTS}", in_state(cut), STATE),
]  # fmt: skip


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


@pytest.mark.parametrize("forgery", FORGERIES, ids=[f"{i} {forgery[0]}" for i, forgery in enumerate(FORGERIES)])
def test_a_forged_file_is_named(forgery, copy, verify, instant):
    name, forge, *named = forgery
    forge(copy / name)
    named = named or [name]
    if (copy / name).is_dir() and name.startswith("states/"):  # a whole state
        named = [f"{name}/{file}" for file in (WEIGHTS, "complete.json", "run.json")]
    code, lines = verify(copy)
    found = [line.removeprefix("DIFFERS: ").partition(":")[0] for line in lines if line.startswith("DIFFERS")]
    assert (code, found) == (1, named) and lines[-1] == "training with this recipe gives a different run"


def test_swapped_pictures_are_named(copy, verify, instant):
    swap_pictures(copy)
    code, lines = verify(copy)
    assert code == 1 and [line.partition(":")[2].partition(":")[0] for line in lines[:2]] == [
        " images/grpo-15-0.webp", " images/grpo-158-0.webp"
    ]  # fmt: skip


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
    for forge in (swap_pictures, lambda run: remove(run / "summary.json")):
        other = shutil.copytree(folder, tmp_path / "forged")
        forge(other)
        assert verify(other)[0] == 1
        shutil.rmtree(other)
