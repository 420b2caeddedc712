"""Test the images and videos of rows: sources, damaged files, options, order and tensors."""

import base64
import os
import struct
import weakref
import zlib
from pathlib import Path

import numpy as np
import PIL.features
import PIL.Image
import pytest
import torch

from minivlmrl.data import file_dataset
from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.media import fetch_image
from minivlmrl.data.processor import Processor
from minivlmrl.data.video import load_video
from minivlmrl.rewards.columns import image_and_box_sizes
from minivlmrl.tasks import shapes
from tests.helpers import tiny
from tests.helpers.runs import write_lines
from tests.helpers.talk import assistant, user
from tests.record.record_vision import encoded, noise

PROCESSOR = Processor(shapes.tokenizer(), ImageProcessor(7, 2, 2, min_pixels=28 * 28))
COLORS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}


@pytest.mark.parametrize(("mode", "white"), [("L", 255), ("I;16", 65535)])
def test_a_rotated_grayscale_tiff_file_is_turned_upright(tmp_path, mode, white):
    """If Pillow 13 gets a path, it swaps the width and height of such a file."""
    image = PIL.Image.new(mode, (3, 2))
    image.putpixel((0, 0), white)
    image.getexif()[0x0112] = 6  # rotate clockwise
    image.save(tmp_path / "a.tif", exif=image.getexif())
    turned = fetch_image(tmp_path / "a.tif")
    assert turned.size == (2, 3) and turned.getpixel((1, 0)) == (255, 255, 255)


@pytest.fixture
def folder(tmp_path):
    for name, color in COLORS.items():
        PIL.Image.new("RGB", (56, 28), color).save(tmp_path / f"{name}.png")
    for i in range(4):
        PIL.Image.new("RGB", (28, 28), (60 * i, 0, 0)).save(tmp_path / f"frame{i}.png")
    return tmp_path


FRAMES = [f"frame{i}.png" for i in range(4)]


def read(folder, row, **options):
    write_lines(folder / "rows.jsonl", [row])
    return file_dataset.FileDataset(folder / "rows.jsonl", **options)[0]


def test_a_video_file_is_sampled_as_the_run_asks_and_a_row_may_ask_for_its_own(folder):
    tiny.write_video(folder / "clip.mkv", [np.full((28, 28, 3), 10 * i, np.uint8) for i in range(16)], rate=8)
    for own, options, count in (
        ({}, {}, 4),  # the default is two frames per second
        ({}, {"fps": 4}, 8),
        ({"nframes": 6}, {"fps": 4, "max_frames": 4}, 6),
        ({"fps": 8}, {"fps": 4, "max_frames": 12}, 12),
    ):
        row = {"video": {"video": "clip.mkv", **own}, "problem": "What moves?"}
        assert len(read(folder, row, video=options).videos[0].load().frames) == count
    listed = read(folder, {"video": FRAMES, "problem": "?"}, video={"fps": 1, "max_frames": 1}).videos[0].load()
    assert listed.fps == 1 and len(listed.frames) == len(FRAMES)  # all frames of a list are used


def test_a_part_may_have_size_options_for_the_image_of_a_column(folder):
    listed = ["red.png", {"image": "green.png", "max_pixels": 784}, {"image": "blue.png", "min_pixels": 784 * 8}]
    parts = [{"type": "image", "max_pixels": most} for most in (784, 1568, 12544)]
    row = read(folder, {"prompt": [user(parts)], "images": listed})
    assert row.messages[0]["content"] == [*parts[:2], {"type": "image", "min_pixels": 6272, "max_pixels": 12544}]
    assert row.prompt(PROCESSOR).image_grid_thw.tolist() == [[1, 2, 4], [1, 4, 8], [1, 8, 16]]
    row = {"images": ["blue.png", {"image": "red.png", "max_pixels": 784}], "problem": "a"}
    row = read(folder, row, image={"resized_height": 60, "resized_width": 84})  # for images without own options
    assert row.prompt(PROCESSOR).image_grid_thw.tolist() == [[1, 8, 12], [1, 2, 4]]


def test_all_missing_files_are_reported_before_the_first_row_is_read(folder):
    lines = [{"image": name, "problem": "a"} for name in ("red.png", "1.png", "2.png", f"file://{folder}/green.png")]
    later = user([{"type": "image", "image": f"{i}.png"} for i in (4, 5, 6)])
    lines.append({"video": ["frame0.png", "3.png"], "problem": "a"})
    lines.append({"messages": [user("?"), assistant("a"), later, assistant("b")]})
    write_lines(folder / "rows.jsonl", lines)
    listed = r"1\.png \(.*rows\.jsonl:2\), 2\.png \(.*:3\), 3\.png \(.*:5\), 4\.png \(.*:6\), 5\.png \(.*:6\)\. Correct"
    with pytest.raises(ValueError, match=rf"rows\.jsonl: 6 missing .* in {folder}, for example {listed}"):
        file_dataset.FileDataset(folder / "rows.jsonl")
    assert len(file_dataset.FileDataset(folder / "rows.jsonl", limit=1)) == 1


