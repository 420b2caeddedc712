"""What a deviation has for a piece of a definition: a formula, or other rows or tokens.

Each row of a group, a micro-batch, the step or the rollout, and each token of a completion may take
what belongs to another: "the next row in its group". Mistakes that are the same in a step are one.
"""

from pathlib import Path

import torch
import yaml
from torch import Tensor
from torch.nn.functional import pad

TABLE = yaml.safe_load((Path(__file__).parent / "causes.yaml").read_text(encoding="utf-8"))


def formula(how: str, **names):
    """Compute a formula of causes.yaml."""
    return eval(how, {"torch": torch, **names})


def piece(d, change: dict, name: str, x, **names):
    """x, or what a deviation has in its place: a value, a formula of x and `names`, or a (kind,
    text) of the orders of a Dump."""
    how = change.get(name)
    if isinstance(how, str):
        return formula(how, x=x, **names)
    if not isinstance(how, tuple):
        return x if how is None else how
    order = getattr(d, how[0])[how[1]]
    return pad(x, (0, 1)).gather(1, order) if how[0] == "columns" else x[order]


def different(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The orders (..., n) that change something, each once."""
    kept = {"": torch.arange(next(iter(found.values())).shape[-1])}
    for name, order in found.items():
        if not any(torch.equal(order, other.expand_as(order)) for other in kept.values()):
            kept[name] = order
    del kept[""]
    return kept


def row_orders(d, of_rollout: bool = False) -> dict[str, Tensor]:
    """Names and orders (n,) of the step's rows, or (N,) of the rollout's: a mistake is x[order]."""
    group, row = d.get("group"), d.get("row")
    every = torch.arange(len(group) if of_rollout else len(d["input_ids"]))
    found, units, row = {}, {}, every if of_rollout or row is None else row
    if torch.equal(row.sort().values, every):  # the step is the rollout
        rollout, own = row.argsort(), every * 0 if group is None else group[row]
        units["its group"] = [rollout[own[rollout] == g] for g in own.unique()]
        units["the rollout"] = [rollout]
        found["what had its place before the shuffle"] = rollout
        found["what a second shuffle puts there"] = row
        found["what the shuffle's inverse puts there"] = rollout[rollout]
    units |= {} if of_rollout else {"its micro-batch": d.micro_batches, "the step": [every]}
    for unit, blocks in units.items():
        changes = [(f"{text} in {unit}", how, blocks) for text, how in TABLE["rows"].items()]
        if len(set(map(len, blocks))) == 1:
            whole = torch.stack(blocks)
            one = unit.split()[-1]
            changes += [(text.format(one), how, [whole]) for text, how in TABLE["blocks"].items()]
        for text, how, parts in changes:
            of = torch.cat([formula(how, x=part).flatten() for part in parts])
            found[text] = every.index_copy(0, torch.cat(blocks), of)
    return different(found)


def token_orders(d) -> dict[str, Tensor]:
    """Names and columns (n, S) from which each token takes, S: from none."""
    counted, found = d["completion_mask"].bool(), {}
    units = {
        "its row": counted | True,
        "its completion": d.completion,
        "its counted tokens": counted,
    }
    for unit, where in units.items():
        for text, how in TABLE["tokens"].items():
            columns = torch.arange(d.width).repeat(len(where), 1)
            for own, real in zip(columns, where, strict=True):
                x = real.nonzero()[:, 0]
                own[x] = formula(how, x=x, none=torch.tensor([d.width]))
            found[f"{text} in {unit}"] = columns
    return different(found)
