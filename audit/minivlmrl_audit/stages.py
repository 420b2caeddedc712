"""What of a step can be computed again from the rest of it: advantages, masks, loss, gradient.

A stage is a function (dump, change) -> {name: (has, should, unit)}, or None where the dump lacks
something. `change` is empty for the definition, or a deviation of causes.yaml. An error is |has -
should| / unit, the size of the terms.
"""

import copy
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from minivlmrl.losses import Counts
from minivlmrl.objectives.policy_losses import AVERAGES, kept_tokens, mean_entropy, policy_terms
from minivlmrl.objectives.preference_losses import dpo_loss, sft_loss
from minivlmrl_audit.dump import Dump
from minivlmrl_audit.moves import first, piece, shown_as
from minivlmrl_audit.options import DPOOptions, PolicyOptions, arguments

Answer = dict[str, tuple[Tensor, Tensor, Tensor | float]] | None
Loss = tuple[Tensor, Tensor]
KINDS = "sampler_", ""  # of pictures: what a row is to have, what it has


def advantages(d: Dump, change: dict) -> Answer:
    """Compute them from rewards (N, K) and the group of each completion."""
    has = d.get("rollout_advantages", d.get("advantages"))
    rewards = d.get("rewards")
    group = d.get("group")
    if has is None or rewards is None or group is None or has.dim() != 1:
        return None
    N = len(group)
    size = d.about.get("num_generations") or int((group == group[0]).sum())
    group = piece(d, change, "group", group, count=torch.arange(N), size=size)
    rewards = piece(d, change, "rewards", rewards.view(N, -1))
    weights = d.about.get("reward_weights") or [1.0] * rewards.shape[1]
    weights = piece(d, change, "weights", torch.tensor(weights, dtype=torch.float64))
    unjudged = rewards.isnan().all(1) & (not change.get("missing"))
    gdpo = d.about.get("multi_objective_aggregation") == "normalize_then_sum"
    if gdpo == change.get("other aggregation", False):
        total = (rewards * weights).nansum(1).masked_fill(unjudged, torch.nan)
        scale = d.about.get("scale_rewards", "group")
        value, unit = normalise(d, change, total, group, "group", scale)
    else:
        parts = [normalise(d, change, x, group, "group", "group") for x in rewards.unbind(1)]
        total = torch.stack([value for value, _ in parts], 1).masked_fill(rewards.isnan(), 0)
        total = (total * weights).sum(1).masked_fill(unjudged, torch.nan)
        value, unit = normalise(d, change, total, group, "batch", "batch")
        unit = unit + sum(unit for _, unit in parts)
    if change.get("again"):
        value, unit = normalise(d, change, value, group, "batch", "batch")[0], unit * 2
    value = piece(d, change, "advantages", piece(d, change, "rollout advantages", value))
    return {"advantages": (has, value, unit)}


def normalise(d: Dump, change: dict, x: Tensor, group: Tensor, centre: str, scale: str):
    """Make advantages (N,) of x, 0 where it is NaN, and the unit of float32's rounding."""
    baseline = torch.zeros_like(x)
    divisor = torch.ones_like(x)
    every = x[~x.isnan()]
    for member in (group == g for g in group.unique()):
        rewards = x[member]
        if not len(real := rewards[~rewards.isnan()]):
            continue
        names = {"rewards": rewards, "real": real, "every": every}
        of = {"group": real, "batch": every}
        baseline[member] = piece(d, change, "mean", of[centre].mean(), **names)
        over = piece(d, change, "over", of.get(scale), **names)
        if over is not None:
            std = over.std() if len(over) > 1 else x.new_tensor(torch.nan)
            divisor[member] = piece(d, change, "divisor", std + 1e-4, std=std, over=over)
    divisor = piece(d, change, "deviation", divisor)
    value = (x - piece(d, change, "baseline", baseline)) / divisor
    value = value.nan_to_num(0.0, 0.0, 0.0)
    of_rewards = 0.1 * x.nan_to_num().abs().max() / divisor.nan_to_num(1.0)
    return value, value.abs().max() + of_rewards + 1e-30


def rows(d: Dump, change: dict) -> Answer:
    """Take the advantage of each row from its completion in the rollout."""
    of = d.get("rollout_advantages")
    has = d.get("advantages")
    row = d.get("row")
    if of is None or has is None or row is None or has.dim() != 1:
        return None
    value = piece(d, change, "advantages", of[row], of=of)
    return {"advantages": (has, value, of.abs().max() + 1e-30)}


