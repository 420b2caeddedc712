"""Losses by arithmetic done by hand, and what holds for each of them; against TRL they stand in test_parity.py."""

import pytest
import torch

from minivlmrl.audit.policy_cells import policy_batch
from minivlmrl.losses import LOSS_TYPES, grpo_loss


def value_and_gradient(batch, **options):
    logps = batch["per_token_logps"].clone().requires_grad_()
    loss, diagnostics = grpo_loss(**batch | {"per_token_logps": logps}, **options)
    return loss.detach(), torch.autograd.grad(loss, logps)[0], diagnostics


def test_without_counts_the_batch_is_the_whole_step():
    batch = policy_batch(0)
    tokens = batch["completion_mask"].sum()
    for loss_type in LOSS_TYPES:
        options = {"loss_type": loss_type, "max_completion_length": 9}
        alone = value_and_gradient(batch, **options)[0]
        counted = value_and_gradient(batch, **options, num_sequences=4, num_tokens=tokens)[0]
        assert alone == counted


def test_the_docstring_example():
    one = torch.zeros(1, 2)
    batch = dict(per_token_logps=one, advantages=torch.tensor([0.5]), completion_mask=torch.ones(1, 2))
    expected = {"grpo": -0.5, "bnpo": -0.5, "dapo": -0.5, "dr_grpo": -0.25, "luspo": -1.0}
    losses = {t: grpo_loss(**batch, loss_type=t, max_completion_length=4)[0].item() for t in expected}
    assert losses == expected


def test_averaging_by_hand():
    """Rows of 1 and 3 tokens, ratio 1, advantages 1 and -2: per-token losses -1 | 2 2 2."""
    batch = dict(
        per_token_logps=torch.zeros(2, 3), advantages=torch.tensor([1.0, -2.0]),
        completion_mask=torch.tensor([[1.0, 0, 0], [1, 1, 1]]),
    )  # fmt: skip
    by_hand = {
        "grpo": (-1 / 1 + 6 / 3) / 2,
        "bnpo": (-1 + 6) / 4,
        "dapo": (-1 + 6) / 4,
        "dr_grpo": (-1 + 6) / (2 * 10),
    }
    for loss_type, expected in by_hand.items():
        loss = grpo_loss(**batch, loss_type=loss_type, max_completion_length=10)[0]
        assert loss.item() == pytest.approx(expected)


@pytest.mark.parametrize(
    "ratio, advantage, delta, expected",
    [
        (1.1, 1.0, None, -1.1),  # inside the range: as it is
        (1.5, 1.0, None, -1.2),  # too high and good: clipped
        (0.5, 1.0, None, -0.5),  # too low but good: not clipped, it may come back
        (0.5, -1.0, None, 0.8),  # too low and bad: clipped
        (1.5, -1.0, None, 1.5),  # too high and bad: not clipped ...
        (5.0, -1.0, 3.0, 3.0),  # ... but by delta
    ],
)
def test_clipping_by_hand(ratio, advantage, delta, expected):
    logps, old = torch.tensor([[0.0]]), -torch.tensor([[ratio]]).log()
    loss, _ = grpo_loss(
        logps, torch.tensor([advantage]), torch.ones(1, 1), old_per_token_logps=old, delta=delta, loss_type="grpo"
    )
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_gspo_ratio_by_hand():
    """Token ratios e^0.3 and e^-0.1 make one sequence ratio e^0.1 for both tokens."""
    loss, _ = grpo_loss(
        torch.tensor([[0.3, -0.1]]), torch.tensor([1.0]), torch.ones(1, 2), old_per_token_logps=torch.zeros(1, 2),
        importance_sampling_level="sequence", loss_type="grpo",
    )  # fmt: skip
    assert loss.item() == pytest.approx(-(2.718281828**0.1), rel=1e-6)


def test_kl_by_hand():
    """pi 0.5, reference 0.25: r = 0.5, k3 = 0.5 - log 0.5 - 1 = 0.1931."""
    _, diagnostics = grpo_loss(
        torch.tensor([[0.5]]).log(), torch.zeros(1), torch.ones(1, 1), ref_per_token_logps=torch.tensor([[0.25]]).log(),
        beta=1.0,
    )  # fmt: skip
    assert diagnostics["kl"].item() == pytest.approx(0.19314718, rel=1e-6)


def test_a_batch_with_nothing_to_learn_gives_zero_and_finite_gradients():
    batch = policy_batch(0)
    batch["completion_mask"] = torch.zeros_like(batch["completion_mask"])
    for loss_type in LOSS_TYPES:
        loss, gradient, _ = value_and_gradient(batch, loss_type=loss_type, max_completion_length=9, beta=0.1)
        assert loss == 0 and gradient.abs().max() == 0


def test_padding_does_not_count():
    batch = policy_batch(1)
    wider = {k: torch.nn.functional.pad(v, (0, 3), value=7.0 * (k != "completion_mask")) for k, v in batch.items()
             if k != "advantages"} | {"advantages": batch["advantages"]}  # fmt: skip
    for loss_type in LOSS_TYPES:
        options = dict(loss_type=loss_type, max_completion_length=9, beta=0.1)
        torch.testing.assert_close(value_and_gradient(wider, **options)[0], value_and_gradient(batch, **options)[0])


@pytest.mark.parametrize(
    "options, says",
    [
        (dict(beta=0.1, ref_per_token_logps=None), "ref_per_token_logps"),
        (dict(loss_type="drgrpo"), "dr_grpo"),
        (dict(loss_type="dr_grpo"), "max_completion_length"),
        (dict(importance_sampling_level="row"), "sequence"),
    ],
)
def test_options_without_meaning_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        grpo_loss(**policy_batch(0) | options)
