"""A checkpoint is replaced: killed at any step or out of disk, the old or the new one is there, whole."""

import os
import sys
import warnings
from pathlib import Path

import pytest

from minivlmrl.hub.atomic_folder import replacing
from minivlmrl.hub.checkpoint import save_model
from minivlmrl.hub.folder import find_folder
from minivlmrl.image import ImageProcessor
from minivlmrl.rows import Processor
from minivlmrl.tasks import shapes

import tiny

FILES = ["config.json", "model.safetensors", "tokenizer.json"]


def save(folder: Path, text: str):
    with replacing(folder) as new:
        for name in FILES:
            (new / name).write_text(text)


def saved(folder: Path) -> str:
    """What is found to have been saved."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a save was killed; see below
        found = find_folder(folder)
    assert sorted(file.name for file in found.iterdir()) == FILES
    (text,) = {(found / name).read_text() for name in FILES}  # not a mixture of two
    return text


def killed_at(step: int, work) -> bool:
    """Do `work` in a process that ends at its `step`-th change of the file system, without a chance to clean up."""
    pid = os.fork()
    if pid == 0:
        left = [step]

        def count(event, arguments):
            changes = event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir")
            changes |= event == "open" and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
            left[0] -= changes
            if left[0] < 0:
                os._exit(1)

        sys.addaudithook(count)
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


@pytest.mark.parametrize("before", ["checkpoint", "checkpoint.replaced"], ids=["whole", "after a kill between renames"])
def test_a_save_killed_at_any_step_leaves_the_old_or_the_new_checkpoint(tmp_path, before):
    seen = []
    for step in range(1000):
        folder = tmp_path / str(step) / "checkpoint"
        folder.parent.mkdir()
        save(folder, "old")
        folder.rename(folder.with_name(before))
        killed = killed_at(step, lambda at=folder: save(at, "new"))
        seen.append(saved(folder))
        save(folder, "newest")  # the next save is not hindered, and cleans up
        assert saved(folder) == "newest"
        assert [path.name for path in folder.parent.iterdir()] == ["checkpoint"]
        if not killed:
            break
    assert not killed and len(seen) > 8
    assert seen == sorted(seen, key=["old", "new"].index) and set(seen) == {"old", "new"}


def test_what_a_save_killed_between_its_renames_left_is_found_and_said(tmp_path):
    save(tmp_path / "checkpoint.replaced", "old")
    with pytest.warns(UserWarning, match="checkpoint: the last save was killed .* reading .*checkpoint.replaced"):
        assert find_folder(tmp_path / "checkpoint") == tmp_path / "checkpoint.replaced"


def test_a_full_disk_leaves_the_checkpoint_before_it_and_is_said(tmp_path):
    resource = pytest.importorskip("resource", reason="limits of a process exist on Unix alone")
    folder, processor = tmp_path / "checkpoint", Processor(shapes.tokenizer(), ImageProcessor())
    save(folder, "old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # no file may grow over this many bytes
    try:
        with pytest.raises(OSError, match=r"checkpoint: not saved \(.*what was there before is untouched"):
            save_model(folder, tiny.model(), processor)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert saved(folder) == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]  # a half-written one does not fill the disk


@pytest.mark.parametrize("failing", ["write", "fsync", "rename"])
def test_a_save_that_fails_leaves_the_checkpoint_before_it(tmp_path, monkeypatch, failing):
    folder = tmp_path / "checkpoint"
    save(folder, "old")
    rename = Path.rename

    def fail(*_):
        raise OSError("I/O error")

    if failing == "rename":  # the new one to its place; the old one is renamed by then
        monkeypatch.setattr(Path, "rename", lambda path, to: fail() if "partial" in path.name else rename(path, to))
    else:
        monkeypatch.setattr(Path if failing == "write" else os, {"write": "write_text"}.get(failing, failing), fail)
    with pytest.raises(OSError, match=r"not saved \(I/O error\)"):
        save(folder, "new")
    assert saved(folder) == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_an_error_of_the_writer_is_its_own(tmp_path):
    save(tmp_path / "checkpoint", "old")
    with pytest.raises(KeyError, match="head"), replacing(tmp_path / "checkpoint"):
        raise KeyError("head")
    assert saved(tmp_path / "checkpoint") == "old" and len(list(tmp_path.iterdir())) == 1


def test_everything_is_on_disk_before_the_first_rename(tmp_path, monkeypatch):
    flushed, rename, fsync = set(), Path.rename, os.fsync

    def remember(handle):
        flushed.add(os.stat(handle).st_ino)
        fsync(handle)

    def check(path, to):
        assert {file.stat().st_ino for file in (path, *path.rglob("*"))} <= flushed
        return rename(path, to)

    monkeypatch.setattr(os, "fsync", remember)
    monkeypatch.setattr(Path, "rename", check)
    save(tmp_path / "checkpoint", "new")
    assert tmp_path.stat().st_ino in flushed  # and the rename itself in the end


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "large_disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "large_disk")
    save(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and saved(tmp_path / "large_disk") == "new"


def test_what_is_not_a_checkpoint_is_not_overwritten(tmp_path):
    (tmp_path / "thesis.tex").write_text("for years")
    for path in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(ValueError, match="not a checkpoint"):
            save(path, "new")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["for years"]
