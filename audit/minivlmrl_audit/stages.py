"""What of a step can be computed again from the rest of it: advantages, masks, loss, gradient.

A stage is a function (dump, change) -> {name: (theirs, ours, unit)}, or None where the dump lacks
something. change(name, x) is x, a piece of the definition, or what a deviation of causes.yaml has
in its place. An error is |theirs - ours| / unit, the size of the terms.
"""

import copy
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from minivlmrl.losses import Counts, correct_kl, kl_term
from minivlmrl.objectives.policy_losses import (
    AVERAGES,
    family_kl,
    importance_ratio,
    kept_tokens,
    mean_entropy,
    policy_terms,
)
from minivlmrl.objectives.preference_losses import answer_logps, dpo_loss, sft_loss
from minivlmrl_audit.dump import Dump
from minivlmrl_audit.moves import Change, first, formula, shown_as
from minivlmrl_audit.options import DPOOptions, PolicyOptions, arguments

Answer = dict[str, tuple[Tensor, Tensor, Tensor | float]] | None


def advantages(d: Dump, change: Change) -> Answer:
    """Compute them from rewards (N, K) and the group of each completion."""
    theirs = d.get("rollout_advantages", d.get("advantages"))
    if theirs is None or theirs.dim() != 1 or not d.has("rewards", "group"):
        return None
    rewards = d["rewards"]
    group = d["group"]
    group_size = d.about.get("num_generations") or int((group == group[0]).sum())
    index = torch.arange(len(group))
    group = change("group", group, index=index, group_size=group_size)
    rewards = change("rewards", rewards.view(len(group), -1))
    weights = d.about.get("reward_weights") or [1.0] * rewards.shape[1]
    weights = change("weights", torch.tensor(weights, dtype=torch.float64))
    value, unit = aggregate(d, change, rewards, weights, group)
    value = change("advantages", value)
    return {"advantages": (theirs, value, unit)}


def aggregate(
    d: Dump, change: Change, rewards: Tensor, weights: Tensor, group: Tensor
) -> tuple[Tensor, Tensor]:
    """Make one advantage (N,) of a completion's K rewards, and the unit of float32's rounding.

    TRL's multi_objective_aggregation says whether they are normalised before they are added.
    """
    is_unjudged = rewards.isnan().all(1) & (not change.get("missing"))
    normalise_first = d.about.get("multi_objective_aggregation") == "normalize_then_sum"
    if normalise_first == change.get("other aggregation", False):
        lengths = d["lengths"][d["row"].argsort()] if d.has("row") else None
        total = change("total", (rewards * weights).nansum(1), lengths=lengths)
        total = total.masked_fill(is_unjudged, torch.nan)
        scale = d.about.get("scale_rewards", "group")
        return normalise(change, total, group, "group", scale)
    parts = [normalise(change, x, group, "group", "group") for x in rewards.unbind(1)]
    values = torch.stack([value for value, _ in parts], 1).masked_fill(rewards.isnan(), 0)
    total = (values * weights).sum(1).masked_fill(is_unjudged, torch.nan)
    value, unit = normalise(change, total, group, "batch", "batch")
    return value, unit + sum(unit for _, unit in parts)


def normalise(
    change: Change, x: Tensor, group: Tensor, centre: str, scale: str
) -> tuple[Tensor, Tensor]:
    """Make advantages (N,) of x, 0 where it is NaN, and the unit of float32's rounding.

    centre, scale: "group" or "batch", of which the mean and the deviation are; "none": no scale.
    """
    baseline = torch.zeros_like(x)
    divisor = torch.ones_like(x)
    rollout = change.d.get("rollout", torch.zeros_like(group))
    for number in group.unique():
        is_member = group == number
        of_rollout = x[rollout == rollout[is_member][0]]
        all_judged = of_rollout[~of_rollout.isnan()]
        rewards = x[is_member]
        judged = rewards[~rewards.isnan()]
        if not len(judged):
            continue
        judged = change("judged", judged, rewards=rewards)
        names = {"rewards": rewards, "judged": judged, "all_judged": all_judged}
        choices = {"group": judged, "batch": all_judged}
        baseline[is_member] = change("mean", choices[centre].mean(), **names)
        scaling_rewards = change("scaling rewards", choices.get(scale), **names)
        if scaling_rewards is not None:
            std = scaling_rewards.std() if len(scaling_rewards) > 1 else x.new_tensor(torch.nan)
            divisor[is_member] = change(
                "divisor", std + 1e-4, std=std, scaling_rewards=scaling_rewards, **names
            )
    divisor = change("deviation", divisor)
    value = (x - change("baseline", baseline)) / divisor
    value = value.nan_to_num(0.0, 0.0, 0.0)
    # where a deviation divides by nearly nothing, its rounding is no excuse
    rounding = 0.1 * change.d["rewards"].nan_to_num().abs().max()
    rounding = rounding / divisor.nan_to_num(1.0).clamp(min=1e-4)
    return value, value.abs().max() + rounding + 1e-30


