"""Save a model, which may be sharded."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from minivlmrl.data.processor import Processor
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.weights import reshard
from minivlmrl.errors import phase
from minivlmrl.model import checkpoint
from minivlmrl.model.decoder import VisionLanguageModel


def gather_and_save_model(
    folder: str | Path,
    model: VisionLanguageModel,
    processor: Processor,
    world: World,
    base: str | None = None,
    more: Callable[[Path], None] | None = None,
    merge: bool = True,
):
    """Save a model with its processor as model.checkpoint.save_model does. All ranks must call it.

    Rank 0 writes the files, and an error on rank 0 is raised on all ranks.

    Args:
        merge: False saves only a model's adapters, see model.checkpoint.save_adapter.
    """
    with phase("save"):
        if not merge:
            reshard(model)
            write = checkpoint.adapter_writer(model, base)
            assert write is not None  # validation rejects `save: adapter` without adapters
            save = partial(checkpoint.save_adapter, folder, processor, write, more)
            world.run_on_rank_zero(save)
            return
        if model.sharding is None:
            save = partial(checkpoint.save_model, folder, model, processor, base, more)
            world.run_on_rank_zero(save)
            return
        # imported here, because most runs are not sharded
        from minivlmrl.distributed.save_sharded import save_sharded

        save_sharded(folder, model, processor, world, base, more)
