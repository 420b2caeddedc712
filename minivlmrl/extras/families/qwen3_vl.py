"""Qwen3-VL: vision tower, video preprocessing and configuration files.

The vision tower has learned position embeddings and 2-D rotary embeddings, but no windowed attention. DeepStack adds
outputs from intermediate vision blocks to the image tokens, after the first decoder layers. The decoder (decoder.py)
has q and k norms, no biases, and interleaved M-RoPE.

Dimension letters: P patches in all images, E hidden_size, M merged tokens (P / 4).
Source: the Qwen3-VL report; modeling_qwen3_vl.py in transformers.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivlmrl.config.parsing import build
from minivlmrl.config.types import Count
from minivlmrl.data.chat_template import DEFAULT_QWEN3, VIDEO, join_text
from minivlmrl.data.image import Grid, ImageProcessor, check_ratio
from minivlmrl.data.image_settings import FIXED, SAMPLING, area_bounds, patch_settings, read_sampling, write_sampling
from minivlmrl.data.tokenizer import SpecialToken
from minivlmrl.errors import UserError, error_context, pluralize, require
from minivlmrl.model.config import Depth, ModelConfig, Size, TokenId, VisionConfig
from minivlmrl.model.families.base import Family
from minivlmrl.model.vision import EPS, PatchEmbed, VisionBlock, VisionTower, vision_layout


@dataclass
class Qwen3VLConfig(ModelConfig):
    """Qwen3-VL decoder config with transformers defaults."""

    rms_norm_eps: Annotated[float, "(0, inf)"] = 1e-6
    rope_theta: Annotated[float, "(0, inf)"] = 5e5
    mrope_section: tuple[TokenId, TokenId, TokenId] = (24, 20, 20)
    head_dim: Size = 128

    attention_bias: ClassVar[bool] = False
    qk_norm: ClassVar[bool] = True
    mrope_interleaved: ClassVar[bool] = True


@dataclass(frozen=True)
class Qwen3VisionConfig(VisionConfig):
    depth: Depth = 27
    hidden_size: Size = 1152
    intermediate_size: Size = 4304
    patch_size: Size = 16
    # learned position embeddings form a square grid: 48 x 48
    num_position_embeddings: Size = 2304

    def __post_init__(self):
        count = self.num_position_embeddings
        is_square = math.isqrt(count) ** 2 == count
        require(is_square, "num_position_embeddings", count, "a square number")


@dataclass(frozen=True)
class DeepStackVisionConfig(Qwen3VisionConfig):
    deepstack_visual_indexes: tuple[TokenId, ...] = (8, 16, 24)

    def __post_init__(self):
        super().__post_init__()
        blocks = self.deepstack_visual_indexes
        require(
            len(set(blocks)) == len(blocks) and all(i < self.depth for i in blocks),
            "deepstack_visual_indexes",
            list(blocks),
            f"a list of different indices below depth ({self.depth})",
        )


def gelu_mlp(hidden_size: int, intermediate_size: int, bias: bool) -> nn.Module:
    """Build the MLP of a vision block."""
    first = nn.Linear(hidden_size, intermediate_size, bias=bias)
    last = nn.Linear(intermediate_size, hidden_size, bias=bias)
    return nn.Sequential(OrderedDict(linear_fc1=first, gelu=nn.GELU("tanh"), linear_fc2=last))


class Merger(nn.Module):
    """Merge 2 x 2 patches into one token.

    Args:
        norm_all_patches: normalize the four patches jointly, as in DeepStack, not one by one.
    """

    def __init__(self, vision_config: VisionConfig, norm_all_patches: bool):
        super().__init__()
        self.width = vision_config.hidden_size * vision_config.spatial_merge_size**2
        self.norm = nn.LayerNorm(self.width if norm_all_patches else vision_config.hidden_size, EPS)
        self.linear_fc1 = nn.Linear(self.width, self.width)
        self.linear_fc2 = nn.Linear(self.width, vision_config.out_hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.view(-1, *self.norm.normalized_shape))
        hidden = self.linear_fc1(x.view(-1, self.width))
        return self.linear_fc2(F.gelu(hidden))


class Qwen3VisionTransformer(VisionTower):
    """Vision tower for Qwen3-VL and Qwen3.5."""

    config: Qwen3VisionConfig

    def __init__(self, vision_config: Qwen3VisionConfig):
        super().__init__()
        self.config = vision_config
        self.patch_embed = PatchEmbed(vision_config)
        self.patch_embed.proj.bias = nn.Parameter(torch.zeros(vision_config.hidden_size))
        self.pos_embed = nn.Embedding(vision_config.num_position_embeddings, vision_config.hidden_size)
        self.blocks = nn.ModuleList(VisionBlock(vision_config, gelu_mlp) for _ in range(vision_config.depth))
        self.merger = Merger(vision_config, norm_all_patches=False)
        deep_blocks = vision_config.deepstack_visual_indexes
        self.deepstack_merger_list = nn.ModuleList(Merger(vision_config, norm_all_patches=True) for _ in deep_blocks)

    def forward(self, pixel_values: Tensor, image_grid_thw: Tensor) -> Tensor:
        """Encode all images; see VisionTransformer.forward for the arguments.

        Returns:
            (M, (1 + k) * out_hidden_size): tokens, then DeepStack embeddings for the first k decoder layers
        """
        grids = tuple(map(tuple, image_grid_thw.tolist()))
        layout = vision_layout(grids, self.config, pixel_values.device)
        x = self.patch_embed(pixel_values)  # (P, E)
        positions = torch.cat([self.positions(*grid) for grid in grids])
        x = x + positions.to(x.dtype)
        deep_blocks = self.config.deepstack_visual_indexes
        deep_embeds = []
        for i, block in enumerate(self.blocks):
            x = block(x, layout.cos, layout.sin, layout.frames)
            if i in deep_blocks:
                merger = self.deepstack_merger_list[deep_blocks.index(i)]
                deep_embeds.append(merger(x))
        return torch.cat([self.merger(x), *deep_embeds], dim=-1)

    def positions(self, t: int, h: int, w: int) -> Tensor:
        """Interpolate the learned position embeddings bilinearly to h x w patches, with aligned corners.

        Returns:
            (t * h * w, E), in pixel_values order, repeated for all t time steps
        """
        side = round(len(self.pos_embed.weight) ** 0.5)
        merge = self.config.spatial_merge_size
        table = self.pos_embed.weight.view(side, side, -1)
        row_weights = interpolation_weights(h, side).to(table)  # (h, side)
        column_weights = interpolation_weights(w, side).to(table)  # (w, side)
        grid = torch.einsum("hi,wj,ije->hwe", row_weights, column_weights, table)
        # put the 2 x 2 patches of a token next to each other
        blocks = grid.view(h // merge, merge, w // merge, merge, -1).transpose(1, 2)
        return blocks.reshape(h * w, -1).repeat(t, 1)


def interpolation_weights(count: int, side: int) -> Tensor:
    """Return float64 weights (count, side) for linear interpolation from `side` to `count` points.

    Example: interpolation from side=2 to count=3 points has the weights (1, 0), (.5, .5) and (0, 1).
    """
    positions = torch.arange(count, dtype=torch.float64)
    positions = positions * (side - 1) / max(count - 1, 1)
    distances = (positions[:, None] - torch.arange(side)).abs()
    return (1 - distances).clamp(min=0)


# keys that stay at the top level in config.json, not in text_config
TOP_LEVEL = (
    "architectures", "model_type", "torch_dtype", "tie_word_embeddings",
    "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "eos_token_id",
)  # fmt: skip


@dataclass
class Videos:
    """Preprocess videos as Qwen3VLVideoProcessor does (transformers 5.23): frame size and timestamps."""

    # minimum and maximum pixels per video, all frames together
    shortest_edge: Count = 128 * 32 * 32
    longest_edge: Count = 768 * 32 * 32
    sampling: dict = field(default_factory=dict)  # default options for sampling frames, see VideoOptions

    def frame_size(self, images, nframes: int, height: int, width: int, **options: int):
        """Compute the frame size (height, width) that meets the pixel limits in `options`."""
        factor = images.factor
        depth = images.temporal_patch_size
        max_area = options.get("total_pixels", self.longest_edge)
        max_area = min(max_area, options.get("max_pixels", max_area) * nframes)
        min_area = options.get("min_pixels", 0) * nframes or min(self.shortest_edge, max_area)
        if nframes < depth or max_area < min_area:
            raise UserError(
                f"A video of {pluralize(nframes, 'frame')} cannot be resized to a total area between {min_area} and "
                f"{max_area} pixels. Use at least {depth} frames and a larger max_pixels."
            )
        growth = max(1.0, factor / height, factor / width)
        sides = [int(side * growth) for side in (height, width)]
        check_ratio(sides[1], sides[0])
        rounded = tuple(round(side / factor) * factor for side in sides)
        area = round(nframes / depth) * depth * math.prod(rounded)
        if area > max_area:
            scale = math.sqrt(nframes * math.prod(sides) / max_area)
            return tuple(max(factor, math.floor(side / scale / factor) * factor) for side in sides)
        if area < min_area:
            scale = math.sqrt(min_area / (nframes * math.prod(sides)))
            return tuple(math.ceil(side * scale / factor) * factor for side in sides)
        return rounded

    def insert_timestamps(self, pieces: list[str], grids: list[Grid], times: list):
        """Split videos in a prompt into time steps, and insert a timestamp before each.

        Example: a video with two time steps becomes
            <0.3 seconds><|vision_start|><|video_pad|><|vision_end|><1.3 seconds>...

        Args:
            pieces: prompt as text, special tokens and media placeholders.
            grids: patch grids (t, h, w) for images and videos.
            times: 0.0 for an image, timestamps in seconds for a video.
        Returns:
            Prompt pieces with timestamps.
            Patch grids: (1, h, w) per video time step, unchanged for images.
            Seconds per time step: 1.0 for videos, 0.0 for images.
        """
        laid_pieces = []
        video_times = iter([seconds for seconds in times if seconds])
        for piece in pieces:
            if piece is not VIDEO:
                laid_pieces.append(piece)
                continue
            for second in next(video_times):
                time = f"<{second:.1f} seconds>"
                laid_pieces += [time, SpecialToken("<|vision_start|>"), VIDEO, SpecialToken("<|vision_end|>")]
        step_grids = []
        step_seconds = []
        for grid, seconds in zip(grids, times, strict=True):
            if seconds:
                step_grids += [(1, *grid[1:])] * len(seconds)
                step_seconds += [1.0] * len(seconds)
            else:
                step_grids.append(grid)
                step_seconds.append(0.0)
        return join_text(laid_pieces), step_grids, step_seconds


# {key in video_preprocessor_config.json: the only supported value}
VIDEO_FIXED = {**FIXED, "do_sample_frames": True, "cap_pixels_per_frame": False}


class Qwen3VL(Family):
    architecture = "Qwen3VLForConditionalGeneration"
    config_type = Qwen3VLConfig
    vision_config_type = DeepStackVisionConfig
    vision_hidden_act = "gelu_pytorch_tanh"
    files_have_module_names = True
    template = DEFAULT_QWEN3
    # image sizes: 64 to 16,384 tokens of 32 x 32 pixels
    images: ClassVar[dict[str, Any]] = {
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "patch_size": 16,
        "size": {"shortest_edge": 64 * 32 * 32, "longest_edge": 16384 * 32 * 32},
    }
    box_space = "thousandths"

    def build_tower(self, vision_config: VisionConfig) -> Qwen3VisionTransformer:
        assert isinstance(vision_config, Qwen3VisionConfig)
        return Qwen3VisionTransformer(vision_config)

    def write_config(self, config: dict) -> dict:
        """Convert a flat config to config.json with text_config and vision_config (transformers 4.57)."""
        text = dict(config)
        mrope_section = text.pop("rope_scaling")["mrope_section"]
        vision = dict(text.pop("vision_config"))
        vision["in_channels"] = vision.pop("in_chans")
        del vision["spatial_patch_size"]
        top_level = {name: text.pop(name) for name in TOP_LEVEL}
        text["tie_word_embeddings"] = top_level["tie_word_embeddings"]
        text["eos_token_id"] = top_level["eos_token_id"]
        text["model_type"] = f"{config['model_type']}_text"
        text["attention_bias"] = False
        text["rope_scaling"] = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": mrope_section}
        return {**top_level, "text_config": text, "vision_config": vision}

    def read_videos(self, settings: dict, where: str, images: ImageProcessor) -> Videos:
        """Parse video_preprocessor_config.json; raise UserError if patch settings differ from those for images."""
        for name, expected in {**VIDEO_FIXED, **patch_settings(images)}.items():
            value = settings.get(name)
            found = tuple(value) if isinstance(value, list) else value
            is_same = value is None or found == expected
            require(is_same, f"{where}: {name}", value, f"{expected!r} for videos of this model")
        videos = build(Videos, settings.get("size") or {}, where, "size.", json=True)
        with error_context(where):
            return replace(videos, sampling=read_sampling(settings))

    def write_videos(self, images: ImageProcessor, options: dict) -> dict:
        """Convert data.video to video_preprocessor_config.json, whose pixel limits are per video, not per frame."""
        videos = images.videos
        if not isinstance(videos, Videos):
            return {}
        sampling = {name: options[name] for name in SAMPLING if name in options}
        sampling = sampling or videos.sampling
        num_frames = sampling.get("nframes", sampling.get("max_frames", 768))
        low, high = area_bounds(images, options, (0, videos.longest_edge))
        limit = options.get("total_pixels", videos.longest_edge)
        high = min(high * num_frames, limit)
        low = min(low * num_frames or videos.shortest_edge, high)
        return {
            "video_processor_type": "Qwen3VLVideoProcessor",
            "size": {"shortest_edge": low, "longest_edge": high},
            **patch_settings(images),
            **write_sampling(sampling),
        }
