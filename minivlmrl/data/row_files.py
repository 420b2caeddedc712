"""Read rows of JSON lines, JSON lists, CSV, parquet and Hugging Face dataset folders.

The text of each row stays in memory (200,000 rows of 500 bytes take 100 MB), and is parsed each
time the row is read. Rows of parquet files are read from disk.
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

from minivlmrl.config.parsing import check_field, error_context, optional_dependency, parse_json
from minivlmrl.data.download import find_split, split_of
from minivlmrl.data.formats import map_nested

IMAGE_NAME = re.compile(r".+\.(png|jpe?g|webp|bmp|gif|tiff?)", re.IGNORECASE)
# types of parquet values that JSON lacks; they are converted to text, as in a CSV file
NO_JSON_TYPES = date, time, timedelta, Decimal
LIST_ITEM = re.compile(r"[^\s,]")
HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
BOOL_OR_NUMBER = re.compile(r"(?i)true|false|-?\d*\.?\d+")
# columns that are JSON in a CSV file
JSON_COLUMNS = "messages", "prompt", "conversations", "images", "videos", "objects", "reward_model"


def open_rows(path: str | Path) -> "Lines | Arrow":
    """Open the rows of a file, a folder or a dataset split on the Hugging Face hub.

    ValueError if there is no such file, folder or split, or if it holds no rows.
    """
    path = Path(path)
    if isdir(path):  # os.path, because pathlib raises OSError for a name that is too long
        return _open_folder(path)
    if not isfile(path):
        split_files = find_split(str(path))
        if split_files is None:
            raise ValueError(
                f"{path}: no such file of rows; "
                "data.train_file and data.eval_file (null: none) name them"
            )
        return Arrow(split_files, is_downloaded=True)
    if path.suffix == ".parquet":
        return Arrow([path])
    return Cells(path) if path.suffix in (".csv", ".tsv") else Lines(path)


def _open_folder(folder: Path) -> "Lines | Arrow":
    """Open a folder with parquet files, one file of rows, or one folder of images per class."""
    if [*folder.glob("state.json"), *folder.glob("*/state.json")]:
        raise ValueError(
            f"{folder}: a folder of save_to_disk; "
            'save it by datasets.load_from_disk(...).to_parquet("rows.parquet")'
        )
    parquet_files = sorted([*folder.glob("*.parquet"), *folder.glob("data/*.parquet")])
    split_names = sorted({split_of(path.name) for path in parquet_files})
    if len(split_names) > 1:
        raise ValueError(f"{folder}: has parquet files of {', '.join(split_names)}; one a folder")
    if parquet_files:
        return Arrow(parquet_files)
    row_files = [*folder.glob("*.jsonl"), *folder.glob("*.csv"), *folder.glob("*.json")]
    row_files = [path for path in row_files if not path.name.startswith("dataset_info")]
    if len(row_files) == 1:
        return open_rows(row_files[0])
    image_files = sorted(
        path for path in folder.glob("[!.]*/[!.]*") if IMAGE_NAME.fullmatch(path.name)
    )
    if image_files and not row_files:
        return Images(folder, image_files)
    names = ", ".join(path.name for path in sorted(row_files)[:5]) or "none"
    raise ValueError(
        f"{folder}: a folder must hold a dataset or one file of rows; its files of rows: {names}"
    )


class Lines:
    """Rows of a JSON lines file or a JSON list.

    `texts` has the line number and the text of each row.
    """

    # True for a dataset that was downloaded by its id, so that its paths are not trusted
    is_downloaded = False

    def __init__(self, path: Path):
        self.path = path
        self.folder = path.parent
        content = path.read_bytes()
        try:
            self.texts = self.split(content.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            line = 1 + content.count(b"\n", 0, error.start)
            raise ValueError(f"{path}:{line}: not UTF-8 ({error}); save it as UTF-8") from error

    def split(self, content: str) -> list[tuple[int, str]]:
        """Return the line number and the text of each row."""
        if content.lstrip().startswith("["):
            return self.split_list(content)
        lines = enumerate(content.split("\n"), start=1)
        return [(number, line) for number, line in lines if line.strip()]

    def split_list(self, content: str) -> list[tuple[int, str]]:
        """Split a JSON list, with line breaks anywhere, into line number and text of each row."""
        rows = []
        decode = json.JSONDecoder().raw_decode
        start = _next_item(content, content.index("[") + 1)
        line_number = 1 + content.count("\n", 0, start)
        while start < len(content) and content[start] != "]":
            with error_context(f"{self.path}:{line_number}"):
                _, end = parse_json(content, decode, start)
            rows.append((line_number, content[start:end]))
            next_start = _next_item(content, end)
            line_number += content.count("\n", start, next_start)
            start = next_start
        if content[start:].strip() != "]":
            raise ValueError(
                f"{self.path}: not JSON (the list has no end, or something comes after it)"
            )
        return rows

    def __len__(self) -> int:
        return len(self.texts)

    def where(self, index: int) -> str:
        """Return the file and the line number of a row, for error messages."""
        return f"{self.path}:{self.texts[index][0]}"

    def __getitem__(self, index: int) -> dict:
        text = self.texts[index][1]
        with error_context(self.where(index)):
            columns = parse_json(text)
            # half a surrogate pair is valid JSON, but cannot be tokenized
            if HALF_PAIR.search(text):
                parse_json(json.dumps(columns, ensure_ascii=False), str.encode)
            check_field(isinstance(columns, dict), "a row", columns, "an object with columns")
            return columns


class Cells(Lines):
    """Rows of a CSV or TSV file, whose first line has the column names.

    An empty cell counts as a missing column.
    """

    def split(self, content):
        csv.field_size_limit(2**31 - 1)
        dialect = csv.excel_tab if self.path.suffix == ".tsv" else csv.excel
        reader = csv.reader(io.StringIO(content, newline=""), dialect)
        self.names = [name.strip() for name in next(reader, ())]
        _check_names(self.path, self.names)
        numbered_rows = []
        for cells in reader:
            if cells:
                # number of the first line of the row, because a quoted cell may have line breaks
                numbered_rows.append((reader.line_num - "".join(cells).count("\n"), cells))
        return numbered_rows

    def __getitem__(self, index):
        cells = self.texts[index][1]
        with error_context(self.where(index)):
            if len(cells) > len(self.names):
                raise ValueError(
                    f"has {len(cells)} cells, the first line {len(self.names)} names; "
                    "quote a cell that has a comma"
                )
            columns = {name: cell for name, cell in zip(self.names, cells, strict=False) if cell}
            for name, cell in columns.items():
                if name in JSON_COLUMNS and cell[0] in "[{":
                    with error_context(f"column {name!r}"):
                        columns[name] = parse_json(cell)
                elif name in ("label", "margin") and BOOL_OR_NUMBER.fullmatch(cell):
                    columns[name] = json.loads(cell.lower())
            return columns


class Images(Lines):
    """Images in one folder per class. The name of the folder is the solution of the row.

    For example, the solution of train/cat/1.png is "cat".
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
    """Rows of one or more parquet files, in order.

    Reading a row reads its whole row group, so the 4 latest row groups are cached.
    """

    def __init__(self, paths: list[Path], is_downloaded: bool = False):
        self.is_downloaded = is_downloaded
        with optional_dependency("parquet", f"{paths[0]}: needs pyarrow"):
            import pyarrow as pa
            import pyarrow.parquet as pq
        self.path = paths[0]
        self.folder = paths[0].parent
        # for each row group: path, index of the file's first row, open file, number in the file
        self.groups = []
        self.starts = [0]  # index of the first row of each group, then the total number of rows
        for path in paths:
            file_start = self.starts[-1]
            try:
                file = pq.ParquetFile(path)
                column_names = file.schema_arrow.names
            except (OSError, pa.ArrowException) as error:
                raise ValueError(f"{path}: cannot be read ({error})") from error
            _check_names(path, column_names)
            for group in range(file.num_row_groups):
                self.groups.append((path, file_start, file, group))
                self.starts.append(self.starts[-1] + file.metadata.row_group(group).num_rows)
        self.read_group = functools.lru_cache(4)(pq.ParquetFile.read_row_group)

    def __len__(self) -> int:
        return self.starts[-1]

    def where(self, index: int) -> str:
        """Return the file of a row and its index in that file, from 0, for error messages."""
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
            except (OverflowError, OSError) as error:  # for example a date out of Python's range
                raise ValueError(f"cannot be read ({error})") from error
            return map_nested(row, str, NO_JSON_TYPES)


def _next_item(content: str, start: int) -> int:
    """Return the position of the next item of a JSON list, after whitespace and commas."""
    letter = LIST_ITEM.search(content, start)
    return letter.start() if letter else len(content)


def _check_names(path: Path, names: list[str]):
    for name in names:
        if name and names.count(name) > 1:
            raise ValueError(f"{path}: has two columns {name!r:.60}; rename one")
