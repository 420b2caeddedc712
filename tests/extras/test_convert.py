"""Test that `convert` reads the layouts of docs/data.md, asks instead of guessing, and prints cures that work."""

import json
import re
import shlex

import PIL.Image
import pytest

from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.messages import text_of
from minivlmrl.extras.convert.command import main
from minivlmrl.extras.convert.sources import find_rows, read_rows
from tests.helpers.links import ROOT
from tests.helpers.runs import read_lines, write_lines, write_parquet

FORMS = json.loads((ROOT / "tests" / "recorded" / "forms.json").read_text())
PAIRS = "LLaMA-Factory, pairs", "ms-swift, pairs", "RLAIF-V", "TRL, pairs"
FOUND = {"R1-V": "<answer> 2 </answer>", "TRL, text": None} | dict.fromkeys(PAIRS)


@pytest.fixture
def convert(tmp_path, monkeypatch, capsys):
    """Return a function that converts a file, follows printed commands, and returns the rows and what was printed."""
    monkeypatch.chdir(tmp_path)
    for name, color in (("cat.jpg", "red"), ("dog.jpg", "blue")):
        PIL.Image.new("RGB", (60, 40), color).save(name)

    def run(path, *options):
        code = main([str(path), *options])
        out, err = capsys.readouterr()
        [rows] = [FileDataset(name, ()) for name in re.findall("wrote .* to (.*_converted.jsonl)", out)] or [None]
        assert (code == 0) == (rows is not None)
        return rows, out + err

    return run


@pytest.mark.parametrize("form", FORMS)
def test_layouts_of_the_page_are_read(convert, tmp_path, form):
    write_lines(tmp_path / "rows.jsonl", [FORMS[form]])
    [row], printed = convert("rows.jsonl")
    assert text_of(row.messages[-1]).strip() == "How many?" and len(row.images) == str(FORMS[form]).count(".jpg")
    assert row.images[0].getpixel((0, 0))[0] > 250
    assert row.columns.get("solution") == FOUND.get(form, "2")
    assert (row.chosen is not None) == (row.rejected is not None) == (form in PAIRS)
    assert "first row: question: '" in printed and "next: minivlmrl train " in printed


def test_the_page_names_the_project_of_each_layout():
    section = (ROOT / "docs" / "data.md").read_text().split("## Rows of other projects")[1].split("\n## ")[0]
    assert [name for name in FORMS if name.partition(",")[0] not in section] == []


