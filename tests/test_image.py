"""Images: sizes and patches equal to transformers' PIL processor to the bit, and files that are not images."""

import hashlib
import io
import random

import numpy as np
import PIL.features
import PIL.Image
import pytest
import torch

from minivlmrl.data.image import ImageProcessor, load_image, smart_resize, to_rgb

HUB, DEFAULT = 12845056, 1003520  # max_pixels of the hub's preprocessor_config.json and of transformers' class

# (height, width): with transformers' default max_pixels, with the hub's
SIZES = {
    (1092, 1568): ((812, 1176), (1092, 1568)),
    (1000, 500): ((1008, 504), (1008, 504)),
    (1, 1): ((56, 56), (56, 56)),
    (13, 13): ((56, 56), (56, 56)),
    (28, 28): ((56, 56), (56, 56)),
    (42, 42): ((56, 56), (56, 56)),
    (70, 70): ((56, 56), (56, 56)),  # 2.5 blocks: Python rounds half to even
    (98, 98): ((112, 112), (112, 112)),  # 3.5 blocks
    (1, 200): ((28, 812), (28, 812)),
    (10, 2000): ((28, 812), (28, 812)),
    (20, 4000): ((28, 4004), (28, 4004)),
    (2160, 3840): ((728, 1316), (2156, 3836)),
    (3500, 3500): ((980, 980), (3500, 3500)),
    (4000, 6000): ((812, 1204), (2912, 4368)),
    (9999, 50): ((9996, 56), (9996, 56)),
    (100, 19999): ((56, 14140), (112, 19992)),
    (384, 384): ((392, 392), (392, 392)),
    (1080, 1920): ((728, 1316), (1092, 1932)),
    (480, 640): ((476, 644), (476, 644)),
    (561, 278): ((560, 280), (560, 280)),  # transformers' own unit test
}


def noise(mode, size, seed=0):
    """A random picture of any mode; palettes get one see-through colour."""
    rng = np.random.RandomState(seed)
    channels = len(PIL.Image.new(mode, (1, 1)).getbands())
    pixels = rng.randint(0, 256, (size[1], size[0], channels), dtype=np.uint8)
    if mode == "P":
        image = PIL.Image.fromarray(pixels[:, :, 0] // 64, "L").convert("P")
        image.putpalette(rng.randint(0, 256, 4 * 3, dtype=np.uint8).tobytes())
        image.info["transparency"] = 2
        return image
    return PIL.Image.frombytes(mode, size, pixels.tobytes())


def arithmetic(height, width):
    """Pixels that a formula gives: (7 row + 13 column + 29 channel) mod 256."""
    y, x, c = np.ogrid[:height, :width, :3]
    return PIL.Image.fromarray(((7 * y + 13 * x + 29 * c) % 256).astype(np.uint8))


def encoded(image, kind):
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


KINDS = ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", *(["AVIF"] if PIL.features.check("avif") else [])]


@pytest.mark.parametrize("size", SIZES)
def test_smart_resize_of_hand_picked_sizes(size):
    assert (smart_resize(*size, 28, 3136, DEFAULT), smart_resize(*size, 28, 3136, HUB)) == SIZES[size]


@pytest.mark.parametrize(
    ("size", "most", "expected"), [((1000, 500), 200704, (616, 308)), ((30, 5900), 12544, (28, 1568))]
)
def test_shrinking_never_reaches_zero(size, most, expected):
    assert smart_resize(*size, 28, 3136, most) == expected


def test_docstring_example_of_smart_resize():
    assert smart_resize(1092, 1568, 28, 3136, 1003520) == (812, 1176)


def test_smart_resize_equals_transformers():
    pytest.importorskip("transformers", reason="oracle missing: pip install transformers==5.23.0")
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as theirs

    rng = random.Random(0)
    for _ in range(2000):
        size = [int(2 ** rng.uniform(0, 12)) for _ in range(2)]
        if max(size) > 200 * min(size):
            continue
        factor = 2 * rng.choice((7, 14, 16))
        least = rng.choice((factor**2, 3136, 50176))
        options = (factor, least, least * rng.choice((1, 3, 40, 4096)))
        assert smart_resize(*size, *options) == theirs(*size, *options), (size, options)


def test_aspect_ratio_200_is_the_last_that_passes():
    smart_resize(1, 200, 28, 3136, HUB)
    with pytest.raises(ValueError, match=r"201 x 1 pixels.*aspect ratio is over 200"):
        smart_resize(1, 201, 28, 3136, HUB)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "LA", "PA", "1", "CMYK"])
