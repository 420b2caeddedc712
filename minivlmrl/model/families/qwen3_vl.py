"""Qwen3-VL: its vision tower, and how its folders say what the model is.

The tower has learned positions beside the 2-D rotary, no windows, and DeepStack: what some of its
inner blocks see is merged too, and added to the decoder's first layers. Its decoder is decoder.py's
with norms of queries and keys, no biases and interleaved M-RoPE.

Dimension letters: P patches of all images together, E hidden_size, M merged tokens (P / 4).
Source: Qwen3-VL report; modeling_qwen3_vl.py of transformers.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivlmrl.config.parsing import build, check_field
from minivlmrl.config.types import Count
from minivlmrl.data.chat_template import VIDEO, Control, join_text
from minivlmrl.data.image import Grid, ImageProcessor
from minivlmrl.data.image_settings import FIXED, patch_settings
from minivlmrl.model.config import VisionConfig
from minivlmrl.model.decoder import Qwen2_5_VL
from minivlmrl.model.families import qwen2_vl
from minivlmrl.model.families.registry import ALL_ATTEND, ModelSpec
from minivlmrl.model.vision import EPS, PatchEmbed, VisionBlock, VisionTower, lay_out


def gelu_mlp(hidden_size: int, intermediate_size: int, bias: bool) -> nn.Module:
    """Make fc2(gelu(fc1(x))), with the tanh approximation of GELU."""
    first = nn.Linear(hidden_size, intermediate_size, bias=bias)
    last = nn.Linear(intermediate_size, hidden_size, bias=bias)
    return nn.Sequential(OrderedDict(linear_fc1=first, gelu=nn.GELU("tanh"), linear_fc2=last))


class Merger(nn.Module):
    """2 x 2 patches -> one token. The last one norms each patch, DeepStack's all four together."""

    def __init__(self, config: VisionConfig, together: bool):
        super().__init__()
        self.width = config.hidden_size * config.spatial_merge_size**2
        self.norm = nn.LayerNorm(self.width if together else config.hidden_size, EPS)
        self.linear_fc1 = nn.Linear(self.width, self.width)
        self.linear_fc2 = nn.Linear(self.width, config.out_hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.view(-1, *self.norm.normalized_shape)).view(-1, self.width)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


class Qwen3VisionTransformer(VisionTower):
    """A ViT whose inner blocks `deepstack_visual_indexes` speak to the decoder too."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.patch_embed.proj.bias = nn.Parameter(torch.zeros(config.hidden_size))
        count = config.num_position_embeddings  # an embedding refuses None
        self.pos_embed = nn.Embedding(count, config.hidden_size)  # pyright: ignore[reportArgumentType]
        self.blocks = nn.ModuleList(VisionBlock(config, gelu_mlp) for _ in range(config.depth))
        self.merger = Merger(config, together=False)
        deep = config.deepstack_visual_indexes
        self.deepstack_merger_list = nn.ModuleList(Merger(config, together=True) for _ in deep)

    def forward(self, pixel_values: Tensor, image_grid_thw: Tensor) -> Tensor:
        """Encode all images of a batch, as VisionTransformer.forward, to (M, (1 + deep) *
        out_hidden_size): embeddings, and what the decoder's first layers add."""
        grids = tuple(map(tuple, image_grid_thw.tolist()))
        layout = lay_out(grids, self.config, pixel_values.device)  # raster order: no windows
        x = self.patch_embed(pixel_values)  # (P, E)
        x = x + torch.cat([self.positions(*grid) for grid in grids]).to(x.dtype)
        deep_blocks = self.config.deepstack_visual_indexes
        deep_embeds = []
        for i, block in enumerate(self.blocks):
            x = block(x, layout.cos, layout.sin, layout.frames)
            if i in deep_blocks:
                merger = self.deepstack_merger_list[deep_blocks.index(i)]
                deep_embeds.append(merger(x))
        return torch.cat([self.merger(x), *deep_embeds], dim=-1)

    def positions(self, t: int, h: int, w: int) -> Tensor:
        """Stretch the learned square of positions over a grid, bilinearly: (t * h * w, E).

        Its corners lie on the corners of the image; the order is that of pixel_values.
        """
        side = round(len(self.pos_embed.weight) ** 0.5)
        merge = self.config.spatial_merge_size
        table = self.pos_embed.weight.view(side, side, -1)
        row_weights = stretch(h, side).to(table)  # (h, side)
        column_weights = stretch(w, side).to(table)  # (w, side)
        grid = torch.einsum("hi,wj,ije->hwe", row_weights, column_weights, table)
        # the patches of a merged token follow each other
        blocks = grid.view(h // merge, merge, w // merge, merge, -1).transpose(1, 2)
        return blocks.reshape(h * w, -1).repeat(t, 1)


def stretch(count: int, side: int) -> Tensor:
    """Weight of each of `side` positions in each of `count` rows, (count, side) float64.

    Example: 3 rows of 2 positions have the weights (1, 0), (.5, .5), (0, 1).
    """
    positions = torch.arange(count, dtype=torch.float64) * (side - 1) / max(count - 1, 1)
    distances = (positions[:, None] - torch.arange(side)).abs()
    return (1 - distances).clamp(min=0)


# what config.json does not say, and transformers' defaults for what it may leave out
TOWER = qwen2_vl.TOWER
TEXT = {"attention_bias": False, "qk_norm": True, "mrope_interleaved": True}
TEXT_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 5e5,
    "mrope_section": [24, 20, 20],
    "head_dim": 128,
}
VISION_DEFAULTS = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (8, 16, 24),
}
# keys that are not in text_config
TOP_LEVEL = (
    "architectures",
    "model_type",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "tie_word_embeddings",
    "eos_token_id",
    "torch_dtype",
)
# what a preprocessor_config.json may leave out: 64 to 16,384 tokens of 32 x 32 pixels
IMAGES = {
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "patch_size": 16,
    "size": {"shortest_edge": 64 * 32 * 32, "longest_edge": 16384 * 32 * 32},
}


