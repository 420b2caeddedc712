"""Images resized by torch's kernel, to compare with a server that uses transformers' torchvision processor.

`resize: torch` gives its values to the bit; the default, pil, is the filter that checkpoints were trained with. They
differ by at most two grey levels on about 1 % of the values (docs/exact.md).
"""

from collections.abc import Iterable

import numpy as np
import PIL.Image
import torch


def resize_frames(
    frames: Iterable[PIL.Image.Image], height: int, width: int, mean: np.ndarray, std: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Resize RGB frames to (T, height, width, 3) uint8; also return the normalised grey levels (3, 256) float32."""
    resized = []
    for frame in frames:
        # uint8 in and out: the kernel rounds between its two passes, so resizing in float32 would give other values
        pixels = torch.from_numpy(np.array(frame)).permute(2, 0, 1)[None]
        pixels = torch.nn.functional.interpolate(pixels, (height, width), mode="bicubic", antialias=True)
        resized.append(pixels[0].permute(1, 2, 0).numpy())
    scale = np.float32(1 / (1 / 255))  # transformers' way to write 255, folded into mean and std
    return np.stack(resized), (np.arange(256, dtype=np.float32) - mean * scale) / (std * scale)
