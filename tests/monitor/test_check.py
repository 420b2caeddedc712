"""Test the command `check` on good recipes and on single faults."""

import re
from dataclasses import replace

import PIL.Image
import pytest
import torch

from minivlmrl.config.loading import load_config
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.monitor.check import command as check
from minivlmrl.monitor.check import rewards as check_rewards
from minivlmrl.monitor.check import rows as check_rows
from minivlmrl.rewards.registry import Reward, get_reward
from minivlmrl.tasks import shapes
from tests.helpers import tiny
from tests.helpers.links import ROOT
from tests.helpers.runs import read_lines, write_lines
from tests.helpers.talk import user
from tests.recipes.test_fashion import write_debian

RECIPES = ROOT / "recipes"
PROCESSOR = tiny.processor()
EMBEDDED = [path.stem for path in sorted(RECIPES.glob("*.yaml")) if "task: " in path.read_text()]


@pytest.mark.parametrize("recipe", EMBEDDED)
def test_good_recipes_have_no_fault(recipe, capsys, tmp_path):
    overrides = ["--num_threads=1", "--reward_model.path=null"]
    if recipe == "clothes":
        overrides += ["--model.path=null", f"--model.config={RECIPES / 'fashion_model.json'}"]
    if recipe in ("fashion", "clothes"):  # a small file instead of the data set
        write_debian(tmp_path)
        task = f"--data.task=fashion.py:TASK(folder={str(tmp_path)!r}, demonstrations=12)"
        overrides += [task, "--sft.prompts_per_step=4", "--grpo.prompts_per_step=4"]
    assert check.main([str(RECIPES / f"{recipe}.yaml"), *overrides]) == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    assert "No problems were found." in out and "output:" not in out


def findings(rewards, rows, weights=None, solutions=None, **options):
    weights = torch.ones(len(rewards)) if weights is None else torch.tensor(weights)
    trial = check_rewards.Trial(rewards, weights, rows, PROCESSOR, **options)
    return list(check_rewards.check_rewards(trial, solutions or check_rows.solutions_of(rows)))


def points(answer_texts, solution, **columns):
    return [25.0 * (answer == truth) - 5 for answer, truth in zip(answer_texts, solution, strict=True)]


@pytest.mark.parametrize(("function", "num_yes", "drawn", "expected"), [
    ("accuracy", 20, range(16), None),  # all 16 rows of the sample have the solution yes
    ("accuracy", 36, range(21, 37), "scores 0.90 times as much as correct answers"),
    (points, 30, range(20, 36), None),
    (points, 38, range(23, 39), "scores 0.94 times as much as correct answers"),  # ((20 * 38 - 5 * 2) / 40) / 20
])  # fmt: skip
def test_constant_answers_are_scored_on_the_whole_dataset(tmp_path, function, num_yes, drawn, expected):
    PIL.Image.new("RGB", (28, 28)).save(tmp_path / "0.png")
    solutions = ["yes"] * num_yes + ["no"] * (40 - num_yes)
    write_lines(tmp_path / "rows.jsonl", [{"problem": "?", "image": "0.png", "solution": one} for one in solutions])
    rows = FileDataset(tmp_path / "rows.jsonl")
    reward = get_reward(function) if function == "accuracy" else Reward("own", function)
    found = findings([reward], [rows[number] for number in drawn], solutions=check_rows.solutions_of(rows))
    start = "Always answering '<think>hm</think><answer>yes</answer>' "
    assert [one.startswith(f"{start}{expected}") for one in found] == [True] * bool(expected), found


def test_one_long_demonstration_in_forty_is_found(tmp_path):
    lines = [{"problem": "?", "completion": "red" if number else "red " * 40} for number in range(40)]
    write_lines(tmp_path / "rows.jsonl", lines)
    rows = FileDataset(tmp_path / "rows.jsonl")
    assert lines[0]["completion"] not in [row.completion for row in check_rows.sample_rows(rows)]
    config = load_config(RECIPES / "shapes.yaml", ["--sampling.max_new_tokens=20"])
    [message] = check_rows.check_answers(config, ["completion"], rows, PROCESSOR)
    assert message == "An answer in the field completion has 42 tokens, but sampling.max_new_tokens is 20. Raise it."
    config.sampling.max_new_tokens = 42
    assert not list(check_rows.check_answers(config, ["completion"], rows, PROCESSOR))


