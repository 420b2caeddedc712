"""What a reward function has returned, checked: a number for each completion, or None."""

import itertools
import math
import numbers
from collections.abc import Sequence

LARGEST = 3.4e38  # of float32


def checked_values(name: str, values, completions: list[str], rows: Sequence[str] = ()) -> list[float]:
    """Turn what reward `name` says of n completions of n rows into n numbers, NaN for None (ValueError: it is not)."""
    try:
        values = list(values)
    except TypeError as error:
        cure = "it must be a list, one number a completion"
        raise ValueError(f"reward {name} returned {values!r:.80}; {cure}") from error
    if len(values) != len(completions):
        raise ValueError(f"reward {name} returned {len(values)} values for {len(completions)} completions")
    found = []
    for value, completion, row in itertools.zip_longest(values, completions, rows):
        if hasattr(value, "item") and value.ndim == 0:  # of a tensor or an array
            value = value.item()
        if value is not None and not (isinstance(value, numbers.Real) and abs(value) <= LARGEST):
            cure = "it must be a finite number, or None for 'cannot judge'"
            text = f"reward {name} returned {value!r:.80} for the completion {completion!r:.80}; {cure}"
            raise ValueError(f"{row}: {text}" if row else text)
        found.append(math.nan if value is None else float(value))
    return found
