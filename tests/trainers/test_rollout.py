"""Compare numbers that RolloutTrainer computes for a rollout's steps with arithmetic by hand."""

from types import SimpleNamespace

import pytest
import torch

from minivlmrl.trainers.base import SampledBatch
from minivlmrl.trainers.rollout import RolloutTrainer
from tests.helpers.stages import ONE


@pytest.mark.parametrize("mask", [[[0.0, 0.0], [0.0, 0.0]], [[0.0, 1.0], [0.0, 0.0]], [[0.0, 1.0], [1.0, 1.0]]])
def test_the_mismatch_is_that_of_the_tokens_that_are_trained_on(mask):
    """Without tokens the root mean square is 0; for a single token the divisor is one."""
    mask = torch.tensor(mask)
    group = SimpleNamespace(pad=lambda flat: flat.view(2, 2), completion_mask=torch.ones(2, 2))
    logps = torch.tensor([[4.0, 5.0], [6.0, 7.0]])
    batch = SampledBatch(group, mask, None, samples=[], sampler_logps=logps)
    differences = torch.tensor([[9.0, 2.0], [3.0, 4.0]]) * mask
    metrics = RolloutTrainer.token_metrics(None, batch, logps + differences, torch.zeros(4))
    expected = (differences.square().sum() / max(mask.sum().item(), 1)).sqrt()
    torch.testing.assert_close(metrics["rollout/logp_mismatch_rms"], expected)
    assert metrics["rollout/logp_mismatch"] == differences.max()


@pytest.mark.parametrize(("lengths", "tokens"), [([0, 0], 1), ([0, 1], 1), ([2, 1], 3)])
def test_the_tokens_of_a_step_are_at_least_one(lengths, tokens):
    """A step without tokens has the loss 0 / 1."""
    samples = [SimpleNamespace(completion=SimpleNamespace(policy_mask=torch.ones(n))) for n in lengths]
    run = SimpleNamespace(sampling=SimpleNamespace(max_new_tokens=7))
    trainer = SimpleNamespace(is_trained=lambda sample: True, world=ONE, run=run)
    normalizer = RolloutTrainer.count_tokens(trainer, [samples])
    assert (normalizer.sequences, normalizer.tokens, normalizer.max_completion_length) == (2, tokens, 7)
