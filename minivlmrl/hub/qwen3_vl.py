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

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivlmrl.chat import VIDEO, Control, join_text
from minivlmrl.hub import qwen2_vl
from minivlmrl.hub.preprocessor import FIXED, SAME_NAMES, Count
from minivlmrl.hub.recipe_values import build, require
from minivlmrl.image import Grid, ImageProcessor
from minivlmrl.vision import EPS, PatchEmbed, VisionBlock, lay_out


def gelu_mlp(hidden_size: int, intermediate_size: int, bias: bool) -> nn.Module:
    """Make fc2(gelu(fc1(x))), with the tanh approximation of GELU."""
    first = nn.Linear(hidden_size, intermediate_size, bias=bias)
    last = nn.Linear(intermediate_size, hidden_size, bias=bias)
    return nn.Sequential(OrderedDict(linear_fc1=first, gelu=nn.GELU("tanh"), linear_fc2=last))


class Merger(nn.Module):
    """2 x 2 patches -> one token. The last one norms each patch, DeepStack's all four together."""

    def __init__(self, config, together: bool):
        super().__init__()
        self.width = config.hidden_size * config.spatial_merge_size**2
        self.norm = nn.LayerNorm(self.width if together else config.hidden_size, EPS)
        self.linear_fc1 = nn.Linear(self.width, self.width)
        self.linear_fc2 = nn.Linear(self.width, config.out_hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.view(-1, *self.norm.normalized_shape)).view(-1, self.width)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


class Qwen3VisionTransformer(nn.Module):
    """A ViT whose inner blocks `deepstack_visual_indexes` speak to the decoder too."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.patch_embed.proj.bias = nn.Parameter(torch.zeros(config.hidden_size))
        self.pos_embed = nn.Embedding(config.num_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList(VisionBlock(config, gelu_mlp) for _ in range(config.depth))
        self.merger = Merger(config, together=False)
        deep = config.deepstack_visual_indexes
        self.deepstack_merger_list = nn.ModuleList(Merger(config, together=True) for _ in deep)

    def forward(self, pixel_values: Tensor, image_grid_thw: Tensor) -> Tensor:
        """Encode all images of a batch, as VisionTransformer.forward, to (M, (1 + deep) *
        out_hidden_size): embeddings, and what the decoder's first layers add."""
        grids = tuple(map(tuple, image_grid_thw.tolist()))
        layout = lay_out(grids, self.config, pixel_values.device)  # without windows in raster order
        x = self.patch_embed(pixel_values)  # (P, E)
        x = x + torch.cat([self.positions(*grid) for grid in grids]).to(x.dtype)
        deep = self.config.deepstack_visual_indexes
        added = []
        for i, block in enumerate(self.blocks):
            x = block(x, layout.cos, layout.sin, layout.frames)
            if i in deep:
                added.append(self.deepstack_merger_list[deep.index(i)](x))
        return torch.cat([self.merger(x), *added], dim=-1)

    def positions(self, t: int, h: int, w: int) -> Tensor:
        """Stretch the learned square of positions over a grid, bilinearly: (t * h * w, E).

        Its corners lie on the corners of the image; the order is that of pixel_values.
        """
        side = round(len(self.pos_embed.weight) ** 0.5)
        merge = self.config.spatial_merge_size
        table = self.pos_embed.weight.view(side, side, -1)
        rows, cols = (stretch(n, side).to(table) for n in (h, w))
        grid = torch.einsum("hi,wj,ije->hwe", rows, cols, table)
        blocks = grid.view(h // merge, merge, w // merge, merge, -1).transpose(1, 2)
        return blocks.reshape(h * w, -1).repeat(t, 1)


def stretch(count: int, side: int) -> Tensor:
    """Weight of each of `side` positions in each of `count` rows, (count, side) float64.

    Example: 3 rows of 2 positions have the weights (1, 0), (.5, .5), (0, 1).
    """
    at = torch.arange(count, dtype=torch.float64) * (side - 1) / max(count - 1, 1)
    return (1 - (at[:, None] - torch.arange(side)).abs()).clamp(min=0)


# what config.json does not say, and transformers' defaults for what it may leave out
TOWER = qwen2_vl.TOWER
TEXT = {"attention_bias": False, "qk_norm": True, "mrope_interleaved": True}
TEXT_DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 5e5, "mrope_section": [24, 20, 20]}
TEXT_DEFAULTS["head_dim"] = 128
VISION_DEFAULTS = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16}
VISION_DEFAULTS |= {"num_position_embeddings": 2304, "deepstack_visual_indexes": (8, 16, 24)}
TOP_LEVEL = {"image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"}
TOP_LEVEL |= {"architectures", "model_type", "tie_word_embeddings", "eos_token_id", "torch_dtype"}
# what a preprocessor_config.json may leave out: 64 to 16,384 tokens of 32 x 32 pixels
IMAGES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": 16}
IMAGES["size"] = {"shortest_edge": 64 * 32 * 32, "longest_edge": 16384 * 32 * 32}


