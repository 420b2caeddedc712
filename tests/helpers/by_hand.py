"""Losses by hand: float64 tensors, a tolerance, and grpo_loss with all TRL options."""

import inspect
from dataclasses import fields
from math import log

import pytest
import torch

from minivlmrl.losses.grpo import TERMS, LossNormalizer, batch_normalizer, clipped, grpo_loss
from minivlmrl.losses.grpo_variants import kept_tokens, mean_entropy, off_policy_mask

OWN = inspect.signature(grpo_loss).parameters  # arguments of grpo_loss, without term options
COUNTS = {field.name for field in fields(LossNormalizer)}


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def near(*values):
    return pytest.approx(values[0] if len(values) == 1 else list(values), abs=1e-6)


def loss_of(per_token_logps, advantages, mask, **given):
    """Call grpo_loss with TRL options, which may also set token weights and an entropy bonus."""
    given = {name: value for name, value in given.items() if value is not None}
    loss_type = given.get("loss_type", "dapo")
    if given.pop("kl_straight_through", False):
        given["kl_estimator"] = given.get("kl_estimator", "k3") + "+"
    given.setdefault("epsilon_high", 0.2)  # in TRL also for cispo, for which grpo_loss wants a value
    own = batch_normalizer(mask)
    totals = {"sequences": own.sequences, "tokens": own.tokens}
    normalizer = LossNormalizer(**totals | {name: given.pop(name) for name in COUNTS & given.keys()})
    entropies, coefficient = given.pop("entropies", None), given.pop("entropy_coef", 0.0)
    num_tokens = given.pop("num_entropy_tokens", None)
    quantile = given.pop("top_entropy_quantile", 1.0)
    kept = kept_tokens(entropies, mask, quantile, given.pop("entropy_threshold", None))
    weights = kept
    threshold = given.pop("off_policy_mask_threshold", None)
    sampler = given.pop("sampling_per_token_logps", given.get("old_per_token_logps", per_token_logps.detach()))
    if threshold is not None:
        weights = weights * off_policy_mask(per_token_logps, sampler, advantages, mask, threshold)
    if loss_type != "vespo":
        weights = weights * given.pop("importance_sampling_ratio", 1)
    takes = {*OWN, *(TERMS.get(loss_type, clipped).__kwdefaults__ or {})}
    given = {name: value for name, value in given.items() if name in takes}  # TRL ignores other options, too
    loss, metrics = grpo_loss(per_token_logps, advantages, mask, normalizer=normalizer, token_weights=weights, **given)
    if coefficient:
        loss = loss - coefficient * mean_entropy(entropies, kept, normalizer, num_tokens)
    return loss, metrics


def loss_options(section, loss):
    """Return the options of a stage that its loss function takes."""
    names = inspect.signature(loss).parameters.keys() - {"advantages"}  # "advantages" also names an option
    return {name: value for name, value in vars(section).items() if name in names}


def policy(ratios, advantages, **options):
    """Return loss, gradient without padding, and metrics, for token ratios at log-probability -1."""
    T = max(map(len, ratios))
    mask = tensor(*[[1.0] * len(row) + [0.0] * (T - len(row)) for row in ratios])
    logps = torch.full_like(mask, -1.0).requires_grad_()
    old = logps.detach() - tensor(*[[log(r) for r in row] + [5.0] * (T - len(row)) for row in ratios])
    loss, metrics = loss_of(logps, tensor(*advantages), mask, **{"old_per_token_logps": old, **options})
    gradient = torch.autograd.grad(loss, logps)[0][mask.bool()].tolist()
    return loss.item(), gradient, {name: value.item() for name, value in metrics.items()}


def reinforce(logps, advantages, mask, *, normalizer, **others):
    """Compute the REINFORCE loss per token in a step: example of a user's loss function."""
    return -(advantages[:, None] * logps * mask).sum() / normalizer.tokens, {}


def max_rl(rewards, num_generations):
    """Return (reward - group mean) / group mean: example of a function for grpo.advantages."""
    groups = rewards.view(-1, num_generations)
    mean = groups.mean(1, keepdim=True)
    return ((groups - mean) / mean.clamp(min=1e-6)).flatten()
