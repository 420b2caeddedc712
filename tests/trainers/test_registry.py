"""Test that trainer classes are found by stage name."""

import pytest

from minivlmrl.config.options import RunConfig
from minivlmrl.trainers.registry import TRAINERS, find_trainer
from tests.helpers.stages import STAGES


def test_each_stage_has_a_class_of_its_name():
    run = RunConfig()
    assert set(TRAINERS) == set(STAGES)
    for name in TRAINERS:
        trainer = find_trainer(name, run)
        assert trainer.stage == name and isinstance(getattr(run, name), trainer.config_type)
    known = r"dpo, grpo, ppo, reward_model, sft, file\.py:name"
    with pytest.raises(ValueError, match=rf"unknown stage 'tpo'; known names are: {known}; did you mean ppo\?$"):
        find_trainer("tpo", run)