def rows(d: Dump, change: Change) -> Answer:
    """Take the advantage of each row from its completion in the rollout."""
    if not d.has("rollout_advantages", "advantages", "row") or d["advantages"].dim() != 1:
        return None
    rollout = d["rollout_advantages"]
    value = change("advantages", rollout[d["row"]], rollout_advantages=rollout)
    return {"advantages": (d["advantages"], value, rollout.abs().max() + 1e-30)}


def tokens(d: Dump, change: Change) -> Answer:
    """Take ids of completions from the sampler, which drew or was given them: never from text."""
    sampled = d.sampled(change)
    if sampled is None or not d.has("prompt_mask"):
        return None
    ids = sampled[0]
    no_token = d.about.get("pad_token_id", -1)
    their_ids = d["input_ids"].where(d.completion, no_token)
    their_ids = pad(their_ids, (0, ids.shape[1] - d.width), value=no_token)
    our_ids = ids.where(ids >= 0, no_token)
    our_ids = change("tokens", our_ids, their_ids=their_ids, no_token=no_token)
    attended = ids[:, : d.width] >= 0
    theirs = d["attention_mask"].bool() & attended
    attended = attended & theirs.any(1, keepdim=True)  # what was cut may be left out of the forward
    ours = change("attended", attended)
    return {
        "input_ids": (their_ids.double(), our_ids.double(), 1.0),
        "attention_mask": (theirs.double(), ours.double(), 1.0),
    }


def pictures(d: Dump, change: Change) -> Answer:
    """Show each row the pictures of its prompt, then those that tools answered, in order."""
    if not d.has("sampler_num_images"):
        return None
    numbers = {}
    sampled = numbered(d, "sampler_", numbers)
    theirs = numbered(d, "", numbers)
    row = d.get("row", d.all_rows)[change.picture_rows()]
    ids, _, forced_mask = d.turns()
    answered_counts = first(forced_mask & (ids == d.about.get("image_token_id", -1))).sum(1)
    ours = []
    for i, count in zip(row.tolist(), answered_counts.tolist(), strict=True):
        ours.append(shown_as(change, sampled[i], len(sampled[i]) - count))
    width = 2 * max(map(len, theirs + sampled))
    return {"pictures": (padded(theirs, width), padded(ours, width), 1.0)}


def numbered(d: Dump, kind: str, numbers: dict) -> list[list[int]]:
    """Number the pictures of each row, as `shown` lists them; equal ones have one number."""
    result = []
    for row_pictures in shown(d, kind):
        keys = [(*grid.tolist(), patches.numpy().tobytes()) for patches, grid in row_pictures]
        result.append([numbers.setdefault(key, len(numbers)) for key in keys])
    return result


def padded(lists: list[list[int]], width: int) -> Tensor:
    """Lay out lists of numbers as a matrix; -1 after their ends."""
    table = [numbers + [-1] * (width - len(numbers)) for numbers in lists]
    return torch.tensor(table, dtype=torch.float64)