def small(answer_texts, solution, **columns):
    return [0.1 * (answer == truth) for answer, truth in zip(answer_texts, solution, strict=True)]


def shape_rows():
    rows = [replace(shapes.Shapes(16, "own")[i], key=str(i)) for i in range(16)]
    return [replace(row, completion=f"<answer>{row.columns['solution']}</answer>") for row in rows]


def test_demonstrations_are_compared_with_the_highest_reward():
    trial = check_rewards.Trial([Reward("own", small)], torch.ones(1), shape_rows(), PROCESSOR)
    assert not list(check_rewards.check_demonstrations(trial))
    wrong = [replace(row, completion="<answer>thing</answer>") for row in trial.rows]
    [message] = check_rewards.check_demonstrations(replace(trial, rows=wrong))
    assert message.startswith("The mean of reward own is only 0.00")


def test_rows_that_stand_twice_with_another_solution_are_named(tmp_path):
    PIL.Image.new("RGB", (28, 28)).save(tmp_path / "0.png")
    row = {"problem": "Is it?", "image": "0.png", "solution": "yes"}
    lines = [row, row | {"problem": "Is it red?"}, row, row | {"solution": "no"}]
    write_lines(tmp_path / "rows.jsonl", lines[:3])
    assert not list(check_rows.check_duplicates(FileDataset(tmp_path / "rows.jsonl")))
    write_lines(tmp_path / "rows.jsonl", lines)
    [message] = check_rows.check_duplicates(FileDataset(tmp_path / "rows.jsonl"))
    where = f"{tmp_path}/rows.jsonl"
    assert message.startswith("1 row with the prompt and images of an earlier row, but a different solution: ")
    assert f"{where}:1 has 'yes', and {where}:4 has 'no'" in message
    assert not list(check_rows.check_duplicates(shapes.Shapes(4, "own")))


def tokens(completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]


@pytest.mark.parametrize(("weight", "message"), [(0.001, []), (0.01, ["Correct answers score less than a word that"])])
def test_a_reward_for_tokens_is_compared_with_the_limit_of_tokens(weight, message):
    """With the weight 0.01, 1,000 tokens score 10, and a correct answer scores 5."""
    rewards = [get_reward("accuracy"), Reward("tokens", tokens)]
    rows = [replace(shapes.Shapes(4, "own")[i], key=str(i)) for i in range(4)]
    found = findings(rewards, rows, [5.0, weight], max_new_tokens=1000)
    assert len(found) == len(message) and all(map(str.startswith, found, message)), found


def one_of(answer_texts, solution, **columns):
    return [float(answer in truths) for answer, truths in zip(answer_texts, solution, strict=True)]


def as_python(answer_texts, solution, **columns):
    return [float(answer == str(truth)) for answer, truth in zip(answer_texts, solution, strict=True)]


@pytest.mark.parametrize(("reward", "solution", "message"), [
    (one_of, lambda color: [color, f"{color}ish"], []),
    (one_of, lambda color: [color, "thing"], ["Always answering '<think>hm</think><answer>thing</answer>'"]),
    (as_python, lambda color: [color], ["4 of 4 solutions that were checked are lists"]),
    (get_reward("accuracy").function, lambda color: color, []),
    (get_reward("iou").function, lambda color: [0, len(color), 20, 20], []),
    (as_python, lambda color: f"['{color}']", ["4 of 4 solutions that were checked are lists"]),
])  # fmt: skip
def test_solutions_that_are_lists(reward, solution, message):
    """Each text in a list is a correct answer, but a list of numbers is one answer."""
    colors = "red", "green", "blue", "yellow"
    shown = zip(colors, shapes.Shapes(4, "own"), strict=True)
    rows = [replace(row, columns=row.columns | {"solution": solution(color)}) for color, row in shown]
    found = findings([Reward("own", reward)], rows)
    assert len(found) == len(message) and all(part in text for part, text in zip(message, found, strict=True)), found


