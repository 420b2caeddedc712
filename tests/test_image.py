"""Images: sizes and patches equal to transformers' processors to the bit, where they come from, and damaged files."""

import base64
import hashlib
import io
import json
import random
import struct
import warnings
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import PIL.features
import PIL.Image
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from record_vision import attempt, digest, image_cases, noise, resize_cases

from minivlmrl.data import fetch
from minivlmrl.image import ImageProcessor, load_image, smart_resize, to_rgb

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


def arithmetic(height, width):
    """Pixels that a formula gives: (7 row + 13 column + 29 channel) mod 256."""
    y, x, c = np.ogrid[:height, :width, :3]
    return PIL.Image.fromarray(((7 * y + 13 * x + 29 * c) % 256).astype(np.uint8))


def encoded(image, kind):
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def recorded(name):
    return json.loads((Path(__file__).parent / "recorded" / f"vision_{name}.json").read_text())


HAS = [kind for kind in ("AVIF", "JPEG2000") if PIL.features.check({"AVIF": "avif", "JPEG2000": "jpg_2000"}[kind])]
KINDS = ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "TGA", "ICO", "SGI", "DDS", *HAS]  # a cut one is noticed
ALL_KINDS = [*KINDS, "DIB", "ICNS", "IM", "MPO", "PCX", "QOI", "SPIDER"]


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

    cases = list(resize_cases())
    assert len(cases) == 2000
    for case in cases:
        assert attempt(smart_resize, *case) == attempt(theirs, *case), case


def test_smart_resize_equals_qwen_vl_utils_except_for_thin_images():
    """It counts a side that rounds to 0 as one factor before it looks at the area, and it can return 0."""
    compared = 0
    for case, expected in zip(resize_cases(), recorded("qwen_vl_utils_0.0.14")["smart_resize"], strict=True):
        thin = round(min(case[:2]) / case[2]) == 0 or 0 in (expected or [])
        if not thin:
            assert attempt(smart_resize, *case) == (expected and tuple(expected)), case
            compared += 1
    assert compared > 1200


def test_aspect_ratio_200_is_the_last_that_passes():
    smart_resize(1, 200, 28, 3136, HUB)
    with pytest.raises(ValueError, match=r"201 x 1 pixels.*aspect ratio is over 200"):
        smart_resize(1, 201, 28, 3136, HUB)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "LA", "PA", "1", "CMYK"])
def test_patches_of_2000_images_equal_transformers_bit_for_bit(mode):
    pytest.importorskip("transformers", reason="oracle missing: pip install transformers==5.23.0")
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    rng = random.Random(mode)
    for seed in range(250):
        patch, least = rng.choice((7, 14)), rng.choice((784, 3136))
        options = {"patch_size": patch, "min_pixels": least, "max_pixels": least * rng.choice((1, 4, 9, 40))}
        options |= {"temporal_patch_size": rng.choice((1, 2, 3)), "merge_size": rng.choice((1, 2))}
        if seed % 2:
            options |= {"image_mean": [0.5, 0.25, 0.125], "image_std": [0.3, 0.7, 1.0]}
        image = noise(mode, (rng.randint(9, 300), rng.randint(9, 300)), seed)
        expected = Qwen2VLImageProcessorPil(**options)(images=[image], return_tensors="pt")
        pixel_values, grid = ImageProcessor(**options)(image)
        assert grid == tuple(expected["image_grid_thw"][0].tolist())
        assert torch.equal(pixel_values, expected["pixel_values"]), (image.size, options)


def test_patches_equal_transformers_torchvision_processor_bit_for_bit():
    cases = recorded("torchvision_0.28.0")["images"]
    assert len(cases) == 48
    for (image, settings_), (grid, expected) in zip(image_cases(), cases, strict=True):
        pixel_values, image_grid_thw = ImageProcessor(**settings_, resize="torch")(image)
        assert list(image_grid_thw) == grid
        assert digest(pixel_values) == expected, (image, settings_)


def test_the_two_filters_differ_by_grey_levels_and_without_resizing_by_rounding():
    image = noise("RGB", (112, 56))
    ours, torchs = (ImageProcessor(resize=resize)(image)[0] for resize in ("pil", "torch"))
    assert 0 < (ours - torchs).abs().max() < 1e-6
    image = noise("RGB", (300, 200))
    ours, torchs = (ImageProcessor(max_pixels=28 * 28 * 30, resize=resize)(image)[0] for resize in ("pil", "torch"))
    assert 1 / 255 < (ours - torchs).abs().max() < 30 / 255 / 0.26


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


