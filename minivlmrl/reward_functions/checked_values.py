"""What a reward function has returned, checked: a number for each completion, or None."""

import math
import numbers

LARGEST = 3.4e38  # of float32


def checked_values(name: str, values, completions: list[str]) -> list[float]:
    """Turn what reward `name` says of n completions into n numbers, NaN for None (ValueError: it is anything else)."""
    try:
        values = list(values)
    except TypeError as error:
        raise ValueError(
            f"reward {name} returned {values!r:.80}; it must be a list, one number a completion"
        ) from error
    if len(values) != len(completions):
        raise ValueError(f"reward {name} returned {len(values)} values for {len(completions)} completions")
    found = []
    for value, completion in zip(values, completions, strict=True):
        if hasattr(value, "item") and value.ndim == 0:  # of a tensor or an array
            value = value.item()
        if value is not None and not (isinstance(value, numbers.Real) and abs(value) <= LARGEST):
            cure = "it must be a finite number, or None for 'cannot judge'"
            raise ValueError(f"reward {name} returned {value!r:.80} for the completion {completion!r:.80}; {cure}")
        found.append(math.nan if value is None else float(value))
    return found
