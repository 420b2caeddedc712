"""Vision tower: encode image patches, and merge 2 x 2 patches into one decoder token.

The decoder replaces image placeholders with the merged tokens. VisionTransformer is Qwen2.5-VL's tower, with window
attention, RMSNorm and SwiGLU.

Dimensions: P patches in all images, E hidden_size, H heads, D head_dim, M merged tokens (P / 4).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivlmrl.kernels.backend import is_half_on_gpu, to_device
from minivlmrl.kernels.dense_attention import Reorder
from minivlmrl.kernels.rms_norm import RMSNorm
from minivlmrl.kernels.window_attention import Segments, window_attention
from minivlmrl.model.config import VisionConfig
from minivlmrl.model.rope import apply_rotary, vision_rotary

ALIGNED = 8  # matrix products are fast if rows are multiples of eight 16-bit values (16 bytes)


class MLP(nn.Module):
    """SwiGLU MLP, down(silu(gate(x)) * up(x)), with biases only in the vision tower."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        missing = -self.down_proj.in_features % ALIGNED
        # rows with 3,420 16-bit values (Qwen2.5-VL) are not 16-byte aligned: cuBLAS is about 3 times slower
        if missing and is_half_on_gpu(x.device, x.dtype) and all(type(m) is nn.Linear for m in self.children()):
            return self.forward_padded(x, missing)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    def forward_padded(self, x: Tensor, missing: int) -> Tensor:
        """Compute the MLP with `missing` zeros appended to the intermediate dimension, to align rows."""

        # weights are not padded in advance, so that checkpoints and shards keep the shapes in config.json
        def padded(layer: nn.Linear) -> Tensor:
            bias = None if layer.bias is None else F.pad(layer.bias, (0, missing))
            return F.linear(x, F.pad(layer.weight, (0, 0, 0, missing)), bias)

        weight = F.pad(self.down_proj.weight, (0, missing))
        return F.linear(F.silu(padded(self.gate_proj)) * padded(self.up_proj), weight, self.down_proj.bias)


NORMS = {"rms_norm": RMSNorm, "layer_norm": nn.LayerNorm}
EPS = 1e-6


def window_order(image_grid_thw: Tensor, vision_config: VisionConfig) -> tuple[Tensor, list[int], list[int]]:
    """Order merged tokens by attention window.

    Windows of window_size pixels tile a frame from the top left, and can be smaller at the right and bottom.
    Example: 3 x 5 merged tokens and windows with 4 x 4 tokens give two windows, columns 0 to 3 and column 4:
        order 0 1 2 3 5 6 7 8 10 11 12 13 | 4 9 14

    Args:
        image_grid_thw: as in get_rope_index.
    Returns:
        order: (M,) int64 raster indices in window order.
        window_lengths: patches per window.
        frame_lengths: patches per frame.
    Source: get_window_index for Qwen2.5-VL in transformers, which also pads windows with -100.
    """
    merge = vision_config.spatial_merge_size
    order = []
    window_lengths = []
    frame_lengths = []
    offset = 0
    for t, h, w in image_grid_thw.tolist():
        rows = h // merge
        cols = w // merge
        # window side in merged tokens; without window attention, the whole frame
        side = max(rows, cols)
        if vision_config.window_size:
            side = vision_config.window_size // merge // vision_config.patch_size
        # (rows, cols) window index per merged token; windows are numbered row by row
        window = torch.arange(rows)[:, None] // side * math.ceil(cols / side) + torch.arange(cols) // side
        in_frame = window.flatten().argsort(stable=True)  # (rows * cols,)
        frames = torch.arange(t)[:, None] * rows * cols + offset  # (t, 1)
        order.append((frames + in_frame).flatten())
        window_lengths += (window.flatten().bincount() * merge**2).tolist() * t
        frame_lengths += [h * w] * t
        offset += t * rows * cols
    return torch.cat(order), window_lengths, frame_lengths


@dataclass
class VisionLayout:
    """Token order, rotary angles and attention segments for a batch of patches."""

    order: Tensor  # (P,) indices to sort the patches in pixel_values by window
    raster_order: Tensor  # (M,) indices to sort merged tokens from window order back to raster order
    cos: Tensor  # (P, 1, 1, D) float32 rotary cosines, in window order
    sin: Tensor  # (P, 1, 1, D) float32 rotary sines
    windows: Segments  # attention segments for blocks with window attention
    frames: Segments  # attention segments for blocks in config.fullatt_block_indexes


