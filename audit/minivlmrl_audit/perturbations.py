"""Apply hypothetical bugs to the definition of a training step.

A deviation replaces a quantity of the definition by a formula, or by the values of other rows,
tokens or images. For example, each row may take the value of "the next row in its group". With tool
calls, a formula may apply to only some tokens, such as "the first turn". Deviations that have the
same effect on a step are listed only once.
"""

import re
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from minivlmrl_audit.formulas import first
from minivlmrl_audit.known_bugs import SCOPES
from minivlmrl_audit.units import (
    BLOCKS,
    ENDS,
    PARTS,
    PICTURES,
    REGIONS,
    ROW_SETS,
    ROWS,
    SHUFFLES,
    TOKENS,
)


class FormulaError(Exception):
    """A function of known_bugs.py or units.py is invalid; the audited step is not at fault."""


def formula(function: Callable, **names):
    """Call a function of known_bugs.py or units.py.

    Args:
        function: its parameters are some of `names`.
        names: values that the function may use, by name.

    Raises:
        RuntimeError, ValueError: the sizes or options of the step do not fit the function.
        FormulaError: the function itself is invalid.
    """
    try:
        return function(**{name: names[name] for name in parameters_of(function)})
    except (RuntimeError, ValueError):
        raise  # the sizes or options of the step do not fit, so the function is not at fault
    except Exception as error:
        code = function.__code__
        raise FormulaError(
            f"{Path(code.co_filename).name}:{code.co_firstlineno}: the formula is invalid: "
            f"{type(error).__name__}: {error}"
        ) from error


def parameters_of(function: Callable) -> tuple[str, ...]:
    """Return the names of the parameters of a Python function."""
    return function.__code__.co_varnames[: function.__code__.co_argcount]


class Change(dict):
    """A deviation from the definition of the step `d`: {name of a quantity: its replacement}."""

    def __init__(self, d, values: dict):
        super().__init__(values)
        self.d = d

    def __call__(self, name: str, x, selection=(), **names):
        """Return the quantity x, or its replacement if this deviation has one under `name`.

        A replacement is one of:
            - a value;
            - a function of x, `names`, the step and the fitted number c;
            - (kind, unit, None), which reorders x by one of the orders in the Dump;
            - (kind, unit, formula), whose formula can also use `region`. For tokens and images,
              `region` is a mask of the unit. It has the shape of x, because it is indexed by
              `selection` as x was. For a part of the model, `region` is a function that tests the
              name of a parameter.
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
        if not callable(deviation):
            return deviation
        return formula(deviation, x=x, c=self.get("c", 1.0), step=self.d, **names)

    def inside(self, use: str) -> "Change":
        """Return the deviation for one use of a quantity, such as "the baseline".

        The result is empty if this deviation is limited to another use of the same quantity. The
        uses of each quantity are listed in SCOPES of known_bugs.py.
        """
        other_uses = {*self.get("inside", ())} - {use}
        for scope in SCOPES:
            if use in scope["uses"] and not other_uses.isdisjoint(scope["uses"]):
                return Change(self.d, {})
        return self

    def picture_rows(self) -> Tensor:
        """Return the index (n,) of the row from which each row takes its images."""
        kind, unit, _ = self.get("pictures", ("", "", None))
        return self.d.rows[unit] if kind == "rows" else self.d.all_rows


def edited(x: list, flags: list, region: list, change: Callable, **names) -> tuple[list, list]:
    """Apply a formula to parts of a list, and return the new items and their flags.

    The list x is split into runs of consecutive items with equal `flags` and equal `region` values.
    The formula replaces each run inside the region, and all new items get the flag of their run.
    """
    new_items = []
    new_flags = []
    triples = zip(flags, region, x, strict=True)
    for (flag, inside), run in groupby(triples, key=lambda triple: triple[:2]):
        items = [item for _, _, item in run]
        if inside:
            items = formula(change, x=items, **names)
        new_items += items
        new_flags += [flag] * len(items)
    return new_items, new_flags


def shown_as(change: dict, pictures: list, num_given: int) -> list:
    """Return a row's images with a deviation applied. The first `num_given` are in the prompt."""
    kind, unit, text = change.get("pictures", ("", "", None))
    if kind != "pictures":
        return pictures
    count = len(pictures)
    region = formula(
        PICTURES[unit], number=torch.arange(count), num_pictures=count, num_given=num_given
    )
    return edited(pictures, [0] * count, region.tolist(), text)[0]


def different(orders: dict[str, Tensor], same: Tensor) -> dict[str, Tensor]:
    """Return the orders (..., n) or masks that differ from `same` and from all earlier entries."""
    kept = {}
    for name, order in orders.items():
        if not any(torch.equal(order, x.expand_as(order)) for x in (same, *kept.values())):
            kept[name] = order
    return kept


