"""Load and save models and processors as Hugging Face folders."""

import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minivlmrl.config.parsing import check_field, error_context, read_json
from minivlmrl.data.chat_template import as_jinja
from minivlmrl.data.download import find_folder
from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.image_settings import read_image_processor, write_image_processor
from minivlmrl.data.processor import Processor
from minivlmrl.data.tokenizer import Tokenizer, load_tokenizer
from minivlmrl.files import (
    INDEX,
    INFERENCE_CONFIG,
    image_settings,
    replacing,
    save_tensors,
    video_settings,
    weight_files,
    write_json,
)
from minivlmrl.model.build import PATCHES, assign, default_template, model_from_config
from minivlmrl.model.config import ModelConfig
from minivlmrl.model.decoder import Qwen2_5_VL, Sharder
from minivlmrl.model.families.registry import (
    CONTROL_TOKENS,
    FAMILIES,
    family_of,
    hub_name,
    memory_name,
)
from minivlmrl.model.plain_weights import (
    Sharded,
    Stacked,
    Weight,
    base_weights,
    gather_full_tensor,
    has_adapters,
    plain_name,
    plain_weights,
)

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
MAX_SHARD_SIZE = 5 * 10**9  # maximum bytes of one weights file
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# files besides the weights that a saved checkpoint copies unchanged from the loaded folder
CARRIED = re.compile(
    r"(tokenizer_config|generation_config|video_preprocessor_config|tokenizer|vocab|added_tokens"
    r"|special_tokens_map|chat_template)\.json"
    rf"|merges\.txt|chat_template\.jinja|{re.escape(INFERENCE_CONFIG)}|LICENSE.*|NOTICE.*"
)


def load_model(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    sharding: Sharder | None = None,
    adapt: Callable[[Qwen2_5_VL], None] | None = None,
) -> Qwen2_5_VL:
    """Load a model from a local folder or a hub repository.

    Args:
        folder: path of a folder or name of a repository.
        dtype: dtype of the parameters; by default the config's torch_dtype.
        device: device of the parameters of a model that is not sharded.
        sharding: shards the model, so that each rank loads only its own part, to sharding.device.
        adapt: function that adds adapters to the model while it is on the meta device. The folder
            has no weights for them.
    Raises:
        ValueError: config.json or the weights are invalid; the message says what is wrong.
    """
    folder = find_folder(folder)
    config = read_config(folder)
    files = weight_files(folder)
    with torch.device("meta"):
        model = model_from_config(config, folder / "config.json").to(
            dtype or DTYPES[config.torch_dtype]
        )
    if adapt is not None:
        adapt(model)
    if sharding is not None:
        sharding.shard(model)

    def keep_all(tensor: Tensor, like: Tensor) -> Tensor:
        return tensor.to(device, like.dtype, copy=True)

    part = sharding.part if sharding else keep_all
    assign(model, _read_weights(folder, files, model, part, device))
    model.folder = folder.resolve()  # save_model copies the tensors that no module uses from here
    return model


def read_config(folder: Path) -> ModelConfig:
    """Read the config.json of a folder. Raises ValueError if ModelConfig.from_dict does."""
    return ModelConfig.from_dict(read_json(folder / "config.json"), f"{folder}/config.json")


