"""List the mistakes that a trainer may make with rows or tokens, and the parts of a step that a bug may affect.

For example, each completion may have the advantage of the next completion in its group, or the advantages may be wrong
only for truncated completions.
"""

import re
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from minivlmrl.extras.parity.formulas import first, last

WITHIN = {
    "the next {} in {}": lambda x: x.roll(-1),
    "the previous {} in {}": lambda x: x.roll(1),
    "the first {} in {}": lambda x: x[:1].expand_as(x),
    "the {} at the mirrored position in {}": lambda x: x.flip(0),
}
# The index -1 gives the value 0. In a row of three tokens, "the next token" has the indices 1, 2 and -1.
TOKENS = {
    "the next {} in {} and 0 for the last": lambda x: pad(x[1:], (0, 1), value=-1)[: len(x)],
    "the previous {} in {} and 0 for the first": lambda x: pad(x, (1, 0), value=-1)[: len(x)],
}
# wrong orders of rows in groups of equal size; each function gets the row indices (groups, rows per group)
BLOCKS = {
    "the next {1}": lambda x: x.roll(-1, 0),
    "the row that repeat gives instead of repeat_interleave, by {1}": lambda x: x.T,
    "the row that repeat_interleave gives instead of repeat, by {1}": lambda x: x.flatten().view(x.T.shape).T,
}
# names of parameters to which transformers.Trainer applies no weight decay
NO_DECAY = r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)"
PARTS = {
    "the vision tower": r"(^|\.)visual\.",
    "the vision tower without its merger": r"(^|\.)visual\.(?!merger)",
    "the merger": r"merger",
    "the decoder": r"(^|\.)model\.(?!visual)",
    "the layers of the decoder": r"(^|\.)layers\.",
    "the embeddings": r"embed_tokens",
    "the head": r"lm_head",
    "the norms": r"norm.*weight|ln_q",
    "the biases": r"bias$",
    "the parameters without weight decay": NO_DECAY,
    "the parameters with weight decay": rf"^(?!.*({NO_DECAY}))",
}


class Distinct(dict):
    """A dictionary that lists each distinct tensor once; d[name] also finds the other names of a tensor."""

    def __init__(self):
        self.equal = {}

    def __missing__(self, name: str):
        return self.equal[name]


def different(orders: dict[str, Tensor], same: Tensor) -> Distinct:
    """Leave out tensors that equal `same` or an earlier tensor, so that bugs with equal effects are listed once."""
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
    """List wrong orders of rows, for example one that gives each row the values of the next row in its group."""
    all_rows = torch.arange(len(d["group"])) if of_rollout else d.all_rows
    row = all_rows if of_rollout else d.get("row", all_rows)
    orders = {}
    units = {}
    sorted_rows, place = row.sort()
    if torch.equal(sorted_rows, all_rows):  # the step contains the whole rollout
        group = d.get("group", all_rows * 0)[all_rows]
        units["its group"] = [place[group == number] for number in group.unique()]
        units["the rollout"] = [place]
        orders["the completion that had its place before the shuffle"] = place
    if not of_rollout:
        units["its micro-batch"] = d.micro_batches
        units["the step"] = [all_rows]
    for unit, blocks in units.items():
        orders |= ordered(WITHIN, "row", unit, blocks, all_rows)
        if len(set(map(len, blocks))) == 1:  # all blocks have the same size
            orders |= ordered(BLOCKS, "row", unit.split()[-1], [torch.stack(blocks)], all_rows)
    return different(orders, all_rows)


def token_orders(d) -> dict[str, Tensor]:
    """List wrong orders of tokens, for example one that gives each token the value of the next token in its row."""
    numbers = torch.arange(d["input_ids"].numel()).view_as(d["input_ids"])
    return different(ordered(WITHIN | TOKENS, "token", "its row", [*numbers], numbers), numbers)


def ends(number: Tensor, name: str, suffix: str = "", begin: int = 0) -> dict[str, Tensor]:
    """Return masks such as "the first turn", "the last turn" and "all turns except the first"."""
    last_number = number.amax(-1, keepdim=True)
    return {
        f"the first {name}{suffix}": number == begin,
        f"the last {name}{suffix}": number == last_number,
        f"all {name}s{suffix} except the first": number > begin,
        f"all {name}s{suffix} except the last": number < last_number,
    }


