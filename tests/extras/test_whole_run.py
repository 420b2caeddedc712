"""Test that `replay --all` accepts unchanged runs, also resumed runs, and names changed files."""

import contextlib
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minivlmrl.__main__ import main
from minivlmrl.commands.train import train_recipe
from minivlmrl.data.processor import Processor
from minivlmrl.files import digest
from minivlmrl.rewards.registry import REWARDS
from minivlmrl.run import loop
from tests.helpers import tiny
from tests.helpers.children import fork_processes
from tests.helpers.runs import leave_out, metrics, read_lines, write_lines
from tests.helpers.stages import write_recipe

STAGE = {"max_steps": 6, "prompts_per_step": 4, "micro_batch_size": 4, "learning_rate": 3e-3}
DATA = {"eval_rows": 1, "task": "shapes(demonstrations=8)"}
RECIPE = tiny.recipe(STAGE, stages=["grpo"], data=DATA, rewards={"letters": 1.0}, log_completions=1)


@pytest.fixture(scope="module", autouse=True)
def lively():
    """Make completions of an untrained model differ: every eighth token ends one, and letters are rewarded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(REWARDS, "letters", "tests.helpers.stages:letters")
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
    """Train six steps with a checkpoint every two steps, so that the run keeps its last two states."""
    return run(recipe, recipe.parent / "run", "--checkpoint_steps=2")


@pytest.fixture
def copy(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def verify(capsys):
    """Return a function that runs `replay --all`: (exit status, printed lines without the files not compared)."""

    def verify(folder, *options):
        shutil.rmtree(f"{folder}.again", ignore_errors=True)
        capsys.readouterr()
        code = main(["replay", str(folder), "--all", *options])
        out = capsys.readouterr()
        lines = (out.err if code == 2 else out.out).splitlines()
        return code, [line for line in lines if not line.startswith("not compared: ")]

    return verify


HONEST = 0, ["nothing differs"]


def test_an_unchanged_run_is_reproduced_and_its_folder_stays_unchanged(recipe, trained, verify, monkeypatch):
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    assert verify(trained) == HONEST
    assert verify(trained, "--state=000004") == HONEST
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before
    monkeypatch.chdir(trained)
    assert main(["replay", ".", "--all"]) == 2, "RUN.again exists already, beside RUN"
    assert main(["replay", str(recipe), "--all"]) == 2, "no run"
    assert main(["replay", str(trained), "--state=000004"]) == 2, "--state without --all"


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


def edit(file, number, **fields):
    """Change fields in one line of a JSONL file."""
    lines = read_lines(file)
    lines[number] |= fields
    write_lines(file, lines)


def swap_pictures(run):
    one, two = sorted((run / "images").iterdir())[:2]
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)


def weights(file):
    tensors = {name: torch.randn(x.shape).to(x) if x.is_floating_point() else x for name, x in load_file(file).items()}
    save_file(tensors, file)


def cut(file):
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def text(old, new):
    """Return a function that replaces a text in a file once."""

    def change(file):
        content = file.read_text()
        assert old in content
        file.write_text(content.replace(old, new, 1))

    return change


def copy_of(source):
    """Return a function that copies a file or folder in the same run."""

    def change(file):
        run = next(folder for folder in file.parents if (folder / "config.yaml").exists())
        file.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (run / source).is_dir() else shutil.copy)(run / source, file)

    return change


def hash_again(state):
    hashes = {file.name: digest([file]) for file in state.iterdir() if file.name != "complete.json"}
    (state / "complete.json").write_text(json.dumps(hashes))


def in_state(change):
    """Return a function that applies `change` to a file in a saved state, and then updates the state's hashes."""
    return lambda file: (change(file), hash_again(file.parent))


STATE, WEIGHTS = "states/000004", "0000_0000.safetensors"
MODEL = "checkpoint/model.safetensors"
# (changed file, function that changes it), and also the files that are named instead
CHANGES = [
    ("metrics.jsonl", lambda file: edit(file, 3, reward=9.0)), ("summary.json", Path.unlink), (MODEL, weights),
    ("", swap_pictures, "images/grpo-15-0.webp", "images/grpo-158-0.webp"),
    # files that nothing wrote
    *((f"{folder}/a.json", copy_of("checkpoint/config.json")) for folder in ("best/checkpoint", "checkpoint")),
    (f"{STATE}/{WEIGHTS}", in_state(weights), STATE), (f"{STATE}/{WEIGHTS}", in_state(cut), STATE),
    (f"{STATE}/complete.json", text('safetensors": "', 'safetensors": "0'), STATE),
    (f"{STATE}/run.json", in_state(text('"metrics.jsonl": 4', '"metrics.jsonl": 3'))),
    ("states/000000", copy_of(STATE), *(f"states/000000/{file}" for file in (WEIGHTS, "complete.json", "run.json"))),
]  # fmt: skip


