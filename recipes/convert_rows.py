"""Convert rows once from layouts that minivlmrl does not read.

    python recipes/convert_rows.py rows.jsonl > rows_converted.jsonl
    python recipes/convert_rows.py datasets.yaml

Write the new file to the same folder as the old file, because image paths are relative to the file. These layouts are
converted:

- ms-swift: <ref-object> and <bbox> in the texts stand for the items in the column `objects`.
- Qwen-VL and older ms-swift: <img>cat.jpg</img> in the texts stands for an image.
- VLM-R1: a YAML file lists data sets as `json_path` and `sampling_strategy`. The option data.train is printed.
"""

import base64
import json
import re
import sys
from pathlib import Path

import yaml

from minivlmrl.config.types import Plain
from minivlmrl.data.formats import map_nested
from minivlmrl.data.row_files import open_rows
from minivlmrl.errors import error_context

TAGS = {"<ref-object>": "ref", "<bbox>": "bbox"}  # {tag: its list in the column `objects`}


def convert_row(row: dict) -> dict:
    """Convert a row with tags; all columns' texts are searched in column order.

    Raises:
        ValueError: the texts contain a tag more often or less often than there are items for it.
    """
    if isinstance(row.get("objects"), dict):
        others = {name: value for name, value in row.items() if name != "objects"}
        row = row | fill_objects(others, row["objects"])
    paths = []

    def collect(tag: re.Match) -> str:
        paths.append(tag[1])
        return "<image>"

    row = map_nested(row, lambda text: re.sub("<img>(.*?)</img>", collect, text))
    if paths:
        row["images"] = paths
    # JSON has no bytes, but images in parquet files are bytes
    return map_nested(row, lambda content: base64.b64encode(content).decode(), bytes)


def fill_objects(row: dict, objects: dict) -> dict:
    """Replace the n-th tag of each kind by the n-th item in its list in the column `objects`."""
    text = json.dumps(row, default=str)
    items = {}
    for tag, name in TAGS.items():
        values = (objects.get(name) or []) if tag in text else []
        if len(values) != text.count(tag):
            raise ValueError(
                f"column 'objects' has {len(values)} items in {name!r}, but the texts contain {tag} {text.count(tag)} "
                "time(s); the two numbers must be equal"
            )
        items[tag] = iter(value if isinstance(value, str) else json.dumps(value) for value in values)
    return map_nested(row, lambda text: re.sub("|".join(TAGS), lambda tag: next(items[tag[0]]), text))


def convert_list(path: Path) -> Plain:
    """Convert a YAML file in which VLM-R1 lists data sets to the option data.train.

    Relative paths start from the current folder, or from the YAML file's folder if the current folder has no such file.
    """
    with error_context(path):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        sets = content.get("datasets") if isinstance(content, dict) else None
        if not isinstance(sets, list) or not all(isinstance(one, dict) and "json_path" in one for one in sets):
            raise ValueError("the file must have a list `datasets` of objects with `json_path`")
    files = []
    for one in sets:
        file = Path(one["json_path"])
        file = file if file.exists() else path.parent / file
        files.append({"file": str(file), "sampling": one.get("sampling_strategy", "all")})
    return {"data": {"train": files}}


def main(path: str):
    if Path(path).suffix in (".yaml", ".yml"):
        print(yaml.safe_dump(convert_list(Path(path))), end="")
        return
    rows = open_rows(path)
    for number in range(len(rows)):
        with error_context(rows.where(number)):
            print(json.dumps(convert_row(rows[number]), ensure_ascii=False))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
