"""What of a step needs the model or the optimizer: log-probabilities, gradients, the update."""

import math
import re

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils import get_total_norm

from minivlmrl.batch import GroupBatch, pack
from minivlmrl.hub.family import hub_name
from minivlmrl.rows import Prompt
from minivlmrl.scale.checkpoint import load_model
from minivlmrl_audit.dump import Dump
from minivlmrl_audit.moves import first, piece, shown_as
from minivlmrl_audit.stages import Answer, shown

THROUGH_A_MODEL = 50.0  # float32's rounding after many layers, in units of what comes out


def forward(d: Dump, change: dict, folder: str, part: Tensor, grad: bool = False):
    """Compute log-probabilities and entropies (2, n, S) of the rows `part` by a folder's model.

    Returns that model too. A search computes a row once for each deviation and picture.
    """
    kind, text, *_ = change.get("pictures", ("", ""))
    apart = ("logps", "pictures") if kind == "rows" else ("logps",)
    how = {name: x for name, x in change.items() if name not in apart}
    rows = torch.arange(len(d["input_ids"]))
    images = shown(d)
    model = None
    value = torch.zeros(2, len(rows), d.width, dtype=torch.float64)
    known = {} if grad or d.known is None else d.known
    shows = rows[d.rows[text]] if kind == "rows" else rows
    for row, image in zip(part.tolist(), shows[part].tolist(), strict=True):
        if (key := (folder, row, image, str(how))) not in known:
            dtype = getattr(torch, change.get("dtype", "float64"))
            model = model or load_model(folder, dtype).requires_grad_(grad)
            with torch.set_grad_enabled(grad):
                known[key] = of_row(d, change, model, row, images[image])
        value = value.index_copy(1, rows[row : row + 1], known[key][:, None])
    return torch.stack([piece(d, change, "logps", x) for x in value]), model


def of_row(d: Dump, change: dict, model, row: int, images: list) -> Tensor:
    """Compute log-probabilities and entropies (2, S) of a row's tokens after its prompt; else 0."""
    counted = d["completion_mask"][row].bool()
    real = d["attention_mask"][row].bool() | counted
    after_prompt = d.completion[row] | counted
    attended = piece(d, change, "attended", real, at=(row,))
    # nothing predicts the first token
    scored = (attended & after_prompt & (attended.cumsum(0) > 1)).nonzero()[:, 0]
    value = torch.zeros(2, d.width, dtype=torch.float64)
    if not len(scored):
        return value
    batch = batch_of_row(d, change, model, row, images, real, after_prompt, attended)
    states = model(batch, select=attended.cumsum(0)[scored] - 2)  # that of the token before
    temperature = piece(d, change, "temperature", d.about.get("temperature", 1.0))
    log_probs = (model.lm_head(states) / temperature).log_softmax(-1)
    logps = log_probs.gather(1, d["input_ids"][row][scored][:, None])[:, 0]
    both = torch.stack([logps, -(log_probs.exp() * log_probs).sum(-1)])
    return value.index_copy(1, scored, both.double())


