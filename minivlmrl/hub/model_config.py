"""The architecture as numbers: config.json of a Hugging Face folder, read and written."""

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Literal

from minivlmrl.hub.family import FAMILIES
from minivlmrl.hub.recipe_values import build, require

Size = Annotated[int, "[1, 1e9]"]
TokenId = Annotated[int, "[0, 1e9]"]
# more would take minutes to build, before the weights are seen to be missing
Depth = Annotated[int, "[1, 1000]"]


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
        deep = self.deepstack_visual_indexes
        square = math.isqrt(count) ** 2 == count
        require(square, "num_position_embeddings", count, "a square number")
        known = len(set(deep)) == len(deep) and all(i < self.depth for i in deep)
        needed = "different blocks of the tower, counted from 0"
        require(known, "deepstack_visual_indexes", list(deep), needed)
        least = self.patch_size * self.spatial_merge_size
        window = self.window_size
        require(window is None or window >= least, "window_size", window, f"{least} or more")

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
    model_type: Literal[tuple(FAMILIES)] = "qwen2_5_vl"
    rms_norm_eps: Annotated[float, "(0, inf)"] = 1e-6
    rope_theta: Annotated[float, "(0, inf)"] = 1e6
    mrope_section: tuple[TokenId, TokenId, TokenId] = (16, 24, 24)  # of time, height, width
    mrope_interleaved: bool = False  # time, height and width take turns (Qwen3-VL)
    head_dim: Size | None = None  # None: hidden_size / num_attention_heads
    attention_bias: bool = True  # of queries, keys and values
    qk_norm: bool = False  # each head of queries and keys is normed
    partial_rotary_factor: Annotated[float, "(0, 1]"] = 1.0  # share of a head that is turned
    # what each layer is, and the sizes of recurrent ones (Qwen3.5); (): all attend
    full_attention_interval: Size | None = None  # layers from one that attends to the next
    layer_types: tuple[Literal["full_attention", "linear_attention"], ...] = ()
    linear_num_key_heads: Size | None = None
    linear_num_value_heads: Size | None = None
    linear_key_head_dim: Size | None = None
    linear_value_head_dim: Size | None = None
    linear_conv_kernel_dim: Annotated[int, ">= 2"] | None = None  # tokens that it mixes
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
        vision, heads, groups = (
            self.vision_config,
            self.num_attention_heads,
            self.num_key_value_heads,
        )
        if self.head_dim is None:
            words = f"a multiple of its {heads} heads"
            require(self.hidden_size % heads == 0, "hidden_size", self.hidden_size, words)
            self.head_dim = self.hidden_size // heads
        words = f"a divisor of num_attention_heads ({heads})"
        require(heads % groups == 0, "num_key_value_heads", groups, words)
        sections = list(self.mrope_section)
        turned = int(self.head_dim * self.partial_rotary_factor)
        words = f"three numbers whose sum is half of {turned}, what is turned of head_dim"
        require(sum(sections) * 2 == turned, "mrope_section", sections, words)
        width = vision.hidden_size
        out = vision.out_hidden_size
        by = 4 * vision.num_heads
        words = "a multiple of 4 x num_heads, for 2-D rotary"
        require(width % by == 0, "vision_config.hidden_size", width, words)
        same = f"hidden_size ({self.hidden_size}); Qwen2-VL calls it vision_config.hidden_size"
        require(out == self.hidden_size, "vision_config.out_hidden_size", out, same)
        deep, layers = vision.deepstack_visual_indexes, self.num_hidden_layers
        fewer = f"fewer than num_hidden_layers ({layers})"
        require(len(deep) < layers, "vision_config.deepstack_visual_indexes", list(deep), fewer)
        if self.full_attention_interval is None:
            return
        if not self.layer_types:
            kinds = ("linear_attention", "full_attention")
            every = self.full_attention_interval
            self.layer_types = tuple(kinds[i % every == every - 1] for i in range(layers))
        known = len(self.layer_types) == layers and "full_attention" in self.layer_types
        words = f"the types of {layers} layers, of which one at least is full_attention"
        require(known, "layer_types", list(self.layer_types), words)
        heads, groups = self.linear_num_value_heads, self.linear_num_key_heads
        words = f"a divisor of linear_num_value_heads ({heads})"
        require(heads % groups == 0, "linear_num_key_heads", groups, words)

    @property
    def mrope_axes(self) -> tuple[int, ...]:
        """The axis of each frequency: 0 time, 1 height, 2 width; half of what is turned of a head.

        Example: sections 2, 1, 1 are 0 0 1 2, interleaved 0 1 2 0.
        """
        section = self.mrope_section
        count = sum(self.mrope_section)
        if self.mrope_interleaved:
            return tuple(i % 3 if i < 3 * section[i % 3] else 0 for i in range(count))
        return tuple(axis for axis in range(3) for _ in range(section[axis]))

    @classmethod
    def from_dict(cls, config: dict, where: str = "config.json") -> "ModelConfig":
        """Read a config.json: the hub's flat form, or transformers 5's with text_config."""
        model_type = config.get("model_type") if isinstance(config, dict) else config
        known = f"{' or '.join(FAMILIES)}; mixtures of experts and qwen4_exp are not computed"
        require(model_type in list(FAMILIES), f"{where}: model_type", model_type, known)
        text = _section(config, where, "text_config")
        family = FAMILIES[model_type]
        flat = {**config, **text, "model_type": model_type}
        rope = _section(flat, where, "rope_parameters", "rope_scaling")
        flat.pop("mrope_section", None)  # only the rope's own counts
        # null is missing
        flat |= {name: value for name, value in family.defaults.items() if flat.get(name) is None}
        turned = "rope_theta", "mrope_section", "partial_rotary_factor"
        flat |= {name: rope[name] for name in turned if name in rope}
        dtypes = config.get("torch_dtype"), config.get("dtype"), flat.get("dtype"), "float32"
        flat["torch_dtype"] = next(filter(None, dtypes))
        # transformers 5 repeats this key in text_config by default; the top level decides
        tied = flat.get("tie_word_embeddings", False)
        flat["tie_word_embeddings"] = config.get("tie_word_embeddings", tied)
        vision = _section(config, where, "vision_config")
        axial = _section(vision, f"{where}: vision_config", "rope_parameters", "rope_scaling")
        turns = rope.get("mrope_interleaved"), family.text["mrope_interleaved"]
        only = {  # key: what the file says, and what is computed
            "rope_scaling.type": (rope.get("rope_type") or rope.get("type"), "mrope", "default"),
            "hidden_act": (flat.get("hidden_act"), "silu"),
            "attention_bias": (flat.get("attention_bias"), family.text["attention_bias"]),
            "rope_scaling.mrope_interleaved": turns,
            "use_sliding_window": (flat.get("use_sliding_window"), False),
            "attn_output_gate": (flat.get("attn_output_gate"), True),
            "output_gate_type": (flat.get("output_gate_type"), "swish", "silu"),
            "vision_config.hidden_act": (vision.get("hidden_act"), family.hidden_act),
            "vision_config.rope_type": (axial.get("rope_type"), "axial", "default"),
        }
        for name, (value, *known) in only.items():
            needed = f"{known[0]!r}; no other is supported"
            require(value in (None, *known), f"{where}: {name}", value, needed)
        vision = {**vision, "in_channels": vision.get("in_chans", vision.get("in_channels", 3))}
        vision |= {name: axial[name] for name in {"rope_theta"} & axial.keys()}
        flat |= {"vision_config": family.read_vision(vision, where) | family.tower, **family.text}
        known = {field.name for field in fields(cls)}
        known |= {"text_config", "rope_parameters", "rope_scaling", "dtype"}
        known |= {"architectures", "transformers_version"}
        flat["extra"] = {name: value for name, value in flat.items() if name not in known}
        return build(cls, flat, where, json=True)

    def to_dict(self) -> dict:
        """Write the hub's config.json, which vLLM and every transformers with the family read."""
        family = FAMILIES[self.model_type]
        out = asdict(self)
        tower, extra, mrope_section = map(out.pop, ("vision_config", "extra", "mrope_section"))
        out = {name: value for name, value in out.items() if name not in family.text}
        vision = {name: value for name, value in tower.items() if name not in family.tower}
        vision |= {"hidden_act": family.hidden_act, "in_chans": vision.pop("in_channels")}
        vision = {"model_type": self.model_type, **vision}
        vision["spatial_patch_size"] = tower["patch_size"]
        out["rope_scaling"] = {"type": "mrope", "mrope_section": mrope_section}
        out = {**extra, "architectures": [family.architecture], "hidden_act": "silu", **out}
        return family.write(out | {"vision_config": vision})


def _section(config: dict, where: str, *names: str) -> dict:
    """Return the object that the first of these keys holds, {} where they are missing or null."""
    name = next(filter(config.get, names), "")
    section = config.get(name, {})
    require(isinstance(section, dict), f"{where}: {name}", section, "an object")
    return section
