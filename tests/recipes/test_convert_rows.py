"""recipes/convert_rows.py: the command that an error message names gives rows that are read as the old files were."""

import base64
import io
import json
import re
import shlex

import PIL.Image
import pytest
import yaml

from minivlmrl.config.options import DataOptions, FileOptions, RunConfig
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.run.datasets import load_datasets
from recipes.convert_rows import main
from tests.helpers.links import ROOT
from tests.helpers.runs import write_lines
from tests.helpers.talk import IMAGE_PART, assistant, text, user

RED, TWO = {"images": ["red.png"]}, ["red.png", "blue.png"]
FIND = [user("<image>Find <ref-object> and <ref-object>"), assistant("<bbox> and <bbox>")]
OBJECTS = {"objects": {"ref": ["a cat", "it"], "bbox": [[1, 2, 3, 4], "[5, 6]"]}}
FOUND = [[IMAGE_PART, text("Find a cat and it")], "[1, 2, 3, 4] and [5, 6]"]
HOW_MANY = [[IMAGE_PART, text("How many?")], "2"]
ROWS = {  # (row, content of its question and its answer, as version 0.4 read the row)
    "objects": ({"messages": FIND, **RED, **OBJECTS}, FOUND),
    "objects of a query": ({"query": FIND[0]["content"], "response": FIND[1]["content"], **RED, **OBJECTS}, FOUND),
    "objects and a rejected answer": (
        {"messages": [user("<bbox>?"), assistant("<bbox>")], "rejected_response": "<bbox>", **RED,
         "objects": {"ref": ["unused"], "bbox": [[1], [2], [3]]}},
        [[IMAGE_PART, text("[1]?")], None],
    ),
    "img": ({"query": "<img>red.png</img>How many?", "response": "2"}, HOW_MANY),
    "img in turns": (
        {"conversations": [{"from": "user", "value": "<img>red.png</img>How many?"}, {"from": "gpt", "value": "2"}]},
        HOW_MANY,
    ),
    "two img": (
        {"prompt": [user("<img>red.png</img>or<img>blue.png</img>?")], "completion": "2"},
        [[IMAGE_PART, text("or"), IMAGE_PART, text("?")], "2"],
    ),
}  # fmt: skip


def convert_as_advised(path, capsys):
    """Run the command in a file's error message, and return the new file."""
    with pytest.raises(ValueError, match=r"convert the file once with `.*`, and use the new file$") as error:
        FileDataset(path)
    python, script, old, arrow, new = shlex.split(re.search("once with `(.*)`", str(error.value))[1])
    assert (python, arrow) == ("python", ">") and (ROOT / script).is_file()
    capsys.readouterr()
    main(old)
    with open(new, "w") as file:
        file.write(capsys.readouterr().out)
    return new


def shown(row):
    return [part for part in row.messages[-1]["content"] if part.get("text") != ""]


@pytest.mark.parametrize("name", ROWS)
def test_a_converted_row_is_the_row_of_the_old_reader(write_rows, capsys, name):
    row, (question, answer) = ROWS[name]
    [read] = FileDataset(convert_as_advised(write_rows(row), capsys))
    assert shown(read) == question
    assert [image.getpixel((0, 0)) for image in read.images] == [(255, 0, 0), (0, 0, 255)][: len(read.images)]
    answers = read.completion if isinstance(read.completion, list) else [assistant(read.completion)]
    if answer is None:
        assert "[2]" in str(read.chosen) and "[3]" in str(read.rejected)
    else:
        assert answer in (answers[0]["content"], answers[0]["content"][-1])


def test_images_in_a_parquet_file_are_kept(tmp_path, capsys):
    pa = pytest.importorskip("pyarrow", reason="extra missing: pip install pyarrow")
    import pyarrow.parquet as pq

    stored = io.BytesIO()
    PIL.Image.new("RGB", (6, 4), "red").save(stored, "PNG")
    row = {"messages": FIND, **OBJECTS, "images": [{"bytes": stored.getvalue(), "path": None}]}
    row["objects"] = {"ref": ["a cat", "it"], "bbox": ["[1, 2, 3, 4]", "[5, 6]"]}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    [read] = FileDataset(convert_as_advised(tmp_path / "rows.parquet", capsys))
    assert shown(read) == FOUND[0] and read.images[0].size == (6, 4)
    assert base64.b64encode(stored.getvalue()).decode() in str(read.columns["images"])


def test_numbers_of_tags_and_items_must_be_equal(write_rows):
    path = write_rows({"messages": FIND, **RED, "objects": {"ref": ["a cat"], "bbox": [[1], [2]]}})
    said = r"rows\.jsonl:1: column 'objects' has 1 items in 'ref', but the texts contain <ref-object> 2 time\(s\)"
    with pytest.raises(ValueError, match=said):
        main(str(path))


def test_a_list_of_vlm_r1_becomes_an_option(tmp_path, monkeypatch, capsys):
    write_lines(tmp_path / "a.jsonl", [{"problem": f"a{i}", "solution": "1"} for i in range(4)])
    listed = [{"json_path": "a.jsonl", "sampling_strategy": "end:2"}, {"json_path": str(tmp_path / "a.jsonl")}]
    (tmp_path / "sets.yaml").write_text(yaml.safe_dump({"datasets": listed}))
    main(str(tmp_path / "sets.yaml"))
    printed = yaml.safe_load(capsys.readouterr().out)
    files = [FileOptions(**options) for options in printed["data"]["train"]]
    run = RunConfig(data=DataOptions(train=files), rewards={"accuracy": 1.0})
    rows = load_datasets(run, {"grpo": "prompts"}, ["solution"])["grpo"]
    assert [row.columns["problem"] for row in rows] == ["a2", "a3", "a0", "a1", "a2", "a3"]


@pytest.mark.parametrize("content", [{}, {"datasets": [{"sampling_strategy": "all"}]}, [3]])
def test_another_yaml_file_is_named(tmp_path, content):
    (tmp_path / "sets.yaml").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"sets\.yaml: the file must have a list `datasets` of objects with"):
        main(str(tmp_path / "sets.yaml"))
