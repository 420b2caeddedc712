"""Read rows from JSON Lines, JSON and parquet files.

JSON files stay in memory as text, while parquet rows are read from disk on access.
"""

import bisect
import functools
import json
import re
import shlex
from collections.abc import Callable, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from os.path import isdir, isfile
from pathlib import Path

from minivlmrl.config.types import Plain
from minivlmrl.errors import UserError, error_context, optional_dependency, require
from minivlmrl.json_files import check_downloaded, check_surrogates, parse_json, unique_keys

# Parquet types that become strings, because JSON has no such types
NO_JSON_TYPES = date, time, timedelta, Decimal
# JSON decoder that rejects repeated keys, and converts NaN and Infinity to None
ROW_DECODER = json.JSONDecoder(object_pairs_hook=unique_keys, parse_constant=lambda name: None)


def open_rows(path: str | Path) -> "Lines | Arrow":
    """Open a data file, a folder of parquet files, or one split in a folder, such as "folder@train".

    Raises:
        UserError: the file is missing or unreadable, or the folder has several splits.
    """
    path, split = split_of(path)
    if isdir(path):  # use os.path, because pathlib raises OSError for long names
        return _open_folder(path, split)
    if not isfile(path):
        raise UserError(
            f"{path}: this file of rows does not exist in the working folder, {Path.cwd()}; correct the path "
            "(data.eval_file may be null), or download a data set of the Hugging Face Hub with `hf download "
            "--repo-type=dataset`, and use its folder"
        )
    if path.suffix == ".parquet":
        return Arrow([path])
    return Lines(path)


def split_of(path: str | Path) -> tuple[Path, str | None]:
    """Split "folder@train" into (folder, split); the split is None without "@"."""
    folder, _, split = str(path).rpartition("@")
    if split and isdir(folder) and not (isfile(path) or isdir(path)):
        return Path(folder), split
    return Path(path), None


def convert_advice(path: str | Path, columns: Mapping[str, str]) -> str:
    """Return advice for an error message, such as "convert the file once with `minivlmrl convert ...`"."""
    command = f"minivlmrl convert {shlex.quote(str(path))}"
    if columns:
        command += f" --columns={shlex.quote(json.dumps(columns))}"
    return f"convert the file once with `{command}`, and use the new file{' without data.columns' if columns else ''}"


def _open_folder(folder: Path, split: str | None) -> "Arrow":
    # train-00000-of-00002.parquet belongs to the split train
    splits = {}
    for path in sorted([*folder.glob("*.parquet"), *folder.glob("data/*.parquet")]):
        splits.setdefault(re.sub(r"(^|-)\d.*", "", path.stem), []).append(path)
    if not splits:
        raise UserError(f"{folder} has no parquet files; name a file of rows in it, or {convert_advice(folder, {})}")
    if split is None and len(splits) == 1:
        [split] = splits
    if split not in splits:
        raise UserError(
            f"{folder}: name a split of the folder, as in {folder}@{min(splits)}; its splits are: {', '.join(splits)}"
        )
    return Arrow(splits[split])


class Lines:
    """Rows from a JSON Lines file, or from a file with one JSON list."""

    def __init__(self, path: Path):
        self.path = path
        self.folder = path.parent
        check_downloaded(path)
        try:
            text = path.read_text("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: rows are JSON encoded in UTF-8, or parquet ({error})") from error
        if text.lstrip().startswith("["):
            with error_context(path):
                rows = parse_json(text, ROW_DECODER.decode)
            self.texts = [(f": row {n}", json.dumps(row)) for n, row in enumerate(rows)]
        else:
            self.texts = [(f":{n}", line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]

    def __len__(self) -> int:
        return len(self.texts)

    def where(self, index: int) -> str:
        """Return a row's file and line, such as "rows.jsonl:3", for error messages."""
        return f"{self.path}{self.texts[index][0]}"

    def __getitem__(self, index: int) -> dict:
        text = self.texts[index][1]
        with error_context(self.where(index)):
            columns = parse_json(text, ROW_DECODER.decode)
            check_surrogates(text, columns)
            require(isinstance(columns, dict), "the row", columns, "a JSON object that maps columns to values")
            return columns


class Arrow:
    """Rows from one or more parquet files, in order.

    Reading a row loads its row group; the last 4 row groups are cached.
    """

    def __init__(self, paths: list[Path]):
        with optional_dependency("parquet", f"{paths[0]}: reading parquet files requires pyarrow"):
            import pyarrow as pa
            import pyarrow.parquet as pq
        self.path = paths[0]
        self.folder = paths[0].parent
        # per row group: (path, first row in the file, open file, group number in the file)
        self.groups = []
        self.classes: dict[str, list[str]] = {}  # {column with class numbers: class names}
        self.starts = [0]  # first row index of each row group, then the total number of rows
        for path in paths:
            file_start = self.starts[-1]
            check_downloaded(path)
            try:
                file = pq.ParquetFile(path)
                self.classes |= class_names(file.schema_arrow.metadata or {})
            except (OSError, pa.ArrowException) as error:
                raise UserError(f"{path}: the parquet file cannot be read ({error})") from error
            for group in range(file.num_row_groups):
                self.groups.append((path, file_start, file, group))
                self.starts.append(self.starts[-1] + file.metadata.row_group(group).num_rows)
        self.read_group = functools.lru_cache(4)(pq.ParquetFile.read_row_group)

    def __len__(self) -> int:
        return self.starts[-1]

    def where(self, index: int) -> str:
        """Return a row's file and index, such as "a.parquet: row 0"."""
        path, file_start, *_ = self.groups[bisect.bisect_right(self.starts, index) - 1]
        return f"{path}: row {index - file_start}"

    def __getitem__(self, index: int) -> dict:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect.bisect_right(self.starts, index) - 1
        *_, file, group = self.groups[number]
        with error_context(self.where(index)):
            table = self.read_group(file, group)
            [row] = table.slice(index - self.starts[number], 1).to_pylist()
            for name in self.classes.keys() & row.keys():
                if isinstance(row[name], int):
                    row[name] = self.classes[name][row[name]]
            return map_nested(row, str, NO_JSON_TYPES)


def class_names(metadata: Mapping[bytes, bytes]) -> dict[str, list[str]]:
    """Return class names (datasets.ClassLabel), which `datasets` writes into parquet files."""
    content = parse_json(metadata.get(b"huggingface", b"{}").decode())
    features = content.get("info", {}).get("features", {})
    return {name: value["names"] for name, value in features.items() if isinstance(value, dict) and value.get("names")}


def map_nested(value: Plain, change: Callable, types: type | tuple[type, ...] = str) -> Plain:
    """Copy nested lists and dicts, applying `change` to all values of the given types."""
    if isinstance(value, types):
        return change(value)
    if isinstance(value, list):
        return [map_nested(item, change, types) for item in value]
    if isinstance(value, dict):
        return {key: map_nested(item, change, types) for key, item in value.items()}
    return value
