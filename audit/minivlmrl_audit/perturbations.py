"""What a deviation has for a piece of a definition: a formula, or other rows, tokens or pictures.

Each row of a group, a micro-batch, the step or the rollout, and each token of a completion may take
what belongs to another: "the next row in its group". Where tools answer, a formula may be for some
tokens alone: "the first turn". Mistakes that are the same in a step are one.
"""

import math  # noqa: F401 (formulas name it)
import re
from collections.abc import Callable
from dataclasses import replace  # noqa: F401
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils import get_total_norm

from minivlmrl_audit.minivlmrl_api import (
    importance_ratio,  # noqa: F401
    kept_tokens,  # noqa: F401
    kl_term,  # noqa: F401
    parse_yaml,
)

TABLE = {}  # of causes, of units, and of the names of a step's tensors
for name in ("known_bugs.yaml", "units.yaml", "step.yaml"):
    TABLE |= parse_yaml((Path(__file__).parent / name).read_bytes())


class FormulaError(Exception):
    """What the text of a cause did: known_bugs.yaml has to be repaired, not the step."""


def formula(text: str, **names):
    """Compute a formula of known_bugs.yaml: Python, of what this file knows and of these names."""
    try:
        return eval(text, globals() | names)
    except (RuntimeError, ValueError):
        raise  # sizes or options that do not fit: the step's, not the table's
    except Exception as error:
        raise FormulaError(f"known_bugs.yaml: {text!r}: {type(error).__name__} {error}") from error


class Change(dict):
    """A deviation of the step d: what is in the place of named pieces of a definition."""

    def __init__(self, d, values: dict):
        super().__init__(values)
        self.d = d

    def __call__(self, name: str, x, selection=(), **names):
        """Return the piece x of a definition, or what the deviation has in its place.

        That is a value; or a formula of x, `names` and the step; or (kind, unit, None), one of the
        orders of a Dump in which x is taken; or (kind, unit, formula), which also knows `region`:
        the tokens or pictures of the unit, at the indices `selection` of which x is, or tells by a
        parameter's name whether it is of a part.
        """
        if name not in self:
            return x
        deviation = self[name]
        if isinstance(deviation, tuple):
            kind, unit, deviation = deviation
            region = getattr(self.d, kind)[unit]
            if deviation is None:
                return pad(x.flatten(), (0, 1))[region] if kind == "columns" else x[region]
            if kind == "pictures":
                region = formula(region, **names)
            names["region"] = region[selection] if selection else region
        if not isinstance(deviation, str):
            return deviation
        return formula(deviation, x=x, c=self.get("c", 1.0), step=self.d, **names)

    def inside(self, use: str) -> "Change":
        """Return what deviates in one use of a quantity: all, but where it is of another use.

        Uses are those of known_bugs.yaml, in lists of which one excludes the others.
        """
        other_uses = {*self.get("inside", ())} - {use}
        for scope in TABLE["scopes"]:
            if use in scope["uses"] and not other_uses.isdisjoint(scope["uses"]):
                return Change(self.d, {})
        return self

    def picture_rows(self) -> Tensor:
        """Name the row (n,) whose pictures each row shows."""
        kind, unit, _ = self.get("pictures", ("", "", None))
        return self.d.rows[unit] if kind == "rows" else self.d.all_rows


def edited(x: list, flags: list, region: list, text: str, **names) -> tuple[list, list]:
    """Apply a formula to the runs of a list in the region, of one flag each; and to the flags."""
    new_items = []
    new_flags = []
    triples = zip(flags, region, x, strict=True)
    for (flag, inside), run in groupby(triples, key=lambda triple: triple[:2]):
        items = [item for _, _, item in run]
        if inside:
            items = formula(text, x=items, **names)
        new_items += items
        new_flags += [flag] * len(items)
    return new_items, new_flags