def _read_weights(
    folder: Path, files: list[Path], model: Qwen2_5_VL, part: Callable, device: torch.device | str
) -> dict[str, Tensor]:
    """Read the tensors of all parameters, by parameter name.

    Quantised layers pack their tensors as soon as these are read, and are not in the result.

    Args:
        part: part(tensor of the file, parameter) returns the tensor that this rank keeps.
    Raises:
        ValueError: a tensor is missing, unexpected, duplicated, not finite or has a wrong shape.
    """
    expected = base_weights(model)  # has a tied head only once, under the embedding's name
    is_tied = model.config.tie_word_embeddings
    family = family_of(model)
    weights: dict[str, Tensor] = {}
    read_names = set()
    for file in files:
        tensors = read_tensors(file)
        for name, tensor in family.split_tensors(tensors, model.config, file):
            if name.startswith(family.unread):
                continue
            # some folders also contain a tied head
            like = expected.get(EMBEDDING if is_tied and name == HEAD else name)
            if like is None:
                raise ValueError(f"{file}: unexpected tensor {name:.80}")
            if name in read_names:
                raise ValueError(f"{file}: tensor {name} appears twice; remove the wrong one")
            if tensor.shape != like.shape:
                raise ValueError(
                    f"{file}: tensor {name} has shape {tuple(tensor.shape)}, "
                    f"but config.json requires {tuple(like.shape)}"
                )
            read_names.add(name)
            if isinstance(like, Tensor):
                weights[name] = part(tensor, like)
                check_loaded(weights[name], name, file)
            else:
                check_loaded(tensor, name, file)
                like.read(tensor.to(device), part)
    if missing := expected.keys() - read_names:
        raise ValueError(
            f"{folder}: {len(missing)} tensor(s) are missing, the first is {min(missing)}"
        )
    # transformers 4 ignores a stored head if the head is tied, and transformers 5 uses it, so the
    # two tensors must be equal
    if is_tied and HEAD in weights and not torch.equal(weights.pop(HEAD), weights[EMBEDDING]):
        raise ValueError(
            f"{folder}/config.json has tie_word_embeddings true, but {HEAD} differs from the "
            "embedding. Set tie_word_embeddings to false to use it, as transformers 5 does, or "
            "remove the tensor, as transformers 4 does."
        )
    parameter_names = {plain_name(name): name for name, _ in model.named_parameters()}
    return {parameter_names[name]: weight for name, weight in weights.items()}


def check_loaded(weight: Tensor, name: str, file: Path):
    """Raise ValueError if a loaded weight contains NaN or infinities.

    Only the sum is checked, because one such value makes the sum not finite.
    """
    local_weight = weight.to_local() if isinstance(weight, Sharded) else weight
    total = local_weight.sum(dtype=torch.promote_types(weight.dtype, torch.float32))
    if not total.isfinite():
        raise ValueError(
            f"{file}: tensor {name} contains NaN or infinite values. Save the model again."
        )


