"""Test the model family registry."""

import os
import subprocess
import sys

import pytest

from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.families.registry import FAMILIES, family_of
from tests.helpers import tiny
from tests.helpers.links import ROOT


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_blocks_of_a_model_cover_its_layers_once(model_type):
    model = tiny.model(model_type=model_type)
    family = family_of(model)
    assert family is FAMILIES[model_type] and type(model) is VisionLanguageModel
    names = {id(module): name for name, module in model.named_modules()}
    blocks = [names[id(block)] for block in model.blocks()]
    assert blocks == [f"visual.blocks.{i}" for i in range(4)] + [f"model.layers.{i}" for i in range(3)]


OTHERS = "qwen2_vl", "qwen3_vl", "qwen3_5", "experts"
LOADED = """
import sys
from minivlmrl.model.build import random_model
from minivlmrl.tasks.shapes import tokenizer
random_model("recipes/shapes_model.json", tokenizer(), 0)
print(*sys.modules)
"""


def test_building_a_model_imports_no_unused_modules(monkeypatch):
    monkeypatch.chdir(ROOT)
    command = [sys.executable, "-c", LOADED]
    loaded = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    modules = loaded.stdout.split()
    assert "minivlmrl.model.families.qwen2_5_vl" in modules
    unwanted = [f"minivlmrl.model.families.{name}" for name in OTHERS]
    unwanted += [f"minivlmrl.model.{name}" for name in ("lora", "nf4", "peft", "checkpoint")]
    assert not [name for name in modules if name in unwanted or name.startswith("minivlmrl.distributed")]
