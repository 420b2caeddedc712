"""Test that each family in the registry names the blocks of its models."""

import pytest

from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.families.registry import FAMILIES, family_of, find_family
from tests.helpers import tiny


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_blocks_of_a_model_cover_its_layers_once(model_type):
    model = tiny.model(model_type=model_type)
    family = family_of(model)
    assert family is find_family(model_type) and type(model) is VisionLanguageModel
    names = {id(module): name for name, module in model.named_modules()}
    blocks = [names[id(block)] for block in model.blocks()]
    assert blocks == [f"visual.blocks.{i}" for i in range(4)] + [f"model.layers.{i}" for i in range(3)]
