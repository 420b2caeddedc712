"""A Hugging Face folder <-> a model and its processor, by the names that both share."""

import math
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from minivlmrl.adapters.lora import (
    LoRALinear,
    adapters,
    base_weights,
    full,
    plain_name,
    plain_weights,
)
from minivlmrl.adapters.peft_folder import gather_adapter
from minivlmrl.data.template import DEFAULT, DEFAULT_QWEN3, ChatTemplate
from minivlmrl.hub.family import CONTROL_TOKENS, FAMILIES, Family, family_of, hub_name, memory_name
from minivlmrl.hub.folder import (
    ASKED,
    INDEX,
    find_folder,
    image_settings,
    read_json,
    replacing,
    save_tensors,
    video_settings,
    weight_files,
    write_json,
)
from minivlmrl.hub.model_config import ModelConfig
from minivlmrl.hub.preprocessor import read_image_processor, write_image_processor
from minivlmrl.hub.qwen3_5 import GatedDeltaNet
from minivlmrl.hub.qwen3_vl import write_videos
from minivlmrl.hub.recipe_values import naming, require
from minivlmrl.hub.tokenizer import load_tokenizer
from minivlmrl.image import ImageProcessor
from minivlmrl.rows import Processor
from minivlmrl.scale.ranks import World
from minivlmrl.scale.sharding import Sharding, assign, reshard

INTO_RESIDUAL = ("o_proj", "out_proj", "down_proj", "mlp.fc2", "mlp.linear_fc2", "attn.proj")
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# files of a model besides its weights: a checkpoint that we write keeps those it was read with
JSON = "(tokenizer|generation|video_preprocessor)_config|tokenizer|vocab|added_tokens|special_tokens_map|chat_template"
TEXT = rf"merges\.txt|chat_template\.jinja|{re.escape(ASKED)}|LICENSE.*|NOTICE.*"
CARRIED = re.compile(rf"({JSON})\.json|{TEXT}")
# of ImageProcessor -> of VisionConfig
PATCHES = {name: name for name in ("patch_size", "temporal_patch_size")}
PATCHES["merge_size"] = "spatial_merge_size"


def load_model(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    device="cpu",
    sharding: Sharding | None = None,
    adapt=None,
) -> nn.Module:
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
        model = _make(config, folder / "config.json").to(dtype or DTYPES[config.torch_dtype])
    if adapt is not None:
        adapt(model)
    if sharding is not None:
        sharding.shard(model)
    part = sharding.part if sharding else lambda x, like: x.to(device, like.dtype, copy=True)
    assign(model, _read_weights(folder, files, model, part, device))
    model.folder = folder.resolve()  # from which save_model copies tensors that no module has
    return model


