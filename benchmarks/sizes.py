"""Model configs for the benchmarks: Qwen2.5-VL 3B, 7B and 72B, and a toy model that a CPU runs in seconds."""

import json
from pathlib import Path

from minivlmrl.model import config_json
from minivlmrl.model.build import random_model
from minivlmrl.model.config import ModelConfig
from minivlmrl.tasks import shapes

TOWER = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
HUB = {
    "3b": {
        "model_type": "qwen2_5_vl", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008,
        "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2, "tie_word_embeddings": True,
        "vision_config": TOWER | {"out_hidden_size": 2048},
    },
    "7b": {
        "model_type": "qwen2_5_vl", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
        "vision_config": TOWER | {"out_hidden_size": 3584},
    },
    "72b": {
        "model_type": "qwen2_5_vl", "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "tie_word_embeddings": False,
        "vision_config": TOWER | {"intermediate_size": 3456, "out_hidden_size": 8192},
    },
    "toy": {
        "model_type": "qwen2_5_vl", "vocab_size": 400, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
        "rope_scaling": {"mrope_section": [2, 3, 3]}, "image_token_id": 390, "video_token_id": 391,
        "vision_start_token_id": 392, "vision_end_token_id": 393, "bos_token_id": 394, "eos_token_id": 395,
        "vision_config": {
            "depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
        },
    },
}  # fmt: skip


def config_of(size: str) -> ModelConfig:
    """Return a config from HUB: "3b", "7b", "72b" or "toy"."""
    return config_json.from_dict(HUB[size])


def small_model(folder: Path):
    """Create the toy model with random weights; return the model, its processor, and its special token ids by name."""
    path = folder / "toy.json"
    path.write_text(json.dumps(HUB["toy"]))
    model, processor = random_model(path, shapes.tokenizer(), seed=0)
    token_ids = {name: value for name, value in vars(model.config).items() if name.endswith("_token_id")}
    return model, processor, token_ids
