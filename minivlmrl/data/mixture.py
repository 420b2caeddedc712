"""Combine several data files into one dataset: select, repeat and concatenate the rows of the files."""

import math
import random
import re
from collections.abc import Sequence

from minivlmrl.config.options import FileOptions
from minivlmrl.data.file_rows import FileRows, RowSelection
from minivlmrl.errors import error_context


def mix(parts: Sequence[FileRows], files: Sequence[FileOptions]) -> RowSelection:
    """Concatenate the rows of several data files, and repeat them according to each file's option `weight`.

    Example: if a file has `weight: 2.5`, half of its rows occur three times in the dataset, and the others twice.
    """
    picks = []
    for part_number, (rows, section) in enumerate(zip(parts, files, strict=True)):
        with error_context(section.file):
            chosen = sample(section.sampling, len(rows))
        repeats = int(section.weight)
        for row_number in chosen:
            picks += [(part_number, row_number)] * repeats
        num_extra = round(section.weight * len(chosen)) - repeats * len(chosen)
        picks += [(part_number, chosen[i * len(chosen) // num_extra]) for i in range(num_extra)]
    return RowSelection(parts, picks)


def sample(strategy: str, total_rows: int) -> list[int]:
    """Return the indices of the dataset rows that a strategy such as "first:100" or "random:10%" selects.

    Args:
        strategy: all, first:N, end:N or random:N, where N is a number or a percentage, which is rounded up. The random
            rows are the same for every run seed.

    Source: sampling_strategy in VLM-R1's grpo_rec.py.
    """
    match = re.fullmatch(r"all|(first|end|random):([0-9]+)(%?)", strategy)
    if not match:
        raise ValueError(
            f"sampling is {strategy!r}, but it must be all, first:N, end:N or random:N, where N "
            "is a number such as 10 or a percentage such as 10%"
        )
    name, size_text, percent = match.groups(default="")
    num_rows = int(size_text or total_rows)
    if percent:
        num_rows = math.ceil(num_rows * total_rows / 100)
    num_rows = min(num_rows, total_rows)
    if name == "random":
        return sorted(random.Random(0).sample(range(total_rows), num_rows))
    first_row = total_rows - num_rows if name == "end" else 0
    return list(range(first_row, first_row + num_rows))
