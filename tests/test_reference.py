"""The reference: when it moves, what it shares with the policy, and where there is none."""

import pytest
import torch

from minivlmrl.logprobs import per_token_logps

from stages import snapshot

WEIGHTS = {"dpo": "beta", "kto": "beta", "grpo": "beta", "ppo": "kl_coef"}  # of the KL to the reference


@pytest.mark.parametrize("name", WEIGHTS)
def test_it_moves_at_its_steps_and_not_elsewhere(stage, name):
    options = ["sync_ref_model=true", "ref_model_mixup_alpha=0.3", "ref_model_sync_steps=2"]
    moving = [f"--reference.{option}" for option in options]
    run = stage(name, *moving, f"--{name}.{WEIGHTS[name]}=0.1")
    reference = run.algorithm.reference.model
    expected = snapshot(run.model)
    for step in range(4):
        run.next()
        for parameter, value in reference.named_parameters():
            torch.testing.assert_close(value, expected[parameter], rtol=1e-12, atol=1e-15)
        run.update()
        if step % 2 == 1:
            policy = snapshot(run.model)
            expected = {key: 0.7 * value + 0.3 * policy[key] for key, value in expected.items()}
    assert (expected["lm_head.weight"] - policy["lm_head.weight"]).abs().max() > 1e-4


@pytest.mark.parametrize("name, model", [*((name, "model") for name in WEIGHTS), ("grpo", "tied")])
def test_shared_layers_exist_once_and_stay(stage, name, model):
    run = stage(name, "--reference.num_shared_layers=1", f"--{name}.{WEIGHTS[name]}=0.1", model=model)
    policy, reference = run.model, run.algorithm.reference.model
    below = ("visual.", "model.embed_tokens.", "model.layers.0.")
    theirs = dict(reference.named_parameters())
    for parameter, value in policy.named_parameters():
        shared = parameter.startswith(below)
        assert (theirs[parameter] is value) == shared, parameter
        assert (theirs[parameter].data_ptr() == value.data_ptr()) == shared, parameter
        assert value.requires_grad != shared and not theirs[parameter].requires_grad, parameter
    assert (reference.lm_head.weight is policy.lm_head.weight) == (model == "tied")
    before, frozen = snapshot(policy), snapshot(reference)
    run.go(2)
    for parameter, value in policy.named_parameters():
        assert torch.equal(value, before[parameter]) == parameter.startswith(below), parameter
    for parameter, value in reference.named_parameters():
        assert torch.equal(value, frozen[parameter]), parameter


def test_all_layers_can_be_shared_and_not_more(stage):
    run = stage("grpo", "--reference.num_shared_layers=2", "--grpo.beta=0.1")
    assert {name for name, p in run.model.named_parameters() if p.requires_grad} == {
        "model.norm.weight", "lm_head.weight",
    }  # fmt: skip
    with pytest.raises(ValueError, match="num_shared_layers is 3, of 2 layers"):
        stage("grpo", "--reference.num_shared_layers=3", "--grpo.beta=0.1")


@pytest.mark.parametrize("name, options", [
    ("grpo", []), ("ppo", ["--ppo.kl_coef=0"]), ("dpo", ["--dpo.precompute_ref_log_probs=true"]),
])  # fmt: skip
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
