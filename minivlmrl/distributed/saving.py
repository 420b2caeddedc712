"""Save a model, sharded or not, as a Hugging Face folder."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from minivlmrl.data.processor import Processor
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.weights import reshard
from minivlmrl.errors import error_phase
from minivlmrl.files import CARD, CARD_MARK, INDEX, INFERENCE_CONFIG, ONE_FILE, replacing, save_tensors
from minivlmrl.json_files import write_json
from minivlmrl.model.checkpoint import check_finite, file_weights, write_settings
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.plain_weights import Stacked, Weight, gather_full_tensor, has_adapters


def save_model(
    folder: str | Path,
    model: VisionLanguageModel,
    processor: Processor,
    world: World | None = None,
    base: str | None = None,
    write_more_files: Callable[[Path], None] | None = None,
    merge: bool = True,
    max_shard_size: int = 5 * 10**9,
):
    """Save a model and its processor as a folder for transformers and vLLM.

    Adapters are merged, and also saved in adapter/ in PEFT format. An existing folder is replaced only after all files
    are written. Weights are saved in model.save_dtype or, if it is None, in their own dtype.

    All ranks must call this function. Rank 0 writes the files, and its errors are raised on all ranks. Weights are
    gathered one file at a time, because the full model may not fit in memory on rank 0.

    Args:
        world: ranks, or None for a single process.
        base: base model folder or repository, for adapter_config.json.
        write_more_files: function that writes more files into the new folder.
        merge: if False, save only adapters.
        max_shard_size: maximum bytes per weight file.
    """
    world = world or World()
    with error_phase("save"), ExitStack() as saving:
        reshard(model)
        write_adapter = adapter_writer(model, base)
        weights = file_weights(model) if merge else {}
        shapes = {name: on_meta(weight) for name, weight in weights.items()}
        sizes = {name: x.to(model.save_dtype or x.dtype).nbytes for name, x in shapes.items()}
        files = divide(sizes, max_shard_size)
        new_folder = world.run_on_rank_zero(lambda: saving.enter_context(replacing(folder)))
        new_folder = new_folder or Path(folder)

        def write_tensors(file: str, tensors: dict[str, Tensor]):
            for name, tensor in tensors.items():
                check_finite(name, tensor, folder)
            save_tensors(tensors, new_folder / file)

        def finish():
            write_other_files(new_folder, model, processor, merge, write_adapter, Path(folder))
            if len(files) > 1:
                weight_map = {name: file for file, names in files.items() for name in names}
                write_json(
                    new_folder / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
                )
            if write_more_files:
                write_more_files(new_folder)
            saving.pop_all().close()  # move the new folder to its place

        for file, names in files.items():
            tensors = {}
            for name in names:
                weight = gather_full_tensor(weights[name])
                if world.is_main:
                    tensors[name] = weight.to(model.save_dtype or weight.dtype).cpu().contiguous()
            world.run_on_rank_zero(partial(write_tensors, file, tensors))
        world.run_on_rank_zero(finish)


def adapter_writer(model: VisionLanguageModel, base: str | None) -> Callable[[Path], None] | None:
    if not has_adapters(model):
        return None
    from minivlmrl.model.peft import gather_adapter

    return gather_adapter(model, base)


def divide(sizes: Mapping[str, int], max_shard_size: int) -> dict[str, list[str]]:
    """Assign tensors to files in order; return {file: tensor names}.

    Example with max_shard_size 10: tensors of 6, 12, 3, 2 and 5 bytes give the files [12], [6, 3] and [2, 5].

    Args:
        sizes: {tensor name: bytes}.
        max_shard_size: maximum bytes per file; a larger tensor gets its own file.
    """
    shards = []
    shard = []
    for name, size in sizes.items():
        if size > max_shard_size:
            shards.append([name])
            continue
        if sum(sizes[other] for other in shard) + size > max_shard_size:
            shards.append(shard)
            shard = []
        shard.append(name)
    shards += [shard] if shard else []
    if len(shards) == 1:
        return {ONE_FILE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, start=1)}


def write_other_files(
    folder: Path,
    model: VisionLanguageModel,
    processor: Processor,
    merge: bool,
    write_adapter: Callable[[Path], None] | None,
    replaced: Path,
):
    """Write the config, processor and adapter files of a model folder; without `merge`, only the adapter.

    Args:
        replaced: the earlier folder, from which a model card written by the user is copied.
    """
    if merge:
        write_settings(folder, model, processor)
    if write_adapter:
        write_adapter(folder / "adapter")
    for part in filter(lambda part: (folder / part).is_dir(), ("", "adapter")):
        for name in (INFERENCE_CONFIG, CARD):
            content = processor.tokenizer.files.get(name)
            old = replaced / part / name
            if (
                name == CARD
                and old.is_file()
                and not old.is_symlink()
                and CARD_MARK not in old.read_text("utf-8", "replace")
            ):
                content = old.read_bytes()
            if content:
                (folder / part / name).write_bytes(content)


def on_meta(weight: Weight) -> Tensor:
    if isinstance(weight, Stacked):
        return weight.stack(on_meta)
    return torch.empty(weight.shape, dtype=weight.dtype, device="meta")
