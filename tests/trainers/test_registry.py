"""Test that trainer classes are found by stage name."""

import pytest

from minivlmrl.config.options import GRPOOptions, RunConfig
from minivlmrl.trainers.registry import TRAINERS, find_trainer
from tests.helpers.stages import STAGES


class Run:
    """A recipe with only the section `grpo`."""

    def __init__(self, **options):
        self.grpo = GRPOOptions(**options)
        self.stages = []


def test_each_stage_has_a_class_of_its_name():
    assert set(TRAINERS) == set(STAGES)
    assert all(find_trainer(name, Run()).stage == name for name in TRAINERS)
    for name in TRAINERS:
        assert isinstance(getattr(RunConfig(), name), find_trainer(name, Run()).config_type)
    known = r"dpo, grpo, ppo, reward_model, sft, file\.py:name"
    with pytest.raises(ValueError, match=rf"unknown stage 'tpo'; known names are: {known}; did you mean ppo\?$"):
        find_trainer("tpo", Run())
