"""Qwen3-VL: its vision tower, and how its folders say what the model is.

The tower has learned positions beside the 2-D rotary, no windows, and DeepStack: what some of its
inner blocks see is merged too, and added to the decoder's first layers. Its decoder is decoder.py's
with norms of queries and keys, no biases and interleaved M-RoPE.

Dimension letters: P patches of all images together, E hidden_size, M merged tokens (P / 4).
Source: Qwen3-VL report; modeling_qwen3_vl.py of transformers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivlmrl.hub.checker import require
from minivlmrl.hub.preprocessor import read_image_processor
from minivlmrl.vision import EPS, MLPS, PatchEmbed, VisionBlock, lay_out


class GELUMLP(nn.Module):
    """fc2(gelu(fc1(x))), with the tanh approximation of GELU."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool):
        super().__init__()
        self.linear_fc1 = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.linear_fc2 = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))


MLPS["gelu_tanh"] = GELUMLP


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
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.depth))
        self.merger = Merger(config, together=False)
        deep = config.deepstack_visual_indexes
        self.deepstack_merger_list = nn.ModuleList(Merger(config, together=True) for _ in deep)

    def forward(self, pixel_values: Tensor, image_grid_thw: Tensor) -> Tensor:
        """Encode all images of a batch; see VisionTransformer.forward.

        Returns:
            (M, (1 + deep) * out_hidden_size): side by side the embeddings, and what is added after
            each of the decoder's first layers.
        """
        grids = tuple(map(tuple, image_grid_thw.tolist()))
        layout = lay_out(grids, self.config, pixel_values.device)  # without windows in raster order
        x = self.patch_embed(pixel_values)  # (P, E)
        x = x + torch.cat([self.positions(*grid) for grid in grids]).to(x.dtype)
        deep, added = self.config.deepstack_visual_indexes, []
        for i, block in enumerate(self.blocks):
            x = block(x, layout.cos, layout.sin, layout.frames)
            if i in deep:
                added.append(self.deepstack_merger_list[deep.index(i)](x))
        return torch.cat([self.merger(x), *added], dim=-1)

    def positions(self, t: int, h: int, w: int) -> Tensor:
        """Stretch the learned square of positions over a grid, bilinearly: (t * h * w, E).

        Its corners lie on the corners of the image; the order is that of pixel_values.
        """
        side, merge = round(len(self.pos_embed.weight) ** 0.5), self.config.spatial_merge_size
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
TOWER = {"norm": "layer_norm", "mlp": "gelu_tanh", "window_size": None}
TOWER |= {"fullatt_block_indexes": (), "tokens_per_second": None}
TEXT = {"attention_bias": False, "qk_norm": True, "mrope_interleaved": True}
TEXT_DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 5e5, "mrope_section": [24, 20, 20]}
TEXT_DEFAULTS |= {"head_dim": 128}
VISION_DEFAULTS = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16}
VISION_DEFAULTS |= {"num_position_embeddings": 2304, "deepstack_visual_indexes": (8, 16, 24)}
TOP_LEVEL = {"image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"}
TOP_LEVEL |= {"architectures", "model_type", "tie_word_embeddings", "eos_token_id"}
TOP_LEVEL |= {"torch_dtype"}


def read_vision(vision: dict, where: str) -> dict:
    """Complete the vision_config of a config.json."""
    vision = VISION_DEFAULTS | vision
    count, deep = vision["num_position_embeddings"], vision["deepstack_visual_indexes"]
    square = isinstance(count, int) and round(count**0.5) ** 2 == count
    require(square, f"{where}: vision_config.num_position_embeddings", count, "a square number")
    known = isinstance(deep, list | tuple) and len(set(deep)) == len(deep)
    known = known and all(i in range(vision["depth"]) for i in deep)
    needed = "different blocks of the tower, counted from 0"
    require(known, f"{where}: vision_config.deepstack_visual_indexes", deep, needed)
    return vision


def write_config(config: dict) -> dict:
    """Nest a flat config, as every transformers with this family reads it (4.57 on)."""
    vision, text = dict(config["vision_config"]), {**config}
    vision["in_channels"] = vision.pop("in_chans")
    del vision["spatial_patch_size"], text["vision_config"]
    top = {name: text.pop(name) for name in TOP_LEVEL & text.keys()}
    text["tie_word_embeddings"], text["eos_token_id"] = (
        top["tie_word_embeddings"],
        top["eos_token_id"],
    )
    section = text.pop("rope_scaling")["mrope_section"]
    rope = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": section}
    text |= {"model_type": "qwen3_vl_text", "attention_bias": False, "rope_scaling": rope}
    return {**top, "text_config": text, "vision_config": vision}


def read_images(settings: dict, where: str, *bounds):
    """Make the image processor: normalised to -1 .. 1, 64 to 16,384 tokens where nothing is said.

    Args are those of preprocessor.read_image_processor.
    """
    token = 32 * 32  # pixels of an image that are one token
    defaults = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": 16}
    defaults["size"] = {"shortest_edge": 64 * token, "longest_edge": 16384 * token}
    return read_image_processor(defaults | settings, where, *bounds)
