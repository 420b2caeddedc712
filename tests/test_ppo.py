"""PPO step by step on a tiny model: what rollouts store, advantages by hand, the critic; the loss: test_ppo_loss.py."""

import math

import pytest
import torch
from safetensors.torch import load_file

from minivlmrl.algorithms.value_model import load_value_model
from minivlmrl.batch import pack
from minivlmrl.logprobs import completion_states, per_token_logps
from minivlmrl.objectives import baselines

from stages import drawn, earned, main, snapshot


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_the_number_of_rollouts_whose_first_epoch_sees_what_was_stored(stage, samples, critic):
    options = f"--ppo.critic={critic}", "--ppo.num_mini_batches=2", "--ppo.num_ppo_epochs=2"
    run = stage("ppo", *options, dtype=torch.float32)
    ends, lines = [], []
    for _ in range(8):
        run.next()
        ends.append(run.step.ends_rollout)
        lines.append(run.update())
    assert [len(rollout.prompts) for rollout in samples] == [8, 8]
    assert ends == [False, False, False, True] * 2
    assert [line["ratio"] == 1 and line["approx_kl"] == 0 for line in lines] == [True, False, False, False] * 2
    assert lines[0]["clip_ratio/policy"] == lines[0]["clip_ratio/value"] == 0


@pytest.mark.parametrize("whiten", [False, True])
def test_advantages_and_returns_by_hand(stage, samples, whiten):
    """Of every completion by itself: KL penalty, score at the end; then GAE and whitening over the rollout."""
    run = stage(
        "ppo", "--ppo.num_ppo_epochs=1", "--ppo.kl_coef=0.2", "--ppo.gamma=0.9", "--ppo.lam=0.8",
        "--ppo.missing_eos_penalty=0.7", "--sampling.temperature=1.5", f"--ppo.whiten_rewards={str(whiten).lower()}",
    )  # fmt: skip
    run.go(2)
    policy, reference = run.model, run.algorithm.reference.model
    batches, completions = run.next(), drawn(samples[-1])
    prompts = [p for p in samples[-1].prompts for _ in range(2)]
    alone = pack(prompts, [[c.ids] for c in completions], policy.config, "cpu")
    with torch.no_grad():
        logps, ref = (alone.pad(per_token_logps(m, alone, 1.5)[0]) for m in (policy, reference))
        values = alone.pad(run.algorithm.critic(completion_states(policy, alone))[:, 0])
    stopped, mask = torch.tensor([c.stopped for c in completions]), alone.completion_mask
    assert stopped.any() and not stopped.all() and values.abs().max() > 1e-3
    scores = earned(run.algorithm, samples[-1]) - 0.7 * ~stopped
    rewards = baselines.token_rewards(scores.double(), logps, ref, mask, 0.2)
    if whiten:
        [rewards] = baselines.whiten([rewards], [mask], shift_mean=False)
    advantages, returns = baselines.gae(rewards, values, 0.9, 0.8)
    [advantages] = baselines.whiten([advantages], [mask])
    for name, expected in (("advantages", advantages), ("returns", returns)):
        rows = [row for batch in batches for row in getattr(batch, name)]
        for row, own, real in zip(rows, expected, mask.bool(), strict=True):
            torch.testing.assert_close(row[: real.sum()].double(), own[real], rtol=1e-5, atol=1e-5)


def test_completions_that_nothing_can_judge_are_masked(stage, samples, script):
    script([1.0, None, 0.0, 0.5, None, None, 1.0, 0.0])
    run = stage("ppo", "--ppo.micro_batch_size=4")
    [batch] = run.next()
    assert batch.loss_mask.any(1).tolist() == [True, False, True, True, False, False, True, True]
    lengths = [len(c.ids) for c in drawn(samples[0])]
    assert batch.counts.tokens == sum(n for n, kept in zip(lengths, batch.loss_mask.any(1), strict=True) if kept)
    assert not batch.advantages[~batch.loss_mask.bool()].any()
    line = run.update()
    assert line["reward"] == 0.5 and math.isfinite(line["loss"])


# the critic


def test_the_shared_critic_is_a_head_on_the_policy(stage, tmp_path):
    run = stage("ppo")
    assert {name.partition(".")[0] for name, _ in run.algorithm.trained.named_parameters()} == {"policy", "critic"}
    names = [name for name, _ in run.algorithm.trained.named_parameters()]
    assert [name for name in names if name.startswith("critic")] == ["critic.weight"]
    assert not run.algorithm.critic.weight.any()
    run.go(2)
    assert run.algorithm.critic.weight.any()
    run.algorithm.save(tmp_path)
    saved = load_file(tmp_path / "value_head.safetensors")
    assert list(saved) == ["score.weight"]
    assert torch.equal(saved["score.weight"], run.algorithm.critic.weight)
    assert (tmp_path / "checkpoint" / "model.safetensors").is_file()


def test_the_separate_critic_begins_with_the_policy_and_goes_its_own_way(stage, tmp_path):
    run = stage("ppo", "--ppo.critic=separate")
    before = snapshot(run.model)
    for name, value in run.algorithm.critic.backbone.named_parameters():
        assert torch.equal(value, before[name])
        assert value.data_ptr() != dict(run.model.named_parameters())[name].data_ptr()
    run.go(3)
    run.algorithm.save(tmp_path)
    loaded, trained = load_value_model(tmp_path / "critic"), snapshot(run.algorithm.critic)
    assert all(torch.equal(value, trained[name]) for name, value in loaded.named_parameters())
    assert not torch.equal(trained["backbone.model.norm.weight"], before["model.norm.weight"])
    assert not (tmp_path / "value_head.safetensors").exists()


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_values_pull_at_the_policy_only_where_it_is_shared(stage, critic):
    """At another vf_coef a separate critic leaves the policy's steps as they are."""
    ends = []
    for weight in (0.1, 10.0):
        run = stage("ppo", f"--ppo.critic={critic}", f"--ppo.vf_coef={weight}", "--optimizer.max_grad_norm=1e9")
        run.go(2)
        ends.append(run.model.model.norm.weight.detach().clone())
    assert torch.equal(*ends) == (critic == "separate")


def test_a_critic_can_begin_with_a_reward_model(folder, tmp_path, stage):
    main(folder, tmp_path, "judge", "--stages=reward_model")
    path = tmp_path / "judge" / "reward_model"
    run = stage("ppo", "--ppo.critic=separate", f"--ppo.critic_path={path}", dtype=torch.float32)
    expected = snapshot(load_value_model(path))
    assert expected["score.weight"].any()
    assert all(torch.equal(value, expected[name]) for name, value in run.algorithm.critic.named_parameters())
    run.go(2)
    assert not torch.equal(run.algorithm.critic.score.weight, expected["score.weight"])
    with pytest.raises(ValueError, match="no score head"):
        stage("ppo", "--ppo.critic=separate", f"--ppo.critic_path={tmp_path / 'judge' / 'checkpoint'}")
    with pytest.raises(ValueError, match="/gone: no such folder"):
        stage("ppo", "--ppo.critic=separate", "--ppo.critic_path=/gone")


def test_it_shares_layers_with_its_reference_but_not_with_its_critic(stage):
    run = stage("ppo", "--ppo.critic=separate", "--reference.num_shared_layers=1")
    critic = run.algorithm.critic
    assert all(p.requires_grad for name, p in critic.named_parameters() if name != "backbone.lm_head.weight")
    before = snapshot(critic)
    run.go(3)
    assert not torch.equal(critic.backbone.model.embed_tokens.weight, before["backbone.model.embed_tokens.weight"])
