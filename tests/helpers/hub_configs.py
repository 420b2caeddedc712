"""config.json as the hub's folders have it, key by key: of a tiny model, and of the models that there are."""

import tiny

ARCHITECTURES = {"qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration", "qwen2_vl": "Qwen2VLForConditionalGeneration"}
# model_type, hidden_size, layers, heads, key/value heads, intermediate_size, vocab_size, tied, the same of the vision
# tower; then how many parameters and how many tensors the hub's files hold
SIZES = {
    "Qwen2.5-VL-3B": ("qwen2_5_vl", 2048, 36, 16, 2, 11008, 151936, True, 3420, 3_754_622_976, 824),
    "Qwen2.5-VL-7B": ("qwen2_5_vl", 3584, 28, 28, 4, 18944, 152064, False, 3420, 8_292_166_656, 729),
    "Qwen2.5-VL-32B": ("qwen2_5_vl", 5120, 64, 40, 8, 27648, 152064, False, 3456, 33_452_718_336, 1161),
    "Qwen2.5-VL-72B": ("qwen2_5_vl", 8192, 80, 64, 8, 29568, 152064, False, 3456, 73_410_777_344, 1353),
    "Qwen2-VL-2B": ("qwen2_vl", 1536, 28, 12, 2, 8960, 151936, True, 5120, 2_208_985_600, 729),
    "Qwen2-VL-7B": ("qwen2_vl", 3584, 28, 28, 4, 18944, 152064, False, 5120, 8_291_375_616, 730),
}

# hidden_size, layers, heads, intermediate_size, tied; depth, hidden_size and intermediate_size of the tower, its deep
# blocks; parameters and tensors of the hub's files. All have 8 key/value heads of 128, and 151,936 tokens.
QWEN3_SIZES = {
    "Qwen3-VL-2B": (2048, 28, 16, 6144, True, 24, 1024, 4096, [5, 11, 17], 2_127_532_032, 625),
    "Qwen3-VL-4B": (2560, 36, 32, 9728, True, 24, 1024, 4096, [5, 11, 17], 4_437_815_808, 713),
    "Qwen3-VL-8B": (4096, 36, 32, 12288, False, 27, 1152, 4304, [8, 16, 24], 8_767_123_696, 750),
}


def qwen3_config(size: str) -> dict:
    """One of QWEN3_SIZES."""
    hidden, layers, heads, ffn, tied, depth, width, vision_ffn, deep, _, _ = QWEN3_SIZES[size]
    rope = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
    text = {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "dtype": "bfloat16",
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": hidden,
        "initializer_range": 0.02, "intermediate_size": ffn, "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text", "num_attention_heads": heads, "num_hidden_layers": layers,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_scaling": rope, "rope_theta": 5000000,
        "use_cache": True, "vocab_size": 151936,
    }  # fmt: skip
    return _nested("qwen3_vl", "Qwen3VL", 151652, tied, text, (depth, width, vision_ffn, deep))


def _nested(model_type: str, name: str, first_id: int, tied: bool, text: dict, tower: tuple) -> dict:
    """With what both newer families share; tower: its depth, hidden_size, intermediate_size and deep blocks."""
    depth, width, ffn, deep = tower
    vision = {
        "deepstack_visual_indexes": deep, "depth": depth, "hidden_act": "gelu_pytorch_tanh", "hidden_size": width,
        "in_channels": 3, "initializer_range": 0.02, "intermediate_size": ffn, "model_type": model_type,
        "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": text["hidden_size"], "patch_size": 16,
        "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    return {
        "architectures": [f"{name}ForConditionalGeneration"], "image_token_id": first_id + 3, "model_type": model_type,
        "text_config": text, "tie_word_embeddings": tied, "transformers_version": "4.57.0.dev0",
        "video_token_id": first_id + 4, "vision_config": vision, "vision_end_token_id": first_id + 1,
        "vision_start_token_id": first_id,
    }  # fmt: skip


# hidden_size, layers, heads, key/value heads, intermediate_size, value heads of recurrent layers, tied; depth,
# hidden_size and intermediate_size of the tower. Heads have 256 numbers, those of recurrent layers 16 keys of 128.
QWEN35_SIZES = {
    "Qwen3.5-2B": (2048, 24, 8, 2, 6144, 16, True, 24, 1024, 4096),
    "Qwen3.5-9B": (4096, 32, 16, 4, 12288, 32, False, 27, 1152, 4304),
    "Qwen3.5-27B": (5120, 64, 24, 4, 17408, 48, False, 27, 1152, 4304),
}


def qwen35_config(size: str) -> dict:
    """One of QWEN35_SIZES."""
    hidden, layers, heads, groups, ffn, values, tied, depth, width, vision_ffn = QWEN35_SIZES[size]
    rope = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default"}
    text = {
        "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16",
        "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
        "hidden_size": hidden, "initializer_range": 0.02, "intermediate_size": ffn,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4), "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": values,
        "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144,
        "mlp_only_layers": [], "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False, "num_attention_heads": heads, "num_hidden_layers": layers,
        "num_key_value_heads": groups, "rms_norm_eps": 1e-6, "use_cache": True, "vocab_size": 248320,
        "rope_parameters": {**rope, "partial_rotary_factor": 0.25, "rope_theta": 10000000},
    }  # fmt: skip
    return _nested("qwen3_5", "Qwen3_5", 248053, tied, text, (depth, width, vision_ffn, []))


