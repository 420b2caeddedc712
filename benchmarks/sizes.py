"""Models and cards as numbers: the hub's Qwen2.5-VL and one that a CPU runs in seconds, and data sheets."""

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

CARDS = {  # data sheets: bytes/s of memory, dense bfloat16 FLOP/s, bytes/s to other cards
    "h200": (4.8e12, 989e12, 450e9), "h100": (3.35e12, 989e12, 450e9), "a100": (2.04e12, 312e12, 300e9),
    "4090": (1.01e12, 165e12, 32e9), "l4": (0.3e12, 121e12, 32e9),
}  # fmt: skip
# what a good kernel reaches of that: copies, large products, transfers; fused attention of the speed of products
MEMORY = 0.84
PRODUCTS = 0.66
LINK = 0.8
FLASH = 0.55
FLOOR = 2e-6  # seconds of the smallest kernel
# seconds a value where one block walks through all of a row: the indices of an embedding's gradient, a running sum
WALKED = {"embedding_dense_backward": 6e-8, "cumsum": 2e-9}
SORT = 6  # launches of x[index]'s gradient, which sorts the indices
# Of FSDP, bfloat16 from float32 weights: bytes a parameter that a forward and backward copy on one card (37 GB of 3B)
# and send to others, and host seconds of its hooks a layer; counted on 0b2d6c3
COPIED, SENT, HOOKS = 10, 8, 200e-6
ADAMW = 28  # bytes a parameter: weight, gradient and two moments are read, three are written, in float32


def config_of(size: str) -> ModelConfig:
    """Read one of HUB."""
    return ModelConfig.from_dict(HUB[size])


def card_named(name: str) -> str:
    """Find the entry of CARDS for a name such as "NVIDIA H100 80GB HBM3"; h100 for others."""
    return next((card for card in CARDS if card in name.lower()), "h100")
