"""Recompute log-probs, gradients, AdamW update and learning rate in a recorded step.

Model code is imported inside functions, because it needs Pillow and tokenizers.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils import get_total_norm
from torch.optim import Adam

from minivlmrl.extras.parity.change import Change
from minivlmrl.extras.parity.formulas import clipped
from minivlmrl.extras.parity.stages import Answer, shown
from minivlmrl.extras.parity.step import Dump

if TYPE_CHECKING:
    from minivlmrl.model.packing import GroupBatch

THROUGH_A_MODEL = 50.0  # tolerance factor for float32 model outputs
HALF = 100.0  # further tolerance factor for bfloat16, float16 or an unknown dtype
# values that simulated bugs change without a new forward pass
AFTER_FORWARD = {"logps", "mode"}


def forward(d: Dump, change: Change, folder: str, part: Tensor, grad: bool = False) -> tuple[Tensor, Any]:
    """Compute log-probs for the rows in `part` with the model in `folder`.

    Returns:
        (n, S) log-probs, 0 for other rows; and the loaded model, or None if all log-probs were cached.
    """
    deviations = str({name: value for name, value in change.items() if name not in AFTER_FORWARD})
    images = shown(d)
    attended = change("attended", d["attention_mask"].bool() | d["completion_mask"].bool())
    model = None
    cache = {} if grad else d.cache
    value = torch.zeros(len(d.all_rows), d.width, dtype=torch.float64)
    for row, picture_row in zip(part.tolist(), change("picture rows", d.all_rows)[part], strict=True):
        d.check_time()
        key = (folder, row, deviations)
        if key not in cache:
            if model is None:
                from minivlmrl.model.checkpoint import load_model

                model = load_model(folder, torch.float64).requires_grad_(grad)
            cache[key] = row_logps(d, change, model, row, attended[row], images[picture_row])
        value[row] = cache[key]
    return change("logps", value), model


def row_logps(d: Dump, change: Change, model, row: int, attended: Tensor, images: list) -> Tensor:
    """Return log-probs (S,) for the completion tokens in one row, 0 elsewhere."""
    is_learned = d.get("logps_gradient", d["completion_mask"])[row] != 0
    is_scored = d.completion[row] | d["completion_mask"][row].bool() | is_learned
    token_numbers = attended.cumsum(0)  # positions of attended tokens, starting at 1
    # the first token in a row has no log-prob
    scored_columns = (is_scored & attended & (token_numbers > 1)).nonzero()[:, 0]
    value = torch.zeros(d.width, dtype=torch.float64)
    if not len(scored_columns):
        return value
    batch = batch_of_row(d, change, model, row, attended, images)
    # token number t has index t - 1, and is predicted by the hidden state with index t - 2
    logits = model.lm_head(model(batch, select=token_numbers[scored_columns] - 2))
    temperature = change("temperature", d.about.get("temperature", 1.0))
    log_probs = (logits / temperature).log_softmax(-1)
    labels = change("labels", d["input_ids"][row][scored_columns])
    value[scored_columns] = change("scores", log_probs.gather(1, labels[:, None])[:, 0])
    return value


def batch_of_row(d: Dump, change: Change, model, row: int, attended: Tensor, images: list) -> "GroupBatch":
    from minivlmrl.data.rows import Prompt
    from minivlmrl.model.packing import pack
    from minivlmrl.model.rope import get_rope_index

    config = model.config
    ids = d["input_ids"][row]
    placeholders = ids == config.image_token_id
    images = change("pictures", images)
    grids = torch.tensor([grid.tolist() for _, grid in images], dtype=torch.long).view(-1, 3)
    patches = torch.cat([torch.zeros(0), *(change("pixels", pixels) for pixels, _ in images)])
    sizes = grids.prod(1)
    ends = sizes.cumsum(0) // config.vision_config.spatial_merge_size**2
    # image index per token, 2 = text: "a <i> <i> b <i>" with two tokens for the first image gives 2 0 0 2 1
    picture_numbers = torch.bucketize(placeholders.cumsum(0) - 1, ends, right=True)
    picture_numbers = picture_numbers.where(placeholders, len(images))[attended]
    ids = ids[attended]
    is_seen = torch.isin(torch.arange(len(images)), picture_numbers)
    seen_ids = ids.where(picture_numbers < len(images), -1)  # -1 for text tokens
    seen_patches = patches[is_seen.repeat_interleave(sizes)].to(model.lm_head.weight)
    batch = pack([Prompt(seen_ids, seen_patches, grids[is_seen])], [[]], config)
    batch.input_ids = ids
    batch.position_ids = change(
        "positions",
        get_rope_index(seen_ids, grids[is_seen], config),
        indices=torch.arange(len(ids)).expand(3, -1),
        own=d.completion[row, attended],
    )
    return batch


def of_unattended(d: Dump) -> Tensor:
    """Return a mask (n, S) for tokens directly after padding: no hidden state predicts these tokens."""
    return pad(d["attention_mask"][:, :-1], (1, 0), value=1) == 0


def model_unit(d: Dump) -> float:
    """Return the factor on TOLERANCE for model outputs: 50 in float32, 5000 in 16 bits."""
    dtype = d.about.get("autocast") or d.about.get("dtype")
    return THROUGH_A_MODEL * (1 if dtype in ("float32", "float64") else HALF)


def logps(name: str, folder: str, d: Dump, change: Change) -> Answer:
    """Recompute recorded log-probs with the model in a folder named in step.json."""
    if not d.has(name) or not d.about.get(folder):
        return None
    weights_folder = change("model folder", d.about[folder])
    part = d.all_rows if d.part is None else d.part
    # a simulated bug may give a row the log-probs of another row, so all rows are needed
    rows = d.all_rows if "logps" in change else part
    counted_mask = d["completion_mask"] * ~of_unattended(d)
    theirs = d[name].nan_to_num() * counted_mask
    ours = torch.zeros_like(theirs)
    steps = d.get("rollout_step", d.all_rows * 0)
    for step in steps[rows].unique():  # rows sampled in different steps have different old policies
        outputs, _ = forward(d, change, weights_folder.replace("{}", str(int(step))), rows[steps[rows] == step])
        ours += outputs
    ours = change("mode", ours * counted_mask, theirs=theirs, folder=folder)
    # samplers, such as vLLM, compute in 16 bits
    unit = THROUGH_A_MODEL * HALF if name == "sampler_logps" else model_unit(d)
    return {name: (theirs[part], ours[part], unit)}


def gradients(d: Dump, change: Change) -> Answer:
    theirs = by_hub_names(d.parameters("grad"))
    earlier = by_hub_names(d.parameters("exp_avg"))
    is_unknown = (d["completion_mask"] * of_unattended(d)).any()
    if not theirs or not d.about.get("model") or not d.has("logps_gradient") or is_unknown:
        return None
    ours = accumulate(d, change)
    unit = model_unit(d) * max(x.abs().max() for x in [*ours.values(), *theirs.values()]) + 1e-30
    answer = {}
    for name, x in sorted((theirs if d.about.get("some") else ours | theirs).items()):
        their_gradient = theirs.get(name, x * 0)
        names = {"theirs": their_gradient, "earlier": earlier.get(name, x * 0)}
        our_gradient = change("gradient", ours.get(name, x * 0), key=name, **names)
        answer[f"grad.{name}"] = their_gradient, our_gradient, unit
    return answer


def by_hub_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename parameters as in Hugging Face checkpoints, without the wrapper prefix "module."."""
    from minivlmrl.model.families.registry import hub_name

    return {hub_name(name.removeprefix("module.")): x for name, x in tensors.items()}