def batch_of_row(
    d: Dump,
    change: dict,
    model,
    row: int,
    images: list,
    real: Tensor,
    after_prompt: Tensor,
    attended: Tensor,
) -> GroupBatch:
    """Pack a row's attended tokens and its pictures, as a deviation shows and counts them.

    Args:
        images: (patches, grid) of each picture.
        real: (S,) which columns are no padding; after_prompt, attended: (S,) as well.
    """
    ids = d["input_ids"][row]
    config = model.config
    placeholders = (
        torch.isin(ids, torch.tensor([config.image_token_id, config.video_token_id])) & real
    )
    names = {"given": int((first(placeholders) & ~after_prompt).sum())}
    images = shown_as(change, images, **names)
    grids = torch.stack([torch.zeros(3).long(), *(grid for _, grid in images)])[1:]
    numbers = torch.arange(len(grids))
    names |= {"i": numbers, "count": len(numbers)}
    merge = config.vision_config.spatial_merge_size
    picture = picture_of_tokens(placeholders, grids.prod(1) // merge**2)[attended]
    ids, after_prompt = ids[attended], after_prompt[attended]
    shown = torch.isin(numbers, picture)
    placed = shown & ~piece(d, change, "as text", ~shown, **names)  # these have M-RoPE positions
    seen = shown & ~piece(d, change, "blind", ~shown, **names)  # of these the model gets patches
    patches = [piece(d, change, "pixels", images[k][0], **names | {"i": k}) for k in numbers]
    none = d.get("pixel_values", torch.zeros(0, 0))[:0]

    def patches_of(some: Tensor) -> Tensor:
        return torch.cat([none, *(patches[k] for k in numbers[some])]).to(model.lm_head.weight)

    placed_tokens, seen_tokens = (pad(some, (0, 1))[picture] for some in (placed, seen))
    as_placed = ids.where(placed_tokens, -1)
    prompt = Prompt(as_placed, patches_of(placed), grids[placed], torch.ones(len(numbers)))
    batch = pack([prompt], [[]], config)
    batch.input_ids = ids
    batch.vision_index = seen_tokens.nonzero()[:, 0]
    batch.pixel_values = patches_of(seen)
    batch.image_grid_thw = grids[seen]
    names = {"count": torch.arange(len(ids)).expand(3, -1), "after": after_prompt.long()}
    names["prompt"] = int((~after_prompt).sum())
    x = batch.position_ids
    batch.position_ids = piece(d, change, "positions", x, at=(row, attended), **names)
    return batch


def picture_of_tokens(placeholders: Tensor, sizes: Tensor) -> Tensor:
    """Number the picture of each placeholder: (S,), len(sizes) for all other tokens.

    Args:
        placeholders: (S,) which tokens are; one without a picture is text.
        sizes: (pictures,) tokens of each.
    """
    picture = torch.full(placeholders.shape, len(sizes))
    owners = torch.arange(len(sizes)).repeat_interleave(sizes)
    at = placeholders.nonzero()[: len(owners), 0]
    picture[at] = owners[: len(at)]
    return picture


def of_hidden(d: Dump) -> Tensor:
    """Find the tokens (n, S) that come from the state of one that is known not to be attended to.

    The packed run has no such state.
    """
    before = pad(d["attention_mask"][:, :-1], (1, 0), value=1)
    return (before == 0) & ("attended" in (d.ids or {}))


def logps(name: str, folder: str, d: Dump, change: dict) -> Answer:
    """Compute log-probabilities of the tokens that count, by the weights that they should be of."""
    if d.get(name) is None or not d.about.get(folder):
        return None
    weights = d.about.get(change.get("weights")) or d.about[folder]
    every = torch.arange(len(d["input_ids"]))
    part = every if d.part is None else d.part
    (value, _), _ = forward(d, change, weights, every if "logps" in change else part)
    unit = THROUGH_A_MODEL * (1 if d.about.get("dtype") == "float32" else 100)
    counted = d["completion_mask"] * ~of_hidden(d)
    return {name: ((d[name].nan_to_num() * counted)[part], (value * counted)[part], unit)}


def gradients(d: Dump, change: dict) -> Answer:
    """Compute the gradients of all micro-batches of the step, through the model."""
    has = {hub_name(name.removeprefix("module.")): x for name, x in d.parameters("grad").items()}
    slopes = d.get("logps_gradient")
    if not has or not d.about.get("model") or slopes is None or d.forward is None:
        return None
    if (d["completion_mask"] * of_hidden(d)).any():
        return None
    slopes, total = torch.stack([slopes, d.get("entropies_gradient", slopes * 0)]), {}
    ones = torch.eye(len(d.micro_batches))
    shares = piece(d, change, "micro-batch", ones.sum(0), first=ones[0], last=ones[-1])
    for number, (part, share) in enumerate(zip(d.micro_batches, shares.tolist(), strict=True)):
        grads = of_part(d, number, part, slopes)
        if change.get("clipped parts"):
            share *= clip_share(grads, d.about["optimizer"]["max_grad_norm"])
        for name, x in grads.items():
            total[name] = total.get(name, 0) + x * share
        if change.get("clipped so far"):
            share = clip_share(total, d.about["optimizer"]["max_grad_norm"])
            total = {name: x * share for name, x in total.items()}
    if "without" in change:
        lacks = (name for name in total if not has.get(name, torch.zeros(1)).any())
        lacks = "|".join(f"^{re.escape(name)}$" for name in lacks)
        without = re.compile(change["without"] or lacks or "$^")
        total = {name: x * (not without.search(name)) for name, x in total.items()}
    unit = max(x.abs().max() for x in [*total.values(), *has.values()]) * THROUGH_A_MODEL + 1e-30
    none = {name: x * 0 for name, x in (has if d.about.get("some") else total | has).items()}
    return {
        f"grad.{name}": (has.get(name, zero), total.get(name, zero), unit)
        for name, zero in sorted(none.items())
    }


def of_part(d: Dump, number: int, part: Tensor, slopes: Tensor) -> dict[str, Tensor]:
    """Compute gradients of a micro-batch; a search does so once."""
    known = {} if d.known is None else d.known
    if number not in known:
        value, model = forward(d, d.forward, d.about["model"], part, grad=True)
        if value.requires_grad:  # some row has tokens
            (value * slopes).sum().backward()
        named = model.named_parameters()
        known[number] = {name: p.grad.double() for name, p in named if p.grad is not None}
    return known[number]


def clip_share(grads: dict[str, Tensor], largest: float) -> float:
    """Compute what clipping multiplies gradients with."""
    return min(1.0, largest / (get_total_norm(grads.values()).item() + 1e-6)) if largest else 1.0


def clip(d: Dump, change: dict) -> Answer:
    """Compute the norm that is logged, and what clipping leaves of the gradients."""
    grads = d.parameters("grad")
    clipped = d.parameters("clipped")
    if not grads or not (clipped or d.get("grad_norm") is not None):
        return None
    bound = d.about.get("optimizer", {}).get("max_grad_norm") or 0.0
    length = get_total_norm(grads.values()).item()
    share = clip_share(grads, bound)
    names = {"grads": grads, "bound": bound, "length": length, "clip_share": clip_share}
    value = {name: x * share for name, x in grads.items()}
    value = piece(d, change, "clip", value, **names)
    unit = max(x.abs().max() for x in grads.values()) + 1e-30
    answer = {f"clipped.{name}": (x, value[name], unit) for name, x in clipped.items()}
    if d.get("grad_norm") is not None and not d.about.get("some"):
        after = get_total_norm(value.values()).item()
        logged = torch.tensor([piece(d, change, "norm", length, after=after)])
        answer["grad_norm"] = d["grad_norm"].flatten(), logged, 10 * length + 1e-30
    return answer


def update(d: Dump, change: dict) -> Answer:
    """Compute AdamW's change of the weights (arXiv 1711.05101, algorithm 2)."""
    o = d.about.get("optimizer", {})
    before = d.parameters("before")
    after = d.parameters("after")
    grads = d.parameters("grad" if change.get("unclipped") else "clipped") or d.parameters("grad")
    if o.get("name") != "adamw" or not before or not after or not grads:
        return None
    rate = o["learning_rate"]
    (b1, b2) = piece(d, change, "betas", o["betas"])
    answer = {}
    eps = piece(d, change, "eps", o["eps"])
    kinds = ("exp_avg", "exp_avg_sq")
    states = [{} if change.get("reset") else d.parameters(kind) for kind in kinds]
    first = piece(d, change, "first", 1 if change.get("reset") else o["step"])
    for name, w in before.items():
        g, m, v = (x.get(name, w * 0) for x in (grads, *states))
        decay = 0.0 if name in o.get("no_decay", ()) else o["weight_decay"]
        names = {"every": o["weight_decay"], "rate": rate}
        decay, value = piece(d, change, "decay", decay, **names), w
        for t in range(first, first + change.get("times", 1)):
            slope = g
            if change.get("coupled"):
                slope = g + decay * value
            else:
                value = value * (1 - rate * decay)
            m, v = b1 * m + (1 - b1) * slope, b2 * v + (1 - b2) * slope.square()
            c1, c2 = piece(d, change, "correction", (1 - b1**t, 1 - b2**t))
            root = piece(d, change, "root", (v / c2).sqrt() + eps, v=v / c2, eps=eps)
            value = value - rate * piece(d, change, "move", m / c1 / root, slope=slope)
        value = w if change.get("frozen") and re.search(change["frozen"], name) else value
        unit = (value - w).abs().max() + 2e5 * d.eps[f"before.{name}"] * w.abs() + 1e-30
        answer[f"after.{name}"] = after.get(name, w) - w, value - w, unit
    return answer


def schedule(d: Dump, change: dict) -> Answer:
    """Compute the learning rate of step t = 0, 1, ... as transformers' schedules give it."""
    s = d.about.get("schedule")
    o = d.about.get("optimizer", {})
    known = ("linear", "cosine", "constant", "constant_with_warmup")
    if not s or "learning_rate" not in o or s["type"] not in known:
        return None
    t = max(0, piece(d, change, "step", s["step"], parts=len(d.micro_batches)))
    configured = 0 if s["type"] == "constant" else s.get("warmup_steps", 0)
    warmup = piece(d, change, "warmup", configured)
    kind = change.get("type", s["type"])
    done = min(1.0, (t - warmup) / max(1, s["max_steps"] - warmup))
    falls = {"linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
    share = t / max(1, warmup) if t < warmup else falls.get(kind, 1.0)
    both = [[o["learning_rate"]], [s["learning_rate"] * share]]
    rate, should = torch.tensor(both, dtype=torch.float64)
    return {"learning_rate": (rate, should, s["learning_rate"] + 1e-30)}
