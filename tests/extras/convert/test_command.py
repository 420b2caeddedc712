"""Test that `convert` writes rows that a run can read, and reports what is dropped."""

import json
import re
import shlex

import PIL.Image
import pytest
import yaml

from minivlmrl.config.options import DataOptions, FileOptions, RunConfig
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.messages import text_of
from minivlmrl.extras.convert.command import main
from minivlmrl.run.datasets import load_datasets
from tests.helpers.runs import write_lines
from tests.helpers.talk import IMAGE_PART, assistant, text, user

RED, TWO = {"images": ["red.png"]}, ["red.png", "blue.png"]
FIND = [user("<image>Find <ref-object> and <ref-object>"), assistant("<bbox> and <bbox>")]
OBJECTS = {"objects": {"ref": ["a cat", "it"], "bbox": [[1, 2, 3, 4], "[5, 6]"]}}
FOUND = [[IMAGE_PART, text("Find a cat and it")], "[1, 2, 3, 4] and [5, 6]"]
HOW_MANY = [[IMAGE_PART, text("How many?")], "2"]
ROWS = {  # (row, expected content of the question and of the answer)
    "objects": ({"messages": FIND, **RED, **OBJECTS}, FOUND),
    "objects and a rejected answer": (
        {"messages": [user("<bbox>?"), assistant("<bbox>")], "rejected_response": "<bbox>", **RED,
         "objects": {"ref": ["unused"], "bbox": [[1], [2], [3]]}},
        [[IMAGE_PART, text("[1]?")], None],
    ),
    "img": ({"query": "<img>red.png</img>How many?", "response": "2"}, HOW_MANY),
    "two img": (
        {"prompt": [user("<img>red.png</img>or<img>blue.png</img>?")], "completion": "2"},
        [[IMAGE_PART, text("or"), IMAGE_PART, text("?")], "2"],
    ),
}  # fmt: skip


def convert_as_advised(path, **options):
    with pytest.raises(ValueError, match=r"convert the file once with `.*`, and use the new file") as error:
        FileDataset(path, ("problem", "solution"), **options)
    assert main(shlex.split(re.search("once with `minivlmrl convert (.*)`", str(error.value))[1])) == 0
    [new] = [new for new in (path if path.is_dir() else path.parent).iterdir() if "_converted." in new.name]
    return new


def shown(row):
    return [part for part in row.messages[-1]["content"] if part.get("text") != ""]


@pytest.mark.parametrize("name", ROWS)
def test_tags_become_images_and_boxes(write_rows, name):
    row, (question, answer) = ROWS[name]
    [read] = FileDataset(convert_as_advised(write_rows(row)))
    assert shown(read) == question
    assert [image.getpixel((0, 0)) for image in read.images] == [(255, 0, 0), (0, 0, 255)][: len(read.images)]
    answers = read.completion if isinstance(read.completion, list) else [assistant(read.completion)]
    if answer is None:
        assert "[2]" in str(read.chosen) and "[3]" in str(read.rejected)
    else:
        assert answer in (answers[0]["content"], answers[0]["content"][-1])


def test_a_list_of_vlm_r1_becomes_an_option(tmp_path, capsys):
    """`convert` converts the listed files, and keeps the names of files that need no change."""
    write_lines(tmp_path / "a.jsonl", [{"problem": f"a{i}", "solution": "1"} for i in range(4)])
    turns = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "1"}]
    write_lines(tmp_path / "b.jsonl", [{"image": "red.png", "conversations": turns}])
    PIL.Image.new("RGB", (4, 4)).save(tmp_path / "red.png")
    listed = [{"json_path": "a.jsonl", "sampling_strategy": "end:2"}, {"json_path": str(tmp_path / "b.jsonl")}]
    (tmp_path / "sets.yaml").write_text(yaml.safe_dump({"datasets": listed}))
    main([str(tmp_path / "sets.yaml")])
    printed = yaml.safe_load(capsys.readouterr().out)
    files = [FileOptions(**options) for options in printed["data"]["train"]]
    run = RunConfig(data=DataOptions(train=files), rewards={"accuracy": 1.0})
    rows = load_datasets(run, {"grpo": "prompts"}, ["solution"])["grpo"]
    assert [text_of(row.messages[-1]) for row in rows] == ["a2", "a3", "?"]


