"""Architecture of Qwen2.5-VL as numbers: what config.json of a Hugging Face folder says, and what we write back."""

import typing
from dataclasses import MISSING, asdict, dataclass, field, fields

# model_type in config.json -> the class that transformers builds
ARCHITECTURES = {"qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration", "qwen2_vl": "Qwen2VLForConditionalGeneration"}
# what Qwen2-VL's vision tower does differently; everything else of the two models is the same
QWEN2_VL_VISION = {
    "window_size": None, "fullatt_block_indexes": (), "tokens_per_second": None,
    "norm": "layer_norm", "mlp": "quick_gelu",
}  # fmt: skip
HIDDEN_ACT = {"swiglu": "silu", "quick_gelu": "quick_gelu"}


@dataclass
class VisionConfig:
    """The vision tower. Names are those of Qwen2.5-VL's config.json (`vision_config`), for Qwen2-VL too.

    Sizes in channels, patches or pixels as noted. Defaults are transformers' class defaults, which its older versions
    leave out of config.json.
    """

    depth: int = 32  # transformer blocks
    hidden_size: int = 3584  # E
    intermediate_size: int = 3420
    num_heads: int = 16
    out_hidden_size: int = 3584  # the decoder's hidden_size
    in_channels: int = 3
    patch_size: int = 14  # pixels a side
    temporal_patch_size: int = 2  # frames in one patch; an image is one frame repeated
    spatial_merge_size: int = 2  # patches a side that become one decoder token
    window_size: int | None = 112  # pixels a side of an attention window; None: a frame is one window (Qwen2-VL)
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)  # blocks that attend to the whole frame
    tokens_per_second: int | None = 4  # M-RoPE positions in a second of video; None: one a time step (Qwen2-VL)
    norm: str = "rms_norm"  # or "layer_norm" (Qwen2-VL)
    mlp: str = "swiglu"  # or "quick_gelu" (Qwen2-VL)

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
    model_type: str = "qwen2_5_vl"  # or "qwen2_vl"
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
    eos_token_id: int | list[int] | None = 151645
    torch_dtype: str = "float32"
    extra: dict = field(default_factory=dict)  # config.json keys that we carry along but do not read

    def __post_init__(self):
        vision = self.vision_config
        _require(len(self.mrope_section) == 3, "mrope_section", self.mrope_section, "three numbers")
        for heads, size, where in (
            (self.num_attention_heads, self.hidden_size, ""),
            (vision.num_heads, vision.hidden_size, "vision_config."),
        ):
            _require(size % heads == 0, f"{where}hidden_size", size, f"a multiple of its {heads} heads")
        _require(
            self.num_attention_heads % self.num_key_value_heads == 0, "num_key_value_heads", self.num_key_value_heads,
            f"a divisor of num_attention_heads ({self.num_attention_heads})",
        )  # fmt: skip
        _require(
            sum(self.mrope_section) * 2 == self.head_dim, "mrope_section", list(self.mrope_section),
            f"three numbers whose sum is half of head_dim {self.head_dim} (hidden_size / num_attention_heads)",
        )  # fmt: skip
        head_dim = vision.hidden_size // vision.num_heads
        _require(head_dim % 4 == 0, "vision_config.hidden_size", vision.hidden_size, "4 k x num_heads, for 2-D rotary")
        _require(
            vision.out_hidden_size == self.hidden_size, "vision_config.out_hidden_size", vision.out_hidden_size,
            f"hidden_size ({self.hidden_size}); Qwen2-VL calls it vision_config.hidden_size",
        )  # fmt: skip

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def from_dict(cls, config: dict) -> "ModelConfig":
        """Read a config.json of Qwen2.5-VL or Qwen2-VL: the hub's flat form or the nested one of transformers 5.

        Args:
            config: the parsed JSON; decoder keys at the top level or under `text_config`, rotary settings under
                `rope_scaling` + `rope_theta` or under `rope_parameters`.
        Raises:
            ValueError: another model_type, a key that the architecture needs is missing or of a wrong type, or one asks
                for what this model does not compute: another activation or rotary scaling, sliding windows (named).
        """
        found = config.get("model_type") if isinstance(config, dict) else config
        if not isinstance(found, str) or found not in ARCHITECTURES:
            raise ValueError(
                f"config.json: model_type is {found!r:.40}, this model reads {' and '.join(ARCHITECTURES)}"
            )
        text = config.get("text_config") or {}
        _require(isinstance(text, dict), "text_config", text, "an object")
        # a config that does not say it means transformers' class default, which is not the hub's value
        flat = {"rms_norm_eps": 1e-5, **config, **text, "model_type": found}
        rope = flat.get("rope_parameters") or flat.get("rope_scaling") or {}
        _require(isinstance(rope, dict), "rope_scaling", rope, "an object")
        flat["rope_theta"] = rope.get("rope_theta", flat.get("rope_theta", 1e6))
        flat["mrope_section"] = rope.get("mrope_section", (16, 24, 24))
        flat["torch_dtype"] = config.get("torch_dtype") or config.get("dtype") or flat.get("dtype") or "float32"
        # transformers 5 repeats this key inside text_config with its class default; the top level decides
        flat["tie_word_embeddings"] = config.get("tie_word_embeddings", flat.get("tie_word_embeddings", False))
        _refuse_what_is_not_computed(flat, rope)
        flat["vision_config"] = _read_vision(found, config.get("vision_config") or {})
        written_anew = {"text_config", "rope_parameters", "rope_scaling", "dtype", "layer_types"}
        known = {f.name for f in fields(cls)} | written_anew | {"architectures", "transformers_version"}
        extra = {k: v for k, v in flat.items() if k not in known}
        return _build(cls, {**flat, "extra": extra}, "")

    def to_dict(self) -> dict:
        """The hub's flat config.json, which transformers 4.49 to 5.23 and vLLM read."""
        out = {k: v for k, v in asdict(self).items() if k not in ("extra", "mrope_section", "vision_config")}
        return {
            **self.extra,
            "architectures": [ARCHITECTURES[self.model_type]],
            "hidden_act": "silu",
            **out,
            "rope_scaling": {"type": "mrope", "mrope_section": list(self.mrope_section)},
            "vision_config": {"model_type": self.model_type, **_written_vision(self.vision_config, self.model_type)},
        }


