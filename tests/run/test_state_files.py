"""Test how the tensors of a state are written and read back; test_states.py tests runs that resume."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from minivlmrl.run import state_files
from minivlmrl.run.state_files import find_shards, read_into, read_rows, write_tensors
from tests.helpers.on_ranks import ONE, launch

TENSORS = {
    "matrix": torch.arange(21.0, dtype=torch.float64).view(7, 3), "step": torch.tensor(5.0),
    "vector": torch.arange(3), "small": torch.arange(2.0).bfloat16(),
}  # fmt: skip


def test_tensors_are_read_back_unchanged(tmp_path, monkeypatch):
    monkeypatch.setattr(state_files, "FILE_SIZE", 28)
    names = write_tensors(tmp_path, TENSORS, ONE)
    assert names == ["0000_0000.safetensors", "0000_0001.safetensors", "0000_0002.safetensors"]  # 168, 28, 4 bytes
    pieces = find_shards(tmp_path)
    numbers = {name: sum(rows for _, rows, _ in parts) for name, parts in pieces.items()}
    assert numbers == {"matrix": 7, "step": 1, "vector": 3, "small": 2}
    for name, tensor in TENSORS.items():
        found = torch.zeros_like(tensor)
        read_into(found, name, pieces[name])
        rows = read_rows(name, pieces[name], 0, 9)
        assert torch.equal(found, tensor) and torch.equal(rows, found.view(found.shape or 1))
    rows = read_rows("matrix", pieces["matrix"], 2, 4)  # of a rank that has only a part of a stored piece
    assert torch.equal(rows, TENSORS["matrix"][2:4])


@pytest.mark.parametrize(("written", "message"), [
    ({"0:w": torch.zeros(2, 3)}, "the number of rows of w is 2, but it must be 3"),
    ({"0:w": torch.zeros(3, 3).int()}, r"w is \[torch.int32, 3, 3\], but it must be \[torch.float32, 3, 3\]"),
], ids=["shape", "dtype"])  # fmt: skip
def test_tensors_of_another_shape_or_dtype_are_refused(tmp_path, written, message):
    save_file(written, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=message):
        read_into(torch.zeros(3, 3), "w", find_shards(tmp_path)["w"])


def test_weights_that_are_not_finite_are_not_written(tmp_path):
    (tmp_path / "00").mkdir()
    with pytest.raises(ValueError, match=r"00 was not saved, because the tensor policy\.w is not finite"):
        write_tensors(tmp_path / "00", {"policy.w": torch.tensor([0, torch.nan])}, ONE)
    assert not list((tmp_path / "00").iterdir())


def replicas(folder, _, world):
    """Write tensors of two replicas with two shards each, and return whether the tensors are read back unchanged."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    sharded = distribute_tensor(TENSORS["matrix"], mesh, [Replicate(), Shard(0)])
    (folder / "state").mkdir(exist_ok=True)
    tensors = {"matrix": sharded, "vector": TENSORS["vector"]}
    world.run_on_all_ranks(lambda: write_tensors(folder / "state", tensors, world))
    back = torch.zeros_like(sharded)
    read_into(back, "matrix", find_shards(folder / "state")["matrix"])
    return torch.equal(back.full_tensor(), TENSORS["matrix"])


@pytest.mark.slow
def test_each_row_is_written_once(tmp_path):
    assert launch(4, tmp_path, {"replicas": []}, replicas) == [{"replicas": True}] * 4
    written = {key: rows for file in (tmp_path / "state").iterdir() for key, rows in load_file(file).items()}
    assert {key: len(rows) for key, rows in written.items()} == {"0:matrix": 4, "4:matrix": 3, "0:vector": 3}
    assert sum(len(load_file(file)) for file in (tmp_path / "state").iterdir()) == 3
