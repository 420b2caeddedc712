"""Make a vision-language model from a text model's decoder and a new vision tower.

    python recipes/from_text_model.py Qwen2.5-0.5B-Instruct/ my-vlm/
    python recipes/from_text_model.py Qwen3-0.6B/ my-vlm/ --depth=12 --width=384 --heads=6

The first folder contains a Qwen2, Qwen2.5 or Qwen3 model in Hugging Face format. Qwen2-VL and Qwen2.5-VL have the
decoder of Qwen2 and Qwen2.5, Qwen3-VL that of Qwen3. Text tokens have three equal positions (time, height, width), so
M-RoPE equals RoPE, and logits stay the same. The vision tower and merger are random: train them first.
"""

import argparse
import json
import tempfile
from pathlib import Path

from tokenizers import Tokenizer as Backend
from torch import Tensor

from minivlmrl.data.tokenizer import SPECIAL_TOKENS, Tokenizer, load_tokenizer
from minivlmrl.distributed.saving import save_model
from minivlmrl.errors import UserError, require
from minivlmrl.files import weight_files
from minivlmrl.json_files import read_json
from minivlmrl.model.build import random_model
from minivlmrl.model.checkpoint import EMBEDDING, HEAD, read_tensors

FAMILIES = {"qwen2": "qwen2_5_vl", "qwen3": "qwen3_vl"}  # {text model_type: new model_type}
# RoPE frequencies for (height, width) in published models; the rest of 64 are for time
MROPE = {"qwen2_5_vl": (24, 24), "qwen3_vl": (20, 20)}
# decoder sizes in config.json
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "rms_norm_eps", "max_position_embeddings",
)  # fmt: skip


def make_config(text: dict, where: Path, depth: int, width: int, heads: int, patch_size: int) -> dict:
    """Return config.json for the new model.

    Args:
        text: the text model's config.json.
        where: its path, for error messages.
    """
    model_type = text.get("model_type")
    require(model_type in list(FAMILIES), f"{where}: model_type", model_type, " or ".join(FAMILIES))
    require(not text.get("use_sliding_window"), f"{where}: use_sliding_window", True, "false")
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    scaling = rope.get("rope_type") or rope.get("type") or "default"
    require(scaling == "default", f"{where}: rope_type", scaling, "'default'; scaled positions are not supported")
    sizes = {name: text[name] for name in SIZES if name in text}
    sizes["rope_theta"] = text.get("rope_theta") or rope["rope_theta"]
    family = FAMILIES[model_type]
    frequencies = (text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]) // 2
    spatial = [frequencies * share // 64 for share in MROPE[family]]
    vision = {
        "depth": depth,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_heads": heads,
        "patch_size": patch_size,
        "out_hidden_size": text["hidden_size"],
    }
    if family == "qwen2_5_vl":  # every third block attends to the whole image
        vision |= {"window_size": 8 * patch_size, "fullatt_block_indexes": list(range(2, depth, 3)) or [0]}
    else:
        vision |= {"num_position_embeddings": 32**2, "deepstack_visual_indexes": []}
    return {
        "model_type": family,
        "text_config": sizes,
        "rope_scaling": {"type": "mrope", "mrope_section": [frequencies - sum(spatial), *spatial]},
        "rope_theta": sizes["rope_theta"],
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        "vision_config": vision,
    }


def read_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """Read tokenizer.json, and add missing control tokens, such as <|image_pad|>."""
    file = folder / "tokenizer.json"
    if not file.is_file() or all(token in file.read_text(encoding="utf-8") for token in SPECIAL_TOKENS):
        tokenizer = load_tokenizer(file)
        tokenizer.files[file.name] = file.read_bytes()
    else:
        backend = Backend.from_file(str(file))
        backend.add_special_tokens(list(SPECIAL_TOKENS))
        tokenizer = Tokenizer(backend)
    rows = f"at most vocab_size ({vocab_size}); choose a model with more rows, such as Qwen2.5"
    require(len(tokenizer) <= vocab_size, f"{file}: the number of tokens with images", len(tokenizer), rows)
    return tokenizer


def read_decoder(folder: Path, tied: bool) -> dict[str, Tensor]:
    """Read the text model's weights; a tied head is the embedding."""
    weights = {name: tensor.clone() for file in weight_files(folder) for name, tensor in read_tensors(file)}
    if tied and EMBEDDING in weights:
        weights[HEAD] = weights[EMBEDDING]
    return weights


def main(arguments: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="folder of the text model")
    parser.add_argument("out", type=Path, help="folder of the new model")
    parser.add_argument("--depth", type=int, default=6, help="number of the tower's blocks")
    parser.add_argument("--width", type=int, default=256, help="hidden size of the tower")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--patch_size", type=int, default=14, help="in pixels")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    options = parser.parse_args(arguments)
    try:
        build(options)
    except UserError as error:
        raise SystemExit(str(error)) from error


def build(options: argparse.Namespace):
    file = options.text / "config.json"
    config = make_config(read_json(file), file, options.depth, options.width, options.heads, options.patch_size)
    tokenizer = read_tokenizer(options.text, config["text_config"]["vocab_size"])
    with tempfile.TemporaryDirectory() as folder:
        config_file = Path(folder) / "config.json"
        config_file.write_text(json.dumps(config), encoding="utf-8")
        model, processor = random_model(config_file, tokenizer, options.seed)
    decoder = read_decoder(options.text, config["tie_word_embeddings"])
    model.to(next(iter(decoder.values())).dtype)
    tower = {name: tensor for name, tensor in model.state_dict().items() if name.startswith("visual.")}
    model.load_state_dict(decoder | tower)
    save_model(options.out, model, processor)
    print(f"{options.out}: {config['model_type']}, {len(decoder)} tensors of {options.text}, {len(tower)} random ones")


if __name__ == "__main__":
    main()