def test_patches_equal_transformers_bit_for_bit(mode):
    pytest.importorskip("transformers", reason="oracle missing: pip install transformers==5.23.0")
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    rng = random.Random(mode)
    for seed in range(8):
        patch, least = rng.choice((7, 14)), rng.choice((784, 3136))
        options = {"patch_size": patch, "min_pixels": least, "max_pixels": least * rng.choice((1, 9, 40))}
        image = noise(mode, (rng.randint(9, 300), rng.randint(9, 300)), seed)
        expected = Qwen2VLImageProcessorPil(**options)(images=[image], return_tensors="pt")
        pixel_values, grid = ImageProcessor(**options)(image)
        assert grid == tuple(expected["image_grid_thw"][0].tolist())
        assert torch.equal(pixel_values, expected["pixel_values"]), (image.size, options)


# normalised float32 patches of arithmetic(): sha256[:16] as transformers 4.49 to 5.23 make them
@pytest.mark.parametrize(
    ("size", "digest"),
    [
        ((56, 56), "4fc5f11614075125"),
        ((56, 84), "680ccdf86508a8dc"),
        ((84, 112), "b8fc632699c4f414"),
        ((112, 252), "dee6e18fd4d2f038"),
    ],
)
def test_golden_patches(size, digest):
    pixel_values, grid = ImageProcessor()(arithmetic(*size))
    assert grid == (1, size[0] // 14, size[1] // 14)
    assert hashlib.sha256(pixel_values.numpy().tobytes()).hexdigest()[:16] == digest


def test_order_of_patches_and_of_pixels_inside_a_patch():
    pixel_values, _ = ImageProcessor()(arithmetic(56, 84))
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None, None, None]
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None, None, None]
    values = ((pixel_values.view(-1, 3, 2, 14, 14) * std + mean) * 255).round().long()  # back to 0..255
    first = values[:, 0, 0, 0, 0].tolist()
    assert first[0] == 0
    assert first[1] == 13 * 14  # one patch to the right
    assert first[2] == 7 * 14  # one patch down, in the same 2 x 2 block
    assert first[4] == 13 * 28 % 256  # the next block
    assert values[0, 0, 0, 0].tolist() == [13 * x for x in range(14)]  # columns run fastest
    assert values[0, 0, 0, :, 0].tolist() == [7 * y for y in range(14)]
    assert values[0, :, 0, 0, 0].tolist() == [0, 29, 58]  # channels slowest
    assert torch.equal(values[:, :, 0], values[:, :, 1])  # the second frame repeats the first


def test_resized_noise_golden():
    """100 x 150 pixels are resized on the way: the digest holds for the bicubic filter of today's Pillow."""
    image = PIL.Image.fromarray(np.random.RandomState(0).randint(0, 256, (100, 150, 3), dtype=np.uint8))
    pixel_values, grid = ImageProcessor()(image)
    assert grid == (1, 8, 10)
    assert hashlib.sha256(pixel_values.numpy().tobytes()).hexdigest()[:16] == "142f51dbafa77e5e"


def test_num_tokens_and_patch_dim():
    processor = ImageProcessor()
    assert processor.num_tokens((1, 4, 6)) == 6
    assert processor.patch_dim == 1176


def test_pixel_bounds_must_be_in_order():
    with pytest.raises(ValueError, match="min_pixels 4000 and max_pixels 3136"):
        ImageProcessor(min_pixels=4000, max_pixels=3136)