def accumulate(d: Dump, change: Change) -> dict[str, Tensor]:
    ones = torch.eye(len(d.micro_batches))
    shares = change("micro-batch", ones.sum(0), last=ones[-1])
    total = {}
    for number, share in enumerate(shares):
        part_gradients = change("gradients of a part", micro_batch_gradients(d, number))
        for name, x in part_gradients.items():
            total[name] = total.get(name, 0) + x * share
    return total


def micro_batch_gradients(d: Dump, number: int) -> dict[str, Tensor]:
    if number not in d.cache:
        value, model = forward(d, Change(d, {}), d.about["model"], d.micro_batches[number], grad=True)
        if value.requires_grad:  # False if no row has a token to train on
            (value * d["logps_gradient"]).sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        d.cache[number] = {name: x.double() for name, x in gradients.items() if x is not None}
    return d.cache[number]


def clip(d: Dump, change: Change) -> Answer:
    gradients = d.parameters("grad")
    theirs = d.parameters("clipped")
    if not gradients or not (theirs or d.has("grad_norm")):
        return None
    max_norm = change("max_norm", d.optimizer.get("max_grad_norm") or 0.0)
    norm = change("total norm", get_total_norm(gradients.values()), gradients=gradients).item()
    ours = change("clip", clipped(gradients, max_norm, norm), gradients=gradients, max_norm=max_norm)
    unit = max(x.abs().max() for x in gradients.values()) + 1e-30
    answer = {f"clipped.{name}": (x, ours[name], unit) for name, x in theirs.items()}
    if d.has("grad_norm") and not d.about.get("some"):
        answer["grad_norm"] = d["grad_norm"].flatten(), torch.tensor([norm]), 10 * norm + 1e-30
    return answer


