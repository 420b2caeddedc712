"""Read rows from JSON Lines, JSON, CSV and parquet files, and from Hugging Face dataset folders.

Each row's text stays in memory (200,000 rows of 500 bytes take 100 MB) and is parsed each
time the row is read. Rows in parquet files are read from disk.
"""

import bisect
import csv
import functools
import io
import json
import re
from datetime import date, time, timedelta
from decimal import Decimal
from os.path import isdir, isfile
from pathlib import Path

from minivlmrl.config.types import Plain
from minivlmrl.data.download import find_split, split_of
from minivlmrl.data.formats import map_nested
from minivlmrl.errors import check_field, error_context, optional_dependency
from minivlmrl.json_files import check_downloaded, parse_json

IMAGE_NAME = re.compile(r".+\.(png|jpe?g|webp|bmp|gif|tiff?)", re.IGNORECASE)
# Parquet values of these types are converted to text, because JSON does not support the types.
NO_JSON_TYPES = date, time, timedelta, Decimal
SEPARATOR = re.compile(r"\s*([\[,\]])\s*")  # what begins a list, separates its items, or ends it
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
BOOL_OR_NUMBER = re.compile(r"(?i)true|false|-?\d*\.?\d+")
# columns in a CSV file whose cells can contain JSON
JSON_COLUMNS = "messages", "prompt", "conversations", "images", "videos", "objects", "reward_model"


def open_rows(path: str | Path) -> "Lines | Arrow":
    """Open the rows of a file, a folder or a dataset split on the Hugging Face hub.

    Raises:
        ValueError: the file, folder or split does not exist or cannot be read, or it is not clear which file in the
            folder contains the rows.
    """
    path = Path(path)
    if isdir(path):  # os.path, because pathlib raises OSError for a name that is too long
        return _open_folder(path)
    if not isfile(path):
        split_files = find_split(str(path))
        if split_files is None:
            raise ValueError(
                f"{path}: this file of rows does not exist; correct the path in data.train_file or "
                "data.eval_file (null disables the option)"
            )
        return Arrow(split_files, is_downloaded=True)
    if path.suffix == ".parquet":
        return Arrow([path])
    return Cells(path) if path.suffix in (".csv", ".tsv") else Lines(path)


def convert_advice(path: Path) -> str:
    """Return the command that converts a data file to a layout that minivlmrl reads."""
    new = path.with_name(f"{path.stem}_converted.jsonl")
    return f"convert the file once with `python recipes/convert_rows.py {path} > {new}`, and use the new file"


def _open_folder(folder: Path) -> "Lines | Arrow":
    """Open a folder that has parquet files, a single data file, or a subfolder per class."""
    if [*folder.glob("state.json"), *folder.glob("*/state.json")]:
        raise ValueError(
            f"{folder}: folders written by save_to_disk of the datasets library are not supported; "
            'convert the folder with datasets.load_from_disk(...).to_parquet("rows.parquet")'
        )
    parquet_files = sorted([*folder.glob("*.parquet"), *folder.glob("data/*.parquet")])
    split_names = sorted({split_of(path.name) for path in parquet_files})
    if len(split_names) > 1:
        raise ValueError(
            f"{folder}: the folder has parquet files of several splits ({', '.join(split_names)}); "
            "put each split into its own folder"
        )
    if parquet_files:
        return Arrow(parquet_files)
    row_files = [*folder.glob("*.jsonl"), *folder.glob("*.csv"), *folder.glob("*.json")]
    row_files = [path for path in row_files if not path.name.startswith("dataset_info")]
    if len(row_files) == 1:
        return open_rows(row_files[0])
    image_files = sorted(path for path in folder.glob("[!.]*/[!.]*") if IMAGE_NAME.fullmatch(path.name))
    if image_files and not row_files:
        return Images(folder, image_files)
    names = ", ".join(path.name for path in sorted(row_files)[:5]) or "none"
    raise ValueError(
        f"{folder}: a folder of rows must contain parquet files, exactly one .jsonl, .json or .csv "
        f"file, or a subfolder of images per class. Files of rows that were found here: {names}."
    )


