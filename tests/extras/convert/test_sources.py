"""Test the sources that only `convert` reads: CSV, TSV, folders of classes, and folders of save_to_disk."""

import csv
import json

import PIL.Image
import pytest

from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.messages import text_of
from minivlmrl.extras.convert.command import main
from minivlmrl.extras.convert.sources import read_rows
from tests.helpers.runs import write_parquet

ROWS = [
    {"problem": 'a, "b"\nc', "solution": "é\u2028 日本", "images": ["x.png", "y.png"]},
    {"problem": "d", "solution": "2", "images": []},
    {"problem": "Yes, it is.\nNo, it is not, or\n\nit may be", "solution": '5"', "images": ["z.png"]},
]


def save_csv(path, delimiter=","):
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(ROWS[0])
        writer.writerows([row["problem"], row["solution"], json.dumps(row["images"])] for row in ROWS)


@pytest.mark.parametrize(
    ("name", "separator"), [("cells.csv", ","), ("cells.csv", ";"), ("cells.tsv", "\t"), ("imagefolder", ",")]
)
def test_tables_are_read(tmp_path, name, separator):
    path = tmp_path / name
    if name == "imagefolder":
        path.mkdir()
    save_csv(path / "metadata.csv" if path.is_dir() else path, separator)
    rows = list(read_rows(path))
    assert [row for _, row in rows] == ROWS
    assert [int(where.rpartition(":")[2]) for where, _ in rows] == [2, 4, 5]


def test_cells_are_texts_but_for_labels_and_lists(tmp_path):
    (tmp_path / "rows.csv").write_text("problem,label,margin,level\na,TRUE,1.5,\nb,false,,3\n")
    rows = [row for _, row in read_rows(tmp_path / "rows.csv")]
    assert rows == [{"problem": "a", "label": True, "margin": 1.5}, {"problem": "b", "label": False, "level": "3"}]


GOOD = "".join(f"{i}.png,What?,{i}\n" for i in range(900))
WRONG = {  # {fault: (text of the file, error message)}
    "open quote": (f'a.png,"What?,x\n{GOOD}', r":2: the row cannot be read \(unexpected end of data\); close each"),
    "two open quotes": (f'a.png,"What?,x\n{GOOD}b.png,What?",x\n', r":2: column 'problem' seems to contain further"),
    "a swallowed row": ('a.png,"What?,x\nb.png,What?",y\n', r":2: column 'problem' seems to contain further rows"),
    "text after a quote": ('a.png,"What" now,x\n', r":2: the row cannot be read \(',' expected after '\"'\)"),
    "more cells": ("a.png,b,c,d\n", ":2: the row has 4 cells, but the first line of the file has 3 column names; put"),
    "fewer cells": (f"{GOOD}a.png,b\n", ":902: the row has 2 cells, but the first line of the file has 3 column names"),
    "deep": ('a,b,"' + "[" * 100_000 + '"\n', ":2: column 'images': the text is not valid JSON .*recursion"),
    "two columns": ("", r":1: two columns have the name 'image'"),
    "twice": ('a,b,"[{""x"": 1, ""x"": 2}]"\n', ":2: column 'images': .*the key 'x' occurs twice"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_table_is_named_and_leaves_no_file(tmp_path, name):
    content, expected = WRONG[name]
    last = {"deep": "images", "twice": "images", "two columns": "image"}.get(name, "solution")
    (tmp_path / "rows.csv").write_text(f"image,problem,{last}\n{content}")
    with pytest.raises(ValueError, match=r"rows\.csv" + expected):
        main([str(tmp_path / "rows.csv")])
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]


RED = {"image": "red.png", "problem": "What?", "solution": "Red."}
COCO = {
    "images": [{"id": 7, "file_name": "red.png", "width": 56, "height": 56}],
    "categories": [{"id": 3, "name": "cat"}],
    "annotations": [
        {"id": 1, "image_id": 7, "category_id": 3, "bbox": [1, 2, 10, 20]},
        {"id": 2, "image_id": 7, "category_id": 3, "bbox": [20, 2, 10.5, 20]},
        {"id": 3, "image_id": 7, "category_id": 3, "bbox": [0, 0, 9, 9], "iscrowd": 1},
    ],
}
FOUND = {"image": "red.png", "problem": "Give the bounding box of each cat in the image."}
ANSWERED = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "Red."}]


@pytest.mark.parametrize(("content", "kind", "row"), [
    (COCO, "the file is in COCO's format; ", FOUND | {"solution": [[1, 2, 11, 22], [20, 2, 30.5, 22]]}),
    ([{"messages": ANSWERED, "image": "red.png"}], "column 'solution' is missing",
     {"messages": ANSWERED, "image": "red.png", "solution": "Red."}),
])  # fmt: skip
def test_a_run_names_the_command_that_makes_a_file_readable(tmp_path, monkeypatch, content, kind, row):
    """The rows of ShareGPT get a solution, because GRPO needs one."""
    monkeypatch.chdir(tmp_path)
    PIL.Image.new("RGB", (56, 56), "red").save("red.png")
    for indent in (None, 1):
        (tmp_path / "rows.json").write_text(json.dumps(content, indent=indent))
        with pytest.raises(ValueError, match=kind + ".*convert the file once with `minivlmrl convert rows.json`"):
            FileDataset("rows.json", ("problem", "solution"))
        assert main(["rows.json"]) == 0
        assert len(FileDataset("rows_converted.jsonl", ("problem", "solution"))) == 1
        assert json.loads((tmp_path / "rows_converted.jsonl").read_text()) == row


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"annotations": []}, "rows.json has no rows"),
        ({"annotations": [{"caption": "A cat"}]}, r"annotations\[0\]: the annotation is .* an object with image_id, "),
    ],
)
def test_wrong_annotations_are_named(tmp_path, change, expected):
    (tmp_path / "rows.json").write_text(json.dumps(COCO | change))
    with pytest.raises(ValueError, match=expected):
        main([str(tmp_path / "rows.json")])


