"""Test that all ranks of a run share its folder; test_states.py tests that two runs do not."""

import errno
import os
import sys
from functools import partial
from types import SimpleNamespace

import pytest

from minivlmrl.distributed.process_group import shutdown
from minivlmrl.run.lock import LOCK, locked
from tests.helpers.children import fork_ranks
from tests.helpers.stages import ONE


def test_windows_says_that_another_run_has_the_lock(tmp_path, monkeypatch):
    def locking(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(locking=locking, LK_NBLCK=2))
    with pytest.raises(ValueError, match="another run is writing into"), locked(tmp_path / "run", ONE):
        pass


def test_hosts_must_share_output_dir(tmp_path):
    """Each rank has its own working directory, as on two hosts, with files of an earlier run."""

    def begin(world, names):
        folder = tmp_path / names[world.rank]
        (folder / "run").mkdir(parents=True, exist_ok=True)
        (folder / "run" / LOCK).touch()
        os.chdir(folder)
        if len(set(names)) == 1:
            with locked("run", world):
                world.barrier()
        else:
            sentence = r"^output_dir: rank 1 cannot see the folder run of rank 0\. All hosts must share this"
            with pytest.raises(ValueError, match=sentence), locked("run", world):
                pass
        shutdown(world)

    for names in (["one", "two"], ["both", "both"]):
        assert fork_ranks(2, partial(begin, names=names), 300) == [0, 0]
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [LOCK] * 3


@pytest.mark.parametrize("inside", ["", "/run", "/runs/1"])
def test_a_file_is_no_output_folder(tmp_path, inside):
    (tmp_path / "taken").write_text("")
    with pytest.raises(OSError, match="taken"), locked(f"{tmp_path}/taken{inside}", ONE):
        pass