@pytest.mark.parametrize(("content", "expected"), [
    ({}, "datasets is missing"), ({"datasets": [{"json_path": 3}]}, "datasets.json_path is 3, but"),
    ({"datasets": [{"json_path": "a", "image_folder": "b"}]}, "unknown key datasets.image_folder"),
    ("a: [", "the text is not valid YAML"),
])  # fmt: skip
def test_another_yaml_file_is_named(tmp_path, content, expected):
    (tmp_path / "sets.yaml").write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=rf"sets\.yaml: {expected}"):
        main([str(tmp_path / "sets.yaml")])


TURNS = [{"from": "human", "value": "How many?"}, {"from": "gpt", "value": "2"}]
FORMAT = """
def read(row):
    return {"query": row["example"]["asked"], "response": row["example"]["said"]}
"""


def test_the_advice_contains_the_names_and_the_format_of_the_recipe(write_rows, tmp_path):
    folder = tmp_path / "it's mine"
    folder.mkdir()
    (folder / "f.py").write_text(FORMAT)
    for row, options in (
        ({"talk": TURNS, "id": 1}, {"columns": {"talk": "conversations", "id": "id"}}),
        ({"example": {"asked": "How many?", "said": "2"}}, {"format": f"{folder}/f.py:read"}),
    ):
        [read] = FileDataset(convert_as_advised(write_rows(row).rename(folder / "rows.jsonl"), **options))
        assert text_of(read.messages[-1]) == "How many?" and read.columns["solution"] == "2"


QUESTION = {"problem": "a", "solution": "b"}
NO_QUESTION = QUESTION | {"problem": None, "image": "red.png"}
NO_ANSWER = {"problem": "a", "solution": None, "image": "red.png"}
BOX = {"problem": "Find it", "images": TWO, "solution": [1, 2, 3, 4]}
MARKED = {"messages": [user("<image> or <image>? Find it"), assistant("[1, 2, 3, 4]")], "images": TWO}
LOSSES = {"conversations": [TURNS[0] | {"id": "a"}, TURNS[1]], "id": 3, "options": ["one", "two"]}
PRINTED = {  # (rows, expected text, whether it is printed)
    "unit": ([{"messages": FIND, **RED, **OBJECTS}],
             r"in pixels of the image file.*`python recipes/rescale_boxes\.py \S*rows_converted\.jsonl thou", True),
    "layout": ([LOSSES], "wrote 1 row of the layout 'conversations' to ", True),
    "losses": ([LOSSES] * 3, r"dropped: column 'options' \(3 times\)\ndropped: key 'id' of turns \(3 times\)\n", True),
    "one without question": ([QUESTION, NO_QUESTION], "1 of 2 rows have no question .*, for example ", True),
    "all without question": ([NO_QUESTION, NO_QUESTION], "have no question", False),
    "boxes": ([BOX, BOX | RED, BOX | {"solution": "red"}, MARKED | {"solution": "[1, 2, 3, 4]"}],
              r"2 of 4 rows have a box and several images, for example \S*rows\.jsonl:1: rewards measure", True),
    "no answer": ([NO_ANSWER | {"solution": "b"}, NO_ANSWER, NO_ANSWER],
                  r"\n2 of 3 rows have no answer \(solution or completion\), for example \S*rows\.jsonl:2: SFT", True),
    "empty solution": ([NO_ANSWER | {"solution": ""}], "no answer", False),
    "completion": ([NO_ANSWER | {"completion": "b"}], "no answer", False),
    "answer in messages": ([{"messages": [user("a"), assistant("b")]}], "no answer", False),
    "pair": ([{"problem": "a", "chosen": "b", "rejected": "c"}], "no answer", False),
}  # fmt: skip


@pytest.mark.parametrize("name", PRINTED)
def test_what_is_lost_or_refused_is_printed(write_rows, capsys, name):
    rows, expected, is_printed = PRINTED[name]
    assert main([str(write_rows(*rows))]) == 0
    assert bool(re.search(expected, capsys.readouterr().err)) == is_printed