@pytest.mark.parametrize("open_file", [lambda path: FileDataset(path), lambda path: main([str(path)])])
def test_rows_inside_an_object_are_named(tmp_path, open_file):
    (tmp_path / "rows.json").write_text(json.dumps({"version": 2, "data": [RED]}, indent=1))
    with pytest.raises(ValueError, match="write one object per line, or a JSON list of objects"):
        open_file(tmp_path / "rows.json")


def test_each_split_of_a_folder_is_converted(tmp_path):
    """Files that `convert` wrote are not a split of the folder."""
    for folder in ("one", "two/a", "two/b"):
        (tmp_path / folder).mkdir(parents=True)
        for split in ("train", "test"):
            row = {"query": split, "response": "b", "image": {"bytes": b"x"}}
            write_parquet(tmp_path / folder / f"{split}-00000-of-00001.parquet", [row])
    for split in ("train", "test"):
        assert main([f"{tmp_path}/one@{split}"]) == 0
        [(_, row)] = read_rows(tmp_path / "one" / f"rows_{split}_converted.parquet")
        assert row["solution"] == "b"
    with pytest.raises(ValueError, match=r"several splits \(test, train\); choose one of them, as in .*/one@test"):
        main([f"{tmp_path}/one"])
    for split in ("", "@train"):
        for read in (FileDataset, lambda path: main([path])):
            with pytest.raises(ValueError, match=rf"configurations a, b; choose .* as in {tmp_path}/two/a{split}$"):
                read(f"{tmp_path}/two{split}")


def test_folders_of_classes_are_rows(tmp_path):
    """The solution of the image cat/1.png is the name of its folder."""
    for path in ("cat/1.png", "cat/2.JPG", "dog/1.png"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        PIL.Image.new("RGB", (8, 8)).save(tmp_path / path)
    (tmp_path / "notes.txt").write_text("no row")
    with pytest.raises(ValueError, match=rf"no \.jsonl, .* `minivlmrl convert {tmp_path}`"):
        FileDataset(tmp_path)
    assert main([str(tmp_path)]) == 0
    rows = FileDataset(tmp_path, ("problem", "solution"), prompt_template="What is it?")
    assert [row.columns["solution"] for row in rows] == ["cat", "cat", "dog"]
    assert text_of(rows[1].messages[0]) == "What is it?" and rows[1].images[0].size == (8, 8)
    with pytest.raises(ValueError, match=r":1: column 'problem' is missing.*data\.prompt_template"):
        FileDataset(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="neither a file of rows nor subfolders with images"):
        main([str(tmp_path / "empty")])


def test_folders_of_save_to_disk_are_rows(tmp_path):
    datasets = pytest.importorskip("datasets", reason="oracle missing: pip install datasets")
    rows = datasets.Dataset.from_list([{"query": f"a{i}", "response": "b"} for i in range(5)])
    rows.save_to_disk(tmp_path / "one", num_shards=2)
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "two")
    with pytest.raises(ValueError, match=rf"`minivlmrl convert {tmp_path}/one`"):
        FileDataset(tmp_path / "one")
    assert main([str(tmp_path / "one")]) == 0
    read = FileDataset(tmp_path / "one" / "rows_converted.jsonl", ("problem", "completion"))
    assert [text_of(row.messages[0]) for row in read] == [f"a{i}" for i in range(5)]
    with pytest.raises(ValueError, match=rf"two has several splits; convert one of them: {tmp_path}/two/test, "):
        main([str(tmp_path / "two")])


@pytest.mark.parametrize(("state", "expected"), [
    ("{}", "state.json: the file cannot be read"), ('{"_data_files": [3]}', "state.json: the file cannot be read"),
    ('{"_data_files": [{"filename": "../rows.arrow"}]}', r"/saved/rows\.arrow: the file cannot be read"),
    ('{"_data_files": [{"filename": "cut.arrow"}]}', "cut.arrow: the file cannot be read"),
    ("[", "the text is not valid JSON"),
])  # fmt: skip
def test_a_damaged_folder_of_save_to_disk_is_named(tmp_path, state, expected):
    pytest.importorskip("pyarrow", reason="extra parquet is missing: pip install pyarrow")
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "state.json").write_text(state)
    (folder / "cut.arrow").write_bytes(b"ARROW1 and no more")
    (tmp_path / "rows.arrow").write_bytes(b"a file of another folder")
    with pytest.raises(ValueError, match=expected):
        main([str(folder)])
