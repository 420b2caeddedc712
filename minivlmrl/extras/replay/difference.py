"""Compare two runs' files: find the lines that differ, and how much their numbers differ."""

import filecmp
import math
import re
import sys
from collections.abc import Collection, Iterator
from itertools import zip_longest
from json import JSONDecoder
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from minivlmrl.config.parsing import parse_yaml
from minivlmrl.errors import check_field
from minivlmrl.files import digest
from minivlmrl.json_files import json_text, parse_json, read_json
from minivlmrl.run.checkpoint_files import find_pieces, read_rows
from minivlmrl.run.checkpoints import COMPLETE
from minivlmrl.run.metrics import TIMINGS
from minivlmrl.run.rollout_log import COMPLETIONS
from minivlmrl.run.trainer_state import RUN

# options that may change when a run is resumed
OPTIONS = {"output_dir", "report_to", "num_threads", "timeout", "report_minutes"}
OPTIONS |= {"checkpoint_steps", "checkpoint_minutes"}
# fields that hold times or memory use
MEASURED = {"seconds", "step_time", "phases", "wait_share", "tokens_per_second", "mfu"}
MEASURED |= {f"{kind}_memory_gib" for kind in ("peak", "allocated", "reserved", "free")}
PATHS = {"where", "recipe"}  # fields in completions.jsonl and in a saved state that hold file paths
# files whose bytes differ even between two correct runs, because they contain times or paths
UNEQUAL = {"config.yaml", TIMINGS, "summary.json", RUN, COMPLETIONS}
DAMAGED = (ValueError, OSError, LookupError, RuntimeError, SafetensorError)


def difference(path: Path, other: Path, moved: bool = False) -> str:
    """Describe the lines in which two files differ, with the largest numeric difference.

    Args:
        path, other: two files, or two folders with saved states.
        moved: whether the two runs read their input files from different paths.

    Returns "" if the files agree. An unreadable or missing file counts as a difference.
    """
    if not other.exists():
        return "this file is missing"
    if filecmp.cmp(path, other, shallow=False):
        return ""
    gaps = []  # largest difference in each line
    try:
        for pair in zip_longest(content(path, moved), content(other, moved)):
            gaps.append(distance(*pair))
    except DAMAGED as error:
        return f"the file cannot be read from line {len(gaps) + 1} on: {error}"
    lines = [str(number) for number, gap in enumerate(gaps, 1) if gap]
    if lines:
        says = f"line {', '.join(lines[:5])}"
        largest = max(gaps)
        return says if largest == math.inf else f"{says}, by {largest:.3g}"
    return "" if path.name in UNEQUAL or path.is_dir() else "the bytes differ"


def content(path: Path, moved: bool = False) -> Iterator:
    """Yield the comparable parts of a file or a saved state, without fields that differ between correct runs.

    A .jsonl file is yielded line by line, any other file as a whole, and a saved state tensor by tensor, each gathered
    from all ranks' files.

    Raises ValueError if the content does not have the format that the file's suffix promises.
    """
    if path.is_dir():
        hashes = {file.name: digest([file]) for file in path.iterdir() if file.name != COMPLETE}
        yield {COMPLETE: read_json(path / COMPLETE) == hashes}
        for name, pieces in sorted(find_pieces(path).items()):
            yield {name: read_rows(name, pieces, 0, sys.maxsize)}
    elif path.suffix == ".safetensors":
        yield load_file(path)
    elif path.suffix == ".yaml":
        yield comparable(parse_yaml(path.read_bytes()), OPTIONS)
    elif path.suffix in (".json", ".jsonl"):
        text = path.read_bytes()
        for line in text.splitlines() if path.suffix == ".jsonl" else [text]:
            yield comparable(parse_json(line, DECODER.decode), PATHS if moved else ())
    else:
        yield path.read_bytes()


def unique(pairs: list[tuple]) -> dict:
    """Build a JSON object from key-value pairs.

    Raises ValueError if a key occurs twice, because JSON parsers disagree about which value counts.
    """
    if len(dict(pairs)) < len(pairs):
        raise ValueError("an object contains the same key twice")
    return dict(pairs)


DECODER = JSONDecoder(object_pairs_hook=unique)


def comparable(line: dict, skipped: Collection[str] = ()) -> dict:
    """Copy a JSON object without the keys in `skipped`, and with every number in a measured field replaced by 0."""
    check_field(isinstance(line, dict), "a line", line, "an object")
    kept = {}
    for key, value in line.items():
        if key in MEASURED:
            value = re.sub(r"-?\d[\d.]*(e-?\d+)?", "0", json_text(value))
        elif isinstance(value, dict):
            value = comparable(value, OPTIONS if key == "recipe" else ())
        if key not in skipped:
            kept[key] = value
    return kept


def distance(first, second) -> float:
    """Return the largest numeric difference between two parsed values, relative for JSON floats greater than 1.

    The result is infinite if the values differ in anything else, such as a text or a shape.
    """
    if type(first) is not type(second):
        return math.inf
    if isinstance(first, dict):
        if first.keys() != second.keys():
            return math.inf
        return max((distance(first[key], second[key]) for key in first), default=0.0)
    if isinstance(first, Tensor):
        if first.shape != second.shape or first.dtype != second.dtype:
            return math.inf
        gap = (first.double() - second.double()).abs().max().item()
    elif isinstance(first, float):
        gap = abs(first - second) / max(1.0, abs(first))
    else:
        gap = 0.0 if first == second else math.inf
    return gap if math.isfinite(gap) else math.inf
