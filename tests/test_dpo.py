"""DPO on tiny models: its reference, and the pairs that it wins."""

import math

import pytest
import torch

from minivlmrl.logprobs import per_token_logps
from minivlmrl.tasks.shapes import Shapes


def test_it_is_measured_against_the_policy_as_the_stage_found_it(stage):
    run = stage("dpo")
    start = stage("dpo").model
    for number in range(3):
        [first, _] = run.next()
        with torch.no_grad():
            expected = first.group.pad(per_token_logps(start, first.group)[0])
        torch.testing.assert_close(first.ref_per_token_logps, expected, rtol=1e-12, atol=1e-12)
        assert (run.update()["loss"] == pytest.approx(math.log(2), rel=1e-12)) == (number == 0)


def test_a_draw_is_no_win(stage):
    run = stage("dpo", held_out=Shapes(3, "other"))
    assert run.accuracy() == 0  # nothing has moved