def write_config(config: dict) -> dict:
    """Nest a flat config, as every transformers with this family reads it (4.57 on)."""
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
    text["rope_scaling"] = {
        "rope_type": "default",
        "mrope_interleaved": True,
        "mrope_section": mrope_section,
    }
    return {**top_level, "text_config": text, "vision_config": vision}


@dataclass
class Videos:
    """How a video is seen: all frames share one budget, and each step comes with its time.

    Source: Qwen3VLVideoProcessor and Qwen3VLProcessor of transformers 5.23.
    """

    shortest_edge: Count = 128 * 32 * 32  # bounds of the area of all frames together
    longest_edge: Count = 768 * 32 * 32

    def frame_size(self, images, nframes: int, height: int, width: int, **options: int):
        """Choose the height and width of frames; min_pixels and max_pixels are those of one."""
        factor = images.factor
        depth = images.temporal_patch_size
        max_area = options.get("total_pixels", self.longest_edge)
        max_area = min(max_area, options.get("max_pixels", max_area) * nframes)
        min_area = options.get("min_pixels", 0) * nframes or min(self.shortest_edge, max_area)
        if nframes < depth or max_area < min_area:
            raise ValueError(
                f"{nframes} frame(s), of {min_area} to {max_area} pixels together: "
                f"take {depth} frames or more and a larger max_pixels"
            )
        growth = max(1.0, factor / height, factor / width)
        sides = [int(side * growth) for side in (height, width)]
        if max(sides) > 200 * min(sides):
            raise ValueError(
                f"frames of {sides[1]} x {sides[0]} pixels: their aspect ratio is over 200"
            )
        rounded = tuple(round(side / factor) * factor for side in sides)
        area = round(nframes / depth) * depth * math.prod(rounded)
        if area > max_area:
            scale = math.sqrt(nframes * math.prod(sides) / max_area)
            return tuple(max(factor, math.floor(side / scale / factor) * factor) for side in sides)
        if area < min_area:
            scale = math.sqrt(min_area / (nframes * math.prod(sides)))
            return tuple(math.ceil(side * scale / factor) * factor for side in sides)
        return rounded

    def lay_out(self, pieces: list[str], grids: list[Grid], times: list):
        """Make each step of a video a picture of its own, with the time before it.

        Example: of two steps <|video_pad|> becomes <0.3 seconds><|vision_start|><|video_pad|>
        <|vision_end|><1.3 seconds>..., between <|vision_start|> and <|vision_end|> of the template,
        as transformers has it from 5.10 on.

        Args:
            times: of an image 0.0, of a video a list: the second at which each step is shown.
        Returns:
            pieces; a grid (1, h, w) for each step; and 1.0 for each step, 0.0 for an image.
        """
        laid_pieces = []
        video_times = iter([seconds for seconds in times if seconds])
        for piece in pieces:
            if piece is not VIDEO:
                laid_pieces.append(piece)
                continue
            for second in next(video_times):
                time = f"<{second:.1f} seconds>"
                laid_pieces += [time, Control("<|vision_start|>"), VIDEO, Control("<|vision_end|>")]
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


# what a video processor may say besides its size: we compute nothing else
VIDEO_FIXED = {
    **FIXED,
    "fps": 2,
    "min_frames": 4,
    "max_frames": 768,
    "do_sample_frames": True,
    "cap_pixels_per_frame": False,
    "num_frames": None,
}


def read_videos(settings: dict, where: str, images: ImageProcessor) -> Videos:
    """Read a video_preprocessor_config.json, whose patches must be those of images."""
    for name, expected in {**VIDEO_FIXED, **patch_settings(images)}.items():
        value = settings.get(name)
        same = value is None or expected == (tuple(value) if isinstance(value, list) else value)
        check_field(same, f"{where}: {name}", value, f"{expected!r} for videos of this model")
    return build(Videos, settings.get("size") or {}, where, "size.", json=True)


def write_videos(images: ImageProcessor) -> dict:
    """Make a video_preprocessor_config.json."""
    return {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "size": vars(images.videos),
        **patch_settings(images),
    }


SPECS = {
    "qwen3_vl": ModelSpec(
        architecture="Qwen3VLForConditionalGeneration",
        tower=TOWER,
        text={**TEXT, **ALL_ATTEND},
        defaults=TEXT_DEFAULTS,
        hidden_act="gelu_pytorch_tanh",
        read_vision=lambda vision, where: VISION_DEFAULTS | vision,
        write=write_config,
        memory_names=True,
        model=partial(Qwen2_5_VL, tower=Qwen3VisionTransformer),
        default_system=False,
        images=IMAGES,
        read_videos=read_videos,
        write_videos=write_videos,
        box_space="thousandths",
    )
}
