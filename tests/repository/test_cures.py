"""Test what messages tell a user to type: commands run in their situation, and options are accepted."""

import ast
import re
import shlex
from pathlib import Path

import PIL.Image
import pytest

from minivlmrl.__main__ import COMMANDS
from minivlmrl.config.loading import load_config
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.extras.convert.command import main as convert
from tests.helpers.links import ROOT
from tests.helpers.runs import write_parquet


def texts(file: Path) -> list[str]:
    """Return the texts of a file without docstrings; VALUE stands for a value in an f-string."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    bodies = [body for node in ast.walk(tree) if isinstance(body := getattr(node, "body", None), list) and body]
    hidden = {id(body[0].value) for body in bodies if isinstance(body[0], ast.Expr)}
    found, parts = [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "VALUE" for part in node.values))
            parts |= {id(part) for part in node.values}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in hidden | parts:
            found.append(node.value)
    return found


FILES = [file for folder in ("minivlmrl", "recipes", "kernels") for file in sorted((ROOT / folder).rglob("*.py"))]
TEXTS = [text for file in FILES for text in texts(file)]
COMMAND = re.compile(r"`((?:minivlmrl|python|git|hf|pip) [^`]+)`")
OPTION = re.compile(r"(--[a-z_]+(?:\.[a-z0-9_]+)?=(?:\[.*?\]|\{.*?\}|[\w.]*\w))")
PRINTED = {command for text in TEXTS for command in COMMAND.findall(text)}
OF_COMMANDS = {
    "--framework",
    "--recipe",
    "--columns",
    "--format",
    "--question",
    "--section.name",
}  # options that are not a recipe's
OTHERS = {"git lfs", "hf download", "pip install"}  # programs of others


@pytest.mark.parametrize("option", sorted({option for text in TEXTS for option in OPTION.findall(text)}))
def test_an_option_that_a_message_prints_is_accepted(option):
    name, _, value = option.partition("=")
    if name not in OF_COMMANDS and value != "VALUE":
        example = {"--stages": "grpo", "--data.eval_rewards": "accuracy"}.get(name, "1")
        load_config("shapes.yaml", [f"{name}={value.replace('VALUE', example)}"])


@pytest.mark.parametrize("command", sorted(PRINTED))
def test_a_command_that_a_message_prints_exists(command):
    program, name, *_ = command.split()
    if program == "minivlmrl":
        assert name in COMMANDS
    elif name == "-m":
        module = command.split()[2].replace("minivlmrl.kernels", "kernels").replace(".", "/")
        assert (ROOT / f"{module}.py").is_file()
    else:
        assert (ROOT / name).is_file() or f"{program} {name}" in OTHERS


def test_the_command_that_a_run_prints_makes_a_split_readable(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    PIL.Image.new("RGB", (56, 56), "red").save("red.png")
    Path("a split").mkdir()
    for split in ("train", "test"):
        row = {"question": "What?", "answer": "Red.", "image": {"bytes": Path("red.png").read_bytes()}}
        write_parquet(f"a split/{split}-0.parquet", [row])
    with pytest.raises(ValueError) as refused:
        FileDataset("a split@train", ("problem", "solution"))
    [command] = re.findall("minivlmrl convert (.*?)`", str(refused.value))
    assert convert(shlex.split(command)) == 0
    assert len(FileDataset("a split/rows_train_converted.jsonl", ("problem", "solution"))) == 1


@pytest.mark.parametrize(("rewards", "expected"), [
    ("accuracy", {"accuracy": 1.0}), ("[iou, format]", {"iou": 1.0, "format": 1.0}), ("iou:0.5", {"iou": 0.5}),
    ("'iou=2, mine.py:f'", {"iou": 2.0, "mine.py:f": 1.0}),
])  # fmt: skip
def test_the_option_that_replaces_a_wrong_one_is_accepted(rewards, expected):
    with pytest.raises(ValueError) as refused:
        load_config("shapes.yaml", [f"--rewards={rewards}"])
    [cure] = re.findall('write "(.*)"$', str(refused.value))
    assert load_config("shapes.yaml", [cure]).rewards == expected


def test_a_file_of_rows_in_the_place_of_a_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").touch()
    with pytest.raises(ValueError) as refused:
        load_config("rows.jsonl")
    recipe, option = re.search("write (.*)", str(refused.value))[1].split()
    assert load_config(recipe, [option]).data.train_file == str(tmp_path / "rows.jsonl")