def test_the_see_through_colour_of_an_rgb_file_becomes_white(tmp_path):
    """As in transformers, from a file and in memory; qwen-vl-utils shows the colour."""
    image = PIL.Image.new("RGB", (56, 56), (10, 20, 30))
    image.putpixel((1, 0), (40, 50, 60))
    image.save(tmp_path / "p.png", transparency=(10, 20, 30))
    loaded = load_image(tmp_path / "p.png")
    assert [loaded.getpixel((0, 0)), loaded.getpixel((1, 0))] == [(255, 255, 255), (40, 50, 60)]
    with PIL.Image.open(tmp_path / "p.png") as opened:
        assert torch.equal(ImageProcessor()(opened)[0], ImageProcessor()(loaded)[0])


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


WHOLE = {}


@st.composite
def damaged(draw):
    """A file of any format that is cut, has bytes changed, or is random behind the format's first bytes."""
    kind = draw(st.sampled_from(ALL_KINDS))
    if kind not in WHOLE:
        WHOLE[kind] = encoded(noise(draw(st.sampled_from(["RGB"])), (12, 9)), kind)
    content = bytearray(WHOLE[kind])
    if draw(st.integers(0, 9)) == 0:
        return bytes(content[: draw(st.integers(0, 16))]) + draw(st.binary(max_size=200))
    where = st.integers(0, len(content) - 1) | st.integers(0, min(64, len(content) - 1))  # headers more often
    for place, value in draw(
        st.lists(st.tuples(where, st.integers(0, 255) | st.sampled_from([0, 127, 255])), max_size=6)
    ):
        content[place] = value
    return bytes(content[: draw(st.integers(0, len(content)) | st.just(len(content)))])


@pytest.mark.filterwarnings("ignore:::PIL")
@settings(max_examples=400, deadline=None)
@given(damaged())
def test_a_damaged_file_gives_an_image_or_a_value_error(content):
    """Whatever Pillow stumbles over, the user hears of it as ValueError with the source's name."""
    try:
        image = load_image(content)
    except ValueError as error:
        assert str(error).startswith(f"{len(content)} bytes: cannot be read as an image (")
    else:
        assert image.mode == "RGB"
        assert min(image.size) > 0


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_are_refused(content):
    with pytest.raises(ValueError, match=rf"^{len(content)} bytes: cannot be read as an image"):
        load_image(content)


def png_header(width, height):
    """The beginning of a PNG that claims a size and has no pixels."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head)) + b"\0\0\0\4IDATxxxx"
    )


@pytest.mark.parametrize("size", [(20_000, 20_000), (13_378, 13_377), (2**31 - 1, 2**31 - 1)])
def test_a_decompression_bomb_is_refused_before_it_is_decoded(size):
    with pytest.raises(ValueError, match=r"cannot be read as an image \(.*(exceeds limit|are over) .*"):
        load_image(png_header(*size))


def test_the_pixel_limit_holds_where_pillow_has_none(monkeypatch):
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", None)
    with pytest.raises(ValueError, match="20000 x 20000 pixels are over 178956970; scale it down"):
        load_image(png_header(20_000, 20_000))


def test_large_photos_pass_the_pixel_limit_without_a_warning():
    """12000 x 9000 is over the size from which Pillow warns: this file fails later, for its missing pixels."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="cannot be read as an image") as refused:
            load_image(png_header(12_000, 9000))
    assert not any(word in str(refused.value) for word in ("bomb", "over", "exceeds"))


def test_a_postscript_file_is_not_executed():
    with pytest.raises(ValueError, match="EPS files are programs"):
        load_image(encoded(noise("RGB", (4, 4)), "EPS"))


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0)])
def test_an_image_without_pixels_is_refused(size):
    with pytest.raises(ValueError, match=f"image of {size[0]} x {size[1]} pixels has nothing to show"):
        ImageProcessor()(PIL.Image.new("RGB", size))


def test_too_long_an_image_is_refused_by_the_processor():
    with pytest.raises(ValueError, match="402 x 2 pixels: its aspect ratio is over 200"):
        ImageProcessor()(PIL.Image.new("RGB", (402, 2)))


PICTURE = noise("RGB", (6, 5), seed=3)
PNG = encoded(PICTURE, "PNG")


def same(image):
    return image.mode == "RGB" and image.size == PICTURE.size and image.tobytes() == PICTURE.tobytes()


