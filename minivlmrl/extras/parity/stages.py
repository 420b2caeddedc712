"""Recompute advantages, token ids, masks, loss and loss gradient in a recorded step.

Functions such as `loss` return None if the recorded step lacks a tensor, else {tensor name: (theirs, ours, unit)}: the
trainer's tensor, the recomputed tensor, and the divisor in the relative error (theirs - ours) / unit.

`change` is a simulated bug: change("mask", x) returns a wrong mask if the bug is in the mask, else the correct mask x.
"""

from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from minivlmrl.extras.parity.change import Change
from minivlmrl.extras.parity.formulas import first
from minivlmrl.extras.parity.step import Dump
from minivlmrl.extras.parity.step_format import OPTIONS, term_arguments
from minivlmrl.losses.advantages import nanstd
from minivlmrl.losses.grpo import AVERAGES, TERMS, LossNormalizer, TermInputs, correct_kl, importance_ratio, kl_term
from minivlmrl.losses.grpo_variants import off_policy_mask
from minivlmrl.losses.preference import answer_logps, dpo_loss

Answer = Mapping[str, tuple[Tensor, Tensor, Tensor | float]] | None


def advantages(d: Dump, change: Change) -> Answer:
    """Recompute advantages (N,) from rewards (N, K) and groups."""
    theirs = d.get("rollout_advantages", d.get("advantages"))
    if theirs is None or theirs.dim() != 1 or not d.has("rewards", "group"):
        return None
    reward, baseline, divisor = reward_parts(d, change)
    value = change("advantages", ((reward - baseline) / divisor).nan_to_num(0.0, 0.0, 0.0))
    # minimum 1e-4: a standard deviation near 0 would give a huge tolerance
    rounding = 0.1 * d["rewards"].nan_to_num().abs().max() / divisor.nan_to_num(1.0).clamp(min=1e-4)
    return {"advantages": (theirs, value, value.abs().max() + rounding + 1e-30)}


def reward_parts(d: Dump, change: Change) -> tuple[Tensor, Tensor, Tensor]:
    """Return total rewards, baselines and divisors, each (N,): advantage = (reward - baseline) / divisor."""
    group = d["group"]
    group_size = d.about.get("num_generations") or (group == group[0]).sum()
    group = change("group", group, index=torch.arange(len(group)), group_size=group_size)
    rewards = change("rewards", d["rewards"].view(len(group), -1))
    weights = d.about.get("reward_weights") or [1.0] * rewards.shape[1]
    weights = change("reward weights", torch.tensor(weights, dtype=torch.float64))
    is_unjudged = rewards.isnan().all(1)
    center = "group"
    scale = d.about.get("scale_rewards", "group")
    if change("normalize first", d.about.get("multi_objective_aggregation") == "normalize_then_sum"):
        parts = []
        for x in rewards.unbind(1):
            baseline, divisor = moments(change, x, group, "group", "group")
            parts.append(((x - baseline) / divisor).nan_to_num(0.0, 0.0, 0.0))
        rewards = torch.stack(parts, 1)
        center = scale = "batch"
    weighted = rewards * weights
    total = change("total", weighted.nansum(1)).masked_fill(is_unjudged, torch.nan)
    return total, *moments(change, total, group, center, scale)


def moments(change: Change, x: Tensor, group: Tensor, center: str, scale: str) -> tuple[Tensor, Tensor]:
    """Return baselines (N,) and divisors (N,) for the rewards x (N,), ignoring NaN.

    Args:
        center: baseline = mean over the "group" or the rollout ("batch").
        scale: divisor = standard deviation over the "group" or the rollout ("batch"), or 1 ("none").
    """
    baseline = torch.zeros_like(x)
    divisor = torch.ones_like(x)
    rollout = change.d.get("rollout", torch.zeros_like(group))
    is_judged = ~x.isnan()
    for number in group[is_judged].unique():
        is_member = group == number
        of_rollout = rollout == rollout[is_judged & is_member][0]
        rewards = x[is_member]
        judged = change("judged", rewards[~rewards.isnan()], rewards=rewards)
        names = {"rewards": rewards, "judged": judged, "all_judged": x[is_judged & of_rollout]}
        choices = {"group": judged, "batch": names["all_judged"]}
        baseline[is_member] = change("group mean", choices[center].mean(), **names)
        scaling_rewards = change("scaling rewards", choices.get(scale), **names)
        if scaling_rewards is not None:
            std = change("std", nanstd(scaling_rewards), scaling_rewards=scaling_rewards, **names)
            divisor[is_member] = std + change("epsilon", 1e-4)
    return change("baseline", baseline), change("deviation", divisor)


