"""Convert rows from other projects to the columns in docs/data.md.

    minivlmrl convert rows.json
    minivlmrl convert FOLDER --question="Is it a cat or a dog?" --eval_rows=60

`convert` reads conversations (LLaVA, ShareGPT, VLM-R1), rows with a question and an answer (EasyR1, verl, TRL), CSV,
parquet, and picture folders with metadata.csv, labels.csv or a subfolder per class. It prints the first row as a
run will use it, and the next command. If several columns could be question, answer or picture, `convert` asks.
The new file is beside the original.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Iterable, Iterator
from hashlib import sha256
from os.path import isfile
from pathlib import Path

from minivlmrl.config.import_utils import recipes_folder
from minivlmrl.config.options import RowOptions
from minivlmrl.config.parsing import parse_yaml, read_value
from minivlmrl.data.columns import MEDIA, TEXTS, VALUES
from minivlmrl.data.file_dataset import find_format
from minivlmrl.data.markup import literal_list
from minivlmrl.data.media import files_of, open_image
from minivlmrl.data.messages import as_turns, text_of
from minivlmrl.data.row_checks import checked_row
from minivlmrl.data.row_files import split_of
from minivlmrl.errors import UserError, did_you_mean, error_context, pluralize, require, truncate
from minivlmrl.extras.convert.format_lines import format_lines
from minivlmrl.extras.convert.layout import Layout, Unclear, convert_row, filled_columns, find_columns, first_values
from minivlmrl.extras.convert.sources import Rows, find_rows, read_rows
from minivlmrl.files import file_to_write
from minivlmrl.json_files import write_file
from minivlmrl.run.lock import drafted

LONG = 30  # words; longer solutions are for SFT, because rewards cannot compare them


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "minivlmrl convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("file", help="file or folder with rows, or FOLDER@SPLIT")
    add("--columns", type=parse_yaml, default={}, help="your columns: {COLUMN: problem}, as in data.columns")
    add("--question", help="one question for all rows")
    add("--format", help="your own function that converts a row, as in data.format")
    add("--eval_rows", type=int, default=0, help="rows to write into a second file, for data.eval_file")
    add("--out", type=Path, help="new file, .jsonl")
    options = parser.parse_args(arguments)
    named = read_value(dict[str, str], options.columns, "--columns", json=False)
    path = Path(options.file)
    file = find_rows(path)
    folder, split = split_of(file)
    folder = folder if folder.is_dir() else folder.parent
    stem = path.stem
    if not path.is_file():
        stem = f"rows_{split}" if split else "rows"
    out = file_to_write(options.out or folder / f"{stem}_converted.jsonl")
    if out.resolve() == path.resolve():
        raise UserError(f"--out is {out}, which is the file that is converted; choose another name")
    layout = Layout()
    sample = with_known_names(rows_with_new_columns(file, options.format), named)
    try:
        rows = convert(layout, sample, file, folder, out, named, options)
    except Unclear as error:
        print(f"{path}: {error}", file=sys.stderr)
        own = {ours: theirs for theirs, ours in named.items()}
        lines = [] if options.format else format_lines(first_values(sample), layout, own)
        print_cures(error, path, named, options.question, lines)
        return 2
    require(0 <= options.eval_rows < len(rows), "--eval_rows", options.eval_rows, f"less than {len(rows)}, the rows")
    eval_file = write_files(rows, out, options.eval_rows)
    describe(rows[0])
    known = {*TEXTS, *MEDIA, *VALUES, "solution"}
    kept = [name for name in named.values() if name not in known]
    print(f"next: {next_command(rows[0], out, eval_file, folder, kept)}")
    return 0


def convert(
    layout: Layout,
    sample: list[dict],
    file: Path,
    folder: Path,
    out: Path,
    named: dict[str, str],
    options: argparse.Namespace,
) -> list[dict]:
    """Convert all rows, and print which columns were left out and how many media files are missing."""
    if not sample:
        raise UserError(f"{file} has no rows")
    if not options.format:  # the user's function in --format has already converted the rows
        find_columns(layout, sample, named.values(), folder, bool(options.question))
    rows = []
    missing = []
    for where, row in source_rows(file, options.format, named):
        try:
            new_row = convert_row(row, layout, options.question)
            for name in MEDIA:
                if new_row.get(name):
                    new_row[name] = save_pictures(new_row[name], out, folder)
            _, media = checked_row(new_row, (), named.values(), RowOptions())
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Unclear(f"{where}: {error}") from error
        for source, name in files_of(media, str(folder)):
            if name and not isfile(name):
                missing.append(source)
        rows.append(new_row)
    if layout.left_out:
        print(f"left out, because another column is used: {', '.join(layout.left_out)}")
    if missing:
        print(f"{pluralize(len(missing), 'file')} of images or videos are missing, the first is {missing[0]}")
    return rows


def with_known_names(rows: Iterable[dict], named: dict[str, str]) -> list[dict]:
    """Rename columns as given by --columns; raise UserError if no row has such a column."""
    rows = list(rows)
    names = {name for row in rows for name in row}
    for name in named.keys() - names:
        raise UserError(f"--columns names {name!r}, but no row has this column{did_you_mean(name, sorted(names))}")
    return [with_names(row, named) for row in rows]


def rows_with_new_columns(file: Path, format: str | None) -> Iterator[dict]:
    """Yield sample rows: the first row, and later rows that fill a column for the first time."""
    seen = set()
    for number, (_, row) in enumerate(source_rows(file, format, {})):
        filled = filled_columns(row).keys()
        if number == 0 or filled - seen:
            yield row
        seen |= filled


def source_rows(file: Path, format: str | None, named: dict[str, str]) -> Rows:
    """Yield the rows of a file, converted by --format, with the column names from --columns."""
    change = find_format(format) if format else dict
    for where, row in read_rows(file):
        with error_context(where):
            yield where, with_names(change(row), named)


def with_names(columns: dict, named: dict[str, str]) -> dict:
    """Rename columns; drop a column if another one takes its name."""
    renamed = {ours: columns[theirs] for theirs, ours in named.items() if theirs in columns}
    return {name: value for name, value in columns.items() if name not in named} | renamed


def print_cures(error: Unclear, path: Path, named: dict[str, str], question: str | None, lines: list[str]):
    """Print what to do if the columns are unclear: commands that choose one, or a function to edit."""
    command = f"  minivlmrl convert {shlex.quote(str(path))}"
    asked = f" --question={shlex.quote(question)}" if question else ""
    for choice in error.choices:
        columns = json.dumps(named | choice)
        print(f"{command}{asked} --columns={shlex.quote(columns)}", file=sys.stderr)
    if lines and len(error.choices) < 2:
        print(*lines, "Save this function as my_format.py, correct it if needed, and run", sep="\n", file=sys.stderr)
        print(f"{command} --format=my_format.py:read", file=sys.stderr)


def save_pictures(value, out: Path, folder: Path):
    """Write pictures stored as bytes to image files, and return their paths. Other values stay unchanged."""
    if isinstance(value, list):
        return [save_pictures(item, out, folder) for item in value]
    content = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(content, bytes):
        return value
    with open_image(content) as image:
        suffix = str(image.format).lower()
    name = sha256(content).hexdigest()[:16]
    file = out.with_name(f"{out.stem}_pictures") / f"{name}.{suffix}"
    if file.parent.is_symlink():
        raise UserError(f"{file.parent} is a link, and no files outside this folder are written; remove it")
    file.parent.mkdir(exist_ok=True)
    write_file(file, content)
    if file.is_relative_to(folder):
        return file.relative_to(folder).as_posix()
    return str(file.resolve())


def write_files(rows: list[dict], out: Path, eval_rows: int) -> Path | None:
    """Write the converted rows, except `eval_rows` evenly spaced ones, which go into a second file; return its path."""
    parts = {out: rows}
    eval_file = None
    if eval_rows:
        eval_file = out.with_name(f"{out.stem}_eval.jsonl")
        if eval_file.exists() and not out.stem.endswith("_converted"):
            raise UserError(f"--eval_rows would replace {eval_file}; move this file, or choose another --out")
        parts = {out: [], eval_file: []}
        for number, row in enumerate(rows):
            is_held_out = number * eval_rows % len(rows) < eval_rows
            parts[eval_file if is_held_out else out].append(row)
    for name, part in parts.items():
        with drafted(name, f"another process is writing {name}; wait until it ends") as file:
            file.writelines(f"{json.dumps(row, ensure_ascii=False)}\n".encode() for row in part)
        print(f"wrote {pluralize(len(part), 'row')} to {name}")
    return eval_file


def describe(columns: dict):
    """Print a converted row as training will read it: question, media and answers."""
    row, media = checked_row(columns, (), {*columns} - {"label"}, RowOptions())
    print(f"first row: question: {truncate(text_of(row.messages[-1]), 200)}")
    sources = [truncate(item.source, 60) for item in media]
    print(f"  pictures and videos: {', '.join(sources) or 'none'}")
    print(f"  truth (solution): {truncate(columns.get('solution'), 200)}")
    for name in ("completion", "chosen", "rejected"):
        answer = getattr(row, name)
        if answer:
            print(f"  {name}: {truncate(text_of(as_turns(answer)[-1]), 200)}")


def next_command(row: dict, out: Path, eval_file: Path | None, folder: Path, kept: list[str]) -> str:
    """Return a shell command to train on the new file.

    Args:
        kept: columns read only by rewards.
    """
    name = "own_pairs" if "chosen" in row else "own_data_one_card"
    recipe = recipes_folder() / f"{name}.yaml"
    if recipe.is_relative_to(Path.cwd()):
        recipe = recipe.relative_to(Path.cwd())
    words = ["minivlmrl", "train", str(recipe), f"--data.train_file={out}", f"--data.eval_file={eval_file or 'null'}"]
    if folder.resolve() != out.parent.resolve():
        words.append(f"--data.image_root={folder}")
    if kept:
        words.append(f"--data.columns={json.dumps({name: name for name in kept})}")
    solution = row.get("solution")
    listed = literal_list(solution) if isinstance(solution, str) else solution
    lists_answers = isinstance(listed, list) and not all(isinstance(item, int | float) for item in listed)
    if lists_answers:
        words.append(f"--rewards={{{recipe.with_name('answers.py')}:one_of: 1.0}}")
    cannot_compare = solution is None or len(str(solution).split()) >= LONG
    if cannot_compare and "chosen" not in row:
        words.append("--stages=[sft]")
    return shlex.join(words)
