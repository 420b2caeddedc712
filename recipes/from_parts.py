"""Build a vision-language model from a text model's decoder and a new vision tower.

    python recipes/from_parts.py Qwen2.5-0.5B-Instruct/ my-vlm/             # a Hugging Face folder
    python recipes/from_parts.py qwen2.5-0.5b-instruct-q4_k_m.gguf my-vlm/  # a GGUF file; pip install gguf
    python recipes/from_parts.py Qwen3-0.6B/ my-vlm/ --depth=12 --width=384 --heads=6

Qwen2-VL and Qwen2.5-VL have the same decoders as Qwen2 and Qwen2.5, and Qwen3-VL has the same decoder as Qwen3. For
text, whose three positions (time, height, width) are equal, M-RoPE is the usual RoPE. Therefore the new model computes
the same logits as the text model, until training changes its weights. The tower and its merger are random, so the model
cannot use images before they are trained. docs/notes/from_parts.md explains this script.
"""

import argparse
import json
import re
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models
from torch import Tensor

from minivlmrl.config.parsing import build as build_checked
from minivlmrl.data.tokenizer import SPECIAL_TOKENS, Tokenizer, load_tokenizer, qwen2_backend
from minivlmrl.errors import out_of_memory
from minivlmrl.files import weight_files
from minivlmrl.json_files import read_json
from minivlmrl.model import config_json
from minivlmrl.model.build import model_from_config, random_model
from minivlmrl.model.checkpoint import EMBEDDING, HEAD, read_tensors, save_model

FAMILIES = {"qwen2": ("qwen2_5_vl", "qwen2_vl"), "qwen3": ("qwen3_vl",)}  # the text model's model_type -> families
Count = Annotated[int, ">= 1"]
Positive = Annotated[float, "(0, inf)"]


@dataclass
class Sizes:
    """Keys of a text model's config.json that describe its decoder; other keys are ignored."""

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    rope_theta: Positive
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    rms_norm_eps: Positive | None = None
    max_position_embeddings: Count | None = None
    tie_word_embeddings: bool | None = None


# GGUF's tensor names -> our names; {} is the layer number
GGUF_TENSORS = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": "model.norm.weight",
    "output.weight": HEAD,
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
    "blk.{}.attn_q_norm": "model.layers.{}.self_attn.q_norm",
    "blk.{}.attn_k_norm": "model.layers.{}.self_attn.k_norm",
    "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
    "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
}
# fields in Sizes -> GGUF's names, after "qwen2." or "qwen3."
GGUF_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
}
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # types of tokens in a GGUF file
# types of values in the header of a GGUF file: bytes of each number, and two types without a fixed size
NUMBERS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
TEXT, LIST = 8, 9
MOST_DIMENSIONS = 4  # maximum number of dimensions for a tensor in a GGUF file


@dataclass
class TextModel:
    """A text model as it was read: sizes, weights and tokenizer."""

    source: Path
    model_type: str  # qwen2 or qwen3
    sizes: dict[str, Any]  # the fields in Sizes that are set
    weights: dict[str, Tensor]  # by our decoder's names
    tokenizer: Tokenizer


@dataclass
class Tower:
    """Sizes for the new vision tower."""

    depth: int = 6  # blocks
    width: int = 256  # the blocks' hidden size; their MLPs are four times as wide
    heads: int = 4
    patch_size: int = 14  # pixels


def read_text_model(source: Path) -> TextModel:
    """Read a Hugging Face folder or a GGUF file.

    Raises:
        ValueError: the source is neither, or the model's type is unknown.
    """
    if source.is_dir():
        return read_folder(source)
    if source.suffix == ".gguf" and source.is_file():
        return read_gguf(source)
    raise ValueError(f"{source} is neither a folder with config.json nor a .gguf file")


def check_model_type(model_type: object, source: Path):
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(f"{source}: the text model is {model_type!r}, but it must be {' or '.join(FAMILIES)}")


