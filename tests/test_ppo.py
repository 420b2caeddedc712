"""PPO step by step on a tiny model: what rollouts store, advantages by hand, the critic."""

import math

import pytest
import torch

from minivlmrl.logprobs import completion_states, per_token_logps
from minivlmrl.objectives import baselines

from stages import drawn, earned
from tiny import pack


def test_the_number_of_rollouts_whose_first_epoch_sees_what_was_stored(stage, samples):
    run = stage("ppo", "--ppo.num_mini_batches=2", "--ppo.num_ppo_epochs=2", dtype=torch.float32)
    ends, lines = [], []
    for _ in range(8):
        run.next()
        ends.append(run.step.ends_rollout)
        lines.append(run.update())
    assert [len(rollout.prompts) for rollout in samples] == [8, 8]
    assert ends == [False, False, False, True] * 2
    assert [line["ratio"] == 1 and line["approx_kl"] == 0 for line in lines] == [True, False, False, False] * 2
    assert lines[0]["clip_ratio/policy"] == lines[0]["clip_ratio/value"] == 0


@pytest.mark.parametrize(("kl_estimator", "penalty"), [("k1", None), ("k3", 0.7)])
def test_advantages_and_returns_by_hand(stage, samples, kl_estimator, penalty):
    """Of every completion by itself: KL penalty, score at the end; then GAE and whitening over the rollout."""
    run = stage(
        "ppo", "--ppo.num_ppo_epochs=1", "--ppo.kl_coef=0.2", "--ppo.gamma=0.9", "--ppo.lam=0.8",
        "--sampling.temperature=1.5", f"--ppo.kl_estimator={kl_estimator}",
        f"--ppo.missing_eos_penalty={'null' if penalty is None else penalty}",
    )  # fmt: skip
    run.go(2)
    policy, reference = run.model, run.algorithm.reference.model
    batches, completions = run.next(), drawn(samples[-1])
    prompts = [p for p in samples[-1].prompts for _ in range(2)]
    alone = pack(prompts, [[c.ids] for c in completions], policy.config, "cpu")
    with torch.no_grad():
        logps, ref = (alone.pad(per_token_logps(m, alone, 1.5)[0]) for m in (policy, reference))
        values = alone.pad(run.algorithm.critic(completion_states(policy, alone))[:, 0])
    mask, scores = alone.completion_mask, earned(run.algorithm, samples[-1])
    assert values.abs().max() > 1e-3 and {c.stopped for c in completions} == {True, False}
    if penalty:  # TRL 1.12: scores[~contain_eos_token] -= missing_eos_penalty
        scores[[not c.stopped for c in completions]] -= penalty
    rewards = baselines.token_rewards(scores.double(), logps, ref, mask, 0.2, kl_estimator)
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


def test_the_critic_is_a_head_on_the_policy(stage):
    run = stage("ppo")
    names = [name for name, _ in run.algorithm.trained.named_parameters()]
    assert [name for name in names if not name.startswith("policy.")] == ["critic.weight"]
    assert not run.algorithm.critic.weight.any()
    run.go(2)
    assert run.algorithm.critic.weight.any()