def shown(d: Dump, kind: str = "") -> list[list[tuple[Tensor, Tensor]]]:
    """List pictures (patches, grid) of each row, or each completion of the rollout (sampler_)."""
    grids = d.get(f"{kind}image_grid_thw", torch.zeros(0, 3, dtype=torch.long))
    patches = d.get(f"{kind}pixel_values", torch.zeros(0, 0)).split(grids.prod(1).tolist())
    all_pictures = list(zip(patches, grids, strict=True))
    n = len(d.all_rows)
    counts = d.get(f"{kind}num_images", torch.full((n,), len(grids) // n))
    ends = counts.cumsum(0).tolist()
    return [all_pictures[begin:end] for begin, end in pairwise([0, *ends])]


def mask(d: Dump, change: Change) -> Answer:
    """Tell which tokens count: drawn ones up to a turn's stop token, or real ones of answers."""
    is_grpo = d.about["kind"] == "grpo"
    if not d.has("prompt_mask") or (is_grpo and not d.about.get("stop_token_ids")):
        return None
    _, drawn_mask, forced_mask = d.turns()
    real_mask = d["attention_mask"].bool()
    if is_grpo:
        real_mask = sampled_tokens(d, change, drawn_mask, forced_mask)
    counted_mask = change("tool mask", 1 - forced_mask.double()) * (d.completion & real_mask)
    ours = other_mask(d, counted_mask, change)
    return {"completion_mask": (d["completion_mask"].double(), ours, 1.0)}


def sampled_tokens(d: Dump, change: Change, drawn_mask: Tensor, forced_mask: Tensor) -> Tensor:
    """Tell which tokens (n, S) are of a turn, up to its stop token, or of a tool's answer."""
    ids = d["input_ids"]
    end_tokens = drawn_mask & torch.isin(ids, torch.tensor(d.about["stop_token_ids"]))
    ends_before = end_tokens.cumsum(1) - end_tokens.long()
    in_turn = ends_before == (ends_before * first(drawn_mask)).cummax(1).values
    text_follows = here_or_later(d.completion & (ids != d.about.get("pad_token_id", -1)))
    answer_follows = here_or_later(forced_mask)
    has_ended = (end_tokens & ~answer_follows).any(1, keepdim=True)
    has_ended = change("ended", has_ended, end_tokens=end_tokens)
    real_mask = forced_mask | (in_turn & (has_ended | answer_follows | text_follows))
    if change("drop truncated", d.about.get("mask_truncated_completions")):
        real_mask = real_mask & has_ended
    return real_mask


def here_or_later(x: Tensor) -> Tensor:
    """Mark each column of a mask (n, S) up to the last one of its row that is marked."""
    return x.flip(1).cumsum(1).flip(1) > 0


def other_mask(d: Dump, mask: Tensor, change: Change, key: str = "mask") -> Tensor:
    """Change a mask (n, S) as a deviation has it."""
    completion = d.completion.double()
    next_counts = mask.roll(-1, 1)
    end_tokens = mask * (1 - next_counts)
    if d.about.get("stop_token_ids"):
        end_tokens = torch.isin(d["input_ids"], torch.tensor(d.about["stop_token_ids"])).double()
    return change(
        key,
        mask,
        completion=completion,
        # nothing predicts the first token
        prompt=(d["attention_mask"].cumsum(1) > 1) * d["attention_mask"] * (1 - completion),
        previous_counts=mask.roll(1, 1) * completion,
        next_counts=next_counts,
        end_tokens=end_tokens,
        ids=d["input_ids"],
        theirs=d["completion_mask"].double(),
    )


def loss(d: Dump, change: Change) -> Answer:
    """Compute the loss of each micro-batch as it went into backward, and its gradient (n, S)."""
    if not d.has("loss") and not d.has("logps_gradient"):
        return None
    mask = other_mask(d, d["completion_mask"].double(), change)
    outputs = [name for name in ("per_token_logps", "entropies") if d.has(name)]
    leaves = [d[name].clone().requires_grad_() for name in outputs]
    logps = change("logps", leaves[0])
    compute = LOSSES[d.about["kind"]]
    parts = [compute(d, part, logps, leaves[-1], mask, change) for part in d.micro_batches]
    losses = torch.stack([value for value, _ in parts])
    units = torch.stack([unit for _, unit in parts])
    total = losses.sum() + 0 * leaves[0].sum()  # it has a gradient where a deviation leaves none
    slopes = torch.autograd.grad(total, leaves, materialize_grads=True)
    answer = {}
    if d.has("loss"):
        answer["loss"] = d["loss"].view_as(losses), losses.detach(), units + 1e-30
    rounding = 1e-3 / d["completion_mask"].sum().clamp(min=1)  # where all else cancels
    is_unreal = ~(d["attention_mask"].bool() | d["completion_mask"].bool())
    for name, slope in zip(("logps_gradient", "entropies_gradient"), slopes, strict=False):
        if d.has(name):
            theirs = d[name]
            # where the trainer has no log-probabilities it has no gradient
            slope = slope.masked_fill(is_unreal & (theirs == 0), 0.0)
            unit = max(slope.abs().max(), theirs.abs().max()) + rounding
            answer[name] = theirs, slope, unit
    return answer


def inputs(d: Dump, logps: Tensor, mask: Tensor, change: Change) -> tuple[Tensor, Tensor, Tensor]:
    """Take log-probabilities (n, S) of policy, old policy and reference as a deviation does."""
    detached = logps.detach()
    old = d.get("old_per_token_logps", detached)
    ref = d.get("ref_per_token_logps", detached)
    names = {
        "per_token_logps": logps,
        "detached_logps": detached,
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
        "mask": mask,
        "counted_share": mask.sum(1, keepdim=True) / d.completion.sum(1, keepdim=True).clamp(min=1),
        "sampler_logps": d.get("sampler_logps"),
    }
    return (
        change("policy", logps, **names),
        change("old", old, **names),
        change("reference", ref, **names),
    )


def counts(d: Dump, part: Tensor, mask: Tensor, change: Change) -> Counts:
    """Count what the loss of the rows `part` divides by: the step, or M times the micro-batch."""
    by_part = change.get("mean_over", d.about.get("mean_over")) == "micro_batch"
    rows = part if by_part else d.all_rows
    times = len(d.micro_batches) if by_part else 1
    tokens = mask[rows].sum().item() * times
    is_ours = torch.equal(mask, d["completion_mask"].double())  # not another mask of a deviation
    if d.has("rollout_tokens") and is_ours and not by_part:
        rollout_drawn = d.get("rollout_drawn")
        tokens = change("rollout tokens", d["rollout_tokens"], rollout_drawn=rollout_drawn)
        tokens = tokens[part[0]].item() / d.about.get("steps_per_rollout", 1)
        tokens /= d.about.get("world_size", 1)
    count = d.about.get("step_rows", len(rows)) * times
    return Counts(count, max(tokens, 1), d.about.get("max_completion_length"))


def changed(options, change: Change):
    """Copy options of a loss, with those that `change` names."""
    result = copy.copy(options)
    for name in change.keys() & vars(options):
        value = change[name]
        if str(value).startswith("="):
            value = formula(value[1:], c=change.get("c", 1.0), **vars(options))
        if isinstance(getattr(options, name), list):
            value = [value]
        setattr(result, name, value)
    return result


def policy(
    d: Dump, part: Tensor, logps: Tensor, entropies: Tensor, mask: Tensor, change: Change
) -> tuple[Tensor, Tensor]:
    """Compute GRPO's family for the rows `part`: the loss, and the sum of its terms' sizes."""
    defined_options = PolicyOptions(**d.about.get("loss", {}))
    options = changed(defined_options, change)
    ratio_mask = change("ratio mask", mask)[part]
    entropies = change("entropies", entropies[part], mask=ratio_mask)
    summed = other_mask(d, mask, change, "sum")
    kept = tokens_kept(d, change, part, entropies, summed[part], options.top_entropy_quantile)
    logps, old, reference = (x[part] for x in inputs(d, logps, mask, change))
    log_ratio = change("log-ratio", logps - old, mask=ratio_mask, old_per_token_logps=old)
    own_advantages = policy_advantages(d, part, change)
    names = {
        "per_token_logps": logps,
        "ref_per_token_logps": reference,
        "old_per_token_logps": old,
        "mask": ratio_mask,
        "importance_ratio": importance_ratio,
        "advantages": own_advantages.view(len(part), -1),
        "options": options,
    }
    terms, _ = policy_terms(
        logps,
        own_advantages,
        ratio_mask,
        replace(options, beta=0.0),
        kept=kept,
        old_per_token_logps=logps - log_ratio,
        **sampler_terms(d, part, change),
        **arguments(options),
    )
    terms = {"policy": change("terms", terms, selection=(part,), **names)}
    if options.beta:
        ratio = importance_ratio(log_ratio, ratio_mask, options.importance_sampling_level)
        kl = family_kl(logps, reference, ratio, options, options.kl_straight_through)
        if "KL estimate" in change:
            estimate = change("KL estimate", kl_term(logps, reference, options.kl_estimator))
            kl = correct_kl(estimate, ratio, options)
        terms["KL"] = options.beta * change("KL", kl, ratio=ratio, **names)
    divided = other_mask(d, mask, change, "divide")
    count = counts(d, part, divided, change)
    weights = change("weights", torch.ones_like(mask), mask=mask)
    value = torch.zeros(())
    unit = torch.zeros(())
    for name, x in terms.items():
        x = x * (weights * other_mask(d, summed, change, f"sum of {name}"))[part]
        loss_type = change.get("average", defined_options.loss_type)
        average = AVERAGES[change.get(f"average of {name}", loss_type)]
        value = value + average(x, divided[part], count)
        # float32 rounds the KL as it does what the KL is the difference of
        unit = unit + average(x.detach().abs() + 0.01 * options.beta, divided[part], count)
    if options.entropy_coef:
        completion = d.completion[part].double()
        entropy_mask = change("entropy mask", kept, mask=ratio_mask, completion=completion)
        bonus = options.entropy_coef * mean_entropy(entropies, entropy_mask, count)
        value = value - bonus
        unit = unit + bonus.detach()
    return value, unit


def policy_advantages(d: Dump, part: Tensor, change: Change) -> Tensor:
    """Take the advantages of the rows `part`, (rows,) or (rows, S)."""
    value = d["advantages"]
    if value.dim() == 2:
        value = d.align(value)
    value = change("advantages", value)[part]
    return change("whitened", value)


def sampler_terms(d: Dump, part: Tensor, change: Change) -> dict[str, Tensor]:
    """Take what the rows `part` have of the sampler: log-probabilities, weights of its mismatch."""
    result = {}
    if d.has("sampler_logps"):
        result["sampling_per_token_logps"] = d["sampler_logps"][part]
    if d.has("importance_sampling_ratio"):
        ratio = d["importance_sampling_ratio"]
        ratio = ratio if ratio.shape[1] == 1 else d.align(ratio)
        result["importance_sampling_ratio"] = change("correction", ratio)[part]
    return result


def tokens_kept(
    d: Dump, change: Change, part: Tensor, entropies: Tensor, ratio_mask: Tensor, quantile: float
) -> Tensor:
    """Keep the tokens of the rows `part` whose entropies are in the upper share `quantile`."""
    return change(
        "kept",
        kept_tokens(entropies, ratio_mask, quantile),
        entropies=entropies,
        ratio_mask=ratio_mask,
        quantile=quantile,
        completion=d.completion[part].double(),
        kept_tokens=kept_tokens,
    )


def preference(
    d: Dump, part: Tensor, logps: Tensor, _, mask: Tensor, change: Change
) -> tuple[Tensor, Tensor]:
    """Compute DPO's family for the rows `part`: pairs by `pair`, `chosen` says which is."""
    logps, _, reference = inputs(d, logps, mask, change)
    order = part[(d["pair"][part] * 2 + 1 - d["chosen"][part].long()).argsort()]
    index = change("index", order.view(-1, 2))  # (pairs, 2): rows of chosen and rejected
    mask_of_pairs = mask[index]
    reference = change("references", reference[index], mask=mask_of_pairs)
    options = changed(DPOOptions(**d.about.get("loss", {})), change)
    ref_logps = answer_logps(reference, mask_of_pairs, options.ld_alpha)
    policy_logps = answer_logps(logps[index], mask_of_pairs, options.ld_alpha)
    log_ratio = change("log-ratio", policy_logps - ref_logps, lengths=mask_of_pairs.sum(-1))
    value, _ = dpo_loss(
        logps[index],
        mask_of_pairs,
        options,
        ref_logps=policy_logps - log_ratio,
        counts=counts(d, part, mask * d["chosen"][:, None], change),  # TRL's sft counts these
        log_sum_sq_probs=d["log_sum_sq_probs"][index] if d.has("log_sum_sq_probs") else None,
        **arguments(options),
    )
    return value, value.detach().abs() + 1e-2


def demonstrations(
    d: Dump, part: Tensor, logps: Tensor, _, mask: Tensor, change: Change
) -> tuple[Tensor, Tensor]:
    """Compute SFT for the rows `part`."""
    loss_type = change.get("loss_type", d.about.get("loss", {}).get("loss_type", "nll"))
    count = counts(d, part, other_mask(d, mask, change, "divide"), change)
    weights = change("weights", torch.ones_like(mask), mask=mask)
    value = sft_loss(logps[part], (mask * weights)[part], loss_type, counts=count)
    value = change("mean of rows", value, per_token_logps=logps, mask=mask, part=part)
    return value, value.detach().abs() + 1e-30


LOSSES = {"grpo": policy, "dpo": preference, "sft": demonstrations}