def tokens(d: Dump, change: dict) -> Answer:
    """Take ids of completions from the sampler, which drew or was given them: never from text."""
    if (sampled := d.sampled(change)) is None or d.get("prompt_mask") is None:
        return None
    ids = sampled[0]
    none = d.about.get("pad_token_id", -1)
    has = pad(d["input_ids"].where(d.completion, none), (0, ids.shape[1] - d.width), value=none)
    should = piece(d, change, "tokens", ids.where(ids >= 0, none), has=has, none=none)
    attended = ids[:, : d.width] >= 0
    seen = d["attention_mask"].bool() & attended  # what was cut may be left out of the forward
    attended = piece(d, change, "attended", attended & seen.any(1, keepdim=True))
    both = {"input_ids": (has, should), "attention_mask": (seen, attended)}
    return {name: (x.double(), y.double(), 1.0) for name, (x, y) in both.items()}


def pictures(d: Dump, change: dict) -> Answer:
    """Show each row the pictures of its prompt, then those that tools answered, in order."""
    if d.get("sampler_num_images") is None:
        return None
    row = d.get("row", torch.arange(len(d["input_ids"])))
    known = {}

    def number(x: Tensor, grid: Tensor) -> int:
        return known.setdefault(str((grid.tolist(), x.numpy().tobytes())), len(known))

    had, has = ([[number(*x) for x in of] for of in shown(d, kind)] for kind in KINDS)
    kind, text, *_ = change.get("pictures", ("", ""))
    row = row[d.rows[text]] if kind == "rows" else row
    ids, _, answers = d.turns()
    later = first(answers & (ids == d.about.get("image_token_id", -1))).sum(1).tolist()
    of = ((had[i], count) for i, count in zip(row.tolist(), later, strict=True))
    should = [shown_as(change, x, len(x) - count) for x, count in of]
    most = 2 * max(map(len, has + had))
    both = [torch.tensor([x + [-1] * (most - len(x)) for x in of]) for of in (has, should)]
    return {"pictures": (*(x.double() for x in both), 1.0)}


