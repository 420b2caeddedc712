"""Test that trainers are found by stage name, which weights they train, and options that all stages share."""

import pytest

from minivlmrl.trainers.registry import find_trainer
from tests.helpers.stages import STAGES


@pytest.mark.parametrize("following", STAGES)
def test_a_later_stage_trains_everything_again(stage, following):
    run = stage("dpo", "--model.freeze=[vision]")
    assert not any(p.requires_grad for p in run.model.visual.blocks.parameters())
    first = run.trainer
    first.config.stages = [following]
    first.config.model.freeze = []
    trainer = find_trainer(following, first.config)(first.config, run.model, first.processor, first.world)
    assert all(p.requires_grad for p in run.model.parameters())
    alone = {name for name, p in trainer.trained.named_parameters() if not p.requires_grad}
    assert alone == ({"backbone.lm_head.weight"} if following == "reward_model" else set())
