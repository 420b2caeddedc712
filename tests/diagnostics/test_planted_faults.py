"""Test that `check`, or a warning during a run, reports each planted fault and how to fix it."""

from pathlib import Path

import pytest
import torch
from faults import FAULTS
from runs import LETTERS, metrics, read_lines, write_lines

from minivlmrl.data.rows import Completion
from minivlmrl.diagnostics import check
from minivlmrl.generation.sampler import Sampler
from minivlmrl.tasks.shapes import Shapes, tagged_answer

OWN_REWARDS = """
import random
def one(completions, **columns):
    return [1.0] * len(completions)

def words(completions, solution, **columns):
    return [float(len(c.split()) > 50) for c in completions]

def length(completions, solution, **columns):
    return [float(len(c)) for c in completions]

def chance(completions, **columns):
    return [random.random() for _ in completions]

def noisy(answer_texts, solution, **columns):
    return [float(a == s) + 1e-4 * random.random() for a, s in zip(answer_texts, solution)]

def tokens(completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]
"""


def faults_of(kind):
    """Return pytest parameters for the faults that `check` or a run reports. Most are slow."""
    said = [(number, name) for number, (name, fault) in enumerate(FAULTS.items()) if getattr(fault, kind)]
    return [pytest.param(name, marks=[pytest.mark.slow] * (number > 16)) for number, name in said]


@pytest.fixture
def plant(own, rows, tmp_path, monkeypatch):
    """Return a function that changes eight healthy rows and returns the options for a run on these rows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.py").write_text(OWN_REWARDS)

    def plant(change):
        lines = [line | {"image": str(rows.parent / line["image"])} for line in read_lines(rows)]
        of = change if callable(change) else lambda *_: change
        lines = [line | of(number, line) for number, line in enumerate(lines)]
        write_lines(tmp_path / "rows.jsonl", lines)
        return [*own, "--data.train_file=rows.jsonl", "--stages=[grpo]"]

    return plant


@pytest.mark.parametrize("name", faults_of("check"))
def test_check_reports_the_fault_before_a_run(name, home, plant, capsys):
    fault, (sentence, cure) = FAULTS[name], FAULTS[name].check
    assert check.main([str(home / "recipe.yaml"), *plant(fault.change), *fault.overrides]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("- ")]
    [said] = [line for line in lines if sentence in line]
    assert cure in said


def test_check_does_not_sample_if_an_earlier_stage_trains_the_format(home, plant, capsys):
    fault = FAULTS["a template without the form that a reward asks for"]
    rows = {"completion": "<think>hm</think><answer>cat</answer>"}
    check.main([str(home / "recipe.yaml"), *plant(rows), *fault.overrides, "--stages=[sft, grpo]"])
    out = capsys.readouterr().out
    assert "No completions were sampled" in out and fault.check[0] not in out


@pytest.mark.parametrize("name", faults_of("run"))
@pytest.mark.usefixtures("plain", "lively")
def test_a_run_reports_the_fault(name, run, plant, capsys):
    fault, (sentence, cure) = FAULTS[name], FAULTS[name].run
    options = "--grpo.max_steps=11", "--grpo.prompts_per_step=2", LETTERS
    folder = run(*plant(fault.change), *options, *fault.overrides)
    [said] = [line for line in capsys.readouterr().err.splitlines() if sentence in line]
    assert said.startswith("step ") and cure in said
    written = metrics(folder, "warnings.jsonl")
    # steps in files count from 0
    assert said in [f"step {line['step'] + 1}: {line['warning']}" for line in written]


@pytest.mark.parametrize("number_of_shuffled", [0, 2, 8])
def test_check_reports_shuffled_solutions(number_of_shuffled, home, plant, monkeypatch, capsys):
    """A model that knows the answers is right.

    If the rows are shuffled, its answers fit other rows. If a quarter is shuffled, most rows are right.
    """
    labels = [Shapes(8, "own")[i].columns["solution"] for i in range(8)]

    def knows(sampler, prompts, count, keys):
        ids = [torch.tensor(sampler.processor.tokenizer.encode(tagged_answer(label))) for label in labels]
        return [[Completion(one, torch.zeros(len(one)), True)] * count for one in ids]

    monkeypatch.setattr(Sampler, "__call__", knows)
    options = plant({})
    n = number_of_shuffled
    solutions = labels[1:n] + labels[:1] + labels[n:] if n else labels
    lines = [line | {"solution": label} for line, label in zip(read_lines(Path("rows.jsonl")), solutions, strict=True)]
    write_lines(Path("rows.jsonl"), lines)
    check.main([str(home / "recipe.yaml"), *options, "--rewards={accuracy: 1}"])
    out = capsys.readouterr().out
    assert ("Check that the solutions are not shuffled" in out) == (n == 8)
    assert ("The completions of 2 of 8 rows agree on an answer" in out) == (n == 2)
