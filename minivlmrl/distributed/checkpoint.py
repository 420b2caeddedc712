"""Folders of models that several ranks train: all gather the weights, the first rank writes them.

Loading needs nothing of this: model/checkpoint.load_model takes the sharding, and each rank then
keeps its own part of the tensors that it reads.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from torch import Tensor

from minivlmrl.data.processor import Processor
from minivlmrl.distributed.fsdp import reshard
from minivlmrl.distributed.process_group import World
from minivlmrl.files import replacing, save_tensors
from minivlmrl.model import checkpoint
from minivlmrl.model.checkpoint import MAX_SHARD_SIZE
from minivlmrl.model.decoder import Qwen2_5_VL
from minivlmrl.model.plain_weights import full


def gather_and_save_model(
    folder: str | Path,
    model: Qwen2_5_VL,
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
