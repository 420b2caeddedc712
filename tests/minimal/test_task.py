"""Check the built-in task of minimal.py: what its images show, what its answers say, and the options of its run."""

import random
import sys

import numpy as np
import pytest

import minimal

FORM = "<think>a</think><answer>{}</answer>"


@pytest.mark.parametrize("label", minimal.LABELS)
def test_an_image_shows_what_its_label_says(label):
    color, shape = label.split()
    for seed in range(20):
        random.seed(seed)
        pixels = np.asarray(minimal.draw_object(color, shape))
        rows, columns = np.where((pixels == minimal.COLORS[color]).all(-1))
        box = (np.ptp(rows) + 1) * (np.ptp(columns) + 1)
        share = len(rows) / box  # a triangle fills half of its box
        assert box >= 30**2 and (share == 1 if shape == "square" else 0.45 < share < 0.6)


@pytest.mark.parametrize("wrong", [0.0, 1.0])
def test_rows_have_right_and_wrong_answers(wrong):
    random.seed(0)
    rows = [minimal.draw_row(wrong=wrong) for _ in range(200)]
    right = [minimal.reward(row["completion"], row["solution"]) == 1.5 for row in rows]
    assert all(right) if wrong == 0 else 0 < sum(right) < 40  # a random label is right in 1 of 12 rows
    assert all(minimal.reward(row["chosen"], row["solution"]) == 1.5 for row in rows)
    assert all(row["rejected"] != row["chosen"] for row in rows)
    assert {row["solution"] for row in rows} == set(minimal.LABELS)


def test_the_accuracy_counts_right_answers_alone(monkeypatch, tmp_path):
    minimal.make_folder(tmp_path)
    model = minimal.load(tmp_path)
    answers = [FORM.format("red square"), FORM.format("blue square")]
    monkeypatch.setattr(minimal, "sample", lambda model, *_: minimal.tokenize_answers(model, answers))
    rows = [minimal.draw_row() | {"solution": solution} for solution in ("red square", "blue square", "red triangle")]
    assert minimal.accuracy(model, rows) == 2 / 6


@pytest.mark.parametrize(("words", "expected"), [
    ([], {"stage": minimal.grpo, "max_steps": 160, "learning_rate": 3e-4, "beta": 0.02}),
    (["--dpo"], {"stage": minimal.dpo, "max_steps": 160, "learning_rate": 3e-4, "beta": 1.0}),
    (["--dpo", "--beta=0.5"], {"beta": 0.5}),
    (["folder", "rows"], {"stage": minimal.grpo, "max_steps": 300, "learning_rate": 1e-6, "beta": 0.0}),
    (["folder", "rows", "--sft"], {"stage": minimal.sft, "beta": 0.0}),
    (["folder", "rows", "--dpo"], {"stage": minimal.dpo, "beta": 0.1}),
])  # fmt: skip
def test_the_defaults_depend_on_the_folder_and_the_stage(words, expected, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["minimal.py", *words])
    options = vars(minimal.read_options())
    assert {name: options[name] for name in expected} == expected
