"""PPO's pure functions against numbers that TRL 1.12.0, the last version with a PPOTrainer, gave; and by hand."""

import json
from pathlib import Path

import pytest
import torch

from minivlmrl.algorithms.advantages import gae, masked_moments, token_rewards, whiten
from minivlmrl.algorithms.ppo_loss import ppo_loss

RECORDED = json.loads((Path(__file__).parent / "recorded" / "ppo_trl_1.12.0.json").read_text())
CASES = [pytest.param(case, id=str(case["config"] or "defaults")) for case in RECORDED["cases"]]
PAD, EOS = 0, 1


def trl_step(case):
    """Our functions put together as TRL puts its own: padded rows, the score one place after the last token."""
    inputs = {name: torch.tensor(value, dtype=torch.float64) for name, value in case["inputs"].items()}
    config = {"kl_coef": 0.05, "kl_estimator": "k1", "gamma": 1.0, "lam": 0.95, "whiten_rewards": False}
    config |= {"missing_eos_penalty": None} | case["config"]
    responses = inputs["responses"].long()
    T = responses.shape[1]
    after_stop = (responses == EOS).cumsum(1) - (responses == EOS).long() > 0
    post = responses.masked_fill(after_stop, PAD)
    last = (post != PAD).long().cumprod(1).sum(1) - 1  # (B,)
    place = torch.arange(T)
    mask, value_mask = (place <= last[:, None]).double(), (place <= last[:, None] + 1).double()
    scores = inputs["scores"]
    if config["missing_eos_penalty"] is not None:
        scores = scores - config["missing_eos_penalty"] * (post != EOS).all(1)
    old, values = inputs["logprobs"] * mask + (1 - mask), inputs["values"] * value_mask
    rewards = token_rewards(
        scores, old, inputs["ref_logprobs"], mask, config["kl_coef"], config["kl_estimator"],
        torch.where(last + 1 < T, last + 1, last),
    )  # fmt: skip
    if config["whiten_rewards"]:
        rewards = whiten(rewards, value_mask, shift_mean=False)
    advantages, returns = gae(rewards, values, config["gamma"], config["lam"])
    advantages = whiten(advantages, mask)
    logps, new_values = inputs["new_logprobs"].requires_grad_(), inputs["new_values"].requires_grad_()
    loss, diagnostics = ppo_loss(
        logps, new_values * value_mask, mask, old_per_token_logps=old, old_values=values, advantages=advantages,
        returns=returns, value_mask=value_mask,
    )  # fmt: skip
    gradients = torch.autograd.grad(loss, (logps, new_values))
    return {
        "rewards": rewards, "advantages": advantages, "returns": returns, "loss": loss.detach(),
        "pg_loss": diagnostics["policy_loss"], "vf_loss": diagnostics["value_loss"],
        "grad_new_logprobs": gradients[0], "grad_new_values": gradients[1],
    }  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_equal_to_the_recorded_trl(case):
    """1e-6: TRL whitens in float32."""
    for name, value in trl_step(case).items():
        expected = torch.tensor(case["outputs"][name], dtype=torch.float64)
        torch.testing.assert_close(value.double(), expected, atol=1e-6, rtol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_docstring_examples():
    one = torch.ones(1, 1)
    loss, _ = ppo_loss(
        one, one, one, old_per_token_logps=one, old_values=one, advantages=2 * one, returns=3 * one, vf_coef=0.1
    )
    assert loss.item() == pytest.approx(-1.8)
    advantages, returns = gae(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]]), gamma=1.0, lam=1.0)
    assert advantages.tolist() == [[0.5, 0.5]] and returns.tolist() == [[1.0, 1.0]]


def test_gae_by_hand():
    """deltas 1 + 0.5 * 3 - 2 = 0.5 and 2 - 3 = -1; A_1 = -1, A_0 = 0.5 + 0.5 * 0.5 * -1 = 0.25."""
    advantages, returns = gae(torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 3.0]]), gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[0.25, -1.0]]
    assert returns.tolist() == [[2.25, 2.0]]


def test_lambda_one_is_the_return_minus_the_forecast_and_lambda_zero_one_step():
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.2, 0.4, 0.7]])
    torch.testing.assert_close(gae(rewards, values, 1.0, 1.0)[0], torch.tensor([[0.8, 0.6, 0.3]]))
    torch.testing.assert_close(gae(rewards, values, 1.0, 0.0)[0], torch.tensor([[0.2, 0.3, 0.3]]))


def test_token_rewards_by_hand():
    """Rows of 2 and 1 tokens: -0.1 * (log pi - log ref), and the score on the last token."""
    logps, ref = torch.tensor([[-1.0, -2.0], [-1.0, 9.0]]), torch.tensor([[-1.5, -2.0], [-3.0, 0.0]])
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    rewards = token_rewards(torch.tensor([5.0, 7.0]), logps, ref, mask, kl_coef=0.1)
    torch.testing.assert_close(rewards, torch.tensor([[-0.05, 5.0], [6.8, 0.0]]))


def test_whiten_by_hand():
    """Entries 1, 2, 3 (the 50 is padding): mean 2, variance 1."""
    x, mask = torch.tensor([[1.0, 2.0], [3.0, 50.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    assert [moment.item() for moment in masked_moments(x, mask)] == [2.0, 1.0]
    torch.testing.assert_close(whiten(x, mask), torch.tensor([[-1.0, 0.0], [1.0, 0.0]]))
    torch.testing.assert_close(whiten(x, mask, shift_mean=False), torch.tensor([[1.0, 2.0], [3.0, 0.0]]))


@pytest.mark.parametrize(
    "new, old, returned, expected",
    [
        (1.1, 1.0, 2.0, 0.405),  # within the range: (1.1 - 2)^2 / 2
        (1.5, 1.0, 2.0, 0.32),  # moved too far towards the return: (1.2 - 2)^2 / 2 is larger than (1.5 - 2)^2 / 2
        (0.5, 1.0, 2.0, 1.125),  # moved away: the unclipped one is larger
    ],
)
def test_value_clipping_by_hand(new, old, returned, expected):
    one, value = torch.ones(1, 1), torch.full((1, 1), new)
    loss, _ = ppo_loss(
        one, value, one, old_per_token_logps=one, old_values=old * one, advantages=0 * one, returns=returned * one,
        vf_coef=1.0,
    )  # fmt: skip
    assert loss.item() == pytest.approx(expected)


def test_counts_of_the_step_make_the_split_not_matter():
    generator = torch.Generator().manual_seed(0)
    names = ("per_token_logps", "values", "old_per_token_logps", "old_values", "advantages", "returns")
    tensors = {name: torch.randn(4, 3, generator=generator, dtype=torch.float64) for name in names}
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]]).double()
    counts = {"num_tokens": mask.sum(), "num_values": mask.sum()}
    whole, _ = ppo_loss(completion_mask=mask, **tensors)
    parts = [
        ppo_loss(completion_mask=mask[rows], **{k: v[rows] for k, v in tensors.items()}, **counts)[0]
        for rows in (slice(0, 1), slice(1, 4))
    ]
    torch.testing.assert_close(sum(parts), whole, atol=1e-12, rtol=1e-12)


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="k1 and k3"):
        token_rewards(torch.ones(1), torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1), kl_estimator="k2")