def write_config(config: dict) -> dict:
    """Nest a flat config, as every transformers with this family reads it (4.57 on)."""
    vision = dict(config["vision_config"])
    text = {**config}
    vision["in_channels"] = vision.pop("in_chans")
    del vision["spatial_patch_size"], text["vision_config"]
    top = {name: text.pop(name) for name in TOP_LEVEL & text.keys()}
    text |= {name: top[name] for name in ("tie_word_embeddings", "eos_token_id")}
    section = text.pop("rope_scaling")["mrope_section"]
    rope = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": section}
    text |= {"model_type": "qwen3_vl_text", "attention_bias": False, "rope_scaling": rope}
    return {**top, "text_config": text, "vision_config": vision}


@dataclass
class Videos:
    """How a video is seen: all frames share one budget, and each step comes with its time.

    Source: Qwen3VLVideoProcessor and Qwen3VLProcessor of transformers 5.23.
    """

    shortest_edge: Count = 128 * 32 * 32  # bounds of the area of all frames together
    longest_edge: Count = 768 * 32 * 32

    def frame_size(self, images, nframes: int, height: int, width: int, **options: int):
        """Choose the height and width of frames; min_pixels and max_pixels are those of one."""
        factor, depth = images.factor, images.temporal_patch_size
        most = options.get("total_pixels", self.longest_edge)
        most = min(most, options.get("max_pixels", most) * nframes)
        least = options.get("min_pixels", 0) * nframes or min(self.shortest_edge, most)
        if nframes < depth or most < least:
            asked = f"{nframes} frame(s), of {least} to {most} pixels together"
            raise ValueError(f"{asked}: take {depth} frames or more and a larger max_pixels")
        grow = max(1.0, factor / height, factor / width)
        sides = int(height * grow), int(width * grow)
        if max(sides) > 200 * min(sides):
            size = f"{sides[1]} x {sides[0]}"
            raise ValueError(f"frames of {size} pixels: their aspect ratio is over 200")
        rounded = tuple(round(x / factor) * factor for x in sides)
        area = round(nframes / depth) * depth * math.prod(rounded)
        if area > most:
            scale = math.sqrt(nframes * math.prod(sides) / most)
            return tuple(max(factor, math.floor(x / scale / factor) * factor) for x in sides)
        if area < least:
            scale = math.sqrt(least / (nframes * math.prod(sides)))
            return tuple(math.ceil(x * scale / factor) * factor for x in sides)
        return rounded

    def lay_out(self, pieces: list[str], grids: list[Grid], times: list):
        """Make each step of a video a picture of its own, with the time before it.

        Example: of two steps <|video_pad|> becomes <0.3 seconds><|vision_start|><|video_pad|>
        <|vision_end|><1.3 seconds>..., between <|vision_start|> and <|vision_end|> of the template,
        as transformers has it from 5.10 on.

        times: of an image 0.0, of a video a list: the seconds at which each step is shown.
        Returns pieces; a grid (1, h, w) for each step; and 1.0 for each that is not an image.
        """
        laid = []
        steps = []
        of_videos = filter(None, times)
        for piece in pieces:
            if piece is not VIDEO:
                laid.append(piece)
                continue
            for second in next(of_videos):
                laid += [f"<{second:.1f} seconds>", Control("<|vision_start|>"), VIDEO]
                laid.append(Control("<|vision_end|>"))
        for grid, seconds in zip(grids, times, strict=True):
            steps += [((1, *grid[1:]), 1.0)] * len(seconds) if seconds else [(grid, 0.0)]
        return join_text(laid), [grid for grid, _ in steps], [kind for _, kind in steps]


# what a video processor may say besides its size: we compute nothing else
VIDEO_FIXED = {**FIXED, "fps": 2, "min_frames": 4, "max_frames": 768, "do_sample_frames": True}
VIDEO_FIXED |= {"cap_pixels_per_frame": False, "num_frames": None}


def read_videos(settings: dict, where: str, images: ImageProcessor) -> Videos:
    """Read a video_preprocessor_config.json, whose patches must be those of images."""
    for name, ours in (VIDEO_FIXED | {name: getattr(images, name) for name in SAME_NAMES}).items():
        value = settings.get(name)
        same = (tuple(value) if isinstance(value, list) else value) in (None, ours)
        require(same, f"{where}: {name}", value, f"{ours!r} for videos of this model")
    return build(Videos, settings.get("size") or {}, where, "size.", json=True)


def write_videos(images: ImageProcessor) -> dict:
    """Make a video_preprocessor_config.json."""
    same = {name: getattr(images, name) for name in SAME_NAMES}
    return {"video_processor_type": "Qwen3VLVideoProcessor", "size": vars(images.videos), **same}
