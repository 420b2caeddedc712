"""From what a recipe calls a model to a folder: paths, repositories in the cache and on a hub, and no network."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from minivlmrl.hub.folder import find_folder, read_carried, read_json

REPOSITORY, COMMIT, OLDER = "Qwen/tiny", "a" * 40, "b" * 40
FILES = {
    "config.json": b"{}", "tokenizer.json": b"{}", "preprocessor_config.json": b"{}", "chat_template.json": b"{}",
    "model.safetensors.index.json": b'{"weight_map": {"a": "model-00001-of-00001.safetensors"}}',
    "model-00001-of-00001.safetensors": b"weights", "pytorch_model.bin": b"pickles", "README.md": b"card",
    "original/model.safetensors": b"the same weights",
}  # fmt: skip
WANTED = set(FILES) - {"pytorch_model.bin", "README.md", "original/model.safetensors"}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of huggingface_hub, and a hub that nobody answers for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    return tmp_path / "cache"


def snapshot(cache: Path, commit: str = COMMIT, names=WANTED) -> Path:
    """What huggingface_hub leaves when it has downloaded some files of the main branch."""
    repository = cache / "models--Qwen--tiny"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_bytes(FILES[name])
    return folder


def test_a_folder_wins_over_a_repository_of_its_name(cache):
    snapshot(cache)
    (cache.parent / REPOSITORY).mkdir(parents=True)
    assert find_folder(REPOSITORY) == Path(REPOSITORY)


def test_a_cached_repository_needs_no_network(cache):
    older, newer = snapshot(cache, OLDER), snapshot(cache, COMMIT)
    assert find_folder(REPOSITORY) == newer
    assert find_folder(f"{REPOSITORY}@main") == newer
    assert find_folder(f"{REPOSITORY}@{OLDER}") == older


@pytest.mark.parametrize("offline", [False, True], ids=["nobody answers", "HF_HUB_OFFLINE"])
@pytest.mark.parametrize("cached", [(), WANTED - {"model-00001-of-00001.safetensors"}, WANTED - {"tokenizer.json"}])
def test_without_network_what_is_not_whole_in_the_cache_is_refused_in_one_sentence(cache, monkeypatch, offline, cached):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    if cached:
        snapshot(cache, names=cached)
    with pytest.raises(ValueError, match=r"Qwen/tiny: there is no such folder, .* and none could be downloaded") as e:
        find_folder(REPOSITORY)
    assert "\n" not in str(e.value)


def test_of_a_long_explanation_the_first_line_is_told(cache, monkeypatch):
    def refuse(**_):
        raise OSError(
            "401 Client Error.\n\nRepository Not Found for url: ...\nIf you are trying to access a private repo"
        )

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ValueError, match=r"could be downloaded \(401 Client Error\.\)") as e:
        find_folder(REPOSITORY)
    assert "\n" not in str(e.value)


def test_a_hub_that_does_not_answer_is_not_waited_for(cache, monkeypatch):
    """Such as one beyond a firewall; without a limit of its own huggingface_hub waits for minutes."""
    monkeypatch.setattr("minivlmrl.hub.folder.NETWORK_SECONDS", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ValueError, match="none could be downloaded"):
            find_folder(REPOSITORY)


@pytest.mark.parametrize("name", ["runs", "./runs/one", "/runs/one", "a/b/c", "../runs", "a b/c", "~/model", ""])
def test_what_is_neither_a_folder_nor_the_name_of_a_repository_never_asks_the_hub(cache, monkeypatch, name):
    monkeypatch.setattr("minivlmrl.hub.folder._snapshot", lambda *_: pytest.fail("asked"))
    with pytest.raises(ValueError, match="no such folder"):
        find_folder(name or "no/such/")


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a download needs."""

    protocol_version = "HTTP/1.1"
    sent: Counter

    def do_HEAD(self):
        path = self.path.partition("?")[0].strip("/")
        if path.startswith("api/models/") and "/tree/" in path:
            body = [{"type": "file", "path": n, "size": len(c), "oid": n} for n, c in FILES.items()]
            self.answer(json.dumps(body).encode())
        elif path.startswith("api/models/"):
            self.answer(json.dumps({"_id": "1", "id": REPOSITORY, "sha": COMMIT, "siblings": []}).encode())
        else:
            self.answer(FILES[path.rpartition("/")[2]], path.rpartition("/")[2])

    do_GET = do_HEAD

    def answer(self, body: bytes, name: str = ""):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{name}"')
        self.end_headers()
        if self.command == "GET":
            self.sent[name] += 1
            time.sleep(0.1 if name else 0)  # so that all ranks come to each file before it is there
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextmanager
def a_hub():
    handler = type("Handler", (Hub,), {"sent": Counter()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", handler.sent
        server.shutdown()


def test_ranks_download_a_repository_once_and_only_what_is_read(tmp_path):
    """Processes of their own, as under torchrun: huggingface_hub's file locks make the others wait."""
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", f"from minivlmrl.hub.folder import *; print(find_folder({REPOSITORY!r}))"]

    def start(endpoint):
        return subprocess.Popen(
            command, env=environment | {"HF_ENDPOINT": endpoint}, cwd=Path(__file__).parents[1], text=True,
            stdout=subprocess.PIPE,
        )  # fmt: skip

    with a_hub() as (endpoint, sent):
        found = {Path(rank.communicate()[0].strip()) for rank in [start(endpoint) for _ in range(3)]}
    (folder,) = found
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {name: FILES[name] for name in WANTED}
    assert {name: count for name, count in sent.items() if name} == dict.fromkeys(WANTED, 1)
    assert start("http://127.0.0.1:9").communicate()[0].strip() == str(folder)  # from now on without network


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'"text"', b"\xff\xfe{}", b"[" * 100_000, b"1" * 10_000])
def test_a_file_that_is_not_a_json_object_is_named(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json: (not JSON|it must hold a JSON object)"):
        read_json(tmp_path / "config.json")


def test_what_is_carried(tmp_path):
    carried = {"chat_template.jinja", "chat_template.json", "merges.txt", "vocab.json", "tokenizer.json", "LICENSE",
               "generation_config.json", "added_tokens.json", "special_tokens_map.json", "tokenizer_config.json",
               "video_preprocessor_config.json", "NOTICE.md"}  # fmt: skip
    for name in (*carried, "README.md", "config.json", "model.safetensors", "preprocessor_config.json", "optimizer.pt"):
        (tmp_path / name).write_text(name)
    assert read_carried(tmp_path) == {name: name.encode() for name in carried}
