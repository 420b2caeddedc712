"""Files, data URIs and bytes: where images come from, and damaged ones."""

import base64
import os
import struct
import zlib
from pathlib import Path

import PIL.features
import PIL.Image
import pytest
from record_vision import encoded, noise

from minivlmrl.data.fetch import fetch_image
from minivlmrl.data.video import load_video

# a cut one is noticed
KINDS = ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "TGA", "ICO", "SGI"]
KINDS += ["AVIF"] * PIL.features.check("avif") + ["JPEG2000"] * PIL.features.check("jpg_2000")


@pytest.mark.filterwarnings("ignore:::PIL")
@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_file_is_refused_and_named(tmp_path, kind):
    whole = encoded(noise("RGB", (40, 30)), kind)
    file = tmp_path / "cut.img"
    for share in (0.02, 0.1, 0.3, 0.6, 0.9):
        file.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(ValueError, match=r"cut\.img: cannot be read as an image"):
            fetch_image(file)


def png_header(width, height):
    """The beginning of a PNG that claims a size and has no pixels."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    crc = struct.pack(">I", zlib.crc32(head))
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + crc + b"\0\0\0\4IDATxxxx"


@pytest.mark.parametrize("size", [(13_378, 13_377), (2**31 - 1, 2**31 - 1)])
def test_a_decompression_bomb_is_refused_before_it_is_decoded(size):
    with pytest.raises(ValueError, match=r"cannot be read as an image \(.*(exceeds limit|are over) .*"):
        fetch_image(png_header(*size))


def iptc(content):
    """An IPTC file of 4 x 4 pixels whose picture is another file."""
    fields = {(3, 60): b"\1\0", (3, 20): b"\0\4", (3, 30): b"\0\4", (3, 120): b"\5", (8, 10): content}
    head = b"\x1c%c%c"
    return b"".join(head % key + struct.pack(">H", len(value)) + value for key, value in fields.items())


@pytest.mark.parametrize("kind", ["EPS", "IPTC"])
def test_a_file_that_is_a_program_is_not_executed(kind, monkeypatch):
    """Pillow would run Ghostscript for an EPS file, also for one inside an IPTC file."""
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: pytest.fail("Ghostscript"))
    postscript = encoded(noise("RGB", (4, 4)), "EPS")
    content = {"EPS": postscript, "IPTC": iptc(postscript)}[kind]
    with pytest.raises(ValueError, match=f"^{len(content)} bytes: .*{kind} files can hold programs; convert it to PNG"):
        fetch_image(content)


def test_a_pipe_or_a_device_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    for path in (tmp_path / "pipe.png", "/dev/zero"):
        for load in (fetch_image, load_video):
            with pytest.raises(ValueError, match=rf"^{path}: a pipe or device; give a file"):
                load(path)


PICTURE = noise("RGB", (6, 5), seed=3)
PNG = encoded(PICTURE, "PNG")


def same(image):
    return image.mode == "RGB" and image.size == PICTURE.size and image.tobytes() == PICTURE.tobytes()


def test_every_kind_of_source_gives_the_same_image(tmp_path):
    folder = tmp_path / "my images"
    encoded_ = base64.b64encode(PNG).decode()
    folder.mkdir()
    (folder / "a.png").write_bytes(PNG)
    for source, *beside in (
        (folder / "a.png",), ("a.png", folder), (Path("my images/a.png"), str(tmp_path)),
        (str(folder / "a.png"), "/elsewhere"),  # absolute
        (f"file://{folder}/a.png",), (f"file://localhost{folder}/a.png".replace(" ", "%20"),),
        (PNG,), (bytearray(PNG),), (f"data:image/png;base64,{encoded_}",),
        (f"data:image/png;base64,{encoded_[:40]}\n {encoded_[40:]}",),
    ):  # fmt: skip
        assert same(fetch_image(source, *beside)), source


@pytest.mark.parametrize(("source", "message"), [
    ("data:image/png,abc", r"^data:image/png,abc: a data URI must look like data:image/png;base64"),
    # lenient decoders skip a letter too many, and what a cut URI has in place of its content
    (f"data:image/png;base64,*{base64.b64encode(PNG).decode()}", "not base64"),
    ("A" * 4000, r"^A{60}\.\.\. \(4000 characters\): cannot be read as an image \(File name too long\)$"),
    ("http://x.com/a.png", r"^http://x.com/a.png: download it, .* recipes/download.py ROWS"),
    (None, "a path, data URI or bytes is needed, not NoneType"),
])  # fmt: skip
def test_a_source_that_gives_no_image_is_named(source, message):
    with pytest.raises(ValueError, match=message):
        fetch_image(source)
