"""All that differs between two model families, in one record each; docs/carry_on.md adds one."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from minivlmrl.model.decoder import Qwen2_5_VL
from minivlmrl.model.families import experts, qwen2_vl, qwen3_5, qwen3_vl
from minivlmrl.model.vision import VisionTransformer

CONTROL_TOKENS = {  # of ModelConfig -> token, in all families
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "eos_token_id": "<|im_end|>",
    "bos_token_id": "<|endoftext|>",
}
# of families that have no recurrent layers
ALL_ATTEND = {**dict.fromkeys(qwen3_5.LAYERS), "layer_types": (), "partial_rotary_factor": 1.0}
# of Qwen2-VL and Qwen2.5-VL, whose decoder is Qwen2
QWEN2_TEXT = {
    "attention_bias": True,
    "qk_norm": False,
    "mrope_interleaved": False,
    "head_dim": None,
    **ALL_ATTEND,
}


@dataclass(frozen=True)
class Family:
    """What hub, plan and sharding ask about a model; FAMILIES has it by its `model_type`."""

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
    model: Callable[..., nn.Module] = Qwen2_5_VL  # of a ModelConfig, with visual, model, lm_head
    # what config.json says of experts, and what transformers takes for what is missing
    experts: dict[str, Any] = field(default_factory=dict)
    turned_experts: bool = False  # its files have them transposed
    default_system: bool = True  # its chat template begins with chat.SYSTEM where none is given
    # what its preprocessor_config.json may leave out
    images: dict[str, Any] = field(default_factory=dict)
    # of its video_preprocessor_config.json, where it has rules of its own for videos
    read_videos: Callable = lambda settings, where, images: None
    box_space: str = "resized"  # units of the boxes in its answers, see data/boxes.py
    # (model) -> the blocks that sharding gathers and recomputation repeats, one at a time
    blocks: Callable = lambda model: [*model.visual.blocks, *model.model.layers]


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


def family_of(model: nn.Module) -> Family:
    """Look up the family of a model."""
    return FAMILIES[model.config.model_type]


# of towers without learned positions: Qwen2-VL's and Qwen2.5-VL's
ROTARY_ALONE = {"num_position_embeddings": None, "deepstack_visual_indexes": ()}
FAMILIES = {
    "qwen2_5_vl": Family(
        architecture="Qwen2_5_VLForConditionalGeneration",
        tower={"norm": "rms_norm", **ROTARY_ALONE},
    ),
    "qwen2_vl": Family(
        architecture="Qwen2VLForConditionalGeneration",
        tower={**qwen2_vl.TOWER, **ROTARY_ALONE},
        hidden_act="quick_gelu",
        model=partial(Qwen2_5_VL, tower=partial(VisionTransformer, mlp=qwen2_vl.QuickGELUMLP)),
        read_vision=qwen2_vl.read_vision,
        write=qwen2_vl.write_config,
        box_space="thousandths",
    ),
    "qwen3_vl": Family(
        architecture="Qwen3VLForConditionalGeneration",
        tower=qwen3_vl.TOWER,
        text={**qwen3_vl.TEXT, **ALL_ATTEND},
        defaults=qwen3_vl.TEXT_DEFAULTS,
        hidden_act="gelu_pytorch_tanh",
        read_vision=lambda vision, where: qwen3_vl.VISION_DEFAULTS | vision,
        write=qwen3_vl.write_config,
        memory_names=True,
        model=partial(Qwen2_5_VL, tower=qwen3_vl.Qwen3VisionTransformer),
        default_system=False,
        images=qwen3_vl.IMAGES,
        read_videos=qwen3_vl.read_videos,
        box_space="thousandths",
    ),
}
FAMILIES["qwen3_5"] = replace(
    FAMILIES["qwen3_vl"],
    architecture="Qwen3_5ForConditionalGeneration",
    tower=qwen3_5.TOWER,
    text=qwen3_vl.TEXT,
    defaults=qwen3_5.TEXT_DEFAULTS,
    read_vision=lambda vision, where: qwen3_vl.VISION_DEFAULTS | vision | qwen3_5.NO_DEEPSTACK,
    write=qwen3_5.write_config,
    unread=("mtp.",),  # a layer that predicts the token after the next
    model=partial(FAMILIES["qwen3_vl"].model, layer_type=qwen3_5.Layer),
)
FAMILIES["qwen3_vl_moe"] = replace(
    FAMILIES["qwen3_vl"],
    architecture="Qwen3VLMoeForConditionalGeneration",
    defaults={**qwen3_vl.TEXT_DEFAULTS, "head_dim": None},
    experts=experts.QWEN3_VL,
    turned_experts=True,
    model=partial(FAMILIES["qwen3_vl"].model, layer_type=experts.ExpertsLayer),
)
FAMILIES["qwen3_5_moe"] = replace(
    FAMILIES["qwen3_5"],
    architecture="Qwen3_5MoeForConditionalGeneration",
    text={**FAMILIES["qwen3_5"].text, "intermediate_size": 1},  # no layer is dense
    experts=experts.QWEN3_5,
    model=partial(FAMILIES["qwen3_vl"].model, layer_type=experts.RecurrentExpertsLayer),
)
