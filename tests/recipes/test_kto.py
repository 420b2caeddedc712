"""Test KTO on tiny models. audit/tests/test_trl_steps.py compares its steps with TRL's."""

import pytest


def test_a_step_of_one_row_is_refused(stage):
    with pytest.raises(ValueError, match=r"kto\.prompts_per_step is 1, but must be at least 2"):
        stage("kto", "--kto.prompts_per_step=1")
    stage("kto", "--kto.prompts_per_step=1", "--kto.loss_type=apo_zero_unpaired").go()
