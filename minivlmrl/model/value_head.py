"""Value models, which predict one number per token: reward models and PPO's critic."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minivlmrl.config.types import Frozen
from minivlmrl.errors import UserError
from minivlmrl.files import HEAD_FILE, unchanged
from minivlmrl.kernels.backend import at_least_float32
from minivlmrl.model.checkpoint import load_model, read_tensors
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.logprobs import completion_states
from minivlmrl.model.packing import GroupBatch
from minivlmrl.model.trainable import select_trained


class ValueModel(nn.Module):
    """Backbone with a linear head that predicts one value per hidden state."""

    def __init__(self, backbone: VisionLanguageModel, freeze: Sequence[Frozen] = (), weight: Tensor | None = None):
        super().__init__()
        self.backbone = backbone
        self.score = value_head(backbone, weight)
        select_trained(self, freeze)

    def forward(self, batch: GroupBatch) -> Tensor:
        """Compute values (M,) from the hidden states that predict completion tokens."""
        return self.score(completion_states(self.backbone, batch))[:, 0]


class ValueHead(nn.Linear):
    """Linear head that computes in its weight dtype, usually float32."""

    def forward(self, states: Tensor) -> Tensor:
        return super().forward(states.to(self.weight.dtype))


def value_head(model: VisionLanguageModel, weight: Tensor | None = None) -> ValueHead:
    """Create a float32 value head, sharded like the model.

    Args:
        weight: (1, hidden_size), None = zeros.
    """
    like = model.lm_head.weight
    head = ValueHead(model.config.hidden_size, 1, bias=False, device=like.device, dtype=at_least_float32(like.dtype))
    head.weight.data[:] = 0 if weight is None else weight
    if model.sharding:
        model.sharding.shard_head(head)
    return head


def check_value_model_folder(folder: str | Path):
    """Raise UserError for a folder without a value head."""
    if not (Path(folder) / HEAD_FILE).is_file():
        raise UserError(
            f"{folder} does not contain {HEAD_FILE}, the head of a reward model; train one with the stage "
            "reward_model, and use the folder RUN/reward_model of that run"
        )


def load_value_model(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    sharding: Any = None,
    adapt: Callable[[VisionLanguageModel], None] | None = None,
) -> ValueModel:
    """Load a value model; see load_model."""
    check_value_model_folder(folder)
    with unchanged(folder):
        return add_saved_head(load_model(folder, dtype, device, sharding, adapt), folder)


def add_saved_head(backbone: VisionLanguageModel, folder: str | Path) -> ValueModel:
    """Build a value model from a language model and a saved value head."""
    file = Path(folder) / HEAD_FILE
    shape = (1, backbone.config.hidden_size)
    tensors = dict(read_tensors(file))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shapes != {"score.weight": shape}:
        raise UserError(
            f"{file} contains {shapes}, but it must contain only score.weight with shape {shape}. "
            "Use a head that was trained with this backbone."
        )
    return ValueModel(backbone, weight=tensors["score.weight"])