def test_every_kind_of_source_gives_the_same_image(tmp_path):
    folder = tmp_path / "my images"
    folder.mkdir()
    (folder / "a.png").write_bytes(PNG)
    assert same(load_image(folder / "a.png"))
    assert same(load_image(str(folder / "a.png")))
    assert same(load_image("a.png", folder))
    assert same(load_image(Path("my images/a.png"), str(tmp_path)))
    assert same(load_image(str(folder / "a.png"), "/elsewhere"))  # absolute
    assert same(load_image(f"file://{folder}/a.png"))
    assert same(load_image(f"file://localhost{folder}/a.png".replace(" ", "%20")))
    assert same(load_image(PNG))
    assert same(load_image(bytearray(PNG)))
    assert same(load_image(PICTURE))
    encoded_ = base64.b64encode(PNG).decode()
    assert same(load_image(f"data:image/png;base64,{encoded_}"))
    assert same(load_image(f"data:image/png;base64,{encoded_[:40]}\n {encoded_[40:]}"))


def test_a_data_uri_with_a_letter_too_many_is_refused():
    """Lenient decoders skip it, and skip as well what a cut or garbled URI has in place of its content."""
    with pytest.raises(ValueError, match="not base64"):
        load_image(f"data:image/png;base64,*{base64.b64encode(PNG).decode()}")


def test_an_image_in_memory_is_turned_upright_and_put_on_white():
    image = PIL.Image.new("LA", (3, 2), (0, 0))
    exif = image.getexif()
    exif[0x0112] = 6
    loaded = load_image(image)
    assert loaded.size == (2, 3)
    assert set(loaded.get_flattened_data()) == {(255, 255, 255)}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("data:image/png,abc", r"^data:image/png,abc: a data URI must look like data:image/png;base64"),
        ("data:image/png;base64", "a data URI must look like"),
        ("data:image/png;base64,a", "data:image/png;base64,a: not base64"),
        ("data:image/png;base64,ab*=", "not base64"),
        ("data:image/png;base64,äöü=", "not base64"),
        ("data:image/png;base64,AAAA", r"^data:image/png;base64,AAAA: cannot be read as an image"),
        (
            "data:image/png;base64," + "A" * 4000,
            r"^data:image/png;base64,A{38}\.\.\. \(4022 characters\): cannot be read",
        ),
        ("A" * 4000, r"^A{60}\.\.\. \(4000 characters\): cannot be read as an image \(File name too long\)$"),
        ("a\0b.png", "cannot be read as an image"),
        ("", r"^\.: cannot be read as an image \(Is a directory\)$"),
        (
            "http://example.com/a.png",
            r"^http://example.com/a.png: URLs are not downloaded unless data.allow_urls: true$",
        ),
        ("https://example.com/a.png", "data.allow_urls: true"),
        (None, "a path, URL, data URI or bytes, not NoneType"),
        ({"url": "a.png"}, "not dict"),
        (7, "not int"),
        (b"", "^0 bytes: cannot be read as an image"),
        (PIL.Image.new("RGB", (0, 3)), "image of 0 x 3 pixels: cannot be read as an image .*nothing to show"),
    ],
)
def test_a_source_that_gives_no_image_is_named(source, message):
    with pytest.raises(ValueError, match=message):
        load_image(source)


class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/missing.png":
            self.send_error(404)
            return
        if self.path == "/to-a-file.png":
            self.send_response(302)
            self.send_header("Location", "file:///etc/hostname")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(PNG) + (self.path == "/cut.png")))
        self.end_headers()
        self.wfile.write(b"no picture".ljust(len(PNG)) if self.path == "/text.png" else PNG)

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture(scope="module")
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_url_is_downloaded_when_allowed(server):
    assert same(load_image(f"{server}/a.png", allow_url=True))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing.png", r"missing\.png: cannot be downloaded \(HTTP Error 404"),
        ("cut.png", r"cut\.png: cannot be downloaded \(the connection ended 1 bytes early"),
        ("text.png", r"text\.png: cannot be read as an image"),
        ("to-a-file.png", r"to-a-file\.png: cannot be downloaded"),
    ],
)
def test_a_url_without_an_image_is_named(server, path, message):
    with pytest.raises(ValueError, match=message):
        load_image(f"{server}/{path}", allow_url=True)


def test_a_download_has_a_limit_of_size_and_of_time(server, monkeypatch):
    monkeypatch.setattr(fetch, "MAX_DOWNLOAD", len(PNG) - 1)
    with pytest.raises(ValueError, match=rf"a\.png: cannot be downloaded \(over {len(PNG) - 1} bytes"):
        load_image(f"{server}/a.png", allow_url=True)
    monkeypatch.undo()
    clock = iter([0.0, fetch.TIMEOUT + 1.0])
    monkeypatch.setattr(fetch.time, "monotonic", lambda: next(clock, 1e9))
    with pytest.raises(ValueError, match=r"cannot be downloaded \(not finished after 60 seconds"):
        load_image(f"{server}/a.png", allow_url=True)