def test_transparent_pixels_become_white_and_half_transparent_ones_half_white():
    image = PIL.Image.new("RGBA", (3, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (100, 0, 0, 255))
    image.putpixel((2, 0), (0, 0, 0, 51))  # a fifth of black on white
    assert list(to_rgb(image).get_flattened_data()) == [(255, 255, 255), (100, 0, 0), (204, 204, 204)]


def test_the_see_through_colour_of_a_palette_becomes_white(tmp_path):
    image = PIL.Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)
    image.save(tmp_path / "p.png", transparency=0)
    assert list(load_image(tmp_path / "p.png").get_flattened_data()) == [(255, 255, 255), (40, 50, 60)]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(tmp_path, orientation):
    """Whatever way the camera was held, the file shows the same upright picture."""
    upright = PIL.Image.new("RGB", (3, 2))
    for i in range(6):
        upright.putpixel((i % 3, i // 3), (40 * i, 0, 0))
    Transpose = PIL.Image.Transpose
    stored = {
        1: lambda image: image,
        2: lambda image: image.transpose(Transpose.FLIP_LEFT_RIGHT),
        3: lambda image: image.transpose(Transpose.ROTATE_180),
        4: lambda image: image.transpose(Transpose.FLIP_TOP_BOTTOM),
        5: lambda image: image.transpose(Transpose.TRANSPOSE),
        6: lambda image: image.transpose(Transpose.ROTATE_90),
        7: lambda image: image.transpose(Transpose.TRANSVERSE),
        8: lambda image: image.transpose(Transpose.ROTATE_270),
    }[orientation](upright)
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "photo.png", exif=exif)
    loaded = load_image(tmp_path / "photo.png")
    assert loaded.size == (3, 2)
    assert loaded.tobytes() == upright.tobytes()


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"gone\.png: cannot be read as an image"):
        load_image(tmp_path / "gone.png")


def test_a_folder_is_no_image(tmp_path):
    with pytest.raises(ValueError, match="cannot be read as an image"):
        load_image(tmp_path)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x89PNG\r\n\x1a\n", b"P6 x", b'{"problem": 1}'])
def test_a_file_that_is_no_image_is_named(tmp_path, content):
    (tmp_path / "notes.jpg").write_bytes(content)
    with pytest.raises(ValueError, match=r"notes\.jpg: cannot be read as an image"):
        load_image(tmp_path / "notes.jpg")


@pytest.mark.filterwarnings("ignore:::PIL")
@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_file_is_refused_and_named(tmp_path, kind):
    whole = encoded(noise("RGB", (40, 30)), kind)
    file = tmp_path / "cut.img"
    for share in (0.02, 0.1, 0.3, 0.6, 0.9):
        file.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(ValueError, match=r"cut\.img: cannot be read as an image"):
            load_image(file)


@pytest.mark.filterwarnings("ignore:::PIL")
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_gives_an_image_or_a_value_error(tmp_path, kind, monkeypatch):
    """Whatever Pillow stumbles over, the user hears of it as ValueError with the file's name."""
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 10_000)  # a damaged size may claim gigabytes
    whole, rng, file = bytearray(encoded(noise("RGB", (12, 9)), kind)), random.Random(kind), tmp_path / "bad.img"
    for _ in range(200):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(min(200, len(whole)))] = rng.randrange(256)
        file.write_bytes(damaged[: rng.randint(1, len(damaged))])
        try:
            load_image(file)
        except ValueError as error:
            assert "bad.img" in str(error)


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0)])
def test_an_image_without_pixels_is_refused(size):
    with pytest.raises(ValueError, match=f"image of {size[0]} x {size[1]} pixels has nothing to show"):
        ImageProcessor()(PIL.Image.new("RGB", size))


def test_too_long_an_image_is_refused_by_the_processor():
    with pytest.raises(ValueError, match="402 x 2 pixels: its aspect ratio is over 200"):
        ImageProcessor()(PIL.Image.new("RGB", (402, 2)))
