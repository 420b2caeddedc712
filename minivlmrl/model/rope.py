"""Rotary position embeddings: M-RoPE in the decoder, 2-D rotary embeddings in the vision tower.

Dimension letters: N tokens in the packed sequence, P patches, D head_dim, H heads. `config` is a ModelConfig from
model/config.py, except in `vision_rotary`, where `config` is a VisionConfig.
"""

from functools import cache

import torch
from torch import Tensor

from minivlmrl.kernels.backend import to_device
from minivlmrl.model.config import ModelConfig, VisionConfig


def get_rope_index(
    input_ids: Tensor, image_grid_thw: Tensor, model_config: ModelConfig, second_per_grid_ts: Tensor | None = None
) -> Tensor:
    """Compute the (time, height, width) M-RoPE position for every prompt token.

    In text, the three positions of a token are equal, and increase by 1 from token to token. An image's tokens share
    one time position, and their positions in height and width count the rows and columns of the merged grid. A video's
    time steps have time positions in proportion to seconds. After an image or a video, the next text token's position
    is the largest position in time, height or width, plus one.

    Example: 2 text tokens, an image of 2 x 3 merged tokens, 1 text token:
        time   0 1 | 2 2 2 2 2 2 | 5
        height 0 1 | 2 2 2 3 3 3 | 5
        width  0 1 | 2 3 4 2 3 4 | 5

    Example: with 2 positions per second, a video's time steps at 0, 0.75 and 1.5 seconds get the positions 0, 1 and 3.

    Args:
        input_ids: (N,) int64, one prompt with its image and video placeholders expanded.
        image_grid_thw: (images and videos, 3) int64, the number of patches in time, height and width, in placeholder
            order.
        second_per_grid_ts: (images and videos,) float32, seconds between two time steps. None means 1 second.
    Returns:
        position_ids: (3, N) int64.
    Source: Qwen2.5-VL report, "Multimodal Rotary Position Embedding Aligned to Absolute Time"; transformers 4.49 to
        4.51 and vLLM. Later releases of transformers compute different positions for videos; see docs/results.md.
    """
    ids = input_ids.tolist()
    placeholders = (model_config.image_token_id, model_config.video_token_id)
    merge = model_config.vision_config.spatial_merge_size
    pieces = []  # tensors with the positions for ids[:done]
    done = 0
    position = 0  # the next token's position
    for index, (t, h, w) in enumerate(image_grid_thw.tolist()):
        length = t * (h // merge) * (w // merge)
        begin = done
        while begin < len(ids) and ids[begin] not in placeholders:
            begin += 1
        if begin == len(ids) or ids[begin : begin + length] != [ids[begin]] * length:
            raise ValueError(
                f"input_ids lack the {length} image or video tokens that the grid {(t, h, w)} "
                f"needs at position {begin}. Expand placeholders with the processor of this model."
            )
        pieces.append(_text_positions(position, begin - done))
        position += begin - done
        seconds = 1.0 if second_per_grid_ts is None else second_per_grid_ts[index].item()
        grid = _grid_positions(t, h // merge, w // merge, seconds, model_config.vision_config)
        pieces.append(grid + position)
        position += int(grid.max()) + 1  # the largest position on any axis
        done = begin + length
    if any(token in placeholders for token in ids[done:]):
        raise ValueError(
            "input_ids have more image or video tokens than the grids need. Pass the grid of every image and video."
        )
    pieces.append(_text_positions(position, len(ids) - done))
    return torch.cat(pieces, dim=1)


def _text_positions(first: int, count: int) -> Tensor:
    return torch.arange(first, first + count).expand(3, -1)


def _grid_positions(t: int, rows: int, cols: int, seconds: float, vision_config: VisionConfig) -> Tensor:
    """Return the time, row and column of each merged token in an image or a video, (3, tokens)."""
    time = torch.arange(t)
    # In Qwen2-VL, which lacks tokens_per_second, each time step of a video advances the time position by one.
    if vision_config.tokens_per_second is not None:
        # Models were trained with time positions computed in float32; float64 sometimes gives a different position.
        time = (time * seconds * vision_config.tokens_per_second).long()
    axes = torch.meshgrid(time, torch.arange(rows), torch.arange(cols), indexing="ij")
    return torch.stack(axes).flatten(1)


def text_rotary(position_ids: Tensor, model_config: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines of M-RoPE.

    Args:
        position_ids: (3, N) int64, from get_rope_index.
    Returns:
        cos, sin: arguments for apply_rotary, each (N, 1, D), computed in float32 and cast to dtype.
    """
    axes = _tensor(model_config.mrope_axes, device=position_ids.device)
    inv_freq = _inverse_frequencies(len(axes), model_config.rope_theta, position_ids.device)
    angles = position_ids.T.index_select(1, axes) * inv_freq  # (N, D/2)
    cos, sin = _cos_sin(angles)
    return cos.to(dtype), sin.to(dtype)


def vision_rotary(
    image_grid_thw: Tensor, vision_config: VisionConfig, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines of the vision tower's 2-D rotary embedding for each patch.

    A patch in row i and column j has the angles i * frequencies, followed by j * frequencies. As in pixel_values, the 2
    x 2 patches that are merged into one token are contiguous. All frames of a video have the same rotary angles,
    because the tower's rotary embedding does not encode time.

    Args:
        image_grid_thw: (images and videos, 3) int64, the number of patches in time, height, width.
    Returns:
        cos, sin: arguments for apply_rotary, each (P, 1, D) float32.
    """
    merge = vision_config.spatial_merge_size
    count = vision_config.hidden_size // vision_config.num_heads // 4
    inv_freq = _inverse_frequencies(count, vision_config.rope_theta, "cpu")
    frames = []
    for t, h, w in image_grid_thw.tolist():
        row_col = torch.cartesian_prod(torch.arange(h), torch.arange(w))  # (h * w, 2)
        blocks = row_col.view(h // merge, merge, w // merge, merge, 2).transpose(1, 2)
        angles = blocks.reshape(h * w, 2, 1) * inv_freq  # (h * w, 2, D/4)
        frames.append(angles.flatten(1).repeat(t, 1))
    return _cos_sin(to_device(torch.cat(frames), device))


def _cos_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines (N, 1, D) of angles (N, D/2), with negated sines in the first half."""
    cos = angles.cos()
    sin = angles.sin()
    return torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (a, b) = (x_i, x_{i+D/2}) of x (N, H, D) to (a cos - b sin, b cos + a sin)."""
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), sin)


@cache
def _inverse_frequencies(count: int, theta: float, device: torch.device | str) -> Tensor:
    """Return rotary frequencies theta^(-i/count) for i from 0 to count - 1: (count,) float32."""
    return 1.0 / theta ** (torch.arange(count, dtype=torch.float32, device=device) / count)


_tensor = cache(torch.tensor)  # cached, so that a tuple is copied to each device only once
