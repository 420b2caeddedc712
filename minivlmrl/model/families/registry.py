"""All that differs between two model families, in one record each; docs/developer_guide.md adds one.

config.json names a `model_type`; the module that MODULES has for it is imported then, and its SPECS
have the ModelSpec. So a run of Qwen2.5-VL imports no other family.
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
CONTROL_TOKENS = {  # of ModelConfig -> token, in all families
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "eos_token_id": "<|im_end|>",
    "bos_token_id": "<|endoftext|>",
}
# of families without recurrent layers
ALL_ATTEND = {"full_attention_interval": None, "layer_types": (), "partial_rotary_factor": 1.0}
# of Qwen2-VL and Qwen2.5-VL, whose decoder is Qwen2
QWEN2_TEXT = {
    "attention_bias": True,
    "qk_norm": False,
    "mrope_interleaved": False,
    "head_dim": None,
    **ALL_ATTEND,
}
# of towers without learned positions: Qwen2-VL's and Qwen2.5-VL's
ROTARY_ALONE = {"num_position_embeddings": None, "deepstack_visual_indexes": ()}


TensorsOfFile = Iterable[tuple[str, Tensor]]
# of each layer with experts: probabilities (tokens, E), and ids of the chosen experts (tokens, k)
ChosenExperts = dict[int, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Routing:
    """Functions that trainers, samplers and the memory estimate call for a model with experts."""

    # (model): a context in which a function returns the experts that the latest forward chose
    chosen_experts: Callable[[nn.Module], AbstractContextManager[Callable[[], ChosenExperts]]]
    log: "Callable[..., RouterLog]"  # (ModelConfig, World): metrics of routers
    # (model, token sampler, kept): a context with a token sampler that keeps routes
    watch_routes: Callable[..., AbstractContextManager[Callable]]
    join_routes: Callable[..., Tensor | None]  # (completions): the routes that sampling kept


@dataclass(frozen=True)
class ModelSpec:
    """All that differs between model families; FAMILIES finds it by `model_type`."""

    architecture: str  # class of transformers, which config.json names
    # fields of VisionConfig that config.json does not have, the positions of a video among them
    tower: dict[str, Any]
    # fields of ModelConfig that it does not have
    text: dict[str, Any] = field(default_factory=lambda: QWEN2_TEXT)
    # and what transformers takes for some that it may leave out
    defaults: dict[str, Any] = field(default_factory=lambda: {"rms_norm_eps": 1e-5})
    hidden_act: str = "silu"  # of the tower, as config.json calls it
    # (vision_config of a config.json, its file) -> fields of VisionConfig
    read_vision: Callable[[dict, str], dict] = lambda vision, where: vision
    # a flat config.json -> the family's own
    write: Callable[[dict], dict] = lambda config: config
    memory_names: bool = False  # its files name tensors as transformers in memory, see memory_name
    unread: tuple[str, ...] = ()  # beginnings of names of tensors that are not computed with
    model: Callable[..., Qwen2_5_VL] = Qwen2_5_VL  # of a ModelConfig, with visual, model, lm_head
    # what config.json says of experts, and what transformers takes for what is missing
    experts: dict[str, Any] = field(default_factory=dict)
    turned_experts: bool = False  # its files have them transposed
    # (tensors of a file, ModelConfig, file) -> the tensors by the names of the model's parameters
    split_tensors: "Callable[[TensorsOfFile, ModelConfig, Path], TensorsOfFile]" = (
        lambda tensors, config, file: tensors
    )
    # (weights by name, ModelConfig): put weights that a file has as one tensor in place of theirs
    stack_tensors: "Callable[[dict[str, Weight], ModelConfig], None]" = lambda weights, config: None
    # (model, function): what sums the tokens of experts over the ranks of a sharded model
    count_over_ranks: Callable[[Qwen2_5_VL, Callable], None] = lambda model, sum_counts: None
    routing: Routing | None = None  # None: the family has no experts
    # names that adapter.target has besides the parts of a model, with patterns of layers' names
    adapter_targets: Mapping[str, re.Pattern[str]] = field(default_factory=dict)
    not_quantized: tuple[str, ...] = ()  # ends of names of layers that keep all bits: routers
    # (model, rows (b, ...)): what each recurrent layer keeps of rows in decoding, in tensors (b, ...)
    empty_memories: Callable[[Qwen2_5_VL, Tensor], list[list[Tensor]]] = lambda model, rows: []
    in_vllm: bool = True  # vLLM computes the family as generation/vllm.py asks it to
    default_system: bool = True  # its chat template begins with chat.SYSTEM where none is given
    # what its preprocessor_config.json may leave out
    images: dict[str, Any] = field(default_factory=dict)
    # of its video_preprocessor_config.json, where it has rules of its own for videos
    read_videos: Callable = lambda settings, where, images: None
    write_videos: Callable[[ImageProcessor], dict] = lambda images: {}  # and writes them
    box_space: str = "resized"  # units of the boxes in its answers, see data/boxes.py
    # (model) -> the blocks that sharding gathers and recomputation repeats, one at a time
    blocks: Callable[[Qwen2_5_VL], list[nn.Module]] = lambda model: [
        *model.visual.blocks,
        *model.model.layers,
    ]


class Families(Mapping[str, ModelSpec]):
    """The ModelSpec of each `model_type`; its module is imported when it is asked for."""

    def __getitem__(self, model_type: str) -> ModelSpec:
        return import_module(MODULES[model_type]).SPECS[model_type]

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


FAMILIES = Families()


def family_of(model: Qwen2_5_VL) -> ModelSpec:
    """Look up the family of a model."""
    return FAMILIES[model.config.model_type]


def hub_name(name: str) -> str:
    """Name a tensor as we do: model.visual.x -> visual.x, model.language_model.x -> model.x.

    Files of Qwen2-VL and Qwen2.5-VL have our names.
    """
    return re.sub(r"^model\.(?=visual\.)|^model\.language_(?=model\.)", "", name)


def memory_name(name: str) -> str:
    """Name a tensor or layer as transformers 4.52 and later do in memory: hub_name's inverse."""
    if name.startswith("visual."):
        return f"model.{name}"
    return re.sub(r"^model\.", "model.language_model.", name)
