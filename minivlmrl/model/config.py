"""ModelConfig and VisionConfig, with field names as in config.json.

Model families with other settings define subclasses.
"""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

Size = Annotated[int, "[1, 1e9]"]
TokenId = Annotated[int, "[0, 1e9]"]
# number of layers, limited because building a million would take minutes
Depth = Annotated[int, "[1, 1000]"]


@dataclass(frozen=True)
class VisionConfig:
    """Vision tower config, with transformers' defaults."""

    depth: Depth = 32
    hidden_size: Size = 3584
    intermediate_size: Size = 3420
    num_heads: Size = 16
    out_hidden_size: Size = 3584  # hidden_size of the decoder
    in_channels: Size = 3
    patch_size: Size = 14  # patch width and height, in pixels
    temporal_patch_size: Size = 2  # frames per patch; an image is repeated to fill a patch
    spatial_merge_size: Size = 2  # patches per side of the square merged into one decoder token
    rope_theta: Annotated[float, "(0, inf)"] = 1e4  # base for the frequencies of the 2-D rotary embedding
    # standard deviation for new learned position embeddings
    initializer_range: Annotated[float, "[0, inf)"] = 0.02
    # unused keys in vision_config, saved unchanged with the model
    extra: dict = field(default_factory=dict, hash=False)

    # constants in Qwen2-VL; other families override them, or make them dataclass fields
    norm: ClassVar[Literal["rms_norm", "layer_norm"]] = "layer_norm"
    # attention window width and height in pixels, None = whole frame
    window_size: ClassVar[int | None] = None
    # blocks with full instead of window attention
    fullatt_block_indexes: ClassVar[tuple[int, ...]] = ()
    # M-RoPE time positions per second; None = one per time step
    tokens_per_second: ClassVar[int | None] = None
    # DeepStack: tower blocks whose outputs are added to the first decoder layers
    deepstack_visual_indexes: ClassVar[tuple[int, ...]] = ()

    @property
    def patch_dim(self) -> int:
        """Return the values per patch, such as 3 x 2 x 14^2 = 1176 in Qwen2.5-VL."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


@dataclass
class ModelConfig:
    """Decoder config for Qwen2-VL and Qwen2.5-VL, with transformers' defaults."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Depth
    num_attention_heads: Size
    num_key_value_heads: Size
    vision_config: VisionConfig
    model_type: str = "qwen2_5_vl"  # key in FAMILIES in families/registry.py
    rms_norm_eps: Annotated[float, "(0, inf)"] = 1e-5
    rope_theta: Annotated[float, "(0, inf)"] = 1e6
    # rotary frequencies for time, height, width
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
    extra: dict = field(default_factory=dict)  # unused keys in config.json, saved unchanged with the model

    # constants in Qwen2; other families override them, or make them dataclass fields
    attention_bias: ClassVar[bool] = True  # whether q, k and v projections have biases
    qk_norm: ClassVar[bool] = False  # whether q and k are normalized per head
    mrope_interleaved: ClassVar[bool] = False  # whether rotary frequencies alternate between time, height and width

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def rotary_dim(self) -> int:
        """Return how many elements per head get rotary embeddings."""
        return self.head_dim

    @property
    def mrope_axes(self) -> tuple[int, ...]:
        """Return the position axis per rotary frequency: 0 time, 1 height, 2 width.

        Example: mrope_section (2, 1, 1) gives (0, 0, 1, 2), or (0, 1, 2, 0) if mrope_interleaved.
        """
        section = self.mrope_section
        if self.mrope_interleaved:
            return tuple(i % 3 if i < 3 * section[i % 3] else 0 for i in range(sum(section)))
        time, height, width = section
        return (0,) * time + (1,) * height + (2,) * width