def update(d: Dump, change: Change) -> Answer:
    """Recompute AdamW weight updates (arXiv 1711.05101, algorithm 2)."""
    options = d.optimizer
    weights_before = d.parameters("before")
    weights_after = d.parameters("after")
    gradients = d.parameters("clipped") or d.parameters("grad")
    if options.get("name") != "adamw" or not weights_before or not weights_after or not gradients:
        return None
    moments = change("moments", d.parameters("exp_avg"))
    squares = change("moments", d.parameters("exp_avg_sq"))
    weight_decay = options["weight_decay"]
    answer = {}
    for name, weight in weights_before.items():
        zero = weight * 0
        decay = 0.0 if name in options.get("no_decay", ()) else weight_decay
        decay = change("decay", decay, key=name, weight_decay=weight_decay)
        theirs = weights_after.get(name, weight)
        state = moments.get(name, zero), squares.get(name, zero)
        new_weight = adamw(change, options, weight, gradients.get(name, zero), state, decay)
        new_weight = change("weight", new_weight, theirs=theirs)
        rounding = 2e5 * d.eps[f"before.{name}"] * weight.abs()
        unit = (new_weight - weight).abs().max() + rounding + 1e-30
        answer[f"after.{name}"] = (theirs - weight, new_weight - weight, unit)
    return answer


def adamw(change, options: dict, weight, gradient, state, decay) -> Tensor:
    """Compute a weight after one AdamW step; `state`: first and second moment."""
    weight = weight.clone()
    weight.grad = gradient
    numbers = {"lr": options["learning_rate"], "betas": options["betas"], "eps": change("eps", options["eps"])}
    is_coupled = change("coupled", False)  # True: Adam with L2 regularization instead of AdamW
    optimizer = Adam([weight], **numbers, weight_decay=decay, decoupled_weight_decay=not is_coupled)
    step = torch.tensor(change("step", options["step"]) - 1.0)
    optimizer.state[weight] = {"step": step, "exp_avg": state[0].clone(), "exp_avg_sq": state[1].clone()}
    optimizer.step()
    return weight


def schedule(d: Dump, change: Change) -> Answer:
    """Recompute the learning rates up to and including the recorded step."""
    options = d.about.get("schedule")
    known_types = ("linear", "cosine", "constant", "constant_with_warmup")
    if not options or "learning_rate" not in d.optimizer or options["type"] not in known_types:
        return None
    their_rates = [*options.get("rates", []), d.optimizer["learning_rate"]]
    steps = range(options["step"] + 1 - len(their_rates), options["step"] + 1)
    our_rates = [rate_at(step, options, change) for step in steps]
    theirs, ours = torch.tensor([their_rates, our_rates], dtype=torch.float64)
    return {"learning_rate": (theirs, ours, options["learning_rate"] + 1e-30)}


def rate_at(step: int, options: dict, change: Change) -> float:
    """Compute the learning rate at a step, counted from 0, as transformers does."""
    kind = change("type", options["type"])
    t = max(0, change("step", step))
    configured = 0 if options["type"] == "constant" else options.get("warmup_steps", 0)
    warmup = change("warmup", configured)
    max_steps = options["max_steps"]
    progress = (t - warmup) / max(1, max_steps - warmup)
    done_share = min(1.0, progress)
    shares = {"linear": 1 - done_share, "cosine": 0.5 * (1 + math.cos(math.pi * done_share))}
    rate_share = t / warmup if t < warmup else shares.get(kind, 1.0)
    return options["learning_rate"] * rate_share
