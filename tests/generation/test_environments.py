"""Test the functions that call extras/agents/."""

import pytest

from minivlmrl.config.options import RunConfig, SamplingOptions
from minivlmrl.generation.environments import check_environment


def test_a_reward_that_reads_the_environment_needs_one():
    run = RunConfig(rewards={"environment": 1.0}, sampling=SamplingOptions())
    with pytest.raises(ValueError, match=r"but sampling.environment \(None\) does not have"):
        check_environment(run)
    check_environment(RunConfig(rewards={"format": 1.0}, sampling=SamplingOptions()))
