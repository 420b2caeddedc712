"""Test PPO steps on a tiny model: stored values, advantages computed by hand, and the critic."""

import math

import pytest
import torch

from minivlmrl.losses import ppo
from minivlmrl.model import checkpoint, logprobs, value_head
from minivlmrl.rewards.registry import REWARDS
from tests.helpers.stages import completions_of, letter_rewards, main
from tests.helpers.tiny import pack

SEPARATE = "--ppo.critic=separate"


@pytest.mark.parametrize(("kl_estimator", "penalty"), [("k1", None), ("k3", 0.7)])
def test_advantages_and_returns_by_hand(stage, samples, monkeypatch, kl_estimator, penalty):
    """Advantages follow from the KL penalty, the weighted sum of the rewards, GAE, and whitening over the rollout."""
    monkeypatch.setitem(REWARDS, "other", lambda completions, **_: [1.0] * len(completions))
    run = stage(
        "ppo", "--ppo.num_iterations=1", "--ppo.kl_coef=0.2", "--ppo.gamma=0.9", "--ppo.lam=0.8",
        "--sampling.temperature=1.5", f"--ppo.kl_estimator={kl_estimator}",
        f"--ppo.missing_eos_penalty={'null' if penalty is None else penalty}", "--rewards={letters: 2, other: -0.5}",
    )  # fmt: skip
    assert not run.trainer.critic.weight.any()
    run.go(2)
    policy, reference = run.model, run.trainer.reference.model
    batches, completions = run.next(), completions_of(samples[-1])
    prompts = [sample.prompt for sample in samples[-1].samples]
    alone = pack(prompts, [[c.ids] for c in completions], policy.config, "cpu")
    with torch.no_grad():
        logps, ref = (alone.pad(logprobs.per_token_logps(m, alone, 1.5)[0]) for m in (policy, reference))
        values = alone.pad(run.trainer.critic(logprobs.completion_states(policy, alone))[:, 0])
    mask, scores = alone.completion_mask, 2 * letter_rewards(run.trainer, samples[-1]) - 0.5
    assert values.abs().max() > 1e-3 and {c.stopped for c in completions} == {True, False}
    if penalty:  # TRL 1.12: scores[~contain_eos_token] -= missing_eos_penalty
        scores[[not c.stopped for c in completions]] -= penalty
    rewards = ppo.token_rewards(scores.double(), logps, ref, mask, 0.2, kl_estimator)
    advantages, returns = ppo.gae(rewards, values, 0.9, 0.8)
    [advantages] = ppo.whiten([advantages], [mask])
    for name, expected in (("advantages", advantages), ("returns", returns)):
        rows = [row for batch in batches for row in getattr(batch, name)]
        for row, own, real in zip(rows, expected, mask.bool(), strict=True):
            torch.testing.assert_close(row[: real.sum()].double(), own[real], rtol=1e-5, atol=1e-5)


def test_completions_without_a_reward_are_masked(stage, samples, script, monkeypatch):
    script([1.0, None, 0.0, 0.5, None, None, 1.0, 0.0])
    monkeypatch.setitem(REWARDS, "other", lambda completions, **_: [0.0, None, 0.0, 0.0, None, 0.5, 0.0, 0.0])
    run = stage("ppo", "--ppo.micro_batch_size=4", "--rewards={letters: 1, other: 1}")
    [batch] = run.next()
    assert batch.loss_mask.any(1).tolist() == [True, False, True, True, False, True, True, True]
    lengths = [len(c.ids) for c in completions_of(samples[0])]
    assert batch.normalizer.tokens == sum(n for n, kept in zip(lengths, batch.loss_mask.any(1), strict=True) if kept)
    assert not batch.advantages[~batch.loss_mask.bool()].any()
    means = [row[:n].mean().item() for row, n in zip(batch.advantages, lengths, strict=True)]  # 0 without a reward
    assert batch.completion_advantages() == pytest.approx(means)
    line = run.update()
    assert line["reward"] == 0.5 and math.isfinite(line["loss"])
    assert (line["rewards/other/mean"], line["rewards/other/std"]) == pytest.approx((0.5 / 6, 0.5 / 6**0.5))


