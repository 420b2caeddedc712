"""Read rows from JSON, parquet and CSV files, and from picture folders."""

import csv
import re
from collections.abc import Iterator
from pathlib import Path

from minivlmrl.data.markup import parse_literal
from minivlmrl.data.row_checks import FILE_NAMES
from minivlmrl.data.row_files import open_rows, split_of
from minivlmrl.errors import UserError, error_context, pluralize, truncate

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")  # as in an "imagefolder" of Hugging Face datasets
# names of splits and media folders, not of classes
NO_CLASS = re.compile(r"(train|training|val|valid|validation|dev|test|eval)\d*|images?|imgs?|pictures|photos|data")
# files written by `minivlmrl convert`
CONVERTED = re.compile(r"rows(_.+)?_(converted|trl|ms-swift|verl)\.\w+")
LISTS = ("messages", "prompt", "conversations", "image", "images", "choices", "options")
Rows = Iterator[tuple[str, dict]]  # (file and line, {column: value})


def find_rows(path: Path) -> Path:
    """Find the rows below a path: a file, a folder with parquet files (FOLDER@SPLIT), or one subfolder per class.

    Raises:
        UserError: the folder has several splits, or neither rows nor classes.
    """
    folder, split = split_of(path)
    if split and (folder / split).is_dir():
        folder, split, path = folder / split, None, folder / split
    if not folder.is_dir():
        return path
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        raise UserError(
            f"{folder} was written by save_to_disk; write a parquet file with `datasets.load_from_disk(...).to_parquet`"
        )
    tables = [folder / name for name in METADATA if (folder / name).is_file()]
    tables = tables or sorted([*folder.glob("*.csv"), *folder.glob("*.tsv")])
    if len(tables) == 1:
        return tables[0]
    if tables:
        names = ", ".join(table.name for table in tables)
        raise UserError(f"{folder} has {names}; choose one, as in `minivlmrl convert {tables[-1]}`")
    if row_files(folder):
        return path
    subfolders = []
    for inner in sorted(folder.glob("[!.]*/")):
        if any(map(is_shown, inner.rglob("*"))):
            subfolders.append(inner)
    splits = [inner for inner in subfolders if not is_class(inner)]
    if splits and len(subfolders) == 1:
        return find_rows(splits[0])
    if splits:
        names = ", ".join(inner.name for inner in subfolders)
        raise UserError(
            f"{path} has the folders {names}; choose one, as in `minivlmrl convert {path}@{subfolders[-1].name}`, or "
            "write a file labels.csv with the columns file_name and label"
        )
    if not subfolders:
        raise UserError(
            f"{folder} has no file of rows and no folder per class; write labels.csv with the columns file_name and "
            "label, such as 1.png,cat"
        )
    return folder


def is_class(folder: Path) -> bool:
    """Return whether a picture folder is a class, not a split: it has no split name, metadata or subfolders."""
    has_metadata = any(folder.glob("metadata.*"))
    has_subfolders = any(map(is_shown, folder.glob("[!.]*/**/*")))
    return not (NO_CLASS.fullmatch(folder.name.lower()) or has_metadata or has_subfolders)


def row_files(folder: Path) -> list[Path]:
    """Return JSON and parquet files in a folder, except those written by `convert`."""
    files = []
    for pattern in ("*.json*", "*.parquet", "*/*.parquet"):
        files += folder.glob(pattern)
    return [file for file in files if not CONVERTED.fullmatch(file.name)]


def is_shown(file: Path) -> bool:
    """Return whether a file is an image, by its name."""
    is_image = FILE_NAMES["image"].fullmatch(file.name) is not None
    return is_image and not file.name.startswith(".")


def read_rows(file: Path) -> Rows:
    """Yield rows with their position, from a file or folder that find_rows returns."""
    if file.suffix in (".csv", ".tsv"):
        yield from read_cells(file)
    elif file.is_dir() and not row_files(file):
        for image in filter(is_shown, sorted(file.glob("[!.]*/[!.]*"))):
            name = image.relative_to(file).as_posix()
            yield str(image), {"image": name, "label": image.parent.name}
    else:
        rows = open_rows(file)
        for index in range(len(rows)):
            yield rows.where(index), rows[index]


def read_cells(path: Path) -> Rows:
    """Read a CSV or TSV file with column names in the first line; empty cells become missing columns."""
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", newline="") as file:
        first_line = file.readline()
        file.seek(0)
        separator = max(",\t;|", key=first_line.count)  # Excel separates cells by semicolons in many countries
        reader = csv.reader(file, delimiter=separator, strict=True)
        names: list[str] = []
        start = 1  # line where the current row starts
        try:
            for cells in reader:
                where = f"{path}:{start}"
                start = reader.line_num + 1
                with error_context(where):
                    if names and cells:
                        check_cells(names, cells)
                        pairs = zip(names, cells, strict=True)
                        yield where, {name: read_cell(name, cell) for name, cell in pairs if cell}
                names = names or [name.strip() for name in cells]
                twice = [name for name in names if name and names.count(name) > 1]
                if twice:
                    raise UserError(f"{where}: two columns have the name {truncate(twice[0], 60)}")
        except csv.Error as error:
            raise UserError(f"{path}:{start}: the row cannot be read ({error}); close each quote") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: the file is not encoded in UTF-8 ({error}); save it as UTF-8") from error


def check_cells(names: list[str], cells: list[str]):
    """Raise UserError for a CSV row with too many or too few cells."""
    if len(cells) != len(names):
        raise UserError(
            f"the row has {pluralize(len(cells), 'cell')}, but the first line of the file has {len(names)} column "
            "names; put cells that contain a comma, a tab or a line break in double quotes"
        )


def read_cell(name: str, cell: str):
    """Parse a CSV cell: to a list if it is one in JSON or Python syntax, else to text."""
    value = parse_literal(cell) if name in LISTS and cell[:1] in ("[", "{") else None
    return cell if value is None else value
