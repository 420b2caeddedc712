"""Test how config.json is read and written, for models of the Hub and files of transformers."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from minivlmrl.data.tokenizer import train_tokenizer
from minivlmrl.model import build as model_build
from minivlmrl.model import config_json
from minivlmrl.model.build import random_model
from minivlmrl.model.families.registry import FAMILIES, find_family
from tests.helpers import tiny
from tests.helpers.hub_configs import QWEN3_SIZES, SIZES, real_config, tiny_config

RECORDED = Path(__file__).parents[1] / "recorded"
FILES = sorted(RECORDED.glob("c*_transformers_4.*.json"))
VERSIONS = {file.stem.rpartition("_")[2]: json.loads(file.read_text())["configs"] for file in FILES}


@pytest.mark.parametrize("size", SIZES | QWEN3_SIZES)
def test_models_on_the_hub_have_the_known_number_of_parameters(size):
    config = config_json.from_dict(real_config(size))
    with torch.device("meta"):
        model = find_family(config.model_type).build_model(config)
    assert (sum(p.numel() for p in model.parameters()), len(list(model.parameters()))) == (SIZES | QWEN3_SIZES)[size]
    assert config.vision_config.patch_dim == (1176 if size in SIZES else 1536) and config.head_dim == 128


@pytest.mark.parametrize("size", ["Qwen2.5-VL-3B", "Qwen2.5-VL-7B", "Qwen2-VL-2B"])
@pytest.mark.parametrize("version", VERSIONS)
def test_configs_saved_by_older_transformers_are_read(version, size):
    """transformers 4.49 leaves out default values, and transformers 4.52 writes nulls beside values."""
    ours = [config_json.from_dict(content) for content in (real_config(size), VERSIONS[version][size])]
    for config in ours:
        config.extra, config.vision_config = {}, replace(config.vision_config, extra={})
    assert ours[0] == ours[1]


def test_the_top_level_decides_whether_the_head_is_tied():
    nested = {
        "tie_word_embeddings": True,
        "text_config": {**tiny.RUN_MODEL, "vocab_size": 512, "tie_word_embeddings": False},
    }
    config = {"model_type": "qwen2_5_vl", "vision_config": tiny.RUN_MODEL["vision_config"], **nested}
    assert config_json.from_dict(config).tie_word_embeddings
    assert not config_json.from_dict(config | {"tie_word_embeddings": False}).tie_word_embeddings


@pytest.mark.parametrize("model_type", FAMILIES)
def test_unknown_keys_are_kept(model_type):
    given = tiny_config(model_type, tied=False)
    vision = given["vision_config"] | {"foo_new_field": {"a": [7]}}
    written = config_json.to_dict(config_json.from_dict(given | {"vision_config": vision, "another": 8}))
    written = json.loads(json.dumps(written))  # tuples become lists
    assert written["vision_config"].items() >= vision.items()
    assert {**written, **written.get("text_config", {})}["another"] == 8


IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
SHARED = ("head_dim", "rms_norm_eps", "attention_bias")
LINEAR = ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")
# names of text fields; values of text, rope and vision tower
NEWER = {
    "qwen3_vl": ((*SHARED, "max_position_embeddings"), {"head_dim": 16}, {}, {"deepstack_visual_indexes": [1]}),
    "qwen3_5": (
        (*SHARED, "eos_token_id", *(f"linear_{name}" for name in LINEAR)),
        {"full_attention_interval": 2, "head_dim": 16, "linear_key_head_dim": 8}, {"partial_rotary_factor": 0.5}, {},
    ),
}  # fmt: skip
TOWER = ("depth", "num_heads", "patch_size", "spatial_merge_size", "temporal_patch_size", "hidden_size")
TOWER += ("intermediate_size", "num_position_embeddings")


@pytest.mark.parametrize("little", [True, False])
@pytest.mark.parametrize("model_type", NEWER)
def test_default_values_of_newer_families_are_those_of_transformers(model_type, little, transformers):
    names, message, rope, vision = NEWER[model_type]
    text = {"hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"vocab_size": 300, "intermediate_size": 96}
    if not little:
        sections = [2, 1, 1] if rope else [4, 2, 2]
        rope = rope | {"rope_type": "default", "mrope_section": sections, "rope_theta": 7e5}
        text |= message | {"rope_parameters": rope}
    vision = {"out_hidden_size": 64, **({} if little else vision)}
    given = {"model_type": model_type, "text_config": text, "vision_config": vision}
    theirs = transformers.AutoConfig.for_model(**given)
    for config in (given, json.loads(theirs.to_json_string())):
        ours = config_json.from_dict(config)
        assert [getattr(ours, name) for name in names] == [getattr(theirs.text_config, name) for name in names]
        assert [getattr(ours, name) for name in IDS] == [getattr(theirs, name) for name in IDS]
        found = theirs.text_config.rope_parameters
        assert ours.rope_theta == found["rope_theta"]
        if model_type == "qwen3_5":
            assert list(ours.layer_types) == theirs.text_config.layer_types
            assert ours.partial_rotary_factor == found["partial_rotary_factor"]
        towers = ours.vision_config, theirs.vision_config
        assert [getattr(towers[0], name) for name in TOWER] == [getattr(towers[1], name) for name in TOWER]
        deep = getattr(theirs.vision_config, "deepstack_visual_indexes", ())
        assert list(ours.vision_config.deepstack_visual_indexes) == list(deep)


def changed(path: str, value) -> dict:
    """Return a tiny config in which the value at "family/section.name" is replaced, or removed by `...`."""
    family, _, path = path.rpartition("/")
    config = json.loads(json.dumps(tiny_config(family or "qwen2_5_vl", tied=False)))
    *inside, name = path.split(".")
    holder = config
    for key in inside:
        holder = holder[key]
    holder[name] = value
    if value is ...:
        del holder[name]
    return config


@pytest.mark.parametrize(("path", "value", "expected"), [
    ("model_type", "llama", "model_type is 'llama', but it must be qwen2_5_vl or qwen2_vl or qwen3_vl or qwen3_5 "),
    ("qwen3_5/text_config.output_gate_type", "sigmoid", "output_gate_type is 'sigmoid', but it must be 'swish'"),
    ("hidden_size", ..., "hidden_size is missing"),
    ("num_key_value_heads", 3, "num_key_value_heads is 3, but it must be a divisor of num_attention_heads (4)"),
    ("rms_norm_eps", 0, "rms_norm_eps is 0.0, but it must be in (0, inf)"),
    ("rope_scaling.mrope_section", [2, 3, 4], "mrope_section is [2, 3, 4], but it must be three numbers whose sum"),
    ("rope_scaling.type", "yarn", "rope_scaling.type is 'yarn', but it must be 'mrope'; no other value is supported"),
    ("use_sliding_window", True, "use_sliding_window is True, but it must be False"),
    ("vision_config.out_hidden_size", 32, "vision_config.out_hidden_size is 32, but it must be hidden_size (64)"),
    ("qwen3_vl/vision_config.num_position_embeddings", 35, "is 35, but it must be a square number"),
    ("qwen3_vl/vision_config.deepstack_visual_indexes", [1, 4], "it must be a list of different indices below depth ("),
    ("qwen3_vl/text_config.rope_scaling", {"mrope_interleaved": False}, "interleaved is False, but it must be True"),
    ("qwen3_5/text_config.layer_types", ["linear_attention"] * 3, "with at least one full_attention"),
    ("qwen3_5/text_config.linear_num_key_heads", 3, "is 3, but it must be a divisor of linear_num_value_heads (4)"),
    ("qwen3_vl_moe/text_config.num_experts_per_tok", 6, "per_tok is 6, but it must be num_experts (5) or less"),
    ("qwen3_vl_moe/text_config.moe_intermediate_size", 32, "must be neither hidden_size nor half of it"),
    ("qwen3_vl_moe/text_config.norm_topk_prob", False, "norm_topk_prob is False, but it must be True"),
    ("vision_config.rope_parameters", {"rope_type": "linear"}, "vision_config.rope_type is 'linear', but it"),
    ("qwen2_vl/vision_config.embed_dim", 1.5, "vision_config.embed_dim is 1.5, but it must be of type int"),
    ("vision_config.window_size", 27, "vision_config.window_size is 27, but it must be 28 or more"),
])  # fmt: skip
def test_unsupported_values_are_refused(path, value, expected):
    with pytest.raises(ValueError) as error:
        config_json.from_dict(changed(path, value), "FOLDER/config.json")
    assert str(error.value).startswith("FOLDER/config.json: ") and expected in str(error.value)


def keys(config: dict, before: str = ""):
    for name, value in config.items():
        yield before + name
        if isinstance(value, dict):
            yield from keys(value, f"{before}{name}.")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_any_value_of_any_key_is_read_or_refused(model_type):
    """A huge value in a config must not allocate gigabytes."""
    build = partial(random_model, tokenizer=train_tokenizer([], 0), seed=0)
    built = set()
    for key in keys(tiny_config(model_type, tied=False)):
        for value in (-1, 0, 10**12, 10**400, 1e308, 1.5, None, "x", [], [[1]], {"a": None}):
            config = changed(f"{model_type}/{key}", value)
            if key == "text_config.full_attention_interval":
                del config["text_config"]["layer_types"]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(model_build, "read_json", lambda _, config=config: config)
                try:
                    found = repr(config_json.from_dict(config, "config.json"))
                    if found not in built:
                        built.add(found)
                        build("config.json")
                except ValueError as error:
                    assert str(error).startswith("config.json") and "\n" not in str(error)
