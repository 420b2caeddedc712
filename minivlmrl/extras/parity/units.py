"""List rows and tokens for simulated bugs, such as "a row has the advantage of the next row in its group".

Row and token orders are wrong indices: [1, 2, 0] if each of three rows reads the next row. Row sets and token regions
are masks for bugs in only some rows or tokens, such as truncated completions or the prompt.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from minivlmrl.extras.parity.formulas import first, last

# {description: function from correct to wrong row or token indices}
WITHIN = {
    "the next {} in {}": lambda x: x.roll(-1),
    "the previous {} in {}": lambda x: x.roll(1),
    "the first {} in {}": lambda x: x[:1].expand_as(x),
    "the {} at the mirrored position in {}": lambda x: x.flip(0),
}
# index -1 reads the value 0: "the next token and 0 for the last" is [1, 2, -1] in a row of three
TOKENS = {
    "the next {} in {} and 0 for the last": lambda x: pad(x[1:], (0, 1), value=-1)[: len(x)],
    "the previous {} in {} and 0 for the first": lambda x: pad(x, (1, 0), value=-1)[: len(x)],
}
# functions from correct to wrong row indices, which have shape (groups, rows per group)
BLOCKS = {
    "the next {1}": lambda x: x.roll(-1, 0),
    "the row that repeat gives instead of repeat_interleave, by {1}": lambda x: x.T,
    "the row that repeat_interleave gives instead of repeat, by {1}": lambda x: x.flatten().view(x.T.shape).T,
}


class Distinct(dict):
    """Dict that lists equal tensors only once, but finds them by all their names."""

    def __init__(self):
        self.equal = {}

    def __missing__(self, name: str):
        return self.equal[name]


def different(orders: dict[str, Tensor], same: Tensor) -> Distinct:
    """Drop duplicate tensors, and tensors equal to `same`, which simulate no bug."""
    kept = Distinct()
    for name, order in orders.items():
        is_new = not any(torch.equal(order, x.expand_as(order)) for x in (same, *kept.values()))
        (kept if is_new else kept.equal)[name] = order
    return kept


def ordered(table: dict[str, Callable], item: str, unit: str, blocks: list[Tensor], same: Tensor) -> dict[str, Tensor]:
    indices = torch.cat(blocks)
    return {
        says.format(item, unit): same.put(indices, torch.cat([order(x) for x in blocks]))
        for says, order in table.items()
    }


def row_orders(d, of_rollout: bool = False) -> dict[str, Tensor]:
    """Return wrong row indices for simulated bugs: {"the next row in its group": indices, ...}."""
    all_rows = torch.arange(len(d["group"])) if of_rollout else d.all_rows
    row = all_rows if of_rollout else d.get("row", all_rows)
    orders = {}
    units = {}
    sorted_rows, place = row.sort()
    if torch.equal(sorted_rows, all_rows):  # the step trains on all rollout completions
        group = d.get("group", all_rows * 0)[all_rows]
        units["its group"] = [place[group == number] for number in group.unique()]
        units["the rollout"] = [place]
        orders["the completion that had its place before the shuffle"] = place
    if not of_rollout:
        units["its micro-batch"] = d.micro_batches
        units["the step"] = [all_rows]
    for unit, blocks in units.items():
        orders |= ordered(WITHIN, "row", unit, blocks, all_rows)
        if len(set(map(len, blocks))) == 1:
            orders |= ordered(BLOCKS, "row", unit.split()[-1], [torch.stack(blocks)], all_rows)
    return different(orders, all_rows)


def token_orders(d) -> dict[str, Tensor]:
    """Return wrong token indices for simulated bugs: {"the next token in its row": indices, ...}."""
    numbers = torch.arange(d["input_ids"].numel()).view_as(d["input_ids"])
    return different(ordered(WITHIN | TOKENS, "token", "its row", [*numbers], numbers), numbers)


def ends(number: Tensor, name: str, suffix: str = "", begin: int = 0) -> dict[str, Tensor]:
    """Return masks such as "the first turn" and "all turns except the last"."""
    last_number = number.amax(-1, keepdim=True)
    return {
        f"the first {name}{suffix}": number == begin,
        f"the last {name}{suffix}": number == last_number,
        f"all {name}s{suffix} except the first": number > begin,
        f"all {name}s{suffix} except the last": number < last_number,
    }


def row_sets(d) -> dict[str, Tensor]:
    """Return {description: mask} of rows that may have a bug, such as "truncated completions"."""
    sets = {}
    if "ended" in d:
        sets |= {"truncated completions": ~d["ended"], "completions that were not truncated": d["ended"]}
    if "chosen" in d:
        sets |= {"chosen answers": d["chosen"] == 1, "rejected answers": d["chosen"] == 0}
    if d.get("advantages", torch.zeros(1, 1)).dim() == 1:
        sets["rows with positive advantages"] = d["advantages"] > 0
        sets["rows with negative advantages"] = d["advantages"] < 0
        sets["rows with an advantage of 0"] = d["advantages"] == 0
    number = d["micro_batch"]
    place = (number == number[:, None]).tril(-1).sum(1)  # row index in its micro-batch
    sets |= ends(place, "row", " of each micro-batch")
    sets |= ends(number - number.min(), "micro-batch")
    sets = {says: mask for says, mask in sets.items() if mask.sum() > 1}  # a bug in one row may fit by chance
    return different(sets, torch.tensor(False))


def token_regions(d, ids: Tensor, drawn: Tensor, forced: Tensor) -> dict[str, Tensor]:
    """Return {description: mask} of tokens that may have a bug, such as "the image tokens"."""
    # exclude the first token, which no token predicts
    prompt = (d["attention_mask"].cumsum(1) > 1) & d["attention_mask"].bool() & ~d.completion
    image = ids == (d.about.get("image_token_id") or -1)
    regions = {"the prompt": prompt, "the text of the prompt": prompt & ~image, "the image tokens": image}
    if forced.any():
        regions |= {
            "the sampled tokens": drawn,
            "tool responses": forced,
            "everything after the prompt": drawn | forced,
            "the end tokens of turns": drawn & d.is_stop(ids),
            "the image tokens of tool responses": forced & image,
        }
    else:
        counted = drawn & d["completion_mask"].bool()
        regions |= {"the first tokens": first(drawn), "the last counted tokens": last(counted)}
    return different(regions, torch.tensor(False))
