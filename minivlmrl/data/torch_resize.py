"""Images resized by torch's kernel, for comparing with a server that uses transformers' torchvision processor.

`resize: pil`, the default, is Pillow's bicubic filter: to the bit what transformers without torchvision and
qwen-vl-utils make with the same Pillow, so what the checkpoints were trained with. `resize: torch` is torch's uint8
kernel: to the bit what transformers' torchvision ("fast") processor makes. They differ by at most two grey levels, on
about 1 % of the values. There is one exception: where the height shrinks more than the width, Pillow 13 (not 12)
resizes the height first, and rounds in between; then up to a third of the values of a soft picture differ by one or
two, and noise by up to 25.
"""

from collections.abc import Iterable

import numpy as np
import PIL.Image
import torch


def resize_frames(
    frames: Iterable[PIL.Image.Image], height: int, width: int, mean: np.ndarray, std: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Resize RGB frames to one size in pixels, and tell what each grey level becomes.

    Args:
        mean, std: (3, 1) float32, of RGB values from 0 to 1.
    Returns:
        the frames (T, height, width, 3) uint8; the normalised levels (3, 256) float32, rounded as there.
    """
    resized = np.stack([_resize(frame, height, width) for frame in frames])
    scale = np.float32(1 / (1 / 255))  # transformers' way to write 255, folded into mean and std
    return resized, (np.arange(256, dtype=np.float32) - mean * scale) / (std * scale)


def _resize(frame: PIL.Image.Image, height: int, width: int) -> np.ndarray:
    # uint8 in and out: the kernel rounds between its two passes, so resizing in float32 would give other values
    pixels = torch.from_numpy(np.array(frame)).permute(2, 0, 1)[None]
    pixels = torch.nn.functional.interpolate(pixels, (height, width), mode="bicubic", antialias=True)
    return pixels[0].permute(1, 2, 0).numpy()
