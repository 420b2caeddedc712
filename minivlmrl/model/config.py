"""The architecture as numbers: config.json of a Hugging Face folder, read and written."""

import math
from collections.abc import Container
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, Literal

from minivlmrl.config.parsing import build, check_field
from minivlmrl.model.families.registry import FAMILIES, ModelSpec

NumExperts = Annotated[int, "[1, 1e6]"]
Size = Annotated[int, "[1, 1e9]"]
TokenId = Annotated[int, "[0, 1e9]"]
# more would take minutes to build, before the weights are seen to be missing
Depth = Annotated[int, "[1, 1000]"]


@dataclass(frozen=True)
class ExpertsConfig:
    """Sizes of experts, by their names in config.json."""

    num_experts: NumExperts  # E
    num_experts_per_tok: NumExperts  # k
    moe_intermediate_size: NumExperts  # I
    shared_expert_intermediate_size: NumExperts | None = (
        None  # of one for all tokens; None: no such
    )
    mlp_only_layers: list[Annotated[int, ">= 0"]] = field(default_factory=list)  # have no experts
    decoder_sparse_step: NumExperts = 1  # layers from one that has experts to the next

    def __post_init__(self):
        check_field(
            self.num_experts_per_tok <= self.num_experts,
            "num_experts_per_tok",
            self.num_experts_per_tok,
            f"num_experts ({self.num_experts}) or less",
        )

    def has_experts(self, index: int) -> bool:
        """Tell whether a layer has experts, or a dense MLP."""
        return index not in self.mlp_only_layers and (index + 1) % self.decoder_sparse_step == 0


@dataclass(frozen=True)
class RecurrentConfig:
    """Sizes of recurrent layers (Qwen3.5), by their names in config.json."""

    linear_num_key_heads: Size
    linear_num_value_heads: Size
    linear_key_head_dim: Size
    linear_value_head_dim: Size
    linear_conv_kernel_dim: Annotated[int, ">= 2"]  # tokens that the convolution mixes

    def __post_init__(self):
        check_field(
            self.linear_num_value_heads % self.linear_num_key_heads == 0,
            "linear_num_key_heads",
            self.linear_num_key_heads,
            f"a divisor of linear_num_value_heads ({self.linear_num_value_heads})",
        )


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower, with Qwen2.5-VL's names and transformers' defaults of what is missing."""

    depth: Depth = 32  # transformer blocks
    hidden_size: Size = 3584  # E
    intermediate_size: Size = 3420
    num_heads: Size = 16
    out_hidden_size: Size = 3584  # the decoder's hidden_size
    in_channels: Size = 3
    patch_size: Size = 14  # pixels a side
    temporal_patch_size: Size = 2  # frames in one patch; an image is one frame repeated
    spatial_merge_size: Size = 2  # patches a side that become one decoder token
    # pixels a side of an attention window; None: a frame is one window (Qwen2-VL)
    window_size: Size | None = 112
    fullatt_block_indexes: tuple[TokenId, ...] = (7, 15, 23, 31)  # attend to the whole frame
    tokens_per_second: Size | None = 4  # M-RoPE positions; None: one a time step (Qwen2-VL)
    norm: Literal["rms_norm", "layer_norm"] = "rms_norm"
    rope_theta: Annotated[float, "(0, inf)"] = 1e4  # of the 2-D rotary
    # learned positions, a square that is stretched over each image; None: there are none
    num_position_embeddings: Size | None = None
    # blocks whose output is added to the decoder's first layers too (Qwen3-VL's DeepStack)
    deepstack_visual_indexes: tuple[TokenId, ...] = ()

    def __post_init__(self):
        count = self.num_position_embeddings or 0
        is_square = math.isqrt(count) ** 2 == count
        check_field(is_square, "num_position_embeddings", count, "a square number")
        blocks = self.deepstack_visual_indexes
        valid = len(set(blocks)) == len(blocks) and all(i < self.depth for i in blocks)
        check_field(
            valid,
            "deepstack_visual_indexes",
            list(blocks),
            "different blocks of the tower, counted from 0",
        )
        if self.window_size is not None:
            token_side = self.patch_size * self.spatial_merge_size
            fits = self.window_size >= token_side
            check_field(fits, "window_size", self.window_size, f"{token_side} or more")

    @property
    def patch_dim(self) -> int:
        """Numbers in one flattened patch: channels x frames x patch x patch (1176 on the hub)."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