def shown_as(change: dict, pictures: list, num_given: int) -> list:
    """Edit a row's pictures, `num_given` of them in its prompt, as a deviation has them."""
    kind, unit, text = change.get("pictures", ("", "", None))
    if kind != "pictures":
        return pictures
    count = len(pictures)
    region = formula(
        TABLE["pictures"][unit], number=torch.arange(count), num_pictures=count, num_given=num_given
    )
    return edited(pictures, [0] * count, region.tolist(), text)[0]


def rounded(x: Tensor, theirs: Tensor, dtype: torch.dtype) -> Tensor:
    """Round x to a type, to theirs where that is as near, as where x is between two numbers."""
    unit = torch.finfo(dtype).eps * x.abs()
    is_rounded = theirs == theirs.to(dtype)
    return theirs.where(is_rounded & ((theirs - x).abs() <= 0.501 * unit), x.to(dtype).double())


def between(starts: Tensor, ends: Tensor) -> Tensor:
    """Mark (n, S) what lies from each start on up to the next end, which is not marked."""
    num_started = starts.cumsum(1)
    num_ended = (num_started * ends).cummax(1).values
    return num_started > num_ended


def different(orders: dict[str, Tensor], same: Tensor) -> dict[str, Tensor]:
    """Find orders (..., n) or regions that change something, each once; `same` does not."""
    kept = {}
    for name, order in orders.items():
        if not any(torch.equal(order, x.expand_as(order)) for x in (same, *kept.values())):
            kept[name] = order
    return kept


def row_orders(d, of_rollout: bool = False) -> dict[str, Tensor]:
    """Name orders (n,) of the step's rows, or (N,) of the rollout's: a mistake is x[order]."""
    all_rows = torch.arange(len(d["group"])) if of_rollout else d.all_rows
    row = all_rows if of_rollout else d.get("row", all_rows)
    orders = {}
    units = {}
    sorted_rows, rollout_order = row.sort()
    if torch.equal(sorted_rows, all_rows):  # the step is the rollout
        group = d.get("group", all_rows * 0)[all_rows]
        units["its group"] = [rollout_order[group == number] for number in group.unique()]
        units["the rollout"] = [rollout_order]
        for text, order in TABLE["shuffles"].items():
            orders[text] = formula(order, order=rollout_order, row=row)
    if not of_rollout:
        units["its micro-batch"] = d.micro_batches
        units["the step"] = [all_rows]
    for unit, blocks in units.items():
        orders |= ordered("rows", unit, blocks, all_rows)
        if len(set(map(len, blocks))) == 1:  # of one size
            orders |= ordered("blocks", unit.split()[-1], [torch.stack(blocks)], all_rows)
    return different(orders, all_rows)


def ordered(
    table: str, unit: str, blocks: list[Tensor], same: Tensor, **names
) -> dict[str, Tensor]:
    """Name orders like `same` in which each block of indices, such as a group, is ordered alike."""
    indices = torch.cat(blocks)
    orders = {}
    for text, order in TABLE[table].items():
        sources = [formula(order, x=block, **names) for block in blocks]
        orders[text.format(unit)] = same.put(indices, torch.cat(sources))
    return orders


def token_orders(d) -> dict[str, Tensor]:
    """Number the token (n, S) of the step from which each takes; -1: from none."""
    counted_mask = d["completion_mask"].bool()
    numbers = torch.arange(counted_mask.numel()).view_as(counted_mask)
    units = {
        "its row": torch.ones_like(counted_mask),
        "its completion": d.completion,
        "its counted tokens": counted_mask,
    }
    attended = d["attention_mask"].bool().flatten()
    orders = {}
    for unit, mask in units.items():
        blocks = [numbers[row][mask[row]] for row in d.all_rows]
        orders |= ordered("tokens", unit, blocks, numbers, attended=attended)
    return different(orders, numbers)