def test_a_file_in_our_form_stays(write_rows, capsys):
    path = write_rows(QUESTION, {"prompt": [user("a")], "x": None})
    assert main([str(path)]) == 0
    assert "a run reads its 2 rows unchanged" in capsys.readouterr().err
    assert not path.with_name("rows_converted.jsonl").exists()


def test_two_passes_count_once(tmp_path, capsys):
    pytest.importorskip("pyarrow", reason="extra missing: pip install pyarrow")
    path = tmp_path / "rows.csv"
    path.write_text("question,answer\nHow many?,2\nWhich?,\nWho?,\n")
    assert main([str(path), f"--out={tmp_path / 'new'}.parquet"]) == 0
    message = capsys.readouterr().err
    assert "wrote 3 rows" in message and "\n2 of 3 rows have no answer" in message


TWO_LAYOUTS = {"query": "a", "response": "b", "instruction": "c"}
REFUSED = {  # (rows, options, error message)
    "tags": ([{"messages": FIND, **RED, "objects": {"ref": ["a cat"], "bbox": [[1], [2]]}}], [],
             r"rows\.jsonl:1: column 'objects' has 1 item in 'ref', but the texts contain <ref-object> 2 times"),
    "layouts": ([TWO_LAYOUTS], [], "the layouts query and alpaca fit; choose one: .* --layout=query$"),
    "second row": ([{"query": "a"}, {"conversations": TURNS}], [], r"rows\.jsonl:2: no layout has"),
    "renamed": ([{"query": "a", "image": "red.png"}], ["--columns={imag: image}"],
                r"--columns renames 'imag', but no row has this column; did you mean image\?"),
    "columns": ([{"query": "a"}], ["--columns=image"], "--columns is 'image', but it must be of type dict"),
    "itself": ([QUESTION], ["--out=rows.jsonl"], r"--out is rows\.jsonl, which is the file that is converted"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_converted_is_named(write_rows, monkeypatch, name):
    rows, options, message = REFUSED[name]
    path = write_rows(*rows)
    monkeypatch.chdir(path.parent)
    with pytest.raises(ValueError, match=message):
        main([str(path), *options])
    assert not path.with_name("rows_converted.jsonl").exists()


def test_a_layout_can_be_chosen(write_rows):
    assert main([str(write_rows(TWO_LAYOUTS)), "--layout=query"]) == 0


@pytest.mark.parametrize(("option", "message"), [
    ("--out=new.csv", "--out is new.csv, but its name must end with .jsonl or .parquet"), ("--columns=[a", "--columns"),
])  # fmt: skip
def test_options_without_meaning_are_refused(write_rows, capsys, option, message):
    with pytest.raises(SystemExit):
        main([str(write_rows({"query": "a"})), option])
    assert message in capsys.readouterr().err


def test_rows_may_have_different_columns_in_a_table(tmp_path):
    pytest.importorskip("pyarrow", reason="extra missing: pip install pyarrow")
    rows = [{"query": "a"}] * 150 + [{"query": "b", "response": "c", "level": i} for i in range(150)]
    write_lines(tmp_path / "rows.jsonl", rows)
    assert main([str(tmp_path / "rows.jsonl"), f"--out={tmp_path / 'new.parquet'}"]) == 0
    read = FileDataset(tmp_path / "new.parquet")
    assert len(read) == 300 and read[299].completion == "c" and read[299].columns["level"] == 149


@pytest.mark.parametrize(("row", "expected"), [
    ({"problem": "A?", "image_path": "a.png"}, "have a column that a run refuses unless a reward reads it, for example "
     "{}: column 'image_path' seems to contain an image that the model would not see: 'a.png'"),
    ({"messages": [user("A?")], "tools": [{"function": {}}]}, "{}: column 'tools' declares tools that the prompt"),
    ({"problem": "A?", "image": "lost.png"}, "have an image or video file that does not exist (data.image_root sets "
     "their folder), for example {}: lost.png"),
    ({"problem": "A?", "image": "https://a.example/a.png"}, "{}: https://a.example/a.png: remote files are not"),
])  # fmt: skip
def test_what_a_run_refuses_is_said(tmp_path, capsys, row, expected):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row | {"solution": "b"}))
    main([str(tmp_path / "rows.jsonl")])
    assert expected.format(f"{tmp_path}/rows.jsonl:1") in capsys.readouterr().err
