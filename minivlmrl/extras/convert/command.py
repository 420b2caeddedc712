"""Convert training data to minivlmrl's layout, or to the layout of TRL, ms-swift or verl.

    minivlmrl convert rows.json
    minivlmrl convert rows.jsonl --to trl --out rows_trl.jsonl

The layout is recognized by its column names; if two layouts match, choose one with --layout. The new file is beside
the original and refers to the same images. `convert` prints dropped columns and keys. For a YAML
file from VLM-R1, `convert` converts every dataset listed there, and prints the option data.train for a recipe.
"""

import argparse
import json
import shlex
import sys
from base64 import b64encode
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from os.path import isfile
from pathlib import Path

import yaml

from minivlmrl.config.options import RowOptions
from minivlmrl.config.parsing import build, parse_yaml, read_value
from minivlmrl.config.types import Plain
from minivlmrl.data.boxes import parse_boxes
from minivlmrl.data.columns import rename_columns
from minivlmrl.data.file_dataset import find_format
from minivlmrl.data.media import files_of
from minivlmrl.data.read_row import answer_image_parts
from minivlmrl.data.row_checks import checked_row
from minivlmrl.data.row_files import map_nested, open_rows, split_of
from minivlmrl.errors import UserError, did_you_mean, error_context, optional_dependency, pluralize
from minivlmrl.extras.convert.readers import ANSWER_TEXTS, BOX_UNIT, READERS, finish, fitting, has_prompt, prepare
from minivlmrl.extras.convert.sources import Rows, read_rows
from minivlmrl.extras.convert.writers import WRITERS
from minivlmrl.files import file_to_write

SAMPLE = 100  # number of rows used to recognize the layout
BATCH = 100  # rows per parquet write
UNREAD = "a column that a run refuses unless a reward reads it, for example {}"
MISSING = "an image or video file that does not exist (data.image_root sets their folder), for example {}"
SEVERAL_IMAGES = "a box and several images, for example {}: rewards measure boxes in the first image"
NO_QUESTION = "no question (problem, prompt or messages), for example {}: a run refuses them"


@dataclass
class ListedFile:
    """Dataset listed in a YAML file of VLM-R1."""

    json_path: str
    sampling_strategy: str = "all"


@dataclass
class FileList:
    datasets: list[ListedFile]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "minivlmrl convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("file", help="file or folder with rows")
    add("--out", type=Path, help="new file, .jsonl or .parquet")
    add("--to", choices=WRITERS, help="project whose layout the new file has (default: minivlmrl)")
    add("--layout", choices=READERS, help="layout of the rows, if two layouts fit")
    add("--format", help="your own function that converts a row, as in data.format")
    add("--columns", type=parse_yaml, default={}, help="new names of columns, as in data.columns")
    options = parser.parse_args(arguments)
    if options.out and options.out.suffix not in (".jsonl", ".json", ".parquet"):
        parser.error(f"--out is {options.out}, but its name must end with .jsonl or .parquet")
    options.columns = read_value(dict[str, str], options.columns, "--columns", json=False)
    path = Path(options.file)
    if path.suffix in (".yaml", ".yml"):
        print(yaml.safe_dump({"data": {"train": list(convert_list(path, options))}}), end="")
    else:
        convert(path, options)
    return 0


