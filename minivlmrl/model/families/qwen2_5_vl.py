"""Qwen2.5-VL, with the vision tower in model/vision.py."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from minivlmrl.model.config import Size, TokenId, VisionConfig
from minivlmrl.model.families.base import Family


@dataclass(frozen=True)
class Qwen2_5VisionConfig(VisionConfig):
    """Qwen2.5-VL's vision tower config; most blocks use window attention."""

    norm: ClassVar[Literal["rms_norm", "layer_norm"]] = "rms_norm"
    window_size: Size | None = 112
    fullatt_block_indexes: tuple[TokenId, ...] = (7, 15, 23, 31)
    tokens_per_second: Size | None = 4


class Qwen2_5VL(Family):
    architecture = "Qwen2_5_VLForConditionalGeneration"
    vision_config_type = Qwen2_5VisionConfig