class Lines:
    """Rows from a JSON Lines file or a JSON list.

    `texts` contains one pair per row: its line number and its text.
    """

    # True for a data set from the hub, whose rows may only use files inside its folder
    is_downloaded = False

    def __init__(self, path: Path):
        self.path = path
        self.folder = path.parent
        check_downloaded(path)
        content = path.read_bytes()
        try:
            self.texts = self.split(content.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            line = 1 + content.count(b"\n", 0, error.start)
            raise ValueError(f"{path}:{line}: the file is not encoded in UTF-8 ({error}); save it as UTF-8") from error

    def split(self, content: str) -> list[tuple[int, str]]:
        """Return each row's line number and text."""
        if content.lstrip().startswith("["):
            return self.split_list(content)
        lines = enumerate(content.split("\n"), start=1)
        return [(number, line) for number, line in lines if line.strip()]

    def split_list(self, content: str) -> list[tuple[int, str]]:
        """Return each item's line number and text in a JSON list.

        The list may have line breaks anywhere.
        """
        rows = []
        decode = json.JSONDecoder().raw_decode
        separator, start = SEPARATOR.search(content), 0  # the opening bracket, later the commas
        line_number = 1
        while separator and separator[1] != "]":
            line_number += content.count("\n", start, separator.end())
            start = separator.end()
            if not rows and content[start:].strip() == "]":
                return []
            with error_context(f"{self.path}:{line_number}"):
                _, end = parse_json(content, decode, start)
            rows.append((line_number, content[start:end]))
            separator = SEPARATOR.match(content, end)
        if not separator or content[separator.end() :].strip():
            raise ValueError(
                f"{self.path}:{line_number}: the text is not valid JSON, because after this item there must be a comma "
                "and the next item, or ] and the end of the file; correct the text after the item"
            )
        return rows

    def __len__(self) -> int:
        return len(self.texts)

    def where(self, index: int) -> str:
        """Return a row's file and line number, such as "rows.jsonl:3"."""
        return f"{self.path}:{self.texts[index][0]}"

    def __getitem__(self, index: int) -> dict:
        text = self.texts[index][1]
        with error_context(self.where(index)):
            columns = parse_json(text, _decode_row)
            # A lone surrogate is valid JSON, but it cannot be encoded in UTF-8 and tokenized.
            if SURROGATE.search(text):
                parse_json(json.dumps(columns, ensure_ascii=False), str.encode)
            check_field(isinstance(columns, dict), "the row", columns, "a JSON object that maps columns to values")
            return columns


class Cells(Lines):
    """Rows from a CSV or TSV file, whose first line contains the column names.

    An empty cell counts as a missing column.
    """

    def split(self, content):
        csv.field_size_limit(2**31 - 1)
        dialect = csv.excel_tab if self.path.suffix == ".tsv" else csv.excel
        reader = csv.reader(io.StringIO(content, newline=""), dialect)
        self.names = [name.strip() for name in next(reader, ())]
        separator, word = ("\t", "tabs") if self.path.suffix == ".tsv" else (",", "commas")
        other = re.search(r"[;\t,|]", self.names[0]) if len(self.names) == 1 else None
        if other and other[0] != separator:
            raise ValueError(
                f"{self.path}:1: the columns are separated by {other[0]!r}, but they must be "
                f"separated by {word}; save the file with {word}"
            )
        _check_names(self.path, self.names)
        numbered_rows = []
        for cells in reader:
            if cells:
                # The number of the row's first line is computed, because reader.line_num is the number of its last
                # line, and a quoted cell can contain line breaks.
                numbered_rows.append((reader.line_num - "".join(cells).count("\n"), cells))
        return numbered_rows

    def __getitem__(self, index):
        cells = self.texts[index][1]
        with error_context(self.where(index)):
            if len(cells) > len(self.names):
                raise ValueError(
                    f"the row has {len(cells)} cells, but the first line of the file has "
                    f"{len(self.names)} column names; put cells that contain a comma or a tab in "
                    "double quotes"
                )
            columns = {name: cell for name, cell in zip(self.names, cells, strict=False) if cell}
            for name, cell in columns.items():
                if name in JSON_COLUMNS and cell[0] in "[{":
                    with error_context(f"column {name!r}"):
                        columns[name] = parse_json(cell, _decode_row)
                elif name in ("label", "margin") and BOOL_OR_NUMBER.fullmatch(cell):
                    columns[name] = json.loads(cell.lower())
            return columns


class Images(Lines):
    """Rows from a folder that has one image subfolder per class.

    Each image is a row, whose solution is the subfolder's name. For example, the solution for train/cat/1.png is "cat".
    """

    def __init__(self, folder: Path, paths: list[Path]):
        self.path = folder
        self.folder = folder
        self.texts = paths

    def where(self, index):
        return str(self.texts[index])

    def __getitem__(self, index):
        path = self.texts[index]
        return {"image": str(path.relative_to(self.folder)), "solution": path.parent.name}


class Arrow:
    """Rows from one or more parquet files, in order.

    Reading a row loads its whole row group, so the 4 row groups that were used last are cached.
    """

    def __init__(self, paths: list[Path], is_downloaded: bool = False):
        self.is_downloaded = is_downloaded
        with optional_dependency("parquet", f"{paths[0]}: reading parquet files requires pyarrow"):
            import pyarrow as pa
            import pyarrow.parquet as pq
        self.path = paths[0]
        self.folder = paths[0].parent
        # a tuple per row group: path, dataset index of the file's first row, open file,
        # row group's index in the file
        self.groups = []
        self.starts = [0]  # each group's first row index, then the total row count
        for path in paths:
            file_start = self.starts[-1]
            try:
                file = pq.ParquetFile(path)
                column_names = file.schema_arrow.names
            except (OSError, pa.ArrowException) as error:
                raise ValueError(f"{path}: the parquet file cannot be read ({error})") from error
            _check_names(path, column_names)
            for group in range(file.num_row_groups):
                self.groups.append((path, file_start, file, group))
                self.starts.append(self.starts[-1] + file.metadata.row_group(group).num_rows)
        self.read_group = functools.lru_cache(4)(pq.ParquetFile.read_row_group)

    def __len__(self) -> int:
        return self.starts[-1]

    def where(self, index: int) -> str:
        """Return a row's file and its index in the file, such as "a.parquet: row 0"."""
        path, file_start, *_ = self.groups[bisect.bisect_right(self.starts, index) - 1]
        return f"{path}: row {index - file_start}"

    def __getitem__(self, index: int) -> dict:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect.bisect_right(self.starts, index) - 1
        *_, file, group = self.groups[number]
        with error_context(self.where(index)):
            try:
                table = self.read_group(file, group)
                [row] = table.slice(index - self.starts[number], 1).to_pylist()
            except (OverflowError, OSError) as error:  # for example, a year that Python lacks
                raise ValueError(f"the row cannot be read ({error})") from error
            return map_nested(row, str, NO_JSON_TYPES)


def _object(pairs: list[tuple[str, Plain]]) -> dict[str, Plain]:
    """Build a dict from the pairs of a JSON object; raise ValueError for a repeated key."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {max(names, key=names.count)!r} occurs twice in one object; remove one of them")
    return content


# a decoder that refuses repeated keys; NaN and Infinity become None
_decode_row = json.JSONDecoder(object_pairs_hook=_object, parse_constant=lambda name: None).decode


def _check_names(path: Path, names: list[str]):
    for name in names:
        if name and names.count(name) > 1:
            raise ValueError(f"{path}: two columns have the name {name!r:.60}; rename one of them")
