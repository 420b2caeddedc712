"""Test that columns of row files become prompts and answers, and that errors name the line of a row."""

import math

import pytest
import torch

from minivlmrl.config.options import DataOptions, RunConfig
from minivlmrl.data import row_files
from minivlmrl.data.chat_template import DEFAULT, DEFAULT_QWEN3, ChatTemplate
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.messages import text_of
from minivlmrl.data.processor import Processor, encode_completion
from minivlmrl.data.row_sizes import long_rows
from minivlmrl.data.rows import Completion
from minivlmrl.monitor.check.preflight import check_truths
from minivlmrl.monitor.check.row_notes import describe_boxes, describe_unread, summary
from minivlmrl.monitor.memory.memory_check import heaviest_rows
from minivlmrl.rewards.columns import reward_columns
from minivlmrl.run.datasets import load_datasets
from minivlmrl.tasks import shapes
from minivlmrl.trainers.sft import SFTTrainer
from tests.helpers.talk import CHATML, IMAGE_PART, assistant, system, text, user


def test_columns_of_other_rows_and_constants(write_rows):
    file = write_rows({"problem": "a", "level": 1}, {"problem": "b", "hint": "c"})
    rows = FileDataset(file, constants={"hint": "d", "row_rewards": ["iou"]})
    assert rows[0].columns == {"problem": "a", "level": 1, "hint": "d", "row_rewards": ["iou"]}
    assert rows[1].columns == {"problem": "b", "level": None, "hint": "d", "row_rewards": ["iou"]}
    assert FileDataset(file)[0].columns == {"problem": "a", "level": 1, "hint": None}


@pytest.mark.parametrize("column", ["problem", "solution", "level"])
@pytest.mark.parametrize("value", [None, math.nan])
def test_a_column_without_a_value_is_neither_renamed_nor_converted(write_rows, column, value):
    row = {"problem": "a", "solution": "b", "level": 1, "id": "c"}
    expected = f"rows.jsonl:3: column {column!r} has no value in this row: write a value or remove the row"
    for ours, columns in ((column, {}), ("theirs", {"theirs": column})):
        rows = [{name if name != column else ours: row[name] for name in row} for _ in range(4)]
        rows[2][ours] = value
        with pytest.raises(ValueError) as error:
            FileDataset(write_rows(*rows), ("problem", "solution", "level"), columns=columns)
        assert str(error.value).endswith(expected)


def test_prompt_template_and_system_prompt(write_rows):
    file = write_rows(*({name: "What is {x}?", "image": "red.png"} for name in ("problem", "prompt")))
    for row in FileDataset(file, prompt_template="Look: <image> {problem} Think.", system_prompt="Be brief."):
        requested = user([text("Look: "), IMAGE_PART, text(" What is {x}? Think.")])
        assert row.messages == [system("Be brief."), requested]


def test_the_prompt_template_is_applied_to_the_last_user_turn(write_rows):
    turns = [system("Be brief."), user("one"), assistant("two"), user([IMAGE_PART, text("three")])]
    written = {"prompt": [*turns[:3], user("<image>three")], "image": "red.png"}
    file = write_rows({"prompt": turns, "image": "red.png"}, written)
    for row in FileDataset(file, prompt_template="Look: {problem} Think."):
        content = row.messages[3]["content"]
        assert [text_of(turn) for turn in row.messages[:3]] == ["Be brief.", "one", "two"]
        assert "".join(part.get("text", "") for part in content) == "Look: three Think." and IMAGE_PART in content


@pytest.mark.parametrize("key", ["tool_calls", "reasoning_content"])
def test_a_pair_may_differ_in_a_call_or_a_thought_only(write_rows, key):
    expected = {"tool_calls": lambda text: [{"function": {"name": text}}]}.get(key, str)
    pair = {name: [assistant("Wait.") | {key: expected(name)}] for name in ("chosen", "rejected")}
    [row] = FileDataset(write_rows({"problem": "a"} | pair))
    assert (row.chosen, row.rejected) == (pair["chosen"], pair["rejected"])


