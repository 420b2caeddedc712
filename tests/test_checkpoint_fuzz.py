"""A broken folder: whatever is cut, flipped, random or of a wrong type is a ValueError that names a file, or loads."""

import copy
import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivlmrl.hub.checkpoint import load_model, load_processor, save_model
from minivlmrl.image import ImageProcessor
from minivlmrl.rows import Processor
from minivlmrl.tasks import shapes

import tiny

FOLDER = TemporaryDirectory(prefix="checkpoint")
SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
JSON_FILES = ["config.json", "preprocessor_config.json", "generation_config.json", "model.safetensors.index.json"]
WRONG = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.integers(-2, 300) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@cache
def folder() -> Path:
    """Two shards of a tiny model, with what belongs to them."""
    path = Path(FOLDER.name) / "checkpoint"
    processor = Processor(shapes.tokenizer(), ImageProcessor())
    model = tiny.model(tied=True)
    size = sum(p.nbytes for p in model.parameters())
    save_model(path, model, processor, max_shard_size=size // 2 + 50_000)
    assert all((path / name).is_file() for name in (*JSON_FILES, *SHARDS))
    return path


def check(file: str, content: bytes):
    """Put `content` into a file of the folder and load what is made of it."""
    path = folder() / file
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        (load_processor if file.startswith(("pre", "gen")) else load_model)(folder())
    except ValueError as error:
        assert ".json" in str(error) or ".safetensors" in str(error), error
    finally:
        path.write_bytes(before)


def places(value, here=()):
    """Every key of every object and every item of every list, as paths."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*here, key)
        yield from places(inner, (*here, key))


@pytest.mark.parametrize("file", JSON_FILES)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_json_file_with_a_wrong_value(file, data):
    content = json.loads((folder() / file).read_text())
    for _ in range(data.draw(st.integers(1, 2))):
        *inside, key = data.draw(st.sampled_from(list(places(content))))
        holder = content
        for step in inside:
            holder = holder[step]
        if data.draw(st.booleans()) and isinstance(holder, dict):
            del holder[key]
        else:
            holder[key] = data.draw(WRONG)
        if not content:
            break
    check(file, json.dumps(content).encode())


@pytest.mark.parametrize("file", [*JSON_FILES, SHARDS[1]])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_file_that_is_cut_flipped_or_random(file, data):
    content = bytearray((folder() / file).read_bytes())
    header = len(content) if file.endswith(".json") else 8 + int.from_bytes(content[:8], "little")
    kind = data.draw(st.sampled_from(["cut", "flipped", "random"]))
    if kind == "cut":
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    elif kind == "flipped":
        for place in data.draw(st.lists(st.integers(0, header - 1), min_size=1, max_size=4)):
            content[place] ^= data.draw(st.integers(1, 255))
    else:
        content = data.draw(st.binary(max_size=200))
    check(file, bytes(content))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_safetensors_header_with_a_wrong_value(data):
    whole = (folder() / SHARDS[1]).read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    original = copy.deepcopy(header)
    *inside, key = data.draw(st.sampled_from(list(places(header))))
    holder = header
    for step in inside:
        holder = holder[step]
    other = st.sampled_from(["F8_E4M3", "I64", "BOOL", "F64", "F16", "F4", "F8_E8M0", "C64"])
    near = st.sampled_from([value for tensor in original.values() for value in tensor.values()])
    holder[key] = data.draw(st.one_of(WRONG, other, near))
    text = json.dumps(header).encode()
    check(SHARDS[1], len(text).to_bytes(8, "little") + text + whole[8 + length :])


def test_the_folder_is_whole():
    """What the tests above begin with."""
    load_model(folder()), load_processor(folder())
    shutil.copytree(folder(), folder().parent / "another", dirs_exist_ok=True)
    load_model(folder().parent / "another")
