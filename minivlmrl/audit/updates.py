"""What of a step needs the model or the optimizer: log-probabilities, gradients, clipping, the
update, the schedule."""

import math
import re

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from minivlmrl.audit.dump import Dump
from minivlmrl.audit.stages import Answer
from minivlmrl.batch import pack
from minivlmrl.hub.family import hub_name
from minivlmrl.rows import Prompt
from minivlmrl.scale.checkpoint import load_model

THROUGH_A_MODEL = 50.0  # float32's rounding after many layers, in units of what comes out


def forward(d: Dump, change: dict, folder: str, part: Tensor, grad: bool = False):
    """Log-probabilities and entropies (2, n, S) of the rows `part`; and the model of a folder."""
    dtype, given = getattr(torch, change.get("dtype", "float64")), d.about.get("temperature", 1.0)
    other = {"none": 1.0, "twice": given**2, "inverse": 1 / given}
    model, n = load_model(folder, dtype).requires_grad_(grad), len(d["input_ids"])
    value, (patches, grids) = torch.zeros(2, n, d.width, dtype=torch.float64), pictures(d)
    counted, config = d["completion_mask"].bool(), model.config
    real = d["attention_mask"].bool() | counted
    # nothing predicts the first token
    scored = real & (d.completion | counted) & (real.cumsum(1) > 1)
    for row in part[scored[part].any(1)].tolist():
        image = (row + 1) % n if change.get("images") == "next row" else row
        at, ids = real[row].cumsum(0)[scored[row]] - 1, d["input_ids"][row][real[row]]
        # up to its last picture; a placeholder that was sampled is text
        holders = torch.isin(ids, torch.tensor([config.image_token_id, config.video_token_id]))
        needed = grids[image].prod(1).sum() // config.vision_config.spatial_merge_size**2
        end = max(int(at[0]), int((holders.cumsum(0) < needed).sum()) + 1)
        given_images = patches[image].to(dtype), grids[image], torch.ones(len(grids[image]))
        said = [ids[end:]] if end < len(ids) else []
        batch = pack([Prompt(ids[:end], *given_images)], [said], config)
        if change.get("images") == "none":  # the placeholders keep their own embeddings
            for name in ("vision_index", "pixel_values", "image_grid_thw"):
                setattr(batch, name, getattr(batch, name)[:0])
        if change.get("positions") == "text":
            batch.position_ids = torch.arange(batch.position_ids.shape[1]).expand(3, -1)
        with torch.set_grad_enabled(grad):
            logits = model.lm_head(model(batch, select=at - 1))
            log_probs = (logits / other.get(change.get("temperature"), given)).log_softmax(-1)
            logps = log_probs.gather(1, ids[at][:, None])[:, 0]
            both = torch.stack([logps, -(log_probs.exp() * log_probs).sum(-1)])
        value = value.masked_scatter(scored & (torch.arange(n) == row)[:, None], both.double())
    return value.roll({"later": 1, "earlier": -1}.get(change.get("shift"), 0), 2), model


