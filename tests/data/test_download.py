"""Test data sets that are loaded by repository id, from a hub on 127.0.0.1."""

import hashlib
import json
from urllib.parse import unquote

import pytest

from minivlmrl.data.download import find_split, split_of
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.row_files import open_rows
from tests.helpers.runs import metrics
from tests.helpers.serving import Quiet, serve

pa = pytest.importorskip("pyarrow", reason="extra parquet is missing: pip install pyarrow")
import pyarrow.parquet as pq  # noqa: E402

CONVERTED = "refs/convert/parquet"
REQUESTS = []  # paths
REPOSITORIES = {  # id: branch: its files
    "cats/own": {"main": ["README.md", "data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet",
                          "data/test-00000-of-00001-ab12.parquet"], CONVERTED: ["default/train/0000.parquet"]},
    "cats/made": {"main": ["train.jsonl"],
                  CONVERTED: ["default/train/0000.parquet", "default/partial-test/0000.parquet"]},
    "cats/two": {"main": ["en/train-00000-of-00001.parquet", "de/train-00000-of-00001.parquet"]},
    "cats/none": {"main": ["rows.jsonl"]},
}  # fmt: skip


def content(file: str) -> bytes:
    """Return a table with one row that names its file."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist([{"problem": file, "solution": "1"}]), sink)
    return sink.getvalue().to_pybytes()


CONTENTS = {file: content(file) for branches in REPOSITORIES.values() for files in branches.values() for file in files}


class Hub(Quiet):
    def do_GET(self):
        path = unquote(self.path.partition("?")[0]).removeprefix("/api").removeprefix("/datasets/")
        REQUESTS.append(path)
        repository = "/".join(path.split("/")[:2])
        what, _, rest = path.removeprefix(f"{repository}/").partition("/")
        branches = REPOSITORIES.get(repository, {})
        branch = CONVERTED if CONVERTED in path or "b" * 40 in path else "main"
        sha = ("b" if branch == CONVERTED else "a") * 40
        if branch not in branches:
            error = "RevisionNotFound" if branches else "RepoNotFound"
            return self.reply(404, b"", {"X-Error-Code": error, "X-Error-Message": f"no {repository}"})
        if what == "resolve":
            body = CONTENTS[rest.removeprefix("main/").removeprefix(f"{CONVERTED}/").removeprefix(f"{sha}/")]
            etag = hashlib.sha256(body).hexdigest()
            return self.reply(200, body, {"X-Repo-Commit": sha, "ETag": f'"{etag}"'})
        files = branches[branch]
        tree = [{"type": "file", "path": f, "size": len(CONTENTS[f]), "oid": f"{i:040d}"} for i, f in enumerate(files)]
        info = {"id": repository, "sha": sha, "siblings": [{"rfilename": file} for file in files]}
        self.reply(200, json.dumps(tree if what == "tree" else info).encode(), {"Content-Type": "application/json"})

    do_HEAD = do_GET

    def reply(self, status, body, headers):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": len(body)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Run a local hub with an empty cache, until it is closed."""
    constants = "huggingface_hub.constants."
    monkeypatch.setattr(f"{constants}HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    with serve(Hub) as (server, url):
        monkeypatch.setattr(f"{constants}ENDPOINT", url)
        monkeypatch.setattr(f"{constants}HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        yield server


@pytest.mark.parametrize(("name", "files"), [
    ("cats/own", REPOSITORIES["cats/own"]["main"][1:3]),
    ("cats/own@test", REPOSITORIES["cats/own"]["main"][3:]),
    ("cats/made", ["default/train/0000.parquet"]),
    ("cats/made@partial-test", ["default/partial-test/0000.parquet"]),
    ("cats/two@en/train", ["en/train-00000-of-00001.parquet"]),
])  # fmt: skip
def test_a_split_uses_its_own_files_or_those_converted_by_the_hub(hub, name, files):
    assert [row["problem"] for row in open_rows(name)] == files
    hub.shutdown()
    hub.server_close()
    # read from the cache, without a network
    assert [row["problem"] for row in open_rows(name)] == files


@pytest.mark.parametrize(("name", "says"), [
    ("cats/own@tset", "the split tset does not exist or is ambiguous; .* the splits cats/own@test, cats/own@train"),
    ("cats/made@test", "the split test does not exist .*the splits cats/made@partial-test, cats/made@train"),
    ("cats/two", "the split train does not exist or is ambiguous; .* the splits cats/two@de/train, cats/two@en/train"),
    ("cats/none", "the split train does not exist or is ambiguous; .* splits .none, because it has no parquet files"),
    ("dogs/own", "404"),
])  # fmt: skip
def test_missing_splits_are_reported(hub, name, says):
    with pytest.raises(
        ValueError, match=rf"^{name}: no such file or data set of the hub was found, .*{says}.*folder\.$"
    ):
        open_rows(name)


@pytest.mark.parametrize("name", ["../../train-00000-of-00001.parquet", "/tmp/train.parquet"])
def test_a_file_outside_of_the_folder_is_refused(hub, monkeypatch, name):
    monkeypatch.setitem(REPOSITORIES, "cats/none", {"main": [name]})
    monkeypatch.setitem(CONTENTS, name, b"")
    with pytest.raises(ValueError, match=f"has a file '{name}', which would be written outside of the cache"):
        open_rows("cats/none")


@pytest.mark.parametrize("image", ["/etc/hostname", "../../../a.png", "a/../../a.png"])
def test_downloaded_rows_cannot_name_local_files(hub, monkeypatch, image):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist([{"problem": "?", "image": image}]), sink)
    [file] = REPOSITORIES["cats/own"]["main"][3:]
    monkeypatch.setitem(CONTENTS, file, sink.getvalue().to_pybytes())
    with pytest.raises(
        ValueError, match=f"the file '{image}' is outside of .*, but rows of a data set from the hub may only use"
    ):
        FileDataset("cats/own@test")


def test_paths_are_not_requested_from_the_hub(hub, tmp_path):
    """A mistyped path must not be sent to the hub, together with the user's token."""
    (tmp_path / "runs").mkdir()
    REQUESTS.clear()
    for name in ("rows/train.jsonl", "runs/train", "train", "/a/b", "a/b/c"):
        assert find_split(name) is None
    assert not REQUESTS
    with pytest.raises(ValueError, match="404"):
        find_split("runs/train@main")


def test_the_split_of_a_file():
    named = {"train.parquet": "train", "en/data/val-00000-of-00003-a1.parquet": "en/val", "0000.parquet": "0000"}
    assert {file: split_of(file) for file in named} == named


def test_a_run_trains_on_a_split_and_is_resumed_without_a_network(hub, run, plain):
    options = ["--stages=[grpo]", "--data.task=null", "--data.train_file=cats/own", "--rewards={format: 1}"]
    options += ["--checkpoint_steps=1", "--data.eval_rows=256"]
    run(*options, "--grpo.max_steps=1")
    hub.shutdown()
    hub.server_close()
    assert len(metrics(run(*options, "--grpo.max_steps=2", "--resume=auto"))) == 2