ASKED = {"image": "cat.jpg", "question": "Which?", "answer": "B"}
TALK = [{"from": "human", "value": "Which?"}, {"from": "gpt", "value": "B"}]
CHOICES = {"question": "Which?", "answer": "dog", "image": "cat.jpg"}
UNCLEAR = {  # {name: (row, words that are printed, solutions after each printed command)}
    "an explanation": (
        ASKED | {"solution": "A dog barks."},
        ["answer ('B') and solution ('A dog barks.')"],
        ["B", "A dog barks."],
    ),
    "a conversation": (
        {"conversations": TALK, "solution": "A dog."},
        ["turn ('B') or solution ('A dog.')"],
        ["B", "A dog."],
    ),
    "two questions": (ASKED | {"query": "Q: Which?"}, ["question ('Which?') and query ('Q: Which?')"], ["B", "B"]),
    "two pictures": (ASKED | {"photo": "dog.jpg"}, ["image ('cat.jpg') and photo ('dog.jpg')"], ["B", "B"]),
    "choices": (CHOICES | {"choices": ["cat", "dog"]}, ["would not see choices"], ["dog", "dog"]),
    "choices in columns": (
        CHOICES | {"answer": "1", "option_a": "cat", "option_b": "dog"},
        ["see option_a, option_b"],
        ["1", "1"],
    ),
    "choices with another name": (CHOICES | {"answer_choices": ["cat", "dog"]}, ["see answer_choices"], ["dog", "dog"]),
    "a number and its name": (
        {"question": "Which?", "image": "cat.jpg", "label": 1, "label_name": "dog"},
        ["label (1) and label_name ('dog')"],
        [1, "dog"],
    ),
    "a dictionary of choices": (ASKED | {"options": {"A": "cat", "B": "dog"}, "hint": "Look."}, ["hint"], ["B", "B"]),
    "a history": (ASKED | {"history": "Step 1"}, ["would not see history"], ["B", "B"]),
    "nested pictures": (ASKED | {"image": {"<a>": "cat.jpg"}}, ["unknown key <a>"], []),
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_unclear_columns_are_a_question_whose_commands_work(convert, tmp_path, name):
    row, words, solutions = UNCLEAR[name]
    write_lines(tmp_path / "rows.jsonl", [row])
    rows, printed = convert("rows.jsonl")
    assert rows is None and all(word in printed for word in words)
    if lines := re.search(r"(def read.*)Save this", printed, re.DOTALL):
        (tmp_path / "my_format.py").write_text(lines[1])
    commands = re.findall("^  minivlmrl convert (.*)", printed, re.MULTILINE)
    if solutions:
        found = [convert(*shlex.split(command))[0][0] for command in commands]
        assert [row.columns["solution"] for row in found] == solutions
        if "option" in str(row) or "choices" in str(row):
            shown = text_of(found[1].messages[0]).partition("Which?\n")[2]
            assert "cat" in shown and "dog" in shown


@pytest.mark.parametrize(("row", "options", "message"), [
    ({"image": "cat.jpg", "frage": "Was?", "an": [1]}, [], "'problem': row['frage'], 'solution': row['an']"),
    ({"prompt": "What?", "level": 3}, [], "no column is known as the answer; name one of level"),
    ({"conversations": [{"from": "alien", "value": "?"}, TALK[1]]}, [], "its role must be one of human, gpt"),
])  # fmt: skip
def test_what_fits_no_layout_prints_a_function(convert, tmp_path, row, options, message):
    write_lines(tmp_path / "rows.jsonl", [row])
    rows, printed = convert("rows.jsonl", *options)
    assert rows is None and message in printed and "def read(row):" in printed


def test_columns_with_unknown_names_are_chosen_by_printed_commands(convert, tmp_path):
    write_lines(tmp_path / "rows.jsonl", [{"image": "cat.jpg", "frage": "Was?", "antwort": "Katze"}])
    command = ["rows.jsonl"]
    for known in (0, 1):  # the question is asked for first, and then the answer
        rows, printed = convert(*command)
        assert rows is None
        command = shlex.split(re.findall("^  minivlmrl convert (.*)", printed, re.MULTILINE)[0])
        assert len(json.loads(command[1].removeprefix("--columns="))) == known + 1
    [row] = convert(*command)[0]
    assert text_of(row.messages[0]) == "Was?" and row.columns["solution"] == "Katze"


@pytest.mark.parametrize(("options", "message"), [
    (["--columns={imag: image}"], "--columns names 'imag', but no row has this column; did you mean image?"),
    (["--columns=image"], "--columns is 'image', but it must be of type dict"),
    (["--out=rows.jsonl"], "--out is rows.jsonl, which is the file that is converted"),
])  # fmt: skip
def test_wrong_options_are_refused(convert, tmp_path, options, message):
    write_lines(tmp_path / "rows.jsonl", [ASKED])
    with pytest.raises(ValueError, match=re.escape(message)):
        convert("rows.jsonl", *options)


def test_pictures_that_cannot_be_opened_or_shown_are_left_out(convert, tmp_path):
    """MathVista has a path beside the decoded picture."""
    content = (tmp_path / "cat.jpg").read_bytes()
    write_parquet(tmp_path / "rows.parquet", [ASKED | {"image": "images/1.jpg", "decoded_image": {"bytes": content}}])
    [row], printed = convert("rows.parquet")
    assert row.images[0].size == (60, 40) and "left out, because another column is used: image\n" in printed


def test_pictures_are_not_written_through_a_link(convert, tmp_path):
    """A folder that somebody sent may have links to folders outside."""
    content = (tmp_path / "cat.jpg").read_bytes()
    write_parquet(tmp_path / "rows.parquet", [ASKED | {"image": {"bytes": content}}])
    (tmp_path / "outside").mkdir()
    (tmp_path / "rows_converted_pictures").symlink_to(tmp_path / "outside")
    rows, printed = convert("rows.parquet")
    assert rows is None and "rows_converted_pictures is a link" in printed and not any((tmp_path / "outside").iterdir())


def test_a_solution_beside_its_demonstration_stays_the_truth(convert, tmp_path):
    talk = [TALK[0], {"from": "gpt", "value": "<think>A dog.</think><answer>B</answer>"}]
    write_lines(tmp_path / "rows.jsonl", [{"conversations": talk, "solution": "B"}])
    [row], _ = convert("rows.jsonl")
    assert row.columns["solution"] == "B" and "A dog." in text_of(row.completion[-1])


def test_several_accepted_answers_name_the_reward_that_takes_them(convert, tmp_path):
    write_lines(tmp_path / "rows.jsonl", [ASKED | {"answer": ["B", "b)"]}])
    _, printed = convert("rows.jsonl")
    assert "answers.py:one_of: 1.0}'" in printed


def test_labeled_pictures_are_rows_and_held_out_rows(convert, tmp_path):
    (tmp_path / "labels.csv").write_text("file_name,label\n" + "cat.jpg,cat\ndog.jpg,dog\n" * 10)
    rows, printed = convert(tmp_path, "--question=A cat or a dog?", "--eval_rows=4")
    assert len(rows) == 16 and {row.columns["solution"] for row in rows} == {"cat", "dog"}
    held_out = re.search(r"--data.eval_file=(\S+)", printed)[1]
    assert len(FileDataset(held_out)) == 4 and text_of(rows[0].messages[0]) == "A cat or a dog?"


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_splits_are_chosen_and_metadata_wins(convert, tmp_path, kind):
    home = tmp_path / "set"
    for split in ("train", "test"):
        (home / split / "images").mkdir(parents=True)
        PIL.Image.new("RGB", (8, 8)).save(home / split / "images" / "1.png")
        row = {"file_name": "images/1.png", "question": split, "answer": "a cat"}
        if kind == "jsonl":
            write_lines(home / split / "metadata.jsonl", [row])
        else:
            (home / split / "metadata.csv").write_text("\n".join([",".join(row), ",".join(row.values())]))
    with pytest.raises(ValueError, match=f"set has the folders test, train; choose one, as in .*{home}@train`"):
        convert(home)
    [row], _ = convert(f"{home}@train")
    assert (text_of(row.messages[0]), row.columns["solution"], row.images[0].size) == ("train", "a cat", (8, 8))


@pytest.mark.parametrize(("files", "names"), [
    (["seg_train/cat/1.png", "seg_pred/2.png"], "the folders seg_pred, seg_train"),
    (["cat/1.png", "cat/persian/2.png", "dog/3.png"], "the folders cat, dog"),
    (["images/1.png", "train.csv", "test.csv"], "test.csv, train.csv"),
])  # fmt: skip
def test_a_folder_with_several_splits_is_a_question(convert, tmp_path, files, names):
    for name in files:
        file = tmp_path / "set" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.new("RGB", (8, 8)).save(file, "png")
    with pytest.raises(ValueError, match=f"set has {names}; choose one, as in `minivlmrl convert"):
        convert("set", "--question=What is it?")


def test_choices_of_a_late_row_are_a_question(convert, tmp_path):
    write_lines(tmp_path / "rows.jsonl", [ASKED] * 200 + [ASKED | {"choices": ["cat", "dog"]}])
    rows, printed = convert("rows.jsonl")
    assert rows is None and "would not see choices" in printed
    (tmp_path / "my_format.py").write_text(re.search(r"(def read.*)Save this", printed, re.DOTALL)[1])
    rows, _ = convert("rows.jsonl", "--format=my_format.py:read")
    assert text_of(rows[0].messages[0]) == "Which?"
    assert text_of(rows[200].messages[0]) == "Which?\nchoices: ['cat', 'dog']"


def test_files_that_convert_did_not_write_stay(convert, tmp_path):
    write_lines(tmp_path / "rows.jsonl", [ASKED, ASKED])
    (tmp_path / "own_eval.jsonl").write_text("mine")
    with pytest.raises(ValueError, match=r"would replace own_eval.jsonl; move this file, or choose another --out"):
        convert("rows.jsonl", "--out=own.jsonl", "--eval_rows=1")
    (tmp_path / "rows_converted.jsonl.partial").symlink_to(tmp_path / "own_eval.jsonl")
    assert len(convert("rows.jsonl")[0]) == 2
    assert (tmp_path / "own_eval.jsonl").read_text() == "mine"


def test_folders_of_classes_are_rows_but_a_split_is_no_class(convert, tmp_path):
    for name in ("a/cat", "a/dog", "b/images"):
        (tmp_path / name).mkdir(parents=True)
        PIL.Image.new("RGB", (8, 8)).save(tmp_path / name / "1.png")
    rows, _ = convert("a", "--question=What is it?")
    assert [row.columns["solution"] for row in rows] == ["cat", "dog"]
    with pytest.raises(ValueError, match=r"b/images has no file of rows and no folder per class; write labels\.csv"):
        convert("b")


def test_class_numbers_have_their_names(tmp_path):
    datasets = pytest.importorskip("datasets", reason="oracle missing: pip install datasets")
    features = datasets.Features(
        {"problem": datasets.Value("string"), "label": datasets.ClassLabel(names=["cat", "dog"])}
    )
    table = datasets.Dataset.from_dict({"problem": ["a", "b"], "label": [1, 0]}, features=features)
    table.to_parquet(tmp_path / "rows.parquet")
    rows = FileDataset(tmp_path / "rows.parquet", columns={"label": "solution"})
    assert [row.columns["solution"] for row in rows] == ["dog", "cat"]


def test_tables_are_read(tmp_path):
    for separator in ",;\t":
        (tmp_path / "rows.csv").write_text(
            separator.join(["problem", "image", "x"]) + '\n"a ""b""\nc"' + 2 * separator + "d"
        )
        assert [row for _, row in read_rows(find_rows(tmp_path))] == [{"problem": 'a "b"\nc', "x": "d"}]


@pytest.mark.parametrize(("content", "message"), [
    ('a.png,"What?,x\nb.png,What?,y\n', r":2: the row cannot be read \(unexpected end of data\); close each quote"),
    ("a.png,b,c,d\n", ":2: the row has 4 cells, but the first line of the file has 3 column names; put"),
])  # fmt: skip
def test_a_wrong_table_is_named(convert, tmp_path, content, message):
    (tmp_path / "rows.csv").write_text(f"image,problem,solution\n{content}")
    with pytest.raises(ValueError, match=r"rows\.csv" + message):
        convert("rows.csv")


def test_an_own_function_makes_the_rows(convert, tmp_path):
    write_lines(tmp_path / "rows.jsonl", [{"example": {"asked": "How many?", "said": "2"}}])
    lines = 'def read(row):\n    return {"problem": row["example"]["asked"], "solution": row["example"]["said"]}\n'
    (tmp_path / "own.py").write_text(lines)
    convert("rows.jsonl", f"--format={tmp_path}/own.py:read")
    assert read_lines(tmp_path / "rows_converted.jsonl") == [{"problem": "How many?", "solution": "2"}]
