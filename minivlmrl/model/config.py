"""Architecture of Qwen2.5-VL as numbers: what config.json of a Hugging Face folder says, and what we write back."""

from dataclasses import MISSING, asdict, dataclass, field, fields


@dataclass
class VisionConfig:
    """The vision tower. Names are config.json's (`vision_config`); sizes in channels, patches or pixels as noted."""

    depth: int  # transformer blocks
    hidden_size: int  # E
    intermediate_size: int
    num_heads: int
    out_hidden_size: int  # the decoder's hidden_size
    in_channels: int = 3
    patch_size: int = 14  # pixels a side
    temporal_patch_size: int = 2  # frames in one patch; an image is one frame repeated
    spatial_merge_size: int = 2  # patches a side that become one decoder token
    window_size: int = 112  # pixels a side of an attention window
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)  # blocks that attend to the whole frame
    tokens_per_second: int = 2

    @property
    def patch_dim(self) -> int:
        """Numbers in one flattened patch: channels x frames x patch x patch (1176 on the hub)."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


@dataclass
class ModelConfig:
    """Decoder and vision tower together. Defaults are the values all Qwen2.5-VL hub checkpoints share."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vision_config: VisionConfig
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    mrope_section: tuple[int, ...] = (16, 24, 24)  # frequencies given to time, height, width
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 128000
    image_token_id: int = 151655
    video_token_id: int = 151656
    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653
    bos_token_id: int | None = 151643
    eos_token_id: int | None = 151645
    torch_dtype: str = "float32"
    extra: dict = field(default_factory=dict)  # config.json keys that we carry along but do not read

    def __post_init__(self):
        if sum(self.mrope_section) * 2 != self.head_dim:
            raise ValueError(
                f"config.json: mrope_section {list(self.mrope_section)} sums to {sum(self.mrope_section)}, "
                f"it must sum to half of head_dim {self.head_dim} (hidden_size / num_attention_heads)"
            )
        if self.vision_config.out_hidden_size != self.hidden_size:
            raise ValueError(
                f"config.json: vision_config.out_hidden_size {self.vision_config.out_hidden_size} "
                f"must equal hidden_size {self.hidden_size}"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def from_dict(cls, config: dict) -> "ModelConfig":
        """Read a config.json, either the hub's flat form or the nested one that transformers 5 writes.

        Args:
            config: the parsed JSON; decoder keys at the top level or under `text_config`, rotary settings under
                `rope_scaling` + `rope_theta` or under `rope_parameters`.
        Raises:
            ValueError: another model_type, or a key that the architecture needs is missing (named).
        """
        if config.get("model_type") != "qwen2_5_vl":
            raise ValueError(
                f"config.json: model_type is {config.get('model_type')!r}, this model reads only 'qwen2_5_vl'"
            )
        flat = {**config, **config.get("text_config", {})}
        rope = flat.get("rope_parameters") or flat.get("rope_scaling") or {}
        flat["rope_theta"] = rope.get("rope_theta", flat.get("rope_theta", 1e6))
        flat["mrope_section"] = tuple(rope.get("mrope_section", (16, 24, 24)))
        flat["torch_dtype"] = config.get("torch_dtype") or config.get("dtype") or flat.get("dtype") or "float32"
        # transformers 5 repeats this key inside text_config with its class default; the top level decides
        flat["tie_word_embeddings"] = config.get("tie_word_embeddings", flat.get("tie_word_embeddings", False))
        vision = dict(config.get("vision_config") or {})
        vision["in_channels"] = vision.get("in_chans", vision.get("in_channels", 3))
        vision["fullatt_block_indexes"] = tuple(vision.get("fullatt_block_indexes", (7, 15, 23, 31)))
        flat["vision_config"] = _build(VisionConfig, vision, "vision_config.")
        written_anew = {"text_config", "rope_parameters", "rope_scaling", "dtype", "layer_types", "model_type"}
        known = {f.name for f in fields(cls)} | written_anew | {"architectures", "transformers_version"}
        flat["extra"] = {k: v for k, v in flat.items() if k not in known}
        return _build(cls, flat, "")

    def to_dict(self) -> dict:
        """The hub's flat config.json, which transformers 4.49 to 5.23 and vLLM read."""
        out = {k: v for k, v in asdict(self).items() if k not in ("extra", "mrope_section", "vision_config")}
        vision = asdict(self.vision_config)
        vision["in_chans"] = vision.pop("in_channels")
        vision["spatial_patch_size"] = self.vision_config.patch_size
        vision["fullatt_block_indexes"] = list(self.vision_config.fullatt_block_indexes)
        return {
            **self.extra,
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "model_type": "qwen2_5_vl",
            "hidden_act": "silu",
            **out,
            "rope_scaling": {"type": "mrope", "mrope_section": list(self.mrope_section)},
            "vision_config": {"model_type": "qwen2_5_vl", "hidden_act": "silu", **vision},
        }


def _build(cls, values: dict, prefix: str):
    """Make dataclass `cls` from those `values` that it declares; name the first required one that is missing."""
    for f in fields(cls):
        if f.name not in values and f.default is MISSING and f.default_factory is MISSING:
            raise ValueError(f"config.json: {prefix}{f.name} is missing")
    return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})
