"""What of a step needs the model or the optimizer: log-probabilities, gradients, clipping, the update, the schedule."""

import math
import re

import torch
from torch import Tensor

from minivlmrl.audit.dump import Dump
from minivlmrl.audit.stages import Answer

NAMES = re.compile(r"^module\.|^model\.(?=visual\.)|^model\.language_(?=model\.)")  # transformers' in memory -> the hub's


def forward(d: Dump, change: dict, folder: str, part: Tensor, grad: bool = False):
    """Log-probabilities and entropies (2, n, S) of the rows `part` by a model folder, and the model."""
    from minivlmrl.batch import pack
    from minivlmrl.hub.checkpoint import load_model
    from minivlmrl.logprobs import plain_per_token_logps
    from minivlmrl.rows import Prompt

    dtype = getattr(torch, change.get("dtype", "float64"))
    model = load_model(folder, dtype).requires_grad_(grad)
    value = torch.zeros(2, *d["input_ids"].shape, dtype=torch.float64)
    temperature = d.about.get("temperature", 1.0)
    temperature = {"none": 1.0, "twice": temperature**2, "inverse": 1 / temperature}.get(change.get("temperature"), temperature)
    images = list(range(len(d["input_ids"])))
    images = images[1:] + images[:1] if change.get("images") == "next row" else images
    patches, grids = split_images(d)
    for row in part.tolist():
        real = d["attention_mask"][row].bool() | d["completion_mask"][row].bool()
        after = d.completion[row]
        ids, answer = d["input_ids"][row][real & ~after], d["input_ids"][row][real & after]
        if not len(answer):
            continue
        prompt = Prompt(ids, patches[images[row]].to(dtype), grids[images[row]], torch.ones(len(grids[images[row]])))
        batch = pack([prompt], [[answer]], model.config)
        if change.get("images") == "none":  # the placeholders keep their own embeddings
            batch.vision_index, batch.pixel_values = batch.vision_index[:0], batch.pixel_values[:0]
            batch.image_grid_thw = batch.image_grid_thw[:0]
        if change.get("positions") == "text":
            batch.position_ids = torch.arange(batch.position_ids.shape[1]).expand(3, -1)
        with torch.set_grad_enabled(grad):
            both = torch.cat(plain_per_token_logps(model, batch, temperature)).double()
        value = value.masked_scatter((real & after) & (torch.arange(len(images)) == row)[:, None], both)
    return value.roll({"later": 1, "earlier": -1}.get(change.get("shift"), 0), 2), model


def split_images(d: Dump) -> tuple[list[Tensor], list[Tensor]]:
    """Patches and grids of each row, by num_images (n,)."""
    grids = d.get("image_grid_thw")
    if grids is None:
        none = torch.zeros(0, 1176, dtype=torch.float64), torch.zeros(0, 3, dtype=torch.long)
        return tuple([x] * len(d["input_ids"]) for x in none)
    number = d.get("num_images")
    number = [1] * len(d["input_ids"]) if number is None else number.tolist()
    of_row = grids.split(number)
    return d["pixel_values"].split([int(grid.prod(1).sum()) for grid in of_row]), of_row


def logps(name: str, folder: str, d: Dump, change: dict) -> Answer:
    """A stage for log-probabilities that model folder `folder` should give: on tokens that count."""
    if d.get(name) is None or not d.about.get(folder):
        return None
    with torch.no_grad():
        (value, _), _ = forward(d, change, d.about[folder], torch.arange(len(d["input_ids"])))
    own = d["completion_mask"].double()
    return {name: (d[name].nan_to_num() * own, value * own, 50.0 if d.about.get("dtype") == "float32" else 5e3)}


def gradients(d: Dump, change: dict) -> Answer:
    """What the optimizer step has accumulated: the gradient of all micro-batches, through the model."""
    has = {NAMES.sub("", name): x for name, x in d.parameters("grad").items()}
    if not has or not d.about.get("model") or d.get("logps_gradient") is None:
        return None
    parts = {"last": d.micro_batches[-1:], "first": d.micro_batches[:1]}.get(change.get("parts"), d.micro_batches)
    total: dict[str, Tensor] = {}
    for part in parts:
        value, model = forward(d, d.forward | change, d.about["model"], part, grad=True)
        slopes = [d["logps_gradient"], d["logps_gradient"] * 0 if d.get("entropies_gradient") is None else d["entropies_gradient"]]
        if value.requires_grad:  # some row has tokens
            (value * torch.stack(slopes)).sum().backward()
        own = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
        share = 1.0
        if change.get("clipped parts"):
            share = clip_share(own, d.about["optimizer"]["max_grad_norm"])
        for name, x in own.items():
            total[name] = total.get(name, 0) + x * share
    if "without" in change:
        total = {name: x * (not re.search(change["without"], name)) for name, x in total.items()}
    if total and not total.keys() & has.keys():
        raise ValueError(f"no gradient is of a parameter of {d.about['model']}: {min(has)}")
    unit = max((x.abs().max() for x in [*total.values(), *has.values()])) * 50 + 1e-30  # through a model in float32
    names = total.keys() | has.keys() if d.about["optimizer"].get("whole", True) else has.keys()
    zero = {name: 0 * (total[name] if name in total else has[name]) for name in names}
    return {f"grad.{name}": (has.get(name, none), total.get(name, none), unit) for name, none in sorted(zero.items())}


