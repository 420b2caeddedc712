"""Files that are cut, flipped, grown, random or of a wrong value: each is read, or is a ValueError that names it."""

import json
import os
import shutil
import unicodedata

import numpy as np
import PIL.features
import PIL.Image
import pytest
from record_vision import encoded, noise
from talk import CHATML

from minivlmrl.data.fetch import fetch_image
from minivlmrl.data.template import ChatTemplate
from minivlmrl.data.video import load_video
from minivlmrl.hub.tokenizer import SPECIAL_TOKENS, load_tokenizer, train_tokenizer
from minivlmrl.scale.checkpoint import load_model, load_processor, random_model, save_model
from minivlmrl.tasks import shapes

import tiny

pytest.importorskip("hypothesis", reason="extra missing: pip install hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.slow
IMAGES = [
    "PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "TGA", "ICO", "SGI", "DDS", "DIB", "ICNS", "IM", "MPO", "PCX",
    "SPIDER", *["JPEG2000"] * PIL.features.check("jpg_2000"),
]  # fmt: skip
PIL.Image.init()
IMAGES += [kind for kind in ("AVIF", "QOI") if kind in PIL.Image.SAVE]  # Pillow 11 writes neither
VIDEOS = [
    ("matroska", "ffv1", "bgr0"), ("avi", "ffv1", "bgr0"), ("avi", "rawvideo", "bgr24"), ("mov", "png", "rgb24"),
    ("mp4", "libx264", "yuv420p"), ("mp4", "mpeg4", "yuv420p"), ("matroska", "libx264", "yuv420p"),
    ("webm", "libvpx", "yuv420p"), ("webm", "libvpx-vp9", "yuv420p"), ("mpegts", "mpeg2video", "yuv420p"),
    ("gif", "gif", "rgb8"),
]  # fmt: skip
NAMED = [{"name": "default", "template": CHATML}]
TEMPLATES = {
    "chat_template.json": json.dumps({"chat_template": CHATML}),
    "chat_template.jinja": CHATML,
    "tokenizer_config.json": json.dumps({"eos_token": {"content": "<|im_end|>"}, "chat_template": NAMED}),
}
CHECKPOINT = ["config.json", "preprocessor_config.json"]
CHECKPOINT += ["model.safetensors.index.json", "model-00002-of-00002.safetensors"]
MORE = int(os.environ.get("FUZZ", 1))  # times as many damaged files: FUZZ=20 pytest tests/test_fuzz.py
# a subject: (folder, name) -> where a damaged file is put, whole files, how it is read and what must hold of it then


def images(folder, name):
    def read():
        image = fetch_image(folder / name)
        assert image.mode == "RGB" and min(image.size) > 0

    return folder / name, [encoded(noise("RGB", (16, 16)), kind) for kind in IMAGES], read


def videos(folder, name):
    t, y, x, c = np.ogrid[:12, :16, :16, :3]
    frames, files = ((7 * y + 13 * x + 29 * c + 17 * t) % 256).astype(np.uint8), []
    for kind in VIDEOS:
        tiny.write_video(folder / "video", frames, 30, *kind)
        files.append((folder / "video").read_bytes())

    def read():
        video = load_video(folder / name)
        assert len(video.frames) % 2 == 0 and 0 < video.fps < float("inf")

    return folder / name, files, read


def tokenizers(folder, name):
    texts = ["Hello world", "  a  b\n\n", "naïve café 猫 🐈", "<|im_", "x = y[0] + 3.14"]
    path = folder / name
    train_tokenizer(texts * 2, vocab_size=300).backend.save(str(path))

    def read():
        """A file that is read loses no text, finds no control token in it, and is written as it was read."""
        loaded = load_tokenizer(path)
        for text in texts:
            ids = loaded.encode(text)
            assert loaded.decode(ids) in (text, unicodedata.normalize("NFC", text))
            assert not set(ids) & {loaded.backend.token_to_id(token) for token in SPECIAL_TOKENS}
        loaded.backend.save(str(path))
        assert load_tokenizer(path).encode(texts[0]) == loaded.encode(texts[0])

    return path, [path.read_bytes()], read


def templates(folder, name):
    image_and_text = [{"type": "image"}, {"text": " im_end "}]
    talk = [{"role": "user", "content": image_and_text}, {"role": "assistant", "content": "two"}]

    def read():
        template = ChatTemplate.from_folder(folder)
        if template is not None:
            assert all(isinstance(piece, str) for piece in template.render(talk))
            template.render_completion(talk[:1], talk[1:])

    return folder / name, [TEMPLATES[name].encode()], read


def checkpoints(folder, name):
    """A tiny model in two files, with everything that a folder has."""
    (folder / "tiny.json").write_text(json.dumps(tiny.RUN_MODEL | {"tie_word_embeddings": True}))
    model, processor = random_model(folder / "tiny.json", shapes.tokenizer(), seed=0)
    most = sum(p.nbytes for p in model.parameters()) // 2 + 50_000
    save_model(folder / "model", model, processor, max_shard_size=most)
    load_model(folder / "model"), load_processor(folder / "model")
    shutil.copytree(folder / "model", folder / "damaged")
    read = load_processor if name.startswith("pre") else load_model
    return folder / "damaged" / name, [(folder / "model" / name).read_bytes()], lambda: read(folder / "damaged")


SUBJECTS = {"image": images, "video": videos, "tokenizer.json": tokenizers}
SUBJECTS |= dict.fromkeys(TEMPLATES, templates) | dict.fromkeys(CHECKPOINT, checkpoints)


# the damage

LEAVES = [None, True, 0, -1, 300, 2**40, -(2**70), 1e308, "", "<|im_end|>", [], {}, ["a", "b"], "ByteLevel", "BPE"]
LEAVES += ["../../../../../etc/hostname", "(a+)+$", "x" * 300]
LEAVES += ["F8_E4M3", "I64", "BOOL", "F64", "F16", "F4", "C64"]  # dtypes of safetensors
WRONG = st.recursive(
    st.sampled_from(LEAVES) | st.integers(-2, 300) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


def json_part(content):
    """(begin, end) of the JSON in a file: a safetensors file's header, all of a file that begins with a brace."""
    if content[8:9] == b"{" and not content.startswith(b"{"):
        return 8, 8 + int.from_bytes(content[:8], "little")
    return 0, len(content)


def wrong_value(draw, content):
    """One or two values replaced or taken out."""
    begin, end = json_part(content)
    values = json.loads(content[begin:end])
    for _ in range(draw(st.integers(1, 2))):
        inside, keys = values, list(values)
        while keys:
            key = draw(st.sampled_from(keys))
            inner = inside[key]
            keys = list(inner) if isinstance(inner, dict) else [*range(len(inner))] if isinstance(inner, list) else []
            if keys and draw(st.integers(0, 3)):
                inside = inner
            else:
                break
        if not values:
            break
        if isinstance(inside, dict) and draw(st.booleans()):
            del inside[key]
        else:
            others = list(inside.values()) if isinstance(inside, dict) else inside  # perhaps a neighbour's value
            inside[key] = draw(WRONG | st.sampled_from(others))
    text = json.dumps(values).encode()
    return (len(text).to_bytes(8, "little") if begin else b"") + text + content[end:]


def flipped(draw, content):
    """Some bytes changed, and those of the header more often."""
    content, (_, end) = bytearray(content), json_part(content)
    where = st.integers(0, end - 1) | st.integers(0, min(300, end - 1))
    for index, value in draw(st.lists(st.tuples(where, st.integers(0, 255)), min_size=1, max_size=6)):
        content[index] = value
    return bytes(content)


def cut(draw, content):
    return content[: draw(st.integers(0, len(content) - 1))]


def grown(draw, content):
    """With a piece of itself in another place."""
    first, begin, end = (draw(st.integers(0, len(content))) for _ in range(3))
    return content[:first] + content[begin:end] + content[first:]


def random(draw, content):
    """Random from some byte of the beginning on."""
    return content[: draw(st.integers(0, min(100, len(content))))] + draw(st.binary(max_size=300))


@pytest.mark.filterwarnings("ignore:::PIL")
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_damaged_file_is_read_or_named(name, tmp_path):
    path, wholes, read = SUBJECTS[name](tmp_path, name)
    of_json = name.endswith((".json", ".safetensors"))
    damages = [flipped, cut, grown, random] + [wrong_value] * 4 * of_json
    examples = {"image": 200} | dict.fromkeys(CHECKPOINT, 40)

    @settings(max_examples=MORE * examples.get(name, 60), deadline=None, database=None)
    @given(data=st.data())
    def fuzz(data):
        damage, whole = data.draw(st.sampled_from(damages)), data.draw(st.sampled_from(wholes))
        path.write_bytes(damage(data.draw, whole))
        try:
            read()
        except ValueError as error:
            assert str(path.parent) in str(error) and len(str(error)) < 3000, error

    for whole in wholes:
        path.write_bytes(whole)
        read()
    fuzz()
