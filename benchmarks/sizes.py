"""Models as numbers: the hub's Qwen2.5-VL and one that a CPU runs in seconds."""

from minivlmrl.hub.model_config import ModelConfig

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
    """Read one of HUB."""
    return ModelConfig.from_dict(HUB[size])
