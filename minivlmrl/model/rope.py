"""Where each token sits: M-RoPE for the decoder, 2-D rotary for the vision tower.

Dimension letters: N tokens of the packed run, P patches, D head_dim, H heads. `config` is the
ModelConfig, in `vision_rotary` the VisionConfig, of model/config.py.
"""

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minivlmrl.kernels.backend import to_device

if TYPE_CHECKING:
    from minivlmrl.model.config import ModelConfig, VisionConfig


def get_rope_index(
    input_ids: Tensor, image_grid_thw: Tensor, config: "ModelConfig",
    second_per_grid_ts: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Give every prompt token its (time, height, width) position.

    Text counts up on all three axes together. The tokens of an image share one time and count the
    rows and columns of the merged grid; the time steps of a video are as far apart as their
    seconds say. Text resumes one past the largest position, on any axis, of the image or video.

    Example: 2 text tokens, an image of 2 x 3 merged tokens, 1 text token:
        time   0 1 | 2 2 2 2 2 2 | 5
        height 0 1 | 2 2 2 3 3 3 | 5
        width  0 1 | 2 3 4 2 3 4 | 5
    A video of 3 steps, 0.75 s apart, at 2 positions a second, has time floor(step * 1.5): 0, 1, 3.

    Args:
        input_ids: (N,) int64, one prompt with its image and video placeholders expanded.
        image_grid_thw: (images and videos, 3) int64 in order: patches in time, height, width.
        second_per_grid_ts: (images and videos,) float32, seconds between time steps; None: 1 s.
    Returns:
        position_ids (3, N) int64 (ValueError: other placeholders than the grids need).
    Source: Qwen2.5-VL report, "Multimodal Rotary Position Embedding Aligned to Absolute Time";
        transformers 4.49 to 4.51 and vLLM. Later transformers differ for videos, see docs/exact.md.
    """
    ids = input_ids.tolist()
    placeholders = (config.image_token_id, config.video_token_id)
    merge = config.vision_config.spatial_merge_size
    pieces = []  # positions of ids[:done]
    done = 0
    position = 0  # of the next token
    for index, (t, h, w) in enumerate(image_grid_thw.tolist()):
        length = t * (h // merge) * (w // merge)
        begin = done
        while begin < len(ids) and ids[begin] not in placeholders:
            begin += 1
        if begin == len(ids) or ids[begin : begin + length] != [ids[begin]] * length:
            raise ValueError(
                f"input_ids lack the {length} image or video tokens that grid {(t, h, w)} needs "
                f"at {begin}"
            )
        pieces.append(_text_positions(position, begin - done))
        position += begin - done
        seconds = 1.0 if second_per_grid_ts is None else second_per_grid_ts[index].item()
        grid = _grid_positions(t, h // merge, w // merge, seconds, config.vision_config)
        pieces.append(grid + position)
        position += int(grid.max()) + 1  # the largest on any axis
        done = begin + length
    if any(token in placeholders for token in ids[done:]):
        raise ValueError("input_ids have an image or video token that none of the grids needs")
    pieces.append(_text_positions(position, len(ids) - done))
    return torch.cat(pieces, dim=1)


def _text_positions(first: int, count: int) -> Tensor:
    """(3, count): text counts up on all axes together."""
    return torch.arange(first, first + count).expand(3, -1)


def _grid_positions(t: int, rows: int, cols: int, seconds: float, config: "VisionConfig") -> Tensor:
    """(3, t * rows * cols): time, row and column of each merged token, all from 0."""
    time = torch.arange(t)
    if config.tokens_per_second is not None:  # Qwen2-VL has none: one position a time step
        # in float32, as the checkpoints were trained: float64 rounds some products differently
        time = (time * seconds * config.tokens_per_second).long()
    axes = torch.meshgrid(time, torch.arange(rows), torch.arange(cols), indexing="ij")
    return torch.stack(axes).flatten(1)


def text_rotary(
    position_ids: Tensor, config: "ModelConfig", dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute the angles of M-RoPE: config.mrope_axes says with which axis each frequency turns.

    Args:
        position_ids: (3, N).
    Returns:
        cos, sin: each (N, 1, D) for apply_rotary, computed in float32 and then cast.
    """
    axes = _tensor(config.mrope_axes, device=position_ids.device)
    inv_freq = _inverse_frequencies(len(axes), config.rope_theta, position_ids.device)
    angles = position_ids.T.index_select(1, axes) * inv_freq  # (N, D/2)
    cos, sin = _cos_sin(angles)
    return cos.to(dtype), sin.to(dtype)


def vision_rotary(
    image_grid_thw: Tensor, config: "VisionConfig", device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Compute the angles of the tower: half of the frequencies turn by row, half by column.

    Patches are in the order of pixel_values: merge blocks in raster order, and inside a block its
    patches in raster order. All frames have the same angles: there is no rotary in time here.

    Returns:
        cos, sin: each (P, 1, D) float32 for apply_rotary.
    """
    merge = config.spatial_merge_size
    count = config.hidden_size // config.num_heads // 4
    inv_freq = _inverse_frequencies(count, config.rope_theta, "cpu")
    frames = []
    for t, h, w in image_grid_thw.tolist():
        row_col = torch.cartesian_prod(torch.arange(h), torch.arange(w))  # (h * w, 2)
        blocks = row_col.view(h // merge, merge, w // merge, merge, 2).transpose(1, 2)
        angles = blocks.reshape(h * w, 2, 1) * inv_freq  # (h * w, 2, D/4)
        frames.append(angles.flatten(1).repeat(t, 1))
    return _cos_sin(to_device(torch.cat(frames), device))


def _cos_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    """(N, 1, D) of angles (N, D/2): pair i turns x_i by -sin x_(i+D/2), x_(i+D/2) by sin x_i."""
    cos = angles.cos()
    sin = angles.sin()
    return torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i+D/2}) by its angle. x (N, H, D); cos, sin (N, 1, D)."""
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), sin)


@cache
def _inverse_frequencies(count: int, theta: float, device: torch.device | str) -> Tensor:
    """(count,) float32: theta^(-i/count), so the slowest turns about `theta` times slower."""
    return 1.0 / theta ** (torch.arange(count, dtype=torch.float32, device=device) / count)


_tensor = cache(torch.tensor)  # a tuple is copied to a device once
