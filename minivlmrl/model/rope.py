"""Rotary position embeddings: M-RoPE in the decoder, 2-D in the vision tower.

Dimensions: N packed tokens, P patches, D head_dim, H heads.
"""

from functools import cache

import torch
from torch import Tensor

from minivlmrl.errors import UserError
from minivlmrl.kernels.backend import to_device
from minivlmrl.model.config import ModelConfig, VisionConfig


def get_rope_index(
    input_ids: Tensor, image_grid_thw: Tensor, model_config: ModelConfig, second_per_grid_ts: Tensor | None = None
) -> Tensor:
    """Compute M-RoPE positions in time, height and width for prompt tokens: (3, N) int64.

    A text token has the same position in time, height and width. In an image, the time position is constant, and height
    and width positions count rows and columns of merged tokens. In a video, the time position is proportional to
    seconds. Text after an image or video continues at the largest position plus 1.

    Example: 2 text tokens, an image with 2 x 3 merged tokens, 1 text token:
        time   0 1 | 2 2 2 2 2 2 | 5
        height 0 1 | 2 2 2 3 3 3 | 5
        width  0 1 | 2 3 4 2 3 4 | 5

    Example: with 2 positions per second, time steps at 0, 0.75 and 1.5 seconds get positions 0, 1 and 3.

    Args:
        input_ids: (N,) int64, one prompt with expanded placeholders.
        image_grid_thw: (images and videos, 3) int64, patches in time, height, width.
        second_per_grid_ts: (images and videos,) float32, seconds per time step. None = 1.
    Source: Qwen2.5-VL report, "Multimodal Rotary Position Embedding Aligned to Absolute Time"; transformers 4.49 to
        4.51 and vLLM. Later transformers releases compute different video positions; see docs/results.md.
    """
    ids = input_ids.tolist()
    placeholders = (model_config.image_token_id, model_config.video_token_id)
    merge = model_config.vision_config.spatial_merge_size
    tokens_per_second = model_config.vision_config.tokens_per_second
    given = sum(token in placeholders for token in ids)
    needed = int(image_grid_thw.prod(1).sum()) // merge**2
    if given != needed:
        raise UserError(f"input_ids have {given} image and video tokens, but the grids need {needed}")
    pieces = []
    done = 0
    position = 0
    for index, (t, h, w) in enumerate(image_grid_thw.tolist()):
        begin = done
        while ids[begin] not in placeholders:
            begin += 1
        pieces.append(_text_positions(position, begin - done))
        position += begin - done
        time = torch.arange(t)
        # Qwen2-VL has no tokens_per_second: one position per time step
        if tokens_per_second is not None:
            seconds = 1.0 if second_per_grid_ts is None else second_per_grid_ts[index].item()
            # in float32, as in Qwen's training: in float64, some products round to another integer
            time = (time * seconds * tokens_per_second).long()
        # (3, merged tokens)
        grid = torch.cartesian_prod(time, torch.arange(h // merge), torch.arange(w // merge)).T
        done = begin + grid.shape[1]
        if ids[begin:done] != [ids[begin]] * grid.shape[1]:
            raise UserError(f"input_ids lack the {grid.shape[1]} tokens of the grid {(t, h, w)} at position {begin}")
        pieces.append(grid + position)
        position += int(grid.max()) + 1
    pieces.append(_text_positions(position, len(ids) - done))
    return torch.cat(pieces, dim=1)


def _text_positions(first: int, count: int) -> Tensor:
    return torch.arange(first, first + count).expand(3, -1)


def text_rotary(position_ids: Tensor, model_config: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute M-RoPE cosines and sines.

    Args:
        position_ids: (3, N) int64, from get_rope_index.
    Returns:
        cos, sin: (N, 1, D) each, computed in float32, cast to dtype.
    """
    axes = _tensor(model_config.mrope_axes, device=position_ids.device)
    inv_freq = _inverse_frequencies(len(axes), model_config.rope_theta, position_ids.device)
    cos, sin = _cos_sin(position_ids.T.index_select(1, axes) * inv_freq)
    return cos.to(dtype), sin.to(dtype)


def vision_rotary(
    image_grid_thw: Tensor, vision_config: VisionConfig, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines for the vision tower's 2-D rotary embedding.

    A patch in row i and column j has angles i * frequencies, then j * frequencies; time is not encoded. Patches are
    ordered as in pixel_values.

    Args:
        image_grid_thw: as in get_rope_index.
    Returns:
        cos, sin: (P, 1, D) float32 each.
    """
    merge = vision_config.spatial_merge_size
    inv_freq = _inverse_frequencies(
        vision_config.hidden_size // vision_config.num_heads // 4, vision_config.rope_theta, "cpu"
    )
    frames = []
    for t, h, w in image_grid_thw.tolist():
        row_col = torch.cartesian_prod(torch.arange(h), torch.arange(w))  # (h * w, 2) row and column of each patch
        blocks = row_col.view(h // merge, merge, w // merge, merge, 2).transpose(1, 2)
        angles = blocks.reshape(h * w, 2, 1) * inv_freq  # (h * w, 2, D/4) angles for row and column
        frames.append(angles.flatten(1).repeat(t, 1))
    return _cos_sin(to_device(torch.cat(frames), device))


def _cos_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (N, 1, D) from angles (N, D/2), with the first half of the sines negated."""
    cos = angles.cos()
    sin = angles.sin()
    return torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (a, b) = (x_i, x_{i+D/2}) in x (N, H, D) to (a cos - b sin, b cos + a sin)."""
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), sin)


@cache
def _inverse_frequencies(count: int, theta: float, device: torch.device | str) -> Tensor:
    """Return rotary frequencies theta^(-i/count) for i from 0 to count - 1: (count,) float32."""
    return 1.0 / theta ** (torch.arange(count, dtype=torch.float32, device=device) / count)


_tensor = cache(torch.tensor)  # cached, so that equal values are copied to the device only once
