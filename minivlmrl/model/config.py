"""ModelConfig and VisionConfig: parse and write the config.json of a Hugging Face folder."""

import math
from collections.abc import Container
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, Literal

from minivlmrl.config.parsing import build, check_field
from minivlmrl.model.families.registry import FAMILIES, ModelSpec

NumExperts = Annotated[int, "[1, 1e6]"]
Size = Annotated[int, "[1, 1e9]"]
TokenId = Annotated[int, "[0, 1e9]"]
# limited, because a larger model would take minutes to build before an error about missing weights
Depth = Annotated[int, "[1, 1000]"]


@dataclass(frozen=True)
class ExpertsConfig:
    """Sizes of a mixture of experts, named as in config.json."""

    num_experts: NumExperts  # E
    num_experts_per_tok: NumExperts  # k
    moe_intermediate_size: NumExperts  # I
    # width of the shared expert, which processes all tokens; None without a shared expert
    shared_expert_intermediate_size: NumExperts | None = None
    # indices of layers with a dense MLP instead of experts
    mlp_only_layers: list[Annotated[int, ">= 0"]] = field(default_factory=list)
    decoder_sparse_step: NumExperts = 1  # every decoder_sparse_step-th layer has experts

    def __post_init__(self):
        check_field(
            self.num_experts_per_tok <= self.num_experts,
            "num_experts_per_tok",
            self.num_experts_per_tok,
            f"num_experts ({self.num_experts}) or less",
        )

    def has_experts(self, index: int) -> bool:
        """Return True if the layer with this index has experts, and False if the MLP is dense."""
        return index not in self.mlp_only_layers and (index + 1) % self.decoder_sparse_step == 0


@dataclass(frozen=True)
class RecurrentConfig:
    """Sizes of the recurrent layers of Qwen3.5, named as in config.json."""

    linear_num_key_heads: Size
    linear_num_value_heads: Size
    linear_key_head_dim: Size
    linear_value_head_dim: Size
    linear_conv_kernel_dim: Annotated[int, ">= 2"]  # kernel size of the convolution, in tokens

    def __post_init__(self):
        check_field(
            self.linear_num_value_heads % self.linear_num_key_heads == 0,
            "linear_num_key_heads",
            self.linear_num_key_heads,
            f"a divisor of linear_num_value_heads ({self.linear_num_value_heads})",
        )


@dataclass(frozen=True)
class VisionConfig:
    """Config of the vision tower, named as in Qwen2.5-VL, with the defaults of transformers."""

    depth: Depth = 32  # number of transformer blocks
    hidden_size: Size = 3584  # E
    intermediate_size: Size = 3420
    num_heads: Size = 16
    out_hidden_size: Size = 3584  # the decoder's hidden_size
    in_channels: Size = 3
    patch_size: Size = 14  # side of a patch in pixels
    temporal_patch_size: Size = 2  # frames in one patch; an image is repeated
    # side of the square of patches that is merged into one decoder token, in patches
    spatial_merge_size: Size = 2
    # side of an attention window in pixels; None makes each frame one window (Qwen2-VL)
    window_size: Size | None = 112
    # indices of blocks in which patches attend to the whole frame
    fullatt_block_indexes: tuple[TokenId, ...] = (7, 15, 23, 31)
    # M-RoPE time positions per second; None uses one position per time step (Qwen2-VL)
    tokens_per_second: Size | None = 4
    norm: Literal["rms_norm", "layer_norm"] = "rms_norm"
    rope_theta: Annotated[float, "(0, inf)"] = 1e4  # base of the 2-D rotary embedding
    # number of learned position embeddings, which form a square grid that is interpolated to the
    # size of each image; None if the tower does not learn positions
    num_position_embeddings: Size | None = None
    # standard deviation of these embeddings in a new model
    initializer_range: Annotated[float, "[0, inf)"] = 0.02
    # indices of blocks whose output is also added to the first layers of the decoder (DeepStack in
    # Qwen3-VL)
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
            f"a list of different indices below depth ({self.depth})",
        )
        if self.window_size is not None:
            token_side = self.patch_size * self.spatial_merge_size
            fits = self.window_size >= token_side
            check_field(fits, "window_size", self.window_size, f"{token_side} or more")

    @property
    def patch_dim(self) -> int:
        """Return the number of values in a flattened patch: channels x frames x patch_size^2.

        In the Qwen2.5-VL models on the hub the number is 1176.
        """
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