def _read_vision(model_type: str, vision: dict) -> VisionConfig:
    _require(isinstance(vision, dict), "vision_config", vision, "an object")
    vision = {**vision, "in_channels": vision.get("in_chans", vision.get("in_channels", 3))}
    if model_type == "qwen2_vl":
        width, ratio = vision.get("embed_dim", 1280), vision.get("mlp_ratio", 4)
        _require(type(width) is int, "vision_config.embed_dim", width, "a whole number")
        _require(type(ratio) in (int, float), "vision_config.mlp_ratio", ratio, "a number")
        sizes = {"hidden_size": width, "intermediate_size": int(width * ratio)}
        vision |= sizes | {"out_hidden_size": vision.get("hidden_size", 3584)} | QWEN2_VL_VISION
    else:
        vision |= {"norm": "rms_norm", "mlp": "swiglu"}
    act, expected = vision.get("hidden_act"), HIDDEN_ACT[vision["mlp"]]
    _require(act in (None, expected), "vision_config.hidden_act", act, repr(expected))
    return _build(VisionConfig, vision, "vision_config.")


def _written_vision(config: VisionConfig, model_type: str) -> dict:
    vision = {k: v for k, v in asdict(config).items() if k not in ("norm", "mlp")}
    vision["hidden_act"] = HIDDEN_ACT[config.mlp]
    vision["in_chans"] = vision.pop("in_channels")
    vision["spatial_patch_size"] = config.patch_size
    vision["fullatt_block_indexes"] = list(config.fullatt_block_indexes)
    if model_type == "qwen2_vl":
        vision = {k: v for k, v in vision.items() if k not in (*QWEN2_VL_VISION, "intermediate_size")}
        vision["hidden_size"] = vision.pop("out_hidden_size")
        ratio = config.intermediate_size / config.hidden_size
        vision |= {"embed_dim": config.hidden_size, "mlp_ratio": int(ratio) if ratio.is_integer() else ratio}
    return vision


def _refuse_what_is_not_computed(flat: dict, rope: dict):
    kind = rope.get("rope_type") or rope.get("type") or "mrope"
    _require(kind in ("mrope", "default"), "rope_scaling.type", kind, "'mrope'; other scalings are not supported")
    _require(flat.get("hidden_act") in (None, "silu"), "hidden_act", flat.get("hidden_act"), "'silu'")
    sliding = flat.get("use_sliding_window")
    _require(not sliding, "use_sliding_window", sliding, "false; sliding windows are not supported")


def _build(cls, values: dict, prefix: str):
    """Make dataclass `cls` from those `values` that it declares; name the first that is missing or not of its type."""
    hints, found = typing.get_type_hints(cls), {}
    for f in fields(cls):
        if f.name in values:
            found[f.name] = _typed(hints[f.name], values[f.name], prefix + f.name)
        elif f.default is MISSING and f.default_factory is MISSING:
            raise ValueError(f"config.json: {prefix}{f.name} is missing")
    return cls(**found)


def _typed(hint, value, name: str):
    """`value` as a field of type `hint` holds it. Sizes and token ids are whole numbers from 0 on."""
    if hint == tuple[int, ...]:
        _require(isinstance(value, list | tuple), name, value, "a list of whole numbers")
        return tuple(_typed(int, item, name) for item in value)
    if value is None and type(None) in typing.get_args(hint):
        return None
    if isinstance(value, list) and list[int] in typing.get_args(hint):
        return [_typed(int, item, name) for item in value]
    if hint is int or int in typing.get_args(hint):
        least = 0 if name.endswith("_id") else 1
        in_list = name.endswith(("fullatt_block_indexes", "mrope_section"))
        _require(
            type(value) is int and value >= (0 if in_list else least), name, value, f"a whole number from {least} on"
        )
    elif hint is float:
        _require(type(value) in (int, float) and 0 < value < float("inf"), name, value, "a number over 0")
        return float(value)
    else:
        _require(isinstance(value, hint), name, value, f"of type {hint.__name__}")
    return value


def _require(valid: bool, name: str, value, wanted: str):
    if not valid:
        raise ValueError(f"config.json: {name} is {value!r:.80}, it must be {wanted}")