def place_within(label: Tensor, row: Tensor) -> Tensor:
    """Return the position of each row among the rows with the same label."""
    return ((label == label[:, None]) & (row < row[:, None])).sum(1)


def row_sets(d) -> dict[str, Tensor]:
    """Return a mask for each named subset of a step's rows, such as "truncated completions"."""
    sets = {}
    if "ended" in d:
        sets |= {"truncated completions": ~d["ended"], "completions that were not truncated": d["ended"]}
    if "chosen" in d:
        sets |= {"chosen answers": d["chosen"] == 1, "rejected answers": d["chosen"] == 0}
    if d.get("advantages", torch.zeros(1, 1)).dim() == 1:
        sets["rows with positive advantages"] = d["advantages"] > 0
        sets["rows with negative advantages"] = d["advantages"] < 0
        sets["rows with an advantage of 0"] = d["advantages"] == 0
    sets |= ends(place_within(d["micro_batch"], d.all_rows), "row", " of each micro-batch")
    sets |= ends(d["micro_batch"] - d["micro_batch"].min(), "micro-batch")
    sets = {says: mask for says, mask in sets.items() if mask.sum() > 1}  # a single row fits too many descriptions
    return different(sets, torch.tensor(False))


def spans(d) -> dict[str, Tensor]:
    """Number each token's turn; a trainer may wrongly average over each turn."""
    turn = first(d.turns()[1]).cumsum(1)
    return {"its turn": d.all_rows[:, None] * d.width + turn} if turn.max() > 1 else {}


def parts_of_model(d) -> dict[str, Callable]:
    """For each part of a model, such as "the vision tower", return a function that tests a parameter's name."""
    names = d.parameters("before") or d.parameters("grad")
    patterns = dict(PARTS)
    for name in names:
        for component in re.findall(r"[a-z_]\w*(?:\.\d+)?(?=\.|$)", name):
            patterns[f"parameters of {component}"] = rf"(^|\.){re.escape(component)}(\.|$)"
    tests = {says: re.compile(pattern).search for says, pattern in patterns.items()}
    masks = {says: torch.tensor([bool(test(name)) for name in names]) for says, test in tests.items()}
    return {says: tests[says] for says in different(masks, torch.tensor(True))}


def token_regions(d, ids: Tensor, drawn: Tensor, forced: Tensor) -> dict[str, Tensor]:
    """Return a mask for each named kind of tokens, such as "the image tokens"."""
    prompt = torch.zeros_like(drawn)  # the sampler's ids do not include the prompt
    if ids.shape == d["input_ids"].shape:
        prompt = d["attention_mask"].bool() & ~d.completion
    image = ids == (d.about.get("image_token_id") or -1)
    regions = {"the prompt": prompt, "the text of the prompt": prompt & ~image, "the image tokens": image}
    if forced.any():
        regions |= regions_of_turns(d.is_stop(ids), image, drawn, forced)
    elif "sampler_ids" in d:
        regions["the sampled tokens"] = drawn
    if not forced.any() and ids.shape == d["input_ids"].shape:  # the sampler's ids have another shape
        counted = drawn & d["completion_mask"].bool()
        regions |= {"the first tokens": first(drawn), "the last counted tokens": last(counted)}
    return different(regions, torch.tensor(False))


def regions_of_turns(stop: Tensor, image: Tensor, drawn: Tensor, forced: Tensor) -> dict[str, Tensor]:
    """Return a mask for each named part of completions with tool calls, such as "the first turn"."""
    regions = {
        "the sampled tokens": drawn,
        "tool responses": forced,
        "everything after the prompt": drawn | forced,
        "the end tokens of turns": drawn & stop,
        "the image tokens of tool responses": forced & image,
    }
    number = first(drawn).cumsum(1)
    regions |= {says: mask & drawn for says, mask in ends(number, "turn", begin=1).items()}
    return regions | {"the second turn": drawn & (number == 2)}
