"""Check the exercises: each known mistake is named, the solution passes, and other variable names also pass."""

import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from docs.exercises.__main__ import PACKAGE, check, load, main, markers
from docs.scripts import exercises

EXERCISES = {number: load(number) for number in range(1, len(markers()) + 1)}
MISTAKES = [(number, *wrong) for number, exercise in EXERCISES.items() for wrong in exercise.wrong_answers()]
ANSWERS = yaml.safe_load((Path(__file__).parents[1] / "recorded" / "exercise_answers.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("number", EXERCISES)
def test_the_original_passes_and_the_hole_does_not(number):
    exercise = EXERCISES[number]
    passed, says = check(exercise, exercise.text(exercise.solution), "mine.py")
    assert passed and says.endswith(f" equal those of minivlmrl/{exercise.name}")
    hole = exercise.text()
    passed, says = check(exercise, hole, "mine.py")
    assert not passed and re.search(rf"mine.py, line \d+: NotImplementedError: exercise {number}: fill this in", says)
    assert exercise.solution.splitlines()[0] not in hole


@pytest.mark.parametrize("number, mistake, fill", MISTAKES)
def test_a_mistake_is_recognised_by_its_name(number, mistake, fill):
    exercise = EXERCISES[number]
    assert check(exercise, exercise.text(fill), "mine.py") == (False, f"not yet: {mistake}")


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: f"{answer['exercise']}-{answer.get('named')}")
def test_a_wrong_answer_of_a_reader_is_refused_and_named(answer):
    exercise = EXERCISES[answer["exercise"]]
    torch.manual_seed(0)  # the code in one answer samples random numbers
    passed, says = check(exercise, exercise.text(answer["code"].rstrip()), "mine.py")
    assert not passed and answer.get("named", "expected") in says


def test_two_mistakes_in_two_results_are_both_named():
    wrong = EXERCISES[7].solution.replace("log_softmax(-1)", "log_softmax(0)").replace("-(log", "(log")
    wrong = wrong.replace("return", "log_probs = logits.log_softmax(-1)\nreturn")
    says = check(EXERCISES[7], EXERCISES[7].text(wrong), "mine.py")[1]
    assert re.match("not yet: the softmax runs over the tokens.*\nand: the entropy has the wrong sign", says)


def test_a_lost_function_is_named(tmp_path):
    shutil.copy(PACKAGE / "data" / "image.py", tmp_path)
    with pytest.raises(
        ValueError, match=r"docs/exercises/holes.yaml: no function of minivlmrl is named group_advantages; correct"
    ):
        load(9, tmp_path)
    with pytest.raises(ValueError, match="exercise 11 does not exist; choose a number from 1 to 10"):
        load(11)


@pytest.mark.parametrize("filled, says", [
    ("return math.sqrt(2)", "mine.py, line 37: NameError: name 'math' is not defined"),
    ("return (", "mine.py, line 37: SyntaxError: '(' was never closed"),
    ("return rewards", "input: 1, 1, 0, 0; scale_rewards group\nexpected: tensor([ 0.8659,  0.8659,"),
    # three mistakes at once
    ("return (rewards - rewards.mean()) / (rewards.std() + EPSILON)",
     'perhaps: with "none", you divide by a standard deviation; do not divide'),
])  # fmt: skip
def test_unknown_mistakes_are_shown(filled, says):
    passed, said = check(EXERCISES[9], EXERCISES[9].text(filled), "mine.py")
    assert not passed and says in said


def test_the_page_shows_what_is_printed_today():
    """If this fails after you changed an exercise, run: python -m docs.scripts.exercises."""
    assert exercises.PAGE.read_text(encoding="utf-8") == exercises.page()


def test_the_commands_that_a_reader_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "exercise_9.py"
    exercise = EXERCISES[9]
    assert main(["9", "--check"]) == 2 and "exercise_9.py does not exist" in capsys.readouterr().err
    assert main(["9"]) == 0 and file.read_text() == exercise.text()
    assert main(["9"]) == 2 and "exercise_9.py already exists" in capsys.readouterr().err
    assert main(["9", "--check"]) == 1 and capsys.readouterr().out == ""
    assert main(["9", "--solution"]) == 0 and capsys.readouterr().out == exercise.solution + "\n"
    file.rename("mine.py")
    Path("mine.py").write_text(exercise.text(exercise.solution))
    assert main(["9", "--check", "mine.py"]) == 0 and capsys.readouterr().out.startswith("pass: ")
