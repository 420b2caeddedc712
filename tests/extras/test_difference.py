"""Test where two files differ, and which fields, such as times, may differ between equal runs."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minivlmrl.extras.replay.difference import MEASURED, difference, distance
from minivlmrl.files import digest

LOSSES = [{"loss": 1.0}, {"loss": 2.0}]


@pytest.mark.parametrize(("name", "one", "two", "expected"), [
    ("metrics.jsonl", LOSSES, [{"loss": 1.0}, {"loss": 2.5}], "line 2, by 0.25"),
    ("metrics.jsonl", LOSSES, [{"loss": 2.0}], "line 1, 2"),
    ("timings.jsonl", [{"step": 0, "seconds": 1.0}], [{"step": 0, "seconds": 2.0}], ""),
    ("timings.jsonl", [{"step": 0, "seconds": 1.0}], [{"step": 0, "seconds": "1.0"}], "line 1"),
    ("completions.jsonl", [{"where": "/a:1", "row": 1}], [{"where": "/b:1", "row": 1}], "line 1"),
    ("summary.json", [{"greedy": 0.5, "seconds": {"sft": 1.5}}], [{"greedy": 0.5, "seconds": {"sft": 2}}], ""),
    ("config.yaml", [{"seed": 0, "output_dir": "a"}], [{"seed": 1, "output_dir": "b"}], "line 1"),
    ("picture.webp", ["one"], ["two"], "line 1"),
])  # fmt: skip
def test_lines(tmp_path, name, one, two, expected):
    files = [tmp_path / folder / name for folder in "ab"]
    for file, lines in zip(files, (one, two), strict=True):
        file.parent.mkdir()
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert difference(*files) == expected
    assert difference(files[0], files[0]) == ""
    assert (difference(*files, moved=True) == "") == (expected == "" or name == "completions.jsonl")


def test_every_measured_field_may_differ():
    """A new field in timings.jsonl must not make equal runs differ; `wait_share` did so on several ranks."""
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    table = page.partition("\n## Speed and memory\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} == MEASURED


def test_tensors(tmp_path):
    files = [tmp_path / f"{letter}.safetensors" for letter in "ab"]
    weights = {"x": torch.ones(3), "y": torch.zeros(2)}
    save_file(weights, files[0])
    for other, expected in (
        (weights | {"x": torch.tensor([1.0, 1.25, 1.0])}, "line 1, by 0.25"),
        ({name: x.double() for name, x in weights.items()}, "line 1"),
        (weights | {"z": torch.ones(1)}, "line 1"),
        (weights | {"x": torch.ones(4)}, "line 1"),
        (weights | {"x": torch.full((3,), math.nan)}, "line 1"),
    ):
        save_file(other, files[1])
        assert difference(*files) == expected


@pytest.mark.parametrize(("name", "text", "reason"), [
    ("a.jsonl", '{"x": 1}\n{\n', "from line 2 on: the text is not valid JSON"),
    ("summary.json", "[]", "from line 1 on: "),
    ("a.safetensors", "x", "from line 1 on: "),
])  # fmt: skip
def test_a_file_that_cannot_be_parsed(tmp_path, name, text, reason):
    file, other = tmp_path / name, tmp_path / "other" / name
    other.parent.mkdir()
    if file.suffix == ".safetensors":
        save_file({"x": torch.ones(1)}, file)
    else:
        file.write_text('{"x": 1}\n')
    other.write_text(text)
    assert difference(file, other).startswith(f"the file cannot be read {reason}")


def state(folder, files):
    """Write a training state, and return its folder; `files` has each rank's tensors."""
    folder.mkdir()
    for number, tensors in enumerate(files):
        save_file(tensors, folder / f"{number:04d}_0000.safetensors")
    hashes = {file.name: digest([file]) for file in folder.iterdir()}
    (folder / "complete.json").write_text(json.dumps(hashes))
    return folder


def test_states_of_different_numbers_of_ranks(tmp_path):
    x, y = torch.arange(10.0).view(5, 2), torch.ones(3)
    one = state(tmp_path / "one", [{"0:x": x, "0:y": y}])
    two = state(tmp_path / "two", [{"0:x": x[:3], "0:y": y}, {"3:x": x[3:].clone()}])
    assert difference(one, two) == ""
    for name, files, expected in (
        ("other numbers", [{"0:x": x[:3], "0:y": y}, {"3:x": x[3:] + 0.5}], "line 2, by 0.5"),
        ("missing rows", [{"0:x": x[:3], "0:y": y}], "line 2"),
        ("another name", [{"0:x": x, "0:z": y}], "line 3"),
    ):
        assert difference(one, state(tmp_path / name, files)) == expected
    (two / "complete.json").write_text("{}")
    assert difference(one, two) == "line 1"


def test_distance_is_the_largest_difference_of_all_numbers():
    assert distance({"a": 1.0, "b": {"c": 2.0}}, {"a": 1.5, "b": {"c": 4.0}}) == 1.0
    assert distance({"a": "x"}, {"a": "y"}) == distance({"a": 1.0}, {"b": 1.0}) == math.inf
