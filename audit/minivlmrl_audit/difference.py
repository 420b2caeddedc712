"""Where the files of two runs differ, and by how much."""

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

from minivlmrl_audit.minivlmrl_api import (
    COMPLETE,
    COMPLETIONS,
    RUN,
    TIMINGS,
    digest,
    find_pieces,
    json_text,
    parse_json,
    parse_yaml,
    read_json,
    read_rows,
    require,
)

# of a recipe, what a resumption may say otherwise
OPTIONS = {
    "output_dir",
    "report_to",
    "num_threads",
    "timeout",
    "state_steps",
    "state_minutes",
    "page_minutes",
}
# numbers of a clock and of memory; a state has all of timings.jsonl
MEASURED = {"seconds", "step_time", "tokens_per_second", "peak_memory_gib", TIMINGS}
PATHS = {"where", "recipe"}  # of completions.jsonl and of a state: they name files
# files of which two honest runs write other bytes
UNEQUAL = {"config.yaml", TIMINGS, "summary.json", RUN, COMPLETIONS}
DAMAGED = (ValueError, OSError, LookupError, RuntimeError, SafetensorError)


def difference(path: Path, other: Path, moved: bool = False) -> str:
    """Say in which lines two files differ, and the most by which numbers do; "" if nowhere.

    Args:
        path, other: files, or folders of states.
        moved: the other run was trained with files at other paths.
    """
    if not other.exists():
        return "missing"
    if filecmp.cmp(path, other, shallow=False):
        return ""
    gaps = []  # of each line
    try:
        for pair in zip_longest(content(path, moved), content(other, moved)):
            gaps.append(distance(*pair))
    except DAMAGED as error:
        return f"cannot be read from line {len(gaps) + 1}: {error}"
    lines = [str(number) for number, gap in enumerate(gaps, 1) if gap]
    if lines:
        says = f"line {', '.join(lines[:5])}"
        largest = max(gaps)
        return says if largest == math.inf else f"{says}, by {largest:.3g}"
    return "" if path.name in UNEQUAL or path.is_dir() else "other bytes"


def content(path: Path, moved: bool = False) -> Iterator:
    """Yield the lines of a text, without what honest runs say differently, or a file as one.

    Of a state yield its tensors, however many ranks have written it.

    ValueError: it is not what its name says.
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
    """Make a JSON object (ValueError: of two equal keys readers take one or the other)."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key is there twice")
    return dict(pairs)


DECODER = JSONDecoder(object_pairs_hook=unique)


def comparable(line: dict, skipped: Collection[str] = ()) -> dict:
    """Keep of a line what two honest runs say alike; a measured number is 0."""
    require(isinstance(line, dict), "a line", line, "an object")
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
    """Largest difference of the numbers in two values; of texts' numbers over 1 in shares of them.

    Infinite where something else differs.
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
