"""Numbers by which a trainer may wrongly multiply or divide, such as the row count or the temperature."""

import math
from collections import defaultdict
from itertools import permutations

OF_FORWARD = ("logps", "entropies", "logps of old", "logps of sampler", "logps of reference", "gradients")


def counts(d, stage: str) -> dict[str, float]:
    """Return counts, such as tokens or rows, without 1 and 0."""
    about = d.about
    result = {"ranks": about.get("world_size")}
    if stage == "advantages":
        result["completions of a group"] = about.get("num_generations")
        result["rewards"] = d["rewards"].view(len(d["rewards"]), -1).shape[1]
    else:
        result["micro-batches"] = len(d.micro_batches)
    if stage in ("loss", "schedule"):
        result["steps of a rollout"] = about.get("steps_per_rollout")
    if stage == "loss":
        rows = len(d.micro_batches[0])
        result |= {
            "rows": len(d.all_rows),
            "counted tokens": d["completion_mask"].sum().item(),
            "completions of a group": about.get("num_generations"),
            "tokens of completions, including padding": d.completion.sum().item(),
            "columns": d["input_ids"].numel(),
            "tokens of prompts and completions": d["row_lengths"].sum().item(),
            "tokens of the longest completion": d["lengths"].max().item(),
            "tokens of max_completion_length": about.get("max_completion_length"),
            "rows of a micro-batch": rows,
        }
        if "pair" in d:
            result["pairs of a micro-batch"] = rows // 2
        if "advantages" in d:
            result["rows with an advantage other than 0"] = int(d.has_advantage().sum())
    return without_units(result)


def factors(d, stage: str) -> dict[str, float]:
    """Return options, and option ratios, as possible factors."""
    result = {}
    if stage in (*OF_FORWARD, "loss"):
        result["1 / ln 2, as in bits"] = 1 / math.log(2)
    if stage in OF_FORWARD:
        temperature = d.about.get("temperature", 1.0)
        result |= {"the temperature": temperature, "one over the temperature": 1 / temperature}
    if stage == "loss":
        result["beta"] = d.about.get("loss", {}).get("beta")
    if stage in ("update", "schedule"):
        rate = d.optimizer.get("learning_rate") or 1
        earlier = [0.0, *d.schedule.get("rates", [])][-1]
        result["the learning rate of the previous step divided by the current one"] = earlier / rate
        largest = d.schedule.get("learning_rate", 0)
        result["the largest learning rate divided by the current one"] = largest / rate
    return without_units(result)


def without_units(numbers: dict) -> dict[str, float]:
    return {says: number for says, number in numbers.items() if number not in (None, 0, 1)}


def known_numbers(d, stage: str) -> dict[float, str]:
    """Return {number: name} for options, counts and ratios, such as {8.0: ": the 8 rows"}."""
    units = defaultdict(list)  # {count: names}
    for unit, count in counts(d, stage).items():
        units[count].append(unit)
    texts = {count: f"the {count:g} {' or '.join(names)}" for count, names in units.items()}
    singles = [(0.0, "exactly zero"), *((number, says) for says, number in factors(d, stage).items())]
    for count, text in texts.items():
        singles += [(count, text), (1 / count, f"1 over {text}")]
    # no ratios of small counts, such as 3 / 4: a factor could equal them by chance
    ratios = [(a / b, f"{texts[a]} over {texts[b]}") for a, b in permutations(texts, 2) if min(a, b) > 10]
    return by_number(ratios) | by_number(singles)  # a single count is simpler than a ratio


def by_number(named: list[tuple[float, str]]) -> dict[float, str]:
    """Join the names for equal numbers: 8 rows and 8 pairs give {8.0: ": the 8 rows or the 8 pairs"}."""
    names = defaultdict(list)
    for number, name in named:
        names[float(f"{number:.12g}")].append(name)
    return {number: f": {' or '.join(dict.fromkeys(found))}" for number, found in names.items()}
