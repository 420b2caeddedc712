"""The record of a model family answers what hub, plan and sharding ask."""

import pytest

from minivlmrl.model.decoder import Qwen2_5_VL
from minivlmrl.model.families.registry import FAMILIES, family_of

import tiny


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_blocks_of_a_model_are_its_towers_and_nothing_twice(model_type):
    model = tiny.model(model_type=model_type)
    family = family_of(model)
    assert family is FAMILIES[model_type] and type(model) is Qwen2_5_VL
    names = {id(module): name for name, module in model.named_modules()}
    blocks = [names[id(block)] for block in family.blocks(model)]
    assert blocks == [f"visual.blocks.{i}" for i in range(4)] + [f"model.layers.{i}" for i in range(3)]
