"""A Hugging Face folder <-> a model, by the names that both already share."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minivlmrl.data.image import MEAN, STD, ImageProcessor
from minivlmrl.data.processor import Processor
from minivlmrl.data.tokenizer import Tokenizer
from minivlmrl.model.config import ModelConfig
from minivlmrl.model.qwen2_5_vl import Qwen2_5_VL
from minivlmrl.training.sharding import Sharding, assign

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}

CONTROL_TOKENS = {
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>", "eos_token_id": "<|im_end|>",
    "bos_token_id": "<|endoftext|>", "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}  # fmt: skip


def load_model(
    folder: str | Path, dtype: torch.dtype | None = None, device="cpu", sharding: Sharding | None = None
) -> Qwen2_5_VL:
    """Build the model that a folder describes and fill it with the folder's weights.

    Args:
        folder: holds config.json and model.safetensors, or shards with model.safetensors.index.json.
        dtype: of the parameters; by default the config's torch_dtype.
        sharding: cuts the model; then each rank reads its own parts of the files alone, onto sharding.device.
    Raises:
        ValueError: a file is missing or unreadable, or a tensor is missing, unexpected or of another shape (named).
    """
    config = ModelConfig.from_dict(_read_json(Path(folder) / "config.json"))
    if dtype is None and config.torch_dtype not in DTYPES:
        raise ValueError(f"{folder}/config.json: torch_dtype {config.torch_dtype!r} is not one of {sorted(DTYPES)}")
    with torch.device("meta"):
        model = Qwen2_5_VL(config).to(dtype or DTYPES[config.torch_dtype])
    if sharding is not None:
        sharding.shard(model)
    expected = {name: p for name, p in model.named_parameters(remove_duplicate=True)}
    weights = {}
    for file in _weight_files(Path(folder)):
        for name, tensor in read_tensors(file):
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue  # some folders store the tied head twice
            if name not in expected:
                raise ValueError(f"{file}: unexpected tensor {name}")
            if tensor.shape != expected[name].shape:
                found, wanted = tuple(tensor.shape), tuple(expected[name].shape)
                raise ValueError(f"{file}: tensor {name} has shape {found}, config.json asks for {wanted}")
            wanted = expected[name]
            own = sharding.part(tensor, wanted) if sharding else tensor.to(device, wanted.dtype, copy=True)
            weights[name] = own
    if missing := expected.keys() - weights.keys():
        raise ValueError(f"{folder}: {len(missing)} tensor(s) missing from the safetensors, first {min(missing)}")
    assign(model, weights)
    return model


def random_model(
    config_file: str | Path,
    tokenizer: Tokenizer,
    seed: int,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
) -> tuple[Qwen2_5_VL, Processor]:
    """Build the model of a config.json with random weights, for a tokenizer of its own.

    Args:
        config_file: its vocab_size and token ids are replaced by the tokenizer's.
        seed: of the weights.
        min_pixels, max_pixels: bounds of an image's area, by default one merged token and the hub's upper bound.
    """
    values = _read_json(Path(config_file)) | {"vocab_size": len(tokenizer)}
    for name, token in CONTROL_TOKENS.items():
        values[name] = tokenizer.token_id(token)
    config = ModelConfig.from_dict(values)
    model = Qwen2_5_VL(config)
    model.initialize(torch.Generator().manual_seed(seed))
    vision = config.vision_config
    bounds = {"min_pixels": min_pixels or (vision.patch_size * vision.spatial_merge_size) ** 2}
    if max_pixels:
        bounds["max_pixels"] = max_pixels
    images = ImageProcessor(vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size, **bounds)
    return model, Processor(tokenizer, images)


def load_processor(folder: str | Path, min_pixels: int | None = None, max_pixels: int | None = None) -> Processor:
    """Read tokenizer.json and preprocessor_config.json; the pixel bounds override those of the folder."""
    settings = _read_json(Path(folder) / "preprocessor_config.json")
    known = {name: settings[name] for name in ImageProcessor.__dataclass_fields__ if name in settings}
    size = settings.get("size") or {}  # newer files keep the pixel bounds under `size`
    bounds = {
        "min_pixels": min_pixels or known.get("min_pixels") or size.get("shortest_edge"),
        "max_pixels": max_pixels or known.get("max_pixels") or size.get("longest_edge"),
    }
    known.update({name: value for name, value in bounds.items() if value})
    return Processor(Tokenizer.from_file(Path(folder) / "tokenizer.json"), ImageProcessor(**known))


def save_checkpoint(
    folder: str | Path,
    model: Qwen2_5_VL,
    processor: Processor,
    more: Callable[[Path], None] = lambda aside: None,
    weights: dict[str, Tensor] | None = None,
):
    """Write a folder that load_model, transformers and vLLM read; all of it or nothing.

    Everything is written aside first and then renamed, so an earlier checkpoint at `folder` stays whole until then.

    Args:
        more: writes what else belongs into the folder, given the one aside.
        weights: by name, where the model has only parts of them.
    """
    folder = Path(folder)
    aside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    dtype = next(name for name, dtype in DTYPES.items() if dtype == model.lm_head.weight.dtype)
    _write_json(aside / "config.json", {**model.config.to_dict(), "torch_dtype": dtype})
    # named_parameters lists a tied head once, under the embedding's name, as the hub's checkpoints do
    weights = dict(model.named_parameters()) if weights is None else weights
    tensors = {name: weights[name].detach().cpu().contiguous() for name in weights}
    save_file(tensors, aside / "model.safetensors", metadata={"format": "pt"})
    processor.tokenizer.save(aside / "tokenizer.json")
    tokenizer_config = {
        "tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
    }  # fmt: skip
    _write_json(aside / "tokenizer_config.json", tokenizer_config)
    _write_json(aside / "preprocessor_config.json", _preprocessor_config(processor.image_processor))
    end_of_text = processor.special["<|endoftext|>"]
    generation = {"eos_token_id": list(processor.stop_token_ids), "pad_token_id": end_of_text}
    _write_json(aside / "generation_config.json", generation)
    more(aside)
    replaced = folder.with_name(folder.name + ".replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.rename(replaced)
    aside.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)


def _preprocessor_config(images: ImageProcessor) -> dict:
    settings = {name: getattr(images, name) for name in ImageProcessor.__dataclass_fields__}
    size = {"shortest_edge": images.min_pixels, "longest_edge": images.max_pixels}
    return {
        **settings,
        "size": size,
        "image_mean": list(MEAN),
        "image_std": list(STD),
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
    }


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(_read_json(index)["weight_map"].values()))]
    return [folder / "model.safetensors"]


def read_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) pairs of one safetensors file, by today's hub names (ValueError: it is missing or cut).

    A tensor is a view of the file, which is opened anew for each: all that was touched of an open one counts as memory.
    """
    if not file.is_file():
        raise ValueError(f"{file}: no such file; a Hugging Face folder has its weights there")
    try:
        with safe_open(file, framework="pt") as handle:
            names = list(handle.keys())
        for name in names:
            with safe_open(file, framework="pt") as handle:
                tensor = handle.get_tensor(name)
            yield _hub_name(name), tensor
    except SafetensorError as error:
        raise ValueError(f"{file}: not a whole safetensors file ({error})") from error


def _hub_name(name: str) -> str:
    """transformers >= 4.52 calls the same modules model.visual.* and model.language_model.* in memory."""
    return (
        name.removeprefix("model.")
        if name.startswith("model.visual.")
        else name.replace("model.language_model.", "model.")
    )


def _read_json(path: Path) -> dict:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; model.path must be a Hugging Face folder")
    try:
        return json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from error


def _write_json(path: Path, content: dict):
    path.write_text(json.dumps(content, indent=2) + "\n")
