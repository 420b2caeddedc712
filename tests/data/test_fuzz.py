"""Test damaged files: each can be read, or raises a ValueError that names the file."""

import json
import os
import shutil
import unicodedata

import numpy as np
import pytest

from minivlmrl.data.media import fetch_image
from minivlmrl.data.tokenizer import STRUCTURE, load_tokenizer, train_tokenizer
from minivlmrl.data.video import load_video
from minivlmrl.model.build import random_model
from minivlmrl.model.checkpoint import load_model, load_processor, save_model
from minivlmrl.tasks import shapes
from tests.helpers import tiny
from tests.record.record_vision import encoded, noise

pytest.importorskip("hypothesis", reason="extra missing: pip install hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.slow
IMAGES = ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "TGA", "ICO", "MPO"]
VIDEOS = [("matroska", "ffv1", "bgr0"), ("avi", "rawvideo", "bgr24"), ("mp4", "libx264", "yuv420p")]
CHECKPOINT = [
    "config.json", "model.safetensors.index.json", "model-00002-of-00002.safetensors", "tokenizer_config.json",
    "added_tokens.json", "generation_config.json", "preprocessor_config.json",
]  # fmt: skip
LISTED = {"content": "<|im_end|>", "lstrip": False, "special": True}
# multiplies the count of damaged files, for example: FUZZ=20 pytest tests/data/test_fuzz.py
MORE = int(os.environ.get("FUZZ", 1))
# A subject maps (folder, name) to the damaged file's path, the intact files' contents, and a function that reads the
# file and checks the result.


def images(folder, name):
    def read():
        image = fetch_image(folder / name)
        assert image.mode == "RGB" and min(image.size) > 0

    return folder / name, [encoded(noise("RGB", (16, 16)), kind) for kind in IMAGES], read


def videos(folder, name):
    t, y, x, c = np.ogrid[:12, :16, :16, :3]
    frames = ((7 * y + 13 * x + 29 * c + 17 * t) % 256).astype(np.uint8)
    files = []
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
    train_tokenizer(texts * 2, vocab_size=300).save(path)

    def read():
        """Check that a loaded tokenizer restores texts and produces no control tokens for them."""
        loaded = load_tokenizer(path)
        for text in texts:
            ids = loaded.encode(text)
            assert loaded.decode(ids) in (text, unicodedata.normalize("NFC", text))
            assert not set(ids) & {loaded.backend.token_to_id(token) for token in STRUCTURE}

    return path, [path.read_bytes()], read


def checkpoints(folder, name):
    """Save a tiny model's complete folder, with weights in two files."""
    (folder / "tiny.json").write_text(json.dumps(tiny.RUN_MODEL | {"tie_word_embeddings": True}))
    model, processor = random_model(folder / "tiny.json", shapes.tokenizer(), seed=0)
    most = sum(p.nbytes for p in model.parameters()) // 2 + 50_000
    save_model(folder / "model", model, processor, max_shard_size=most)
    shutil.copytree(folder / "model", folder / "damaged")
    number = processor.tokenizer.special_tokens[LISTED["content"]]
    ours = {
        "added_tokens.json": {LISTED["content"]: number},
        "tokenizer_config.json": {"added_tokens_decoder": {f"{number}": LISTED}, "eos_token": "<|im_end|>"},
    }
    whole = json.dumps(ours[name]).encode() if name in ours else (folder / "model" / name).read_bytes()

    def read():
        load_model(folder / "damaged")
        load_processor(folder / "damaged")

    return folder / "damaged" / name, [whole], read


SUBJECTS = {"image": images, "video": videos, "tokenizer.json": tokenizers}
SUBJECTS |= dict.fromkeys(CHECKPOINT, checkpoints)


WRONG = [None, True, 0, -1, 300, 2**40, -(2**70), 1e308, "", "<|im_end|>", [], {}, ["a", "b"], "x" * 300]


def wrong_value(draw, content):
    """Replace or remove one value in a JSON file, at any depth."""
    inside = values = json.loads(content)
    while True:
        key = draw(st.sampled_from([*inside] if isinstance(inside, dict) else range(len(inside))))
        if not isinstance(inside[key], dict | list) or not inside[key] or draw(st.integers(0, 3)) == 0:
            break
        inside = inside[key]
    if draw(st.booleans()):
        del inside[key]
    else:
        inside[key] = draw(st.sampled_from(WRONG))
    return json.dumps(values).encode()


def flipped(draw, content):
    """Change some bytes, with a preference for the header."""
    content, end = bytearray(content), len(content) - 1
    where = st.integers(0, end) | st.integers(0, min(300, end))
    for index, value in draw(st.lists(st.tuples(where, st.integers(0, 255)), min_size=1, max_size=6)):
        content[index] = value
    return bytes(content)


def cut(draw, content):
    return content[: draw(st.integers(0, len(content) - 1))]


def random(draw, content):
    """Replace the content by random bytes, from an early position on."""
    return content[: draw(st.integers(0, min(100, len(content))))] + draw(st.binary(max_size=300))


@pytest.mark.filterwarnings("ignore:::PIL")
@pytest.mark.parametrize("name", SUBJECTS)
def test_damaged_files_are_read_or_reported(name, tmp_path):
    path, wholes, read = SUBJECTS[name](tmp_path, name)
    damages = [flipped, cut, random] + [wrong_value] * 3 * name.endswith(".json")
    examples = {"image": 200} | dict.fromkeys(CHECKPOINT, 40)

    @settings(max_examples=MORE * examples.get(name, 60), deadline=None, database=None)
    @given(data=st.data())
    def fuzz(data):
        damage = data.draw(st.sampled_from(damages))
        whole = data.draw(st.sampled_from(wholes))
        path.write_bytes(damage(data.draw, whole))
        try:
            read()
        except ValueError as error:
            assert str(path.parent) in str(error) and len(str(error)) < 3000, error

    for whole in wholes:
        path.write_bytes(whole)
        read()
    fuzz()
