"""Qwen2-VL: its tower's MLP, and the names that only its config.json has."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from torch import Tensor, nn

from minivlmrl.config.parsing import build
from minivlmrl.model.decoder import Qwen2_5_VL
from minivlmrl.model.families.registry import ROTARY_ALONE, ModelSpec
from minivlmrl.model.vision import VisionTransformer


class QuickGELUMLP(nn.Module):
    """fc2(h * sigmoid(1.702 h)) of h = fc1(x): CLIP's approximation of GELU."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool):
        super().__init__()
        self.fc1 = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.fc2 = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        return self.fc2(hidden * torch.sigmoid(1.702 * hidden))


# fields of VisionConfig that its config.json does not have
TOWER = {
    "norm": "layer_norm",
    "window_size": None,
    "fullatt_block_indexes": (),
    "tokens_per_second": None,
}


@dataclass
class Tower:
    """Qwen2-VL's own names in vision_config."""

    embed_dim: Annotated[int, "[1, 1e9]"] = 1280  # hidden_size of VisionConfig
    mlp_ratio: Annotated[float, "(0, 1e9]"] = 4.0  # of intermediate_size to it
    hidden_size: Annotated[int, ">= 1"] = 3584  # out_hidden_size


def read_vision(vision: dict, where: str) -> dict:
    """Rename the vision_config of a config.json."""
    tower = build(Tower, vision, where, "vision_config.", json=True)
    return vision | {
        "hidden_size": tower.embed_dim,
        "intermediate_size": int(tower.embed_dim * tower.mlp_ratio),
        "out_hidden_size": tower.hidden_size,
    }


def write_config(config: dict) -> dict:
    """Rename the vision_config back."""
    vision = dict(config["vision_config"])
    width = vision["hidden_size"]
    mlp_ratio = vision.pop("intermediate_size") / width
    vision["hidden_size"] = vision.pop("out_hidden_size")
    vision["embed_dim"] = width
    vision["mlp_ratio"] = int(mlp_ratio) if mlp_ratio.is_integer() else mlp_ratio
    return config | {"vision_config": vision}


SPECS = {
    "qwen2_vl": ModelSpec(
        architecture="Qwen2VLForConditionalGeneration",
        tower={**TOWER, **ROTARY_ALONE},
        hidden_act="quick_gelu",
        model=partial(Qwen2_5_VL, tower=partial(VisionTransformer, mlp=QuickGELUMLP)),
        read_vision=read_vision,
        write=write_config,
        box_space="thousandths",
    )
}
