"""A model that outputs a number instead of a token: a reward model, or PPO's critic."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from minivlmrl.data.rows import Completion, Processor, Prompt
from minivlmrl.distributed.fsdp import copy_model, is_sharded, recompute_blocks, reshard
from minivlmrl.files import save_tensors
from minivlmrl.model.checkpoint import PATCHES, load_model, load_processor, read_tensors, save_model
from minivlmrl.model.logprobs import completion_states
from minivlmrl.model.lora import adapters, draw_adapters, full, inject_adapters
from minivlmrl.model.packing import GroupBatch, pack
from minivlmrl.model.peft import load_adapter
from minivlmrl.model.trainable import select_trained

HEAD_FILE = "score.safetensors"  # beside the model's own files


class ValueModel(nn.Module):
    """Backbone and one linear unit on its last hidden states; see value_head for its weight."""

    def __init__(self, backbone: nn.Module, freeze: Sequence[str] = (), weight=None):
        super().__init__()
        self.backbone = backbone
        self.score = value_head(backbone, weight)
        select_trained(self, freeze)

    def forward(self, batch: GroupBatch) -> Tensor:
        """Compute the number at the state before each completion token, (M,)."""
        return self.score(completion_states(self.backbone, batch))[:, 0]

    def at_end(self, batch: GroupBatch) -> Tensor:
        """Compute the number at the last token of completions, (R,), in a batch of pack_to_end."""
        return torch.stack([numbers[-1] for numbers in self(batch).split(batch.layout.row_lengths)])


def pack_to_end(
    prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]], config, device
) -> GroupBatch:
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
    written = torch.cat([completion.written, completion.written[-1:]])
    return replace(completion, ids=ids, written=written)


class ValueHead(nn.Linear):
    """A linear unit whose result is of its weight's dtype, whatever the hidden states have."""

    def forward(self, states: Tensor) -> Tensor:
        return super().forward(states.to(self.weight.dtype))


def value_head(model: nn.Module, weight: Tensor | None = None) -> ValueHead:
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
    if is_sharded(model):
        model.sharding.shard_head(head)
    return head


def load_value_model(folder: str | Path, *options) -> ValueModel:
    """Read what save_value_model wrote; options as of load_model."""
    check_value_model_folder(folder)
    backbone = load_model(folder, *options)
    return _with_head(backbone, folder)


def load_beside(policy: nn.Module, folder: str | Path, device, same_base: bool) -> ValueModel:
    """Read a value model that runs beside a policy; on its own base the adapters and head alone."""
    if same_base and adapters(policy) and not is_sharded(policy):  # a unit belongs to one model
        backbone = copy_model(policy)
        load_adapter(backbone, Path(folder) / "adapter")
        return _with_head(backbone, folder)
    sharding = getattr(policy, "sharding", None)
    return load_value_model(folder, policy.lm_head.weight.dtype, device, sharding)


def load_critic(
    folder: str | Path, policy: nn.Module, processor: Processor, run, device
) -> ValueModel:
    """Read a value model that is trained beside a policy, adapted as the recipe says (RunConfig).

    Raises:
        ValueError: it would read the policy's tokens as others.
    """
    sharding = getattr(policy, "sharding", None)
    dtype = policy.lm_head.weight.dtype
    critic = load_value_model(
        folder, dtype, device, sharding, partial(inject_adapters, options=run.adapter)
    )
    if input_form(critic.backbone, load_processor(folder)) != input_form(policy, processor):
        raise ValueError(
            f"{folder}: a critic reads the policy's tokens, and this model has another tokenizer "
            "or family; take one of the policy's"
        )
    draw_adapters(critic.backbone, run.seed)
    if run.model.activation_checkpointing and sharding is None:
        recompute_blocks(critic.backbone)
    select_trained(critic, run.model.freeze)
    return critic


def input_form(model: nn.Module, processor: Processor) -> tuple:
    """Say what a model reads: its family, vocabulary and sizes of patches.

    Ids and patches made for one model are another's too where this is equal.
    """
    images = processor.image_processor
    patch_sizes = [getattr(images, name) for name in PATCHES]
    return model.config.model_type, processor.tokenizer.backend.get_vocab(), patch_sizes


def _with_head(backbone: nn.Module, folder: str | Path) -> ValueModel:
    file = Path(folder) / HEAD_FILE
    shape = (1, backbone.config.hidden_size)
    tensors = dict(read_tensors(file))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shapes != {"score.weight": shape}:
        raise ValueError(f"{file}: it must hold score.weight, {shape}")
    return ValueModel(backbone, weight=tensors["score.weight"])


def check_value_model_folder(folder: str | Path):
    """Refuse a folder without a value model (ValueError)."""
    if not (Path(folder) / HEAD_FILE).is_file():
        raise ValueError(
            f"{folder}: there is no {HEAD_FILE}, the head of a reward model; train one"
        )


def save_value_model(folder: Path, model: ValueModel, processor, world, base=None):
    """Write a folder that load_value_model reads: a checkpoint with score.safetensors in it."""
    reshard(model.score)
    head = {"score.weight": full(model.score.weight).cpu()}

    def more(written: Path):
        save_tensors(head, written / HEAD_FILE)

    save_model(folder, model.backbone, processor, world, base, more)