@pytest.mark.parametrize(
    "url", ["http://", "http://[", "http://127.0.0.1:1/a.png", "http://a b/", "http://127.0.0.1:x/"]
)
def test_a_url_that_nobody_answers_is_named(url):
    with pytest.raises(ValueError, match="cannot be downloaded"):
        load_image(url, allow_url=True)


def test_options_of_one_image_take_the_place_of_the_processors():
    image = noise("RGB", (300, 200))
    for options in ({"min_pixels": 100_352}, {"max_pixels": 20_000}, {"min_pixels": 784, "max_pixels": 784}):
        pixel_values, grid = ImageProcessor()(image, **options, resized_height=None)
        expected, expected_grid = ImageProcessor(**options)(image)
        assert grid == expected_grid != ImageProcessor()(image)[1]
        assert torch.equal(pixel_values, expected)


@pytest.mark.parametrize(
    ("options", "grid"),
    [
        ({"resized_height": 280, "resized_width": 420}, (1, 20, 30)),
        ({"resized_height": 290, "resized_width": 430}, (1, 20, 30)),  # to the nearest multiples of 28
        ({"resized_height": 1, "resized_width": 1}, (1, 4, 4)),  # the processor's bounds hold
        ({"resized_height": 84, "resized_width": 112, "min_pixels": 10**6}, (1, 6, 8)),  # the image's own do not
    ],
)
def test_resized_height_and_width(options, grid):
    assert ImageProcessor()(noise("RGB", (300, 200)), **options)[1] == grid


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fps": 2}, "option 'fps' is not one of min_pixels, max_pixels, resized_height, resized_width"),
        ({"total_pixels": 10**6}, "option 'total_pixels' is not one of"),
        ({"max_pixels": "big"}, "max_pixels 'big': need a whole number above 0"),
        ({"max_pixels": 200704.0}, r"max_pixels 200704.0: need a whole number above 0"),
        ({"min_pixels": True}, "min_pixels True: need"),
        ({"min_pixels": 0}, "min_pixels 0: need"),
        ({"min_pixels": -5}, "min_pixels -5: need"),
        ({"min_pixels": 10**12, "max_pixels": 10**12}, "min_pixels 1000000000000 is over"),
        ({"max_pixels": 783, "min_pixels": 1}, "max_pixels 783 is less than one token, 28 x 28 pixels"),
        ({"max_pixels": 3000}, "min_pixels 3136 and max_pixels 3000"),
        ({"resized_height": 280}, "resized_height and resized_width belong together"),
        ({"resized_width": 280}, "resized_height and resized_width belong together"),
        ({"resized_height": 2000, "resized_width": 9}, "9 x 2000 pixels: its aspect ratio"),
    ],
)
def test_a_wrong_option_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        ImageProcessor()(noise("RGB", (30, 20)), **options)


HUB_CONFIG = {  # preprocessor_config.json of Qwen2.5-VL
    "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor",
}  # fmt: skip


def test_the_hubs_settings_are_the_defaults():
    assert ImageProcessor.from_dict(HUB_CONFIG) == ImageProcessor()


@pytest.mark.parametrize(
    ("config", "bounds"),
    [
        ({}, (3136, 1003520)),  # the defaults of transformers' class, not of the hub's files
        ({"size": {"shortest_edge": 784, "longest_edge": 5000}}, (784, 5000)),
        ({"size": {"min_pixels": 784, "max_pixels": 5000}}, (784, 5000)),  # Qwen2-VL's files
        ({"size": {"shortest_edge": 784, "longest_edge": 5000}, "max_pixels": 4000}, (784, 4000)),
        ({"size": {"shortest_edge": 784, "longest_edge": 5000}, "min_pixels": 1000}, (1000, 5000)),
        ({"size": None, "min_pixels": None, "max_pixels": 4000}, (3136, 4000)),
        ({"size": {"shortest_edge": 784, "longest_edge": None, "height": None}}, (784, 1003520)),
    ],
)
def test_pixel_bounds_of_a_folder(config, bounds):
    processor = ImageProcessor.from_dict(config)
    assert (processor.min_pixels, processor.max_pixels) == bounds