def convert(path: Path, options: argparse.Namespace) -> Path:
    """Convert a file; return the new path, or the original path if no row changes."""
    sample = list(islice(source_rows(path, options), SAMPLE))
    if not sample:
        raise UserError(f"{path} has no rows")
    layout = options.layout or find_layout(path, sample)
    out = file_to_write(options.out or new_name(path, sample[0][1], options.to))
    if out.resolve() == path.resolve():
        raise UserError(f"--out is {out}, which is the file that is converted; choose another name")
    dropped, changed = Counter(), Counter()
    names: set[str] = set()
    noted: dict[str, list[str]] = defaultdict(list)

    def converted() -> Iterator[dict]:
        for found in (dropped, changed, noted):  # the parquet writer iterates over the rows twice
            found.clear()
        for where, row in source_rows(path, options, names):
            with row_errors(where):
                new_row = convert_row(row, layout, dropped)
                for note, detail in check_new_row(new_row, folder_of(path)).items():
                    noted[note].append(f"{where}{detail}")
                changed["rows"] += 1
                changed["changed"] += new_row != {name: value for name, value in row.items() if value is not None}
                yield WRITERS[options.to](new_row, folder_of(path), dropped) if options.to else new_row

    partial = out.with_name(f"{out.name}.partial")
    try:
        write(partial, out.suffix, converted)
        for name in options.columns.keys() - names:
            raise UserError(f"--columns renames {name!r}, but no row has this column{did_you_mean(name, names)}")
        if not (changed["changed"] or options.to or options.out or options.format) and is_read(path):
            print(f"{path}: a run reads its {pluralize(changed['rows'], 'row')} unchanged", file=sys.stderr)
            report_rows(noted, changed["rows"])
            return path
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    print(f"{path}: wrote {pluralize(changed['rows'], 'row')} of the layout {layout!r} to {out}", file=sys.stderr)
    report_dropped(dropped, out)
    report_rows(noted, changed["rows"])
    if out.resolve().parent != folder_of(path).resolve() and not options.to:
        print(f"image paths are relative to the old file: set data.image_root={folder_of(path)}", file=sys.stderr)
    return out


def convert_row(row: dict, layout: str, dropped: Counter) -> dict:
    columns = READERS[layout](prepare(row, dropped))
    if columns is None:
        raise UserError(f"the row does not have the layout {layout!r} of the first rows; split the file")
    return finish(columns)


def report_dropped(dropped: Counter, out: Path):
    """Print what was dropped, and the unit of boxes written into the text."""
    if dropped.pop(BOX_UNIT, 0):
        print(
            "the boxes of `objects` stay in pixels of the image file. If your model uses a different unit, such as "
            f"Qwen3-VL's thousandths, run `python recipes/rescale_boxes.py {out} thousandths > rescaled.jsonl`. "
            "Add --questions if questions also contain boxes",
            file=sys.stderr,
        )
    for name, count in sorted(dropped.items()):
        print(f"dropped: {name:.80} ({pluralize(count, 'time')})", file=sys.stderr)


def report_rows(noted: dict[str, list[str]], num_rows: int):
    """Print how many rows have each problem. If no row has a question, data.prompt_template may add one."""
    for note, places in noted.items():
        if note != NO_QUESTION or len(places) < num_rows:
            print(f"{len(places)} of {num_rows} rows have {note.format(places[0])}", file=sys.stderr)


@contextmanager
def row_errors(where: str) -> Iterator[None]:
    """Add file and line to error messages, and explain values of unexpected types."""
    with error_context(where):
        try:
            yield
        except (AttributeError, IndexError, KeyError, RecursionError, TypeError) as error:
            raise UserError(
                f"a value has a form that fits no layout ({type(error).__name__}: {error}); correct the row, or "
                "convert it with your own function for --format"
            ) from error


def check_new_row(row: dict, folder: Path) -> dict[str, str]:
    """Return notes for a row that some recipes refuse; raise UserError if every recipe refuses it."""
    json.dumps(row, ensure_ascii=False, default=str).encode()  # encode raises ValueError for lone surrogates
    # rows without a prompt, as in an imagefolder, need data.prompt_template
    options = RowOptions() if has_prompt(row) else RowOptions(prompt_template="What is it?")
    notes = {}
    if not has_prompt(row):
        notes[NO_QUESTION] = ""
    [*_, last] = row.get("messages") or [{}]
    if last.get("role") != "assistant" and all(row.get(name) is None for name in ("solution", *ANSWER_TEXTS)):
        notes["no answer (solution or completion), for example {}: SFT and GRPO's accuracy refuse them"] = ""
    try:
        new_row, media = checked_row(row, (), (), options, folder)
    except UserError as error:
        # accept unknown columns, which a reward may read
        new_row, media = checked_row(row, (), row.keys() - {"label"}, options, folder)
        notes[UNREAD] = f": {error}"
    shown = [*media, *(part["image"] for part in answer_image_parts(new_row))]
    try:
        missing = [source for source, path in files_of(shown, str(folder)) if path and not isfile(path)]
    except UserError as error:  # the image is a web address, not a file
        missing = [error]
    if missing:
        notes[MISSING] = f": {missing[0]}"
    if sum(item.kind == "image" for item in media) > 1 and parse_boxes(str(row.get("solution"))):
        notes[SEVERAL_IMAGES] = ""
    return notes