def read_folder(folder: Path) -> TextModel:
    """Read a Hugging Face folder, with config.json, tokenizer.json and safetensors files."""
    config = read_json(folder / "config.json")
    check_model_type(config.get("model_type"), folder / "config.json")
    if config.get("use_sliding_window"):
        raise ValueError(f"{folder / 'config.json'}: use_sliding_window is true, which is not supported")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{folder / 'config.json'}: rope_parameters is {rope!r:.60}, but it must be an object")
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ValueError(f"{folder / 'config.json'}: the rotary embedding is scaled ({rope}), which is not supported")
    sizes = check_sizes({"rope_theta": rope.get("rope_theta")} | config, folder / "config.json")
    weights = {name: tensor.clone() for file in weight_files(folder) for name, tensor in read_tensors(file)}
    if sizes.get("tie_word_embeddings"):
        weights.pop(HEAD, None)
    check_embedding(weights, folder)
    tokenizer = load_tokenizer_with_images(folder / "tokenizer.json")
    return TextModel(folder, config["model_type"], sizes, weights, tokenizer)


def check_sizes(values: dict, where: Path) -> dict[str, Any]:
    """Select the fields in Sizes, and raise ValueError if a field is missing or has a wrong type."""
    values = {name: values[name] for name in Sizes.__dataclass_fields__ if values.get(name) is not None}
    sizes = build_checked(Sizes, values, str(where), json=True)
    return {name: value for name, value in vars(sizes).items() if value is not None}


def load_tokenizer_with_images(file: Path) -> Tokenizer:
    """Load a tokenizer.json, and add the control tokens that it lacks, such as <|image_pad|> in Qwen2."""
    tokenizer = load_tokenizer(file, add_control_tokens=True)
    known = Backend.from_file(str(file)).get_vocab()
    if all(token in known for token in SPECIAL_TOKENS):
        tokenizer.files["tokenizer.json"] = file.read_bytes()
    return tokenizer


def read_gguf(file: Path) -> TextModel:
    """Read a GGUF file, whose quantised tensors are converted to float32."""
    try:
        import gguf
    except ImportError as error:
        raise ValueError(f"{file}: reading a GGUF file needs the package gguf; run pip install gguf") from error
    weights = {}
    try:
        check_gguf_counts(file)
        reader = gguf.GGUFReader(file)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        for tensor in reader.tensors:
            values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
            weights[tensor.name] = values.view(*reversed(tensor.shape.tolist()))
    except MemoryError:
        raise
    except Exception as error:  # the package defines no errors for damaged files
        raise ValueError(
            f"{file} is not a complete GGUF file ({type(error).__name__}: {error}); download it again"
        ) from error
    model_type = fields.get("general.architecture")
    check_model_type(model_type, file)
    weights = {gguf_name(name, file): tensor for name, tensor in weights.items()}
    check_embedding(weights, file)
    sizes = {name: fields.get(f"{model_type}.{key}") for name, key in GGUF_SIZES.items()}
    sizes |= {"vocab_size": len(weights[EMBEDDING]), "tie_word_embeddings": HEAD not in weights}
    try:
        tokenizer = gguf_tokenizer(fields)
    except Exception as error:  # the library tokenizers raises only the class Exception
        raise ValueError(
            f"{file}: the tokenizer in the file is damaged ({type(error).__name__}: {error}); download the file again"
        ) from error
    return TextModel(file, str(model_type), check_sizes(sizes, file), weights, tokenizer)


def check_gguf_counts(file: Path):
    """Raise ValueError if a GGUF file's header counts more values than the file can hold.

    The package gguf reads such a file in a loop that would take years.
    """
    with file.open("rb") as stream:
        _, _, num_tensors, num_values = read_numbers(stream, "<IIQQ")
        for _ in range(num_values):
            skip_bytes(stream, *read_numbers(stream, "<Q"))
            [kind] = read_numbers(stream, "<I")
            count = 1
            if kind == LIST:
                kind, count = read_numbers(stream, "<IQ")
            if kind == TEXT:
                for _ in range(count):
                    skip_bytes(stream, *read_numbers(stream, "<Q"))
            elif kind in NUMBERS:
                skip_bytes(stream, NUMBERS[kind] * count)
            else:
                raise ValueError(f"the header has a value of the unknown type {kind}")
        for _ in range(num_tensors):
            skip_bytes(stream, *read_numbers(stream, "<Q"))
            [num_dimensions] = read_numbers(stream, "<I")
            if num_dimensions > MOST_DIMENSIONS:
                raise ValueError(f"a tensor has {num_dimensions} dimensions")
            skip_bytes(stream, 8 * num_dimensions + 12)