def row_orders(d, of_rollout: bool = False) -> dict[str, Tensor]:
    """Return wrong orders of rows as {description: order}; a bug replaces x by x[order].

    The orders index the n rows of the step or, if `of_rollout`, the N completions of the rollout.
    """
    all_rows = torch.arange(len(d["group"])) if of_rollout else d.all_rows
    row = all_rows if of_rollout else d.get("row", all_rows)
    orders = {}
    units = {}
    sorted_rows, rollout_order = row.sort()
    if torch.equal(sorted_rows, all_rows):  # the step contains the whole rollout
        group = d.get("group", all_rows * 0)[all_rows]
        units["its group"] = [rollout_order[group == number] for number in group.unique()]
        units["the rollout"] = [rollout_order]
        for text, order in SHUFFLES.items():
            orders[text] = formula(order, order=rollout_order, row=row)
    if not of_rollout:
        units["its micro-batch"] = d.micro_batches
        units["the step"] = [all_rows]
    for unit, blocks in units.items():
        orders |= ordered(ROWS, unit, blocks, all_rows)
        if len(set(map(len, blocks))) == 1:  # all blocks have the same size
            orders |= ordered(BLOCKS, unit.split()[-1], [torch.stack(blocks)], all_rows)
    return different(orders, all_rows)


def ordered(
    table: dict[str, Callable], unit: str, blocks: list[Tensor], same: Tensor, **names
) -> dict[str, Tensor]:
    """Apply each formula of a table to every block of indices, such as the rows of a group.

    Returns {description: order}. An order has the shape of `same`, which is the unchanged order.
    """
    indices = torch.cat(blocks)
    orders = {}
    for text, order in table.items():
        sources = [formula(order, x=block, **names) for block in blocks]
        orders[text.format(unit)] = same.put(indices, torch.cat(sources))
    return orders


def token_orders(d) -> dict[str, Tensor]:
    """Return wrong orders of tokens as {description: order}.

    An order (n, S) holds, for each token, the flat index of the token whose value is used instead.
    The index -1 means that the value 0 is used instead.
    """
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
        orders |= ordered(TOKENS, unit, blocks, numbers, attended=attended)
    return different(orders, numbers)


def row_sets(d) -> dict[str, Tensor]:
    """Return the sets of rows to which a bug may be limited, as {description: mask (n,)}."""
    names = dict(d)
    if d.has("group", "row"):
        group = d["group"][d["row"]]
        same = group == group[:, None]
        names["place"] = (same & (d["row"] < d["row"][:, None])).sum(1)  # position in the group
        if "rewards" in d:
            total = d["rewards"].view(len(d["group"]), -1).nansum(1)[d["row"]]
            is_other = (total - total[:, None]).abs() > 1e-6
            # number of completions of the same group with a different reward
            names["others"] = (same & is_other).sum(1)
    sets = {}
    for says, (needed, text) in ROW_SETS.items():
        if needed in names and names[needed].dim() == 1:
            rows = formula(text, **names)
            if rows.sum() > 1:  # a single row fits too many descriptions
                sets[says] = rows
    return different(sets, torch.tensor(False))


def spans(d) -> dict[str, Tensor]:
    """Return the spans of tokens over which a bug may average, as {description: spans}.

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


def rollout_sets(d) -> dict[str, Tensor]:
    """Return the sets of `row_sets` as masks (N,) over the completions of the rollout."""
    order = d.get("row", d.all_rows).argsort()
    sets = {}
    for says, rows in d.row_sets.items():
        # a set that depends on advantages is skipped, because the stage computes the advantages
        if len(order) == len(d["group"]) and ROW_SETS[says][0] != "advantages":
            sets[says] = rows[order]
    return sets


def parts_of_model(d) -> dict[str, Callable]:
    """Return parts of the model, as {description: function that tests a parameter's name}.

    The parts are listed in units.py. One more part is added for each component of a parameter's
    name, such as layers.0.
    """
    names = d.parameters("before") or d.parameters("grad")
    patterns = dict(PARTS)
    for name in names:
        for component in re.findall(r"[a-z_]\w*(?:\.\d+)?(?=\.|$)", name):
            patterns[f"parameters of {component}"] = rf"(^|\.){re.escape(component)}(\.|$)"
    regions = {}
    for says, pattern in patterns.items():
        regions[says] = torch.tensor([bool(re.search(pattern, name)) for name in names])
    parts = different(regions, torch.tensor(True))
    return {says: re.compile(patterns[says]).search for says in parts}


def picture_numbers(d) -> dict[str, Callable]:
    """Return the formulas that select images of a row, or {} if each row has at most one image."""
    grids = d.get("sampler_image_grid_thw", d.get("image_grid_thw", ()))
    return PICTURES if len(grids) > len(d.all_rows) else {}


def token_regions(d, ids: Tensor, drawn: Tensor, forced: Tensor) -> dict[str, Tensor]:
    """Return the sets of tokens to which a bug may be limited, as {description: mask (n, S)}.

    Args:
        ids: (n, S) token ids.
        drawn: (n, S) mask of the tokens that the policy sampled.
        forced: (n, S) mask of the tokens of tool responses. If there are no tool responses, fewer
            sets are returned.
    """
    table = REGIONS if forced.any() else ENDS
    prompt = torch.zeros_like(drawn)  # ids of the sampler do not include the prompt
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
