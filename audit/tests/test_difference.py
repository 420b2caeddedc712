"""Where two files differ: lines and sizes, and what two honest runs may say differently."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from minivlmrl_audit.difference import difference, distance


@pytest.mark.parametrize(
    ("name", "one", "two", "expected"),
    [
        ("metrics.jsonl", [{"loss": 1.0}, {"loss": 2.0}], [{"loss": 1.0}, {"loss": 2.5}], "line 2, by 0.5"),
        ("metrics.jsonl", [{"loss": 1.0}, {"loss": 2.0}], [{"loss": 2.0}], "line 1, 2"),
        ("timings.jsonl", [{"step": 0, "seconds": 1.0}], [{"step": 0, "seconds": 2.0}], ""),
        ("completions.jsonl", [{"where": "/a:1", "row": 1}], [{"where": "/b:1", "row": 1}], ""),
        ("summary.json", [{"start": {"greedy": 0.5}, "seconds": {}}], [{"start": {"greedy": 0.5}, "seconds": 1}], ""),
        ("config.yaml", [{"seed": 0, "output_dir": "a"}], [{"seed": 1, "output_dir": "b"}], "line 1"),
        ("picture.webp", ["one"], ["two"], "line 1"),
    ],
)
def test_lines(tmp_path, name, one, two, expected):
    files = [tmp_path / folder / name for folder in "ab"]
    for file, lines in zip(files, (one, two), strict=True):
        file.parent.mkdir()
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert difference(*files) == expected
    assert difference(files[0], files[0]) == ""


def test_tensors(tmp_path):
    files = [tmp_path / f"{letter}.safetensors" for letter in "ab"]
    weights = {"x": torch.ones(3), "y": torch.zeros(2)}
    save_file(weights, files[0])
    for other, expected in (
        (weights | {"x": torch.tensor([1.0, 1.25, 1.0])}, "line 1, by 0.25"),
        ({name: x.double() for name, x in weights.items()}, "other bytes"),
        (weights | {"z": torch.ones(1)}, "line 1"),
        (weights | {"x": torch.ones(4)}, "line 1"),
        (weights | {"x": torch.full((3,), math.nan)}, "line 1"),
    ):
        save_file(other, files[1])
        assert difference(*files) == expected


def test_a_file_that_is_not_what_its_name_says(tmp_path):
    for name, text in (("a.jsonl", "{}\n"), ("b.jsonl", "{\n")):
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=r"b\.jsonl: not JSON"):
        difference(tmp_path / "a.jsonl", tmp_path / "b.jsonl")


def test_the_largest_difference_is_that_of_all_numbers():
    assert distance({"a": 1.0, "b": {"c": 2.0}}, {"a": 1.5, "b": {"c": 4.0}}) == 2.0
    assert distance({"a": "x"}, {"a": "y"}) == distance({"a": 1.0}, {"b": 1.0}) == math.inf
