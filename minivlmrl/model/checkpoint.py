"""A Hugging Face folder <-> a model and its processor, by the names that both share."""

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
MAX_SHARD_SIZE = 5 * 10**9  # bytes of one file of weights
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# files of a model besides its weights: a checkpoint that we write keeps those it was read with
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
    """Build the model of a folder or repository with its weights (ValueError: names what is wrong).

    Args:
        dtype: of the parameters; by default the config's torch_dtype.
        sharding: shards the model; each rank then reads only its own part, onto sharding.device.
        adapt: (model on the meta device) -> puts adapters on it, which the folder does not have.
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
    model.folder = folder.resolve()  # from which save_model copies tensors that no module has
    return model


def read_config(folder: Path) -> ModelConfig:
    """Read the config.json of a folder (ValueError: see ModelConfig.from_dict)."""
    return ModelConfig.from_dict(read_json(folder / "config.json"), f"{folder}/config.json")


def _read_weights(
    folder: Path, files: list[Path], model: Qwen2_5_VL, part: Callable, device: torch.device | str
) -> dict[str, Tensor]:
    """Read a tensor for each parameter; part(view of the file, parameter) is what is kept.

    Quantized layers pack theirs instead, each as soon as it is read.
    """
    expected = base_weights(model)  # a tied head is in it once, under the embedding's name
    is_tied = model.config.tie_word_embeddings
    family = family_of(model)
    weights: dict[str, Tensor] = {}
    read_names = set()
    for file in files:
        tensors = read_tensors(file)
        for name, tensor in family.split_tensors(tensors, model.config, file):
            if name.startswith(family.unread):
                continue
            # some folders have the tied head too
            like = expected.get(EMBEDDING if is_tied and name == HEAD else name)
            if like is None:
                raise ValueError(f"{file}: unexpected tensor {name:.80}")
            if name in read_names:
                raise ValueError(f"{file}: tensor {name} is there twice; take the wrong one out")
            if tensor.shape != like.shape:
                raise ValueError(
                    f"{file}: tensor {name} has shape {tuple(tensor.shape)}, "
                    f"config.json {tuple(like.shape)}"
                )
            read_names.add(name)
            if isinstance(like, Tensor):
                weights[name] = part(tensor, like)
                check_loaded(weights[name], name, file)
            else:
                check_loaded(tensor, name, file)
                like.read(tensor.to(device), part)
    if missing := expected.keys() - read_names:
        raise ValueError(f"{folder}: {len(missing)} tensor(s) missing, first {min(missing)}")
    # transformers 4 drops a stored head that is to be tied, transformers 5 uses it: they must agree
    if is_tied and HEAD in weights and not torch.equal(weights.pop(HEAD), weights[EMBEDDING]):
        raise ValueError(
            f"{folder}/config.json has tie_word_embeddings true, but there is another {HEAD}: "
            "set this to false to use it (as transformers 5), or take it out (as transformers 4)"
        )
    parameter_names = {plain_name(name): name for name, _ in model.named_parameters()}
    return {parameter_names[name]: weight for name, weight in weights.items()}


def check_loaded(weight: Tensor, name: str, file: Path):
    """Refuse a weight with NaN or infinities (ValueError), of which a sum is not finite."""
    local_weight = weight.to_local() if isinstance(weight, Sharded) else weight
    total = local_weight.sum(dtype=torch.promote_types(weight.dtype, torch.float32))
    if not total.isfinite():
        raise ValueError(f"{file}: tensor {name} has numbers that are not finite; save it again")


def read_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of a safetensors file: its name on the hub and a view, to be copied."""
    try:
        with safe_open(file, framework="pt") as handle:
            names = list(handle.keys())
        # opened anew for each: what was read of an open file counts as memory of this process
        for name in names:
            with safe_open(file, framework="pt") as handle:
                tensor = handle.get_tensor(name)
            if tensor.dtype not in DTYPES.values():
                raise ValueError(
                    f"{file}: tensor {name:.80} is {tensor.dtype}; quantised ones are not read, "
                    "take the bfloat16 one that this was made of"
                )
            yield hub_name(name), tensor
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: not a whole safetensors file ({error})") from error


def unread_tensors(model: Qwen2_5_VL) -> dict[str, Tensor]:
    """View the tensors of a model's folder that no module has: mtp.*, the drafter of Qwen3.5."""
    folder = model.folder
    prefixes = family_of(model).unread
    tensors = {}
    if folder is None or not prefixes:
        return tensors
    if not folder.is_dir():
        warnings.warn(f"{folder} is gone, saved without its {', '.join(prefixes)}", stacklevel=3)
        return tensors
    for file in weight_files(folder):
        for name, tensor in read_tensors(file):
            if name.startswith(prefixes):
                tensors[name] = tensor
    return tensors