@pytest.mark.parametrize(
    "config", [{}, {"size": {"shortest_edge": 784, "longest_edge": 5000}, "max_pixels": 4000}, HUB_CONFIG]
)
def test_a_folders_settings_mean_what_they_mean_in_transformers(config):
    pytest.importorskip("transformers", reason="oracle missing: pip install transformers==5.23.0")
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    image = noise("RGB", (1500, 900))
    expected = Qwen2VLImageProcessorPil.from_dict(dict(config))(images=[image], return_tensors="pt")
    assert torch.equal(ImageProcessor.from_dict(config)(image)[0], expected["pixel_values"])


def test_arguments_override_a_folders_settings():
    processor = ImageProcessor.from_dict(HUB_CONFIG, 784, 1000, resize="torch")
    assert processor == ImageProcessor(min_pixels=784, max_pixels=1000, resize="torch")


CUSTOM = {
    "patch_size": 7, "temporal_patch_size": 1, "merge_size": 3, "min_pixels": 441, "max_pixels": 9000,
    "image_mean": (0.5, 0.25, 0.125), "image_std": (0.5, 0.3, 1.0),
}  # fmt: skip


@pytest.mark.parametrize("resize", ["pil", "torch"])
@pytest.mark.parametrize("options", [{}, CUSTOM], ids=["hub", "custom"])
def test_settings_come_back_as_they_were_written(options, resize):
    processor = ImageProcessor(**options, resize=resize)
    assert ImageProcessor.from_dict(json.loads(json.dumps(processor.to_dict()))) == processor


@pytest.mark.parametrize("resize", ["pil", "torch"])
def test_transformers_reads_what_we_write(tmp_path, resize):
    transformers = pytest.importorskip("transformers", reason="oracle missing: pip install transformers==5.23.0")
    processor, image = ImageProcessor(**CUSTOM, resize=resize), noise("RGB", (200, 120))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor.to_dict()))
    theirs = transformers.AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    expected = theirs(images=[image], return_tensors="pt")
    assert torch.equal(ImageProcessor(**CUSTOM)(image)[0], expected["pixel_values"])


def test_the_fast_processor_of_a_folder_resizes_with_torch():
    assert ImageProcessor.from_dict({"image_processor_type": "Qwen2VLImageProcessorFast"}).resize == "torch"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(name, False) for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")],
        *[(name, True) for name in ("do_center_crop", "do_pad")],
        ("do_resize", "no"), ("rescale_factor", 1.0), ("rescale_factor", "1/255"), ("resample", 2), ("resample", [3]),
        ("image_processor_type", "CLIPImageProcessor"), ("image_processor_type", ["a"]), ("image_processor_type", 3),
        ("size", 224), ("size", {"height": 224, "width": 224}), ("size", [3136, 12845056]), ("size", "big"),
        ("min_pixels", "3136"), ("min_pixels", 0), ("max_pixels", 1.5), ("max_pixels", [1]), ("max_pixels", True),
        ("patch_size", 0), ("patch_size", "14"), ("patch_size", 14.0), ("patch_size", 10**9), ("merge_size", {}),
        ("temporal_patch_size", -2), ("image_mean", 0.5), ("image_mean", [0.5, 0.5]), ("image_mean", ["a", 1, 2]),
        ("image_mean", [0.5, 0.5, float("nan")]), ("image_std", [0.5, 0, 0.5]), ("image_std", [-1, 1, 1]),
        ("image_std", [True, 1, 1]), ("image_std", "abc"), ("image_std", [1, 1, 10**400]),
        ("image_std", [1, 1, 1e-300]),
    ],
)  # fmt: skip
def test_a_setting_that_is_not_supported_is_named(field, value):
    with pytest.raises(ValueError, match="one token" if (field, value) == ("patch_size", 10**9) else field):
        ImageProcessor.from_dict({**HUB_CONFIG, field: value})


FIELDS = [*ImageProcessor().to_dict(), "do_center_crop", "do_pad", "processor_class", "made_up"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["shortest_edge", "a"]), inner, max_size=2)
    ),
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
def test_a_random_settings_file_gives_a_processor_or_a_value_error(changes):
    try:
        processor = ImageProcessor.from_dict(HUB_CONFIG | changes)
    except ValueError as error:
        assert any(name in str(error) for name in FIELDS), error
    else:
        assert ImageProcessor.from_dict(processor.to_dict()) == processor


@pytest.mark.parametrize("settings_", [None, [], "a", 3])
def test_settings_that_are_no_object_are_refused(settings_):
    with pytest.raises(ValueError, match="an object"):
        ImageProcessor.from_dict(settings_)


def test_an_unknown_filter_is_refused():
    with pytest.raises(ValueError, match="resize 'nearest' is neither 'pil' nor 'torch'"):
        ImageProcessor(resize="nearest")