def shown(d: Dump, kind: str = "") -> list[list[tuple[Tensor, Tensor]]]:
    """List pictures (patches, grid) of each row, or each completion of the rollout (sampler_)."""
    grids = d.get(f"{kind}image_grid_thw", torch.zeros(0, 3, dtype=torch.long))
    patches = d.get(f"{kind}pixel_values", torch.zeros(0, 0)).split(grids.prod(1).tolist())
    every = [*zip(patches, grids, strict=True)]
    n = len(d["input_ids"])
    ends = d.get(f"{kind}num_images", torch.full((n,), len(grids) // n)).cumsum(0).tolist()
    return [every[begin:end] for begin, end in pairwise([0, *ends])]


def mask(d: Dump, change: dict) -> Answer:
    """Tell which tokens count: drawn ones up to a turn's stop token, or real ones of answers."""
    ids = d["input_ids"]
    stop = d.about.get("stop_token_ids")
    real = d["attention_mask"].bool()
    if d.get("prompt_mask") is None or (d.about["kind"] == "grpo" and not stop):
        return None
    _, drawn, forced = d.turns()
    if d.about["kind"] == "grpo":
        ends = drawn & torch.isin(ids, torch.tensor(stop))
        before = ends.cumsum(1) - ends.long()
        in_turn = before == (before * first(drawn)).cummax(1).values
        text = d.completion & (ids != d.about.get("pad_token_id", -1))
        text, later = (x.flip(1).cumsum(1).flip(1) > 0 for x in (text, forced))
        ended = piece(d, change, "ended", (ends & ~later).any(1, keepdim=True), ends=ends)
        real = forced | (in_turn & (ended | later | text))
        if piece(d, change, "drop truncated", d.about.get("mask_truncated_completions")):
            real = real & ended
    counted = piece(d, change, "tool mask", 1 - forced.double()) * (d.completion & real)
    should = other_mask(d, counted, change)
    return {"completion_mask": (d["completion_mask"].double(), should, 1.0)}


def other_mask(d: Dump, mask: Tensor, change: dict, key: str = "mask") -> Tensor:
    """Change a mask (n, S) as a deviation has it."""
    after = d.completion.double()
    stop = d.about.get("stop_token_ids")
    earlier = mask.roll(-1, 1)
    names = {"after": after, "later": mask.roll(1, 1) * after, "earlier": earlier}
    names["last"] = last = mask * (1 - earlier)
    names["ends"] = torch.isin(d["input_ids"], torch.tensor(stop)).double() if stop else last
    return piece(d, change, key, mask, prompt=d["attention_mask"] * (1 - after), **names)


def loss(d: Dump, change: dict) -> Answer:
    """Compute the loss of each micro-batch as it went into backward, and its gradient (n, S)."""
    has = {name: d.get(name) for name in ("logps_gradient", "entropies_gradient", "loss")}
    if has["logps_gradient"] is None and has["loss"] is None:
        return None
    mask = other_mask(d, d["completion_mask"].double(), change)
    outputs = (d.get(name) for name in ("per_token_logps", "entropies"))
    leaves = [x.clone().requires_grad_() for x in outputs if x is not None]
    of = {"grpo": policy, "dpo": preference, "sft": demonstrations}[d.about["kind"]]
    logps = piece(d, change, "logps", leaves[0])
    parts = [of(d, part, logps, leaves[-1], mask, change) for part in d.micro_batches]
    losses, units = (torch.stack(x) for x in zip(*parts, strict=True))
    slopes = torch.autograd.grad(losses.sum() + 0 * leaves[0].sum(), leaves, materialize_grads=True)
    answer = {}
    if has["loss"] is not None:
        answer["loss"] = has["loss"].view_as(losses), losses.detach(), units + 1e-30
    unreal = ~(d["attention_mask"].bool() | d["completion_mask"].bool())
    for name, slope in zip(("logps_gradient", "entropies_gradient"), slopes, strict=False):
        if has[name] is not None:  # where the trainer has no log-probabilities it has no gradient
            slope = slope.masked_fill(unreal & (has[name] == 0), 0.0)
            unit = max(x.abs().max() for x in (slope, has[name])) + 1e-30
            answer[name] = (has[name], slope, unit)
    return answer


def inputs(d: Dump, lp: Tensor, mask: Tensor, change: dict) -> tuple[Tensor, Tensor, Tensor]:
    """Take log-probabilities (n, S) of policy, old policy and reference as a deviation does."""
    now = lp.detach()
    old = d.get("old_per_token_logps", now)
    r = d.get("ref_per_token_logps", now)
    share = mask.sum(1, keepdim=True) / d.completion.sum(1, keepdim=True).clamp(min=1)
    names = {"lp": lp, "now": now, "old": old, "r": r, "mask": mask, "share": share}
    of = {"policy": lp, "old": old, "reference": r}
    return tuple(piece(d, change, name, x, **names) for name, x in of.items())


def counts(d: Dump, part: Tensor, mask: Tensor, change: dict, each: int = 1) -> Counts:
    """Count what the loss of the rows `part` divides by: the step, or M times the micro-batch."""
    by_part = change.get("over", d.about.get("mean_over")) == "micro_batch"
    rows, times = (part, len(d.micro_batches)) if by_part else (torch.arange(len(mask)), 1)
    tokens = mask[rows][::each].sum().item() * times
    whole = torch.equal(mask, d["completion_mask"].double())  # not another mask of a deviation
    if "rollout_tokens" in d.about and whole and not by_part:
        of = {"drawn": d.about.get("rollout_drawn"), "steps": d.about.get("steps_per_rollout", 1)}
        tokens = piece(d, change, "rollout tokens", d.about["rollout_tokens"], **of)
        tokens /= d.about.get("steps_per_rollout", 1)
        tokens /= d.about.get("world_size", 1)
    count = d.about.get("step_rows", len(rows)) * times
    return Counts(count, max(tokens, 1), d.about.get("max_completion_length"))


def changed(options, change: dict):
    """Copy options of a loss, with those that `change` names."""
    result = copy.copy(options)
    for name in change.keys() & vars(options):
        value = change[name]
        default = getattr(options, name)
        if str(value).startswith("="):  # a formula of options
            value = eval(value[1:], {}, vars(options))
        setattr(result, name, [value] if isinstance(default, list) else value)
    return result


def policy(
    d: Dump, part: Tensor, lp: Tensor, entropies: Tensor, mask: Tensor, change: dict
) -> Loss:
    """Compute GRPO's family for the rows `part`: the loss, and the sum of its terms' sizes."""
    if change.get("clipped alone"):  # min(x, y) + max(x, y) - x
        rest = {name: value for name, value in change.items() if name != "clipped alone"}
        flipped = {"flip": True}
        free = dict.fromkeys(("epsilon_low", "epsilon_high"), 1e9)
        terms = [policy(d, part, lp, entropies, mask, rest | more) for more in ({}, flipped, free)]
        (low, unit), (high, _), (unclipped, _) = terms
        return low + high - unclipped, unit
    asked = PolicyOptions(**d.about.get("loss", {}))
    o = changed(asked, change)
    flip = -1.0 if change.get("flip") else 1.0
    times = piece(d, change, "policy term", 1.0)
    o.beta = piece(d, change, "KL", o.beta) * flip / (times or 1.0)
    o.entropy_coef = piece(d, change, "entropy", o.entropy_coef)
    lp, old, ref = (x[part] for x in inputs(d, lp, mask, change))
    a = d["advantages"] if d["advantages"].dim() == 1 else d.align(d["advantages"])
    a = piece(d, change, "advantages", a, of=a)[part]
    a = piece(d, change, "whitened", a)
    sampler = None if d.get("sampler_logps") is None else d["sampler_logps"][part]
    ratio = d.get("importance_sampling_ratio")
    if ratio is not None:
        ratio = ratio if ratio.shape[1] == 1 else d.align(ratio)
        ratio = piece(d, change, "correction", ratio)[part]
    level = piece(d, change, "ratio mask", mask)[part]
    names = {"e": entropies[part], "level": level, "keep": kept_tokens, "o": o}
    kept = kept_tokens(entropies[part], level, o.top_entropy_quantile)
    kept = piece(d, change, "kept", kept, after=d.completion[part].double(), **names)
    constants = {"old_per_token_logps": old, "ref_per_token_logps": ref, "kept": kept}
    constants |= {"sampling_per_token_logps": sampler, "importance_sampling_ratio": ratio}
    x, _ = policy_terms(lp, a * flip * bool(times), level, o, **constants, **arguments(o))
    names = {"lp": lp, "old": old, "r": ref, "beta": o.beta}
    x = piece(d, change, "terms", x * flip * (times or 1.0) * mask[part], at=(part,), **names)
    divide = other_mask(d, mask, change, "divide")
    over = counts(d, part, divide, change)
    average = AVERAGES[change.get("average", asked.loss_type)]
    bonus = o.entropy_coef * mean_entropy(entropies[part], kept, over) if o.entropy_coef else 0.0
    return average(x, divide[part], over) - bonus, average(x.detach().abs(), divide[part], over)


def preference(d: Dump, part: Tensor, lp: Tensor, _, mask: Tensor, change: dict) -> Loss:
    """Compute DPO's family for the rows `part`: pairs by `pair`, `chosen` says which is."""
    lp, _, ref = inputs(d, lp, mask, change)
    order = part[(d["pair"][part] * 2 + 1 - d["chosen"][part].long()).argsort()]
    index = piece(d, change, "index", order.view(-1, 2))
    index = torch.stack([index[:, 0], piece(d, change, "rejected pair", index[:, 1])], 1)
    ref = piece(d, change, "references", ref[index], mask=mask[index])
    names = "chosen", "rejected", "reference of chosen", "reference of rejected"
    times = lp.new_tensor([piece(d, change, name, 1.0) for name in names]).view(2, 2, 1)
    squares = d.get("log_sum_sq_probs")
    options = changed(DPOOptions(**d.about.get("loss", {})), change)
    more = {"ref_per_token_logps": ref * times[1], "counts": counts(d, order, mask, change, each=2)}
    more["log_sum_sq_probs"] = None if squares is None else squares[index]
    value, _ = dpo_loss(lp[index] * times[0], mask[index], options, **more, **arguments(options))
    return value, value.detach().abs() + 1e-2


def demonstrations(d: Dump, part: Tensor, lp: Tensor, _, mask: Tensor, change: dict) -> Loss:
    """Compute SFT for the rows `part`."""
    kind = change.get("loss_type", d.about.get("loss", {}).get("loss_type", "nll"))
    over = counts(d, part, other_mask(d, mask, change, "divide"), change)
    value = sft_loss(lp[part], mask[part], kind, counts=over)
    value = piece(d, change, "mean of rows", value, lp=lp, mask=mask, part=part)
    return value, value.detach().abs() + 1e-30
