"""What of a step can be computed again from the rest of it: advantages, masks, the loss and its gradient.

A stage is a function (dump, change) -> {name: (what the trainer has, what it should be, unit)}, or None where the dump
lacks what the stage needs. An empty `change` is the definition; each key of it is one deviation, see causes.py. An error
is |has - should| / unit, so `unit` is the size of what was added up, and with it of the rounding.
"""

import copy

import torch
from torch import Tensor

from minivlmrl.algorithms.policy_losses import AVERAGES, FamilyLoss, PolicyInputs, mean_entropy, policy_terms
from minivlmrl.algorithms.preference_losses import DPOLoss, dpo_loss
from minivlmrl.algorithms.sft_loss import sft_loss
from minivlmrl.audit.dump import Dump
from minivlmrl.losses import Counts

Answer = dict[str, tuple[Tensor, Tensor, Tensor | float]] | None


def advantages(d: Dump, change: dict) -> Answer:
    """From rewards (N, K) and the group of each completion."""
    has, rewards, group = d.get("rollout_advantages"), d.get("rewards"), d.get("group")
    has = d.get("advantages") if has is None else has
    if has is None or rewards is None or group is None or has.dim() != 1:
        return None
    about, size = d.about, d.about.get("num_generations") or int((group == group[0]).sum())
    rewards = rewards[:, None] if rewards.dim() == 1 else rewards
    weights = torch.tensor(about.get("reward_weights") or [1.0] * rewards.shape[1], dtype=torch.float64)
    weights = {"own": weights, "ones": weights * 0 + 1, "mean": weights / len(weights)}[change.get("weights", "own")]
    missing, count = rewards.isnan().all(1), torch.arange(len(group))
    regrouped = {"next": group.roll(1), "interleaved": count % (len(group) // size), "halves": count // (size / 2)}
    group = {"own": group, "double": count // (2 * size), **regrouped}[change.get("group", "own")]
    centre, epsilon = change.get("centre", "group"), change.get("epsilon", 1e-4)
    how = {"ddof": change.get("ddof", 1), "epsilon": epsilon, "inside": change.get("inside", False)}
    scale = change.get("scale", about.get("scale_rewards", "group"))
    gdpo = about.get("multi_objective_aggregation") == "normalize_then_sum"
    if gdpo != change.get("other aggregation", False):
        parts = [normalise(x, group, "group", "group", **how) for x in rewards.unbind(1)]
        total = (torch.stack([value for value, _ in parts], 1).masked_fill(rewards.isnan(), 0) * weights).sum(1)
        unit = sum(unit for _, unit in parts)
        value, more = normalise(total.masked_fill(missing, torch.nan), group, "batch", "batch", **how)
        unit = unit + more
    else:
        total = (rewards * weights).nansum(1)
        total = total if change.get("missing") else total.masked_fill(missing, torch.nan)
        value, unit = normalise(total, group, centre, scale, **how)
    if change.get("again"):  # once more over the batch
        value, unit = normalise(value, group, "batch", "batch", **how)[0], unit * 2
    return {"advantages": (has, AFTER[change.get("after", "own")](value), unit)}


AFTER = {  # of advantages (N,)
    "own": lambda a: a, "negative": lambda a: -a, "rolled": lambda a: a.roll(1), "rolled back": lambda a: a.roll(-1),
    "reversed": lambda a: a.flip(0), "positive": lambda a: a.clamp(min=0), "clipped": lambda a: a.clamp(-1, 1),
    "absolute": lambda a: a.abs(), "zero": lambda a: a * 0,
}  # fmt: skip


def normalise(x: Tensor, group: Tensor, centre: str, scale: str, ddof: int, epsilon: float, inside: bool):
    """(N,) with NaN for unjudged -> advantages, 0 for these, and the unit of their rounding in float32."""
    value, divisor = torch.zeros_like(x), torch.ones_like(x)
    for g in group.unique():
        member = group == g
        real = x[member & ~x.isnan()]
        over = {"group": real, "batch": x[~x.isnan()]}.get(scale)
        means = {"group": real.mean(), "batch": x.nanmean(), "none": 0.0, "median": real.median() if len(real) else 0.0}
        means |= {"best": real.max() if len(real) else 0.0, "others": (real.sum() - x[member]) / max(1, len(real) - 1)}
        value[member] = x[member] - means[centre]
        if over is not None:
            std = over.std(correction=ddof) if len(over) > ddof else x.new_tensor(torch.nan)
            divisor[member] = (std.square() + epsilon).sqrt() if inside else std + epsilon
    value = (value / divisor).nan_to_num(0.0, 0.0, 0.0)
    return value, value.abs().max() + 0.1 * x.nan_to_num().abs().max() / divisor.nan_to_num(1.0) + 1e-30


def rows(d: Dump, change: dict) -> Answer:
    """The advantage of each row is that of its completion in the rollout."""
    of, has, row = d.get("rollout_advantages"), d.get("advantages"), d.get("row")
    if of is None or has is None or row is None:
        return None
    value = {"own": of[row], "unshuffled": of[: len(row)]}[change.get("order", "own")]
    value = AFTER[change.get("after", "own")](value)
    has = has.flatten(1)[:, -1] if has.dim() > 1 else has
    return {"advantages": (has, value, of.abs().max() + 1e-30)}


def mask(d: Dump, change: dict) -> Answer:
    """Which tokens count: of a rollout up to and with the first stop token, of a demonstration all real ones."""
    ids, stop, prompt = d["input_ids"], d.about.get("stop_token_ids"), d.get("prompt_mask")
    if prompt is None or (d.about["kind"] == "grpo" and not stop):
        return None
    inside, real = d.completion, d["attention_mask"].bool()
    if d.about["kind"] == "grpo":
        ends = inside & torch.isin(ids, torch.tensor(stop))
        ended = (ends.long().cumsum(1) - ends.long()) > 0  # after the first stop token
        padding = (inside & (ids != d.about.get("pad_token_id", -1))).flip(1).long().cumsum(1).flip(1) == 0
        real = ~torch.where(ends.any(1, keepdim=True), ended, padding)
        if d.about.get("mask_truncated_completions") and not change.get("truncated"):
            real = real & (ends.any(1, keepdim=True))
        elif change.get("truncated") == "dropped":
            real = real & ends.any(1, keepdim=True)
    own = (inside & real).long() * (1 if d.get("tool_mask") is None else d["tool_mask"].long())
    return {"completion_mask": (d["completion_mask"].double(), other_mask(d, own.double(), change), 1.0)}


def other_mask(d: Dump, own: Tensor, change: dict) -> Tensor:
    """(n, S): the mask of a deviation."""
    after = d.completion.double()
    first, last = own.cumsum(1) == 1, own.flip(1).cumsum(1).flip(1) == 1
    return {
        "own": own, "prompt": torch.maximum(own, d["attention_mask"].double() * (1 - after)), "padding": after,
        "everything": torch.ones_like(own), "no end": own * ~last, "no first": own * ~first, "later": own.roll(1, 1),
        "earlier": own.roll(-1, 1), "next row": own.roll(1, 0), "only end": own * last,
    }[change.get("mask", "own")]  # fmt: skip


def inputs(d: Dump, lp: Tensor, own: Tensor, change: dict) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probabilities of policy, old policy and reference, (n, S), as a deviation takes them."""
    old, ref = d.get("old_per_token_logps"), d.get("ref_per_token_logps")
    old, r = lp.detach() if old is None else old, lp.detach() if ref is None else ref
    lengths = own.sum(1, keepdim=True) / d.completion.sum(1, keepdim=True).clamp(min=1)
    table = {
        "own": lambda: (lp, old, r), "no old": lambda: (lp, lp.detach(), r), "live old": lambda: (lp, lp, r),
        "frozen ratio": lambda: (lp, lp - (lp - old).detach(), r), "old is reference": lambda: (lp, r, r),
        "inverted ratio": lambda: (2 * old - lp, old, r + 2 * (old - lp)), "half": lambda: (lp, (lp + old) / 2, r),
        "old of next row": lambda: (lp, old.roll(1, 0), r), "old later": lambda: (lp, old.roll(1, 1), r),
        "old earlier": lambda: (lp, old.roll(-1, 1), r), "padded length": lambda: (lp, lp - (lp - old) * lengths, r),
        "reversed KL": lambda: (lp, old, 2 * lp - r), "frozen KL": lambda: (lp, old, lp + (r - lp).detach()),
        "reference is old": lambda: (lp, old, old), "no reference": lambda: (lp, old, r * 0),
        "reference is policy": lambda: (lp, old, lp.detach()), "reference of next row": lambda: (lp, old, r.roll(1, 0)),
        "reference later": lambda: (lp, old, r.roll(1, 1)), "reference earlier": lambda: (lp, old, r.roll(-1, 1)),
        "swapped": lambda: (r + (lp - lp.detach()), old, lp.detach()), "live reference": lambda: (lp, old, lp),
    }  # fmt: skip
    return table[change.get("inputs", "own")]()


def counts(d: Dump, part: Tensor, own: Tensor, change: dict, each: int = 1) -> Counts:
    """What the loss of micro-batch `part` divides by; own (n, S) is the mask that is counted."""
    over, all_rows = change.get("over", d.about.get("mean_over", "step")), torch.arange(len(own))
    M, W = len(d.micro_batches), d.about.get("world_size", 1)
    some = part if over == "micro_batch" else all_rows
    tokens = d.about.get("rollout_tokens")  # of all ranks, over the steps of the rollout
    if tokens is None or over == "micro_batch" or "divide" in change or "mask" in change:
        tokens = own[some][::each].sum().item() * (M if over == "micro_batch" else 1)
    else:
        tokens = tokens / d.about.get("steps_per_rollout", 1) / W
    rows_counted = len(some) * (M if over == "micro_batch" else 1)
    return Counts(rows_counted, max(tokens, 1), d.about.get("max_completion_length"))


def loss(d: Dump, change: dict) -> Answer:
    """The loss of each micro-batch as it went into backward, and its gradient to the log-probabilities (n, S)."""
    has = {name: d.get(name) for name in ("loss", "logps_gradient", "entropies_gradient")}
    kind, entropies = d.about["kind"], d.get("entropies")
    if has["logps_gradient"] is None and has["loss"] is None:
        return None
    own = other_mask(d, d["completion_mask"].double(), change)
    lp = d["per_token_logps"].clone().requires_grad_()
    entropies = None if entropies is None else entropies.clone().requires_grad_()
    of = {"grpo": policy, "dpo": preference, "sft": demonstrations}[kind]
    losses, units = zip(*(of(d, part, lp, entropies, own, change) for part in d.micro_batches), strict=True)
    losses, factor = torch.stack(losses), change.get("factor", 1.0)
    total, leaves = losses.sum() * factor, [lp] if entropies is None else [lp, entropies]
    slopes = torch.autograd.grad(total, leaves, materialize_grads=True) if total.requires_grad else map(torch.zeros_like, leaves)
    should = dict(zip(("logps_gradient", "entropies_gradient"), slopes, strict=False)) | {"loss": losses.detach() * factor}
    answer = {}
    for name, value in should.items():
        if has[name] is not None:
            unit = torch.maximum(has[name].abs().max(), value.abs().max()) if name != "loss" else torch.stack(units)
            answer[name] = has[name].flatten() if name == "loss" else has[name], value, unit + 1e-30
    return answer


def policy(d: Dump, part, lp, entropies, own, change) -> tuple[Tensor, Tensor]:
    """GRPO and its family for the rows `part`: the loss, and the sum of the sizes of its terms."""
    known = FamilyLoss.__dataclass_fields__
    o = copy.copy(FamilyLoss(**{name: value for name, value in d.about.get("loss", {}).items() if name in known}))
    for name, value in change.items():
        if name in known:
            setattr(o, name, value(o) if callable(value) else value)
    lp, old, ref = (x[part] for x in inputs(d, lp, own, change))
    a = d["advantages"] if d["advantages"].dim() == 1 else d.align(d["advantages"])
    a = AFTER[change.get("advantages", "own")](a)[part]
    if change.get("whitened"):
        a = (a - a.mean()) / (a.std() + 1e-8)
    names = ("sampler_logps", "importance_sampling_ratio")
    sampler, ratio = (None if d.get(name) is None else d[name][part] for name in names)
    ratio = d.align(ratio) if ratio is not None and ratio.shape[1] > 1 else ratio
    entropies = None if entropies is None else entropies[part]
    given = PolicyInputs(lp, entropies, old, ref, sampler, None if change.get("no correction") else ratio)
    mine, flip = own[part], -1.0 if change.get("flip") else 1.0
    o.beta *= flip * change.get("KL", 1.0)
    x, kept, _ = policy_terms(given, a * flip, mine, o)
    x = x * flip * mine
    divide = other_mask(d, own, {"mask": change["divide"]}) if "divide" in change else own
    over = counts(d, part, divide, change)
    average = AVERAGES[change.get("average", o.loss_type)]
    value = average(x, divide[part], over)
    if o.entropy_coef and entropies is not None:
        value = value - o.entropy_coef * mean_entropy(given, kept, over)
    return value, average(x.detach().abs(), divide[part], over)


def preference(d: Dump, part, lp, entropies, own, change) -> tuple[Tensor, Tensor]:
    """DPO and its family for the rows `part`: pairs by `pair`, `chosen` says which is."""
    o = copy.copy(DPOLoss(**d.about.get("loss", {})))
    for name, value in change.items():
        if hasattr(o, name):
            setattr(o, name, value(o) if callable(value) else value)
    lp, _, ref = inputs(d, lp, own, change)
    if change.get("mean"):
        lp, ref = (x / own.sum(1, keepdim=True).clamp(min=1) for x in (lp, ref))
    order = (d["pair"][part] * 2 + 1 - d["chosen"][part].long()).argsort()
    index = part[order].view(-1, 2)
    index = index.flip(1) if change.get("exchanged") else index
    squares = None if d.get("log_sum_sq_probs") is None else d["log_sum_sq_probs"][index]
    over = counts(d, part[order], own, change, each=2)
    value, _ = dpo_loss(lp[index], own[index], o, ref_per_token_logps=ref[index], log_sum_sq_probs=squares, counts=over)
    return value, value.detach().abs() + 1e-2


def demonstrations(d: Dump, part, lp, entropies, own, change) -> tuple[Tensor, Tensor]:
    """SFT for the rows `part`."""
    over = counts(d, part, other_mask(d, own, {"mask": change["divide"]}) if "divide" in change else own, change)
    kind = change.get("loss_type", d.about.get("loss", {}).get("loss_type", "nll"))
    if change.get("rows"):  # each row its mean first
        value = (-(lp * own).sum(1) / own.sum(1).clamp(min=1))[part].sum() / len(own)
    else:
        value = sft_loss(lp[part], own[part], kind, counts=over)
    return value, value.detach().abs() + 1e-30
