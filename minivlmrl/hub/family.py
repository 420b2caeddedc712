"""Model families: all that differs between two of them, in one record each.
docs/README.md says how to add a third."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from torch import nn

from minivlmrl.decoder import Qwen2_5_VL
from minivlmrl.hub.checker import build
from minivlmrl.hub.preprocessor import read_image_processor

QWEN_CONTROL_TOKENS = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
QWEN_CONTROL_TOKENS |= {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
QWEN_CONTROL_TOKENS |= {"eos_token_id": "<|im_end|>", "bos_token_id": "<|endoftext|>"}


@dataclass(frozen=True)
class Family:
    """What hub, plan and sharding ask about a model;
    FAMILIES has it by the `model_type` of config.json."""

    architecture: str  # class of transformers, which config.json names
    # fields of VisionConfig that config.json does not have, the positions of a video among them
    tower: dict[str, Any]
    # (vision_config of a config.json, its file) -> fields of VisionConfig; and the inverse
    read_vision: Callable[[dict, str], dict] = lambda vision, where: vision
    write_vision: Callable[[dict], dict] = lambda vision: vision
    # of ModelConfig -> token
    control_tokens: dict[str, str] = field(default_factory=lambda: QWEN_CONTROL_TOKENS)
    # (ModelConfig) -> a model with .visual, .model and .lm_head
    model: Callable[..., nn.Module] = Qwen2_5_VL
    template: object = None  # of a folder that has none; None: chat.py's
    # of the content of a preprocessor_config.json
    read_image_processor: Callable = read_image_processor
    # (model) -> the blocks that sharding gathers and recomputation repeats, one at a time
    blocks: Callable = lambda model: [*model.visual.blocks, *model.model.layers]


def family_of(model: nn.Module) -> Family:
    """Look up the family of a model."""
    return FAMILIES[model.config.model_type]


@dataclass
class _Qwen2VLTower:
    """Qwen2-VL's own names in vision_config."""

    embed_dim: Annotated[int, ">= 1"] = 1280  # hidden_size of VisionConfig
    mlp_ratio: Annotated[float, "(0, inf)"] = 4.0  # of intermediate_size to it
    hidden_size: Annotated[int, ">= 1"] = 3584  # out_hidden_size


def _read_qwen2_vl(vision: dict, where: str) -> dict:
    tower = build(_Qwen2VLTower, vision, where, "vision_config.", json=True)
    sizes = {
        "hidden_size": tower.embed_dim,
        "intermediate_size": int(tower.embed_dim * tower.mlp_ratio),
    }
    return vision | sizes | {"out_hidden_size": tower.hidden_size}


def _write_qwen2_vl(vision: dict) -> dict:
    out, width = dict(vision), vision["hidden_size"]
    ratio, out["hidden_size"] = out.pop("intermediate_size") / width, out.pop("out_hidden_size")
    return out | {"embed_dim": width, "mlp_ratio": int(ratio) if ratio.is_integer() else ratio}


QWEN2_VL = {"norm": "layer_norm", "mlp": "quick_gelu"}
QWEN2_VL |= {"window_size": None, "fullatt_block_indexes": (), "tokens_per_second": None}
FAMILIES = {
    "qwen2_5_vl": Family(
        "Qwen2_5_VLForConditionalGeneration", {"norm": "rms_norm", "mlp": "swiglu"}
    ),
    "qwen2_vl": Family(
        "Qwen2VLForConditionalGeneration", QWEN2_VL, _read_qwen2_vl, _write_qwen2_vl
    ),
}
