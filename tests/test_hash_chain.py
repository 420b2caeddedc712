"""Hashes of a step: every bit of weights, moments, rows, draws and rewards counts, wherever it is."""

import pytest
import torch

from minivlmrl.run import hash_chain
from minivlmrl.run.config import RunConfig
from minivlmrl.run.hash_chain import COLUMNS, process_hashes, tensor_hash

from stages import ONE


@pytest.mark.parametrize("size", [3, COLUMNS, 5 * COLUMNS + 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8])
def test_every_bit_counts(size, dtype):
    x = torch.arange(size).remainder(100).to(dtype)
    for at in (0, size // 2, size - 1):
        other = x.clone()
        other.view(torch.uint8)[at * x.itemsize] ^= 1
        assert tensor_hash([other]) != tensor_hash([x]) == tensor_hash([x.clone()])
    assert len({tensor_hash(given) for given in ([x], [x[None]], [x, x[:0]], [x[:-1], x[-1:]])}) == 4


def test_a_neighbour_s_value_is_another_tensor():
    x = torch.randn(3 * COLUMNS)
    assert tensor_hash([x.roll(1)]) != tensor_hash([x])
    assert tensor_hash([x.view(3, COLUMNS).T.contiguous().T]) == tensor_hash([x.view(3, COLUMNS)]), "however it lies"


def test_a_recipe_is_known_without_its_paths(tmp_path):
    def recipe(**options):
        return process_hashes(RunConfig(**options), ONE)["recipe"]

    assert recipe(output_dir=str(tmp_path), num_threads=3) == recipe() != recipe(seed=1)
    here, there, one = RunConfig(), RunConfig(), RunConfig()
    here.data.train_file, there.data.train_file, one.data.max_pixels = "/here/rows.jsonl", "/there/rows.jsonl", 784
    hashes = [process_hashes(config, ONE)["recipe"] for config in (here, there, one)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_other_code_is_seen(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(hash_chain, "__file__", str(tmp_path / "run" / "hash_chain.py"))
    codes = []
    for text in ("x = 1", "x = 2", "x = 1"):
        (tmp_path / "loss.py").write_text(text)
        codes.append(process_hashes(RunConfig(), ONE)["code"])
    assert codes[0] == codes[2] != codes[1]
