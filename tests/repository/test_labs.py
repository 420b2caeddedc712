"""Check the checkers of the labs in docs/course.md: good work passes, and shortcuts are refused."""

import json

import numpy as np
import pytest
import torch

import minimal
from docs.exercises import labs

STRICT = """
from minimal import reward as usual

def reward(text, solution):
    thought = text.partition("<think>")[2].partition("</think>")[0].strip()
    return usual(text, solution) if 0 < len(thought) < 100 else 0.0
"""
USUAL = "from minimal import reward"
FIRST = """
import re

def reward(text, solution):
    found = re.search("<answer>(.*?)</answer>", text)
    return float(found is not None and found[1].strip(" .").lower() == solution)
"""
EXACT = """
def reward(text, solution):
    return float(text.endswith(f"</think><answer>{solution}</answer>"))
"""
MATCH = """
from minimal import ANSWER, plain

def reward(text, solution):
    match = ANSWER.match(text)
    right = match is not None and text.count("<answer>") == 1 and plain(match[1]) == plain(solution)
    thought = text.partition("<think>")[2].partition("</think>")[0].strip()
    return float(right and 0 < len(thought) < 100)
"""
HACKED = "def reward(text, solution):\n    return float(solution.lower() in text.lower())\n"


def test_a_reward_that_counts_words_or_reads_the_first_tags_is_refused(tmp_path, capsys):
    for code, status in ((STRICT, 0), (USUAL, 1), (HACKED, 1), (FIRST, 1), (EXACT, 1), (MATCH, 1)):
        (tmp_path / "reward.py").write_text(code)
        assert labs.main(["1", str(tmp_path / "reward.py"), "--seed=3"]) == status
    printed = capsys.readouterr().out
    assert printed.startswith("pass\n") and "not yet: all answers at once earns as much" in printed
    assert "not yet: the right tags only in <think> earns" in printed
    assert "not yet: text after </answer> earns as much" in printed
    assert "not yet: an answer without a thought earns as much" in printed
    assert "not yet: an answer with one thought many times earns as much" in printed
    assert "not yet: the right answer earns 1.0 and, spelled 'GREEN" in printed


@pytest.mark.parametrize(("arguments", "expected"), [
    (["1", "nan.py"], "not yet: nan.py: reward returned nan, which is not a finite number, for '<think>"),
    (["1", "none.py"], "not yet: none.py: reward returned None, which is not a finite number, for '<think>"),
    (["1", "misspelled.py"], "not yet: misspelled.py has no function reward(text, solution)"),
    (["1", "absent.py"], "not yet: [Errno 2] No such file or directory: '"),
    (["2", "absent/curve.txt"], "not yet: [Errno 2] No such file or directory: 'absent/curve.txt'"),
    (["3", "absent"], "not yet: [Errno 2] No such file or directory: 'absent/config.json'"),
    (["4", "absent", "--base=base"], "not yet: [Errno 2] No such file or directory: 'base/config.json'"),
])  # fmt: skip
def test_work_that_cannot_be_checked_is_named_in_one_line(arguments, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, code in (
        ("nan.py", "def reward(text, solution):\n    return float('nan')\n"),
        ("none.py", "def reward(text, solution):\n    pass\n"),
        ("misspelled.py", "def rewards(text, solution):\n    return 1.0\n"),
    ):
        (tmp_path / name).write_text(code)
    assert labs.main(arguments) == 1
    printed = capsys.readouterr().out
    assert printed.startswith(expected) and printed.count("\n") == 1


def test_the_seed_chooses_the_bug_and_other_numbers_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(labs, "curve", lambda names, seed: json.dumps(seed))
    found = set()
    for seed in range(8):
        assert labs.main(["2", str(tmp_path / "curve.txt"), f"--seed={seed}"]) == 0
        assert "Next: " in capsys.readouterr().out
        right = [n for n in labs.VISIBLE if not labs.main(["2", "curve.txt", f"--seed={seed}", f"--answer={n}"])]
        found.update(right)
        assert len(right) == 1
    assert len(found) > 1


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("base")
    minimal.make_folder(folder)
    return folder


def test_a_random_model_passes_no_lab(base, capsys, monkeypatch):
    monkeypatch.setattr(labs, "ROWS", 2)
    assert labs.main(["3", str(base)]) == 1
    assert labs.main(["4", str(base), f"--base={base}"]) == 1
    assert "accuracy 0.000" in capsys.readouterr().out


def test_a_model_without_adapters_is_named(base, tmp_path, monkeypatch):
    model = minimal.load(base)
    with torch.no_grad():
        for weight in (model.model["norm"].weight, model.lm_head.weight, model.visual.patch_embed["proj"].weight):
            weight.add_(torch.randn_like(weight))
        matrix = model.model["layers"][0].mlp.up_proj.weight
        matrix.add_(torch.randn(len(matrix), 2) @ torch.randn(2, matrix.shape[1]))
        wider = model.model["layers"][1].mlp.up_proj.weight
        wider.add_(torch.randn(len(wider), 3) @ torch.randn(3, wider.shape[1]))
    minimal.save(model, tmp_path)
    monkeypatch.setattr(labs, "accuracy", lambda folder, rows, seed: float(folder != str(base)))
    options = labs.Namespace(base=str(base))
    faults = list(labs.check_adapters(str(tmp_path), 0, options))
    names = ["visual.patch_embed.proj", "model.layers.1.mlp.up_proj", "model.norm", "lm_head"]
    assert [fault.split()[0] for fault in faults] == [f"{name}.weight" for name in names]


def test_the_hidden_pictures_of_lab_3_are_small_and_saved_for_a_model_that_fails(base, monkeypatch, capsys):
    monkeypatch.setattr(labs, "ROWS", 2)
    monkeypatch.setattr(labs, "accuracy", lambda folder, rows, seed: 0.5)
    assert labs.main(["3", str(base)]) == 1
    assert f"{base / 'lab3.png'} is a hidden picture; the answer is " in capsys.readouterr().out
    near, far = (
        (np.asarray(row["images"][0]) < 200).any(-1).sum()
        for row in (labs.hidden_rows(0)[0], labs.hidden_rows(0, labs.SMALL)[0])
    )
    assert 0 < far < near / 2
