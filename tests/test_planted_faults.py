"""Planted faults: `check` before a run, a sentence while it goes on, or what ends it names each one and its cure."""

import json
import random
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from runs import LETTERS

from minivlmrl import train
from minivlmrl.generate import Completion
from minivlmrl.run.alarms import BLIND
from minivlmrl.run.config import recipes_folder
from minivlmrl.sampling.sample import RunSampler
from minivlmrl.tasks.shapes import Shapes, answer
from minivlmrl.tools import check


@dataclass
class Fault:
    """What is changed of a healthy recipe and its rows, and what is said of it."""

    sentence: str
    cure: str
    overrides: list[str] = field(default_factory=list)
    change: dict = field(default_factory=dict)  # columns of each row


CUT = ["--sampling.max_new_tokens=1", "--sampling.stop_token_ids=[1]"]
BEFORE = {
    "a temperature near 0": Fault(
        "sampling.temperature is 0.01", "take 1.0", ["--sampling.temperature=0.01"]
    ),
    "a large learning rate": Fault(
        "grpo.learning_rate is 1e+06: over 0.01", "lower it", ["--grpo.learning_rate=1e6"]
    ),
    "max_new_tokens too small": Fault(
        "100% of 24 completions are cut", "raise it, or ask for shorter answers", CUT
    ),
    "no prompt is of the right difficulty": Fault(
        "groups earn the same for all 3 completions", "take easier or harder prompts", ["--rewards={accuracy: 1}"]
    ),
    "answers are looked for where there are none": Fault(
        "have no answer where data.answer (tags) looks", "set data.answer", ["--rewards={accuracy: 1}"]
    ),
    "rows without pictures": Fault(
        "no row has an image or video", "name the column image or images", change={"image": None}
    ),
    "a template without the form that a reward asks for": Fault(
        "no prompt does, and no completion", "say it in data.prompt_template", ["--rewards={format: 1, accuracy: 1}"]
    ),
    "all rows have one solution": Fault(
        "always writing '<think>hm</think><answer>cat</answer>' earns 1.00", "balance them", change={"solution": "cat"}
    ),
    "demonstrations that rewards contradict": Fault(
        "demonstrations earn 0.00 of reward accuracy", "are the labels shuffled", ["--stages=[sft, grpo]"],
        {"completion": "<think>hm</think><answer>dog</answer>"},
    ),
    "demonstrations without the tags in which answers are looked for": Fault(
        "demonstrations earn 0.00 of reward accuracy", "set data.answer: whole", ["--stages=[sft, grpo]"],
        {"completion": "dog"},
    ),
    "a reward that always says 1": Fault(
        "reward one.py:one says 1 of every text that was tried", "look at what it reads", ["--rewards={one.py:one: 1}"]
    ),
    "a reward that likes what is no answer": Fault(
        "reward one.py:words gives 1.00 to the same word again", "ask for the answer itself",
        ["--rewards={one.py:words: 1}"],
    ),
    "a reward that needs no picture": Fault(
        "with grey pictures the completions earn", "check that the right images", ["--rewards={one.py:length: 1}"]
    ),
}  # fmt: skip
DURING = {
    "a temperature near 0": Fault(
        "draws the same text again", "take 1.0", ["--sampling.temperature=0.001", "--sampling.top_k=1"]
    ),
    "a large learning rate": Fault("are zero", "lower grpo.learning_rate", ["--grpo.learning_rate=1e6"]),
    "max_new_tokens too small": Fault("cut at sampling.max_new_tokens (1)", "raise it", CUT),
    "rows without pictures": Fault(
        "no row had an image that the model saw", "check the image column", change={"image": None}
    ),
    "a template without the form that a reward asks for": Fault(
        "no completion has the form that reward format asks for", "say the form in data.prompt_template",
        ["--rewards={letters: 1, format: 1}"],
    ),
    "a reward that always says 1": Fault(
        "reward one.py:one says 1", "look at completions.jsonl", ["--rewards={one.py:one: 1}"]
    ),
}  # fmt: skip
ENDS = {
    "sampler and trainer disagree": Fault(
        "nats about a token", "rollout.max_logp_mismatch", ["--rollout.max_logp_mismatch=1e-12"]
    ),
    "a reward that is no number": Fault(
        "reward one.py:nothing returned nan", "or None for 'cannot judge'", ["--rewards={one.py:nothing: 1}"]
    ),
}  # fmt: skip
OWN_REWARDS = """
def nothing(completions, **columns):
    return [float("nan")] * len(completions)

def one(completions, **columns):
    return [1.0] * len(completions)

def words(completions, solution, **columns):
    return [float(len(c.split()) > 50) for c in completions]

def length(completions, **columns):
    return [float(len(c)) for c in completions]
"""


