"""A Hugging Face folder <-> a model, by the names that both already share.

Tensors by name <-> safetensors files: one file, or shards with an index."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from minivlmrl.chat import Tokenizer
from minivlmrl.data.template import ChatTemplate
from minivlmrl.decoder import Qwen2_5_VL
from minivlmrl.hub.atomic_folder import replacing
from minivlmrl.hub.model_config import ModelConfig
from minivlmrl.hub.folder import find_folder, read_carried, read_index, read_json, write_json
from minivlmrl.hub.preprocessor import checked, read_image_processor, write_image_processor
from minivlmrl.hub.tokenizer import load_tokenizer
from minivlmrl.image import ImageProcessor
from minivlmrl.rows import Processor
from minivlmrl.scale.sharding import Sharding, assign

MAX_SHARD_SIZE = 5 * 10**9  # bytes of one file, as on the hub
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TOKENIZER_CONFIG = {
    "tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
}  # fmt: skip
CONTROL_TOKENS = {
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>", "eos_token_id": "<|im_end|>",
    "bos_token_id": "<|endoftext|>", "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}  # fmt: skip


def load_model(
    folder: str | Path, dtype: torch.dtype | None = None, device="cpu", sharding: Sharding | None = None
) -> Qwen2_5_VL:
    """Build the model that a folder describes and fill it with the folder's weights.

    The weights go one by one from the file to where they stay: memory never holds a second copy of more than one.

    Args:
        folder: holds config.json and model.safetensors, or shards with model.safetensors.index.json; or the id of a
            repository that does, see find_folder.
        dtype: of the parameters; by default the config's torch_dtype.
        sharding: cuts the model; then each rank reads its own parts of the files alone, onto sharding.device.
    Raises:
        ValueError: a file is missing or unreadable; a tensor is missing, unexpected, there twice or of another shape
            (named); the head is tied to the embedding, but another one is stored.
    """
    folder = find_folder(folder)
    config = _read_config(folder)
    if dtype is None and config.torch_dtype not in DTYPES:
        raise ValueError(f"{folder}/config.json: torch_dtype {config.torch_dtype!r} is not one of {sorted(DTYPES)}")
    files = weight_files(folder)
    stored = sum(len(tensor_names(file)) for file in files)
    layers = config.num_hidden_layers + config.vision_config.depth
    if layers > stored:
        raise ValueError(f"{folder}/config.json: {layers} layers, but the safetensors hold {stored} tensors")
    try:
        with torch.device("meta"):
            model = Qwen2_5_VL(config).to(dtype or DTYPES[config.torch_dtype])
    except (RuntimeError, OverflowError, TypeError) as error:
        raise ValueError(f"{folder}/config.json: there is no model of these sizes ({error})") from error
    if sharding is not None:
        sharding.shard(model)
    place = sharding.part if sharding else lambda tensor, wanted: tensor.to(device, wanted.dtype, copy=True)
    assign(model, _read_weights(folder, files, model, place))
    return model


def _read_config(folder: Path) -> ModelConfig:
    content = read_json(folder / "config.json")
    try:
        return ModelConfig.from_dict(content)
    except ValueError as error:  # it begins with the file's name
        raise ValueError(f"{folder}/{error}") from error


def _read_weights(
    folder: Path, files: list[Path], model: Qwen2_5_VL, place: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Tensor]:
    """A tensor for each parameter of a model on the meta device.

    Args:
        place: makes it of a view of the file and the parameter that it is for.
    """
    expected = dict(model.named_parameters())  # a tied head is there once, under the embedding's name
    tied_head = {HEAD: expected[EMBEDDING]} if model.config.tie_word_embeddings else {}  # some folders store it as well
    found: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in read_tensors(file):
            wanted = expected.get(name, tied_head.get(name))
            if wanted is None:
                raise ValueError(f"{file}: unexpected tensor {name:.80}")
            if name in found:
                raise ValueError(f"{file}: tensor {name} is there twice; take the wrong one out of the folder")
            if tensor.shape != wanted.shape:
                shapes = tuple(tensor.shape), tuple(wanted.shape)
                raise ValueError(f"{file}: tensor {name} has shape {shapes[0]}, config.json asks for {shapes[1]}")
            found[name] = place(tensor, wanted)
    missing = expected.keys() - found.keys()
    if missing:
        where = f"{files[0]}{' and its other shards' if len(files) > 1 else ''}"
        raise ValueError(f"{where}: {len(missing)} tensor(s) missing that config.json asks for, first {min(missing)}")
    if tied_head and HEAD in found:
        _check_tied_head(folder, found.pop(HEAD), found[EMBEDDING])
    return found


def _check_tied_head(folder: Path, head: Tensor, embedding: Tensor):
    """transformers 4 drops a stored head that is to be tied, transformers 5 uses it: unless equal, one of them errs."""
    head, embedding = (x.to_local() if isinstance(x, DTensor) else x for x in (head, embedding))
    if not torch.equal(head, embedding):
        raise ValueError(
            f"{folder}/config.json has tie_word_embeddings true, but the safetensors hold an {HEAD} that differs from "
            f"{EMBEDDING}: set tie_word_embeddings to false to use it (as transformers 5 does), or take it out of the "
            "file to drop it (as transformers 4 does)"
        )


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
    values = read_json(Path(config_file)) | {"vocab_size": len(tokenizer)}
    for name, token in CONTROL_TOKENS.items():
        values[name] = tokenizer.special_tokens[token]
    config = ModelConfig.from_dict(values)
    model = Qwen2_5_VL(config)
    model.initialize(torch.Generator().manual_seed(seed))
    vision = config.vision_config
    bounds = {"min_pixels": min_pixels or (vision.patch_size * vision.spatial_merge_size) ** 2}
    if max_pixels:
        bounds["max_pixels"] = max_pixels
    images = ImageProcessor(vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size, **bounds)
    return model, Processor(tokenizer, checked(images, "data"))


def load_processor(folder: str | Path, min_pixels: int | None = None, max_pixels: int | None = None) -> Processor:
    """Read tokenizer, chat template and image settings of a folder or repository, see find_folder.

    Without a chat template in the folder Qwen's default of data/chat.py is used.

    Args:
        min_pixels, max_pixels: bounds of an image's area; they override the folder's.
    Raises:
        ValueError: a file is missing or unreadable (named).
    """
    folder = find_folder(folder)
    file, settings = _image_settings(folder)
    images = read_image_processor(settings, str(file), min_pixels, max_pixels)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    template = ChatTemplate.from_folder(folder, tokenizer.special_tokens)
    return Processor(tokenizer, images, template, carried=read_carried(folder))


def _image_settings(folder: Path) -> tuple[Path, dict]:
    """What preprocessor_config.json says, or processor_config.json, where transformers 5 puts it; and which it was."""
    file, newer = folder / "preprocessor_config.json", folder / "processor_config.json"
    if file.is_file() or not newer.is_file():
        return file, read_json(file)
    settings = read_json(newer).get("image_processor")
    if not isinstance(settings, dict):
        raise ValueError(f"{newer}: it needs image_processor, an object with patch_size and the pixel bounds")
    return newer, settings


def check_fits(folder: str | Path, processor: Processor):
    """Refuse a folder whose model and processor do not speak of the same patches and tokens.

    Args:
        processor: as read from the folder, see load_processor.
    Raises:
        ValueError: names the files and everything in which they differ.
    """
    folder = find_folder(folder)
    config, images, special = _read_config(folder), processor.image_processor, processor.special
    vision, tokens, file = config.vision_config, len(processor.tokenizer), _image_settings(folder)[0].name
    pairs = [
        ("vision_config.patch_size", vision.patch_size, f"{file} has patch_size", images.patch_size),
        ("vision_config.temporal_patch_size", vision.temporal_patch_size, f"{file} has temporal_patch_size",
         images.temporal_patch_size),
        ("vision_config.spatial_merge_size", vision.spatial_merge_size, f"{file} has merge_size", images.merge_size),
        ("image_token_id", config.image_token_id, "tokenizer.json has <|image_pad|>", special["<|image_pad|>"]),
        ("video_token_id", config.video_token_id, "tokenizer.json has <|video_pad|>", special["<|video_pad|>"]),
    ]  # fmt: skip
    wrong = [f"{name} is {ours}, but {other} {theirs}" for name, ours, other, theirs in pairs if ours != theirs]
    if config.vocab_size < tokens:  # more are common: embeddings that no token uses
        wrong.append(f"vocab_size is {config.vocab_size}, but tokenizer.json has {tokens} tokens")
    if wrong:
        raise ValueError(f"{folder}/config.json: {'; '.join(wrong)}; take these files from one model")


def save_checkpoint(
    folder: str | Path,
    model: Qwen2_5_VL,
    processor: Processor,
    more: Callable[[Path], None] = lambda aside: None,
    max_shard_size: int = MAX_SHARD_SIZE,
    weights: dict[str, Tensor] | None = None,
):
    """Write a folder that load_model, transformers and vLLM read; all of it or nothing, see replacing.

    Files that the processor was read with, its tokenizer, chat template and generation settings among them, are written
    as they were.

    Args:
        more: writes what else belongs into the folder, given the one aside.
        max_shard_size: bytes of one file of weights.
        weights: by name, where the model has only parts of them.
    Raises:
        ValueError: at `folder` is something else than a checkpoint.
        OSError: the disk is full or broken; an earlier checkpoint at `folder` stays.
    """
    dtype = next(name for name, dtype in DTYPES.items() if dtype == model.lm_head.weight.dtype)
    with replacing(folder) as aside:
        write_json(aside / "config.json", {**model.config.to_dict(), "torch_dtype": dtype})
        # named_parameters lists a tied head once, under the embedding's name, as the hub's checkpoints do
        write_weights(aside, dict(model.named_parameters()) if weights is None else weights, max_shard_size)
        _write_processor(aside, processor)
        more(aside)


def _write_processor(folder: Path, processor: Processor):
    write_json(folder / "preprocessor_config.json", write_image_processor(processor.image_processor))
    for name, content in processor.carried.items():
        (folder / name).write_bytes(content)
    template, end_of_text = processor.template, processor.special["<|endoftext|>"]
    if template is not None and Path(template.source).name == "processor_config.json":
        # that file is not carried, for the image settings beside it may be others now; this is the next that is asked
        write_json(folder / "chat_template.json", {"chat_template": template.text})
    if "tokenizer.json" not in processor.carried:
        processor.tokenizer.backend.save(str(folder / "tokenizer.json"))
    generation = {"eos_token_id": list(processor.stop_token_ids), "pad_token_id": end_of_text}
    ours = {"tokenizer_config.json": TOKENIZER_CONFIG, "generation_config.json": generation}
    for name in ours.keys() - processor.carried.keys():
        write_json(folder / name, ours[name])


ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def weight_files(folder: Path) -> list[Path]:
    """The files with a folder's tensors: model.safetensors if it is there, as in transformers, else the index's shards.

    Raises:
        ValueError: there is neither, or the index is broken or names a file that is missing.
    """
    if (folder / ONE_FILE).is_file():
        return [folder / ONE_FILE]
    if (folder / INDEX).is_file():
        files = [folder / name for name in read_index(folder / INDEX)]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ValueError(f"{folder / INDEX}: {len(missing)} of its {len(files)} files missing, first {missing[0]}")
        return files
    if any(folder.glob("pytorch_model*.bin")):
        raise ValueError(
            f"{folder}: its weights are pytorch_model.bin, which can run code when it is opened; convert them to "
            "safetensors, for example with transformers: from_pretrained, then save_pretrained"
        )
    raise ValueError(f"{folder / ONE_FILE}: no such file; a Hugging Face folder has its weights there")


def tensor_names(file: Path) -> list[str]:
    """Names of the tensors in a safetensors file, as they stand there (ValueError: see read_tensors)."""
    if not file.is_file():
        raise ValueError(f"{file}: no such file")
    try:
        with safe_open(file, framework="pt") as handle:
            return list(handle.keys())
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: not a whole safetensors file ({error})") from error


def read_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Go through a safetensors file, tensor by tensor.

    Returns:
        (name, tensor) pairs, names as on the hub. The tensor is a view of the file: copy it. The file is opened anew
        for each, since all that was touched of an open one counts as memory of this process.
    Raises:
        ValueError: the file is missing, not whole, or has a tensor of integers or of numbers under 16 bits.
    """
    for name in tensor_names(file):
        try:
            with safe_open(file, framework="pt") as handle:
                tensor = handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file}: tensor {name:.80} cannot be read ({error})") from error
        if tensor.dtype not in DTYPES.values():
            raise ValueError(
                f"{file}: tensor {name:.80} is {tensor.dtype}; quantised checkpoints are not read, take the one in "
                "bfloat16 that this was made of"
            )
        yield hub_name(name), tensor


