"""Shared by test_losses.py and test_policy_losses.py: a loss of the family, with grpo_loss beside it where it can."""

from dataclasses import fields
from math import log

import torch
from by_hand import tensor

from minivlmrl.losses.grpo import AVERAGES, Counts, GRPOLossOptions, counts_of, grpo_loss
from minivlmrl.losses.grpo_variants import GRPOLossOptions, policy_loss, policy_terms

OPTIONS, BOOK = ({field.name for field in fields(c)} for c in (GRPOLossOptions, GRPOLossOptions))
INPUTS = {"entropies", "entropy_threshold", "num_entropy_tokens", *policy_terms.__kwdefaults__}
BOOKS_INPUTS = {"old_per_token_logps", "ref_per_token_logps"}


def loss_of(per_token_logps, advantages, mask, **given):
    """Loss and metrics of policy_loss. With options and tensors that grpo_loss knows too it gives the same bits.

    Args:
        given: fields of GRPOLossOptions and Counts, and keywords of policy_loss, by name; what is None is left out.
    """
    given = {name: value for name, value in given.items() if value is not None}
    options = {name: given.pop(name) for name in OPTIONS & given.keys()}
    inputs = {name: given.pop(name) for name in INPUTS & given.keys()}
    own = counts_of(mask)
    counts = Counts(**{"sequences": own.sequences, "tokens": own.tokens, **given})
    found = policy_loss(per_token_logps, advantages, mask, GRPOLossOptions(**options), counts=counts, **inputs)
    plain = inputs.keys() - {"entropies"} <= BOOKS_INPUTS and options.keys() <= BOOK
    plain = plain and options.get("importance_sampling_level") != "sequence_token"
    if plain and options.get("loss_type", "dapo") in AVERAGES:
        tensors = {name: inputs[name] for name in BOOKS_INPUTS & inputs.keys()}
        loss, metrics = grpo_loss(per_token_logps, advantages, mask, GRPOLossOptions(**options), **tensors, counts=counts)
        assert torch.equal(loss, found[0]) and metrics == found[1]
    return found


def policy(ratios, advantages, **options):
    """The loss of completions with given ratios r_t to the old policy; every token has log-probability -1.

    Returns the loss, its gradient to the log-probabilities of all real tokens in order, and the metrics.
    """
    T = max(map(len, ratios))
    mask = tensor(*[[1.0] * len(row) + [0.0] * (T - len(row)) for row in ratios])
    logps = torch.full_like(mask, -1.0).requires_grad_()
    old = logps.detach() - tensor(*[[log(r) for r in row] + [5.0] * (T - len(row)) for row in ratios])
    loss, metrics = loss_of(logps, tensor(*advantages), mask, **{"old_per_token_logps": old, **options})
    gradient = torch.autograd.grad(loss, logps)[0][mask.bool()].tolist()
    return loss.item(), gradient, {name: value.item() for name, value in metrics.items()}


# one token of ratio 1.5 with advantage 1 | ratios 0.5, 1, 1.1 with advantage -1
OFF_POLICY = ([[1.5], [0.5, 1.0, 1.1]], [1.0, -1.0])


def reinforce(logps, advantages, mask, options, **step):
    """A user's loss: REINFORCE, over the tokens of the step."""
    return -(advantages[:, None] * logps * mask).sum() / step["counts"].tokens, {}