@dataclass
class ModelConfig:
    """Decoder and vision tower. Defaults are the values that all Qwen2.5-VL checkpoints share."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Depth
    num_attention_heads: Size
    num_key_value_heads: Size
    vision_config: VisionConfig
    model_type: str = "qwen2_5_vl"  # one of FAMILIES
    rms_norm_eps: Annotated[float, "(0, inf)"] = 1e-6
    rope_theta: Annotated[float, "(0, inf)"] = 1e6
    mrope_section: tuple[TokenId, TokenId, TokenId] = (16, 24, 24)  # of time, height, width
    mrope_interleaved: bool = False  # time, height and width take turns (Qwen3-VL)
    head_dim: Size = 0  # 0: hidden_size / num_attention_heads
    attention_bias: bool = True  # of queries, keys and values
    qk_norm: bool = False  # each head of queries and keys is normed
    partial_rotary_factor: Annotated[float, "(0, 1]"] = 1.0  # share of a head that is turned
    # what each layer is (Qwen3.5); (): all attend
    full_attention_interval: Size | None = None  # layers from one that attends to the next
    layer_types: tuple[Literal["full_attention", "linear_attention"], ...] = ()
    recurrent: RecurrentConfig | None = None  # None: all layers attend
    experts: ExpertsConfig | None = None  # of its MLPs; None: all are dense
    tie_word_embeddings: bool = False
    max_position_embeddings: Size = 128000
    image_token_id: TokenId = 151655
    video_token_id: TokenId = 151656
    vision_start_token_id: TokenId = 151652
    vision_end_token_id: TokenId = 151653
    bos_token_id: TokenId | None = 151643
    eos_token_id: TokenId | list[TokenId] | None = 151645
    torch_dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    extra: dict = field(default_factory=dict)  # keys that we carry along but do not read

    def __post_init__(self):
        heads = self.num_attention_heads
        if not self.head_dim:
            fits = self.hidden_size % heads == 0
            check_field(fits, "hidden_size", self.hidden_size, f"a multiple of its {heads} heads")
            self.head_dim = self.hidden_size // heads
        key_heads = self.num_key_value_heads
        check_field(
            heads % key_heads == 0,
            "num_key_value_heads",
            key_heads,
            f"a divisor of num_attention_heads ({heads})",
        )
        section = list(self.mrope_section)
        rotary_dim = int(self.head_dim * self.partial_rotary_factor)
        check_field(
            sum(section) * 2 == rotary_dim,
            "mrope_section",
            section,
            f"three numbers whose sum is half of {rotary_dim}, what is turned of head_dim",
        )
        self._check_tower(self.vision_config)
        if self.full_attention_interval is not None:
            self._check_layer_types(self.full_attention_interval)

    def _check_tower(self, vision: VisionConfig):
        width = vision.hidden_size
        check_field(
            width % (4 * vision.num_heads) == 0,
            "vision_config.hidden_size",
            width,
            "a multiple of 4 x num_heads, for 2-D rotary",
        )
        width = vision.out_hidden_size
        check_field(
            width == self.hidden_size,
            "vision_config.out_hidden_size",
            width,
            f"hidden_size ({self.hidden_size}); Qwen2-VL calls it vision_config.hidden_size",
        )
        blocks = list(vision.deepstack_visual_indexes)
        fits = len(blocks) < self.num_hidden_layers
        check_field(
            fits,
            "vision_config.deepstack_visual_indexes",
            blocks,
            f"fewer than num_hidden_layers ({self.num_hidden_layers})",
        )

    def _check_layer_types(self, interval: int):
        """Fill in which layers are recurrent, and check them."""
        count = self.num_hidden_layers
        if not self.layer_types:
            self.layer_types = tuple(
                "linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)
            )
        valid = len(self.layer_types) == count and "full_attention" in self.layer_types
        check_field(
            valid,
            "layer_types",
            list(self.layer_types),
            f"the types of {count} layers, of which one at least is full_attention",
        )

    @property
    def mrope_axes(self) -> tuple[int, ...]:
        """The axis of each frequency: 0 time, 1 height, 2 width; half of what is turned of a head.

        Example: sections 2, 1, 1 are 0 0 1 2, interleaved 0 1 2 0.
        """
        section = self.mrope_section
        if self.mrope_interleaved:
            return tuple(i % 3 if i < 3 * section[i % 3] else 0 for i in range(sum(section)))
        time, height, width = section
        return (0,) * time + (1,) * height + (2,) * width

    @classmethod
    def from_dict(cls, config: dict[str, Any], where: str = "config.json") -> "ModelConfig":
        """Read a config.json: the hub's flat form, or transformers 5's with text_config."""
        model_type = config.get("model_type")
        check_field(
            model_type in list(FAMILIES),
            f"{where}: model_type",
            model_type,
            f"{' or '.join(FAMILIES)}; other mixtures of experts and qwen4_exp are not computed",
        )
        family = FAMILIES[config["model_type"]]
        text = _section(config, where, "text_config")
        vision = _section(config, where, "vision_config")
        flat = {**config, **text, "model_type": model_type}
        _check_supported(flat, vision, family, where)
        flat.pop("mrope_section", None)  # only the rope's own counts
        if family.experts:  # as transformers 5 calls them
            flat.setdefault("num_experts", flat.pop("num_local_experts", None))
        for name, value in {**family.defaults, **family.experts}.items():
            if flat.get(name) is None:  # null is missing
                flat[name] = value
        rope = _rope(flat, where)
        for name in ("rope_theta", "mrope_section", "partial_rotary_factor"):
            if name in rope:
                flat[name] = rope[name]
        dtype = config.get("torch_dtype") or config.get("dtype") or flat.get("dtype")
        flat["torch_dtype"] = dtype or "float32"
        # transformers 5 repeats this key in text_config by default; the top level decides
        tied = flat.get("tie_word_embeddings", False)
        flat["tie_word_embeddings"] = config.get("tie_word_embeddings", tied)
        flat["vision_config"] = _flat_vision(vision, family, where)
        flat |= family.text
        if flat.get("head_dim") is None:
            flat.pop("head_dim", None)  # it is computed
        names = {field.name for field in (*fields(cls), *fields(RecurrentConfig))}
        flat["experts"] = flat["recurrent"] = None
        flat["extra"] = without(flat, names | REWRITTEN | family.experts.keys())
        built = build(cls, flat, where, json=True)
        if built.full_attention_interval is not None:
            built.recurrent = build(RecurrentConfig, flat, where, json=True)
        if family.experts:
            sizes = {name: flat[name] for name in family.experts}
            built.experts = build(ExpertsConfig, sizes, where, json=True)
            size = built.experts.moe_intermediate_size
            check_field(
                not family.turned_experts or built.hidden_size not in (size, 2 * size),
                f"{where}: moe_intermediate_size",
                size,
                "neither hidden_size nor half of it: nobody could tell whether the experts of a "
                "file are transposed",
            )
        return built

    def to_dict(self) -> dict:
        """Write the hub's config.json, which vLLM and every transformers with the family read."""
        family = FAMILIES[self.model_type]
        text = {}
        for name, value in asdict(self).items():
            text |= (value or {}) if name == "recurrent" else {name: value}
        vision = text.pop("vision_config")
        extra = text.pop("extra")
        experts = text.pop("experts")
        mrope_section = text.pop("mrope_section")
        in_channels = vision.pop("in_channels")
        config = {
            **extra,
            "architectures": [family.architecture],
            "hidden_act": "silu",
            **without(text, family.text),
            **{name: experts[name] for name in family.experts},
            "rope_scaling": {"type": "mrope", "mrope_section": mrope_section},
            "vision_config": {
                "model_type": self.model_type,
                **without(vision, family.tower),
                "hidden_act": family.hidden_act,
                "in_chans": in_channels,
                "spatial_patch_size": vision["patch_size"],
            },
        }
        return family.write(config)


