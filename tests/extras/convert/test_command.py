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
    """Run the command that the error message for a file names, and return the new file."""
    with pytest.raises(ValueError, match=r"convert the file once with `.*`, and use the new file") as error:
        FileDataset(path, ("problem", "solution"), **options)
    command = shlex.split(re.search("once with `minivlmrl convert (.*)`", str(error.value))[1])
    assert main(command) == 0
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


def test_the_unit_of_boxes_is_said(write_rows, capsys):
    path = write_rows({"messages": FIND, **RED, **OBJECTS})
    assert main([str(path)]) == 0
    new = path.with_name("rows_converted.jsonl")
    assert (
        f"in pixels of the image file. If your model uses a different unit, such as Qwen3-VL's thousandths, run "
        f"`python recipes/rescale_boxes.py {new} thousandths > rescaled.jsonl`" in capsys.readouterr().err
    )


def test_yaml_that_cannot_be_read_is_named(tmp_path, write_rows):
    (tmp_path / "sets.yaml").write_text("a: [")
    with pytest.raises(ValueError, match=r"sets\.yaml: the text is not valid YAML"):
        main([str(tmp_path / "sets.yaml")])
    with pytest.raises(SystemExit):
        main([str(write_rows({"query": "a"})), "--columns=[a"])


def test_numbers_of_tags_and_items_must_be_equal(write_rows):
    path = write_rows({"messages": FIND, **RED, "objects": {"ref": ["a cat"], "bbox": [[1], [2]]}})
    message = r"rows\.jsonl:1: column 'objects' has 1 item in 'ref', but the texts contain <ref-object> 2 times"
    with pytest.raises(ValueError, match=message):
        main([str(path)])


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


@pytest.mark.parametrize("content", [
    {}, {"datasets": [{"sampling_strategy": "all"}]}, [3],
    {"datasets": [{"json_path": 3}]}, {"datasets": 3}, {"datasets": [{"json_path": "a", "image_folder": "b"}]},
])  # fmt: skip
def test_another_yaml_file_is_named(tmp_path, content):
    (tmp_path / "sets.yaml").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"sets\.yaml: the (file must have a list `datasets` of|keys image_folder of)"):
        main([str(tmp_path / "sets.yaml")])


TURNS = [{"from": "human", "value": "How many?"}, {"from": "gpt", "value": "2"}]
FORMAT = """
def read(row):
    return {"query": row["example"]["asked"], "response": row["example"]["said"]}
"""


def test_the_advice_contains_the_names_and_the_format_of_the_recipe(write_rows, tmp_path):
    """The advised command must quote a folder name with a blank and a quote."""
    folder = tmp_path / "it's mine"
    folder.mkdir()
    (folder / "f.py").write_text(FORMAT)
    for row, options in (
        ({"talk": TURNS, "id": 1}, {"columns": {"talk": "conversations", "id": "id"}}),
        ({"example": {"asked": "How many?", "said": "2"}}, {"format": f"{folder}/f.py:read"}),
    ):
        path = write_rows(row).rename(folder / "rows.jsonl")
        [read] = FileDataset(convert_as_advised(path, **options))
        assert text_of(read.messages[-1]) == "How many?" and read.columns["solution"] == "2"


def test_what_has_no_place_is_named(write_rows, capsys):
    rows = [{"conversations": [TURNS[0] | {"id": "a"}, TURNS[1]], "id": i, "options": ["one", "two"]} for i in range(3)]
    main([str(write_rows(*rows))])
    message = capsys.readouterr().err
    assert "wrote 3 rows of the layout 'conversations' to" in message
    assert "dropped: column 'options' (3 times)\ndropped: key 'id' of turns (3 times)\n" in message


def test_two_layouts_that_fit_are_asked_for(write_rows):
    path = write_rows({"query": "a", "response": "b", "instruction": "c"})
    with pytest.raises(ValueError, match=r"the layouts query and alpaca fit; choose one: .* --layout=query$"):
        main([str(path)])
    assert main([str(path), "--layout=query"]) == 0
    path = write_rows({"query": "a"}, {"conversations": TURNS})
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: no layout has"):
        main([str(path)])


