"""Convert config.json to a ModelConfig and back."""

from collections.abc import Container
from dataclasses import asdict, fields
from typing import Any

from minivlmrl.config.parsing import build
from minivlmrl.errors import error_context, require
from minivlmrl.model.config import ModelConfig, VisionConfig
from minivlmrl.model.families.registry import FAMILIES, find_family

# keys in config.json that to_dict recomputes
REWRITTEN = {"text_config", "rope_parameters", "rope_scaling", "dtype", "architectures", "transformers_version"}
# keys that may be null; for others, null means the default
NULLABLE = {"bos_token_id", "eos_token_id"}
# transformers 5 renamed rope_scaling to rope_parameters
ROPE = "rope_parameters", "rope_scaling"
# keys in vision_config that to_dict recomputes
REWRITTEN_IN_VISION = REWRITTEN | {"model_type", "hidden_act", "in_chans", "spatial_patch_size", "torch_dtype"}


def from_dict(config: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Parse config.json, with decoder keys at the top level (as on the Hub) or in text_config (transformers 5)."""
    model_type = config.get("model_type")
    require(
        model_type in [*FAMILIES],
        f"{where}: model_type",
        model_type,
        f"{' or '.join(FAMILIES)}; no other family, and no text model, is supported",
    )
    family = find_family(model_type)
    text = _section(config, where, "text_config")
    vision = _section(config, where, "vision_config")
    flat = _merge(config, text, {"model_type": model_type})
    rope = _section(flat, where, *ROPE)
    vision_rope = _section(vision, f"{where}: vision_config", *ROPE)
    settings = [
        ("rope_scaling.type", rope.get("rope_type") or rope.get("type"), ("mrope", "default")),
        ("rope_scaling.mrope_interleaved", rope.get("mrope_interleaved"), (family.config_type.mrope_interleaved,)),
        ("attention_bias", flat.get("attention_bias"), (family.config_type.attention_bias,)),
        *((key, flat.get(key), values) for key, values in family.supported.items()),
        ("vision_config.hidden_act", vision.get("hidden_act"), (family.vision_hidden_act,)),
        ("vision_config.rope_type", vision_rope.get("rope_type"), ("axial", "default")),
    ]
    for key, value, supported in settings:
        require(
            value is None or value in supported,
            f"{where}: {key}",
            value,
            f"{supported[0]!r}; no other value is supported",
        )
    flat.pop("mrope_section", None)  # mrope_section is valid only in rope_scaling
    names = {field.name for field in fields(family.config_type)}
    flat = _merge(family.read_text(flat), {name: x for name, x in rope.items() if name in names})
    flat["torch_dtype"] = config.get("torch_dtype") or config.get("dtype") or flat.get("dtype")
    # prefer the top-level tie_word_embeddings: transformers 5 always writes the default into text_config
    flat["tie_word_embeddings"] = _merge({"tie_word_embeddings": False}, text, config)["tie_word_embeddings"]
    defaults = {"in_channels": VisionConfig.in_channels, "rope_theta": VisionConfig.rope_theta}
    others = {"in_channels": vision.get("in_chans"), "rope_theta": vision_rope.get("rope_theta")}
    vision = family.read_vision(_merge(defaults, vision, others), where)
    vision["extra"] = without(vision, {field.name for field in fields(family.vision_config_type)} | REWRITTEN_IN_VISION)
    flat["vision_config"] = build(family.vision_config_type, vision, where, "vision_config.", json=True)
    flat["extra"] = without(flat, names | REWRITTEN)
    flat = {name: x for name, x in flat.items() if x is not None or name in NULLABLE}
    built = build(family.config_type, flat, where, json=True)
    with error_context(where):
        _check(built)
    return built


def to_dict(model_config: ModelConfig) -> dict[str, Any]:
    """Build config.json with decoder keys at the top level, which vLLM and older transformers also read."""
    family = find_family(model_config.model_type)
    text = asdict(model_config)
    vision = text.pop("vision_config")
    vision = vision.pop("extra") | vision
    mrope_section = text.pop("mrope_section")
    in_channels = vision.pop("in_channels")
    return family.write_config(
        {
            **text.pop("extra"),
            "architectures": [family.architecture],
            "hidden_act": "silu",
            **text,
            "rope_scaling": {"type": "mrope", "mrope_section": mrope_section},
            "vision_config": {
                **vision,
                "model_type": model_config.model_type,
                "hidden_act": family.vision_hidden_act,
                "in_chans": in_channels,
                "spatial_patch_size": vision["patch_size"],
            },
        }
    )


def without(values: dict, names: Container[str]) -> dict:
    return {name: value for name, value in values.items() if name not in names}


def _merge(*sections: dict) -> dict:
    """Merge JSON objects like dict.update, but {"a": 1} and {"a": null} give {"a": 1}.

    Some transformers releases write null into text_config for top-level keys.
    """
    merged = {}
    for section in sections:
        merged |= {name: x for name, x in section.items() if x is not None or name not in merged}
    return merged


def _section(config: dict, where: str, *names: str) -> dict:
    """Return the first nonempty section of config.json among `names`, or {}."""
    for name in names:
        section = config.get(name)
        if section:
            require(isinstance(section, dict), f"{where}: {name}", section, "an object")
            return section
    return {}


def _check(model_config: ModelConfig):
    """Raise UserError if sizes in a ModelConfig contradict each other."""
    vision = model_config.vision_config
    num_layers = model_config.num_hidden_layers
    num_heads = model_config.num_attention_heads
    num_key_heads = model_config.num_key_value_heads
    has_head_dim = "head_dim" in vars(model_config)  # default head_dim: hidden_size / num_attention_heads
    section = list(model_config.mrope_section)
    levels = list(vision.deepstack_visual_indexes)
    token_side = vision.patch_size * vision.spatial_merge_size
    rules = [
        (vision.window_size is None or vision.window_size >= token_side,
         "vision_config.window_size", vision.window_size, f"{token_side} or more"),
        (has_head_dim or model_config.hidden_size % num_heads == 0, "hidden_size", model_config.hidden_size,
         f"a multiple of its {num_heads} heads"),
        (num_heads % num_key_heads == 0, "num_key_value_heads", num_key_heads,
         f"a divisor of num_attention_heads ({num_heads})"),
        (sum(section) * 2 == model_config.rotary_dim, "mrope_section", section,
         f"three numbers whose sum is half of {model_config.rotary_dim}, the rotated part of head_dim"),
        (vision.hidden_size % (4 * vision.num_heads) == 0,
         "vision_config.hidden_size", vision.hidden_size,
         "a multiple of 4 x num_heads, for 2-D rotary embeddings"),
        (vision.out_hidden_size == model_config.hidden_size,
         "vision_config.out_hidden_size", vision.out_hidden_size,
         f"hidden_size ({model_config.hidden_size}); Qwen2-VL calls it vision_config.hidden_size"),
        (len(levels) < num_layers, "vision_config.deepstack_visual_indexes", levels,
         f"fewer than num_hidden_layers ({num_layers})"),
    ]  # fmt: skip
    for holds, name, value, expected in rules:
        require(holds, name, value, expected)