def clip_share(grads: dict[str, Tensor], largest: float) -> float:
    """What clipping multiplies gradients with."""
    return min(1.0, largest / (norm(grads) + 1e-6)) if largest else 1.0


def norm(grads: dict[str, Tensor]) -> float:
    return math.sqrt(sum(x.square().sum().item() for x in grads.values()))


def clip(d: Dump, change: dict) -> Answer:
    """The norm that is logged, and what clipping leaves of the gradients."""
    grads, clipped, optimizer = d.parameters("grad"), d.parameters("clipped"), d.about.get("optimizer", {})
    if not grads or not (clipped or d.get("grad_norm") is not None):
        return None
    bound, how = optimizer.get("max_grad_norm") or 0.0, change.get("clip", "norm")
    length, unit = norm(grads), max(x.abs().max() for x in grads.values()) + 1e-30
    share = {"norm": clip_share(grads, bound), "none": 1.0, "always": bound / (length + 1e-6)}.get(how, 1.0)
    value = {name: x * share for name, x in grads.items()}
    if how == "each":
        value = {name: x * clip_share({name: x}, bound) for name, x in grads.items()}
    if how == "value":
        value = {name: x.clamp(-bound, bound) for name, x in grads.items()}
    answer = {f"clipped.{name}": (x, value[name], unit) for name, x in clipped.items()}
    if d.get("grad_norm") is not None and optimizer.get("whole", True):
        logged = {"clipped": norm(value), "own": length}[change.get("logged", "own")]
        answer["grad_norm"] = d["grad_norm"].flatten(), torch.tensor([logged]), 10 * length + 1e-30
    return answer


def update(d: Dump, change: dict) -> Answer:
    """AdamW's update of the weights (Loshchilov and Hutter, arXiv 1711.05101) from clipped gradients and its state."""
    o, before, after = d.about.get("optimizer", {}), d.parameters("before"), d.parameters("after")
    grads = d.parameters("grad" if change.get("unclipped") else "clipped") or d.parameters("grad")
    if o.get("name") != "adamw" or not before or not after or not grads:
        return None
    rate, (b1, b2) = o["learning_rate"] * change.get("rate", 1.0), o["betas"][:: -1 if change.get("betas") else 1]
    m0, v0, answer = d.parameters("exp_avg"), d.parameters("exp_avg_sq"), {}
    for name, w in before.items():
        g = grads.get(name, w * 0)
        m, v, step = m0.get(name, w * 0), v0.get(name, w * 0), o["step"]
        if change.get("reset"):
            m, v, step = m * 0, v * 0, 1
        plain = (name in o.get("no_decay", ())) != (change.get("decay") == "exchanged")
        decay = o["weight_decay"] * {"none": 0, "all": 1}.get(change.get("decay"), 0 if plain else 1)
        value = w
        for number in range(change.get("times", 1)):
            if change.get("coupled"):
                value, slope = value, g + decay * value
            else:
                value, slope = value * (1 - rate * decay), g
            m, v = b1 * m + (1 - b1) * slope, b2 * v + (1 - b2) * slope.square()
            t = step + number
            c1, c2 = (1, 1) if change.get("uncorrected") else (1 - b1**t, 1 - b2**t)
            root = (v / c2 + o["eps"]).sqrt() if change.get("inside") else (v / c2).sqrt() + o["eps"]
            value = value - rate * {"sgd": slope, "sign": slope.sign()}.get(change.get("rule"), m / c1 / root)
        if change.get("frozen") and re.search(change["frozen"], name):
            value = w
        unit = (value - w).abs().max() + 2e5 * d.eps[f"after.{name}"] * w.abs() + 1e-30
        answer[f"after.{name}"] = after.get(name, w), value, unit
    return answer


def schedule(d: Dump, change: dict) -> Answer:
    """The learning rate of step t = 0, 1, ... as transformers' schedules give it."""
    s, o = d.about.get("schedule"), d.about.get("optimizer", {})
    if not s or "learning_rate" not in o or s["type"] not in ("linear", "cosine", "constant", "constant_with_warmup"):
        return None
    t = max(0, s["step"] * change.get("steps", 1) + change.get("late", 0))
    t = s["step"] * len(d.micro_batches) if change.get("micro") else t
    warmup, last = 0 if change.get("no warmup") else s.get("warmup_steps", 0), s["max_steps"]
    warmup = 0 if s["type"] == "constant" else warmup
    done = (t - warmup) / max(1, last - warmup)
    falls = {"linear": max(0.0, 1 - done), "cosine": max(0.0, 0.5 * (1 + math.cos(math.pi * min(1, done))))}
    share = t / max(1, warmup) if t < warmup else falls.get(change.get("type", s["type"]), 1.0)
    value = torch.tensor([s["learning_rate"] * share], dtype=torch.float64)
    return {"learning_rate": (torch.tensor([o["learning_rate"]], dtype=torch.float64), value, s["learning_rate"])}
