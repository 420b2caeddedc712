"""Files of rows, read one row at a time: JSON lines, JSON lists, CSV, parquet and Hugging Face dataset folders.

Of a text file only the byte at which each row begins is in memory; a row is read from the disk whenever it is used.
"""

import bisect
import csv
import functools
import io
import itertools
import json
import os
import re
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

from minivlmrl.hub.checker import naming, require

HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
CELLS = ("messages", "prompt", "conversations", "images", "videos", "objects", "reward_model")  # of a CSV file: JSON
DECODE = json.JSONDecoder().decode
BLANK = b"\xef\xbb\xbf \t\r\n"  # and the BOM


def open_rows(path: str | Path) -> "Lines | Arrow":
    """Find the rows of a file or of a Hugging Face dataset folder (ValueError: there are none)."""
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file of rows; data.train_file and data.eval_file (null: none) name them")
    if path.suffix in (".parquet", ".arrow"):
        return Arrow([path])
    if path.suffix in (".csv", ".tsv"):
        return Cells(path)
    with path.open("rb") as file:
        start = next(filter(None, (line.strip(BLANK) for line in file)), b"")
    return Values(path) if start[:1] == b"[" or start == b"{" else Lines(path)


def _open_folder(folder: Path) -> "Lines | Arrow":
    """A folder that datasets.save_to_disk wrote, or one with parquet files, or with one file of rows (imagefolder)."""
    if (folder / "state.json").is_file():
        state = json.loads((folder / "state.json").read_text())
        return Arrow([folder / item["filename"] for item in state["_data_files"]])
    if inside := sorted(path.parent.name for path in folder.glob("*/state.json")):
        raise ValueError(f"{folder}: has the splits {', '.join(inside)}; name one, {folder / inside[0]}")
    parquet = sorted([*folder.glob("*.parquet"), *folder.glob("data/*.parquet")])
    splits = sorted({path.name.partition("-")[0].removesuffix(".parquet") for path in parquet})
    if len(splits) > 1:
        raise ValueError(f"{folder}: has parquet files of {', '.join(splits)}; make a folder of each and name one")
    files = [*folder.glob("*.jsonl"), *folder.glob("*.csv"), *folder.glob("*.json")]
    files = [path for path in files if path.name not in ("dataset_info.json", "dataset_infos.json")]
    if not parquet and len(files) != 1:
        found = ", ".join(path.name for path in sorted(files)[:5]) or "none"
        raise ValueError(f"{folder}: a folder must hold a dataset or one file of rows; its files of rows: {found}")
    return Arrow(parquet) if parquet else open_rows(files[0])


def read_json(read: Callable, *arguments):
    """Call json's reader, and name what is wrong with a text that is no JSON, or too deep for it."""
    try:
        return read(*arguments)
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from error
    except RecursionError as error:
        raise ValueError("not JSON that can be read: it is nested too deep") from error


def _stamp(file: io.IOBase) -> tuple[int, int]:
    stat = os.fstat(file.fileno())
    return stat.st_size, stat.st_mtime_ns


