"""Test that `check`, or a warning during a run, reports each planted fault and how to fix it."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field

import PIL.Image
import pytest

from minivlmrl.monitor.check import command as check
from tests.helpers.runs import LETTERS, metrics, read_lines, write_lines


@dataclass
class Fault:
    """A change of a correct recipe or its rows, and the expected messages as (sentence, suggested fix)."""

    overrides: list[str] = field(default_factory=list)
    change: dict | Callable = field(default_factory=dict)  # new columns, or a function (number, row) -> columns
    check: tuple[str, str] | None = None  # message from `check`
    run: tuple[str, str] | None = None  # warning during the run


def black(image: str) -> str:
    PIL.Image.new("RGB", (56, 56)).save(image + ".black.png")
    return image + ".black.png"


def asked_twice(number: int, row: dict) -> dict:
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name it."}]
    return {"prompt": talk, "problem": None}


def shown_again(number: int, row: dict) -> dict:
    """Write an evaluation row with another question about the same image, which is saved as another file."""
    PIL.Image.open(row["image"]).save(f"again_{number}.bmp")
    again = {"problem": "What is it?", "image": f"again_{number}.bmp", "solution": row["solution"] if number else " "}
    with open("eval.jsonl", "a" if number else "w", encoding="utf-8") as file:
        file.write(json.dumps(again) + "\n")
    return {}


def one_class(number: int, row: dict) -> dict:
    shown_again(number, row | {"solution": "cat" if number else "dog"})
    return {}


def asked_before(number: int, row: dict) -> dict:
    turns = [("user", "Name it."), ("assistant", row["solution"]), ("user", "And now in capitals.")]
    return {"prompt": [{"role": role, "content": text} for role, text in turns], "problem": None}


def told_by_the_system(number: int, row: dict) -> dict:
    system = {"role": "system", "content": f"The picture shows: {row['solution']}"}
    return {"prompt": [system, {"role": "user", "content": "Name it."}], "problem": None}


def shuffled(number: int, row: dict) -> dict:
    solution = "cat" if number in (2, 5) else row["solution"]
    return {"solution": solution, "completion": f"<think>hm</think><answer>{row['solution']}</answer>"}


FAULTS = [
    Fault(["--sampling.temperature=0.001", "--sampling.top_k=1"],
        run=("the same text is sampled repeatedly", "set them to 1.0")),
    Fault(["--grpo.learning_rate=1e6"], run=("are zero", "lower grpo.learning_rate")),
    Fault(change={"image": None}, check=("has an image or a video", "in the column image or images")),
    Fault(["--rewards={one.py:one: 1}"],
        check=("Reward one.py:one is 1 for every text that was tried", "reads the completions"),
        run=("one.py:one is 1", "Compare completions.jsonl")),
    Fault(change={"solution": "cat"},
        check=("Always answering '<think>hm</think><answer>cat</answer>' scores 1.00", "Balance the solutions")),
    Fault(["--stages=[sft, grpo]"], {"completion": "dog"},
        check=("The mean of reward accuracy is only 0.00", "Set data.answer_format: whole")),
    Fault(["--rewards={one.py:words: 1}"],
        check=("Reward one.py:words is 1.00 for the same word, 60 times", "depends on the answer")),
    Fault(change=lambda i, row: {"image": row["image"].replace(f"{i}.png", "0.png")},
        check=("have the same image", "Check which files the column image")),
    Fault(change=lambda i, row: {"image": black(row["image"]) if i % 5 < 2 else row["image"]},
        check=("4 of 8 images have only one color", "damaged files")),
    Fault(["--data.min_pixels=784", "--data.max_pixels=784"], check=("a single token", "Raise data.max_pixels")),
    Fault(["--data.system_prompt=Be kind."], asked_twice,
        check=("8 of 8 rows have several system messages", "Keep only one")),
    Fault(change=lambda i, row: {"problem": f"What does {row['solution'].replace(' ', '_').upper()}.png show?"},
        check=("8 of 8 questions contain their solution", "Remove the solution from the prompt")),
    Fault(["--stages=[sft, grpo]", "--sampling.stop_token_ids=[1]"],
        check=("completion ends with the token id", "Add it to sampling.stop_token_ids")),
    Fault(["--rewards={accuracy: 1, format: -1}"],
        check=("Correct answers do not score higher", "Check the weights of the rewards")),
    Fault(["--data.eval_file=eval.jsonl"], shown_again,
        check=("8 of 8 images in the evaluation rows are identical to images in the training rows", "Use different")),
    Fault(["--data.eval_file=eval.jsonl", "--data.eval_rewards=[accuracy]"], shown_again,
        check=("1 of 8 rows of eval have an empty solution, which reward accuracy", "write a solution")),
    Fault(change=told_by_the_system, check=("8 of 8 system messages contain their solution", "Remove the solution")),
    Fault(change=asked_before, check=("8 of 8 earlier turns contain their solution", "Remove the solution")),
    Fault(["--data.eval_file=eval.jsonl", "--data.eval_rewards=[accuracy]"], one_class,
        check=("scores 0.88 times as much as correct answers of the evaluation rows", "Balance the solutions")),
    Fault(["--rewards={one.py:noisy: 1}"],
        check=("Reward one.py:noisy gave different values for the same completions", "Remove the random numbers")),
    Fault(["--stages=[sft, grpo]", "--rewards={accuracy: 1}"], shuffled,
        check=("2 of 8 answers in the column completion contradict", "Compare solution, answer and image")),
]  # fmt: skip

OWN_REWARDS = """
import random
def one(completions, **columns):
    return [1.0] * len(completions)

def words(completions, solution, **columns):
    return [float(len(c.split()) > 50) for c in completions]

def noisy(answer_texts, solution, **columns):
    return [float(a == s) + 1e-4 * random.random() for a, s in zip(answer_texts, solution)]
"""


def faults_of(kind):
    faults = [(number, fault) for number, fault in enumerate(FAULTS) if getattr(fault, kind)]
    return [pytest.param(fault, marks=[pytest.mark.slow] * (number > 11)) for number, fault in faults]


@pytest.fixture
def plant(user_data, rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.py").write_text(OWN_REWARDS)

    def plant(change):
        lines = [line | {"image": str(rows.parent / line["image"])} for line in read_lines(rows)]
        of = change if callable(change) else lambda *_: change
        lines = [line | of(number, line) for number, line in enumerate(lines)]
        write_lines(tmp_path / "rows.jsonl", lines)
        return [*user_data, "--data.train_file=rows.jsonl", "--stages=[grpo]"]

    return plant


@pytest.mark.parametrize("fault", faults_of("check"))
def test_check_reports_the_fault_before_a_run(fault, home, plant, capsys):
    sentence, cure = fault.check
    assert check.main([str(home / "recipe.yaml"), *plant(fault.change), *fault.overrides]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("- ")]
    assert [cure in line for line in lines if sentence in line] == [True]


@pytest.mark.parametrize("fault", faults_of("run"))
@pytest.mark.usefixtures("quick", "varied_rollouts")
def test_a_run_reports_the_fault(fault, run, plant, capsys):
    sentence, cure = fault.run
    options = "--grpo.max_steps=11", "--grpo.prompts_per_step=2", LETTERS
    folder = run(*plant(fault.change), *options, *fault.overrides)
    [message] = [line for line in capsys.readouterr().err.splitlines() if sentence in line]
    assert cure in message
    written = metrics(folder, "warnings.jsonl")
    # files count steps from 0
    assert message in [f"warning, grpo {line['step'] + 1}: {line['warning']}" for line in written]
