"""DPO on tiny models: its reference, also precomputed, and the pairs that it wins."""

import math

import PIL.Image
import pytest
import torch

from minivlmrl.logprobs import per_token_logps
from minivlmrl.tasks.shapes import Shapes

from stages import Rows

PRECOMPUTE = "--dpo.precompute_ref_log_probs=true"


def test_it_is_measured_against_the_reference_of_its_step(stage):
    options = ("sync_ref_model=true", "ref_model_sync_steps=1", "ref_model_mixup_alpha=1")
    run = stage("dpo", *(f"--reference.{option}" for option in options))
    for _ in range(3):  # the reference becomes the policy after every step
        [first, _] = run.next()
        with torch.no_grad():
            policy = first.group.pad(per_token_logps(run.model, first.group)[0])
        torch.testing.assert_close(first.ref_per_token_logps, policy, rtol=1e-12, atol=1e-12)
        assert run.update()["loss"] == pytest.approx(math.log(2), rel=1e-12)


@pytest.mark.parametrize("options", [["--dpo.ld_alpha=0.5"], ["--dpo.use_weighting=true"]])
def test_precomputed_references_are_the_references(stage, options):
    kept = stage("dpo", *options)
    precomputed = stage("dpo", *options, PRECOMPUTE)
    one, other = kept.go(3), precomputed.go(3)
    for a, b in zip(one, other, strict=True):
        skip = {"rewards/accuracies"} if abs(a["rewards/margins"]) < 1e-9 else set()  # rounding decides
        assert {k: v for k, v in b.items() if k not in skip} == pytest.approx(
            {k: v for k, v in a.items() if k not in skip}, rel=1e-6, abs=1e-9
        )
    assert one[-1]["rewards/margins"] != 0


def test_precomputing_scores_what_the_stage_meets_and_no_more(stage):
    run = stage("dpo", PRECOMPUTE, "--dpo.max_steps=1", held_out=Shapes(3, "other"))
    precomputed = run.algorithm.precomputed
    assert len(precomputed["train"]) == 4 and precomputed["held_out"].keys() == {0, 1, 2}
    assert all(not logps.requires_grad for rows in precomputed.values() for logps in rows.values())
    assert run.accuracy() == 0  # nothing has moved: a draw is no win
    run.go()
    with pytest.raises(ValueError, match=r"dpo.precompute_ref_log_probs: a row was not scored .* dpo\.max_steps that"):
        run.go()


def test_precomputing_tells_rows_apart(stage):
    """A wide and a high image of one colour have equal patches and equally many tokens."""
    rows = [Shapes(1, "x")[0] for _ in range(2)]
    for row, size in zip(rows, ((56, 28), (28, 56)), strict=True):
        row.images = [PIL.Image.new("RGB", size, "red")]
    options = ["--dpo.prompts_per_step=2", "--dpo.micro_batch_size=1"]
    both = [stage("dpo", *options, *more, rows=Rows(rows)) for more in ([], [PRECOMPUTE])]
    kept, precomputed = (torch.stack([batch.ref_per_token_logps for batch in run.next()]) for run in both)
    assert (kept[0] - kept[1]).abs().max() > 1e-6
    torch.testing.assert_close(precomputed, kept, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options, says", [
    ([PRECOMPUTE, "--reference.sync_ref_model=true"], r"reference\.sync_ref_model needs .*which dpo leaves"),
    ([PRECOMPUTE, "--reference.num_shared_layers=1"], r"reference\.num_shared_layers needs"),
])  # fmt: skip
def test_a_recipe_that_cannot_be_is_refused(stage, options, says):
    with pytest.raises(ValueError, match=says):
        stage("dpo", *options)