@pytest.fixture(scope="module")
def trained_again(trained, tmp_path_factory):
    """Run `replay --all` once, and return the folder with the repeated run."""
    again = tmp_path_factory.mktemp("again") / "run"
    shutil.rmtree(f"{trained}.again", ignore_errors=True)
    assert main(["replay", str(trained), "--all"]) == 0
    shutil.move(f"{trained}.again", again)
    return again


@pytest.fixture
def instant(trained_again, monkeypatch):
    """Make `replay --all` copy the repeated run, because training it in each test would be slow."""

    def start(config, see):
        shutil.copytree(trained_again, config.output_dir, dirs_exist_ok=True)
        return 0

    monkeypatch.setattr(loop, "run_training", start)


@pytest.mark.parametrize("change", CHANGES, ids=[f"{i} {change[0]}" for i, change in enumerate(CHANGES)])
def test_a_changed_file_is_named(change, copy, verify, instant):
    name, function, *named = change
    function(copy / name)
    code, lines = verify(copy)
    found = [line.removeprefix("DIFFERS: ").partition(":")[0] for line in lines if line.startswith("DIFFERS")]
    assert (code, found) == (1, named or [name]) and lines[-1] == "training with this recipe gives a different run"


def rounded(run):
    """Change losses and weights by rounding errors, as if another CPU had trained the run."""
    for number in range(6):
        edit(run / "metrics.jsonl", number, loss=metrics(run)[number]["loss"] + 1e-6)
    for file in run.rglob("*.safetensors"):
        save_file({name: x + 1e-6 if x.is_floating_point() else x for name, x in load_file(file).items()}, file)
    for state in (run / "states").iterdir():
        hash_again(state)


def other_rows(run):
    """Change the row numbers in one step's completions, as if another seed had sampled them."""
    for number in range(8, 12):
        edit(run / "completions.jsonl", number, row=1000 + number)


def fewer_rows(run):
    """Remove every second completion, as if one rank out of two had logged."""
    lines = (run / "completions.jsonl").read_text().splitlines(keepends=True)
    (run / "completions.jsonl").write_text("".join(lines[0::2]))


def rounded_metrics(run):
    """Change the losses by rounding errors, but not the weights."""
    weights = (run / MODEL).read_bytes()
    rounded(run)
    (run / MODEL).write_bytes(weights)


@pytest.mark.parametrize("expected, changes", [
    (3, [rounded]),
    (3, [rounded, fewer_rows]),
    (3, [rounded_metrics]),
    (1, [rounded, swap_pictures]),
    (1, [rounded, lambda run: (run / "completions.jsonl").write_text("")]),
    (1, [rounded, other_rows]),
    (1, [rounded, lambda run: edit(run / "metrics.jsonl", 0, reward=0.99)]),
    (1, [rounded_metrics, lambda run: edit(run / "metrics.jsonl", 5, reward=0.99)]),
], ids=["nothing else", "fewer rows", "equal weights", "other pictures", "no rows", "other rows", "another reward",
        "equal weights, another reward"])  # fmt: skip
def test_rounding_errors_with_equal_or_other_rows(expected, changes, copy, verify, instant):
    for change in changes:
        change(copy)
    assert verify(copy)[0] == expected


@pytest.mark.slow
def test_a_run_of_two_ranks_is_reproduced_by_two_ranks_and_nearly_by_one(recipe, tmp_path, verify):
    folder = tmp_path / "run"
    train = [str(recipe), f"--output_dir={folder}", "--checkpoint_steps=3"]
    assert fork_processes(2, lambda rank: train_recipe(train)) == [0, 0]
    assert fork_processes(2, lambda rank: main(["replay", str(folder), "--all"])) == [0, 0]
    code, lines = verify(folder)
    assert code == 3 and re.match(
        r"both runs used the same rows, and numbers of the first steps differ by [\d.]+e-0[5-9]\. ", lines[-1]
    )
    assert any(re.match(r"DIFFERS: checkpoint/model.safetensors: .* by [\d.]+e-0[4-9]", line) for line in lines)
    for change in (swap_pictures, lambda run: (run / "summary.json").unlink()):
        other = shutil.copytree(folder, tmp_path / "changed")
        change(other)
        assert verify(other)[0] == 1
        shutil.rmtree(other)
