"""Images resized by torch's kernel, as servers with transformers' torchvision processor do.

`resize: torch` gives its values to the bit; the default, pil, is the filter that checkpoints were
trained with. They differ by at most two grey levels on about 1 % of the values (docs/exact.md).
"""

from collections.abc import Iterable

import numpy as np
import PIL.Image
import torch

from minivlmrl.image import look_up


def resize_frames(
    frames: Iterable[PIL.Image.Image], height: int, width: int, mean: np.ndarray, std: np.ndarray
) -> np.ndarray:
    """Resize RGB frames and normalise them, see image.resize_frames."""
    size, resized = (height, width), []
    for frame in frames:
        # uint8 in and out: the kernel rounds between its two passes, as it would not in float32
        pixels = torch.from_numpy(np.array(frame)).permute(2, 0, 1)[None]
        pixels = torch.nn.functional.interpolate(pixels, size, mode="bicubic", antialias=True)
        resized.append(pixels[0].permute(1, 2, 0).numpy())
    scale = np.float32(1 / (1 / 255))  # transformers' way to write 255, folded into mean and std
    grey_levels = np.arange(256, dtype=np.float32)
    return look_up((grey_levels - mean * scale) / (std * scale), np.stack(resized))
