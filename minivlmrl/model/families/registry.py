"""Registry of model families, and conversion of parameter names in weight files."""

import functools
import re

from minivlmrl.load_extra import load_extra
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.families.base import Family

FAMILIES = {  # {model_type in config.json: subclass of Family}
    "qwen2_5_vl": "minivlmrl.model.families.qwen2_5_vl:Qwen2_5VL",
    "qwen2_vl": "minivlmrl.model.families.qwen2_vl:Qwen2VL",
    "qwen3_vl": "minivlmrl.extras.families.qwen3_vl:Qwen3VL",
    "qwen3_5": "minivlmrl.extras.families.qwen3_5:Qwen3_5",
    "qwen3_vl_moe": "minivlmrl.extras.families.qwen3_moe:Qwen3VLMoe",
    "qwen3_5_moe": "minivlmrl.extras.families.qwen3_moe:Qwen3_5Moe",
}
CONTROL_TOKENS = {  # {ModelConfig field: token}, for all families
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "eos_token_id": "<|im_end|>",
    "bos_token_id": "<|endoftext|>",
}


@functools.cache
def find_family(model_type: str) -> Family:
    """Return the family for model_type in config.json."""
    return load_extra(FAMILIES[model_type], f"model_type {model_type}")()


def family_of(model: VisionLanguageModel) -> Family:
    return find_family(model.config.model_type)


def hub_name(name: str) -> str:
    """Convert a tensor name in a weight file to the parameter name in minivlmrl.

    Example: model.visual.x becomes visual.x, and model.language_model.x becomes model.x.
    """
    return re.sub(r"^model\.(?=visual\.)|^model\.language_(?=model\.)", "", name)


def module_name(name: str) -> str:
    """Convert a parameter name in minivlmrl to the name in transformers since 4.52."""
    if name.startswith("visual."):
        return f"model.{name}"
    return re.sub(r"^model\.", "model.language_model.", name)
