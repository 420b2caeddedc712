"""Batches of the policy cells are telling, and each call is asked of the book's loss where it can answer."""

import pytest
import torch
from parity.compare import FAMILIES, grid
from parity.policy_cells import B, T, our_loss, policy_batch

from minivlmrl import losses
from minivlmrl.algorithms import policy_losses


@pytest.mark.parametrize("seed", range(4))
def test_a_batch_reaches_every_branch_of_a_loss(seed):
    """Rows of several lengths, ratios on both sides of the clip range."""
    batch = policy_batch(seed)
    lengths, ratio = batch["mask"].sum(1), (batch["per_token_logps"] - batch["old_per_token_logps"]).exp()
    assert lengths.min() >= 1 and lengths[0] == T and batch["advantages"][-1] == 0
    assert ((ratio < 0.8) & (batch["mask"] == 1)).any() and ((ratio > 1.2) & (batch["mask"] == 1)).any()
    assert all(torch.equal(value, policy_batch(seed)[name]) for name, value in batch.items())


def test_two_seeds_have_advantages_of_both_signs():
    """Every family of cells takes seeds 0 and 1 at least."""
    advantages = torch.cat([policy_batch(seed)["advantages"] for seed in range(2)])
    assert advantages.min() < -0.5 and advantages.max() > 0.5


@pytest.mark.parametrize(
    "options",
    [*grid(loss_type=FAMILIES["policy"][0]["options"]["loss_type"]), {"delta": 1.6}, {"entropy_coef": 0.1}],
    ids=str,
)
def test_the_book_answers_where_it_can(options, monkeypatch):
    asked = []
    for module, name in ((losses, "grpo_loss"), (policy_losses, "policy_loss")):
        answer = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, name=name, answer=answer, **k: (asked.append(name), answer(*a, **k))[1]
        )
    our_loss(policy_batch(0), **options)
    assert asked == ["grpo_loss" if options.get("loss_type") in losses.AVERAGES else "policy_loss"]
    our_loss(policy_batch(0) | {"importance_sampling_ratio": torch.ones(B, 1)}, **options)
    assert asked[1] == "policy_loss"