def tiny_qwen35_config(tied: bool) -> dict:
    config = qwen35_config("Qwen3.5-9B") | {"tie_word_embeddings": tied, "vision_start_token_id": tiny.VISION_START}
    config |= {"vision_end_token_id": tiny.VISION_END, "image_token_id": tiny.IMAGE, "video_token_id": tiny.VIDEO}
    config["text_config"] |= {
        "eos_token_id": 2, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 300, "dtype": "float32", **tiny.RECURRENT,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }  # fmt: skip
    del config["text_config"]["partial_rotary_factor"]
    config["text_config"]["rope_parameters"]["mrope_section"] = [2, 1, 1]
    config["vision_config"] |= {
        "depth": 4, "num_heads": 2, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64,
        "num_position_embeddings": 36, "patch_size": 14,
    }  # fmt: skip
    return config


def tiny_config(model_type: str, tied: bool) -> dict:
    if model_type == "qwen3_5":
        return tiny_qwen35_config(tied)
    if model_type == "qwen3_vl":
        return tiny_qwen3_config(tied)
    ids = {
        "bos_token_id": 1, "eos_token_id": 2, "vision_start_token_id": tiny.VISION_START,
        "vision_end_token_id": tiny.VISION_END, "vision_token_id": 292, "image_token_id": tiny.IMAGE,
        "video_token_id": tiny.VIDEO,
    }  # fmt: skip
    sizes = {
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 96, "vocab_size": 300, "max_window_layers": 3, "tie_word_embeddings": tied,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "torch_dtype": "float32",
    }  # fmt: skip
    vision = {"depth": 4, "num_heads": 2}
    if model_type == "qwen2_5_vl":
        vision |= {"hidden_size": 32, "intermediate_size": 44, "out_hidden_size": 64, "fullatt_block_indexes": [1, 3]}
    else:
        vision |= {"embed_dim": 32, "hidden_size": 64}
    return _config(model_type, {**ids, **sizes}, vision)


def tiny_qwen3_config(tied: bool) -> dict:
    config = qwen3_config("Qwen3-VL-4B") | {"tie_word_embeddings": tied, "vision_start_token_id": tiny.VISION_START}
    config |= {"vision_end_token_id": tiny.VISION_END, "image_token_id": tiny.IMAGE, "video_token_id": tiny.VIDEO}
    config["text_config"] |= {
        "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 64, "head_dim": 24, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 300,
        "dtype": "float32",
    }  # fmt: skip
    config["text_config"]["rope_scaling"]["mrope_section"] = [6, 3, 3]
    config["vision_config"] |= {
        "depth": 4, "num_heads": 2, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64,
        "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2], "patch_size": 14,
    }  # fmt: skip
    return config


def real_config(size: str) -> dict:
    """One of SIZES, QWEN3_SIZES or QWEN35_SIZES."""
    if size in QWEN3_SIZES:
        return qwen3_config(size)
    if size in QWEN35_SIZES:
        return qwen35_config(size)
    model_type, hidden, layers, heads, kv_heads, ffn, vocab, tied, vision_ffn, _, _ = SIZES[size]
    ids = {
        "bos_token_id": 151643, "eos_token_id": 151645, "vision_start_token_id": 151652,
        "vision_end_token_id": 151653, "vision_token_id": 151654, "image_token_id": 151655, "video_token_id": 151656,
    }  # fmt: skip
    sizes = {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": ffn, "vocab_size": vocab,
        "max_window_layers": 70 if size == "Qwen2.5-VL-3B" else layers, "tie_word_embeddings": tied,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "torch_dtype": "bfloat16",
    }  # fmt: skip
    vision = {"depth": 32, "num_heads": 16}
    if model_type == "qwen2_5_vl":
        vision |= {"hidden_size": 1280, "intermediate_size": vision_ffn, "out_hidden_size": hidden}
        vision |= {"fullatt_block_indexes": [7, 15, 23, 31]}
    else:
        vision |= {"embed_dim": 1280, "hidden_size": hidden}
    return _config(model_type, {**ids, **sizes}, vision)


def _config(model_type: str, own: dict, vision: dict) -> dict:
    """With what all models of a type share."""
    if model_type == "qwen2_5_vl":
        vision |= {"hidden_act": "silu", "window_size": 112, "tokens_per_second": 2}
    else:
        vision |= {"hidden_act": "quick_gelu", "mlp_ratio": 4}
    vision |= {
        "in_chans": 3, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2,
    }  # fmt: skip
    return {
        "architectures": [ARCHITECTURES[model_type]], "model_type": model_type, "attention_dropout": 0.0,
        "hidden_act": "silu", "initializer_range": 0.02, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "max_position_embeddings": 128000 if model_type == "qwen2_5_vl" else 32768, "sliding_window": 32768,
        "transformers_version": "4.41.2", "use_cache": True, "use_sliding_window": False, **own,
        "vision_config": vision,
    }  # fmt: skip