@pytest.mark.parametrize("solutions", [("red", "green", "blue"), ("0", "1", "2"), (0, 1, 2)])
def test_the_letter_of_a_choice_is_an_answer(solutions):
    """A model answers with the letter that the prompt lists, but the reward compares the text or the index."""
    prompt = "What?\nA. red\nB. green\n(C) blue"
    shown = zip(solutions, "ABC", shapes.Shapes(3, "own"), strict=True)
    rows = [replace(row, messages=[user(prompt)], images=[], columns={"solution": text}) for text, _, row in shown]
    assert [check_rewards.answer_forms(row, PROCESSOR)[0] for row in rows] == ["A", "B", "C"]
    message = "3 of 3 solutions that were checked are lists, objects, numbers, boxes or choices"
    assert any(sentence.startswith(message) for sentence in findings([get_reward("accuracy")], rows))


@pytest.mark.parametrize(("solution", "answer"), [
    ("(B)", "B"), (r"\boxed{cat}", "cat"), ("1,200", "1200"), ("12,00", None), ("f(x)", None),
])  # fmt: skip
def test_a_solution_with_signs_that_an_answer_may_lack_is_reported(solution, answer):
    rows = [replace(row, columns={"solution": solution}) for row in shapes.Shapes(2, "own")]
    found = [text for text in findings([get_reward("accuracy")], rows) if "compares as text" in text]
    assert bool(found) == bool(answer)
    assert all(f"the answer {answer!r} gets 0.00 for the solution {solution!r}" in text for text in found), found


def test_a_number_of_which_the_choices_have_the_text_is_no_index():
    row = replace(shapes.Shapes(1, "own")[0], images=[], columns={"solution": "2"})
    forms = {prompt: check_rewards.answer_forms(replace(row, messages=[user(prompt)]), PROCESSOR) for prompt in (
        "How many?\nA. 2\nB. 3\nC. 4", "How many?\nA. few\nB. many", "How many?"
    )}  # fmt: skip
    assert [*forms.values()] == [["A", "2"], ["2"], ["2"]]


@pytest.mark.parametrize("space", ["thousandths", "resized", "unit"])
def test_right_boxes_are_in_the_unit_of_the_model(space):
    """The solution is in pixels of the file, but the model answers in its own unit."""
    rows = [replace(row, columns={"solution": [1 + i, 2, 20, 24]}) for i, row in enumerate(shapes.Shapes(4, "own"))]
    processor = replace(PROCESSOR, box_space=space)
    trial = check_rewards.Trial([get_reward("iou")], torch.ones(1), rows, processor)
    assert (trial.score_answers(trial.right_answers()) > 0.99).all()


def test_unreadable_rows_are_skipped_as_in_training(home, user_data, rows, tmp_path, capsys):
    """Row 0 is damaged, because rewards are tried with the first row before the model is loaded."""
    (tmp_path / "bad.png").write_bytes(b"<!doctype html>")
    lines = read_lines(rows)
    for number, line in enumerate(lines):
        line["image"] = str(tmp_path / "bad.png" if number in (0, 3) else rows.parent / line["image"])
    write_lines(tmp_path / "rows.jsonl", lines)
    data = [*user_data, f"--data.train_file={tmp_path / 'rows.jsonl'}"]
    options = [str(home / "recipe.yaml"), *data, "--stages=[grpo]", "--data.skip_unreadable=true"]
    check.main(options)
    message = r"rows of grpo: .*; 2 unreadable rows will be skipped .*, for example \S*rows\.jsonl:1: "
    assert re.search(message, capsys.readouterr().out)
    with pytest.raises(ValueError, match=r"rows\.jsonl:1"):
        check.main(options[:-1])