@dataclass
class ModelConfig:
    """Config of a model. The defaults are the values that all Qwen2.5-VL checkpoints share."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Depth
    num_attention_heads: Size
    num_key_value_heads: Size
    vision_config: VisionConfig
    model_type: str = "qwen2_5_vl"  # a key of FAMILIES
    rms_norm_eps: Annotated[float, "(0, inf)"] = 1e-6
    rope_theta: Annotated[float, "(0, inf)"] = 1e6
    # number of rotary frequencies that encode time, height and width
    mrope_section: tuple[TokenId, TokenId, TokenId] = (16, 24, 24)
    mrope_interleaved: bool = False  # frequencies alternate between the axes, as in Qwen3-VL
    head_dim: Size = 0  # 0 means hidden_size / num_attention_heads
    attention_bias: bool = True  # whether the projections of queries, keys and values have biases
    qk_norm: bool = False  # whether each head of queries and keys is normalised
    # fraction of head_dim that is rotated
    partial_rotary_factor: Annotated[float, "(0, 1]"] = 1.0
    # In Qwen3.5 only every full_attention_interval-th layer has attention; the other layers are
    # recurrent. None means that all layers have attention.
    full_attention_interval: Size | None = None
    # type of each layer; () means that all layers have attention
    layer_types: tuple[Literal["full_attention", "linear_attention"], ...] = ()
    recurrent: RecurrentConfig | None = None  # None if all layers have attention
    experts: ExpertsConfig | None = None  # None if all MLPs are dense
    tie_word_embeddings: bool = False
    max_position_embeddings: Size = 128000
    image_token_id: TokenId = 151655
    video_token_id: TokenId = 151656
    vision_start_token_id: TokenId = 151652
    vision_end_token_id: TokenId = 151653
    bos_token_id: TokenId | None = 151643
    eos_token_id: TokenId | list[TokenId] | None = 151645
    torch_dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    extra: dict = field(default_factory=dict)  # unused keys, which to_dict writes unchanged

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
            f"three numbers whose sum is half of {rotary_dim}, the rotated part of head_dim",
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
            "a multiple of 4 x num_heads, for 2-D rotary embeddings",
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
        """Set layer_types to the default if the list is empty, and check the list."""
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
            f"a list of {count} layer types with at least one full_attention",
        )

    @property
    def mrope_axes(self) -> tuple[int, ...]:
        """Return the position axis of each rotary frequency: 0 for time, 1 for height, 2 for width.

        Example: mrope_section (2, 1, 1) gives 0 0 1 2, and 0 1 2 0 with mrope_interleaved.
        """
        section = self.mrope_section
        if self.mrope_interleaved:
            return tuple(i % 3 if i < 3 * section[i % 3] else 0 for i in range(sum(section)))
        time, height, width = section
        return (0,) * time + (1,) * height + (2,) * width

    @classmethod
    def from_dict(cls, config: dict[str, Any], where: str = "config.json") -> "ModelConfig":
        """Parse a config.json, which may be flat as on the hub or nested as in transformers 5.

        Args:
            config: the parsed JSON object.
            where: name of the file, for error messages.
        Raises:
            ValueError: a value is invalid or not supported.
        """
        model_type = config.get("model_type")
        check_field(
            model_type in list(FAMILIES),
            f"{where}: model_type",
            model_type,
            f"{' or '.join(FAMILIES)}; other mixtures of experts and qwen4_exp are not supported",
        )
        family = FAMILIES[config["model_type"]]
        text = _section(config, where, "text_config")
        vision = _section(config, where, "vision_config")
        flat = {**config, **text, "model_type": model_type}
        _check_supported(flat, vision, family, where)
        flat.pop("mrope_section", None)  # only the mrope_section in the rope settings is used
        if family.experts:  # transformers 5 writes num_local_experts instead
            flat.setdefault("num_experts", flat.pop("num_local_experts", None))
        for name, value in {**family.defaults, **family.experts}.items():
            if flat.get(name) is None:  # null is treated as a missing key
                flat[name] = value
        rope = _rope(flat, where)
        for name in ("rope_theta", "mrope_section", "partial_rotary_factor"):
            if name in rope:
                flat[name] = rope[name]
        dtype = config.get("torch_dtype") or config.get("dtype") or flat.get("dtype")
        flat["torch_dtype"] = dtype or "float32"
        # The value at the top level takes precedence, because transformers 5 always writes the
        # default value into text_config.
        tied = flat.get("tie_word_embeddings", False)
        flat["tie_word_embeddings"] = config.get("tie_word_embeddings", tied)
        flat["vision_config"] = _flat_vision(vision, family, where)
        flat |= family.text
        if flat.get("head_dim") is None:
            flat.pop("head_dim", None)  # computed in __post_init__
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
                not family.transposed_experts or built.hidden_size not in (size, 2 * size),
                f"{where}: moe_intermediate_size",
                size,
                "neither hidden_size nor half of it, because then the shapes in a file would not "
                "show whether the experts are transposed",
            )
        return built

    def to_dict(self) -> dict:
        """Return the contents of a config.json in the hub's layout.

        vLLM and every transformers release that supports the family can read this layout.
        """
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


# keys of a config.json that are not copied to `extra`, because to_dict computes their values
REWRITTEN = {
    "text_config",
    "rope_parameters",
    "rope_scaling",
    "dtype",
    "architectures",
    "transformers_version",
}


def without(values: dict, names: Container[str]) -> dict:
    """Return a copy of a dictionary without the keys in `names`."""
    return {name: value for name, value in values.items() if name not in names}


def _section(config: dict, where: str, *names: str) -> dict:
    """Return the object at the first of these keys that is not empty; {} if all are empty."""
    for name in names:
        section = config.get(name)
        if section:
            check_field(isinstance(section, dict), f"{where}: {name}", section, "an object")
            return section
    return {}


def _rope(config: dict, where: str) -> dict:
    """Return the rotary settings, whose key differs between transformers 5 and older releases."""
    return _section(config, where, "rope_parameters", "rope_scaling")


def _check_supported(flat: dict, vision: dict, family: ModelSpec, where: str):
    """Raise ValueError if a setting is not supported. Missing and null settings are accepted."""
    rope = _rope(flat, where)
    vision_rope = _rope(vision, f"{where}: vision_config")
    supported = {  # key -> (value in the file, supported values ...)
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
            f"{computed[0]!r}; no other value is supported",
        )


def _flat_vision(vision: dict, family: ModelSpec, where: str) -> dict:
    """Convert the vision_config of a config.json to the fields of VisionConfig."""
    vision = vision | {"in_channels": vision.get("in_chans", vision.get("in_channels", 3))}
    rope = _rope(vision, f"{where}: vision_config")
    if "rope_theta" in rope:
        vision["rope_theta"] = rope["rope_theta"]
    return family.read_vision(vision, where) | family.tower
