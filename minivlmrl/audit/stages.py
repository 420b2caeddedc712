"""What of a step can be computed again from the rest of it: advantages, masks, the loss and its
gradient.

A stage is a function (dump, change) -> {name: (has, should, unit)}, or None where the dump lacks
something. `change` is empty for the definition, or a deviation of causes.yaml. An error is |has -
should| / unit, the size of the terms.
"""

import copy

import torch
from torch import Tensor

from minivlmrl.algorithms.policy_losses import (
    AVERAGES,
    FamilyLoss,
    PolicyInputs,
    mean_entropy,
    policy_terms,
)
from minivlmrl.algorithms.preference_losses import DPOLoss, dpo_loss
from minivlmrl.algorithms.sft_loss import sft_loss
from minivlmrl.audit.dump import Dump
from minivlmrl.losses import Counts

Answer = dict[str, tuple[Tensor, Tensor, Tensor | float]] | None
Loss = tuple[Tensor, Tensor]
AFTER = {
    "own": lambda a: a,
    "negative": lambda a: -a,
    "rolled": lambda a: a.roll(1, 0),
    "rolled back": lambda a: a.roll(-1, 0),
    "reversed": lambda a: a.flip(0),
    "positive": lambda a: a.clamp(min=0),
    "zero": lambda a: a * 0,
    "clipped": lambda a: a.clamp(-1, 1),
    "absolute": lambda a: a.abs(),
}


