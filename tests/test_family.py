"""The record of a model family answers what hub, plan and sharding ask."""

import dataclasses

import pytest

from minivlmrl.decoder import Qwen2_5_VL
from minivlmrl.hub.family import FAMILIES, family_of
from minivlmrl.hub.model_config import VisionConfig

import tiny


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_blocks_of_a_model_are_its_towers_and_nothing_twice(model_type):
    model = tiny.model(model_type=model_type)
    family = family_of(model)
    assert family is FAMILIES[model_type] and type(model) is Qwen2_5_VL
    names = {id(module): name for name, module in model.named_modules()}
    blocks = [names[id(block)] for block in family.blocks(model)]
    assert blocks == [f"visual.blocks.{i}" for i in range(4)] + [f"model.layers.{i}" for i in range(3)]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_towers_have_fields_of_vision_config_and_survive_the_names_of_the_hub(model_type):
    family = FAMILIES[model_type]
    config = tiny.config(model_type=model_type).vision_config
    assert family.tower.keys() <= {field.name for field in dataclasses.fields(VisionConfig)}
    assert {name: getattr(config, name) for name in family.tower} == family.tower
    ours = {name: value for name, value in dataclasses.asdict(config).items() if name not in family.tower}
    stored = tiny.config(model_type=model_type).to_dict()["vision_config"]
    found = {"in_channels": 3, **family.read_vision(stored, "config.json")}
    assert {name: found[name] for name in ours} == ours
