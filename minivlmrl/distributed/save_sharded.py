"""Save a sharded model, whose parts are on different ranks."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from torch import Tensor

from minivlmrl.data.processor import Processor
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.weights import reshard
from minivlmrl.files import replacing, save_tensors
from minivlmrl.model import checkpoint
from minivlmrl.model.decoder import VisionLanguageModel


def save_sharded(
    folder: str | Path,
    model: VisionLanguageModel,
    processor: Processor,
    world: World,
    base: str | None = None,
    more: Callable[[Path], None] | None = None,
    max_shard_size: int = checkpoint.MAX_SHARD_SIZE,
):
    """Save a sharded model as a checkpoint folder, see gather_and_save_model.

    The ranks gather the tensors of one file after the other, because the full model may not fit into rank 0's memory.
    """
    reshard(model)
    weights = checkpoint.file_weights(model)
    write_adapter = checkpoint.adapter_writer(model, base)
    unread = world.run_on_rank_zero(lambda: checkpoint.unused_tensors(model)) or {}
    # all ranks divide the tensors among files as rank 0 does, because only rank 0 has the unread tensors
    split = checkpoint.split_weights(model, weights, unread, max_shard_size)
    files = world.gather_objects(split)[0]
    with ExitStack() as saving:
        # ranks other than 0 write nothing
        new_folder = world.run_on_rank_zero(lambda: saving.enter_context(replacing(folder))) or Path(folder)

        def write_tensors(file: str, tensors: dict[str, Tensor]):
            for name, tensor in tensors.items():
                if name in weights:
                    checkpoint.check_finite(name, tensor, folder)
            save_tensors(tensors, new_folder / file)

        def finish():
            checkpoint.write_settings(new_folder, model, processor)
            checkpoint.write_index(new_folder, files)
            checkpoint.write_extras(new_folder, write_adapter, more)
            # the folder is closed in this function, so that an error is raised on all ranks
            saving.pop_all().close()

        for file, names in files.filename_to_tensors.items():
            tensors = {}
            for name in names:
                if name in weights:
                    weight = checkpoint.full_weight(model, weights[name])  # by all ranks
                    if world.is_main:
                        tensors[name] = weight.cpu().contiguous()
                elif world.is_main:
                    tensors[name] = unread[name]
            world.run_on_rank_zero(partial(write_tensors, file, tensors))
        world.run_on_rank_zero(finish)