@pytest.fixture
def plant(own, rows, tmp_path, monkeypatch):
    """Change eight healthy rows; returns the options of a run over them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.py").write_text(OWN_REWARDS)

    def plant(change):
        lines = [json.loads(line) for line in rows.read_text().splitlines()]
        lines = [line | {"image": str(rows.parent / line["image"])} | change for line in lines]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
        return [*own, "--data.train_file=rows.jsonl", "--stages=[grpo]"]

    return plant


@pytest.mark.parametrize("fault", BEFORE)
def test_check_names_it_before_a_run(fault, home, plant, capsys):
    fault = BEFORE[fault]
    assert check.main([str(home / "recipe.yaml"), *plant(fault.change), *fault.overrides]) == 1
    [said] = [line for line in capsys.readouterr().out.splitlines() if fault.sentence in line]
    assert fault.cure in said


def test_check_draws_nothing_where_an_earlier_stage_teaches_the_form(home, plant, capsys):
    fault = BEFORE["a template without the form that a reward asks for"]
    rows = {"completion": "<think>hm</think><answer>cat</answer>"}
    check.main([str(home / "recipe.yaml"), *plant(rows), *fault.overrides, "--stages=[sft, grpo]"])
    out = capsys.readouterr().out
    assert "no completions were drawn" in out and fault.sentence not in out


@pytest.mark.parametrize("fault", DURING)
@pytest.mark.usefixtures("plain", "lively")
def test_a_run_names_it(fault, run, plant, capsys):
    fault = DURING[fault]
    options = "--grpo.max_steps=11", "--grpo.prompts_per_step=2", LETTERS
    folder = run(*plant(fault.change), *options, *fault.overrides)
    [said] = [line for line in capsys.readouterr().err.splitlines() if fault.sentence in line]
    assert said.startswith("step ") and fault.cure in said
    written = [json.loads(line) for line in (folder / "warnings.jsonl").read_text().splitlines()]
    assert said in [f"step {line['step']}: {line['warning']}" for line in written]


@pytest.mark.parametrize("fault", ENDS)
@pytest.mark.usefixtures("plain", "lively")
def test_it_ends_a_run(fault, run, plant):
    fault = ENDS[fault]
    with pytest.raises(ValueError, match=f"{re.escape(fault.sentence)}.*{re.escape(fault.cure)}"):
        run(*plant(fault.change), LETTERS, *fault.overrides)


@pytest.mark.parametrize("shuffled", [False, True])
def test_check_names_shuffled_solutions(shuffled, home, plant, monkeypatch, capsys):
    """Of a model that knows the answers: they fit their own rows, or after shuffling others as well."""
    labels = [Shapes(8, "own")[i].columns["solution"] for i in range(8)]

    def knows(sampler, prompts, count, keys):
        ids = [torch.tensor(sampler.processor.tokenizer.encode(answer(label))) for label in labels]
        return [[Completion(one, torch.zeros(len(one)), True)] * count for one in ids]

    monkeypatch.setattr(RunSampler, "__call__", knows)
    options = plant({})
    if shuffled:
        lines = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
        lines = [line | {"solution": label} for line, label in zip(lines, labels[1:] + labels[:1], strict=True)]
        Path("rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    check.main([str(home / "recipe.yaml"), *options, "--rewards={accuracy: 1}"])
    assert ("were the solutions shuffled?" in capsys.readouterr().out) == shuffled


@pytest.mark.slow
@pytest.mark.parametrize("shuffled", [False, True])
def test_shuffled_solutions_of_a_model_that_learns(shuffled, learned, tmp_path, capsys):
    """Before the run and while it goes on; with solutions as they are nothing is said."""
    shapes = [Shapes(256, "own")[i] for i in range(256)]
    solutions = [row.columns["solution"] for row in shapes]
    if shuffled:
        random.Random(0).shuffle(solutions)
    with (tmp_path / "rows.jsonl").open("w") as file:
        for i, (row, solution) in enumerate(zip(shapes, solutions, strict=True)):
            row.images[0].save(tmp_path / f"{i}.png")
            print(json.dumps({"image": f"{i}.png", "problem": "What is it?", "solution": solution}), file=file)
    options = [*learned, f"--data.train_file={tmp_path / 'rows.jsonl'}"]
    capsys.readouterr()
    assert check.main(options) == int(shuffled)
    assert ("were the solutions shuffled?" in capsys.readouterr().out) == shuffled
    steps = [f"--grpo.max_steps={BLIND + 1}", "--grpo.prompts_per_step=8", "--grpo.micro_batch_size=8"]
    steps += ["--grpo.learning_rate=1e-4", "--rewards={accuracy: 1}"]
    train.main([*options, f"--output_dir={tmp_path / 'run'}", *steps])
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert len(said) == int(shuffled)
    assert all("are the solutions with the right rows?" in line for line in said)


@pytest.fixture(scope="session")
def learned(tmp_path_factory):
    """Options of a run that goes on with the default recipe's model after its first stage, on rows of one's own."""
    folder, recipe = tmp_path_factory.mktemp("sft"), str(recipes_folder() / "shapes.yaml")
    few = ["--num_threads=1", "--data.eval_rows=1"]
    train.main([recipe, "--stages=[sft]", f"--output_dir={folder}", *few])
    model = ["--model.config=null", f"--model.path={folder / 'checkpoint'}", "--data.task=null", "--stages=[grpo]"]
    return [recipe, *few, *model]
