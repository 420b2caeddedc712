"""Compare the sizes and patches of images with transformers, bit for bit."""

import io
import random
import struct

import PIL.features
import PIL.Image
import pytest
import torch

from minivlmrl.data.image import ImageProcessor, load_image, smart_resize
from tests.record.record_vision import noise


def test_the_largest_aspect_ratio_is_200():
    smart_resize(1, 200, 28, 3136, 12845056)
    with pytest.raises(ValueError, match="9 x 2000 pixels, but its aspect ratio"):
        ImageProcessor()(noise("RGB", (30, 20)), resized_height=2000, resized_width=9)
    with pytest.raises(ValueError, match=r"201 x 1 pixels.*aspect ratio must be at most 200"):
        smart_resize(1, 201, 28, 3136, 12845056)


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(30, 250), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "LA", "PA", "1", "CMYK"])
def test_patches_of_2000_images_equal_transformers_bit_for_bit(mode, seeds, transformers):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    for seed in seeds:
        rng = random.Random(f"{mode} {seed}")
        patch = rng.choice((7, 14))
        least = rng.choice((784, 3136))
        options = {"patch_size": patch, "min_pixels": least, "max_pixels": least * rng.choice((1, 4, 9, 40))}
        options |= {"temporal_patch_size": rng.choice((1, 2, 3)), "merge_size": rng.choice((1, 2))}
        if seed % 2:
            options |= {"image_mean": [0.5, 0.25, 0.125], "image_std": [0.3, 0.7, 1.0]}
        image = noise(mode, (rng.randint(9, 300), rng.randint(9, 300)), seed)
        expected = Qwen2VLImageProcessorPil(**options)(images=[image], return_tensors="pt")
        pixel_values, grid = ImageProcessor(**options)(image)
        assert grid == tuple(expected["image_grid_thw"][0].tolist())
        assert torch.equal(pixel_values, expected["pixel_values"]), (image.size, options)


def tiff(bits, photometric, data):
    """Open a TIFF file with two gray pixels; the value 0 is white if `photometric` is 0, else black."""
    tags = {256: 2, 257: 1, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: 1, 279: len(data)}
    directory = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    header = struct.pack("<2sHI", b"II", 42, 8 + len(data))
    return PIL.Image.open(io.BytesIO(header + data + struct.pack("<H", len(tags)) + directory + bytes(4)))


def in_memory(mode, pixel, palette=(0, 0, 0, 200, 100, 50), **info):
    image = PIL.Image.new(mode, (2, 1), pixel)
    if mode in ("P", "PA"):
        image.putpalette(palette)
    image.info |= info
    return image


def in_file(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return PIL.Image.open(file)


ANIMATED = {"save_all": True, "append_images": [PIL.Image.new("RGB", (2, 1), "blue")]}


@pytest.mark.parametrize(("image", "rgb"), [
    (in_memory("1", 1), (255, 255, 255)),
    (in_memory("L", 100), (100, 100, 100)),
    (in_memory("L", 16, transparency=16), (255, 255, 255)),
    (in_memory("LA", (100, 128)), (177, 177, 177)),  # 100 * 128 / 255 + 255 * 127 / 255
    (in_memory("P", 1), (200, 100, 50)),
    (in_memory("P", 1, transparency=1), (255, 255, 255)),
    (in_memory("P", 1, transparency=b"\0\x80"), (227, 177, 152)),
    (in_memory("PA", (1, 128)), (227, 177, 152)),
    (in_memory("RGBA", (100, 0, 0, 128)), (177, 127, 127)),
    (in_file(in_memory("RGB", (10, 20, 30)), transparency=(10, 20, 30)), (255, 255, 255)),
    (in_file(in_memory("RGB", (10, 20, 30)), transparency=(10, 20, 31)), (10, 20, 30)),
    (in_memory("CMYK", (255, 0, 0, 64)), (0, 191, 191)),
    (in_file(in_memory("CMYK", (255, 0, 0, 64)), "TIFF"), (0, 191, 191)),
    (in_file(in_memory("CMYK", (255, 0, 0, 64)), "JPEG"), (0, 191, 191)),
    (in_memory("YCbCr", (100, 100, 200)), (201, 58, 50)),  # 100 + 1.402 * 72, ..., 100 - 1.772 * 28
    (in_memory("HSV", (0, 255, 200)), (200, 0, 0)),
    (in_memory("I;16", 0x1234), (18, 18, 18)),
    (in_memory("I;16B", 0x1234), (18, 18, 18)),
    (in_file(in_memory("I;16", 0x1234)), (18, 18, 18)),
    (in_file(in_memory("I;16", 0x1234), transparency=0x1234), (255, 255, 255)),
    (in_file(in_memory("I;16", 0x1234), transparency=0x1235), (18, 18, 18)),
    (in_file(in_memory("I;16", 0x1234), "TIFF"), (18, 18, 18)),
    (tiff(16, 1, struct.pack("<2H", 0x1234, 0)), (18, 18, 18)),
    (tiff(16, 0, struct.pack("<2H", 0x1234, 0)), (237, 237, 237)),
    (tiff(12, 1, b"\x12\x30\0"), (18, 18, 18)),
    (tiff(8, 0, b"\x12\0"), (237, 237, 237)),
    (in_file(in_memory("RGB", (200, 0, 0)), "GIF", **ANIMATED), (200, 0, 0)),
    (in_file(in_memory("RGB", (200, 0, 0)), "PNG", **ANIMATED), (200, 0, 0)),
    (in_file(in_memory("RGB", (200, 0, 0)), "TIFF", **ANIMATED), (200, 0, 0)),
], ids=lambda value: getattr(value, "mode", str(value)))  # fmt: skip
def test_each_mode_is_shown_as_a_person_sees_it(image, rgb):
    """The color of the first pixel was computed by hand, so the rounding may differ by 1."""
    found = load_image(image).getpixel((0, 0))
    assert all(abs(a - b) <= 1 for a, b in zip(found, rgb, strict=True)), found


def test_other_images_are_turned_upright():
    image = PIL.Image.new("LA", (3, 2), (0, 0))
    image.getexif()[0x0112] = 6
    for turned in (image, in_file(in_memory("I;16", 0x1234), exif=image.getexif())):
        assert load_image(turned).size == turned.size[::-1]


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_without_a_known_white_are_refused(mode):
    for image in (in_memory(mode, 1), in_file(in_memory(mode, 1), "TIFF")):
        with pytest.raises(ValueError, match=rf"32-bit numbers \(mode {mode}\), .*; save the image with 8 bits per"):
            load_image(image)
