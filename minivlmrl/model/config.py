"""ModelConfig and VisionConfig: a model's sizes and settings, with config.json's names.

model/config_json.py reads, checks and writes config.json. A family whose decoder or vision tower has different settings
defines a subclass of ModelConfig or VisionConfig.
"""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

Size = Annotated[int, "[1, 1e9]"]
TokenId = Annotated[int, "[0, 1e9]"]
# A model with a million layers, set by mistake, would take minutes to build.
Depth = Annotated[int, "[1, 1000]"]


@dataclass(frozen=True)
class VisionConfig:
    """Vision-tower config of all model families, with transformers' defaults for Qwen2-VL and Qwen2.5-VL."""

    depth: Depth = 32  # number of transformer blocks
    hidden_size: Size = 3584  # E
    intermediate_size: Size = 3420
    num_heads: Size = 16
    out_hidden_size: Size = 3584  # the decoder's hidden_size
    in_channels: Size = 3
    patch_size: Size = 14  # patch side in pixels
    temporal_patch_size: Size = 2  # frames in one patch; an image is repeated to fill them
    spatial_merge_size: Size = 2  # n; n x n patches are merged into one decoder token
    rope_theta: Annotated[float, "(0, inf)"] = 1e4  # 2-D rotary embedding's base
    # standard deviation of the learned position embeddings in a new model
    initializer_range: Annotated[float, "[0, inf)"] = 0.02
    # unused keys of config.json's vision_config, which to_dict writes unchanged
    extra: dict = field(default_factory=dict, hash=False)

    # settings that are fixed in Qwen2-VL, but that other families override or read from config.json
    norm: ClassVar[Literal["rms_norm", "layer_norm"]] = "layer_norm"
    # side of a square attention window in pixels; None makes each frame one window
    window_size: ClassVar[int | None] = None
    # indices of the blocks without windows, in which patches attend to their whole frame
    fullatt_block_indexes: ClassVar[tuple[int, ...]] = ()
    # number of M-RoPE time positions per second of video; None uses one position per time step
    tokens_per_second: ClassVar[int | None] = None
    # DeepStack: indices of tower blocks whose output is also added to the decoder's first layers
    deepstack_visual_indexes: ClassVar[tuple[int, ...]] = ()

    @property
    def patch_dim(self) -> int:
        """Return the number of values in a flattened patch, for example 3 x 2 x 14^2 = 1176 in Qwen2.5-VL."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


@dataclass
class ModelConfig:
    """Decoder config of Qwen2-VL and Qwen2.5-VL, with transformers' defaults for keys that config.json omits."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Depth
    num_attention_heads: Size
    num_key_value_heads: Size
    vision_config: VisionConfig
    model_type: str = "qwen2_5_vl"  # a key in FAMILIES in families/registry.py
    rms_norm_eps: Annotated[float, "(0, inf)"] = 1e-5
    rope_theta: Annotated[float, "(0, inf)"] = 1e6
    # number of rotary frequencies that encode time, height and width
    mrope_section: tuple[TokenId, TokenId, TokenId] = (16, 24, 24)
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

    # settings that are fixed in Qwen2, but that other families override or read from config.json
    attention_bias: ClassVar[bool] = True  # whether the query, key and value projections have biases
    qk_norm: ClassVar[bool] = False  # whether each query and key head is normalized
    mrope_interleaved: ClassVar[bool] = False  # whether the rotary frequencies alternate between the axes

    @property
    def head_dim(self) -> int:
        """Return D, the number of elements in each attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def rotary_dim(self) -> int:
        """Return the number of elements in each head that are rotated."""
        return self.head_dim

    @property
    def mrope_axes(self) -> tuple[int, ...]:
        """Return the axis that each rotary frequency encodes: 0 time, 1 height or 2 width.

        Example: mrope_section (2, 1, 1) has 2 frequencies for time, 1 for height and 1 for width:
            (0, 0, 1, 2), or (0, 1, 2, 0) if mrope_interleaved
        """
        section = self.mrope_section
        if self.mrope_interleaved:
            return tuple(i % 3 if i < 3 * section[i % 3] else 0 for i in range(sum(section)))
        time, height, width = section
        return (0,) * time + (1,) * height + (2,) * width
