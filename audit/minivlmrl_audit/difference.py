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
    pairs = enumerate(zip_longest(content(file), content(other)), 1)
    gaps = {number: distance(*pair) for number, pair in pairs}
    lines = [str(number) for number, gap in gaps.items() if gap != 0]
    if not lines:  # tensors may be equal, and their dtype not
        return "" if file.name in UNEQUAL else "other bytes"
    by = "" if math.inf in gaps.values() else f", by {max(gaps.values()):.3g}"
    return f"line {', '.join(lines[:5])}{by}"


def content(file: Path) -> list:
    """Read the lines of a text, without what honest runs say differently, or a file as one.

    ValueError: it is not what its name says.
    """
    if file.suffix == ".safetensors":
        return [load_file(file)]
    text = file.read_bytes() if file.is_file() else b""
    skip = UNEQUAL.get(file.name, set())
    if file.suffix not in READERS:
        return [text]
    with naming(file):
        texts = text.splitlines() if file.suffix == ".jsonl" else [text]
        lines = [dict(READERS[file.suffix](text)) for text in texts]
        return [{key: line[key] for key in line if key not in skip} for line in lines]


def distance(one, two) -> float:
    """Largest difference of the numbers in two values; infinite where something else differs."""
    if isinstance(one, dict) and isinstance(two, dict) and one.keys() == two.keys():
        return max((distance(one[key], two[key]) for key in one), default=0.0)
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        alike = one.shape == two.shape and one.isfinite().all() and two.isfinite().all()
        return (one.double() - two.double()).abs().max().item() if alike else math.inf
    if isinstance(one, float) and isinstance(two, float):
        return abs(one - two)
    return 0.0 if one == two else math.inf