def advantages(d: Dump, change: dict) -> Answer:
    """From rewards (N, K) and the group of each completion."""
    has = d.get("rollout_advantages", d.get("advantages"))
    rewards, group = d.get("rewards"), d.get("group")
    if has is None or rewards is None or group is None or has.dim() != 1:
        return None
    N, size = len(group), d.about.get("num_generations") or int((group == group[0]).sum())
    rewards, count = rewards.view(N, -1), torch.arange(N)
    weights = d.about.get("reward_weights") or [1.0] * rewards.shape[1]
    weights = torch.tensor(weights, dtype=torch.float64)
    other = {"ones": weights * 0 + 1, "mean": weights / len(weights)}
    weights = other.get(change.get("weights"), weights)
    groups = {"next": group.roll(1), "interleaved": count % (N // size)}
    groups["halves"] = count // (size / 2)
    group = (groups | {"double": count // (2 * size)}).get(change.get("group"), group)
    definition = {"ddof": 1, "epsilon": 1e-4, "by": "std"}
    how = {name: change.get(name, value) for name, value in definition.items()}
    scale = change.get("scale", d.about.get("scale_rewards", "group"))
    unjudged = rewards.isnan().all(1) & (not change.get("missing"))
    gdpo = d.about.get("multi_objective_aggregation") == "normalize_then_sum"
    if gdpo == change.get("other aggregation", False):
        total = (rewards * weights).nansum(1).masked_fill(unjudged, torch.nan)
        value, unit = normalise(total, group, change.get("centre", "group"), scale, **how)
    else:
        parts = [normalise(x, group, "group", "group", **how) for x in rewards.unbind(1)]
        total = torch.stack([value for value, _ in parts], 1).masked_fill(rewards.isnan(), 0)
        total = (total * weights).sum(1).masked_fill(unjudged, torch.nan)
        value, unit = normalise(total, group, "batch", "batch", **how)
        unit = unit + sum(unit for _, unit in parts)
    if change.get("again"):
        value, unit = normalise(value, group, "batch", "batch", **how)[0], unit * 2
    return {"advantages": (has, AFTER[change.get("after", "own")](value), unit)}


def normalise(
    x: Tensor, group: Tensor, centre: str, scale: str, ddof: int, epsilon: float, by: str
):
    """(N,) with NaN for unjudged -> advantages, 0 for these, and the unit of their rounding in
    float32."""
    value, divisor = torch.zeros_like(x), torch.ones_like(x)
    tiled = [x[group == g].nanmean() for g in group.unique()]
    for member in (group == g for g in group.unique()):
        real = x[member & ~x.isnan()]
        over = {"group": real, "batch": x[~x.isnan()]}.get(scale)
        means = {"group": real.mean(), "batch": x.nanmean()}
        means["others"] = (real.sum() - x[member]) / max(1, len(real) - 1)
        extremes = {"median": real.median(), "best": real.max()} if len(real) else {}
        value[member] = x[member] - (means | extremes).get(centre, 0.0)
        if over is not None:
            std = over.std(correction=ddof) if len(over) > ddof else x.new_tensor(torch.nan)
            others = {"inside": (std**2 + epsilon).sqrt(), "variance": std**2 + epsilon}
            divisor[member] = others.get(by, std + epsilon)
    value = x - torch.stack(tiled).repeat(len(x) // len(tiled)) if centre == "tiled" else value
    value = (value / divisor).nan_to_num(0.0, 0.0, 0.0)
    of_rewards = 0.1 * x.nan_to_num().abs().max() / divisor.nan_to_num(1.0)
    return value, value.abs().max() + of_rewards + 1e-30


def rows(d: Dump, change: dict) -> Answer:
    """The advantage of each row is that of its completion in the rollout."""
    of, has, row = d.get("rollout_advantages"), d.get("advantages"), d.get("row")
    if of is None or has is None or row is None or has.dim() != 1:
        return None
    value = of[: len(row)] if change.get("order") == "unshuffled" else of[row]
    return {"advantages": (has, AFTER[change.get("after", "own")](value), of.abs().max() + 1e-30)}


def mask(d: Dump, change: dict) -> Answer:
    """Which tokens count: those up to and with the first stop token, or all of a demonstration."""
    ids, stop, real = d["input_ids"], d.about.get("stop_token_ids"), d["attention_mask"].bool()
    if d.get("prompt_mask") is None or (d.about["kind"] == "grpo" and not stop):
        return None
    if d.about["kind"] == "grpo":
        ends = d.completion & torch.isin(ids, torch.tensor(stop))
        ended = ends.any(1, keepdim=True)
        text = d.completion & (ids != d.about.get("pad_token_id", -1))
        before_end = ends.long().cumsum(1) - ends.long() == 0
        real = torch.where(ended, before_end, text.flip(1).cumsum(1).flip(1) > 0)
        dropped = d.about.get("mask_truncated_completions") and "dropped"
        if change.get("truncated", dropped) == "dropped":
            real = real & ended
    own = (d.completion & real) * d.get("tool_mask", torch.tensor(1)).double()
    should = other_mask(d, own, change.get("mask"))
    return {"completion_mask": (d["completion_mask"].double(), should, 1.0)}


def other_mask(d: Dump, own: Tensor, name: str | None) -> Tensor:
    """(n, S): the mask of a deviation."""
    after, first = d.completion.double(), own.cumsum(1) == 1
    last = own.flip(1).cumsum(1).flip(1) == 1
    masks = {"padding": after, "everything": torch.ones_like(own), "next row": own.roll(1, 0)}
    masks |= {"later": own.roll(1, 1) * after, "earlier": own.roll(-1, 1)}
    masks |= {"no end": own * ~last, "only end": own * last, "no first": own * ~first}
    masks["prompt"] = torch.maximum(own, d["attention_mask"].double() * (1 - after))
    return masks.get(name, own)


def loss(d: Dump, change: dict) -> Answer:
    """The loss of each micro-batch in backward, and its gradient to log-probabilities (n, S)."""
    has = {name: d.get(name) for name in ("logps_gradient", "entropies_gradient", "loss")}
    if has["logps_gradient"] is None and has["loss"] is None:
        return None
    own = other_mask(d, d["completion_mask"].double(), change.get("mask"))
    given = (d.get(name) for name in ("per_token_logps", "entropies"))
    leaves = [x.clone().requires_grad_() for x in given if x is not None]
    of = {"grpo": policy, "dpo": preference, "sft": demonstrations}[d.about["kind"]]
    parts = [of(d, part, leaves[0], leaves[-1], own, change) for part in d.micro_batches]
    losses, units = (torch.stack(x) for x in zip(*parts, strict=True))
    slopes = torch.autograd.grad(losses.sum() + 0 * leaves[0].sum(), leaves, materialize_grads=True)
    answer = {"loss": (has["loss"], losses.detach(), units + 1e-30)}
    for name, slope in zip(("logps_gradient", "entropies_gradient"), slopes, strict=False):
        unit = max(x.abs().max() for x in (slope, has[name]) if x is not None) + 1e-30
        answer[name] = (has[name], slope, unit)
    known = {name: parts for name, parts in answer.items() if parts[0] is not None}
    return {name: (x.view_as(y), y, unit) for name, (x, y, unit) in known.items()}


def inputs(d: Dump, lp: Tensor, own: Tensor, name: str | None) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of policy, old policy and reference, (n, S), as a deviation takes them."""
    old, r = d.get("old_per_token_logps", lp.detach()), d.get("ref_per_token_logps", lp.detach())
    share = own.sum(1, keepdim=True) / d.completion.sum(1, keepdim=True).clamp(min=1)
    now = lp.detach()
    old_of = {
        "no old": now,
        "live old": lp,
        "frozen ratio": lp - (lp - old).detach(),
        "old is reference": r,
        "padded length": lp - (lp - old) * share,
    }
    ref_of = {
        "reversed KL": 2 * lp - r,
        "frozen KL": lp + (r - lp).detach(),
        "reference is old": old,
        "no reference": r * 0,
        "live reference": lp,
        "reference is policy": now,
        "swapped": now,
        "inverted ratio": r + 2 * (old - lp),
    }
    old_of |= {f"old {name}": x for name, x in shifted(d, old).items()}
    ref_of |= {f"reference {name}": x for name, x in shifted(d, r).items()}
    policy_of = {"inverted ratio": 2 * old - lp, "swapped": r + (lp - now)}
    return policy_of.get(name, lp), old_of.get(name, old), ref_of.get(name, r)


def shifted(d: Dump, x: Tensor) -> dict[str, Tensor]:
    """(n, S) of other rows or tokens: with zeros from the prompt, or rolled within the completions'
    columns."""
    first, found = int(d.completion.any(0).long().argmax()), {"of next row": x.roll(1, 0)}
    for name, by in ("later", 1), ("earlier", -1):
        found[name] = x.roll(by, 1)
        found[f"rolled {name}"] = torch.cat([x[:, :first], x[:, first:].roll(by, 1)], 1)
    return found


def counts(d: Dump, part: Tensor, own: Tensor, change: dict, each: int = 1) -> Counts:
    """What the loss of rows divides by: totals of the step, or M times the micro-batch's."""
    by_part = change.get("over", d.about.get("mean_over")) == "micro_batch"
    rows, times = (part, len(d.micro_batches)) if by_part else (torch.arange(len(own)), 1)
    tokens = own[rows][::each].sum().item() * times
    whole = torch.equal(own, d["completion_mask"].double())  # not another mask of a deviation
    if "rollout_tokens" in d.about and whole and not by_part:
        tokens = d.about["rollout_tokens"] / d.about.get("steps_per_rollout", 1)
        tokens /= d.about.get("world_size", 1)
    count = d.about.get("step_rows", len(rows)) * times
    return Counts(count, max(tokens, 1), d.about.get("max_completion_length"))


def changed(options, change: dict):
    """Options of a loss with those that `change` names."""
    result = copy.copy(options)
    for name in change.keys() & vars(options):
        value, own = change[name], getattr(options, name)
        if str(value).startswith("="):
            value = getattr(options, value[1:])
        elif value in ("negative", "flip"):
            value = -own if value == "negative" else not own
        setattr(result, name, [value] if isinstance(own, list) else value)
    return result


def policy(d: Dump, part: Tensor, lp: Tensor, entropies: Tensor, own: Tensor, change: dict) -> Loss:
    """GRPO and its family for the rows `part`: the loss, and the sum of the sizes of its terms."""
    o = changed(FamilyLoss(**d.about.get("loss", {})), change)
    flip = -1.0 if change.get("flip") else 1.0
    o.beta *= flip * (o.beta if change.get("KL") == "beta" else change.get("KL", 1.0))
    lp, old, ref = (x[part] for x in inputs(d, lp, own, change.get("inputs")))
    a = d["advantages"] if d["advantages"].dim() == 1 else d.align(d["advantages"])
    a = AFTER[change.get("advantages", "own")](a)
    a = (a[part] - a[part].mean()) / (a[part].std() + 1e-8) if change.get("whitened") else a[part]
    sampler = None if d.get("sampler_logps") is None else d["sampler_logps"][part]
    ratio = None if change.get("no correction") else d.get("importance_sampling_ratio")
    if ratio is not None:
        ratio = (ratio if ratio.shape[1] == 1 else d.align(ratio))[part]
    given = PolicyInputs(lp, entropies[part], old, ref, sampler, ratio)
    x, kept, _ = policy_terms(given, a * flip, own[part], o)
    x, divide = x * flip * own[part], other_mask(d, own, change.get("divide"))
    over, average = counts(d, part, divide, change), AVERAGES[change.get("average", o.loss_type)]
    bonus = o.entropy_coef * mean_entropy(given, kept, over) if o.entropy_coef else 0.0
    return average(x, divide[part], over) - bonus, average(x.detach().abs(), divide[part], over)


def preference(d: Dump, part: Tensor, lp: Tensor, _, own: Tensor, change: dict) -> Loss:
    """DPO and its family for the rows `part`: pairs by `pair`, `chosen` says which is."""
    lp, _, ref = inputs(d, lp, own, change.get("inputs"))
    if change.get("mean"):
        lengths = own.sum(1, keepdim=True).clamp(min=1)
        lp, ref = lp / lengths, ref / lengths
    order = part[(d["pair"][part] * 2 + 1 - d["chosen"][part].long()).argsort()]
    index = order.view(-1, 2).flip([1] if change.get("exchanged") else [])
    squares = d.get("log_sum_sq_probs")
    options = changed(DPOLoss(**d.about.get("loss", {})), change)
    given = {"ref_per_token_logps": ref[index], "counts": counts(d, order, own, change, each=2)}
    given["log_sum_sq_probs"] = None if squares is None else squares[index]
    value, _ = dpo_loss(lp[index], own[index], options, **given)
    return value, value.detach().abs() + 1e-2


def demonstrations(d: Dump, part: Tensor, lp: Tensor, _, own: Tensor, change: dict) -> Loss:
    """SFT for the rows `part`."""
    kind = change.get("loss_type", d.about.get("loss", {}).get("loss_type", "nll"))
    over = counts(d, part, other_mask(d, own, change.get("divide")), change)
    value = sft_loss(lp[part], own[part], kind, counts=over)
    if change.get("rows"):  # each row its mean first
        value = -((lp * own).sum(1) / own.sum(1).clamp(min=1))[part].sum() / len(own)
    return value, value.detach().abs() + 1e-30