class Lines:
    """JSON lines. Indexing reads one row, iterating all of them."""

    def __init__(self, path: Path):
        self.path, self.folder = path, path.parent
        self.starts, self.ends, self.numbers = array("q"), array("q"), array("q")  # bytes; line numbers from 1
        with path.open("rb") as file:
            self.stamp = _stamp(file)
            for start, end, number in self.spans(file):
                self.starts.append(start)
                self.ends.append(end)
                self.numbers.append(number)

    def spans(self, file: io.BufferedReader) -> Iterator[tuple[int, int, int]]:
        """Yield where the rows begin and end, and the lines on which they begin."""
        position = 0
        for number, line in enumerate(file, start=1):
            if line.strip(BLANK):
                yield position, position + len(line), number
            position += len(line)

    def __len__(self) -> int:
        return len(self.starts)

    def where(self, index: int) -> str:
        """The file and the line of a row, for errors."""
        return f"{self.path}:{self.numbers[index]}"

    def __getitem__(self, index: int) -> dict:
        with open(self.path, "rb", buffering=0) as file:
            if self.stamp != _stamp(file):
                raise ValueError(f"{self.path}: has changed since the run began; put it back, or begin again")
            return self.read(file, index)

    def __iter__(self) -> Iterator[dict]:
        with self.path.open("rb") as file:
            yield from (self.read(file, index) for index in range(len(self)))

    def read(self, file: io.BufferedReader, index: int) -> dict:
        """Read one row (ValueError: begins with its file and line)."""
        file.seek(self.starts[index])
        line = file.read(self.ends[index] - self.starts[index])
        try:
            return self.parse(line.decode("utf-8-sig" if self.starts[index] == 0 else "utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.where(index)}: not UTF-8 ({error}); save the file as UTF-8") from error
        except ValueError as error:
            raise ValueError(f"{self.where(index)}: {error}") from error

    def parse(self, text: str) -> dict:
        """Turn the text of one row into columns."""
        columns = read_json(DECODE, text)
        if HALF_PAIR.search(text):  # half a surrogate pair is JSON, but no text to tokenize
            read_json(json.dumps(columns, ensure_ascii=False).encode)
        require(isinstance(columns, dict), "a row", columns, "an object with columns")
        return columns


class Values(Lines):
    """A JSON list of rows, or rows one after the other, with any line breaks."""

    def spans(self, file):
        with naming(self.path):
            text = file.read().decode()  # UnicodeDecodeError is a ValueError
        skip = re.compile(r"[\s,\ufeff]*")
        decode, position, at, line = json.JSONDecoder().raw_decode, skip.match(text).end(), 0, 1
        listed = text[position : position + 1] == "["
        position = skip.match(text, position + listed).end()
        done = 0  # characters of the text that `at`, in bytes, and `line` count
        while position < len(text) and not (listed and text[position] == "]"):
            at += len(text[done:position].encode())
            line += text.count("\n", done, position)
            done = position
            with naming(f"{self.path}:{line}"):
                _, position = read_json(decode, text, position)
            yield at, at + len(text[done:position].encode()), line
            position = skip.match(text, position).end()
        if listed and not text[position:].strip() == "]":
            raise ValueError(f"{self.path}: not JSON (the list has no end, or something comes after it)")


class Cells(Lines):
    """CSV with a line of names; an empty cell is a missing column."""

    def spans(self, file):
        csv.field_size_limit(2**31 - 1)
        self.dialect = csv.excel_tab if self.path.suffix == ".tsv" else csv.excel
        self.names, position, number, read = None, 0, 1, [0, 0]

        def lines():
            for line in file:
                read[0] += len(line)
                read[1] += 1
                yield line.decode("utf-8", "replace")

        for cells in csv.reader(lines(), self.dialect):
            if self.names is None:
                self.names = [name.removeprefix("\ufeff").strip() for name in cells]
            elif cells:
                yield position, read[0], number
            position, number = read[0], read[1] + 1

    def parse(self, text):
        cells = next(csv.reader(io.StringIO(text, newline=""), self.dialect))
        if len(cells) > len(self.names):
            cure = "quote a cell that has a comma"
            raise ValueError(f"has {len(cells)} cells, the first line {len(self.names)} names; {cure}")
        columns = {name: cell for name, cell in zip(self.names, cells, strict=False) if cell}
        for name, cell in columns.items():
            if name in CELLS and cell[0] in "[{":
                with naming(f"column {name!r}"):
                    columns[name] = read_json(json.loads, cell)
            elif name in ("label", "margin") and re.fullmatch(r"(?i)true|false|-?\d*\.?\d+", cell):
                columns[name] = json.loads(cell.lower())
        return columns


class Arrow:
    """Parquet or Arrow files, one after the other; a row is read with the group of rows that it is stored in."""

    def __init__(self, paths: list[Path]):
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            cure = "pip install -c constraints.txt -e '.[parquet]'"
            raise ValueError(f"{paths[0]}: parquet and dataset folders need pyarrow: {cure}") from error
        self.path, self.folder, self.groups, self.firsts = paths[0], paths[0].parent, [], [0]
        for path in paths:
            try:
                if path.suffix == ".arrow":
                    table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
                    sizes, load = [table.num_rows], [lambda table=table: table]
                else:
                    file = pq.ParquetFile(path)
                    sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
                    load = [functools.partial(file.read_row_group, i) for i in range(file.num_row_groups)]
            except (OSError, pa.ArrowException) as error:
                raise ValueError(f"{path}: cannot be read ({error})") from error
            self.groups += [(path, self.firsts[-1], read) for read in load]
            self.firsts += [self.firsts[-1] + n for n in itertools.accumulate(sizes)]
        self.table = functools.lru_cache(4)(lambda group: self.groups[group][2]())

    def __len__(self) -> int:
        return self.firsts[-1]

    def where(self, index: int) -> str:
        """The file of a row and its number in it from 0, for errors."""
        path, first, _ = self.groups[self.group(index)]
        return f"{path}: row {index - first}"

    def group(self, index: int) -> int:
        """The group of rows that a row is in."""
        return bisect.bisect_right(self.firsts, index) - 1

    def __getitem__(self, index: int) -> dict:
        if not 0 <= index < len(self):
            raise IndexError(index)
        group = self.group(index)
        with naming(self.where(index)):
            return self.table(group).slice(index - self.firsts[group], 1).to_pylist()[0]