def read_numbers(stream: BinaryIO, layout: str) -> tuple[int, ...]:
    """Read numbers with a struct layout; raise ValueError if the file ends before."""
    content = stream.read(struct.calcsize(layout))
    if len(content) < struct.calcsize(layout):
        raise ValueError("the file ends inside of its header")
    return struct.unpack(layout, content)


def skip_bytes(stream: BinaryIO, count: int):
    """Skip bytes; raise ValueError if the file ends before."""
    start = stream.tell()
    if count > stream.seek(0, 2) - start:
        raise ValueError("the file ends inside of its header")
    stream.seek(start + count)


def check_embedding(weights: dict[str, Tensor], source: Path):
    """Raise ValueError unless the weights have an embedding, a float matrix."""
    embedding = weights.get(EMBEDDING)
    if embedding is None or embedding.dim() != 2:
        found = "is missing" if embedding is None else f"has shape {tuple(embedding.shape)}"
        raise ValueError(f"{source}: the tensor {EMBEDDING} {found}; download the model again")


def gguf_name(name: str, file: Path) -> str:
    """Translate a tensor's name in a GGUF file."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer is None and name in GGUF_TENSORS:
        return GGUF_TENSORS[name]
    if layer is not None and f"blk.{{}}.{layer[2]}" in GGUF_TENSORS:
        return GGUF_TENSORS[f"blk.{{}}.{layer[2]}"].format(layer[1]) + f".{layer[3]}"
    raise ValueError(f"{file}: a decoder of Qwen2 or Qwen3 has no tensor {name!r}")


def gguf_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Build the tokenizer from a GGUF file's tokens and merges."""
    tokens = fields["tokenizer.ggml.tokens"]
    types = fields["tokenizer.ggml.token_type"]
    kept = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != UNUSED}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    backend = qwen2_backend(models.BPE(kept, merges))
    # tokens in the vocabulary keep their ids
    backend.add_tokens([token for token, i in kept.items() if types[i] == USER_DEFINED])
    controls = [token for token, i in kept.items() if types[i] == CONTROL]
    backend.add_special_tokens(controls + [token for token in SPECIAL_TOKENS if token not in kept])
    return Tokenizer(backend)


