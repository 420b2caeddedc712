"""Load models and processors from Hugging Face folders; distributed/saving.py saves models."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minivlmrl.data.chat_template import DEFAULT, DEFAULT_QWEN3, ChatTemplate
from minivlmrl.data.download import find_folder
from minivlmrl.data.image_settings import image_settings, read_image_processor, video_settings, write_image_processor
from minivlmrl.data.processor import Processor
from minivlmrl.data.tokenizer import load_tokenizer
from minivlmrl.errors import UserError, error_context, require
from minivlmrl.files import INFERENCE_CONFIG, check_model_folder, file_inside, unchanged, weight_files
from minivlmrl.json_files import check_downloaded, read_json, write_json
from minivlmrl.kernels.backend import at_least_float32
from minivlmrl.model import config_json
from minivlmrl.model.build import PATCHES, assign, model_from_config
from minivlmrl.model.config import ModelConfig
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.families.registry import CONTROL_TOKENS, family_of, find_family, hub_name, module_name
from minivlmrl.model.plain_weights import PackedLinear, Weight, base_weights, plain_name, plain_weights

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# ModelConfig fields that determine token ids and image patches
INPUT_FIELDS = (
    "model_type", "vision_config.patch_dim", "vision_config.spatial_merge_size", "vision_config.tokens_per_second",
)  # fmt: skip
# files copied from the loaded model folder into checkpoints
CARRIED = re.compile(
    r"(tokenizer_config|generation_config|video_preprocessor_config|tokenizer|vocab|added_tokens"
    r"|special_tokens_map|chat_template)\.json"
    rf"|merges\.txt|chat_template\.jinja|{re.escape(INFERENCE_CONFIG)}|LICENSE.*|NOTICE.*"
)


def load_model(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    sharding: Any = None,
    adapt: Callable[[VisionLanguageModel], None] | None = None,
) -> VisionLanguageModel:
    """Load a model from a local folder or a hub repository.

    Args:
        dtype: parameter dtype, default: torch_dtype in config.json.
        device: parameter device if `sharding` is None.
        sharding: Sharding from distributed/fsdp.py, to load only this rank's shard.
        adapt: function that adds adapters on the meta device, before weights are read.
    """
    folder = find_folder(folder)
    with unchanged(folder):
        config = read_config(folder)
        files = weight_files(folder)
        with torch.device("meta"):
            model = model_from_config(config, folder / "config.json").to(dtype or DTYPES[config.torch_dtype])
        if adapt:
            adapt(model)
        if sharding:
            sharding.shard(model)

        # take_shard: (tensor in a file, parameter) -> this rank's shard
        take_shard = sharding.take_shard if sharding else lambda x, like: x.to(device, like.dtype, copy=True)
        assign(model, _read_weights(folder, files, model, take_shard, device))
    return model


def read_config(folder: Path) -> ModelConfig:
    check_model_folder(folder)
    return config_json.from_dict(read_json(folder / "config.json"), f"{folder}/config.json")


def _read_weights(
    folder: Path, files: list[Path], model: VisionLanguageModel, take_shard: Callable, device: torch.device | str
) -> dict[str, Tensor]:
    """Read weights from files, and return {parameter name: this rank's shard}."""
    expected = base_weights(model)  # a tied LM head is not included
    is_tied = model.config.tie_word_embeddings
    family = family_of(model)
    weights: dict[str, Tensor] = {}
    read_names = set()
    for file in files:
        for name, tensor in family.split_tensors(read_tensors(file), model.config, file):
            if name.startswith(family.unused_prefixes):
                continue
            like = expected.get(EMBEDDING if is_tied and name == HEAD else name)
            fault = None
            if like is None:
                fault = "is not a parameter of the model"
            elif name in read_names:
                fault = "occurs twice in this folder"
            elif tensor.shape != like.shape:
                fault = f"has shape {tuple(tensor.shape)}, but config.json requires {tuple(like.shape)}"
            if fault:
                raise UserError(
                    f"{file}: the tensor {name:.80} {fault}. Use a config.json and weight files that belong together."
                )
            read_names.add(name)
            if isinstance(like, Tensor):
                weights[name] = take_shard(tensor, like)
                check_loaded(weights[name], name, file)
            else:
                check_loaded(tensor, name, file)
                cast(PackedLinear, like).pack(tensor.to(device), take_shard)
    if missing := expected.keys() - read_names:
        raise UserError(
            f"{folder}: the weight files lack {len(missing)} of the model's {len(expected)} "
            f"tensors, for example {min(missing)}. Download or save the model again."
        )
    if is_tied and HEAD in weights and not torch.equal(weights.pop(HEAD), weights[EMBEDDING]):
        raise UserError(
            f"{folder}/config.json sets tie_word_embeddings to true, but the stored {HEAD} differs "
            "from the embedding. To use the stored head, as transformers 5 does, set "
            "tie_word_embeddings to false. To ignore it, as transformers 4 does, remove the tensor."
        )
    parameter_names = {plain_name(name): name for name, _ in model.named_parameters()}
    return {parameter_names[name]: weight for name, weight in weights.items()}


def check_loaded(weight: Tensor, name: str, file: Path):
    # a sharded weight is a DTensor
    local_weight = cast(Any, weight).to_local() if hasattr(weight, "to_local") else weight
    # the sum is not finite if any value is NaN or infinite
    if not local_weight.sum(dtype=at_least_float32(weight.dtype)).isfinite():
        raise UserError(
            f"{file}: the tensor {name} contains NaN or infinite values. Download the model again, "
            "or save it again from an earlier state."
        )


def read_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) from a safetensors file; tensors are views into the memory-mapped file."""
    check_downloaded(file)
    try:
        with safe_open(file, framework="pt") as handle:
            names = list(handle.keys())
        # reopen the file for each tensor, to free previous tensors
        for name in names:
            with safe_open(file, framework="pt") as handle:
                tensor = handle.get_tensor(name)
            if tensor.dtype not in DTYPES.values():
                raise UserError(
                    f"{file}: the tensor {name:.80} is {tensor.dtype}, but quantized checkpoints "
                    "are not supported. Use the bfloat16 checkpoint from which it was quantized."
                )
            yield hub_name(name), tensor
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: not a complete safetensors file ({error}). Download or save it again.") from error


def load_processor(folder: str | Path, min_pixels: int | None = None, max_pixels: int | None = None) -> Processor:
    """Load tokenizer, chat template and image settings from a local folder or a hub repository.

    Args:
        min_pixels, max_pixels: pixels per image, default: preprocessor_config.json.
    """
    folder = find_folder(folder)
    with unchanged(folder):
        config = read_config(folder)
        family = find_family(config.model_type)
        image_file, image_values = image_settings(folder)
        images = read_image_processor({**family.images, **image_values}, str(image_file), min_pixels, max_pixels)
        video_file, video_values = video_settings(folder)
        images = replace(images, videos=family.read_videos(video_values, str(video_file), images))
        tokenizer = load_tokenizer(folder / "tokenizer.json")
        with error_context(f"{folder}/config.json"):
            for name, field in PATCHES.items():
                value = getattr(config.vision_config, field)
                expected = getattr(images, name)
                require(value == expected, f"vision_config.{field}", value, f"{expected} as in {image_file.name}")
            require(
                config.vocab_size >= len(tokenizer),  # more embedding rows than tokens are allowed
                "vocab_size",
                config.vocab_size,
                f"at least {len(tokenizer)}, the tokenizer's number of tokens; if you have added tokens, call "
                f"model.resize_token_embeddings({len(tokenizer)}) in transformers, and save the model again",
            )
            for name in ("image_token_id", "video_token_id"):
                value = getattr(config, name)
                expected = tokenizer.special_tokens[CONTROL_TOKENS[name]]
                require(value == expected, name, value, f"{expected} as in tokenizer.json")
        template = ChatTemplate.from_folder(folder, tokenizer.special_tokens, family.template)
        tokenizer.files |= carried_files(folder)
        tokenizer.reserve(template.controls)
        return Processor(tokenizer, images, template, box_space=family.box_space, end_token_ids=end_token_ids(folder))


def check_same_inputs(folder: str | Path, policy: VisionLanguageModel, processor: Processor, *more_fields: str):
    """Raise UserError unless the model in a folder accepts the policy's token ids and image patches.

    Args:
        more_fields: further ModelConfig fields to compare.
    """
    folder = find_folder(folder)
    config = read_config(folder)
    for name in (*INPUT_FIELDS, *more_fields):
        value = attrgetter(name)(config)
        expected = attrgetter(name)(policy.config)
        require(value == expected, f"{folder}/config.json: {name}", value, f"{expected!r}, as in the policy")
    ids = processor.tokenizer.backend.get_vocab()
    other_ids = load_tokenizer(folder / "tokenizer.json").backend.get_vocab()
    differing = [token for token in ids if other_ids.get(token) != ids[token]]
    if differing:
        raise UserError(
            f"{folder}: the tokenizer of this model does not match the policy's: {len(differing)} "
            "tokens of the policy have different ids in this model or are missing, for example "
            f"{differing[0]!r}; use a model with the policy's tokenizer"
        )


def end_token_ids(folder: Path) -> list[int]:
    """Return eos_token_id from generation_config.json as a list, [] if missing."""
    file = folder / "generation_config.json"
    value = read_json(file).get("eos_token_id") if file.is_file() else None
    ids = value if isinstance(value, list) else [] if value is None else [value]
    require(
        all(isinstance(token_id, int) and token_id >= 0 for token_id in ids),
        f"{file}: eos_token_id",
        value,
        "the id of a token, or a list of ids",
    )
    return ids


def carried_files(folder: Path, names: re.Pattern = CARRIED) -> dict[str, bytes]:
    """Read files that are later copied into checkpoints, because the model folder may be deleted during the run."""
    files = {}
    for file in sorted(folder.iterdir()):
        if names.fullmatch(file.name) and file.is_file():
            if file.resolve().parent.name != "blobs":  # in a hub cache, files are links to blobs/
                file_inside(folder, file.name)
            files[file.name] = file.read_bytes()
    return files


def file_weights(model: VisionLanguageModel) -> dict[str, Weight]:
    """Return {tensor name in checkpoint files: weight}."""
    family = family_of(model)
    file_name = module_name if family.files_have_module_names else str
    weights = {file_name(name): weight for name, weight in plain_weights(model).items()}
    family.stack_tensors(weights, model.config)
    return weights


def check_finite(name: str, tensor: Tensor, folder: str | Path):
    """Raise UserError for a non-finite weight: a diverged model is never saved."""
    if not tensor.isfinite().all():
        raise UserError(
            f"{folder} was not saved, because the tensor {name} is not finite. Existing files were "
            "not changed. The run has probably diverged; try a lower learning rate."
        )


def write_settings(folder: Path, model: VisionLanguageModel, processor: Processor):
    """Write all files of a model folder except the weights."""
    dtype = str(model.save_dtype or model.lm_head.weight.dtype).removeprefix("torch.")
    write_json(folder / "config.json", {**config_json.to_dict(model.config), "torch_dtype": dtype})
    tokenizer = processor.tokenizer
    tokenizer.save(folder / "tokenizer.json")
    write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    )
    template = processor.template
    if template.text in (DEFAULT, DEFAULT_QWEN3):
        (folder / "chat_template.jinja").write_bytes(template.text.encode())
    # overwrite the files written above with those copied from the loaded model folder
    for name, content in tokenizer.files.items():
        (folder / name).write_bytes(content)
    images = processor.image_processor
    write_json(folder / "preprocessor_config.json", write_image_processor(images, processor.sizes.get("image", {})))
    if videos := family_of(model).write_videos(images, processor.sizes.get("video", {})):
        write_json(folder / "video_preprocessor_config.json", videos)
    if Path(template.source).name == "processor_config.json":
        # processor_config.json is not copied, because its image settings may be outdated
        write_json(folder / "chat_template.json", {"chat_template": template.text})
    # a base model's generation_config.json may lack <|im_end|>, which ends trained completions
    generation = json.loads(tokenizer.files.get("generation_config.json", "{}"))
    generation.setdefault("pad_token_id", tokenizer.special_tokens["<|endoftext|>"])
    generation["eos_token_id"] = list(processor.stop_token_ids)
    write_json(folder / "generation_config.json", generation)