def pictures(d: Dump) -> tuple[list[Tensor], list[Tensor]]:
    """Patches and grids of each row; num_images (n,) are its pictures, by default equally many."""
    grids, n = d.get("image_grid_thw", torch.zeros(0, 3, dtype=torch.long)), len(d["input_ids"])
    number = d.get("num_images", torch.full((n,), len(grids) // n)).tolist()
    patches, of_row = d.get("pixel_values", torch.zeros(0, 0)), grids.split(number)
    return patches.split([int(grid.prod(1).sum()) for grid in of_row]), of_row


def logps(name: str, folder: str, d: Dump, change: dict) -> Answer:
    """Log-probabilities of the tokens that count, by the weights that they should be of."""
    if d.get(name) is None or not d.about.get(folder):
        return None
    weights = d.about.get(change.get("weights")) or d.about[folder]
    (value, _), _ = forward(d, change, weights, torch.arange(len(d["input_ids"])))
    unit = THROUGH_A_MODEL * (1 if d.about.get("dtype") == "float32" else 100)
    own = d["completion_mask"].double()
    return {name: (d[name].nan_to_num() * own, value * own, unit)}


def gradients(d: Dump, change: dict) -> Answer:
    """What the optimizer step has accumulated, through the model: all micro-batches' gradients."""
    has = {hub_name(name.removeprefix("module.")): x for name, x in d.parameters("grad").items()}
    slopes = d.get("logps_gradient")
    if not has or not d.about.get("model") or slopes is None or d.forward is None:
        return None
    slopes, total = torch.stack([slopes, d.get("entropies_gradient", slopes * 0)]), {}
    some = {"last": d.micro_batches[-1:], "first": d.micro_batches[:1]}
    for part in some.get(change.get("parts"), d.micro_batches):
        value, model = forward(d, d.forward | change, d.about["model"], part, grad=True)
        if value.requires_grad:  # some row has tokens
            (value * slopes).sum().backward()
        own = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
        share = 1.0
        if change.get("clipped parts"):
            share = clip_share(own, d.about["optimizer"]["max_grad_norm"])
        for name, x in own.items():
            total[name] = total.get(name, 0) + x * share
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


def clip_share(grads: dict[str, Tensor], largest: float) -> float:
    """What clipping multiplies gradients with."""
    return min(1.0, largest / (get_total_norm(grads.values()).item() + 1e-6)) if largest else 1.0


def clip(d: Dump, change: dict) -> Answer:
    """The norm that is logged, and what clipping leaves of the gradients."""
    grads, clipped, how = d.parameters("grad"), d.parameters("clipped"), change.get("clip", "norm")
    if not grads or not (clipped or d.get("grad_norm") is not None):
        return None
    bound = d.about.get("optimizer", {}).get("max_grad_norm") or 0.0
    length = get_total_norm(grads.values()).item()
    share = {"norm": clip_share(grads, bound), "always": bound / (length + 1e-6)}.get(how, 1.0)
    value = {name: x * share for name, x in grads.items()}
    if how == "each":
        value = {name: x * clip_share({name: x}, bound) for name, x in grads.items()}
    if how == "value":
        value = {name: x.clamp(-bound, bound) for name, x in grads.items()}
    unit = max(x.abs().max() for x in grads.values()) + 1e-30
    answer = {f"clipped.{name}": (x, value[name], unit) for name, x in clipped.items()}
    if d.get("grad_norm") is not None and not d.about.get("some"):
        after = get_total_norm(value.values()).item()
        logged = torch.tensor([after if change.get("logged") == "clipped" else length])
        answer["grad_norm"] = d["grad_norm"].flatten(), logged, 10 * length + 1e-30
    return answer


def update(d: Dump, change: dict) -> Answer:
    """AdamW's change of the weights (arXiv 1711.05101, algorithm 2) from clipped gradients and its
    state."""
    o, before, after = d.about.get("optimizer", {}), d.parameters("before"), d.parameters("after")
    grads = d.parameters("grad" if change.get("unclipped") else "clipped") or d.parameters("grad")
    if o.get("name") != "adamw" or not before or not after or not grads:
        return None
    rate, (b1, b2), answer = o["learning_rate"], change.get("betas", o["betas"]), {}
    kinds = ("exp_avg", "exp_avg_sq")
    states = [{} if change.get("reset") else d.parameters(kind) for kind in kinds]
    for name, w in before.items():
        g, m, v = (x.get(name, w * 0) for x in (grads, *states))
        plain = (name in o.get("no_decay", ())) != (change.get("decay") == "exchanged")
        decay = {"none": 0, "all": 1}.get(change.get("decay"), 0 if plain else 1)
        decay *= o["weight_decay"]
        value, first, eps = w, 1 if change.get("reset") else o["step"], change.get("eps", o["eps"])
        for t in range(first, first + change.get("times", 1)):
            slope = g
            if change.get("coupled"):
                slope = g + decay * value
            else:
                value = value * (1 - rate * decay)
            m, v = b1 * m + (1 - b1) * slope, b2 * v + (1 - b2) * slope.square()
            c1, c2 = (1, 1) if change.get("uncorrected") else (1 - b1**t, 1 - b2**t)
            root = (v / c2 + eps).sqrt() if change.get("inside") else (v / c2).sqrt() + eps
            rules = {"sgd": slope, "sign": slope.sign()}
            value = value - rate * rules.get(change.get("rule"), m / c1 / root)
        value = w if change.get("frozen") and re.search(change["frozen"], name) else value
        unit = (value - w).abs().max() + 2e5 * d.eps[f"before.{name}"] * w.abs() + 1e-30
        answer[f"after.{name}"] = after.get(name, w) - w, value - w, unit
    return answer


def schedule(d: Dump, change: dict) -> Answer:
    """The learning rate of step t = 0, 1, ... as transformers' schedules give it."""
    s, o = d.about.get("schedule"), d.about.get("optimizer", {})
    known = ("linear", "cosine", "constant", "constant_with_warmup")
    if not s or "learning_rate" not in o or s["type"] not in known:
        return None
    times = len(d.micro_batches) if change.get("micro") else change.get("steps", 1)
    t = max(0, s["step"] * times + change.get("late", 0))
    warmup = 0 if change.get("no warmup") or s["type"] == "constant" else s.get("warmup_steps", 0)
    done = min(1.0, (t - warmup) / max(1, s["max_steps"] - warmup))
    falls = {"linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
    share = t / max(1, warmup) if t < warmup else falls.get(change.get("type", s["type"]), 1.0)
    both = [[o["learning_rate"]], [s["learning_rate"] * share]]
    rate, should = torch.tensor(both, dtype=torch.float64)
    return {"learning_rate": (rate, should, s["learning_rate"] + 1e-30)}
