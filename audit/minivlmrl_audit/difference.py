"""Where the files of two runs differ, and by how much."""

import filecmp
import math
from itertools import zip_longest
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from minivlmrl.hub.folder import parse_json
from minivlmrl.hub.recipe_values import naming, parse_yaml

# of a recipe, what a resumption may say otherwise
OPTIONS = {"output_dir", "report_to", "num_threads", "timeout", "state_steps", "state_minutes"}
UNEQUAL = {  # by file, keys of which two honest runs say something else
    "config.yaml": OPTIONS,
    "completions.jsonl": {"where"},  # the path of the file of rows
    "timings.jsonl": {"seconds", "step_time", "tokens_per_second", "peak_memory_gib"},
    "summary.json": {"seconds"},
    "run.json": {"seconds", "recipe", "logs"},
    "complete.json": {"run.json"},
}
READERS = {".json": parse_json, ".jsonl": parse_json, ".yaml": parse_yaml}


def difference(file: Path, other: Path) -> str:
    """Say in which lines two files differ, and the most by which numbers do; "" if nowhere."""
    if filecmp.cmp(file, other, shallow=False):
        return ""
    pairs = zip_longest(content(file), content(other))
    gaps = {number: distance(*pair) for number, pair in enumerate(pairs, 1)}
    lines = [str(number) for number, gap in gaps.items() if gap != 0]
    if not lines:  # tensors may be equal, and their dtype not
        return "" if file.name in UNEQUAL else "other bytes"
    says = f"line {', '.join(lines[:5])}"
    largest = max(gaps.values())
    return says if largest == math.inf else f"{says}, by {largest:.3g}"


def content(file: Path) -> list:
    """Read the lines of a text, without what honest runs say differently, or a file as one.

    ValueError: it is not what its name says.
    """
    if file.suffix == ".safetensors":
        return [load_file(file)]
    text = file.read_bytes() if file.is_file() else b""
    if file.suffix not in READERS:
        return [text]
    skipped = UNEQUAL.get(file.name, set())
    texts = text.splitlines() if file.suffix == ".jsonl" else [text]
    lines = []
    with naming(file):
        for text in texts:
            line = dict(READERS[file.suffix](text))
            lines.append({key: value for key, value in line.items() if key not in skipped})
    return lines


def distance(first, second) -> float:
    """Largest difference of the numbers in two values; infinite where something else differs."""
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        return max((distance(first[key], second[key]) for key in first), default=0.0)
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if first.shape != second.shape or not (first.isfinite().all() and second.isfinite().all()):
            return math.inf
        return (first.double() - second.double()).abs().max().item()
    if isinstance(first, float) and isinstance(second, float):
        return abs(first - second)
    return 0.0 if first == second else math.inf
