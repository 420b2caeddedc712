"""Test the rows of a run: from a task or from files, with the columns that its stages need."""

import re
from dataclasses import replace

import PIL.Image
import pytest

from minivlmrl.config.loading import load_config
from minivlmrl.config.options import DataOptions, RunConfig
from minivlmrl.data import file_dataset, image, processor
from minivlmrl.run import datasets
from minivlmrl.run.setup import filter_long_rows
from minivlmrl.tasks.shapes import TASK, tokenizer
from minivlmrl.trainers.registry import find_trainers
from tests.helpers.links import ROOT
from tests.helpers.on_ranks import launch
from tests.helpers.runs import write_lines


def load_datasets(data, stages, seed, *columns):
    return datasets.load_datasets(RunConfig(data=data, seed=seed), stages, *columns)


def test_stages_need_their_columns_and_eval_rows_limits_an_eval_file(write_rows):
    file = str(write_rows({"problem": "a", "solution": "b"}, {"problem": "c", "solution": "d"}))
    assert set(load_datasets(DataOptions(train_file=file), {"grpo": "prompts"}, 0, ["solution"])) == {"grpo"}
    data = DataOptions(train_file=file, eval_file=file, eval_rows=1)
    rows = load_datasets(data, {"grpo": "prompts"}, 0, ["solution"])
    assert (len(rows["grpo"]), len(rows["eval"])) == (2, 1)
    assert set(load_datasets(replace(data, eval_rows=0), {"grpo": "prompts"}, 0, ["solution"])) == {"grpo"}


PLAIN = {"problem": "a", "solution": "b"}
ONE_SOURCE = "data: set exactly one of data.task, data.train_file and data.train"
# row, options of data, rows that the stage needs, columns of its rewards, sentence
REFUSED = [
    (PLAIN, {}, "demonstrations", [], "FILE:1: column 'completion' is missing"),
    (PLAIN, {}, "prompts", ["hint"], "FILE:1: column 'hint' is missing"),
    (PLAIN, {}, "prompts", ["prediction"], "A reward function has the argument 'prediction'; docs/rewards.md lists"),
    (PLAIN, {"columns": {"solutoin": "help"}}, "prompts", [],
     "data.columns renames 'solutoin', but no row has this column; the columns are problem, solution; did you mean s"),
    (PLAIN | {"image": "http://localhost:9/a.png"}, {}, "prompts", [],
     "FILE:1: http://localhost:9/a.png: remote files are not supported"),
    (PLAIN, {"train_file": None}, "prompts", [], ONE_SOURCE),
    (PLAIN, {"task": "shapes"}, "prompts", [], ONE_SOURCE),
    (PLAIN, {"train_file": None, "files": {"grpo": "rows.jsonl"}}, "prompts", [], ONE_SOURCE),  # no rows for ppo
    (PLAIN, {"train_file": None, "task": f"{__file__}:PROMPTS"}, "pairs", [], "stages: grpo needs pairs, but data."),
]  # fmt: skip
PROMPTS = replace(TASK, datasets=lambda data, seed: ({"prompts": []}, []))


@pytest.mark.parametrize(("row", "options", "needs", "columns", "sentence"), REFUSED)
def test_rows_that_are_refused(write_rows, row, options, needs, columns, sentence):
    file = str(write_rows(row))
    with pytest.raises(ValueError, match=re.escape(sentence.replace("FILE", file))):
        load_datasets(DataOptions(**{"train_file": file} | options), {"grpo": needs, "ppo": needs}, 0, columns)


def test_a_column_may_be_renamed_if_one_row_has_it(write_rows):
    file = str(write_rows(PLAIN, PLAIN | {"hint": "c"}))
    data = DataOptions(train_file=file, columns={"hint": "help"})
    assert load_datasets(data, {"grpo": "prompts"}, 0)["grpo"][1].columns["help"] == "c"
    data.columns = {"hnt": "help"}
    assert load_datasets(replace(data, eval_file=file), {}, 0)  # rows that are only evaluated may have the new names


def open_rows_on_rank(folder, options, world):
    """Open rows, leave out long rows, and open a file that lacks an image. Return this rank's actions and errors."""
    questions = []

    def recorded(function):
        return lambda path, *rest: questions.append(function.__name__) or function(path, *rest)

    for module, name in ((file_dataset, "isfile"), (file_dataset, "getsize"), (PIL.Image, "open")):
        setattr(module, name, recorded(getattr(module, name)))
    config = RunConfig(data=DataOptions(train_file=str(folder / "rows.jsonl"), max_prompt_tokens=60))
    found = datasets.load_datasets(config, {"grpo": "prompts"}, world=world)
    rows = filter_long_rows(config, found, processor.Processor(tokenizer(), image.ImageProcessor()), world)["grpo"]
    lines = [rows.read(i)[0].where[-1] for i in range(len(rows))]
    config.data.train_file = str(folder / "missing.jsonl")
    with pytest.raises(ValueError) as raised:
        datasets.load_datasets(config, {"grpo": "prompts"}, world=world)
    return set(questions), lines, str(raised.value)


def test_only_rank_0_asks_the_file_system_for_images(write_rows):
    """Rank 0 looks for images and tells all ranks, so that many ranks do not query a shared file system."""
    red = {"problem": "a", "image": "red.png"}
    file = write_rows(red, red | {"problem": "long " * 99}, {"problem": "b", "image": "blue.png"})
    write_lines(file.with_name("missing.jsonl"), [{"problem": "a", "image": "lost.png"}])
    main, other = (rank["rows"] for rank in launch(2, file.parent, {"rows": []}, open_rows_on_rank))
    assert main[0] == {"isfile", "getsize", "open"} and other[0] == set()
    assert main[1] == other[1] == ["1", "3"]
    assert main[2] == other[2] and "1 missing image or video file in" in main[2]


REWARDS = """
def named(completions, level, hint=None):
    return [0.0] * len(completions)

def unused(completions, **columns):
    return [0.0] * len(completions)

def used(completions, **columns):
    return [float(x) for x in columns["level"]]
"""


@pytest.mark.parametrize(("stages", "rewards", "reads"), [
    (["sft"], ["accuracy"], {"completion"}),
    (["dpo", "reward_model"], [], {"chosen", "rejected", "margin"}),
    (["dpo"], [], {"chosen", "rejected"}),
    (["grpo"], ["accuracy", "own.py:named"], {"solution", "level", "hint"}),
    (["grpo"], ["own.py:unused"], None),  # it receives every column
    (["grpo"], ["own.py:used"], None),
    (["sft", "own.py:Own"], ["accuracy"], None),
])  # fmt: skip
def test_the_columns_that_stages_and_rewards_read(tmp_path, stages, rewards, reads):
    stage = "from minivlmrl.trainers.sft import SFTTrainer\nclass Own(SFTTrainer):\n    stage = 'own'\n"
    (tmp_path / "own.py").write_text(stage + REWARDS)
    here = [name.replace("own.py", str(tmp_path / "own.py")) for name in (*stages, *rewards)]
    run = load_config(ROOT / "recipes" / "shapes.yaml", [f"--stages=[{', '.join(here[: len(stages)])}]"])
    run.rewards = dict.fromkeys(here[len(stages) :], 1.0)
    found = datasets.columns_read(run, find_trainers(run))
    assert found is None if reads is None else found - {"columns"} == reads
