"""Check the exercises: functions of minimal.py pass, and empty bodies and common mistakes are refused."""

import re
from pathlib import Path

import pytest

from docs.exercises.__main__ import check, empty_body, file_text, main, solution
from docs.exercises.cases import EXERCISES
from tests.helpers.links import ROOT

PAGE = (ROOT / "docs" / "exercises.md").read_text(encoding="utf-8")


ADVANTAGES = EXERCISES[9]


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_the_function_of_minimal_passes_and_an_empty_body_does_not(exercise):
    body = solution(exercise)
    expected = check(exercise, file_text(exercise, body), "mine.py")
    assert re.fullmatch(r"pass: \d results equal those of minimal.py", expected)
    empty = file_text(exercise, empty_body(exercise))
    assert body.splitlines()[0] not in empty
    line = empty.splitlines().index(empty_body(exercise)) + 1
    expected = check(exercise, empty, "mine.py")
    assert expected == f"mine.py, line {line}: NotImplementedError: write the body of {exercise.name}"


@pytest.mark.parametrize(
    ("exercise", "mistake"), [(exercise, mistake) for exercise in EXERCISES for mistake in exercise.mistakes]
)
def test_a_mistake_is_refused_and_named(exercise, mistake):
    old, new = exercise.mistakes[mistake]
    body = solution(exercise)
    assert old in body, "minimal.py has other lines now: write the mistake as an edit of these"
    expected = check(exercise, file_text(exercise, body.replace(old, new)), "mine.py")
    assert expected.startswith("not yet: ") and f"\n    perhaps {mistake}" in expected


@pytest.mark.parametrize("body, expected", [
    ("return (", "mine.py, line 20: SyntaxError: '(' was never closed"),
    ("return rewards.average()", "mine.py, line 20: AttributeError: 'Tensor' object has no attribute 'average'"),
    ("rewards - rewards.mean()", "advantages is None, but Tensor is right"),
    ("return rewards.float()", "the dtype of advantages is torch.float32, but torch.float64 is right"),
    ("return 3 * (rewards - rewards.mean()) / (rewards.std() + 1e-4)",
     "4 of 4 values of advantages differ, most at [0]: yours is 2.59763, but 0.865875 is right; each value is 3 times"),
    ("x = rewards.view(-1, num_generations)\n    x = x - x[:, :1]\n"
     "    x = (x - x.mean(1)[:, None]) / (x.std(1)[:, None] + 1e-4)\n    return x.view(-1)", "pass"),
])  # fmt: skip
def test_other_answers_are_described(body, expected):
    message = check(ADVANTAGES, file_text(ADVANTAGES, f"    {body}"), "mine.py")
    assert expected in message and "perhaps" not in message


def test_the_page_shows_what_is_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for kind, text in re.findall(r"```(bash|python|text)\n(.*?)```", PAGE, re.DOTALL):
        if kind == "bash":
            main(text.split()[3:])
        elif kind == "python":
            Path("exercise_10.py").write_text(file_text(ADVANTAGES, text), encoding="utf-8")
        else:
            assert text == capsys.readouterr().out


def test_the_commands_that_a_reader_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([]) == 0 and capsys.readouterr().out.startswith("  1  smart_resize ")
    assert main(["10"]) == 0 and Path("exercise_10.py").read_text() == file_text(ADVANTAGES, empty_body(ADVANTAGES))
    capsys.readouterr()
    assert main(["10", "--solution"]) == 0
    printed = capsys.readouterr().out
    assert re.match(r"groups = rewards\.view\(-1, num_generations\)\n(.*\n)*return advantages\.flatten\(\)\n$", printed)
    for arguments, expected in (
        (["10"], "File exists: exercise_10.py"),
        (["9", "--check"], "No such file or directory: exercise_9.py"),
        (["13"], "exercise 13 does not exist; choose a number from 1 to 12"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert expected in capsys.readouterr().err
