"""The reference: the policy as the stage found it, and where there is none."""

import pytest
import torch

from minivlmrl.logprobs import per_token_logps

from stages import snapshot

WEIGHTS = {"dpo": "beta", "kto": "beta", "grpo": "beta", "ppo": "kl_coef"}  # of the KL to the reference


@pytest.mark.parametrize("name", WEIGHTS)
def test_it_stays_and_shares_nothing(stage, name):
    run = stage(name, f"--{name}.{WEIGHTS[name]}=0.1")
    theirs = dict(run.algorithm.reference.model.named_parameters())
    before = snapshot(run.model)
    run.go(3)
    for parameter, value in run.model.named_parameters():
        assert theirs[parameter].data_ptr() != value.data_ptr() and not theirs[parameter].requires_grad
        assert torch.equal(theirs[parameter], before[parameter]), parameter
    assert not torch.equal(run.model.lm_head.weight, before["lm_head.weight"])


@pytest.mark.parametrize("name, options", [("grpo", []), ("ppo", ["--ppo.kl_coef=0"]), ("sft", [])])
def test_none_is_kept_where_none_is_asked(stage, name, options):
    run = stage(name, *options)
    run.go(2)
    assert run.algorithm.reference is None and "reference" not in run.algorithm.modules()


def test_it_scores_at_the_temperature_of_the_draws(stage):
    run = stage("grpo", "--grpo.beta=0.1", "--sampling.temperature=0.7")
    run.go(1)
    for batch in run.next():
        with torch.no_grad():
            logps, _ = per_token_logps(run.algorithm.reference.model, batch.group, 0.7)
        torch.testing.assert_close(batch.ref_per_token_logps, batch.group.pad(logps), rtol=1e-12, atol=1e-12)