def test_gradients_of_a_policy_and_a_separate_critic(stage, samples):
    run = stage("ppo", SEPARATE, "--ppo.micro_batch_size=4", "--ppo.kl_coef=0", "--ppo.num_iterations=2")
    run.go(3)  # in the second step on a rollout, ratios and values differ from the old ones
    [batch], critic = run.next(), run.trainer.critic
    run.trainer.loss(batch)[0].backward()
    models = {"policy": run.model, "critic": critic}
    found = {name: [p.grad for p in model.parameters()] for name, model in models.items()}
    run.trainer.trained.zero_grad()
    prompts = [sample.prompt for sample in samples[-1].samples]
    total, tokens = 0.0, batch.loss_mask.sum()
    for row, (prompt, completion) in enumerate(zip(prompts, completions_of(samples[-1]), strict=True)):
        alone, length = pack([prompt], [[completion.ids]], run.model.config, "cpu"), len(completion.ids)
        logps, values = logprobs.per_token_logps(run.model, alone)[0], critic(alone)
        ratio = (logps - batch.old_per_token_logps[row, :length]).exp()
        A, R, old = (x[row, :length] for x in (batch.advantages, batch.returns, batch.old_values))
        near = old + (values - old).clamp(-0.2, 0.2)
        value_loss = torch.max((values - R) ** 2, (near - R) ** 2) / 2
        total = total + (torch.max(-A * ratio, -A * ratio.clamp(0.8, 1.2)) + 0.1 * value_loss).sum() / tokens
    total.backward()
    for name, model in models.items():
        expected = [p.grad for p in model.parameters()]
        assert sum(g is not None and g.abs().max() > 1e-8 for g in expected) > 20
        torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_a_separate_critic_uses_its_own_vision_tower(stage, samples, critic):
    """Embeddings of the policy's frozen tower are only stored for a critic that is a head on the policy."""
    stage("ppo", f"--ppo.critic={critic}", "--model.freeze=[vision, merger]").next()
    stored = [sample.prompt.vision_embeds is not None for sample in samples[0].samples]
    assert set(stored) == {critic == "shared"}


def test_a_run_continues_with_a_saved_critic(folder, varied_rollouts, tmp_path, stage):
    main(folder, tmp_path, "one", "--stages=[ppo]", SEPARATE, "--ppo.max_steps=2")
    saved = value_head.load_value_model(tmp_path / "one" / "critic")
    assert saved.score.weight.any()
    policy = checkpoint.load_model(tmp_path / "one" / "checkpoint")
    assert not torch.equal(saved.backbone.model.norm.weight, policy.model.norm.weight)
    path = f"--ppo.critic_path={tmp_path / 'one' / 'critic'}"
    for options in ([], ["--adapter.r=2"], ["--model.activation_checkpointing=true"]):
        run = stage("ppo", SEPARATE, path, *options, dtype=torch.float32)
        batch = run.next()[0]
        recomputes = "forward" in vars(run.trainer.critic.backbone.model.layers[0])
        assert recomputes == any("checkpointing" in option for option in options)
        with torch.no_grad():
            assert torch.equal(saved(batch.group), run.trainer.critic(batch.group))
        run.go(2)


def test_unsuitable_critics_are_refused(folder, varied_rollouts, tmp_path, stage):
    with pytest.raises(ValueError, match=r"/gone does not contain score\.safetensors"):
        stage("ppo", SEPARATE, "--ppo.critic_path=/gone")
    main(folder, tmp_path, "one", "--stages=reward_model", "--reward_model.max_steps=1")
    with pytest.raises(ValueError, match=r"config\.json: model_type is 'qwen2_5_vl', but it must be 'qwen3_vl', as"):
        stage("ppo", SEPARATE, f"--ppo.critic_path={tmp_path / 'one' / 'reward_model'}", model="qwen3_vl")
