"""Save a model, sharded or not, as a folder in the format of Hugging Face."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards
from torch import Tensor

from minivlmrl.data.processor import Processor
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.weights import reshard
from minivlmrl.errors import phase
from minivlmrl.files import INDEX, INFERENCE_CONFIG, replacing, save_tensors
from minivlmrl.json_files import write_json
from minivlmrl.model.checkpoint import check_finite, file_weights, unused_tensors, write_settings
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.plain_weights import Stacked, Weight, gather_full_tensor, has_adapters

MAX_SHARD_SIZE = 5 * 10**9  # maximum bytes in one weights file


def save_model(
    folder: str | Path,
    model: VisionLanguageModel,
    processor: Processor,
    world: World | None = None,
    base: str | None = None,
    write_more_files: Callable[[Path], None] | None = None,
    merge: bool = True,
    max_shard_size: int = MAX_SHARD_SIZE,
):
    """Save a model and its processor as a folder that transformers and vLLM can load.

    Adapters are merged into the saved weights, and also saved alone in the subfolder adapter/ in PEFT's format. An
    existing model folder is replaced when all new files have been written. Weights are saved in the dtype
    model.save_dtype; None keeps each weight's dtype.

    All ranks must call this function. All ranks gather the tensors of one file at a time, because the full model may
    not fit into the memory of rank 0. Rank 0 writes the files, and an error of rank 0 is raised on all ranks.

    Args:
        world: the ranks; None is a single process.
        base: the base model's folder or repository, for PEFT's adapter_config.json.
        write_more_files: function that writes additional files into the new folder.
        merge: False saves only the adapters, in a folder that keeps no older merged weights.
        max_shard_size: maximum size for one weights file, in bytes.
    """
    world = world or World()
    with phase("save"), ExitStack() as saving:
        reshard(model)
        write_adapter = adapter_writer(model, base)
        weights = file_weights(model) if merge else {}
        unused = {}
        if merge:
            unused = world.run_on_rank_zero(lambda: unused_tensors(model), "read the weights of the base") or {}
        # Only rank 0 has the tensors `unused`, so the other ranks get the list of files from rank 0.
        files = world.gather_objects(divide(model, weights, unused, max_shard_size))[0]
        new_folder = world.run_on_rank_zero(lambda: saving.enter_context(replacing(folder)), f"open {folder}")
        new_folder = new_folder or Path(folder)  # ranks other than 0 write nothing

        def write_tensors(file: str, tensors: dict[str, Tensor]):
            for name in tensors.keys() & weights.keys():
                check_finite(name, tensors[name], folder)
            save_tensors(tensors, new_folder / file)

        def finish():
            write_other_files(new_folder, model, processor, files if merge else None, write_adapter)
            if write_more_files is not None:
                write_more_files(new_folder)
            saving.pop_all().close()  # replaces the old folder by the new folder

        for file, names in files.filename_to_tensors.items():
            tensors = {}
            for name in names:
                if name in weights:
                    weight = gather_full_tensor(weights[name])  # by all ranks
                    if world.is_main:
                        tensors[name] = weight.to(model.save_dtype or weight.dtype).cpu().contiguous()
                elif world.is_main:
                    tensors[name] = unused[name]
            world.run_on_rank_zero(partial(write_tensors, file, tensors), f"write {folder}")
        world.run_on_rank_zero(finish, f"write {folder}")


def adapter_writer(model: VisionLanguageModel, base: str | None) -> Callable[[Path], None] | None:
    if not has_adapters(model):
        return None
    from minivlmrl.model.peft import gather_adapter

    return gather_adapter(model, base)


def divide(
    model: VisionLanguageModel, weights: Mapping[str, Weight], unused: Mapping[str, Tensor], max_shard_size: int
) -> StateDictSplit:
    """Assign each tensor of a model folder to a weights file of at most max_shard_size bytes."""
    shapes = {}
    for name, weight in weights.items():
        shape = on_meta(weight)
        shapes[name] = shape.to(model.save_dtype or shape.dtype)
    shapes |= {name: on_meta(tensor) for name, tensor in unused.items()}
    return split_torch_state_dict_into_shards(shapes, max_shard_size=max_shard_size)


def write_other_files(
    folder: Path,
    model: VisionLanguageModel,
    processor: Processor,
    files: StateDictSplit | None,
    write_adapter: Callable[[Path], None] | None,
):
    """Write config, processor and adapter into a model folder; if `files` is None, write only the adapter."""
    settings = processor.tokenizer.files.get(INFERENCE_CONFIG)
    if files is not None:
        write_settings(folder, model, processor)
        if files.is_sharded:
            index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
            write_json(folder / INDEX, index)
    elif settings is not None:
        (folder / INFERENCE_CONFIG).write_bytes(settings)
    if write_adapter is not None:
        write_adapter(folder / "adapter")
        if settings is not None:
            (folder / "adapter" / INFERENCE_CONFIG).write_bytes(settings)


def on_meta(weight: Weight) -> Tensor:
    if isinstance(weight, Stacked):
        return weight.stack(on_meta)
    return torch.empty(weight.shape, dtype=weight.dtype, device="meta")