def hub_name(name: str) -> str:
    """transformers >= 4.52 calls the same modules model.visual.* and model.language_model.* in memory."""
    for prefix, ours in (("model.visual.", "visual."), ("model.language_model.", "model.")):
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name


def write_weights(folder: Path, weights: Mapping[str, Tensor], max_shard_size: int):
    """Write tensors into model.safetensors, or into shards with an index if they are larger than one may be.

    Args:
        weights: by name, on any device; they are brought to the CPU shard by shard.
        max_shard_size: bytes; only a tensor that is larger alone makes a larger file.
    """
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in weights.items():
        if shards[-1] and size + tensor.nbytes > max_shard_size:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    if len(shards) == 1:
        _write(folder / ONE_FILE, weights, shards[0])
        return
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(folder / file, weights, names)
        weight_map |= dict.fromkeys(names, file)
    total_size = sum(tensor.nbytes for tensor in weights.values())
    write_json(folder / INDEX, {"metadata": {"total_size": total_size}, "weight_map": weight_map})


def _write(file: Path, weights: Mapping[str, Tensor], names: list[str]):
    tensors = {name: weights[name].detach().cpu().contiguous() for name in names}
    save_file(tensors, file, metadata={"format": "pt"})  # transformers 4 refuses a file that does not say its format
