"""Test that all formats of row files give the same rows, and that errors name the file and the line."""

import json
from datetime import date, time
from decimal import Decimal

import pytest

from minivlmrl.config.loading import load_config
from minivlmrl.data.download import find_folder
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.row_files import open_rows, split_of
from tests.helpers.runs import write_parquet

ROWS = [
    {"problem": 'a, "b"\nc', "solution": "é\u2028 日本", "images": ["x.png", "y.png"]},
    {"problem": "d", "solution": "2", "images": []},
    {"problem": "e", "solution": "false", "images": ["z.png"]},
]


@pytest.fixture
def files(tmp_path):
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    (tmp_path / "lines.jsonl").write_text("\ufeff" + "\n\n".join(lines))
    (tmp_path / "list.json").write_text("\ufeff" + json.dumps(ROWS, ensure_ascii=False))
    (tmp_path / "pretty.json").write_text(json.dumps(ROWS, ensure_ascii=False, indent=2))
    write_parquet(tmp_path / "rows.parquet", ROWS, row_group_size=2)
    (tmp_path / "repository" / "data").mkdir(parents=True)
    for number, part in enumerate((ROWS[:1], ROWS[1:])):
        write_parquet(tmp_path / "repository" / "data" / f"train-0000{number}-of-00002.parquet", part)
    return tmp_path


NAMES = "lines.jsonl list.json pretty.json rows.parquet repository"


@pytest.mark.parametrize("name", NAMES.split())
def test_every_format_gives_the_same_rows(files, name):
    rows = open_rows(files / name)
    assert list(rows) == ROWS and len(rows) == 3
    assert [rows[i] for i in (2, 0, 1)] == [ROWS[2], ROWS[0], ROWS[1]]


def test_a_row_is_named_by_its_line(files):
    lines = {"lines.jsonl": ":5", "list.json": ": row 2", "pretty.json": ": row 2", "rows.parquet": ": row 2"}
    assert {name: open_rows(files / name).where(2) for name in lines} == {n: f"{files / n}{lines[n]}" for n in lines}


DEEP = "[" * 100_000
WRONG = {  # {file content: error message after the file name}
    '{"problem": "a"}\n{"problem": ': r":2: the text is not valid JSON \(Expecting value: column 13",
    '[{"problem": "a"}, {"problem"}]': r": the text is not valid JSON \(Expecting ':'",
    '[\n{"problem": "a"},\n3]': r": row 1: the row is 3, .* a JSON object that maps columns to values",
    '[{"problem": ' + DEEP: r": the text is not valid JSON \(maximum recursion depth exceeded",
    "[]": " has no rows",
    "[ ] x": ": the text is not valid JSON",
    '[{"problem": "a"},, {"problem": "b"}]': r": the text is not valid JSON \(Expecting value",
    '[{"problem": "a"},\n]': r": the text is not valid JSON \(remove the comma after .*\"a\"}\)",
    '{"problem": "a,}", }': r":1: the text is not valid JSON \(remove the comma after {\"problem\": \"a,}\"\)",
    '{"problem": "a"},': r":1: the text is not valid JSON \(remove the comma after .*\"a\"}\)",
    "{'problem': 'a'}": r":1: the text is not valid JSON \(write double quotes instead of single quotes\)",
    '{"problem": None}': r":1: the text is not valid JSON \(write true, false or null instead of True, False or None\)",
    '{"problem": "a"}\n{"problem": "a", "problem": "b"}': ":2: .*the key 'problem' occurs twice in one object; remove",
    '{\n "problem": "a"\n}': r":1: the text is not valid JSON \(Expecting property name .* `minivlmrl convert",
    "problem,solution\na,b": r":1: the text is not valid JSON .* layout of another project, convert the file once with",
    '{"problem": "a\\ud83d"}': r":1: the text is not valid JSON \(.*surrogates not allowed",
    '{"problem": "a\\uDE00"}': r":1: the text is not valid JSON \(.*surrogates not allowed",
}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_file_without_the_text_of_its_rows_is_refused(tmp_path, name):
    if name == "rows.parquet":
        pytest.importorskip("pyarrow", reason="extra parquet is missing: pip install pyarrow")
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3\n")
    with pytest.raises(ValueError, match="is a Git LFS pointer"):
        open_rows(tmp_path / name)


@pytest.mark.parametrize("content", WRONG, ids=lambda content: content[:30])
def test_a_wrong_file_is_named(tmp_path, content):
    (tmp_path / "rows.json").write_text(content)
    with pytest.raises(ValueError, match=r"rows\.json" + WRONG[content]):
        FileDataset(tmp_path / "rows.json")


def test_a_folder_that_is_not_a_dataset_is_named_in_the_error(files):
    (files / "repository" / "data" / "test-0.parquet").write_bytes(b"")
    (files / "empty").mkdir()
    for name, expected in {
        "empty": r"empty has no parquet files; name a file of rows in it, or convert .* `minivlmrl convert .*empty`",
        "repository": r"repository: name a split of the folder, as in .*@test; its splits are: test, train",
        "repository@dev": r"repository: name a split of the folder, .* its splits are: test, train",
        "repository/data/test-0.parquet": "test-0.parquet: the parquet file cannot be read .Parquet file size is 0",
    }.items():
        with pytest.raises(ValueError, match=expected):
            open_rows(f"{files / name}")


def test_values_that_json_does_not_support_become_text(tmp_path):
    """A solution that is a date would stop the run when completions are logged as JSON."""
    row = {"date": date(2020, 1, 2), "inside": [{"at": time(3, 4)}], "price": Decimal("1.50"), "image": b"bytes"}
    write_parquet(tmp_path / "rows.parquet", [row])
    plain = {"date": "2020-01-02", "inside": [{"at": "03:04:00"}], "price": "1.50", "image": b"bytes"}
    assert list(open_rows(tmp_path / "rows.parquet")) == [plain]


def test_a_picture_is_no_file_of_rows(tmp_path):
    (tmp_path / "cat.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\r")
    with pytest.raises(ValueError, match=r"cat\.png: rows are JSON encoded in UTF-8, or parquet"):
        list(open_rows(tmp_path / "cat.png"))


def test_a_path_that_is_too_long_counts_as_missing(home):
    for name in ("image_root", "train_file"):
        path = load_config(home / "recipe.yaml", [f"--data.{name}={'x' * 3000}"]).data
        with pytest.raises(ValueError, match="this file of rows does not exist in the working folder, /"):
            open_rows(getattr(path, name))
    with pytest.raises(ValueError, match="this folder does not exist in the working folder"):
        find_folder("x" * 3000)


def test_a_split_of_a_folder_is_read_and_compared_by_a_resume(tmp_path):
    for split, text in (("train", "a"), ("test", "b")):
        write_parquet(tmp_path / f"{split}-00000-of-00001.parquet", [{"problem": text}])
    assert [open_rows(f"{tmp_path}@{split}")[0]["problem"] for split in ("train", "test")] == ["a", "b"]
    assert split_of(f"{tmp_path}@train") == (tmp_path, "train")
    strange = tmp_path / "a@b.jsonl"
    strange.write_text('{"problem": "c"}')
    assert open_rows(strange)[0]["problem"] == "c"
