"""Qwen2-VL: its tower's MLP, and the names that only its config.json has."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from minivlmrl.hub.recipe_values import build


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
TOWER = {"norm": "layer_norm", "window_size": None}
TOWER |= {"fullatt_block_indexes": (), "tokens_per_second": None}


@dataclass
class Tower:
    """Qwen2-VL's own names in vision_config."""

    embed_dim: Annotated[int, "[1, 1e9]"] = 1280  # hidden_size of VisionConfig
    mlp_ratio: Annotated[float, "(0, 1e9]"] = 4.0  # of intermediate_size to it
    hidden_size: Annotated[int, ">= 1"] = 3584  # out_hidden_size


def read_vision(vision: dict, where: str) -> dict:
    """Rename the vision_config of a config.json."""
    tower = build(Tower, vision, where, "vision_config.", json=True)
    inner = int(tower.embed_dim * tower.mlp_ratio)
    sizes = {"hidden_size": tower.embed_dim, "intermediate_size": inner}
    return vision | sizes | {"out_hidden_size": tower.hidden_size}


def write_config(config: dict) -> dict:
    """Rename it back."""
    out = dict(config["vision_config"])
    width = config["vision_config"]["hidden_size"]
    ratio = out.pop("intermediate_size") / width
    out["hidden_size"] = out.pop("out_hidden_size")
    out |= {"embed_dim": width, "mlp_ratio": int(ratio) if ratio.is_integer() else ratio}
    return config | {"vision_config": out}