def rows(d: Dump, change: Change) -> Answer:
    """Check that completions kept their advantages when the rollout was shuffled and split into steps."""
    if not d.has("rollout_advantages", "advantages", "row") or d["advantages"].dim() != 1:
        return None
    rollout = d["rollout_advantages"]
    value = change("advantages", rollout[d["row"]])
    return {"advantages": (d["advantages"], value, rollout.abs().max() + 1e-30)}


def tokens(d: Dump, change: Change) -> Answer:
    """Recompute completion token ids and attention mask from sampler_ids."""
    # use the sampled ids: encoding the sampled text again may give other ids
    if d.sampled is None or not d.has("prompt_mask"):
        return None
    ids, flags = d.sampled
    no_token = d.about.get("pad_token_id", -1)
    their_ids = d["input_ids"].where(d.completion, no_token)
    their_ids = pad(their_ids, (0, ids.shape[1] - d.width), value=no_token)
    ids = change("tokens", ids, their_ids=their_ids.where(their_ids != no_token, -1))
    ours = ids.where(ids >= 0, no_token)
    sampled_mask = ids[:, : d.width] >= 0
    attention_mask = d["attention_mask"].bool()
    in_prompt = ~d.completion
    # a trainer may skip a truncated completion by setting its attention_mask to 0
    is_used = (attention_mask & sampled_mask).any(1, keepdim=True)
    attended = (sampled_mask & is_used) | (attention_mask & in_prompt & d["prompt_mask"].bool())
    attended = change("attended", attended)
    # skip sampled tokens outside completion_mask: mask() compares completion_mask
    is_compared = in_prompt | (sampled_mask & ~((flags[:, : d.width] == 1) & (d["completion_mask"] == 0)))
    return {
        "input_ids": (their_ids.double(), ours.double(), 1.0),
        "attention_mask": ((attention_mask & is_compared).double(), (attended & is_compared).double(), 1.0),
    }


def pictures(d: Dump, change: Change) -> Answer:
    """Compare images used in training with those used in sampling."""
    if not d.has("sampler_num_images"):
        return None
    sampled = shown(d, "sampler_")
    rows = d.get("row", d.all_rows)[change("picture rows", d.all_rows)]
    ours = [change("pictures", sampled[row]) for row in rows]
    numbers = {}  # {image: id}; equal images share an id
    table = []
    for row_pictures in ours + shown(d):
        keys = [(*grid.tolist(), patches.numpy().tobytes()) for patches, grid in row_pictures]
        row_numbers = [numbers.setdefault(key, len(numbers)) for key in keys]
        table.append(torch.tensor(row_numbers, dtype=torch.float64))
    ours, theirs = pad_sequence(table, batch_first=True, padding_value=-1).chunk(2)
    return {"pictures": (theirs, ours, 1.0)}


