"""What a deviation has for a piece of a definition: a formula, or other rows, tokens or pictures.

Each row of a group, a micro-batch, the step or the rollout, and each token of a completion may take
what belongs to another: "the next row in its group". Where tools answer, a formula may be for some
tokens alone: "the first turn". Mistakes that are the same in a step are one.
"""

from itertools import groupby
from pathlib import Path

import torch
import yaml
from torch import Tensor
from torch.nn.functional import pad

TABLE = yaml.safe_load((Path(__file__).parent / "causes.yaml").read_text(encoding="utf-8"))


class FormulaError(Exception):
    """What the text of a cause did: causes.yaml has to be repaired, not the step."""


def formula(how: str, **names):
    """Compute a formula of causes.yaml."""
    try:
        return eval(how, {"torch": torch, **names})
    except Exception as error:
        raise FormulaError(f"causes.yaml: {how!r}: {type(error).__name__} {error}") from error


def piece(d, change: dict, name: str, x, at=(), **names):
    """Return x, or what a deviation has instead: a value; a formula of x and `names`; a (kind,
    text) of the orders of a Dump; or a (kind, text, formula) of some tokens or pictures,
    `region`, of which x is `at`."""
    how = change.get(name)
    if isinstance(how, str):
        return formula(how, x=x, **names)
    if not isinstance(how, tuple):
        return x if how is None else how
    kind, text, *of = how
    if of:
        shows = kind == "pictures" and TABLE[kind][text]
        region = formula(shows, **names) if shows else getattr(d, kind)[text]
        for index in at:
            region = region[index]
        return formula(*of, x=x, region=region, **names)
    order = getattr(d, kind)[text]
    return pad(x, (0, 1)).gather(1, order) if kind == "columns" else x[order]


def edited(x: list, flags: list, region: list, how: str, **names) -> tuple[list, list]:
    """Apply a formula to the runs of a list in the region, of one flag each; and to the flags."""
    result = [], []
    for (flag, inside), run in groupby(zip(flags, region, x, strict=True), lambda one: one[:2]):
        part = [one for *_, one in run]
        part = formula(how, x=part, **names) if inside else part
        result[0].extend(part)
        result[1].extend([flag] * len(part))
    return result


def shown_as(change: dict, pictures: list, given: int) -> list:
    """Edit a row's pictures, `given` of them in its prompt, as a deviation has them."""
    kind, text, *how = change.get("pictures", ("", ""))
    if kind != "pictures":
        return pictures
    names = {"i": torch.arange(len(pictures)), "count": len(pictures), "given": given}
    region = formula(TABLE["pictures"][text], **names).tolist()
    return edited(pictures, [0] * len(region), region, *how)[0]


def different(orders: dict[str, Tensor], same: Tensor) -> dict[str, Tensor]:
    """Find orders (..., n) or regions that change something, each once; `same` does not."""
    kept = {"": same}
    for name, order in orders.items():
        if not any(torch.equal(order, other.expand_as(order)) for other in kept.values()):
            kept[name] = order
    del kept[""]
    return kept


def row_orders(d, of_rollout: bool = False) -> dict[str, Tensor]:
    """Name orders (n,) of the step's rows, or (N,) of the rollout's: a mistake is x[order]."""
    group = d.get("group")
    row = d.get("row")
    every = torch.arange(len(group) if of_rollout else len(d["input_ids"]))
    orders, units, row = {}, {}, every if of_rollout or row is None else row
    if torch.equal(row.sort().values, every):  # the step is the rollout
        rollout = row.argsort()
        groups = every * 0 if group is None else group[row]
        units["its group"] = [rollout[groups[rollout] == g] for g in groups.unique()]
        units["the rollout"] = [rollout]
        orders["what had its place before the shuffle"] = rollout
        orders["what a second shuffle puts there"] = row
        orders["what the shuffle's inverse puts there"] = rollout[rollout]
    units |= {} if of_rollout else {"its micro-batch": d.micro_batches, "the step": [every]}
    for unit, blocks in units.items():
        changes = [(f"{text} in {unit}", how, blocks) for text, how in TABLE["rows"].items()]
        if len(set(map(len, blocks))) == 1:
            whole = torch.stack(blocks)
            one = unit.split()[-1]
            changes += [(text.format(one), how, [whole]) for text, how in TABLE["blocks"].items()]
        for text, how, parts in changes:
            of = torch.cat([formula(how, x=part).flatten() for part in parts])
            orders[text] = every.index_copy(0, torch.cat(blocks), of)
    return different(orders, every)


def token_orders(d) -> dict[str, Tensor]:
    """Name columns (n, S) from which each token takes, S: from none."""
    counted = d["completion_mask"].bool()
    orders = {}
    units = {
        "its row": counted | True,
        "its completion": d.completion,
        "its counted tokens": counted,
    }
    for unit, where in units.items():
        for text, how in TABLE["tokens"].items():
            columns = torch.arange(d.width).repeat(len(where), 1)
            for row, real in zip(columns, where, strict=True):
                x = real.nonzero()[:, 0]
                row[x] = formula(how, x=x, none=torch.tensor([d.width]))
            orders[f"{text} in {unit}"] = columns
    return different(orders, torch.arange(d.width))


def token_regions(d, ids: Tensor, drawn: Tensor, forced: Tensor, table="regions") -> dict:
    """Name tokens (n, S) of which a mistake may be; none where no tool answered."""
    names = {"drawn": drawn, "forced": forced, "first": first}
    names["last"] = lambda x, k=1: first(x.flip(1), k).flip(1)
    names |= {"turn": first(drawn).cumsum(1), "answer": first(forced).cumsum(1)}
    names["stop"] = torch.isin(ids, torch.tensor(d.about.get("stop_token_ids") or []))
    names["image"] = ids == d.about.get("image_token_id", -1)
    regions = {text: formula(how, **names) for text, how in TABLE[table].items()}
    return different(regions, torch.tensor(False)) if forced.any() else {}


def first(x: Tensor, k: int = 1) -> Tensor:
    """Mark the first k of each run of a mask (..., S)."""
    begin = x & ~pad(x, (1, -1))
    return x & torch.stack([pad(begin, (i, -i)) for i in range(min(k, x.shape[-1]))]).any(0)
