"""Test the files of a checkpoint folder: errors for invalid JSON, and how a save replaces the folder.

If a save is killed at any step or the disk is full, either the old or the new checkpoint is complete.
"""

import errno
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from minivlmrl.data.download import find_folder
from minivlmrl.distributed.saving import save_model
from minivlmrl.extras.convert.command import main as convert
from minivlmrl.files import flush_file, replacing, save_tensors
from minivlmrl.json_files import read_json
from minivlmrl.monitor.report import main as report
from tests.helpers import tiny
from tests.helpers.children import exit_code, fork


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe{}", b"[" * 100_000, b"1" * 10_000])
def test_a_file_that_is_not_a_json_object_is_named(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json: (the text is not valid|the JSON text cannot|the content is)"):
        read_json(tmp_path / "config.json")


WRITTEN = ["config.json", "model.safetensors", "tokenizer.json"]


def save(folder: Path, text: str):
    with replacing(folder) as new:
        for name in WRITTEN:
            (new / name).write_text(text)


def saved(folder: Path) -> str:
    """Check that the checkpoint that find_folder finds is complete, and return its text."""
    between = not folder.exists()
    message = "checkpoint does not exist, because saving it was interrupted; .*checkpoint.replaced, is used"
    with pytest.warns(UserWarning, match=message) if between else nullcontext():
        found = find_folder(folder)
    assert sorted(file.name for file in found.iterdir()) == WRITTEN
    (text,) = {(found / name).read_text() for name in WRITTEN}  # all files belong to the same checkpoint
    return text


def killed_at(step: int, work) -> bool:
    """Run `work` in a process that exits at its `step`-th file-system change; return whether it exited there."""
    killed = 77
    left = [step]

    def count(event, arguments):
        changes = event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir")
        changes |= event == "open" and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
        left[0] -= changes
        if left[0] < 0:
            os._exit(killed)

    def child():
        sys.addaudithook(count)
        work()

    code = exit_code(fork(child))
    assert code in (0, killed), "the work failed: see its traceback"
    return code == killed


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
        save(folder, "newest")  # the next save works and cleans up
        assert saved(folder) == "newest"
        assert [path.name for path in folder.parent.iterdir()] == ["checkpoint"]
        if not killed:
            break
    assert not killed and len(seen) > 8
    assert seen == sorted(seen, key=["old", "new"].index) and set(seen) == {"old", "new"}


def test_a_save_that_fails_leaves_the_checkpoint_before_it(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoint"
    save(folder, "old")
    rename = Path.rename

    def fail(path, to):
        if "partial" in path.name:
            raise OSError("I/O error")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match=r"checkpoint was not saved \(I/O error\)\. Its earlier content is unchanged"):
        save(folder, "new")
    assert saved(folder) == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    folder = tmp_path / "checkpoint"
    processor = tiny.processor()
    model = tiny.model()
    save(folder, "old")
    model.model.norm.weight.data[3] = float("inf")
    with pytest.raises(ValueError, match=r"not saved, because the tensor model\.norm\.weight is not finite"):
        save_model(folder, model, processor)
    assert saved(folder) == "old"


def test_everything_is_on_disk_before_the_first_rename(tmp_path, monkeypatch):
    flushed = set()
    rename = Path.rename
    fsync = os.fsync

    def remember(handle):
        flushed.add(os.stat(handle).st_ino)
        fsync(handle)

    def check(path, to):
        assert {file.stat().st_ino for file in (path, *path.rglob("*"))} <= flushed
        return rename(path, to)

    monkeypatch.setattr(os, "fsync", remember)
    monkeypatch.setattr(Path, "rename", check)
    save(tmp_path / "checkpoint", "new")
    assert tmp_path.stat().st_ino in flushed  # the rename itself is flushed at the end


def test_a_link_and_what_is_not_a_checkpoint_are_not_overwritten(tmp_path):
    save(tmp_path / "mine", "new")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(ValueError, match=f"/link is a link to {tmp_path}/mine, which is not replaced"):
        save(tmp_path / "link", "newer")
    (tmp_path / "thesis.tex").write_text("for years")
    for path in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(ValueError, match="so it is not a checkpoint and is not overwritten"):
            save(path, "newer")
    assert (tmp_path / "thesis.tex").read_text() == "for years" and saved(tmp_path / "mine") == "new"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSPC])
def test_a_file_system_may_be_unable_to_flush_folders(tmp_path, monkeypatch, number):
    """A folder that FUSE or CIFS cannot flush is ignored, but a file that cannot be flushed is an error."""

    def fsync(_):
        raise OSError(number, os.strerror(number))

    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "fsync", fsync)
    with nullcontext() if number != errno.ENOSPC else pytest.raises(OSError, match="No space left"):
        flush_file(tmp_path)
    with pytest.raises(OSError):
        flush_file(tmp_path / "file")


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_umask_decides_who_reads_weights(tmp_path, umask):
    """A rewritten file has the permissions of a new file, so that another user's server can read the weights."""
    before = os.umask(umask)
    try:
        for _ in range(2):
            save_tensors({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
            assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask
    finally:
        os.umask(before)


@pytest.mark.parametrize("command", [convert, report])
def test_the_folder_of_a_new_file_is_created_or_the_mistake_is_named(tmp_path, command):
    (tmp_path / "metrics.jsonl").write_text('{"stage": "sft", "step": 0, "loss": 1.0}\n')
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    given = str(tmp_path / "rows.jsonl") if command is convert else str(tmp_path)
    command([given, f"--out={tmp_path}/new/a.jsonl"])
    assert (tmp_path / "new" / "a.jsonl").is_file()
    (tmp_path / "b.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"--out is .*b\.jsonl, which is a folder; add the name of a file"):
        command([given, f"--out={tmp_path}/b.jsonl"])
    with pytest.raises(OSError, match=r"rows\.jsonl"):
        command([given, f"--out={tmp_path}/rows.jsonl/a.jsonl"])
