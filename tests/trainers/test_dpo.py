"""Test DPO on tiny models: a loaded or missing reference model, and pair accuracy."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import logsigmoid

from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.tasks.shapes import Shapes


def test_equal_rewards_do_not_count_as_correct(stage):
    assert stage("dpo", held_out=Shapes(3, "other")).accuracy() == 0  # the policy still equals the reference


def test_without_a_reference_its_log_ratios_are_0(stage):
    """The loss is -log sigmoid(beta (log pi(chosen) - log pi(rejected))), as in TRL up to 0.28, plus the loss sft."""
    options = "--dpo.reference_free=true", "--dpo.beta=0.3", "--dpo.loss_type=[sigmoid, sft]"
    rows = [replace(row, rejected=f"{row.rejected} or so") for row in Shapes(8, "rows")]
    run = stage("dpo", *options, rows=rows, held_out=Shapes(3, "other"))
    assert run.trainer.reference is None
    batches = run.next()
    losses, all_chosen = [], []
    for batch in batches:
        with torch.no_grad():
            logps = batch.group.pad(per_token_logps(run.model, batch.group)[0])
        chosen, rejected = (logps * batch.loss_mask).sum(1).view(-1, 2).unbind(1)
        losses.append(-logsigmoid(0.3 * (chosen - rejected)))
        all_chosen.append(logps[::2][batch.loss_mask[::2].bool()])
    metrics = run.update()
    expected = torch.cat(losses).mean() - torch.cat(all_chosen).mean()  # sft is a mean over the step's chosen tokens
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-12)
    assert abs(torch.cat(losses).mean() - math.log(2)) > 1e-6 and run.accuracy() is not None


def test_margins_weigh_the_tokens_beyond_the_shorter_answer(stage):
    rows = [replace(row, rejected=f"{row.rejected} or so") for row in Shapes(8, "rows")]
    run = stage("dpo", "--dpo.ld_alpha=0.5", rows=rows)
    run.go(2)
    with torch.no_grad():
        margins = run.trainer.margins(rows)
        _, metrics = run.trainer.loss(run.trainer.micro_batch(rows))
    assert 0.1 * margins.mean().item() == pytest.approx(metrics["rewards/margins"].item(), rel=1e-9)
