"""Where each token sits and how that turns its query and key: M-RoPE for the decoder, 2-D rotary for the vision tower.

Dimension letters: N tokens of the packed run, P patches, D head_dim, H heads.
"""

import torch
from torch import Tensor

from minivlmrl.model.config import ModelConfig, VisionConfig


def get_rope_index(input_ids: Tensor, grid_thw: Tensor, config: ModelConfig) -> Tensor:
    """Give every prompt token its (time, height, width) position.

    A run of text counts up on all three axes together. The tokens of an image share one time, and count rows and
    columns of the merged grid; text resumes one past the largest position that the image used.

    Example: 2 text tokens, an image of 2 x 3 merged tokens, 1 text token:
        time   0 1 | 2 2 2 2 2 2 | 5
        height 0 1 | 2 2 2 3 3 3 | 5
        width  0 1 | 2 3 4 2 3 4 | 5

    Args:
        input_ids: (N,) int64, one prompt with its image placeholders expanded.
        grid_thw: (images, 3) int64, patches of each image in time, height, width.
    Returns:
        position_ids (3, N) int64.
    Raises:
        ValueError: the placeholders in input_ids are not those the grids ask for, or there are video tokens.
    Source: Qwen2.5-VL report, "Multimodal Rotary Position Embedding Aligned to Absolute Time"; equals transformers'
        Qwen2_5_VLModel.get_rope_index for text and images in every version with mm_token_type_ids given.
    """
    ids, merge = input_ids.tolist(), config.vision_config.spatial_merge_size
    if config.video_token_id in ids:
        raise ValueError(f"input_ids hold the video token {config.video_token_id}: videos are not supported yet")
    pieces, cursor, start = [], 0, 0
    for t, h, w in grid_thw.tolist():
        grid = (t, h // merge, w // merge)
        length = grid[0] * grid[1] * grid[2]
        image_at = ids.index(config.image_token_id, start) if config.image_token_id in ids[start:] else len(ids)
        if ids[image_at : image_at + length] != [config.image_token_id] * length:
            raise ValueError(f"input_ids lack the {length} image tokens that grid {(t, h, w)} needs from {image_at} on")
        text = torch.arange(image_at - start) + cursor  # (text,)
        pieces.append(text.expand(3, -1))
        cursor += image_at - start
        axes = torch.meshgrid(torch.zeros(grid[0]).long(), torch.arange(grid[1]), torch.arange(grid[2]), indexing="ij")
        pieces.append(torch.stack(axes).flatten(1) + cursor)  # (3, t*h*w)
        cursor += max(grid[1], grid[2])
        start = image_at + length
    if config.image_token_id in ids[start:]:
        raise ValueError(f"input_ids hold image tokens after position {start}, but only {len(grid_thw)} images")
    pieces.append((torch.arange(len(ids) - start) + cursor).expand(3, -1))
    return torch.cat(pieces, dim=1)


def text_rotary(position_ids: Tensor, config: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Angles of M-RoPE: frequency slot i turns by time, height or width, whichever mrope_section gives it to.

    Args:
        position_ids: (3, N).
    Returns:
        cos, sin: each (N, 1, D), computed in float32, then cast to `dtype` (as the checkpoints were trained).
    """
    half = config.head_dim // 2
    inv_freq = _inverse_frequencies(half, config.rope_theta, position_ids.device)
    axis = torch.repeat_interleave(
        torch.arange(3, device=position_ids.device), torch.tensor(config.mrope_section, device=position_ids.device)
    )  # (D/2,): 0 for time, 1 for height, 2 for width
    angles = position_ids[axis].T.float() * inv_freq  # (N, D/2)
    angles = torch.cat([angles, angles], dim=-1)[:, None]  # (N, 1, D)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def vision_rotary(grid_thw: Tensor, config: VisionConfig) -> tuple[Tensor, Tensor]:
    """Angles of the vision tower's 2-D rotary: the first half of the slots turns by row, the second by column.

    Rows follow the order of pixel_values: merge blocks in raster order, inside a block its patches in raster order.

    Returns:
        cos, sin: each (P, 1, D) float32.
    """
    quarter = config.hidden_size // config.num_heads // 4
    inv_freq = _inverse_frequencies(quarter, 10000.0, grid_thw.device)
    angles = []
    for t, h, w in grid_thw.tolist():
        rows = torch.arange(h, device=inv_freq.device)[:, None].expand(h, w)
        cols = torch.arange(w, device=inv_freq.device).expand(h, w)
        row_col = torch.stack([_blocks(rows, config.spatial_merge_size), _blocks(cols, config.spatial_merge_size)], -1)
        # (h*w, 2, 1) x (D/4,) -> (h*w, D/2); every frame has the same angles: there is no rotary in time here
        angles.append((row_col[..., None].float() * inv_freq).flatten(1).repeat(t, 1))
    angles = torch.cat(angles)
    angles = torch.cat([angles, angles], dim=-1)[:, None]  # (P, 1, D)
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i+D/2}) by its angle. x (N, H, D); cos, sin (N, 1, D)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _inverse_frequencies(count: int, theta: float, device: torch.device) -> Tensor:
    """theta^(-i/count) for i < count, float32: the slowest slot turns `theta` times slower than the fastest."""
    return 1.0 / theta ** (torch.arange(count, dtype=torch.float32, device=device) / count)


def _blocks(grid: Tensor, merge: int) -> Tensor:
    """(h, w) in raster order -> (h*w,) in the order of pixel_values: block by block of merge x merge."""
    h, w = grid.shape
    return grid.reshape(h // merge, merge, w // merge, merge).transpose(1, 2).flatten()
