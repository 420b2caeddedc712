"""Read rows from JSON Lines, JSON and parquet files.

JSON files stay in memory as text, while parquet rows are read from disk on access.
"""

import bisect
import functools
import json
import re
import shlex
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from os.path import isdir, isfile
from pathlib import Path

from minivlmrl.config.types import Plain
from minivlmrl.errors import UserError, error_context, optional_dependency, require, truncate
from minivlmrl.json_files import check_downloaded, check_surrogates, parse_json, unique_keys

# Parquet types that become strings, because JSON has no such types
NO_JSON_TYPES = date, time, timedelta, Decimal
# names of files written by `minivlmrl convert`
CONVERTED = re.compile(r"rows(_.+)?_(converted|trl|ms-swift|verl)\.\w+")
SEPARATOR = re.compile(r"\s*([\[,\]])\s*")  # bracket or comma between JSON list items
# JSON decoder that rejects repeated keys, and converts NaN and Infinity to None
ROW_DECODER = json.JSONDecoder(object_pairs_hook=unique_keys, parse_constant=lambda name: None)


def open_rows(path: str | Path) -> "Lines | Arrow":
    """Open a data file, a folder, or one split in a folder, such as "folder@train".

    Raises:
        UserError: the file is missing or unreadable, or the folder has several data files.
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
    if path.suffix in (".csv", ".tsv"):
        raise UserError(f"{path}: rows are not read from {path.suffix} files; {convert_advice(path)}")
    if path.suffix in (".yaml", ".yml"):
        raise UserError(f"{path}: a YAML file has no rows; list its files of rows in data.train")
    if path.suffix in (".gz", ".bz2", ".xz", ".zst", ".zip"):
        raise UserError(f"{path}: rows are not read from compressed files; unpack the file, and use the new file")
    return Lines(path)


def split_of(path: str | Path) -> tuple[Path, str | None]:
    """Split "folder@train" into (folder, split); the split is None without "@"."""
    folder, _, split = str(path).rpartition("@")
    if split and isdir(folder) and not (isfile(path) or isdir(path)):
        return Path(folder), split
    return Path(path), None


def convert_advice(path: str | Path, columns: Mapping[str, str] | None = None) -> str:
    """Return advice for an error message, such as "convert the file once with `minivlmrl convert ...`"."""
    command = f"minivlmrl convert {_for_shell(str(path))}"
    if not columns:
        return f"convert the file once with `{command}`, and use the new file"
    targets = [ours for theirs, ours in columns.items() if theirs != ours]
    named = {theirs: ours for theirs, ours in columns.items() if theirs != ours or ours not in targets}
    command += f" --columns={_for_shell(json.dumps(named))}"
    return f"convert the file once with `{command}`, and use the new file without data.columns"


def _for_shell(text: str) -> str:
    quoted = shlex.quote(text)
    # write a long shell argument with backslashes: error messages would shorten it in quotes
    return quoted if len(quoted) < 80 else re.sub(r"([^\w@%+=:,./-])", r"\\\1", text)


def _open_folder(folder: Path, split: str | None) -> "Lines | Arrow":
    parquet_files = _without_converted(sorted([*folder.glob("*.parquet"), *folder.glob("data/*.parquet")]))
    if not parquet_files and (inner := sorted({path.parent for path in folder.glob("*/*.parquet")})):
        raise UserError(
            f"{folder}: the folder has the configurations {', '.join(path.name for path in inner)}; choose one of "
            f"them, as in {inner[0]}{f'@{split}' if split else ''}"
        )
    # train-00000-of-00002.parquet belongs to the split train
    splits = {path: re.sub(r"(^|-)\d.*", "", path.stem) for path in parquet_files}
    names = sorted({*splits.values()})
    if split is not None:
        require(split in names, f"{folder}@{split}", split, f"a split of the folder: {', '.join(names) or 'none'}")
        parquet_files = [path for path in parquet_files if splits[path] == split]
    elif len(names) > 1:
        raise UserError(
            f"{folder}: the folder has parquet files of several splits ({', '.join(names)}); choose one of them, as in "
            f"{folder}@{names[0]}"
        )
    if parquet_files:
        return Arrow(parquet_files)
    row_files = _without_converted(
        [
            path
            for suffix in ("jsonl", "json", "csv", "tsv")
            for path in folder.glob(f"*.{suffix}")
            if not path.name.startswith("dataset_info")
        ]
    )
    # folders with state.json are from datasets.save_to_disk: their JSON files contain no rows
    if not row_files or [*folder.glob("state.json"), *folder.glob("*/state.json")]:
        raise UserError(f"{folder}: the folder has no .jsonl, .json or .parquet file; {convert_advice(folder)}")
    if len(row_files) > 1:
        names = ", ".join(sorted(path.name for path in row_files))
        raise UserError(f"{folder}: the folder has several files of rows ({names}); choose one of them")
    return open_rows(row_files[0])


def _without_converted(files: list[Path]) -> list[Path]:
    return [path for path in files if not CONVERTED.fullmatch(path.name)] or files


def read_text(path: Path) -> str:
    check_downloaded(path)
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if b"\0" in content and content[:2] not in (BOM_UTF16_LE, BOM_UTF16_BE):
            raise UserError(
                f"{path}: this is no file of rows, because it is not a text; rows are JSON or parquet"
            ) from None
        line = 1 + content.count(b"\n", 0, error.start)
        raise UserError(f"{path}:{line}: the file is not encoded in UTF-8 ({error}); save it as UTF-8") from error


def find_coco(text: str) -> dict:
    """Parse COCO text (object detection); return {} if the text has another format."""
    try:
        content = ROW_DECODER.decode(text.strip())
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) and {"images", "annotations"} <= content.keys() else {}


class Lines:
    """Rows from a JSON Lines file, or from a file with one JSON list."""

    def __init__(self, path: Path):
        self.path = path
        self.folder = path.parent
        text = read_text(path)
        if text.lstrip().startswith("["):
            self.texts = self.split_list(text)
        elif find_coco(text):
            raise UserError(
                f"{path}: the file is in COCO's format, one object with all images; write one row per image, with its "
                "boxes [left, top, right, bottom] as the solution"
            )
        elif text.strip().partition("\n")[0].strip() == "{":
            raise UserError(
                f"{path}: an object has several lines; write one object per line, or a JSON list of objects"
            )
        else:
            self.texts = [(n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]

    def split_list(self, content: str) -> list[tuple[int, str]]:
        """Return (line number, JSON string) for each item in a JSON list."""
        rows = []
        separator = SEPARATOR.search(content)
        start = 0
        line_number = 1
        while separator and separator[1] != "]":
            line_number += content.count("\n", start, separator.end())
            start = separator.end()
            if not rows and content[start:].strip() == "]":
                return []
            with error_context(f"{self.path}:{line_number}"):
                _, end = parse_json(content, ROW_DECODER.raw_decode, start)
            rows.append((line_number, content[start:end]))
            separator = SEPARATOR.match(content, end)
        if not separator or content[separator.end() :].strip():
            raise UserError(
                f"{self.path}:{line_number}: the text is not valid JSON, because after this item there must be a comma "
                "and the next item, or ] and the end of the file; correct the text after the item"
            )
        return rows

    def __len__(self) -> int:
        return len(self.texts)

    def where(self, index: int) -> str:
        """Return a row's file and line, such as "rows.jsonl:3", for error messages."""
        return f"{self.path}:{self.texts[index][0]}"

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
        self.classes: dict[str, list[str]] = {}  # {column of class numbers: class names}
        self.starts = [0]  # first row index of each row group, then the total number of rows
        for path in paths:
            file_start = self.starts[-1]
            check_downloaded(path)
            try:
                file = pq.ParquetFile(path)
                column_names = file.schema_arrow.names
                self.classes |= class_names(file.schema_arrow.metadata or {})
            except (OSError, pa.ArrowException) as error:
                raise UserError(f"{path}: the parquet file cannot be read ({error})") from error
            for name in column_names:
                if name and column_names.count(name) > 1:
                    raise UserError(f"{path}: two columns have the name {truncate(name, 60)}; rename one of them")
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
            try:
                table = self.read_group(file, group)
                [row] = table.slice(index - self.starts[number], 1).to_pylist()
            except (OverflowError, OSError) as error:  # OverflowError: Python cannot represent a date's year
                raise UserError(f"the row cannot be read ({error})") from error
            for name in self.classes.keys() & row.keys():
                if isinstance(row[name], int):
                    row[name] = self.classes[name][row[name]]
            return map_nested(row, str, NO_JSON_TYPES)


def class_names(metadata: Mapping[bytes, bytes]) -> dict[str, list[str]]:
    """Return the names of class numbers (datasets.ClassLabel), which `datasets` writes into parquet files."""
    content = parse_json(metadata.get(b"huggingface", b"{}").decode())
    features = content.get("info", {}).get("features", {})
    return {name: value["names"] for name, value in features.items() if isinstance(value, dict) and value.get("names")}


def map_nested(value: Plain, change: Callable, types: type | tuple[type, ...] = str) -> Plain:
    """Copy nested lists and dicts, and replace values of `types` by change(value)."""
    if isinstance(value, types):
        return change(value)
    if isinstance(value, list):
        return [map_nested(item, change, types) for item in value]
    if isinstance(value, dict):
        return {key: map_nested(item, change, types) for key, item in value.items()}
    return value