def read_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (hub name, tensor) for each tensor of a safetensors file.

    Tensors are views of the file, so callers must copy them.
    """
    try:
        with safe_open(file, framework="pt") as handle:
            names = list(handle.keys())
        # the file is reopened for each tensor, because the pages of an open file that were read
        # count as memory of this process
        for name in names:
            with safe_open(file, framework="pt") as handle:
                tensor = handle.get_tensor(name)
            if tensor.dtype not in DTYPES.values():
                raise ValueError(
                    f"{file}: tensor {name:.80} is {tensor.dtype}, but quantised checkpoints are "
                    "not supported. Use the bfloat16 checkpoint that it was made from."
                )
            yield hub_name(name), tensor
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: not a complete safetensors file ({error})") from error


def unread_tensors(model: Qwen2_5_VL) -> dict[str, Tensor]:
    """Return the tensors of a model's folder that no module uses, to save them unchanged.

    Example: mtp.*, the draft layer of Qwen3.5.
    """
    folder = model.folder
    prefixes = family_of(model).unread
    tensors = {}
    if folder is None or not prefixes:
        return tensors
    if not folder.is_dir():
        warnings.warn(
            f"{folder} no longer exists, so its tensors {', '.join(prefixes)} are not saved.",
            stacklevel=3,
        )
        return tensors
    for file in weight_files(folder):
        for name, tensor in read_tensors(file):
            if name.startswith(prefixes):
                tensors[name] = tensor
    return tensors


def load_processor(
    folder: str | Path, min_pixels: int | None = None, max_pixels: int | None = None
) -> Processor:
    """Load the tokenizer, chat template and image settings of a folder.

    Args:
        folder: path of a folder or name of a repository.
        min_pixels, max_pixels: bounds of the image area; by default those of the folder.
    Raises:
        ValueError: a file is invalid, or the files do not fit together.
    """
    # imported here, because a model with random weights, as in minimal.py, needs no Jinja
    from minivlmrl.data.folder_template import ChatTemplate

    folder = find_folder(folder)
    config = read_config(folder)
    family = FAMILIES[config.model_type]
    image_file, image_values = image_settings(folder)
    image_values = family.images | image_values
    images = read_image_processor(image_values, str(image_file), min_pixels, max_pixels)
    video_file, video_values = video_settings(folder)
    images = replace(images, videos=family.read_videos(video_values, str(video_file), images))
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    with error_context(f"{folder}/config.json"):
        check_fit(config, images, image_file, tokenizer)
    template = ChatTemplate.from_folder(folder, tokenizer.special_tokens)
    tokenizer.files |= carried_files(folder)
    template = template or default_template(family)
    return Processor(tokenizer, images, template, box_space=family.box_space)


def check_fit(config: ModelConfig, images: ImageProcessor, image_file: Path, tokenizer: Tokenizer):
    """Raise ValueError if config.json contradicts the image settings or the tokenizer."""
    for name, field in PATCHES.items():
        value = getattr(config.vision_config, field)
        expected = getattr(images, name)
        as_in_file = f"{expected} as in {image_file.name}"
        check_field(value == expected, f"vision_config.{field}", value, as_in_file)
    check_field(
        config.vocab_size >= len(tokenizer),  # the embedding may have unused rows
        "vocab_size",
        config.vocab_size,
        f"at least {len(tokenizer)}, the size of tokenizer.json",
    )
    for name in ("image_token_id", "video_token_id"):
        value = getattr(config, name)
        expected = tokenizer.special_tokens[CONTROL_TOKENS[name]]
        check_field(value == expected, name, value, f"{expected} as in tokenizer.json")


def carried_files(folder: Path) -> dict[str, bytes]:
    """Read the files that save_model copies; their folder may no longer exist when it saves."""
    files = {}
    for file in sorted(folder.iterdir()):
        if CARRIED.fullmatch(file.name) and file.is_file():
            target = file.resolve()
            if target.parent != folder.resolve() and target.parent.name != "blobs":
                raise ValueError(
                    f"{file} is a link to {target}. Replace the link by a copy of the file."
                )
            files[file.name] = file.read_bytes()
    return files


def save_model(
    folder: str | Path,
    model: Qwen2_5_VL,
    processor: Processor,
    base: str | None = None,
    more: Callable[[Path], None] | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
):
    """Save a model and its processor as a folder that transformers and vLLM can load.

    Adapters are merged into the weights, and also written to the subfolder adapter/ in PEFT's
    format. The folder is replaced atomically. distributed/weights.gather_and_save_model saves a
    model that is sharded or trained by several ranks.

    Args:
        base: folder or repository of the base model, for PEFT's adapter_config.json.
        more: function that writes further files into the new folder.
        max_shard_size: maximum bytes of one weights file.
    Raises:
        ValueError: a weight is not finite.
    """
    weights = file_weights(model)
    write_adapter = adapter_writer(model, base)
    unread = unread_tensors(model)
    files = split_weights(weights | unread, max_shard_size)
    with replacing(folder) as new_folder:
        for file, names in files.filename_to_tensors.items():
            tensors = {}
            for name in names:
                if name in weights:
                    tensors[name] = gather_full_tensor(weights[name]).cpu().contiguous()
                    check_finite(name, tensors[name], folder)
                else:
                    tensors[name] = unread[name]
            save_tensors(tensors, new_folder / file)
        write_settings(new_folder, model, processor)
        write_index(new_folder, files)
        write_extras(new_folder, write_adapter, more)


def adapter_writer(model: Qwen2_5_VL, base: str | None) -> Callable[[Path], None] | None:
    """Return a function that writes a model's adapters in PEFT's format; None without adapters."""
    if not has_adapters(model):
        return None
    # imported here, because few runs have adapters
    from minivlmrl.model.peft import gather_adapter

    return gather_adapter(model, base)


def write_index(folder: Path, files: StateDictSplit):
    """Write the index that maps tensors to weights files, if there are several files."""
    if files.is_sharded:
        index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
        write_json(folder / INDEX, index)


def write_extras(
    folder: Path, write_adapter: Callable[[Path], None] | None, more: Callable[[Path], None] | None
):
    """Write the adapter to the subfolder adapter/, then call `more` to add the caller's files."""
    if write_adapter is not None:
        write_adapter(folder / "adapter")
        if (folder / INFERENCE_CONFIG).exists():
            shutil.copy(folder / INFERENCE_CONFIG, folder / "adapter")
    if more is not None:
        more(folder)


