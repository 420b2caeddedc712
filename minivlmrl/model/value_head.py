"""A model that outputs a number instead of a token: a reward model, or PPO's critic."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from minivlmrl.config.types import Part
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Completion, Prompt
from minivlmrl.model.build import PATCHES
from minivlmrl.model.checkpoint import load_model, read_tensors
from minivlmrl.model.config import ModelConfig
from minivlmrl.model.decoder import Qwen2_5_VL
from minivlmrl.model.logprobs import completion_states
from minivlmrl.model.packing import GroupBatch, pack
from minivlmrl.model.trainable import select_trained

HEAD_FILE = "score.safetensors"  # beside the model's own files


class ValueModel(nn.Module):
    """Backbone and one linear unit on its last hidden states; see value_head for its weight."""

    def __init__(
        self, backbone: Qwen2_5_VL, freeze: Sequence[Part] = (), weight: Tensor | None = None
    ):
        super().__init__()
        self.backbone = backbone
        self.score = value_head(backbone, weight)
        select_trained(self, freeze)

    def forward(self, batch: GroupBatch) -> Tensor:
        """Compute the number at the state before each completion token, (M,)."""
        return self.score(completion_states(self.backbone, batch))[:, 0]

    def score_last_token(self, batch: GroupBatch) -> Tensor:
        """Compute the number at the last token of completions, (R,), in a batch of pack_to_end."""
        return torch.stack([numbers[-1] for numbers in self(batch).split(batch.layout.row_lengths)])


def pack_with_last_token(
    prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]], config: ModelConfig,
    device: torch.device | str,
) -> GroupBatch:  # fmt: skip
    """Pack prompts and completions with the last token of each completion in the run.

    A run leaves out the last token, as nothing follows that it would predict. So it is there twice,
    and the second one is left out. With completions a of 3 and b of 2 tokens:
        pack           p0 p1 p2 | a0 a1      | b0
        pack_to_end    p0 p1 p2 | a0 a1 a2   | b0 b1      the state of a2 is that of all of a
    """
    longer = [[repeat_last_token(completion) for completion in group] for group in completions]
    return pack(prompts, longer, config, device)


def repeat_last_token(completion: Completion) -> Completion:
    """Append a completion's last token once more."""
    ids = torch.cat([completion.ids, completion.ids[-1:]])
    policy_mask = torch.cat([completion.policy_mask, completion.policy_mask[-1:]])
    return replace(completion, ids=ids, policy_mask=policy_mask)


class ValueHead(nn.Linear):
    """A linear unit whose result is of its weight's dtype, whatever the hidden states have."""

    def forward(self, states: Tensor) -> Tensor:
        return super().forward(states.to(self.weight.dtype))


def value_head(model: Qwen2_5_VL, weight: Tensor | None = None) -> ValueHead:
    """Make a head on a model's hidden states, sharded like it, float32 also on a bfloat16 model.

    Args:
        weight: (1, hidden_size); None: zeros.
    """
    like = model.lm_head.weight
    dtype = torch.promote_types(like.dtype, torch.float32)
    head = ValueHead(model.config.hidden_size, 1, bias=False, device=like.device, dtype=dtype)
    with torch.no_grad():
        if weight is None:
            head.weight.zero_()
        else:
            head.weight.copy_(weight)
    if model.sharding is not None:
        model.sharding.shard_head(head)
    return head


def input_form(model: Qwen2_5_VL, processor: Processor) -> tuple[str, dict[str, int], list[int]]:
    """Say what a model reads: its family, vocabulary and sizes of patches.

    Ids and patches made for one model are another's too where this is equal.
    """
    images = processor.image_processor
    patch_sizes = [getattr(images, name) for name in PATCHES]
    return model.config.model_type, processor.tokenizer.backend.get_vocab(), patch_sizes


def check_value_model_folder(folder: str | Path):
    """Refuse a folder without a value model (ValueError)."""
    if not (Path(folder) / HEAD_FILE).is_file():
        raise ValueError(
            f"{folder}: there is no {HEAD_FILE}, the head of a reward model; train one"
        )


def load_value_model(folder: str | Path, *options) -> ValueModel:
    """Read the folder of a value model; the options are those of load_model."""
    check_value_model_folder(folder)
    return add_saved_head(load_model(folder, *options), folder)


def add_saved_head(backbone: Qwen2_5_VL, folder: str | Path) -> ValueModel:
    """Build a value model of a backbone and the head that a folder has."""
    file = Path(folder) / HEAD_FILE
    shape = (1, backbone.config.hidden_size)
    tensors = dict(read_tensors(file))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shapes != {"score.weight": shape}:
        raise ValueError(f"{file}: it must hold score.weight, {shape}")
    return ValueModel(backbone, weight=tensors["score.weight"])