def row_sets(d) -> dict[str, Tensor]:
    """Name rows (n,) to which a mistake may be confined."""
    names = dict(d)
    if d.has("group", "row"):
        group = d["group"][d["row"]]
        same = group == group[:, None]
        names["place"] = (same & (d["row"] < d["row"][:, None])).sum(1)  # in its group
        if "rewards" in d:
            total = d["rewards"].view(len(d["group"]), -1).nansum(1)[d["row"]]
            is_other = (total - total[:, None]).abs() > 1e-6
            names["others"] = (same & is_other).sum(1)  # of its group, with another reward
    sets = {}
    for says, (needed, text) in TABLE["row sets"].items():
        if needed in names and names[needed].dim() == 1:
            rows = formula(text, **names)
            if rows.sum() > 1:  # one row is in many sets
                sets[says] = rows
    return different(sets, torch.tensor(False))


def spans(d) -> dict[str, Tensor]:
    """Number the spans (n, S) of tokens of which something may be the mean."""
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


def clipped(
    gradients: dict[str, Tensor], max_norm: float | None, norm: float | None = None
) -> dict[str, Tensor]:
    """Clip gradients by their norm, or by another one."""
    if norm is None:
        norm = get_total_norm(gradients.values()).item()
    share = min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0
    return {name: x * share for name, x in gradients.items()}


def total_by(x: Tensor, span: Tensor) -> Tensor:
    """Add up x over the tokens of each span, all of one shape."""
    totals = x.new_zeros(int(span.max()) + 1)
    return totals.index_add(0, span.flatten(), x.flatten())[span]


def rollout_sets(d) -> dict[str, Tensor]:
    """Name completions (N,) of the rollout as `row_sets` names rows."""
    order = d.get("row", d.all_rows).argsort()
    sets = {}
    for says, rows in d.row_sets.items():
        # advantages are made of rewards
        if len(order) == len(d["group"]) and TABLE["row sets"][says][0] != "advantages":
            sets[says] = rows[order]
    return sets


def parts_of_model(d) -> dict[str, Callable]:
    """Name parts of the model, as functions that tell a parameter's name: as names are made."""
    names = d.parameters("before") or d.parameters("grad")
    patterns = dict(TABLE["parts"])
    for name in names:
        for component in re.findall(r"[a-z_]\w*(?:\.\d+)?(?=\.|$)", name):
            patterns[f"parameters of {component}"] = rf"(^|\.){re.escape(component)}(\.|$)"
    regions = {}
    for says, pattern in patterns.items():
        regions[says] = torch.tensor([bool(re.search(pattern, name)) for name in names])
    parts = different(regions, torch.tensor(True))
    return {says: re.compile(patterns[says]).search for says in parts}


def picture_numbers(d) -> dict[str, str]:
    """Name pictures of a row by their number; none where a row has but one."""
    grids = d.get("sampler_image_grid_thw", d.get("image_grid_thw", ()))
    return TABLE["pictures"] if len(grids) > len(d.all_rows) else {}


def token_regions(d, ids: Tensor, drawn: Tensor, forced: Tensor) -> dict[str, Tensor]:
    """Name tokens (n, S) of which a mistake may be; few where no tool answered."""
    table = TABLE["regions"] if forced.any() else TABLE["ends"]
    prompt = torch.zeros_like(drawn)  # of what the sampler had there is none
    if ids.shape == d["input_ids"].shape:
        prompt = d["attention_mask"].bool() & ~d.completion
    names = {
        "drawn": drawn,
        "forced": forced,
        "turn": first(drawn).cumsum(1),
        "answer": first(forced).cumsum(1),
        "stop": d.is_stop(ids),
        "image": ids == (d.about.get("image_token_id") or -1),
        "counted": d["completion_mask"].bool(),
        "prompt": prompt,
    }
    regions = {text: formula(tokens, **names) for text, tokens in table.items()}
    return different(regions, torch.tensor(False))


def first(x: Tensor, k: int = 1) -> Tensor:
    """Mark the first k of each run of a mask (..., S)."""
    count = x.cumsum(-1)
    earlier_runs = (count * ~x).cummax(-1).values
    return x & (count - earlier_runs <= k)


def last(x: Tensor, k: int = 1) -> Tensor:
    """Mark the last k of each run of a mask (n, S)."""
    return first(x.flip(1), k).flip(1)