def make_config(text: TextModel, family: str, tower: Tower) -> dict:
    """Make the new model's config.json, for random_model."""
    sizes = dict(text.sizes)
    head_dim = sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"]
    vision = {
        "depth": tower.depth, "num_heads": tower.heads, "patch_size": tower.patch_size, "in_chans": 3,
        "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    if family == "qwen2_vl":
        vision |= {"embed_dim": tower.width, "mlp_ratio": 4, "hidden_size": sizes["hidden_size"]}
    else:
        vision |= {"hidden_size": tower.width, "intermediate_size": 4 * tower.width}
        vision["out_hidden_size"] = sizes["hidden_size"]
    if family == "qwen2_5_vl":  # every third block attends to the whole picture
        blocks = list(range(2, tower.depth, 3)) or [0]
        vision |= {"window_size": 8 * tower.patch_size, "fullatt_block_indexes": blocks}
    if family == "qwen3_vl":
        vision |= {"num_position_embeddings": 32**2, "deepstack_visual_indexes": []}
    return {
        "model_type": family,
        "text_config": sizes,
        "rope_scaling": {"type": "mrope", "mrope_section": mrope_section(family, head_dim // 2)},
        "rope_theta": sizes["rope_theta"],
        "tie_word_embeddings": sizes.get("tie_word_embeddings", False),
        "vision_config": vision,
    }


def mrope_section(family: str, frequencies: int) -> list[int]:
    """Divide the rotary frequencies among time, height and width, in the same ratio as in published models.

    Published models have head_dim 128: 16, 24 and 24 frequencies in Qwen2-VL and Qwen2.5-VL, 24, 20 and 20 in Qwen3-VL.
    """
    each = frequencies * (20 if family == "qwen3_vl" else 24) // 64
    return [frequencies - 2 * each, each, each]


def decoder_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters that come from the text model; a tied head is the embedding."""
    for name, parameter in model.named_parameters():
        if not name.startswith("visual."):
            yield name, parameter


@torch.no_grad()
def build(text: TextModel, out: Path, family: str, tower: Tower, seed: int = 0):
    """Build the model with the decoder from `text` and a random tower, and save it to the folder `out`.

    Raises:
        ValueError: a weight is missing or does not fit, or the tokenizer has more tokens than the head.
    """
    if len(text.tokenizer) > text.sizes["vocab_size"]:
        raise ValueError(
            f"{text.source}: with the image tokens, the tokenizer has {len(text.tokenizer)} tokens, but the "
            f"head has only {text.sizes['vocab_size']} rows; use a model with more rows, such as Qwen2.5"
        )
    layers = {name.split(".")[2] for name in text.weights if name.startswith("model.layers.")}
    if text.sizes["num_hidden_layers"] > len(layers):
        raise ValueError(
            f"{text.source}: num_hidden_layers is {text.sizes['num_hidden_layers']}, but the weights have only "
            f"{len(layers)} layers; download the model again"
        )
    values = make_config(text, family, tower) | {"vocab_size": text.sizes["vocab_size"]}
    config = config_json.from_dict(values, str(text.source))
    with torch.device("meta"):  # before memory is used, because the sizes may be wrong
        check_shapes(text, model_from_config(config, text.source))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(make_config(text, family, tower)))
        model, processor = random_model(file, text.tokenizer, seed)
    model.to(text.weights[EMBEDDING].dtype)
    for name, parameter in decoder_parameters(model):
        parameter.copy_(text.weights[name])
    save_model(out, model, processor)
    new = sum(p.numel() for p in model.visual.parameters())
    old = sum(p.numel() for _, p in decoder_parameters(model))
    print(f"wrote {out}: {family} with {old:,} parameters of {text.source} and {new:,} new ones")


def check_shapes(text: TextModel, model: torch.nn.Module):
    """Raise ValueError unless a text model's weights have the names and shapes of the model's decoder."""
    unused = set(text.weights)
    for name, parameter in decoder_parameters(model):
        if name not in text.weights:
            raise ValueError(f"{text.source}: the tensor {name} is missing; download the model again")
        unused.discard(name)
        weight = text.weights[name]
        if weight.shape != parameter.shape:
            raise ValueError(
                f"{text.source}: the tensor {name} has shape {tuple(weight.shape)}, but the config requires "
                f"{tuple(parameter.shape)}"
            )
    if unused:
        raise ValueError(f"{text.source}: the decoder has no parameter {min(unused)}")


def main(arguments: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, help="a folder of Hugging Face, or a .gguf file, of Qwen2, Qwen2.5 or Qwen3")
    parser.add_argument("out", type=Path, help="folder of the new model")
    parser.add_argument("--family", help="qwen2_5_vl (default) or qwen2_vl; for Qwen3, qwen3_vl")
    parser.add_argument("--depth", type=int, default=Tower.depth, help="blocks of the tower")
    parser.add_argument("--width", type=int, default=Tower.width, help="hidden size of the tower")
    parser.add_argument("--heads", type=int, default=Tower.heads)
    parser.add_argument("--patch_size", type=int, default=Tower.patch_size, help="in pixels")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    options = parser.parse_args(arguments)
    try:
        text = read_text_model(options.text)
        families = FAMILIES[text.model_type]
        family = options.family or families[0]
        if family not in families:
            raise ValueError(f"--family is {family}, but a decoder of {text.model_type} fits {' or '.join(families)}")
        tower = Tower(options.depth, options.width, options.heads, options.patch_size)
        build(text, options.out, family, tower, options.seed)
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from error
    except MemoryError as error:
        raise SystemExit(out_of_memory(error)) from error


if __name__ == "__main__":
    main()
