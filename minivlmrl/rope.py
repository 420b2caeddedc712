"""Where each token sits and how that turns its query and key: M-RoPE for the decoder, 2-D rotary for the vision tower.

Dimension letters: N tokens of the packed run, P patches, D head_dim, H heads.
"""

import torch
from torch import Tensor

from minivlmrl.hub.config import ModelConfig, VisionConfig


def get_rope_index(
    input_ids: Tensor, image_grid_thw: Tensor, config: ModelConfig, second_per_grid_ts: Tensor | None = None
) -> Tensor:
    """Give every prompt token its (time, height, width) position.

    A run of text counts up on all three axes together. The tokens of an image share one time, and count rows and
    columns of the merged grid. The time steps of a video lie as far apart as their seconds say. Text resumes one past
    the largest position, on any axis, that the image or video used.

    Example: 2 text tokens, an image of 2 x 3 merged tokens, 1 text token:
        time   0 1 | 2 2 2 2 2 2 | 5
        height 0 1 | 2 2 2 3 3 3 | 5
        width  0 1 | 2 3 4 2 3 4 | 5
    A video of 3 time steps, 1 x 2 merged tokens each, 0.75 s from one to the next, 2 positions a second:
        time   0 0 1 1 3 3 | 4       floor(i * 0.75 * 2)
        height 0 0 0 0 0 0 | 4
        width  0 1 0 1 0 1 | 4

    Args:
        input_ids: (N,) int64, one prompt with its image and video placeholders expanded.
        image_grid_thw: (images and videos, 3) int64, in order of appearance: patches in time, height, width.
        second_per_grid_ts: (images and videos,) float32, seconds from one time step to the next, of which an image has
            but one; None: 1 s. Qwen2-VL does not read it: its time steps are one position apart.
    Returns:
        position_ids (3, N) int64.
    Raises:
        ValueError: the placeholders in input_ids are not those the grids ask for.
    Source: Qwen2.5-VL report, "Multimodal Rotary Position Embedding Aligned to Absolute Time"; the rule of Qwen's own
        code, vLLM and transformers 4.49 to 4.51. Later versions of transformers agree on text and images; for videos
        they cut fractions of second_per_grid_ts (4.52 to about 5.17) or let text resume too early (from 5.3 on).
    """
    ids, merge = input_ids.tolist(), config.vision_config.spatial_merge_size
    placeholders = [i for i, token in enumerate(ids) if token in (config.image_token_id, config.video_token_id)]
    pieces, cursor, start, used = [], 0, 0, 0
    for number, (t, h, w) in enumerate(image_grid_thw.tolist()):
        grid = (t, h // merge, w // merge)
        length = grid[0] * grid[1] * grid[2]
        at = placeholders[used] if used < len(placeholders) else len(ids)
        if at == len(ids) or ids[at : at + length] != [ids[at]] * length:
            raise ValueError(f"input_ids lack the {length} image or video tokens that grid {(t, h, w)} needs at {at}")
        text = torch.arange(at - start) + cursor  # (text,)
        pieces.append(text.expand(3, -1))
        cursor += at - start
        time = torch.arange(t)
        if config.vision_config.tokens_per_second is not None:
            seconds = 1.0 if second_per_grid_ts is None else second_per_grid_ts[number].item()
            # in float32, as the checkpoints were trained: float64 rounds some products to another whole number
            time = (time * seconds * config.vision_config.tokens_per_second).long()
        axes = torch.meshgrid(time, torch.arange(grid[1]), torch.arange(grid[2]), indexing="ij")
        pieces.append(torch.stack(axes).flatten(1) + cursor)  # (3, t*h*w)
        cursor += int(max(time[-1] + 1, grid[1], grid[2]))
        start, used = at + length, used + length
    if used < len(placeholders):
        at = placeholders[used]
        raise ValueError(
            f"input_ids have an image or video token at {at} that none of the {len(image_grid_thw)} grids asks for"
        )
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
    axis = [axis for axis, count in enumerate(config.mrope_section) for _ in range(count)]
    axis = torch.tensor(axis, device=position_ids.device)  # (D/2,): 0 for time, 1 for height, 2 for width
    angles = position_ids[axis].T.float() * inv_freq  # (N, D/2)
    angles = torch.cat([angles, angles], dim=-1)[:, None]  # (N, 1, D)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def vision_rotary(
    image_grid_thw: Tensor, config: VisionConfig, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Angles of the vision tower's 2-D rotary: the first half of the slots turns by row, the second by column.

    Rows follow the order of pixel_values: merge blocks in raster order, inside a block its patches in raster order.

    Returns:
        cos, sin: each (P, 1, D) float32.
    """
    quarter = config.hidden_size // config.num_heads // 4
    inv_freq = _inverse_frequencies(quarter, 10000.0, device)
    angles = []
    for t, h, w in image_grid_thw.tolist():
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
