"""config.json of the hub's models and of transformers, old and new: what is read, what is written, what is refused."""

import json

import pytest
import torch
from hub_configs import QWEN3_SIZES, SIZES, real_config, tiny_config
from record_checkpoints import RECORDED, VERSIONS

from minivlmrl.hub.family import FAMILIES
from minivlmrl.hub.model_config import ModelConfig

import tiny

RECORDS = {v: json.loads((RECORDED / f"checkpoints_transformers_{v}.json").read_text()) for v in VERSIONS}


@pytest.mark.parametrize("size", SIZES | QWEN3_SIZES)
def test_the_hubs_sizes_have_the_known_number_of_parameters_and_tensors(size):
    config = ModelConfig.from_dict(real_config(size))
    with torch.device("meta"):
        model = FAMILIES[config.model_type].model(config)
    *_, parameters, tensors = (SIZES | QWEN3_SIZES)[size]
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert len(list(model.parameters())) == tensors
    assert config.vision_config.patch_dim == (1176 if size in SIZES else 1536) and config.head_dim == 128


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_hubs_configs_are_read_from_what_older_versions_made_of_them(version, size):
    """Of these are the folders of most fine-tunes: 4.49 leaves out what its classes have by default."""
    ours = [ModelConfig.from_dict(content) for content in (real_config(size), RECORDS[version]["configs"][size])]
    for config in ours:
        config.extra = {}
    assert ours[0] == ours[1]


def test_the_top_level_decides_whether_the_head_is_tied():
    """transformers 5 repeats the key inside text_config, with its class default."""
    nested = {"tie_word_embeddings": True, "text_config": {**tiny.RUN_MODEL, "tie_word_embeddings": False}}
    config = {"model_type": "qwen2_5_vl", "vision_config": tiny.RUN_MODEL["vision_config"], **nested}
    assert ModelConfig.from_dict(config).tie_word_embeddings
    assert not ModelConfig.from_dict(config | {"tie_word_embeddings": False}).tie_word_embeddings


def test_mrope_section_counts_inside_rope_scaling_alone():
    outside = {"mrope_section": tiny.RUN_MODEL["rope_scaling"]["mrope_section"], "rope_scaling": {"type": "mrope"}}
    with pytest.raises(ValueError, match=r"mrope_section is \[16, 24, 24\]"):
        ModelConfig.from_dict(tiny.RUN_MODEL | outside)


def test_what_a_config_leaves_out_is_what_transformers_takes(transformers):
    text = {name: value for name, value in tiny.RUN_MODEL.items() if name not in ("vision_config", "rms_norm_eps")}
    for model_type, vision in (("qwen2_5_vl", {"out_hidden_size": 32}), ("qwen2_vl", {"hidden_size": 32})):
        values = text | {"model_type": model_type, "vision_config": vision}
        ours, theirs = ModelConfig.from_dict(values), transformers.AutoConfig.for_model(**values)
        assert ours.rms_norm_eps == theirs.text_config.rms_norm_eps
        for name in ("depth", "num_heads", "patch_size", "spatial_merge_size", "temporal_patch_size"):
            assert getattr(ours.vision_config, name) == getattr(theirs.vision_config, name), name
        if model_type == "qwen2_5_vl":
            for name in ("hidden_size", "intermediate_size", "window_size", "tokens_per_second"):
                assert getattr(ours.vision_config, name) == getattr(theirs.vision_config, name), name
            assert list(ours.vision_config.fullatt_block_indexes) == list(theirs.vision_config.fullatt_block_indexes)
        else:
            assert ours.vision_config.hidden_size == theirs.vision_config.embed_dim
            ratio = theirs.vision_config.mlp_ratio
            assert ours.vision_config.intermediate_size == theirs.vision_config.embed_dim * ratio


@pytest.mark.parametrize("size", ["Qwen2.5-VL-3B", "Qwen2-VL-2B", "Qwen3-VL-4B", "Qwen3.5-9B"])
def test_what_is_written_is_read_as_the_same(size):
    config = ModelConfig.from_dict(real_config(size))
    again = ModelConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    config.extra = again.extra = {}
    assert again == config


def changed(path: str, value) -> dict:
    """The config of a tiny model with one value replaced, or taken out if it is `...`."""
    config = json.loads(json.dumps(tiny_config("qwen2_5_vl", tied=False)))
    *inside, name = path.split(".")
    holder = config
    for key in inside:
        holder = holder[key]
    holder[name] = value
    if value is ...:
        del holder[name]
    return config


@pytest.mark.parametrize(("path", "value", "says"), [
    ("model_type", "llama", "model_type is 'llama', this model reads qwen2_5_vl, qwen2_vl, qwen3_vl and qwen3_5"),
    ("hidden_size", ..., "hidden_size is missing"),
    ("hidden_size", 0, "hidden_size is 0, it must be 1 or more"),
    ("hidden_size", 66, "hidden_size is 66, it must be a multiple of its 4 heads"),
    ("num_key_value_heads", 3, "num_key_value_heads is 3, it must be a divisor of num_attention_heads (4)"),
    ("rms_norm_eps", 0, "rms_norm_eps is 0.0, it must be over 0 and finite"),
    ("rope_scaling", [], "mrope_section is [16, 24, 24], it must be three numbers whose sum is half of"),
    ("rope_scaling", "mrope", "rope_scaling is 'mrope', it must be an object"),
    ("rope_scaling.mrope_section", [2, 6], "mrope_section is [2, 6], it must be a list of 3 values"),
    ("rope_scaling.mrope_section", [2, 3, 4], "mrope_section is [2, 3, 4], it must be three numbers whose sum"),
    ("rope_scaling.type", "yarn", "rope_scaling.type is 'yarn', it must be 'mrope'; no other is supported"),
    ("hidden_act", "gelu", "hidden_act is 'gelu', it must be 'silu'"),
    ("use_sliding_window", True, "use_sliding_window is True, it must be False"),
    ("vision_config.fullatt_block_indexes", [-1], "vision_config.fullatt_block_indexes is -1, it must be"),
    ("vision_config.hidden_act", "gelu", "vision_config.hidden_act is 'gelu', it must be 'silu'"),
    ("vision_config.out_hidden_size", 32, "vision_config.out_hidden_size is 32, it must be hidden_size (64)"),
    ("vision_config.num_heads", 16, "vision_config.hidden_size is 32, it must be a multiple of 4 x num_heads"),
])  # fmt: skip
def test_what_no_model_of_ours_computes_is_named(path, value, says):
    with pytest.raises(ValueError) as error:
        ModelConfig.from_dict(changed(path, value), "FOLDER/config.json")
    assert str(error.value).startswith(f"FOLDER/config.json: {says}")
