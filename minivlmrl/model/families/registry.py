"""Registry of model families; docs/developer_guide.md shows how to add a family.

Each family's Python module has a dictionary SPECS, from model_type in config.json to ModelSpec.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.image_settings import write_video_processor
from minivlmrl.errors import check_extras
from minivlmrl.model.config import ModelConfig, VisionConfig
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.plain_weights import Weight

MODULES = {
    "qwen2_5_vl": "minivlmrl.model.families.qwen2_5_vl",
    "qwen2_vl": "minivlmrl.model.families.qwen2_vl",
    "qwen3_vl": "minivlmrl.extras.families.qwen3_vl",
    "qwen3_5": "minivlmrl.extras.families.qwen3_5",
    "qwen3_vl_moe": "minivlmrl.extras.families.qwen3_moe",
    "qwen3_5_moe": "minivlmrl.extras.families.qwen3_moe",
}
CONTROL_TOKENS = {  # ModelConfig field -> token; all families have the same tokens
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "eos_token_id": "<|im_end|>",
    "bos_token_id": "<|endoftext|>",
}
# ModelConfig's values for families in which all decoder layers have attention
ALL_ATTEND = {"full_attention_interval": None, "layer_types": (), "partial_rotary_factor": 1.0}
# ModelConfig's values for Qwen2-VL and Qwen2.5-VL, whose decoder is Qwen2
QWEN2_TEXT = {"attention_bias": True, "qk_norm": False, "mrope_interleaved": False, "head_dim": None, **ALL_ATTEND}


TensorsOfFile = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class ModelSpec:
    """The values and functions in which model families differ; the defaults are those of Qwen2.5-VL."""

    architecture: str  # class name in transformers, as in config.json
    vision_config: type[VisionConfig]  # dataclass with the fields in config.json's vision_config
    # function that builds a model from a ModelConfig
    model: Callable[..., VisionLanguageModel] = VisionLanguageModel

    # ---- config.json
    # ModelConfig values that config.json does not contain
    text: dict[str, Any] = field(default_factory=lambda: QWEN2_TEXT)
    # default values in transformers for keys that config.json may omit
    defaults: dict[str, Any] = field(default_factory=lambda: {"rms_norm_eps": 1e-5})
    hidden_act: str = "silu"  # tower activation, as named in config.json
    # converts the vision_config in a config.json to the field names of VisionConfig
    read_vision: Callable[[dict, str], dict] = lambda vision, where: vision
    # converts a config with Qwen2.5-VL's keys to the layout of the family's config.json
    write: Callable[[dict], dict] = lambda config: config

    # ---- weights
    # whether tensors in files are named after transformers' modules; see module_name
    files_have_module_names: bool = False
    unused_prefixes: tuple[str, ...] = ()  # prefixes for tensors that are not used

    # ---- prompts, images and videos
    # whether the chat template adds a default system message to prompts without one
    default_system: bool = True
    # default values for keys that preprocessor_config.json may omit
    images: dict[str, Any] = field(default_factory=dict)
    # parses video_preprocessor_config.json; None means Qwen2.5-VL's video preprocessing
    read_videos: Callable = lambda settings, where, images: None
    # returns the contents of video_preprocessor_config.json, or {} if a checkpoint copies the loaded model's file
    write_videos: Callable[[ImageProcessor, dict], dict] = write_video_processor
    box_space: str = "resized"  # box coordinates in answers; see data/boxes.py

    # ---- experts and recurrent layers
    # config.json keys that describe experts, with transformers' defaults
    experts: dict[str, Any] = field(default_factory=dict)
    # dataclasses for the fields "experts" and "recurrent" of ModelConfig
    sections: Mapping[str, type] = field(default_factory=dict)
    transposed_experts: bool = False  # whether files may have transposed expert weights
    # splits tensors that contain several parameters, such as the weights of all experts in a layer
    split_tensors: Callable[[TensorsOfFile, ModelConfig, Path], TensorsOfFile] = lambda tensors, config, file: tensors
    # stacks parameters that a file stores as one tensor, such as the weights of all experts in a layer
    stack_tensors: Callable[[dict[str, Weight], ModelConfig], None] = lambda weights, config: None
    # tells expert layers to add up each expert's token count over all ranks
    count_over_ranks: Callable[[VisionLanguageModel, Callable], None] = lambda model, sum_counts: None
    # further values of the option adapter.target: {"experts": regular expression for the names of the experts' layers}
    adapter_targets: Mapping[str, re.Pattern[str]] = field(default_factory=dict)
    not_quantized: tuple[str, ...] = ()  # ends of router names, which are not quantised
    # returns the initial states of the recurrent layers for a batch of rows
    initial_states: Callable[[VisionLanguageModel, Tensor], list[list[Tensor]]] = lambda model, rows: []
    in_vllm: bool = True  # whether extras/vllm.py supports the family


class Families(Mapping[str, ModelSpec]):
    """Mapping from `model_type` to ModelSpec; a family's module is imported when its ModelSpec is looked up."""

    def __getitem__(self, model_type: str) -> ModelSpec:
        check_extras(MODULES[model_type], f"model_type {model_type}")
        return import_module(MODULES[model_type]).SPECS[model_type]

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


FAMILIES = Families()


def family_of(model: VisionLanguageModel) -> ModelSpec:
    return FAMILIES[model.config.model_type]


def hub_name(name: str) -> str:
    """Convert the name of a tensor in a file of weights to the parameter's name in minivlmrl.

    Example: model.visual.x becomes visual.x, and model.language_model.x becomes model.x.
    """
    return re.sub(r"^model\.(?=visual\.)|^model\.language_(?=model\.)", "", name)


def module_name(name: str) -> str:
    """Convert a parameter's name in minivlmrl to its name in transformers since 4.52."""
    if name.startswith("visual."):
        return f"model.{name}"
    return re.sub(r"^model\.", "model.language_model.", name)
