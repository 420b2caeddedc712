"""Test that GRPO leaves out completions without a signal, and still counts them."""

import pytest
import torch

from minivlmrl.trainers.rollout_metrics import CLIP_RATIOS

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
    assert some.normalizer == all_rows.normalizer and some.normalizer.max_completion_length == 6


def test_metrics_do_not_depend_on_micro_batches(stage, script):
    """Micro-batches whose groups all have equal rewards keep a completion, which no metric counts."""
    lines = []
    for size in (1, 2, 4):
        script(REWARDS)
        lines += stage("grpo", *FOURS[:1], f"--grpo.micro_batch_size={size}").go()
    for line in lines[1:]:
        assert line == pytest.approx(lines[0], rel=1e-9, abs=1e-12)


def test_without_any_signal_one_completion_remains(stage, script):
    script(1.0)
    run = stage("grpo", *FOURS, "--grpo.micro_batch_size=2")
    assert [batch.completion_index.tolist() for batch in run.next()] == [[0], [8]]
    line = run.update()
    assert line["grad_norm"] == 0 and line["frac_reward_zero_std"] == 1  # the fraction counts all groups


@pytest.mark.parametrize("options", [
    [], ["--grpo.importance_sampling_level=sequence"], ["--grpo.loss_type=cispo", "--grpo.epsilon_high=1.0"],
    ["--grpo.loss_type=rloo"],
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
