"""Test the errors for folders that are no model: each error names the kind of the folder and a solution."""

import re

import pytest

from minivlmrl.data.download import find_folder
from minivlmrl.files import weight_files
from minivlmrl.json_files import read_json
from minivlmrl.model.checkpoint import load_model, load_processor, read_tensors

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


KINDS = {
    "checkpoint/config.json": "It is the folder of a run; use the folder checkpoint inside it",
    "checkpoint-100/config.json": "It contains a model folder; use FOLDER/checkpoint-100",
    "adapter_config.json": "It is an adapter; set model.path to the base model and adapter.path to this folder",
    "adapter_model.safetensors": "It is an adapter; set model.path to the base model and adapter.path to this folder",
    "model-00001-of-00002.safetensors": "Download the folder again",
    "model.gguf": "Download the folder again. It needs config.json and .safetensors files; .gguf and .bin files cannot",
}


@pytest.mark.parametrize("name", KINDS)
def test_a_folder_that_is_no_model_is_described(tmp_path, name):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("{}")
    kind = KINDS[name].replace("FOLDER", str(tmp_path))
    for load, expected in (
        (load_model, f"has no config.json. {kind}"),
        (load_processor, f"has no config.json. {kind}"),
        (weight_files, f"model.safetensors does not exist. {kind}"),
    ):
        with pytest.raises(ValueError, match=re.escape(expected)):
            load(tmp_path)


def test_pointers_of_git_lfs_are_named(tmp_path):
    for name, read in (("model.safetensors", lambda file: list(read_tensors(file))), ("tokenizer.json", read_json)):
        (tmp_path / name).write_text(POINTER)
        with pytest.raises(ValueError, match=f"{name} is a Git LFS pointer, not the file itself"):
            read(tmp_path / name)


def test_a_file_is_no_model(tmp_path):
    for name in ("a.gguf", "a.safetensors"):
        (tmp_path / name).write_text("")
        with pytest.raises(ValueError, match=f"{name} is a file, but a model is a folder .* a GGUF file .* cannot be"):
            find_folder(tmp_path / name)
