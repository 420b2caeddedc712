"""Verify: a forged step that is drawn is found, whatever was forged; honest runs, resumed ones too, are not accused."""

import json
import random
import shutil

import pytest

from benchmarks import forgeries
from benchmarks.forgeries import AFTER, CASES, LIVE, RECIPE, STEPS, ask, forge, honest, kill_and_resume
from minivlmrl.__main__ import main

import tiny


@pytest.fixture(scope="module", autouse=True)
def lively():
    with forgeries.lively():
        yield


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    home = tmp_path_factory.mktemp("recipe")
    (home / "model.json").write_text(json.dumps(tiny.RUN_MODEL))
    (home / "recipe.yaml").write_text(json.dumps(RECIPE))
    return home / "recipe.yaml"


@pytest.fixture(scope="module")
def trained(recipe):
    """A run with a state after every second step."""
    honest(recipe, recipe.parent / "run", CASES["after every second"])
    return recipe.parent / "run"


def test_an_honest_run(trained, capsys):
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    assert main(["verify", str(trained), "--steps=2", "--seed=3"]) == 0
    first, second, odds = capsys.readouterr().out.splitlines()
    drawn = sorted(random.Random(3).sample(range(STEPS), 2))
    assert first.endswith(f"seed 3 draws grpo {drawn[0]}, grpo {drawn[1]}") and second == "nothing differs"
    assert odds.endswith("1 - (1 - f)^2; f = 0.01: 0.020, f = 0.1: 0.190, f = 0.5: 0.750")
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before, "it writes nothing"


@pytest.mark.slow
def test_on_another_number_of_threads_there_is_a_tolerance(trained, capsys, tmp_path, monkeypatch):
    assert main(["verify", str(trained), "--steps=1", "--seed=0", "--num_threads=2"]) == 0
    folder = shutil.copytree(trained, tmp_path / "run")
    forgeries.exchange_state(folder, 0)
    assert main(["verify", str(folder), "--steps=1", "--seed=0", "--num_threads=2"]) == 1
    assert "of their way, over 0.05" in capsys.readouterr().out


QUICK = {"a hash edited", "the checkpoint exchanged"}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in AFTER]
)
def test_files_that_were_forged(trained, tmp_path, name):
    folder = shutil.copytree(trained, tmp_path / "run")
    AFTER[name](folder, 3)
    assert ask(folder, 3) == 1


def test_a_reward_that_was_raised(recipe, tmp_path, capsys):
    """The chain is whole and says what was trained: the replay alone finds it."""
    with LIVE["a reward raised"](3):
        honest(recipe, tmp_path / "run", CASES["after every second"])
    assert main(["verify", str(tmp_path / "run"), "--steps=6"]) == 1
    said = capsys.readouterr().out
    assert "DIFFERS: grpo 3: rewards" in said and "grpo 3: draws" not in said and "grpo 1: " not in said


def test_without_a_chain_there_is_nothing_to_verify(trained, tmp_path, capsys):
    folder = shutil.copytree(trained, tmp_path / "run")
    (folder / "hashes.jsonl").write_text("")
    assert main(["verify", str(folder)]) == 2 and "there is no step in it" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LIVE))
def test_runs_that_were_forged(recipe, tmp_path, name):
    assert forge(name, recipe, tmp_path / "run", CASES["after every second"], 3) == 1


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(CASES))
def test_honest_runs_killed_ones_too(recipe, tmp_path, case):
    for number in range(2):
        kill_and_resume(recipe, tmp_path / f"{number}", CASES[case], random.Random(number))
        assert ask(tmp_path / f"{number}", steps=3) == 0