@pytest.mark.parametrize("key", ["loss", "loss_mask", "weight", "train"])
@pytest.mark.parametrize("family", ["none", "qwen3", "jinja", "rewritten"])
def test_a_turn_without_loss_is_context(write_rows, key, family):
    turns = [user("a"), assistant("<think>b</think>bad") | {key: False}, user("c"), assistant("good") | {key: True}]
    row = FileDataset(write_rows({"messages": turns}), ("problem", "completion"))[0]
    latest = "(message.content if loop.last else message.content.split('</think>')[-1]) | trim"
    rewriting = CHATML.replace("message.content | trim", latest)
    source = {"none": DEFAULT, "qwen3": DEFAULT_QWEN3, "jinja": CHATML, "rewritten": rewriting}[family]
    template = ChatTemplate(source, "template")
    processor = Processor(shapes.tokenizer(), ImageProcessor(), template)
    content = encode_completion(processor, row.messages, row.completion)
    assert processor.decode(content.ids[content.policy_mask]) == "good"
    assert "bad" in processor.decode(content.ids)


@pytest.mark.parametrize("requested", [
    {"problem": "a"}, {"prompt": "a"}, {"prompt": [user("a")]}, {"messages": [user("a"), assistant("b")]},
    {"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]},
    {"prompt": [system("Be brief."), user("a")]},
])  # fmt: skip
def test_the_column_system_is_the_system_message(write_rows, requested):
    for content in ("Be brief.", "", None):
        row = FileDataset(write_rows({"system": content, **requested}), system_prompt="Recipe.")[0]
        expected = content or ("Be brief." if "system" in str(requested) else "Recipe.")
        assert [(turn["role"], text_of(turn)) for turn in row.messages] == [("system", expected), ("user", "a")]


@pytest.mark.parametrize("columns", [{"a": "b", "b": "a"}, {"b": "a", "a": "b"}])
def test_columns_are_renamed_together(write_rows, columns):
    [row] = FileDataset(write_rows({"problem": "?", "a": 1, "b": 2}), columns=columns)
    assert (row.columns["a"], row.columns["b"]) == (2, 1)


FORMAT_FILE = """
def read(row, key="turns"):
    question, answer = row["example"][key]
    columns = {"image": row["example"]["picture"]["path"], "problem": question, "completion": answer}
    return columns | {"level": 3}

def nothing(row):
    print(row)

def number(row):
    return read(row) | {1: 2}
"""
NESTED = {"example": {"picture": {"path": "red.png"}, "turns": ["Which color?", "red"], "said": ["Hm?", "blue"]}}


def test_a_format_reads_nested_rows_and_may_have_options(write_rows, tmp_path):
    (tmp_path / "own.py").write_text(FORMAT_FILE)
    for name, question, answer in (("read", "Which color?", "red"), ("read(key='said')", "Hm?", "blue")):
        row = FileDataset(write_rows(NESTED), ("problem", "completion"), format=f"{tmp_path}/own.py:{name}")[0]
        assert text_of(row.messages[-1]) == question and row.images[0].size == (4, 4)
        assert row.completion == answer and "example" not in row.columns
        assert row.columns["level"] == 3


@pytest.mark.parametrize(("name", "error", "expected"), [
    ("FOLDER/own.py:read(kee=1)", ValueError, r"^data\.format .*: there is no option 'kee'; the options are: key"),
    ("FOLDER/own.py:nothing", ValueError, r"rows\.jsonl:1: what data\.format \S+:nothing returns is None, but it"),
    ("FOLDER/own.py:number", ValueError, r"rows\.jsonl:1: what data\.format \S+:number returns is .*, but it must be"),
    ("FOLDER/own.py:read(key='asked')", KeyError, r"^'asked'\n(in .*\n)*in .*rows\.jsonl:1"),
    ("vqa", ValueError, r"^data\.format vqa: unknown format 'vqa'; known names are: file\.py:name"),
])  # fmt: skip
def test_an_error_of_a_format_names_the_option_or_the_row(write_rows, tmp_path, name, error, expected):
    (tmp_path / "own.py").write_text(FORMAT_FILE)
    with pytest.raises(error, match=expected):
        FileDataset(write_rows(NESTED), format=name.replace("FOLDER", str(tmp_path)))


PRODUCT = {  # columns of a shop, whose names mean something else in other projects
    "weight": 3.2, "history": "sold in 1990", "options": ["S", "M"], "choices": 3, "labels": ["new"], "train": True,
    "positive": 0.9, "loss": 12, "functions": "cuts bread", "tools": ["saw"], "query": "bread knife", "output": "1 kW",
    "completions": [1], "log_metric": "kg", "row_rewards": [5], "max_pixels": 3, "label": "knife", "documents": [],
    "response": 200, "reward_model": "x1", "question": "?", "answer": "!", "segments": [1], "prefix": "KN",
}  # fmt: skip


def test_no_column_is_refused_for_its_name(write_rows):
    """A note of the run names the columns that no code reads, and no reward receives them under another meaning."""
    rows = FileDataset(write_rows({"problem": "a", "completion": "b"} | PRODUCT), ("problem", "completion"), reads=())
    assert rows.unread == sorted(PRODUCT)
    note, replaced = describe_unread(rows)
    assert "columns answer, choices, completions, documents, functions, history, " in note and "and 14 more" in note
    assert "rewards receive other values for completions and log_metric and row_rewards from minivlmrl" in replaced
    processor = Processor(shapes.tokenizer(), ImageProcessor())
    columns = reward_columns([rows[0]], [rows[0].prompt(processor)], [[Completion(torch.tensor([1]))]], processor)
    assert columns["weight"] == [3.2] and columns["completions"] != [[1]] and "log_metric" not in columns


def test_a_row_has_one_prompt_and_one_completion(write_rows):
    """Turns in `messages` that end with the user have their answer in `completion`."""
    [row] = FileDataset(write_rows({"messages": [user("hi")], "completion": "yes"}))
    assert row.messages == [user([text("hi")])] and row.completion == "yes"


def test_lists_that_are_answers_stay_texts(write_rows):
    for text_ in ("[1, 2, 5, 6]", '[{"bbox_2d": [1, 2, 5, 6], "label": "cat"}]', "['cat', 'dog']", '["cat"]'):
        [row] = FileDataset(write_rows({"problem": "a", "completion": text_}))
        assert row.completion == text_


def test_a_row_is_parsed_once_when_stages_share_its_file(write_rows, monkeypatch):
    """Opening the file parses each row once, and measuring it a second time, for all stages and limits."""
    line = {"problem": "What?", "image": "red.png", "completion": "a", "solution": "a"}
    data = DataOptions(train_file=str(write_rows(*[line] * 5)), max_prompt_tokens=30)
    config = RunConfig(data=data, rewards={"accuracy": 1.0})
    parsed, read = [], row_files.Lines.__getitem__
    monkeypatch.setattr(row_files.Lines, "__getitem__", lambda lines, index: parsed.append(index) or read(lines, index))
    datasets = load_datasets(config, {"sft": "demonstrations", "grpo": "prompts"}, ["solution"])
    assert parsed == [0, 1, 2, 3, 4] and datasets["sft"] is datasets["grpo"]
    processor = Processor(shapes.tokenizer(), ImageProcessor())
    for _ in range(2):
        summary(datasets["sft"], processor, answers=("completion",))
        assert len(list(long_rows(datasets["sft"], processor, 5, answers=("completion",)))) == 5
        assert len(heaviest_rows(datasets["sft"], processor, ("completion",))) == 5
        assert len(list(long_rows(datasets["grpo"], processor, 5))) == 5
    check_truths(config, datasets)
    assert not list(describe_boxes({"sft": SFTTrainer}, datasets, processor))
    assert len(parsed) == 10


def test_what_a_stage_or_a_reward_reads_is_kept(write_rows):
    row = {"problem": "a", "tools": "saw", "level": 1, "options": ["b"], "tags": [], "id": 3}
    options = {"reads": ("tools", "level"), "columns": {"options": "options"}}
    rows = FileDataset(write_rows(row), ("problem",), **options)
    assert rows[0].columns == row and rows.unread == ["id", "tags"]
    assert FileDataset(write_rows({"problem": "a", "id": None, "n": 1}), columns={"n": "m"}, reads=()).unread == []
    read = {"messages": [user("hi"), assistant("yes")], "image": "red.png", "system": "b", "box_space": "unit"}
    assert FileDataset(write_rows(read), reads=()).unread == ["completion"]
    assert FileDataset(write_rows(row | {"tools": None, "options": None})).unread == []
    labeled = write_rows({"problem": "a", "completion": "b", "label": False})
    assert FileDataset(labeled).unread == FileDataset(labeled, reads=("label", "completion")).unread == []


def test_reading_a_large_file_shows_its_progress(write_rows, monkeypatch, capsys):
    monkeypatch.setattr("minivlmrl.data.file_dataset.SECONDS", -1)
    path = write_rows({"problem": "a"}, {"problem": "b"})
    FileDataset(path)
    assert f"{path}: read 1 of 2 rows" in capsys.readouterr().err
    FileDataset(path, checks_files=False)
    assert not capsys.readouterr().err