def test_at_most_two_images_are_decoded_at_a_time(folder, monkeypatch):
    """The 64 photos of a step would take 2 GB if all were decoded at the same time."""
    alive, load, most = [], fetch_image, 0

    def counted(*arguments):
        nonlocal most
        image = load(*arguments)
        alive.append(weakref.ref(image))
        most = max(most, sum(other() is not None for other in alive))
        return image

    monkeypatch.setattr(file_dataset, "fetch_image", counted)
    rows = [read(folder, {"images": [f"{name}.png" for name in COLORS], "problem": "a"}) for _ in range(3)]
    prompts = [row.prompt(PROCESSOR) for row in rows]
    assert len(alive) == 9 and most == 2
    monkeypatch.undo()
    loaded = [fetch_image(folder / f"{name}.png") for name in COLORS]
    assert torch.equal(prompts[2].pixel_values, PROCESSOR(rows[2].messages, loaded).pixel_values)
    assert image_and_box_sizes(rows[0], prompts[0], PROCESSOR)[0] == (56, 28) and len(alive) == 9


# file formats for which Pillow notices that a file is truncated
KINDS = ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "TGA", "ICO", "SGI"]
KINDS += ["AVIF"] * PIL.features.check("avif") + ["JPEG2000"] * PIL.features.check("jpg_2000")


@pytest.mark.filterwarnings("ignore:::PIL")
@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_file_is_refused_and_named(tmp_path, kind):
    whole = encoded(noise("RGB", (40, 30)), kind)
    file = tmp_path / "cut.img"
    for share in (0.02, 0.1, 0.3, 0.6, 0.9):
        file.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(ValueError, match=r"cut\.img: the image cannot be read"):
            fetch_image(file)


def test_a_pointer_of_git_lfs_is_no_damaged_image(tmp_path):
    (tmp_path / "a.png").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3\n")
    with pytest.raises(ValueError, match=r"a\.png is a Git LFS pointer.* Run `git lfs pull`"):
        fetch_image(tmp_path / "a.png")


@pytest.mark.parametrize(("size", "expected"), [
    ((13_378, 13_377), r"the image cannot be read \(.*(exceeds limit|are over)"),
    ((2**31 - 1, 2**31 - 1), r"the image cannot be read \(.*(exceeds limit|are over)"),
    ((1, 178_956_970), "1 x 178956970 pixels, but its aspect ratio must be at most 200"),
])  # fmt: skip
def test_an_image_that_would_fill_the_memory_is_refused_before_it_is_decoded(size, expected):
    head = b"IHDR" + struct.pack(">IIBBBBB", *size, 8, 2, 0, 0, 0)
    crc = struct.pack(">I", zlib.crc32(head))
    with pytest.raises(ValueError, match=expected):
        fetch_image(b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + crc + b"\0\0\0\4IDATxxxx")


def test_a_file_that_is_a_program_is_not_executed(monkeypatch):
    """Pillow would run Ghostscript for an EPS file."""
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: pytest.fail("Ghostscript"))
    content = encoded(noise("RGB", (4, 4)), "EPS")
    with pytest.raises(ValueError, match=f"^{len(content)} bytes: .*EPS is not allowed, because .*; convert the image"):
        fetch_image(content)


PICTURE = noise("RGB", (6, 5), seed=3)
PNG = encoded(PICTURE, "PNG")


def test_every_kind_of_source_gives_the_same_image(tmp_path):
    folder = tmp_path / "my images"
    encoded_ = base64.b64encode(PNG).decode()
    folder.mkdir()
    (folder / "a.png").write_bytes(PNG)
    for source, *beside in (
        (folder / "a.png",), ("a.png", folder), (Path("my images/a.png"), str(tmp_path)),
        (str(folder / "a.png"), "/elsewhere"),  # an absolute path
        (f"file://{folder}/a.png",), (f"file://localhost{folder}/a.png".replace(" ", "%20"),),
        (PNG,), (bytearray(PNG),), (f"data:image/png;base64,{encoded_}",),
        (f"data:image/png;base64,{encoded_[:40]}\n {encoded_[40:]}",),
    ):  # fmt: skip
        image = fetch_image(source, *beside)
        assert (image.mode, image.size, image.tobytes()) == ("RGB", PICTURE.size, PICTURE.tobytes()), source


@pytest.mark.parametrize(("source", "message"), [
    ("data:image/png,abc", r"^data:image/png,abc: the data is not valid base64"),
    # a lenient decoder of base64 would ignore the character *
    (f"data:image/png;base64,*{base64.b64encode(PNG).decode()}", "the data is not valid base64"),
    ("A" * 4000, r"^A{60}\.\.\. \(4000 characters\): the image cannot be read \(File name too long\)$"),
    ("http://x.com/a.png", r"^http://x.com/a.png: remote files are not supported, .* recipes/download.py ROWS"),
])  # fmt: skip
def test_sources_without_an_image_are_reported(source, message):
    with pytest.raises(ValueError, match=message):
        fetch_image(source)


def test_pipes_and_devices_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    for path in (tmp_path / "pipe.png", "/dev/zero"):
        for load in (fetch_image, load_video):
            with pytest.raises(ValueError, match=rf"^{path} is a pipe or a device; use a regular file"):
                load(path)
