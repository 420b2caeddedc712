"""A Qwen2.5-VL that says a number instead of a word: the reward model, or a critic that is a model of its own."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from minivlmrl.batch import GroupBatch, pack
from minivlmrl.decoder import Qwen2_5_VL
from minivlmrl.hub.checkpoint import load_model, read_tensors
from minivlmrl.hub.config import ModelConfig
from minivlmrl.logprobs import completion_states
from minivlmrl.rows import Prompt
from minivlmrl.scale.sharding import Sharding

HEAD_FILE = "score.safetensors"  # beside the model's own files


class ScalarModel(nn.Module):
    """Backbone and one linear unit on its last hidden states, which starts at zero."""

    def __init__(self, backbone: Qwen2_5_VL):
        super().__init__()
        self.backbone, self.score = backbone, scalar_head(backbone)
        if not backbone.config.tie_word_embeddings:
            backbone.lm_head.requires_grad_(False)  # nobody asks it for words

    def forward(self, batch: GroupBatch) -> Tensor:
        """(M,): the number at the state before each completion token."""
        return self.score(completion_states(self.backbone, batch))[:, 0]

    def at_end(self, batch: GroupBatch) -> Tensor:
        """(R,): the number at the last token of each completion of a batch from pack_to_end."""
        return torch.stack([numbers[-1] for numbers in batch.split(self(batch))])


def pack_to_end(
    prompts: Sequence[Prompt], completions: Sequence[Sequence[Tensor]], config: ModelConfig, device
) -> GroupBatch:
    """pack, such that the run holds the last token of each completion too: what judges a whole answer reads it there.

    A run has no room for a token that nothing follows, so each completion gets one more, which then stays outside.
    """
    return pack(prompts, [[torch.cat([ids, ids[-1:]]) for ids in group] for group in completions], config, device)


def scalar_head(model: Qwen2_5_VL) -> nn.Linear:
    """A linear unit on a model's hidden states, zero at first, of the model's device and dtype."""
    weight = model.lm_head.weight
    head = nn.Linear(model.config.hidden_size, 1, bias=False, device=weight.device, dtype=weight.dtype)
    nn.init.zeros_(head.weight)
    return head


def save_head(file: Path, weight: Tensor):
    """Write a head's weight; through a file aside, so that an earlier one stays whole until then."""
    aside = file.with_suffix(".partial")
    save_file({"score.weight": weight.detach().cpu()}, aside)
    aside.replace(file)


def load_scalar_model(
    folder: str | Path, dtype: torch.dtype | None = None, device="cpu", sharding: Sharding | None = None
) -> ScalarModel:
    """Read what save_scalar_model wrote.

    Args:
        dtype, device, sharding: see load_model.
    Raises:
        ValueError: as load_model; or there is no such folder, or it holds a plain model without a head.
    """
    check_scalar_folder(folder)
    file = Path(folder) / HEAD_FILE
    model = ScalarModel(load_model(folder, dtype, device, sharding))
    tensors = dict(read_tensors(file))
    if set(tensors) != {"score.weight"} or tensors["score.weight"].shape != model.score.weight.shape:
        raise ValueError(f"{file}: it must hold score.weight of shape {tuple(model.score.weight.shape)}")
    with torch.no_grad():
        model.score.weight.copy_(tensors["score.weight"])
    if sharding is not None:
        sharding.shard_alone(model.score)
    return model


def check_scalar_folder(folder: str | Path):
    """Raise ValueError unless a folder looks like one of save_scalar_model's."""
    if not Path(folder).is_dir():
        raise ValueError(f"{folder}: no such folder; a reward model or critic is a folder with {HEAD_FILE} in it")
    if not (Path(folder) / HEAD_FILE).is_file():
        raise ValueError(f"{folder}: this model has no score head ({HEAD_FILE}); train one with stages: [reward_model]")
