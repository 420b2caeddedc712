"""Parts of a step to which a mistake may be limited, and wrong orders in which its rows or tokens may be used.

Each function returns {description: mask or order}, and lists parts or orders that are equal in this step only once.
"""

import re
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from minivlmrl_audit.formulas import first, last


def other_of_pair(x: Tensor) -> Tensor:
    """Swap the elements of each pair of x; the last element stays if there is an odd number."""
    return x[(torch.arange(len(x)) ^ 1).clamp(max=len(x) - 1)]


# wrong orders of the indices x of a block of rows {}, such as a group: the index that each row uses instead
ROWS = {
    "the next row in {}": lambda x: x.roll(-1),
    "the previous row in {}": lambda x: x.roll(1),
    "the first row in {}": lambda x: x[:1].expand_as(x),
    "the row at the mirrored position in {}": lambda x: x.flip(0),
    "the other row of each pair in {}": other_of_pair,
    "the row half of the rows later in {}": lambda x: x.roll(-(len(x) // 2)),
}
# wrong orders of blocks of equal size: x (blocks, rows) holds the indices
BLOCKS = {
    "the next {}": lambda x: x.roll(-1, 0),
    "the previous {}": lambda x: x.roll(1, 0),
    "the first {}": lambda x: x[:1].expand_as(x),
    "the row that repeat gives instead of repeat_interleave, by {}": lambda x: x.T,
    "the row that repeat_interleave gives instead of repeat, by {}": lambda x: x.flatten().view(x.T.shape).T,
}
# wrong orders of the flat indices x of a row's tokens; -1 stands for the value 0
TOKENS = {
    "the next token in {}": lambda x: x.roll(-1),
    "the previous token in {}": lambda x: x.roll(1),
    "the next token in {} and 0 for the last": lambda x: pad(x[1:], (0, 1), value=-1)[: len(x)],
    "the previous token in {} and 0 for the first": lambda x: pad(x, (1, 0), value=-1)[: len(x)],
    "the first token in {}": lambda x: x[:1].expand_as(x),
    "the token at the mirrored position in {}": lambda x: x.flip(0),
    "the other token of each pair in {}": other_of_pair,
}
# sets of images of a row: their numbers from 0 on, how many there are, and how many of them are in the prompt
PICTURES = {
    "all images": lambda number, count, given: number >= 0,
    "the images of tool responses": lambda number, count, given: number >= given,
    "the images of the prompt": lambda number, count, given: number < given,
    "the first image": lambda number, count, given: number == 0,
    "the last image": lambda number, count, given: number == count - 1,
    "all images except the first": lambda number, count, given: number > 0,
    "all images except the last": lambda number, count, given: number < count - 1,
}
# parts of a model: regular expressions for the names of their parameters
NO_DECAY = r"bias|layernorm|rmsnorm|\.norm\.|_norm"
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


def different(orders: dict[str, Tensor], same: Tensor) -> dict[str, Tensor]:
    """Return the orders (..., n) or masks that differ from `same` and from all earlier entries."""
    kept = {}
    for name, order in orders.items():
        if not any(torch.equal(order, x.expand_as(order)) for x in (same, *kept.values())):
            kept[name] = order
    return kept


def ordered(table: dict[str, Callable], unit: str, blocks: list[Tensor], same: Tensor) -> dict[str, Tensor]:
    """Apply each function of a table to every block of indices, such as the rows of a group.

    Returns {description: order}. An order has the shape of `same`, which is the unchanged order.
    """
    indices = torch.cat(blocks)
    return {
        says.format(unit): same.put(indices, torch.cat([order(x) for x in blocks])) for says, order in table.items()
    }


def row_orders(d, of_rollout: bool = False) -> dict[str, Tensor]:
    """Return wrong orders of the n rows of the step or, if `of_rollout`, of the N completions of the rollout."""
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
        orders["the completion that a second shuffle puts in its place"] = row
        orders["the completion that the inverse shuffle puts in its place"] = place[place]
    if not of_rollout:
        units["its micro-batch"] = d.micro_batches
        units["the step"] = [all_rows]
    for unit, blocks in units.items():
        orders |= ordered(ROWS, unit, blocks, all_rows)
        if len(set(map(len, blocks))) == 1:  # all blocks have the same size
            orders |= ordered(BLOCKS, unit.split()[-1], [torch.stack(blocks)], all_rows)
    return different(orders, all_rows)


def token_orders(d) -> dict[str, Tensor]:
    """Return wrong orders of tokens.

    An order (n, S) holds, for each token, the flat index of the token whose value is used instead. The index -1 means
    that the value 0 is used instead.
    """
    counted_mask = d["completion_mask"].bool()
    numbers = torch.arange(counted_mask.numel()).view_as(counted_mask)
    is_padding = ~d["attention_mask"].bool().flatten()
    by_padding = {
        "the token as many places earlier as there is padding in {}": lambda x: x.roll(is_padding[x].sum()),
        "the token as many places later as there is padding in {}": lambda x: x.roll(-is_padding[x].sum()),
    }
    units = {
        "its row": torch.ones_like(counted_mask),
        "its completion": d.completion,
        "its counted tokens": counted_mask,
    }
    orders = {}
    for unit, mask in units.items():
        blocks = [numbers[row][mask[row]] for row in d.all_rows]
        orders |= ordered(TOKENS | by_padding, unit, blocks, numbers)
    return different(orders, numbers)


def row_sets(d) -> dict[str, Tensor]:
    """Return masks (n,) of the rows to which a bug may be limited."""
    sets = {}
    if "ended" in d:
        sets["truncated completions"] = ~d["ended"]
        sets["completions that were not truncated"] = d["ended"]
    if d.has("group", "row"):
        sets |= sets_by_group(d)
    if "chosen" in d:
        sets["chosen answers"] = d["chosen"] == 1
        sets["rejected answers"] = d["chosen"] == 0
    if d.get("advantages", torch.zeros(1, 1)).dim() == 1:
        sets["rows with positive advantages"] = d["advantages"] > 0
        sets["rows with negative advantages"] = d["advantages"] < 0
        sets["rows with an advantage of 0"] = d["advantages"] == 0
    part = d["micro_batch"]
    begins = torch.cat([torch.tensor([True]), part[1:] != part[:-1]])
    sets["the first row of each micro-batch"] = begins
    sets["the last row of each micro-batch"] = begins.roll(-1)
    sets["the first micro-batch"] = part == part.min()
    sets["all micro-batches except the first"] = part > part.min()
    for x, largest, others in (
        (part, "the last micro-batch", "all micro-batches except the last"),
        (d["row_lengths"], "rows that are not padded", "rows that are padded"),
        (d["lengths"], "the longest completions", "all completions except the longest"),
    ):
        sets[largest] = x == x.max()
        sets[others] = x < x.max()
    sets = {says: mask for says, mask in sets.items() if mask.sum() > 1}  # a single row fits too many descriptions
    return different(sets, torch.tensor(False))


def sets_by_group(d) -> dict[str, Tensor]:
    """Return masks (n,) of rows by their rewards and by their places within their groups."""
    group = d["group"][d["row"]]
    same = group == group[:, None]
    sets = {}
    if "rewards" in d:
        total = d["rewards"].view(len(d["group"]), -1).nansum(1)[d["row"]]
        is_other = (total - total[:, None]).abs() > 1e-6
        sets["groups with equal rewards"] = ~(same & is_other).any(1)
    place = (same & (d["row"] < d["row"][:, None])).sum(1)
    sets["first completions of groups"] = place == 0
    sets["last completions of groups"] = place == place.max()
    sets["all completions of groups except the first"] = place > 0
    sets["the second half of each group"] = 2 * place > place.max()
    sets["the first half of each group"] = 2 * place < place.max()
    return sets


def rollout_sets(d) -> dict[str, Tensor]:
    """Return the sets of `row_sets` as masks (N,) over the completions of the rollout.

    Sets that depend on advantages are left out, because the stage computes the advantages.
    """
    order = d.get("row", d.all_rows).argsort()
    if len(order) != len(d["group"]):
        return {}
    return {says: mask[order] for says, mask in d.row_sets.items() if "advantage" not in says}


def spans(d) -> dict[str, Tensor]:
    """Return the spans of tokens over which a bug may average.

    The tensor (n, S) holds the number of the turn, group or pair to which each token belongs.
    """
    _, drawn_mask, _ = d.turns()
    row = d.all_rows[:, None].expand(-1, d.width)
    turn = first(drawn_mask).cumsum(1)
    spans = {}
    if turn.max() > 1:
        spans["its turn"] = row * d.width + turn
    if d.has("group", "row"):
        spans["its group"] = d["group"][d["row"]][:, None].expand_as(row)
    if "pair" in d:
        spans["its pair"] = d["pair"][:, None].expand_as(row)
    return different(spans, row)


def parts_of_model(d) -> dict[str, Callable]:
    """Return parts of the model as functions that test a parameter's name.

    One part is added for each component of a parameter's name, such as layers.0.
    """
    names = d.parameters("before") or d.parameters("grad")
    patterns = dict(PARTS)
    for name in names:
        for component in re.findall(r"[a-z_]\w*(?:\.\d+)?(?=\.|$)", name):
            patterns[f"parameters of {component}"] = rf"(^|\.){re.escape(component)}(\.|$)"
    tests = {says: re.compile(pattern).search for says, pattern in patterns.items()}
    masks = {says: torch.tensor([bool(test(name)) for name in names]) for says, test in tests.items()}
    return {says: tests[says] for says in different(masks, torch.tensor(True))}


def picture_sets(d) -> dict[str, Callable]:
    """Return PICTURES, or {} if each row has at most one image."""
    grids = d.get("sampler_image_grid_thw", d.get("image_grid_thw", ()))
    return PICTURES if len(grids) > len(d.all_rows) else {}


def token_regions(d, ids: Tensor, drawn: Tensor, forced: Tensor) -> dict[str, Tensor]:
    """Return masks (n, S) of the tokens to which a bug may be limited.

    Args:
        ids: (n, S) token ids.
        drawn: (n, S) mask of the tokens that the policy sampled.
        forced: (n, S) mask of the tokens of tool responses. If there are none, fewer masks are returned.
    """
    prompt = torch.zeros_like(drawn)  # ids of the sampler do not include the prompt
    if ids.shape == d["input_ids"].shape:
        prompt = d["attention_mask"].bool() & ~d.completion
    image = ids == (d.about.get("image_token_id") or -1)
    regions = {"the prompt": prompt, "the text of the prompt": prompt & ~image, "the image tokens": image}
    if forced.any():
        regions |= regions_of_turns(d.is_stop(ids), image, drawn, forced)
    else:
        counted = drawn & d["completion_mask"].bool()
        for k, number in ((1, ""), (2, "2 "), (3, "3 ")):
            regions[f"the first {number}tokens"] = first(drawn, k)
            regions[f"the last {number}counted tokens"] = last(counted, k)
    return different(regions, torch.tensor(False))


def regions_of_turns(stop: Tensor, image: Tensor, drawn: Tensor, forced: Tensor) -> dict[str, Tensor]:
    """Return masks (n, S) of tokens of completions with tool calls, such as the first turn."""
    regions = {
        "the sampled tokens": drawn,
        "tool responses": forced,
        "everything after the prompt": drawn | forced,
        "the end tokens of turns": drawn & stop,
        "all stop tokens": (drawn | forced) & stop,
        "the image tokens of tool responses": forced & image,
        "the text of tool responses": forced & ~image,
    }
    for name, tokens in (("turn", drawn), ("tool response", forced)):
        number = first(tokens).cumsum(1)
        latest = number.amax(1, keepdim=True)
        regions |= {
            f"the first {name}": tokens & (number == 1),
            f"the last {name}": tokens & (number == latest),
            f"the second {name}": tokens & (number == 2),
            f"all {name}s except the first": tokens & (number > 1),
            f"all {name}s except the last": tokens & (number < latest),
        }
        for k, count in ((1, ""), (2, "2 ")):
            regions[f"the first {count}tokens of {name}s"] = first(tokens, k)
            regions[f"the last {count}tokens of {name}s"] = last(tokens, k)
    regions["the end tokens before tool responses"] = last(drawn) & stop & ~regions["the last turn"]
    begun = forced.cumsum(1) > 0
    regions["everything after the first tool response"] = begun & (drawn | forced) & ~regions["the first tool response"]
    return regions