def shown(d: Dump, kind: str = "") -> list[list[tuple[Tensor, Tensor]]]:
    """Return a list of images (patches, grid) per row, from training (kind="") or sampling (kind="sampler_")."""
    grids = d.get(f"{kind}image_grid_thw", torch.zeros(0, 3, dtype=torch.long))
    patches = d.get(f"{kind}pixel_values", torch.zeros(0, 0)).split(grids.prod(1).tolist())
    all_pictures = list(zip(patches, grids, strict=True))
    n = len(d.all_rows)
    counts = d.get(f"{kind}num_images", torch.full((n,), len(grids) // n))
    ends = counts.cumsum(0).tolist()
    return [all_pictures[begin:end] for begin, end in pairwise([0, *ends])]


def mask(d: Dump, change: Change) -> Answer:
    """Recompute completion_mask: model turns up to their stop tokens in GRPO, whole answers in DPO and SFT."""
    is_grpo = d.about["kind"] == "grpo"
    if not d.has("prompt_mask") or (is_grpo and not d.about.get("stop_token_ids")):
        return None
    _, drawn_mask, forced_mask = d.turns()
    real_mask = d["attention_mask"].bool()
    if is_grpo:
        real_mask = sampled_tokens(d, change, drawn_mask, forced_mask)
    ours = change("mask", (~forced_mask & d.completion & real_mask).double())
    return {"completion_mask": (d["completion_mask"].double(), ours, 1.0)}


def sampled_tokens(d: Dump, change: Change, drawn_mask: Tensor, forced_mask: Tensor) -> Tensor:
    """Return a mask for tool responses and model turns up to their stop tokens."""
    ids = d["input_ids"]
    end_tokens = drawn_mask & d.is_stop(ids)
    ends_before = end_tokens.cumsum(1) - end_tokens.long()
    in_turn = ends_before == (ends_before * first(drawn_mask)).cummax(1).values
    text_follows = here_or_later(d.completion & (ids != d.about.get("pad_token_id", -1)))
    has_ended = (end_tokens & ~here_or_later(forced_mask)).any(1, keepdim=True)
    has_ended = change("ended", has_ended, end_tokens=end_tokens)
    real_mask = forced_mask | (in_turn & (has_ended | text_follows))
    if change("drop truncated", d.about.get("mask_truncated_completions")):
        real_mask = real_mask & has_ended
    return real_mask


def here_or_later(x: Tensor) -> Tensor:
    """Set all columns up to the last 1 in a row: [0, 1, 0, 1, 0] gives [1, 1, 1, 1, 0]."""
    return x.flip(1).cumsum(1).flip(1) > 0


def mask_in(change: Change, use: str) -> Tensor:
    return change.inside(use)("mask", change.d["completion_mask"].double())


def loss(d: Dump, change: Change) -> Answer:
    """Recompute the loss of each micro-batch, and the gradient (n, S) with respect to log-probs."""
    if not d.has("loss") and not d.has("logps_gradient"):
        return None
    leaf = d["per_token_logps"].clone().requires_grad_()
    losses, units = LOSSES[d.about["kind"]](leaf, change)
    # + 0 * leaf: autograd would fail for a loss that does not use log-probs
    [slope] = torch.autograd.grad(losses.sum() + 0 * leaf.sum(), leaf)
    answer = {}
    if d.has("loss"):
        answer["loss"] = d["loss"].view_as(losses), losses.detach(), units.detach() + 1e-30
    if d.has("logps_gradient"):
        theirs = d["logps_gradient"]
        # ignore padding if its recorded gradient is 0: a trainer may skip padding
        is_unreal = ~(d["attention_mask"].bool() | d["completion_mask"].bool())
        slope = slope.masked_fill(is_unreal & (theirs == 0), 0.0)
        # tolerance grows with beta: large float32 rounding errors in KL gradients
        beta = loss_options(Change(d, {})).beta if d.about["kind"] == "grpo" else 0.0
        rounding = (1e-3 + 0.01 * beta) / d["completion_mask"].sum().clamp(min=1)
        answer["logps_gradient"] = theirs, slope, max(slope.abs().max(), theirs.abs().max()) + rounding
    return answer


def inputs(logps: Tensor, mask: Tensor, change: Change) -> tuple[Tensor, Tensor, Tensor]:
    """Return policy, old policy and reference log-probs, each (n, S)."""
    logps = change("logps", logps)
    old = change.d.get("old_per_token_logps", logps.detach())
    names = {"per_token_logps": logps, "old_per_token_logps": old, "mask": mask}
    ref = change.d.get("ref_per_token_logps", logps.detach())
    return change("policy", logps, **names), change("old", old, **names), change("reference", ref, **names)


def normalizer_of(part: Tensor, mask: Tensor, change: Change) -> LossNormalizer:
    """Count rows and tokens for the loss denominator."""
    d = change.d
    by_part = change("mean_over", d.about.get("mean_over")) == "micro_batch"
    rows = part if by_part else d.all_rows
    times = len(d.micro_batches) if by_part else 1
    tokens = mask[rows].sum() * times
    # rollout_tokens counts the recorded mask, not a mask with a simulated bug
    is_ours = torch.equal(mask, d["completion_mask"].double())
    if d.has("rollout_tokens") and is_ours and not by_part:
        tokens = d["rollout_tokens"][part[0]].item()
        tokens /= d.about.get("steps_per_rollout", 1) * d.about.get("world_size", 1)
    return LossNormalizer(len(rows) * times, max(tokens, 1), d.about.get("max_completion_length"))


def loss_options(change: Change) -> Any:
    """Return the loss options, including simulated bugs such as beta = 0."""
    about = change.d.about
    options = OPTIONS[about["kind"]](**about.get("loss", {}))
    values = dict(vars(options))
    for name in change.keys() & values.keys():
        setattr(options, name, change(name, values[name], **values))
    return options


class PolicyPieces:
    """Tensors (n, S) in the GRPO loss, such as importance ratios."""

    def __init__(self, logps: Tensor, change: Change):
        d = change.d
        self.change = change
        self.options = loss_options(change)
        self.mask = mask_in(change, "the ratio")
        self.per_token_logps, old, self.ref_per_token_logps = inputs(logps, self.mask, change)
        self.old_per_token_logps = old
        self.advantages = change("advantages", d["advantages"].view(len(logps), -1))  # (n, 1) or (n, S)
        self.ref_log_ratio = self.per_token_logps - self.ref_per_token_logps
        self.log_ratio = change("log-ratio", self.per_token_logps - old, self)

    @cached_property
    def ratio(self) -> Tensor:
        ratio = importance_ratio(self.log_ratio, self.mask, self.options.importance_sampling_level)
        return self.change("ratio", ratio)

    @property
    def clipped_ratio(self) -> Tensor:
        return self.ratio.clamp(1 - self.options.epsilon_low, 1 + self.options.epsilon_high)


def policy(logps: Tensor, change: Change) -> Tensor:
    total = torch.zeros(2, len(change.d.micro_batches))
    for use, (term, weight_name) in POLICY_TERMS.items():
        inside = change.inside(use)
        pieces = PolicyPieces(logps, inside)
        weight = getattr(pieces.options, weight_name, 1.0)
        if weight:
            total = total + weight * term(pieces, inside)
    return total


def policy_term(pieces: PolicyPieces, change: Change) -> Tensor:
    options = pieces.options
    d = change.d
    weights = change("correction", d.get("importance_sampling_ratio", torch.ones(1, 1)))
    arguments = term_arguments(options)
    if options.loss_type == "vespo":  # VESPO applies the importance sampling correction itself
        arguments["importance_sampling_ratio"] = weights
        weights = torch.ones_like(weights)
    logps, advantages, mask = pieces.per_token_logps, pieces.advantages, pieces.mask
    if options.off_policy_mask_threshold is not None:
        sampler_logps = d.get("sampler_logps", logps - pieces.log_ratio)
        weights = weights * off_policy_mask(logps, sampler_logps, advantages, mask, options.off_policy_mask_threshold)
    term_inputs = TermInputs(
        logps, pieces.log_ratio, pieces.ratio, advantages, mask, options.epsilon_low, options.epsilon_high
    )
    terms, _ = TERMS[options.loss_type](term_inputs, **arguments)
    return averaged(change("terms", terms * weights, pieces, gain=advantages * weights), change)


def kl_term_of(pieces: PolicyPieces, change: Change) -> Tensor:
    options = pieces.options
    of_both = (pieces.per_token_logps, pieces.ref_per_token_logps)
    kl = change("KL estimate", kl_term(*of_both, options.kl_estimator), pieces)
    if options.use_bias_correction_kl:
        kl = correct_kl(kl, pieces.ratio, options.kl_estimator)
    kl = change("KL", kl, pieces)
    # float32 rounding errors of torch.expm1: about 1e-7 times the log-ratio
    return averaged(kl, change, rounding=0.02 * pieces.ref_log_ratio.detach().abs())


# {term in the GRPO loss: (function, name of the weight option, "" = weight 1)}
POLICY_TERMS = {"the policy's term": (policy_term, ""), "the KL": (kl_term_of, "beta")}
ALL_AVERAGES = AVERAGES | {"nll": AVERAGES["dapo"], "dft": AVERAGES["dapo"]}


def averaged(terms: Tensor, change: Change, rounding: Tensor | float = 0.0) -> Tensor:
    """Return (2, M): mean token loss and mean absolute token loss per micro-batch."""
    mask = mask_in(change, "the sum")
    counted = mask_in(change, "the count")
    weights = change("weights", torch.ones_like(mask), mask=mask)
    definition = loss_options(Change(change.d, {}))
    average = ALL_AVERAGES[change("average", definition.loss_type)]
    terms = terms * (mask * weights)
    sizes = terms.detach().abs() + rounding  # terms may be differences between larger numbers with rounding errors
    results = []
    for part in change.d.micro_batches:
        normalizer = normalizer_of(part, counted, change)
        value = average(terms[part], counted[part], normalizer)
        value = change("mean", value, part=part, terms=terms[part], mask=counted[part])
        results.append(torch.stack([value, average(sizes[part], counted[part], normalizer)]))
    return torch.stack(results, 1)


def preferences(logps: Tensor, change: Change) -> Tensor:
    return torch.stack([preference(part, logps, change) for part in change.d.micro_batches], 1)


def preference(part: Tensor, logps: Tensor, change: Change) -> Tensor:
    """Return (2,): DPO loss of a micro-batch, and |loss| + 0.01, by which errors are divided."""
    d = change.d
    order = part[(d["pair"][part] * 2 + 1 - d["chosen"][part].long()).argsort()]
    index = change("index", order.view(-1, 2))  # (pairs, 2): chosen and rejected row
    index = torch.stack([index[:, 0], change("rejected", index[:, 1])], 1)
    mask = change("mask", d["completion_mask"].double())
    options = loss_options(change)
    policy, _, reference = inputs(logps, mask, change)
    own_logps = policy[index]
    # summed log-probs (pairs, 2)
    policy_logps, ref_logps = (answer_logps(x[index], mask[index], options.ld_alpha) for x in (policy, reference))
    lengths = mask[index].sum(-1)
    ref_logps = change("summed reference", ref_logps, answer_lengths=lengths)
    log_ratio = change("log-ratio", policy_logps - ref_logps, answer_lengths=lengths, options=options)
    value, _ = dpo_loss(
        own_logps,
        mask[index],
        **vars(options),
        ref_logps=policy_logps - log_ratio,
        # DPO loss "sft": TRL averages over tokens of chosen answers
        normalizer=normalizer_of(part, mask * d["chosen"][:, None], change),
        log_sum_sq_probs=d["log_sum_sq_probs"][index] if d.has("log_sum_sq_probs") else None,
    )
    value = change("pair loss", value, margins=options.beta * (log_ratio[:, 0] - log_ratio[:, 1]))
    return torch.stack([value, value.detach().abs() + 1e-2])


def demonstrations(logps: Tensor, change: Change) -> Tensor:
    logps = change("logps", logps)
    terms = -logps
    if loss_options(change).loss_type == "dft":
        terms = terms * logps.detach().exp()
    return averaged(change("terms", terms, per_token_logps=logps), change)


LOSSES = {"grpo": policy, "dpo": preferences, "sft": demonstrations}