# keys of a config.json that to_dict writes anew, by other names or from other fields
REWRITTEN = {
    "text_config",
    "rope_parameters",
    "rope_scaling",
    "dtype",
    "architectures",
    "transformers_version",
}


def without(values: dict, names: Container[str]) -> dict:
    """Leave out some keys."""
    return {name: value for name, value in values.items() if name not in names}


def _section(config: dict, where: str, *names: str) -> dict:
    """Return the object that the first of these keys holds, {} where they are missing or null."""
    for name in names:
        section = config.get(name)
        if section:
            check_field(isinstance(section, dict), f"{where}: {name}", section, "an object")
            return section
    return {}


def _rope(config: dict, where: str) -> dict:
    """Return what transformers 5, or an older one, says of rotary embeddings."""
    return _section(config, where, "rope_parameters", "rope_scaling")


def _check_supported(flat: dict, vision: dict, family: ModelSpec, where: str):
    """Refuse a model that we do not compute; what is missing or null is what we compute."""
    rope = _rope(flat, where)
    vision_rope = _rope(vision, f"{where}: vision_config")
    supported = {  # key: what the file says, and what is computed
        "rope_scaling.type": (rope.get("rope_type") or rope.get("type"), "mrope", "default"),
        "hidden_act": (flat.get("hidden_act"), "silu"),
        "attention_bias": (flat.get("attention_bias"), family.text["attention_bias"]),
        "rope_scaling.mrope_interleaved": (
            rope.get("mrope_interleaved"),
            family.text["mrope_interleaved"],
        ),
        "norm_topk_prob": (flat.get("norm_topk_prob"), True),
        "use_sliding_window": (flat.get("use_sliding_window"), False),
        "attn_output_gate": (flat.get("attn_output_gate"), True),
        "output_gate_type": (flat.get("output_gate_type"), "swish", "silu"),
        "vision_config.hidden_act": (vision.get("hidden_act"), family.hidden_act),
        "vision_config.rope_type": (vision_rope.get("rope_type"), "axial", "default"),
    }
    for name, (value, *computed) in supported.items():
        check_field(
            value is None or value in computed,
            f"{where}: {name}",
            value,
            f"{computed[0]!r}; no other is supported",
        )


def _flat_vision(vision: dict, family: ModelSpec, where: str) -> dict:
    """Return the fields of VisionConfig."""
    vision = vision | {"in_channels": vision.get("in_chans", vision.get("in_channels", 3))}
    rope = _rope(vision, f"{where}: vision_config")
    if "rope_theta" in rope:
        vision["rope_theta"] = rope["rope_theta"]
    return family.read_vision(vision, where) | family.tower