# cached: policy and reference process the same images
@lru_cache(maxsize=8)
# no inference mode: training reuses the cached tensors, and autograd rejects inference tensors
@torch.inference_mode(False)
def vision_layout(
    grids: tuple[tuple[int, int, int], ...], vision_config: VisionConfig, device: torch.device
) -> VisionLayout:
    image_grid_thw = torch.tensor(grids)
    merged, window_lengths, frame_lengths = window_order(image_grid_thw, vision_config)
    patches = torch.arange(len(merged) * vision_config.spatial_merge_size**2).view(len(merged), -1)
    order = to_device(patches[merged].flatten(), device)
    cos, sin = vision_rotary(image_grid_thw, vision_config, device)
    return VisionLayout(
        order,
        to_device(merged.argsort(), device),
        cos[order, None],
        sin[order, None],
        Segments(window_lengths, device),
        Segments(frame_lengths, device),
    )


class VisionTower(nn.Module):
    """Base class for all vision towers."""

    config: VisionConfig
    patch_embed: "PatchEmbed"
    blocks: nn.ModuleList  # FSDP and activation checkpointing wrap each block
    merger: nn.Module  # model part "merger" in recipes; other tower weights are the part "vision"


class VisionTransformer(VisionTower):
    def __init__(self, vision_config: VisionConfig, mlp: Callable[..., nn.Module] = MLP):
        super().__init__()
        self.config = vision_config
        self.patch_embed = PatchEmbed(vision_config)
        self.blocks = nn.ModuleList(VisionBlock(vision_config, mlp) for _ in range(vision_config.depth))
        self.merger = PatchMerger(vision_config)

    def forward(self, pixel_values: Tensor, image_grid_thw: Tensor) -> Tensor:
        """Encode images and videos; a video patch covers two frames, and attends only to patches of these frames.

        Args:
            pixel_values: (P, patch_dim), any floating dtype, ordered as in patchify.
            image_grid_thw: (images and videos, 3) int64, patches in time, height, width.
        Returns:
            (M, out_hidden_size) merged tokens, in raster order within an image or video.
        """
        layout = vision_layout(tuple(map(tuple, image_grid_thw.tolist())), self.config, pixel_values.device)
        x = Reorder.apply(self.patch_embed(pixel_values), layout.order)  # (P, E)
        for i, block in enumerate(self.blocks):
            segments = layout.frames if i in self.config.fullatt_block_indexes else layout.windows
            x = block(x, layout.cos, layout.sin, segments)
        # reorder after merging, when only a quarter of the rows are left
        return Reorder.apply(self.merger(x), layout.raster_order)


class PatchEmbed(nn.Module):
    """Linear projection of flattened patches, stored as a Conv3d for checkpoint compatibility."""

    def __init__(self, vision_config: VisionConfig):
        super().__init__()
        size = (vision_config.temporal_patch_size, vision_config.patch_size, vision_config.patch_size)
        self.proj = nn.Conv3d(vision_config.in_channels, vision_config.hidden_size, size, size, bias=False)

    def forward(self, pixel_values: Tensor) -> Tensor:
        weight = self.proj.weight.flatten(1)  # (E, channels * frames * patch * patch) matrix
        return F.linear(pixel_values.to(weight.dtype), weight, self.proj.bias)


class VisionBlock(nn.Module):
    def __init__(self, vision_config: VisionConfig, mlp: Callable[..., nn.Module]):
        super().__init__()
        self.norm1 = NORMS[vision_config.norm](vision_config.hidden_size, EPS)
        self.norm2 = NORMS[vision_config.norm](vision_config.hidden_size, EPS)
        self.attn = VisionAttention(vision_config)
        self.mlp = mlp(vision_config.hidden_size, vision_config.intermediate_size, bias=True)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segments: Segments) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin, segments)
        return x + self.mlp(self.norm2(x))


class VisionAttention(nn.Module):
    def __init__(self, vision_config: VisionConfig):
        super().__init__()
        self.num_heads = vision_config.num_heads
        self.qkv = nn.Linear(vision_config.hidden_size, 3 * vision_config.hidden_size)
        self.proj = nn.Linear(vision_config.hidden_size, vision_config.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segments: Segments) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # (P, 3, H, D) queries, keys and values
        # rotary embedding in float32
        q, k = apply_rotary(qkv[:, :2], cos, sin).to(qkv.dtype).unbind(1)  # (P, H, D) rotated queries and keys
        return self.proj(window_attention(q, k, qkv[:, 2], segments).flatten(1))


class PatchMerger(nn.Module):
    """Normalize patches, concatenate 2 x 2 blocks, apply a two-layer MLP."""

    def __init__(self, vision_config: VisionConfig):
        super().__init__()
        self.width = vision_config.hidden_size * vision_config.spatial_merge_size**2
        self.ln_q = NORMS[vision_config.norm](vision_config.hidden_size, EPS)
        self.mlp = nn.Sequential(
            nn.Linear(self.width, self.width), nn.GELU(), nn.Linear(self.width, vision_config.out_hidden_size)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.ln_q(x).view(-1, self.width))  # (P, E) patches -> (M, out_hidden_size) merged tokens
