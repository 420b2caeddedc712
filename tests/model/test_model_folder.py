"""Test the errors for folders and files that are no model: each error names the folder's kind and a solution."""

import json

import pytest

from minivlmrl.data.download import find_folder
from minivlmrl.files import check_model_folder, weight_files
from minivlmrl.json_files import parse_json, read_json
from minivlmrl.model import config_json
from minivlmrl.model.checkpoint import load_model, load_processor, read_tensors

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize(("files", "says"), [
    ({"checkpoint/config.json": "{}", "config.yaml": ""}, r"folder of a run, .* Use its checkpoint, .*/checkpoint"),
    ({"config.yaml": ""}, "is the folder of a run that has not saved a model yet. Continue the run with --resume=auto"),
    ({"states/000001/config.json": "{}"}, "is the folder of a run that has not saved a model yet"),
    ({"adapter_config.json": "{}"}, "is an adapter, not a model. Set model.path to the base model, and adapter.path"),
    ({"model.gguf": ""}, "has a GGUF file of llama.cpp, which cannot be trained. Download the folder of the original"),
    ({"model/config.json": "{}"}, r"has no config.json, but a folder in it has one. Use that folder, .*/model\."),
    ({"config.json": POINTER}, r"config\.json is a pointer of Git LFS, not the file itself. Run `git lfs pull`"),
    ({}, r"config\.json: this file is missing"),
], ids=lambda value: "-".join(value) if isinstance(value, dict) else "")  # fmt: skip
def test_a_folder_that_is_no_model_is_described(tmp_path, files, says):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    for load in (load_model, load_processor):
        with pytest.raises(ValueError, match=says):
            load(tmp_path)


def test_a_model_folder_passes(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    check_model_folder(tmp_path)


@pytest.mark.parametrize(("name", "says"), [
    ("pytorch_model-00001-of-00002.bin", r"only has weights in PyTorch's pickle format, such as pytorch_model.bin"),
    ("model.gguf", "only has a GGUF file of llama.cpp, which cannot be trained"),
    ("adapter_model.safetensors", "The folder is an adapter, not a model; set model.path"),
    ("model-00001-of-00002.safetensors", r"has model-00001-of-00002.safetensors, but no model.safetensors.index.json"),
    ("notes.txt", "does not exist. Download the folder again"),
])  # fmt: skip
def test_other_files_of_weights_are_described(tmp_path, name, says):
    (tmp_path / name).write_text("")
    with pytest.raises(ValueError, match=says):
        weight_files(tmp_path)


def test_pointers_of_git_lfs_are_named(tmp_path):
    for name, read in (("model.safetensors", lambda file: list(read_tensors(file))), ("tokenizer.json", read_json)):
        (tmp_path / name).write_text(POINTER)
        with pytest.raises(ValueError, match=f"{name} is a pointer of Git LFS, not the file itself"):
            read(tmp_path / name)


@pytest.mark.parametrize(("config", "says"), [
    ({"model_type": "qwen2"}, "This is a text model; choose a vision-language model"),
    ({"model_type": "llava", "vision_config": {"a": 1}}, "model_type is 'llava', but it must be .*supported$"),
])  # fmt: skip
def test_other_kinds_of_models_are_described(config, says):
    with pytest.raises(ValueError, match=says):
        config_json.from_dict(config)


def test_a_file_is_no_model(tmp_path):
    for name, says in (
        ("a.gguf", "a GGUF file of llama.cpp cannot be"),
        ("a.safetensors", "Use the folder that contains"),
    ):
        (tmp_path / name).write_text("")
        with pytest.raises(ValueError, match=rf"(?i){name} is a file, but a model is a folder .*{says}"):
            find_folder(tmp_path / name)


@pytest.mark.parametrize(("text", "says"), [
    ('{"a": 1,}', "remove the comma before }"), ('{"a": [1, 2, ]}', "remove the comma before ]"),
    ('{"a": 1},', "remove the comma at the end"), ('{"a": 1}, ', "remove the comma at the end"),
    ('{"a": 1}, {"b": 2}', None), ('{"a" 1}', None), ("{,}", "remove the comma before }"),
])  # fmt: skip
def test_a_comma_too_many_is_named(text, says):
    with pytest.raises(ValueError, match=r"^the text is not valid JSON") as error:
        parse_json(text)
    if says is None:
        assert "comma at" not in str(error.value) and "remove" not in str(error.value)
    else:
        assert str(error.value).endswith(f"; {says}"), error.value
    assert parse_json(json.dumps({"a": 1})) == {"a": 1}
