"""Folders of models that several ranks train: all gather the weights, the first rank writes them.

Loading needs nothing of this: model/checkpoint.load_model takes the sharding, and each rank then
keeps its own part of the tensors that it reads.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from minivlmrl.config.options import RunConfig
from minivlmrl.data.processor import Processor
from minivlmrl.distributed.fsdp import copy_model, is_sharded, recompute_blocks, reshard
from minivlmrl.distributed.process_group import World
from minivlmrl.files import replacing, save_tensors
from minivlmrl.model import checkpoint
from minivlmrl.model.checkpoint import MAX_SHARD_SIZE, load_processor
from minivlmrl.model.lora import adapters, draw_adapters, full, inject_adapters
from minivlmrl.model.trainable import select_trained
from minivlmrl.model.value_head import (
    HEAD_FILE,
    ValueModel,
    add_saved_head,
    input_form,
    load_value_model,
)


def save_model(
    folder: str | Path,
    model: nn.Module,
    processor: Processor,
    world: World,
    base: str | None = None,
    more: Callable[[Path], None] | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
):
    """Write the folder that model/checkpoint.save_model writes; all ranks call this.

    The ranks gather the tensors of one file after the other, because the first rank could not hold
    all of them. An error of the first rank is raised on all ranks.
    """
    reshard(model)
    weights = checkpoint.file_weights(model)
    write_adapter = checkpoint.adapter_writer(model, base)
    unread = world.on_main(lambda: checkpoint.unread_tensors(model)) or {}
    # only the first rank has the unread tensors, so the others take its split into files
    files = world.gather_objects(checkpoint.split_weights(weights | unread, max_shard_size))[0]
    with ExitStack() as saving:
        new_folder = world.on_main(lambda: saving.enter_context(replacing(folder)))

        def write_tensors(file: str, tensors: dict[str, Tensor]):
            for name, tensor in tensors.items():
                if name in weights:
                    checkpoint.check_finite(name, tensor, folder)
            save_tensors(tensors, new_folder / file)

        def finish():
            checkpoint.write_settings(new_folder, model, processor)
            checkpoint.write_index(new_folder, files)
            checkpoint.write_extras(new_folder, write_adapter, more)
            saving.pop_all().close()  # in this function, so that all ranks raise its errors

        for file, names in files.filename_to_tensors.items():
            tensors = {}
            for name in names:
                if name in weights:
                    weight = full(weights[name])  # gathered by all ranks
                    if world.is_main:
                        tensors[name] = weight.cpu().contiguous()
                elif world.is_main:
                    tensors[name] = unread[name]
            world.on_main(partial(write_tensors, file, tensors))
        world.on_main(finish)


def save_value_model(
    folder: str | Path,
    model: ValueModel,
    processor: Processor,
    world: World,
    base: str | None = None,
):
    """Write a folder that load_value_model reads: a checkpoint with score.safetensors in it."""
    reshard(model.score)
    head = {"score.weight": full(model.score.weight).cpu()}

    def write_head(new_folder: Path):
        save_tensors(head, new_folder / HEAD_FILE)

    save_model(folder, model.backbone, processor, world, base, write_head)


def load_beside(
    policy: nn.Module, folder: str | Path, device: torch.device, same_base: bool
) -> ValueModel:
    """Read a value model that runs beside a policy.

    Args:
        same_base: the value model has adapters on the policy's base, which it can share.
    """
    if same_base and adapters(policy) and not is_sharded(policy):  # a unit belongs to one model
        from minivlmrl.model.peft import load_adapter

        backbone = copy_model(policy)
        load_adapter(backbone, Path(folder) / "adapter")
        return add_saved_head(backbone, folder)
    return load_value_model(folder, policy.lm_head.weight.dtype, device, policy.sharding)


def load_critic(
    folder: str | Path,
    policy: nn.Module,
    processor: Processor,
    run: RunConfig,
    device: torch.device,
) -> ValueModel:
    """Read a value model that is trained beside a policy, adapted as the recipe (RunConfig) says.

    Raises:
        ValueError: the tokens of the policy are other tokens for this model.
    """
    dtype = policy.lm_head.weight.dtype
    inject = partial(inject_adapters, options=run.adapter)
    critic = load_value_model(folder, dtype, device, policy.sharding, inject)
    if input_form(critic.backbone, load_processor(folder)) != input_form(policy, processor):
        raise ValueError(
            f"{folder}: a critic reads the policy's tokens, and this model has another tokenizer "
            "or family; take one of the policy's"
        )
    draw_adapters(critic.backbone, run.seed)
    if run.model.activation_checkpointing and policy.sharding is None:
        recompute_blocks(critic.backbone)
    select_trained(critic, run.model.freeze)
    return critic
