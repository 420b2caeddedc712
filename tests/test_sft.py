"""SFT on tiny models."""

import pytest


def test_a_step_counts_the_tokens_of_all_its_rows(stage):
    run = stage("sft")
    batches = run.next()
    assert [len(batch.loss_mask) for batch in batches] == [2, 2]
    tokens = sum(float(batch.loss_mask.sum()) for batch in batches)
    assert all((batch.counts.sequences, batch.counts.tokens) == (4, tokens) for batch in batches)


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_it_learns_its_demonstrations(stage, loss_type):
    lines = stage("sft", f"--sft.loss_type={loss_type}").go(12)
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"] if loss_type == "nll" else lines[-1]["loss"] != lines[0]["loss"]