@pytest.mark.parametrize(("words", "sentence"), [
    ("--columns={imag: image}", r"--columns renames 'imag', but no row has this column; did you mean image\?"),
    ("--columns=image", r"--columns is 'image', but it must be of type dict"),
])  # fmt: skip
def test_columns_that_no_row_has_are_refused(write_rows, words, sentence):
    path = write_rows({"query": "a", "image": "red.png"})
    with pytest.raises(ValueError, match=sentence):
        main([str(path), words])
    assert not path.with_name("rows_converted.jsonl").exists()


def test_a_name_without_a_known_ending_is_refused(write_rows, capsys):
    with pytest.raises(SystemExit):
        main([str(write_rows({"query": "a"})), "--out=new.csv"])
    assert "--out is new.csv, but its name must end with .jsonl or .parquet" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_without_an_answer_are_counted(tmp_path, capsys, suffix):
    if suffix == "parquet":
        pytest.importorskip("pyarrow", reason="extra missing: pip install pyarrow")
    path = tmp_path / "rows.csv"
    path.write_text("question,answer\nHow many?,2\nWhich?,\nWho?,\n")
    assert main([str(path), f"--out={tmp_path / 'new'}.{suffix}"]) == 0
    assert re.search(
        r"\n2 of 3 rows have no answer \(solution or completion\), for example \S*rows\.csv:3: SFT and GRPO's "
        r"accuracy refuse them\n$",
        capsys.readouterr().err,
    )


def test_rows_without_a_question_are_counted_beside_others(write_rows, capsys):
    requested, shown = {"problem": "a", "solution": "b"}, {"problem": None, "solution": "b", "image": "red.png"}
    for rows, message in (([requested, shown], True), ([shown, shown], False)):
        assert main([str(write_rows(*rows))]) == 0
        expected = "1 of 2 rows have no question (problem, prompt or messages), for example "
        assert (expected in capsys.readouterr().err) == message


def test_boxes_of_rows_with_several_images_are_counted(write_rows, capsys):
    row = {"problem": "Find it", "images": TWO, "solution": [1, 2, 3, 4]}
    marked = {"messages": [user("<image> or <image>? Find it"), assistant("[1, 2, 3, 4]")], "images": TWO}
    path = write_rows(row, row | RED, row | {"solution": "red"}, marked | {"solution": "[1, 2, 3, 4]"})
    assert main([str(path)]) == 0
    expected = r"2 of 4 rows have a box and several images, for example \S*rows\.jsonl:1: rewards measure boxes in"
    assert re.search(expected, capsys.readouterr().err)


@pytest.mark.parametrize("answer", [
    {"problem": "a", "solution": ""}, {"problem": "a", "completion": "b"}, {"messages": [user("a"), assistant("b")]},
    {"problem": "a", "chosen": "b", "rejected": "c"}, {"problem": "a", "solution": None},
])  # fmt: skip
def test_an_answer_may_have_any_form(write_rows, capsys, answer):
    assert main([str(write_rows(answer | {"image": "red.png"}))]) == 0
    assert ("1 of 1 rows have no answer" in capsys.readouterr().err) == (None in answer.values())


def test_a_file_in_our_form_stays(write_rows, capsys):
    path = write_rows({"problem": "a", "solution": "b"}, {"prompt": [user("a")], "x": None})
    assert main([str(path)]) == 0
    assert "a run reads its 2 rows unchanged" in capsys.readouterr().err
    assert not path.with_name("rows_converted.jsonl").exists()
    with pytest.raises(ValueError, match=r"--out is .*rows\.jsonl, which is the file that is converted"):
        main([str(path), f"--out={path}"])


def test_rows_may_have_different_columns_in_a_table(tmp_path):
    pytest.importorskip("pyarrow", reason="extra missing: pip install pyarrow")
    rows = [{"query": "a"}] * 150 + [{"query": "b", "response": "c", "level": i} for i in range(150)]
    write_lines(tmp_path / "rows.jsonl", rows)
    assert main([str(tmp_path / "rows.jsonl"), f"--out={tmp_path / 'new.parquet'}"]) == 0
    read = FileDataset(tmp_path / "new.parquet")
    assert len(read) == 300 and read[299].completion == "c" and read[299].columns["level"] == 149