def load_processor(
    folder: str | Path, min_pixels: int | None = None, max_pixels: int | None = None
) -> Processor:
    """Read tokenizer, chat template and image settings of a folder (ValueError: no fit)."""
    # here, because a model with random weights, as of minimal.py, has no folder and needs no Jinja
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
    """Refuse a config (ValueError) that says something else than image settings or tokenizer."""
    for name, field in PATCHES.items():
        value = getattr(config.vision_config, field)
        expected = getattr(images, name)
        as_in_file = f"{expected} as in {image_file.name}"
        check_field(value == expected, f"vision_config.{field}", value, as_in_file)
    check_field(
        config.vocab_size >= len(tokenizer),  # some rows of the embedding no token uses
        "vocab_size",
        config.vocab_size,
        f"{len(tokenizer)} as in tokenizer.json, or more",
    )
    for name in ("image_token_id", "video_token_id"):
        value = getattr(config, name)
        expected = tokenizer.special_tokens[CONTROL_TOKENS[name]]
        check_field(value == expected, name, value, f"{expected} as in tokenizer.json")


def carried_files(folder: Path) -> dict[str, bytes]:
    """Read the files that a save copies, now: their folder may be gone then."""
    files = {}
    for file in sorted(folder.iterdir()):
        if CARRIED.fullmatch(file.name) and file.is_file():
            target = file.resolve()
            if target.parent != folder.resolve() and target.parent.name != "blobs":
                raise ValueError(f"{file}: a link to {target}; put the file itself there")
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
    """Write a folder for transformers and vLLM, adapters merged and as PEFT's; all or nothing.

    distributed/weights.gather_and_save_model writes a model that is sharded or trained by several ranks.

    Args:
        base: the folder or repository that adapters are on, which PEFT's folder names.
        more: (folder) -> writes what else belongs into it.
        max_shard_size: bytes of one file of weights.
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
    """Return what writes a model's adapters as PEFT does; None: the model has no adapters."""
    if not has_adapters(model):
        return None
    from minivlmrl.model.peft import gather_adapter  # here, because few runs have adapters

    return gather_adapter(model, base)


def write_index(folder: Path, files: StateDictSplit):
    """Write which file has which tensor, if there are several files of weights."""
    if files.is_sharded:
        index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
        write_json(folder / INDEX, index)


def write_extras(
    folder: Path, write_adapter: Callable[[Path], None] | None, more: Callable[[Path], None] | None
):
    """Write the adapter into a folder of its own, and what the caller adds."""
    if write_adapter is not None:
        write_adapter(folder / "adapter")
        if (folder / INFERENCE_CONFIG).exists():
            shutil.copy(folder / INFERENCE_CONFIG, folder / "adapter")
    if more is not None:
        more(folder)


def split_weights(weights: Mapping[str, Weight], max_shard_size: int) -> StateDictSplit:
    """Share weights out to files of at most so many bytes, or one weight each."""
    shapes = {}
    for name, weight in weights.items():
        shapes[name] = on_meta(weight)
    return split_torch_state_dict_into_shards(shapes, max_shard_size=max_shard_size)


def on_meta(weight: Weight) -> Tensor:
    """Make a tensor without numbers of a weight's shape and dtype."""
    if isinstance(weight, Stacked):
        return weight.stack(on_meta)
    return torch.empty(weight.shape, dtype=weight.dtype, device="meta")


def file_weights(model: Qwen2_5_VL) -> dict[str, Weight]:
    """Return what `full` computes each weight from, with its name in files of the family."""
    family = family_of(model)
    name_of = memory_name if family.memory_names else str
    weights = {name_of(name): weight for name, weight in plain_weights(model).items()}
    family.stack_tensors(weights, model.config)
    return weights


def check_finite(name: str, tensor: Tensor, folder: str | Path):
    """Refuse to save weights of a run that has diverged (ValueError)."""
    if not tensor.isfinite().all():
        raise ValueError(f"{folder}: not saved, {name} is not finite; what was there is untouched")


def write_settings(folder: Path, model: Qwen2_5_VL, processor: Processor):
    """Write all files of a model's folder but its weights."""
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
        # not carried: its image settings may be others now; this is the next that a loader reads
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
