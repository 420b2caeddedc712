"""Test how model folders are found by path or repository id, with and without a network."""

import socket
import sys
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from minivlmrl.data.download import SETTINGS, find_folder

REPOSITORY = "Qwen/tiny"
COMMIT = "a" * 40
OLDER = "b" * 40
FILES = {
    "config.json": b"{}", "tokenizer.json": b"{}", "preprocessor_config.json": b"{}", "chat_template.json": b"{}",
    "model.safetensors.index.json": b'{"weight_map": {"a": "model-00001-of-00001.safetensors"}}',
    "model-00001-of-00001.safetensors": b"weights", "pytorch_model.bin": b"pickles", "README.md": b"card",
    "original/model.safetensors": b"the same weights",
}  # fmt: skip
WANTED = set(FILES) - {"pytorch_model.bin", "README.md", "original/model.safetensors"}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    return tmp_path / "cache"


def snapshot(cache: Path, commit: str = COMMIT, names=WANTED) -> Path:
    repository = cache / "models--Qwen--tiny"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_bytes(FILES[name])
    return folder


def test_a_mistyped_path_does_not_go_to_the_hub(cache, monkeypatch):
    """A name whose first part is an existing folder is a path, not a repository."""
    monkeypatch.setattr("minivlmrl.data.download._snapshot", lambda *name: name[:2])
    Path("runs").mkdir()
    missing = r"runs/chekpoint: this folder does not exist in .* is a repository, write runs/chekpoint@main"
    with pytest.raises(ValueError, match=missing):
        find_folder("runs/chekpoint")
    assert find_folder("runs/chekpoint@main") == ("runs/chekpoint", "main")
    # NAME@main would not help, because a repository id begins with its owner
    with pytest.raises(ValueError, match=r"with its owner, such as Qwen/Qwen2\.5-VL-3B-Instruct\.$"):
        find_folder("Qwen2.5-VL-3B-Instruct")


def test_a_cached_repository_needs_no_network(cache):
    older = snapshot(cache, OLDER)
    newer = snapshot(cache, COMMIT)
    assert find_folder(REPOSITORY) == newer
    assert find_folder(f"{REPOSITORY}@main") == newer
    assert find_folder(f"{REPOSITORY}@{OLDER}") == older
    (cache.parent / REPOSITORY).mkdir(parents=True)  # a local folder with this name has precedence
    assert find_folder(REPOSITORY) == Path(REPOSITORY)


def test_a_cached_config_is_enough_for_the_settings(cache):
    folder = snapshot(cache, names=["config.json"])
    assert find_folder(REPOSITORY, SETTINGS) == folder


@pytest.mark.parametrize(("offline", "cached"), [
    (False, ()), (True, ()), (True, WANTED - {"model-00001-of-00001.safetensors"}),
])  # fmt: skip
def test_an_incomplete_cache_without_network_is_refused(cache, monkeypatch, offline, cached):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    if cached:
        snapshot(cache, names=cached)
    with pytest.raises(ValueError, match=r"Qwen/tiny: there is no such folder, .* and the download failed") as e:
        find_folder(REPOSITORY)
    assert "\n" not in str(e.value)


def test_a_hub_that_does_not_answer_times_out(cache, monkeypatch):
    """A hub behind a firewall may not answer, and huggingface_hub would wait for minutes."""
    monkeypatch.setattr("minivlmrl.data.download.NETWORK_SECONDS", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ValueError, match="the download failed"):
            find_folder(REPOSITORY)


def test_a_repository_without_huggingface_hub_says_what_to_install(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"^Qwen/tiny@main: .* huggingface_hub; run pip install -e '\.\[hub\]'"):
        find_folder(f"{REPOSITORY}@main")


def test_only_needed_files_are_downloaded(cache, monkeypatch):
    requested = []

    def download(repo_id, local_files_only=False, **which):
        if local_files_only:
            raise LocalEntryNotFoundError("nothing of it")
        requested.append({"revision": which.pop("revision")})
        return snapshot(cache, names=filter_repo_objects(FILES, **which))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    model_info = lambda _, name, **options: requested.append({name: options})  # noqa: E731
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    assert {file.name for file in find_folder(REPOSITORY).iterdir()} == WANTED
    assert requested == [{REPOSITORY: {"revision": None, "timeout": 5}}, {"revision": None}]