def _make(config: ModelConfig, where: str | Path) -> nn.Module:
    try:
        return FAMILIES[config.model_type].model(config)
    except (RuntimeError, OverflowError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{where}: no model has these sizes ({reason})") from error


def read_config(folder: Path) -> ModelConfig:
    """Read the config.json of a folder (ValueError: see ModelConfig.from_dict)."""
    return ModelConfig.from_dict(read_json(folder / "config.json"), f"{folder}/config.json")


def _read_weights(
    folder: Path, files: list[Path], model: nn.Module, part: Callable, device
) -> dict[str, Tensor]:
    """Read a tensor for each parameter; part(view of the file, parameter) is what is kept."""
    # a tied head is there once, under the embedding's name
    expected = base_weights(model)
    tied = model.config.tie_word_embeddings
    weights: dict[str, Tensor] = {}
    read_names = set()  # of those in `weights`, and of those that a quantized layer has packed
    for file in files:
        for name, tensor in read_tensors(file):
            # some folders have the tied head too
            like = expected.get(EMBEDDING if tied and name == HEAD else name)
            if name.startswith(family_of(model).unread):
                continue
            if like is None:
                raise ValueError(f"{file}: unexpected tensor {name:.80}")
            if name in read_names:
                raise ValueError(f"{file}: tensor {name} is there twice; take the wrong one out")
            if tensor.shape != like.shape:
                shape = tuple(tensor.shape)
                asked = tuple(like.shape)
                raise ValueError(f"{file}: tensor {name} has shape {shape}, config.json {asked}")
            read_names.add(name)
            if isinstance(like, Tensor):
                weights[name] = part(tensor, like)
            else:
                like.read(tensor.to(device), part)
    if missing := expected.keys() - read_names:
        raise ValueError(f"{folder}: {len(missing)} tensor(s) missing, first {min(missing)}")
    # transformers 4 drops a stored head that is to be tied, transformers 5 uses it: they must agree
    if tied and HEAD in weights and not torch.equal(weights.pop(HEAD), weights[EMBEDDING]):
        has = f"tie_word_embeddings true, but there is another {HEAD}"
        cure = "set this to false to use it (as transformers 5), or take it out (as transformers 4)"
        raise ValueError(f"{folder}/config.json has {has}: {cure}")
    names = {plain_name(name): name for name, _ in model.named_parameters()}
    return {names[name]: weight for name, weight in weights.items()}


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
                cure = "quantised ones are not read, take the bfloat16 one that this was made of"
                raise ValueError(f"{file}: tensor {name:.80} is {tensor.dtype}; {cure}")
            yield hub_name(name), tensor
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: not a whole safetensors file ({error})") from error


def _unread_tensors(model: nn.Module) -> dict[str, Tensor]:
    """View the tensors of a model's folder that no module has: mtp.*, the drafter of Qwen3.5."""
    folder = getattr(model, "folder", None)
    names = family_of(model).unread
    if folder is None or not names:
        return {}
    if not folder.is_dir():
        warnings.warn(f"{folder} is gone, saved without its {', '.join(names)}", stacklevel=3)
        return {}
    read = chain.from_iterable(map(read_tensors, weight_files(folder)))
    return {name: tensor for name, tensor in read if name.startswith(names)}


def random_model(
    config_file: str, tokenizer, seed: int, min_pixels=None, max_pixels=None
) -> tuple[nn.Module, Processor]:
    """Build the model of a config.json with random weights for a tokenizer, and its Processor."""
    values = read_json(Path(config_file)) | {"vocab_size": len(tokenizer)}
    config = ModelConfig.from_dict(values, str(config_file))
    ids = {name: tokenizer.special_tokens[token] for name, token in CONTROL_TOKENS.items()}
    size = max(len(tokenizer), config.vocab_size)  # that of a text_config may be larger
    config = replace(config, vocab_size=size, **ids)
    family = FAMILIES[config.model_type]
    model = _make(config, config_file)
    initialize(model, torch.Generator().manual_seed(seed))
    settings = {name: getattr(config.vision_config, field) for name, field in PATCHES.items()}
    smallest = (settings["patch_size"] * settings["merge_size"]) ** 2  # one merged token
    bounds = min_pixels or smallest, max_pixels or ImageProcessor.max_pixels
    images = read_image_processor(family.images | settings, "data", *bounds)
    images.videos = family.read_videos({}, "data", images)
    return model, Processor(tokenizer, images, default_template(family), box_space=family.box_space)


@torch.no_grad()
def initialize(model: nn.Module, generator: torch.Generator):
    """Draw random weights: matrices N(0, 1/fan_in), embeddings N(0, 0.02^2), norms 1, biases 0.

    The matrices that end a part of a block have 1 / (2 x blocks) of that variance.
    """
    for module in model.modules():
        if isinstance(module, nn.RMSNorm | nn.LayerNorm | GatedDeltaNet):
            module.reset_parameters()
    for name, parameter in model.named_parameters():
        if name.endswith(("embed_tokens.weight", "pos_embed.weight")):
            parameter.normal_(0, 0.02, generator=generator)
        elif parameter.dim() > 1:
            blocks = model.visual.blocks if name.startswith("visual.") else model.model.layers
            ends = name.removesuffix(".weight").endswith(INTO_RESIDUAL)
            scale = 1 / math.sqrt(2 * len(blocks)) if ends else 1.0
            parameter.normal_(0, scale / math.sqrt(parameter[0].numel()), generator=generator)
        elif name.endswith(".bias"):
            parameter.zero_()


def load_processor(
    folder: str | Path, min_pixels: int | None = None, max_pixels: int | None = None
) -> Processor:
    """Read tokenizer, chat template and image settings of a folder (ValueError: no fit)."""
    folder = find_folder(folder)
    config = read_config(folder)
    (file, settings) = image_settings(folder)
    family = FAMILIES[config.model_type]
    vision = config.vision_config
    settings = family.images | settings
    images = read_image_processor(settings, str(file), min_pixels, max_pixels)
    file_of_videos, settings = video_settings(folder)
    images.videos = family.read_videos(settings, str(file_of_videos), images)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    with naming(f"{folder}/config.json"):
        for name, ours in PATCHES.items():
            said = getattr(vision, ours)
            known = getattr(images, name)
            require(said == known, f"vision_config.{ours}", said, f"{known} as in {file.name}")
        size = config.vocab_size
        words = f"{len(tokenizer)} as in tokenizer.json, or more"
        require(size >= len(tokenizer), "vocab_size", size, words)  # some that no token uses
        for name in ("image_token_id", "video_token_id"):
            said = getattr(config, name)
            known = tokenizer.special_tokens[CONTROL_TOKENS[name]]
            require(said == known, name, said, f"{known} as in tokenizer.json")
    template = ChatTemplate.from_folder(folder, tokenizer.special_tokens)
    for file in sorted(folder.iterdir()):
        if CARRIED.fullmatch(file.name) and file.is_file():
            target = file.resolve()
            if target.parent != folder.resolve() and target.parent.name != "blobs":
                raise ValueError(f"{file}: a link to {target}; put the file itself there")
            # now: the folder may be gone at the next save
            tokenizer.files[file.name] = file.read_bytes()
    template = template or default_template(family)
    return Processor(tokenizer, images, template, box_space=family.box_space)


def default_template(family: Family) -> ChatTemplate | None:
    """Return the chat template of a folder that has none; None: chat.render."""
    return None if family.default_system else ChatTemplate(DEFAULT_QWEN3, "the default template")


def save_model(
    folder,
    model: nn.Module,
    processor: Processor,
    world=None,
    base: str | None = None,
    more=None,
    max_shard_size=5 * 10**9,
):
    """Write a folder for transformers and vLLM, adapters merged and as PEFT's; all or nothing.

    Args:
        world: all its ranks call this and the first one writes; None: this process alone.
        base: the folder or repository that adapters are on, which PEFT's folder names.
        more: (folder) -> writes what else belongs into it.
        max_shard_size: bytes of one file of weights.
    """
    reshard(model)
    weights = file_weights(model)
    write_adapter = gather_adapter(model, base) if adapters(model) else None
    empty = partial(torch.empty_like, device="meta")
    shapes = {}
    for name, weight in weights.items():
        shapes[name] = empty(weight.base.weight if isinstance(weight, LoRALinear) else weight)
    world = world or World()
    unread = world.on_main(lambda: _unread_tensors(model)) or {}
    shapes |= {name: empty(tensor) for name, tensor in unread.items()}
    shards = split_torch_state_dict_into_shards(shapes, max_shard_size=max_shard_size)
    shards = world.gather_objects(shards)[0]
    with ExitStack() as saving:

        def write(file: str):
            check_finite({name: x for name, x in tensors.items() if name in weights}, folder)
            save_tensors(tensors, new / file)

        def finish():
            write_settings(new, model, processor)
            if shards.is_sharded:
                index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
                write_json(new / INDEX, index)
            if write_adapter is not None:
                write_adapter(new / "adapter")
                if (asked := new / ASKED).exists():
                    shutil.copy(asked, new / "adapter")
            if more is not None:
                more(new)
            saving.pop_all().close()

        new = world.on_main(lambda: saving.enter_context(replacing(folder)))
        # one file after the other; torch's get_model_state_dict would gather all
        for file, names in shards.filename_to_tensors.items():
            tensors = {name: unread[name] for name in names if name in unread}
            for name in filter(weights.__contains__, names):
                weight = full(weights[name])
                if world.is_main:
                    tensors[name] = weight.cpu().contiguous()
            world.on_main(partial(write, file))
        world.on_main(finish)


def file_weights(model: nn.Module) -> dict[str, object]:
    """Name each weight of the plain model as files of its family do: see plain_weights."""
    name_of = memory_name if family_of(model).memory_names else str
    return {name_of(name): weight for name, weight in plain_weights(model).items()}


def check_finite(tensors: dict[str, Tensor], where: object):
    """Refuse to save weights of a run that has diverged (ValueError)."""
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            cause = f"not saved, {name} is not finite"
            raise ValueError(f"{where}: {cause}; what was there is untouched")


def write_settings(folder: Path, model: nn.Module, processor: Processor):
    """Write all files of a model's folder but its weights."""
    dtype = str(model.lm_head.weight.dtype).removeprefix("torch.")
    write_json(folder / "config.json", {**model.config.to_dict(), "torch_dtype": dtype})
    images, template, tokenizer = processor.image_processor, processor.template, processor.tokenizer
    carried = tokenizer.files
    for name, content in carried.items():
        (folder / name).write_bytes(content)
    write_json(folder / "preprocessor_config.json", write_image_processor(images))
    if images.videos is not None:
        write_json(folder / "video_preprocessor_config.json", write_videos(images))
    if template is not None and Path(template.source).name == "processor_config.json":
        # not carried: its image settings may be others now; this is the next that a loader reads
        write_json(folder / "chat_template.json", {"chat_template": template.text})
    text = DEFAULT if template is None else template.text
    if text in (DEFAULT, DEFAULT_QWEN3) and "chat_template.jinja" not in carried:
        (folder / "chat_template.jinja").write_bytes(text.encode())
    if "tokenizer.json" not in carried:
        tokenizer.backend.save(str(folder / "tokenizer.json"))
    pad = tokenizer.special_tokens["<|endoftext|>"]
    generation = {"eos_token_id": list(processor.stop_token_ids), "pad_token_id": pad}
    tokens = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    ours = {"tokenizer_config.json": {"tokenizer_class": "Qwen2Tokenizer", **tokens}}
    ours["generation_config.json"] = generation
    for name in ours.keys() - carried.keys():
        write_json(folder / name, ours[name])
