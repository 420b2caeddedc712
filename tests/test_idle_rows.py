"""Leaving out rows that add nothing to a gradient does not change it, in float64."""

import pytest
import torch

from minivlmrl.algorithms.idle_rows import without_idle_rows

from stages import folder, lively, script, stage  # noqa: F401

# four groups of four: all earn the same; all differ; one earns the mean; all earn the same
REWARDS = [1.0] * 4 + [0.0, 1.0, 2.0, 4.0] + [0.0, 1.0, 2.0, 1.0] + [3.0] * 4
TEACHING = [4, 5, 6, 7, 8, 10]
LOSSES = ("grpo", "dapo", "dr_grpo", "luspo", "rloo", "cispo", "sapo", "vespo")
OPTIONS = {
    "plain": (), "sequence": ("--grpo.importance_sampling_level=sequence",), "off-policy": ("--grpo.num_iterations=2",),
    "entropy mask": ("--grpo.top_entropy_quantile=0.5",), "truncated": ("--grpo.mask_truncated_completions=true",),
    "correction": ("--grpo.rollout_correction=token_truncate",),
}  # fmt: skip
CASES = [(loss_type, "plain") for loss_type in LOSSES] + [("grpo", name) for name in OPTIONS if name != "plain"]


def gradients(run, batch):
    loss, metrics = run.algorithm.loss(batch)
    loss.backward()
    found = {name: p.grad for name, p in run.model.named_parameters()}
    run.model.zero_grad()
    return loss.detach(), found, metrics


def one_step(stage, script, *overrides, rewards=REWARDS, size=4):  # noqa: F811
    script(rewards)
    run = stage("grpo", "--grpo.num_generations=4", f"--grpo.micro_batch_size={size}", "--grpo.beta=0", *overrides)
    return run, run.next()


@pytest.mark.parametrize(("loss_type", "options"), CASES)
def test_the_gradient_is_that_of_all_rows(stage, script, loss_type, options):  # noqa: F811
    run, [batch] = one_step(stage, script, f"--grpo.loss_type={loss_type}", *OPTIONS[options])
    [some] = without_idle_rows(run.algorithm, run.step).micro_batches
    assert set(some.rows.tolist()) <= set(TEACHING) and len(some.rows) < 16
    if options != "truncated":
        assert some.rows.tolist() == TEACHING and len(some.group.prompts) == 2
    run.sampler = run.algorithm.policy  # no kept prefill: both begin from the prompts
    loss, expected, metrics = gradients(run, batch)
    same_loss, found, same_metrics = gradients(run, some)
    torch.testing.assert_close(same_loss, loss, rtol=1e-12, atol=1e-14)
    assert any(g.abs().max() > 1e-6 for g in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-13, msg=name)
    assert metrics.keys() == same_metrics.keys()


@pytest.mark.parametrize("option", ["beta=0.1", "entropy_coef=0.01", "loss_type=bnpo"])
def test_where_every_row_counts_all_stay(stage, script, option):  # noqa: F811
    run, _ = one_step(stage, script, f"--grpo.{option}")
    assert without_idle_rows(run.algorithm, run.step) is run.step


def test_without_anything_to_learn_one_row_stays(stage, script):  # noqa: F811
    run, _ = one_step(stage, script, rewards=[1.0] * 16, size=2)
    for some in without_idle_rows(run.algorithm, run.step).micro_batches:
        assert len(some.rows) == len(some.group.prompts) == 1
        _, found, _ = gradients(run, some)
        assert all(gradient is None or not gradient.any() for gradient in found.values())


def test_a_whole_step_logs_all_rows_and_trains_on_some(stage, script, monkeypatch):  # noqa: F811
    run, [batch] = one_step(stage, script)
    seen, loss = [], run.algorithm.loss
    monkeypatch.setattr(run.algorithm, "loss", lambda batch: seen.append(batch) or loss(batch))
    assert run.update()["frac_reward_zero_std"] == 0.5
    assert [batch.rows.tolist() for batch in seen] == [TEACHING]
    assert run.step.micro_batches == [batch] and len(batch.rows) == 16
