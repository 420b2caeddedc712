"""Compare PPO's loss and advantages with arithmetic by hand and with TRL 1.12.0, the last version with PPOTrainer."""

import json
from math import exp, log
from types import SimpleNamespace

import pytest
import torch

from minivlmrl.losses.ppo import gae, ppo_loss, token_rewards, whiten
from tests.helpers.links import ROOT

RECORDED = json.loads((ROOT / "tests" / "recorded" / "ppo_trl_1.12.0.json").read_text())
CASES = [pytest.param(case, id=str(case["config"] or "defaults")) for case in RECORDED["cases"]]
PAD, EOS = 0, 1


def trl_step(case):
    """Combine our functions as TRL's PPOTrainer does, with padded rows and the score one place after the last token."""
    inputs = {name: torch.tensor(value, dtype=torch.float64) for name, value in case["inputs"].items()}
    config = {
        "kl_coef": 0.05, "kl_estimator": "k1", "gamma": 1.0, "lam": 0.95, "whiten_rewards": False,
        "missing_eos_penalty": 0.0, **case["config"],
    }  # fmt: skip
    responses = inputs["responses"].long()
    T = responses.shape[1]
    post = responses.masked_fill((responses == EOS).cumsum(1) - (responses == EOS).long() > 0, PAD)
    last = (post != PAD).long().cumprod(1).sum(1) - 1  # (B,)
    place = torch.arange(T)
    mask = (place <= last[:, None]).double()
    value_mask = (place <= last[:, None] + 1).double()
    scores = inputs["scores"] - config["missing_eos_penalty"] * (post != EOS).all(1)
    old = inputs["logprobs"] * mask + (1 - mask)
    values = inputs["values"] * value_mask
    kl_rewards = token_rewards(0 * scores, old, inputs["ref_logprobs"], mask, config["kl_coef"], config["kl_estimator"])
    rewards = kl_rewards.scatter_add(1, (last + 1).clamp(max=T - 1)[:, None], scores[:, None])
    if config["whiten_rewards"]:
        mean = (rewards * value_mask).sum() / value_mask.sum()
        rewards = (whiten([rewards], [value_mask])[0] + mean) * value_mask
    advantages, returns = gae(rewards, values, config["gamma"], config["lam"])
    [advantages] = whiten([advantages], [mask])
    logps = inputs["new_logprobs"].requires_grad_()
    new_values = inputs["new_values"].requires_grad_()
    fixed = {"old_per_token_logps": old, "old_values": values, "advantages": advantages, "returns": returns}
    policy_loss, metrics = ppo_loss(logps, new_values, mask, vf_coef=0.0, **fixed)
    # TRL trains one more value than a row has tokens
    both, value_metrics = ppo_loss(logps.detach(), new_values * value_mask, value_mask, **fixed)
    loss = policy_loss + both - value_metrics["policy_loss"]
    gradients = torch.autograd.grad(loss, (logps, new_values))
    return {
        "rewards": rewards, "advantages": advantages, "returns": returns, "loss": loss.detach(),
        "pg_loss": metrics["policy_loss"], "vf_loss": value_metrics["value_loss"],
        "grad_new_logprobs": gradients[0], "grad_new_values": gradients[1],
    }  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_equal_to_the_recorded_trl(case):
    """The tolerance is 1e-6, because TRL whitens in float32."""
    for name, value in trl_step(case).items():
        expected = torch.tensor(case["outputs"][name], dtype=torch.float64)
        torch.testing.assert_close(value.double(), expected, atol=1e-6, rtol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_metrics_by_hand():
    """The first and the fourth ratio and the values 1.5 and 1.6 are clipped; the last token is padding."""
    ratios = torch.tensor([[1.5, 0.5, 1.1, 0.5, 1.1, 9.0]])
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0, 1.0, 1.0]])
    values = torch.tensor([[1.1, 1.5, 0.5, 1.6, 1.1, 9.0]])
    one = torch.ones(1, 6)
    mask = torch.tensor([[1.0] * 5 + [0.0]])
    fixed = {"old_per_token_logps": 0 * one, "old_values": one, "advantages": advantages, "returns": 2 * one}
    loss, metrics = ppo_loss(ratios.log(), values, mask, **fixed)
    assert loss == metrics["policy_loss"] + 0.1 * metrics["value_loss"]
    half, _ = ppo_loss(ratios.log(), values, mask, **fixed, normalizer=SimpleNamespace(tokens=10))
    assert half == pytest.approx(loss / 2)
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx({
        "policy_loss": (-1.2 - 0.5 + 1.1 + 0.8 - 1.1) / 5,
        "value_loss": (0.405 + 0.32 + 1.125 + 0.32 + 0.405) / 5,
        "approx_kl": 0.5 * (log(1.5) ** 2 + 2 * log(0.5) ** 2 + 2 * log(1.1) ** 2) / 5,
        "clip_ratio/policy": 2 / 5,
        "clip_ratio/value": 2 / 5,
        "ratio": (1.5 + 0.5 + 1.1 + 0.5 + 1.1) / 5,
    })  # fmt: skip


def test_the_score_is_a_reward_of_the_last_token():
    """The reference has 0.5 nats less for the first token; the third is padding."""
    logps, ref, mask = torch.tensor([[[-1.0, -1, -1]], [[-1.5, -1, 5]], [[1, 1, 0]]])
    for estimator, kl in (("k1", 0.5), ("k3", exp(-0.5) - 0.5)):
        found = token_rewards(torch.tensor([2.0]), logps, ref, mask, 0.1, estimator)
        assert found.flatten().tolist() == pytest.approx([-0.1 * kl, 2, 0])


@pytest.mark.parametrize(("mask", "whitened"), [
    ([1.0, 1.0], [-(0.5**0.5), 0.5**0.5]),  # mean 2, variance (1 + 1) / 1
    ([1.0, 0.0], [0.0, 0.0]),  # a single value is its own mean
    ([0.0, 0.0], [0.0, 0.0]),
], ids=["two values", "one", "none"])  # fmt: skip
def test_values_are_whitened_with_one_degree_of_freedom(mask, whitened):
    [found] = whiten([torch.tensor([[1.0, 3.0]])], [torch.tensor([mask])])
    assert found.flatten().tolist() == pytest.approx(whitened)


@pytest.mark.parametrize("normalizer", [None, SimpleNamespace(tokens=0)])
def test_no_token_is_no_loss(normalizer):
    logps, values = (torch.full((2, 3), 0.5, requires_grad=True) for _ in range(2))
    fixed = dict.fromkeys(("old_per_token_logps", "old_values", "advantages", "returns"), torch.ones(2, 3))
    loss, metrics = ppo_loss(logps, values, torch.zeros(2, 3), **fixed, normalizer=normalizer)
    assert [loss.item(), *(value.item() for value in metrics.values())] == [0.0] * 7
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, (logps, values)))
