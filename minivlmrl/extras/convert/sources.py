"""Read rows from CSV, JSON, parquet and Arrow files, and from image folders."""

import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from minivlmrl.data.row_checks import parse_literal
from minivlmrl.data.row_files import (
    CONVERTED,
    NO_JSON_TYPES,
    ROW_DECODER,
    find_coco,
    map_nested,
    open_rows,
    read_text,
    split_of,
)
from minivlmrl.errors import UserError, error_context, optional_dependency, pluralize, require, truncate
from minivlmrl.json_files import parse_json, read_json

IMAGE_NAME = re.compile(r".+\.(png|jpe?g|webp|bmp|gif|tiff?)", re.IGNORECASE)
ROW_FILES = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
JSON_COLUMNS = "messages", "prompt", "conversations", "history", "images", "videos", "objects", "reward_model", "tools"
BOOL_OR_NUMBER = re.compile(r"(?i)true|false|-?\d*\.?\d+")
Rows = Iterator[tuple[str, dict]]  # pairs such as ("rows.csv:3", {column: value})


def read_rows(path: Path) -> Rows:
    """Yield the rows in a file, a folder, or a split such as "folder@train"."""
    folder, split = split_of(path)
    if split and (folder / split / "state.json").is_file():  # split saved by save_to_disk
        path, split = folder / split, None
    if path.is_dir():
        yield from _read_folder(path)
    elif path.suffix in (".csv", ".tsv"):
        yield from _read_cells(path)
    elif path.suffix in (".json", ".jsonl") and (coco := find_coco(read_text(path))):
        yield from _read_coco(path, coco)
    else:
        yield from _read_rows(path)


def _read_rows(path: Path) -> Rows:
    rows = open_rows(path)
    yield from ((rows.where(index), rows[index]) for index in range(len(rows)))


def _read_folder(folder: Path) -> Rows:
    """Read a folder from save_to_disk, a folder with row files, or one with image subfolders per class."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(str(path.parent) for path in folder.glob("*/state.json"))
        raise UserError(f"{folder} has several splits; convert one of them: {', '.join(splits)}")
    if (folder / "state.json").is_file():
        yield from _read_saved(folder)
        return
    files = [
        path
        for path in (*folder.glob("*"), *folder.glob("data/*.parquet"))
        if path.suffix in ROW_FILES and not CONVERTED.fullmatch(path.name)
    ]
    if len(files) == 1 and files[0].suffix in (".csv", ".tsv"):
        yield from _read_cells(files[0])
        return
    if files or any(folder.glob("*/*.parquet")):
        yield from _read_rows(folder)
        return
    images = sorted(path for path in folder.glob("[!.]*/[!.]*") if IMAGE_NAME.fullmatch(path.name))
    if not images:
        raise UserError(f"{folder}: the folder has neither a file of rows nor subfolders with images")
    for path in images:  # train/cat/1.png has the solution "cat"
        yield str(path), {"image": path.relative_to(folder).as_posix(), "solution": path.parent.name}


def _read_saved(folder: Path) -> Rows:
    """Read the Arrow files that save_to_disk wrote."""
    with optional_dependency("parquet", f"{folder}: reading a folder that save_to_disk wrote requires pyarrow"):
        import pyarrow as pa
    file = folder / "state.json"
    number = 0
    try:
        for listed in read_json(file)["_data_files"]:
            file = folder / Path(listed["filename"]).name
            with pa.memory_map(str(file)) as source:
                for batch in pa.ipc.open_stream(source):
                    for row in batch.to_pylist():
                        yield f"{folder}: row {number}", map_nested(row, str, NO_JSON_TYPES)
                        number += 1
    except (KeyError, TypeError, OSError, pa.ArrowException) as error:
        raise UserError(f"{file}: the file cannot be read ({error!r}); save the data set again") from error


def _read_coco(path: Path, content: dict) -> Rows:
    """Read COCO annotations except crowd regions: one row per image and category, boxes as (x1, y1, x2, y2)."""
    boxes = defaultdict(list)
    for number, annotation in enumerate(content["annotations"]):
        with error_context(f"{path}: annotations[{number}]"):
            is_box = isinstance(annotation, dict) and {"image_id", "category_id", "bbox"} <= annotation.keys()
            require(is_box, "the annotation", annotation, "an object with image_id, category_id and bbox")
            left, top, width, height = annotation["bbox"]
            if not annotation.get("iscrowd"):
                boxes[annotation["image_id"], annotation["category_id"]].append([left, top, left + width, top + height])
    names = {category["id"]: category["name"] for category in content.get("categories", ())}
    files = {image["id"]: image["file_name"] for image in content["images"]}
    for (image, category), solution in boxes.items():
        name = names.get(category, category)
        question = f"Give the bounding box of each {name} in the image."
        yield f"{path}: image {image}", {"image": files[image], "problem": question, "solution": solution}


def _read_cells(path: Path) -> Rows:
    """Read a CSV or TSV file with column names in the first line; empty cells become missing columns."""
    csv.field_size_limit(2**31 - 1)
    # error_context would name the previous row when csv.Error is raised
    with path.open(encoding="utf-8-sig", newline="") as file:
        first_line = file.readline()
        file.seek(0)
        separator = max(",\t;|", key=first_line.count)  # Excel writes semicolons in many countries
        reader = csv.reader(file, delimiter=separator, strict=True)
        names: list[str] = []
        start = 1  # line where the current row starts
        try:
            for cells in reader:
                where, start = f"{path}:{start}", reader.line_num + 1
                if not names:
                    names = [name.strip() for name in cells]
                    if twice := [name for name in names if name and names.count(name) > 1]:
                        raise UserError(f"{where}: two columns have the name {truncate(twice[0], 60)}")
                elif cells:
                    with error_context(where):
                        yield where, _row_of_cells(names, cells, separator)
        except csv.Error as error:
            raise UserError(f"{path}:{start}: the row cannot be read ({error}); close each quote") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: the file is not encoded in UTF-8 ({error}); save it as UTF-8") from error


def _row_of_cells(names: list[str], cells: list[str], separator: str) -> dict:
    if len(cells) != len(names):
        raise UserError(
            f"the row has {pluralize(len(cells), 'cell')}, but the first line of the file has {len(names)} column "
            "names; put cells that contain a comma, a tab or a line break in double quotes"
        )
    columns = {name: cell for name, cell in zip(names, cells, strict=True) if cell}
    for number, (name, cell) in enumerate(zip(names, cells, strict=True)):
        # a missing quote merges several rows into one cell
        lines = cell.split("\n")
        counts = [len(re.findall(rf"{separator}(?=\S|$)", line.strip("\r"))) for line in lines]
        last = len(names) - 1
        if last and lines[1:] and counts == [last - number, *[last for _ in lines[2:]], number] and separator in cell:
            raise UserError(f"column {name!r} seems to contain further rows, {truncate(cell, 80)}; close its quote")
        if name in JSON_COLUMNS and cell[:1] in ("[", "{"):
            with error_context(f"column {name!r}"):
                value = None if '"' in cell else parse_literal(cell)  # pandas writes lists in Python syntax
                columns[name] = parse_json(cell, ROW_DECODER.decode) if value is None else value
        elif name in ("label", "kto_tag", "margin") and BOOL_OR_NUMBER.fullmatch(cell):
            columns[name] = json.loads(cell.lower())
    return columns
