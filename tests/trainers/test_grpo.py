"""Test GRPO steps on a tiny model: sampling, stored values, micro-batches and counts."""

import pytest
import torch

from minivlmrl.trainers.rollout_metrics import CLIP_RATIOS
from tests.helpers.stages import completions_of, letter_rewards


def ratios(loss_calls):
    """Return for each call of the loss whether the ratio to the old policy is exactly 1."""
    return [torch.equal(call.logps * call.mask, call.old_per_token_logps) for call in loss_calls]


def test_stored_log_probabilities(stage, loss_calls, samples):
    """A rollout feeds two steps and is trained on twice, so the ratio is exactly 1 only in the first step."""
    run = stage("grpo", "--grpo.num_iterations=2", "--grpo.steps_per_generation=2", dtype=torch.float32)
    ends, lines = [], []
    for _ in range(8):
        run.next()
        ends.append(run.step.ends_rollout)
        lines.append(run.update())
    assert [len(rollout.groups) for rollout in samples] == [8, 8]
    assert ends == [False, False, False, True] * 2
    assert ratios(loss_calls) == [True] * 2 + [False] * 6 + [True] * 2 + [False] * 6
    # the second pass has the same micro-batches
    for first, again in zip(loss_calls[:4], loss_calls[4:8], strict=True):
        assert first.old_per_token_logps is again.old_per_token_logps
        assert first.advantages is again.advantages
        assert not torch.equal(first.logps, again.logps)
    assert all(line["rollout/logp_mismatch"] < 1e-5 for line in lines)  # uses the stored log-probabilities


def test_steps_of_a_rollout_have_their_own_prompts_and_counts(stage, samples):
    run = stage("grpo", "--grpo.steps_per_generation=2", "--grpo.micro_batch_size=4")
    both = [run.next()[0] for _ in range(2)]
    lengths = [[len(s.completion.ids) for group in samples[0].groups[i : i + 4] for s in group] for i in (0, 4)]
    assert [batch.group.layout.row_lengths for batch in both] == lengths
    assert [(b.normalizer.sequences, b.normalizer.tokens) for b in both] == [(12, sum(own)) for own in lengths]
    assert [b.normalizer.max_completion_length for b in both] == [6, 6]


def test_a_step_contains_its_rows_in_order(stage, samples):
    run = stage("grpo", "--grpo.scale_rewards=none", "--grpo.beta=0.1")
    first, second = run.next()
    completions = completions_of(samples[0])
    ids = torch.cat([batch.group.completion_ids for batch in (first, second)])
    assert torch.equal(ids, torch.cat([c.ids for c in completions]))
    assert [b.completion_index.tolist() for b in (first, second)] == [[*range(6)], [*range(6, 12)]]
    rewards = letter_rewards(run.trainer, samples[0]).view(4, 3)
    advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
    assert advantages.abs().max() > 0.1
    for batch in (first, second):
        torch.testing.assert_close(batch.advantages, advantages[batch.completion_index])
        assert torch.equal(batch.loss_mask, batch.group.completion_mask)
        own = [completions[row] for row in batch.completion_index]
        for row, mask, completion in zip(batch.sampler_logps, batch.loss_mask, own, strict=True):
            assert mask.sum() == len(completion.ids)
            assert torch.equal(row[mask.bool()], completion.logps)
        assert batch.counts(["kl"]) == {"kl": batch.loss_mask.sum()}


# four groups of four: equal rewards, different rewards, one reward equal to the mean, equal rewards
REWARDS = [1.0] * 4 + [0.0, 1.0, 2.0, 4.0] + [0.0, 1.0, 2.0, 1.0] + [3.0] * 4
FOURS = "--grpo.num_generations=4", "--grpo.micro_batch_size=4"


def without_idle_rows(stage, script, rewards, *options):
    """Assert equal gradients for rows with a signal and for all rows, and return the first micro-batch of both."""
    found = []
    for everything in (False, True):
        script(rewards)
        run = stage("grpo", *options)
        if everything:
            run.trainer.needs_all_samples = True
        batch = run.next()[0]
        loss, _ = run.trainer.loss(batch)
        loss.backward()
        found.append((batch, loss.detach(), {name: p.grad for name, p in run.model.named_parameters()}))
    (some, loss, gradients), (all_rows, expected, theirs) = found
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14)
    assert any(gradient.abs().max() > 1e-6 for gradient in theirs.values())
    torch.testing.assert_close(gradients, theirs, rtol=1e-10, atol=1e-13)
    return some, all_rows


@pytest.mark.parametrize("options", [
    ["--grpo.loss_type=grpo"], ["--grpo.loss_type=dr_grpo"],
    ["--grpo.importance_sampling_level=sequence", "--grpo.num_iterations=2"],
    *([f"--grpo.loss_type={name}"] for name in ("luspo", "rloo", "vespo")),
    ["--grpo.rollout_correction=token_truncate"], ["--grpo.mask_truncated_completions=true"],
], ids=str)  # fmt: skip
def test_leaving_out_rows_without_signal_keeps_the_gradient(stage, script, options):
    some, all_rows = without_idle_rows(stage, script, REWARDS, *FOURS, *options)
    assert some.completion_index.tolist() == [4, 5, 6, 7, 8, 10] and len(some.group.prompts) == 2
    assert all_rows.completion_index.tolist() == [*range(16)]
    assert some.normalizer == all_rows.normalizer


def test_without_any_signal_one_completion_remains(stage, script):
    script(1.0)
    run = stage("grpo", *FOURS, "--grpo.micro_batch_size=2")
    assert [batch.completion_index.tolist() for batch in run.next()] == [[0], [8]]
    line = run.update()
    assert line["grad_norm"] == 0 and line["frac_reward_zero_std"] == 1  # the fraction counts all groups


@pytest.mark.parametrize("options", [
    [], ["--grpo.importance_sampling_level=sequence"], ["--grpo.loss_type=cispo"], ["--grpo.loss_type=rloo"],
])  # fmt: skip
def test_clip_ratios_count_completions_that_are_left_out(stage, script, monkeypatch, options):
    """TRL divides by all tokens of a step. A group with equal rewards is left out here, and is never clipped."""
    moves = ["--grpo.num_iterations=2", "--grpo.learning_rate=0.01"]
    found = []
    for keeps_all in (False, True):
        script([0.0, 1.0, 2.0] + [1.0] * 9)  # one of four groups differs
        run = stage("grpo", *moves, "--grpo.epsilon_low=0.001", "--grpo.epsilon_high=0.001", *options)
        monkeypatch.setitem(vars(run.trainer), "needs_all_samples", keeps_all)
        line = run.go(2)[1]
        found.append({name: line[name] for name in CLIP_RATIOS if name in line})
    assert found[0] == pytest.approx(found[1], rel=1e-9) and max(found[0].values()) > 0