def split_weights(weights: Mapping[str, Weight], max_shard_size: int) -> StateDictSplit:
    """Assign weights to files of at most max_shard_size bytes.

    A larger weight gets its own file.
    """
    shapes = {}
    for name, weight in weights.items():
        shapes[name] = on_meta(weight)
    return split_torch_state_dict_into_shards(shapes, max_shard_size=max_shard_size)


def on_meta(weight: Weight) -> Tensor:
    """Make a meta tensor with a weight's shape and dtype."""
    if isinstance(weight, Stacked):
        return weight.stack(on_meta)
    return torch.empty(weight.shape, dtype=weight.dtype, device="meta")


def file_weights(model: Qwen2_5_VL) -> dict[str, Weight]:
    """Return the weights by their names in files of the model's family.

    gather_full_tensor computes the tensor of each weight.
    """
    family = family_of(model)
    name_of = memory_name if family.memory_names else str
    weights = {name_of(name): weight for name, weight in plain_weights(model).items()}
    family.stack_tensors(weights, model.config)
    return weights


def check_finite(name: str, tensor: Tensor, folder: str | Path):
    """Raise ValueError if a weight to be saved is not finite, because the run has diverged."""
    if not tensor.isfinite().all():
        raise ValueError(
            f"{folder}: the model was not saved, because {name} is not finite. Existing files were "
            "not changed."
        )


def write_settings(folder: Path, model: Qwen2_5_VL, processor: Processor):
    """Write all files of a model's folder except its weights."""
    dtype = str(model.lm_head.weight.dtype).removeprefix("torch.")
    write_json(folder / "config.json", {**model.config.to_dict(), "torch_dtype": dtype})
    tokenizer = processor.tokenizer
    carried = tokenizer.files
    for name, content in carried.items():
        (folder / name).write_bytes(content)
    images = processor.image_processor
    write_json(folder / "preprocessor_config.json", write_image_processor(images))
    if images.videos is not None:
        write_json(folder / "video_preprocessor_config.json", family_of(model).write_videos(images))
    template = processor.template
    if template is not None and Path(template.source).name == "processor_config.json":
        # processor_config.json is not copied, because the image settings may have changed. Loaders
        # read chat_template.json next.
        write_json(folder / "chat_template.json", {"chat_template": template.text})
    if (template is None or template.is_default) and "chat_template.jinja" not in carried:
        template_text = as_jinja() if template is None else template.text
        (folder / "chat_template.jinja").write_bytes(template_text.encode())
    if "tokenizer.json" not in carried:
        tokenizer.backend.save(str(folder / "tokenizer.json"))
    defaults = {
        "tokenizer_config.json": {
            "tokenizer_class": "Qwen2Tokenizer",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
        },
        "generation_config.json": {
            "eos_token_id": list(processor.stop_token_ids),
            "pad_token_id": tokenizer.special_tokens["<|endoftext|>"],
        },
    }
    for name, values in defaults.items():
        if name not in carried:
            write_json(folder / name, values)
