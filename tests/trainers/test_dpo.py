"""Test DPO on tiny models: a loaded, precomputed, given or missing reference, and pair accuracy."""

import math

import PIL.Image
import pytest
import torch
from torch.nn.functional import logsigmoid

from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.tasks.shapes import Shapes
from tests.helpers.stages import Rows, snapshot

PRECOMPUTE = "--dpo.precompute_ref_log_probs=true"


def test_equal_rewards_do_not_count_as_correct(stage):
    """Precomputed references are not tested, because there another batch's rounding decides the sign."""
    run = stage("dpo", held_out=Shapes(3, "other"))
    assert run.accuracy() == 0  # because the policy is still equal to the reference


def assert_equal_runs(first, second, steps=3):
    """Assert that two runs have the same metrics and weights after some steps, to 1e-11."""
    for expected, values in zip(first.go(steps), second.go(steps), strict=True):
        same = {"rewards/accuracies": values["rewards/accuracies"]}  # equal pairs: rounding decides the sign
        assert values == pytest.approx(expected | same, rel=1e-11, abs=1e-11)
    torch.testing.assert_close(snapshot(second.model), snapshot(first.model), rtol=1e-11, atol=1e-11)
    assert abs(values["rewards/margins"]) > 1e-6


@pytest.mark.parametrize("options", [[], ["--dpo.ld_alpha=0.5"], ["--dpo.use_weighting=true"], ["--adapter.r=4"]])
def test_precomputed_references_equal_the_references(stage, options):
    held_out = Shapes(3, "other")
    kept, precomputed = (stage("dpo", *options, *more, held_out=held_out) for more in ([], [PRECOMPUTE]))
    assert precomputed.trainer.reference is None
    assert_equal_runs(kept, precomputed)
    assert precomputed.accuracy() == kept.accuracy()


def test_precomputing_scores_all_pairs_once(stage):
    """Eight training and three held-out rows are scored; a resumed run reads their values from JSON."""
    run = stage("dpo", PRECOMPUTE, held_out=Shapes(3, "other"))
    assert len(run.kept) == 8 + 3 and {type(value) for pair in run.kept.values() for value in pair} == {float}
    assert run.trainer.on_stage_begin(run.batches, run.held_out, run.kept) is run.kept
    with pytest.raises(ValueError, match="were not precomputed when the stage began; resume the run with"):
        run.trainer.micro_batch(list(Shapes(1, "new")))


def test_precomputing_distinguishes_images(stage):
    """Two images differ only in their sizes, because a wide and a tall one have equal patches, or only in colour."""
    rows = [Shapes(1, "x")[0] for _ in range(3)]
    for row, size, colour in zip(rows, ((56, 28), (28, 56), (56, 28)), ("red", "red", "blue"), strict=True):
        row.images = [PIL.Image.new("RGB", size, colour)]
    options = ["--dpo.prompts_per_step=3", "--dpo.micro_batch_size=1"]
    both = [stage("dpo", *options, *more, rows=Rows(rows)) for more in ([], [PRECOMPUTE])]
    kept, precomputed = (torch.cat([batch.ref_logps for batch in run.next()]) for run in both)
    assert all((kept[i] - kept[i - 1]).abs().max() > 1e-6 for i in range(3))
    torch.testing.assert_close(precomputed, kept, rtol=1e-12, atol=1e-12)


def test_without_a_reference_its_log_ratios_are_0(stage):
    """The loss is -log sigmoid(beta (log pi(chosen) - log pi(rejected))), as in TRL up to 0.28, and sft's mean."""
    options = "--dpo.reference_free=true", "--dpo.beta=0.3", "--dpo.loss_type=[sigmoid, sft]"
    run = stage("dpo", *options, held_out=Shapes(3, "other"))
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
