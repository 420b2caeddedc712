"""Registry of model families; a ModelSpec contains everything that differs between families.

The `model_type` in config.json selects a module of MODULES, whose SPECS has the ModelSpec. Only
that module is imported. docs/developer_guide.md shows how to add a family.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from minivlmrl.data.image import ImageProcessor
from minivlmrl.model.decoder import Qwen2_5_VL

if TYPE_CHECKING:
    from minivlmrl.model.config import ModelConfig
    from minivlmrl.model.families.routers import RouterLog
    from minivlmrl.model.plain_weights import Weight

MODULES = {
    "qwen2_5_vl": "minivlmrl.model.families.qwen2_5_vl",
    "qwen2_vl": "minivlmrl.model.families.qwen2_vl",
    "qwen3_vl": "minivlmrl.model.families.qwen3_vl",
    "qwen3_5": "minivlmrl.model.families.qwen3_5",
    "qwen3_vl_moe": "minivlmrl.model.families.qwen3_moe",
    "qwen3_5_moe": "minivlmrl.model.families.qwen3_moe",
}
CONTROL_TOKENS = {  # field of ModelConfig -> token, the same in all families
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "eos_token_id": "<|im_end|>",
    "bos_token_id": "<|endoftext|>",
}
# fields of ModelConfig in families without recurrent layers
ALL_ATTEND = {"full_attention_interval": None, "layer_types": (), "partial_rotary_factor": 1.0}
# fields of ModelConfig in Qwen2-VL and Qwen2.5-VL, whose decoder is Qwen2
QWEN2_TEXT = {
    "attention_bias": True,
    "qk_norm": False,
    "mrope_interleaved": False,
    "head_dim": None,
    **ALL_ATTEND,
}
# fields of VisionConfig in Qwen2-VL and Qwen2.5-VL, whose towers have no learned positions
ROTARY_ONLY = {"num_position_embeddings": None, "deepstack_visual_indexes": ()}


TensorsOfFile = Iterable[tuple[str, Tensor]]
# layer index -> probabilities (tokens, E) and ids of the chosen experts (tokens, k)
ChosenExperts = dict[int, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Routing:
    """Functions that trainers, samplers and the memory estimate call for a model with experts."""

    # (model) -> context that yields a function; it returns the experts of the latest forward
    chosen_experts: Callable[[nn.Module], AbstractContextManager[Callable[[], ChosenExperts]]]
    log: "Callable[..., RouterLog]"  # (ModelConfig, World) -> RouterLog
    # (model, token sampler, buffer) -> context with a token sampler that writes routes to buffer
    watch_routes: Callable[..., AbstractContextManager[Callable]]
    # (completions) -> the recorded routes of all their tokens
    join_routes: Callable[..., Tensor | None]


@dataclass(frozen=True)
class ModelSpec:
    """Everything that differs between model families. FAMILIES maps each `model_type` to one."""

    architecture: str  # name of the class in transformers, for config.json
    # fields of VisionConfig that config.json does not have, such as tokens_per_second
    tower: dict[str, Any]
    # fields of ModelConfig that config.json does not have
    text: dict[str, Any] = field(default_factory=lambda: QWEN2_TEXT)
    # transformers' defaults of fields that config.json may omit
    defaults: dict[str, Any] = field(default_factory=lambda: {"rms_norm_eps": 1e-5})
    hidden_act: str = "silu"  # activation of the vision tower, with its name in config.json
    # (vision_config of a config.json, its file) -> fields of VisionConfig
    read_vision: Callable[[dict, str], dict] = lambda vision, where: vision
    # flat config.json -> config.json in the layout of the family
    write: Callable[[dict], dict] = lambda config: config
    # whether files name tensors as transformers does in memory, see module_name
    files_have_module_names: bool = False
    unused_prefixes: tuple[str, ...] = ()  # name prefixes of tensors that the model does not use
    # (ModelConfig) -> model with the modules visual, model and lm_head
    model: Callable[..., Qwen2_5_VL] = Qwen2_5_VL
    # keys about experts in config.json, with the defaults of transformers
    experts: dict[str, Any] = field(default_factory=dict)
    transposed_experts: bool = False  # whether files may have transposed expert weights
    # (tensors of a file, ModelConfig, file) -> the tensors by the names of the model's parameters
    split_tensors: "Callable[[TensorsOfFile, ModelConfig, Path], TensorsOfFile]" = (
        lambda tensors, config, file: tensors
    )
    # (weights by name, ModelConfig): replaces weights that are one tensor in files by that tensor
    stack_tensors: "Callable[[dict[str, Weight], ModelConfig], None]" = lambda weights, config: None
    # (model, function): sets the function that sums token counts of experts over ranks
    count_over_ranks: Callable[[Qwen2_5_VL, Callable], None] = lambda model, sum_counts: None
    routing: Routing | None = None  # None if the family has no experts
    # further values of adapter.target -> pattern of the names of layers that they select
    adapter_targets: Mapping[str, re.Pattern[str]] = field(default_factory=dict)
    not_quantized: tuple[str, ...] = ()  # name suffixes of layers that are not quantised: routers
    # (model, rows (b, ...)) -> initial state of each recurrent layer, as tensors (b, ...)
    initial_states: Callable[[Qwen2_5_VL, Tensor], list[list[Tensor]]] = lambda model, rows: []
    in_vllm: bool = True  # whether generation/vllm.py supports the family
    # whether the chat template adds the default system message if there is none
    default_system: bool = True
    # defaults of keys that preprocessor_config.json may omit
    images: dict[str, Any] = field(default_factory=dict)
    # parses video_preprocessor_config.json; returns None if videos are processed like Qwen2.5-VL's
    read_videos: Callable = lambda settings, where, images: None
    # (ImageProcessor) -> contents of video_preprocessor_config.json
    write_videos: Callable[[ImageProcessor], dict] = lambda images: {}
    box_space: str = "resized"  # coordinates of boxes in answers, see data/boxes.py
    # (model) -> the blocks that are gathered (sharding) and recomputed (checkpointing) one by one
    blocks: Callable[[Qwen2_5_VL], list[nn.Module]] = lambda model: [
        *model.visual.blocks,
        *model.model.layers,
    ]


class Families(Mapping[str, ModelSpec]):
    """Mapping of `model_type` to ModelSpec that imports the module of a family on first use."""

    def __getitem__(self, model_type: str) -> ModelSpec:
        return import_module(MODULES[model_type]).SPECS[model_type]

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


FAMILIES = Families()


def family_of(model: Qwen2_5_VL) -> ModelSpec:
    """Return the ModelSpec of a model's family."""
    return FAMILIES[model.config.model_type]


def hub_name(name: str) -> str:
    """Convert a tensor name of any transformers release to the name that this package uses.

    Example: model.visual.x becomes visual.x, and model.language_model.x becomes model.x. The files
    of Qwen2-VL and Qwen2.5-VL already have these names.
    """
    return re.sub(r"^model\.(?=visual\.)|^model\.language_(?=model\.)", "", name)


def module_name(name: str) -> str:
    """Convert a name to that of modules in transformers 4.52 and later, the inverse of hub_name."""
    if name.startswith("visual."):
        return f"model.{name}"
    return re.sub(r"^model\.", "model.language_model.", name)