def source_rows(path: Path, options: argparse.Namespace, names: set[str] | None = None) -> Rows:
    """Yield rows with renamed columns, and add the old column names to the set `names`."""
    change: Callable[[dict], dict] = find_format(options.format) if options.format else dict
    for where, row in read_rows(path):
        with error_context(where):
            columns = change(row)
            if names is not None:
                names.update(columns)
            yield where, rename_columns(columns, options.columns)


def find_layout(path: Path, sample: list[tuple[str, dict]]) -> str:
    names = list(READERS)
    for where, row in sample:
        with row_errors(where):
            names = fitting(row, names)
        if not names:
            raise UserError(
                f"{where}: no layout has the columns {', '.join(row):.200}; rename them to those of docs/data.md with "
                f"--columns='{{YOURS: problem}}', or write a function for --format. Layouts: {', '.join(READERS)}"
            )
    if len(names) > 1:
        command = f"minivlmrl convert {shlex.quote(str(path))} --layout="
        raise UserError(f"{path}: the layouts {' and '.join(names)} fit; choose one: {command}{names[0]}")
    return names[0]


def folder_of(path: Path) -> Path:
    """Return the folder that image paths are relative to."""
    folder, _ = split_of(path)
    return folder if folder.is_dir() else folder.parent


def new_name(path: Path, row: dict, to: str | None) -> Path:
    """Choose the new file name: parquet if rows contain image bytes."""
    has_bytes = []
    map_nested(row, has_bytes.append, bytes)
    suffix = ".parquet" if has_bytes or to == "verl" else ".jsonl"
    name = f"{to or 'converted'}{suffix}"
    folder, split = split_of(path)
    if folder.is_dir():
        return folder / f"rows_{f'{split}_' if split else ''}{name}"
    return path.with_name(f"{path.stem}_{name}")


def is_read(path: Path) -> bool:
    try:
        open_rows(path)
    except ValueError:
        return False
    return True


def write(out: Path, suffix: str, rows: Callable[[], Iterator[dict]]):
    """Write a JSON Lines or parquet file; for parquet, a first pass over the rows finds the column types."""
    if suffix != ".parquet":
        with out.open("w", encoding="utf-8") as file:
            for row in rows():
                row = map_nested(row, lambda content: b64encode(content).decode(), bytes)  # JSON cannot store bytes
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        return
    with optional_dependency("parquet", f"{out}: writing parquet files requires pyarrow"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    try:
        schema = pa.schema([])
        for batch in batches(rows()):
            schema = pa.unify_schemas([schema, pa.Table.from_pylist(batch).schema], promote_options="permissive")
        with pq.ParquetWriter(out, schema) as writer:
            for batch in batches(rows()):
                writer.write_table(pa.Table.from_pylist(batch, schema))
    except (pa.ArrowException, OverflowError) as error:
        raise UserError(f"{out}: the rows do not fit into a table ({error}); write a .jsonl file with --out") from error


def batches(rows: Iterator[dict]) -> Iterator[list[dict]]:
    """Yield batches of rows with the same column names; pyarrow ignores columns missing in the first row."""
    while batch := list(islice(rows, BATCH)):
        names = dict.fromkeys(chain.from_iterable(batch))
        yield [{name: row.get(name) for name in names} for row in batch]


def convert_list(path: Path, options: argparse.Namespace) -> Iterator[Plain]:
    """Convert the files in a YAML list, and yield entries for data.train."""
    with error_context(path):
        content = parse_yaml(path.read_text(encoding="utf-8"))
    for listed in build(FileList, content, str(path)).datasets:
        file = Path(listed.json_path)
        file = convert(file if file.exists() else path.parent / file, options)
        yield {"file": str(file), "sampling": listed.sampling_strategy}
