"""Qwen2-VL: vision tower MLP and config.json keys."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from minivlmrl.config.parsing import build
from minivlmrl.model.config import VisionConfig
from minivlmrl.model.families.base import Family
from minivlmrl.model.vision import VisionTransformer


class QuickGELUMLP(nn.Module):
    """MLP with QuickGELU, CLIP's approximation of GELU: fc2(h * sigmoid(1.702 h)), h = fc1(x)."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool):
        super().__init__()
        self.fc1 = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.fc2 = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        return self.fc2(h * torch.sigmoid(1.702 * h))


@dataclass
class Tower:
    """Keys in Qwen2-VL's vision_config whose names differ from VisionConfig."""

    embed_dim: Annotated[int, "[1, 1e9]"] = 1280  # VisionConfig calls this hidden_size
    mlp_ratio: Annotated[float, "(0, 1e9]"] = 4.0  # ratio of VisionConfig's intermediate_size to embed_dim
    hidden_size: Annotated[int, ">= 1"] = 3584  # VisionConfig calls this out_hidden_size


class Qwen2VL(Family):
    architecture = "Qwen2VLForConditionalGeneration"
    vision_hidden_act = "quick_gelu"
    box_space = "thousandths"

    def build_tower(self, vision_config: VisionConfig) -> VisionTransformer:
        return VisionTransformer(vision_config, mlp=QuickGELUMLP)

    def read_vision(self, vision: dict, where: str) -> dict:
        tower = build(Tower, vision, where, "vision_config.", json=True)
        others = {name: value for name, value in vision.items() if name not in vars(tower)}
        return others | {
            "hidden_size": tower.embed_dim,
            "intermediate_size": int(tower.embed_dim * tower.mlp_ratio),
            "out_hidden_size": tower.hidden_size,
        }

    def write_config(self, config: dict) -> dict:
        vision = dict(config["vision_config"])
        width = vision["hidden_size"]
        mlp_ratio = vision.pop("intermediate_size") / width
        vision["hidden_size"] = vision.pop("out_hidden_size")
        vision["embed_dim"] = width
        vision["mlp_ratio"] = int(mlp_ratio) if mlp_ratio.is_integer() else mlp_ratio
        return config | {"vision_config": vision}
