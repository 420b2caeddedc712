"""Check benchmarks/first_gpu_hour.py, a script of GPU measurements, on a machine without a GPU."""

import json
import sys
from importlib.util import find_spec

import pytest
import torch

from tests.helpers.links import ROOT
from tests.helpers.pretend_cuda import CUDA, PretendCuda
from tests.helpers.runs import read_lines

sys.path.insert(0, str(ROOT / "benchmarks"))
import common
import first_gpu_hour
import gpu
import gpu_kernels
import gpu_minimal
from first_gpu_hour import PARTS


def test_kernels_run_on_a_simulated_gpu(monkeypatch, capsys):
    for module in (common, gpu_kernels):
        monkeypatch.setattr(module, "CARD", CUDA)
    for name, value in (("CALLS", 2), ("REPEATS", 1)):
        monkeypatch.setattr(gpu_kernels, name, value)
    gpu_kernels.card_speeds.cache_clear()
    monkeypatch.setattr(gpu_kernels, "card_speeds", lambda: (1e10, 1e11))
    with PretendCuda():
        gpu_kernels.kernels(toy=True)
    numbers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(numbers) > 5
    assert all(number["value"] > 0 for number in numbers if "skipped" not in number and number["unit"] != "GB")


@pytest.mark.parametrize("stage", ["grpo", "dpo"])
def test_minimal_py_runs_on_a_simulated_gpu(stage, monkeypatch, capsys):
    minimal = gpu_minimal.one_file
    load_file = minimal.load_file  # safetensors cannot use this GPU
    on_gpu = lambda file, device: {name: weight.to(device) for name, weight in load_file(file).items()}  # noqa: E731
    monkeypatch.setattr(minimal, "load_file", on_gpu)
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x)  # nor does its autocast convert the inputs of a layer
    for module in (common, gpu_minimal):
        monkeypatch.setattr(module, "CARD", CUDA)
    with PretendCuda():
        gpu_minimal.minimal(True, stage)
    lines = capsys.readouterr().out.splitlines()
    names = [json.loads(line)["name"] for line in lines if line.startswith("{")]
    assert {"load", "log-probabilities", "backward: peak memory", "AdamW"} <= {*names}
    assert ("sample" in names) == (stage == "grpo")


def test_minimal_py_loads_the_folder_that_a_gpu_trains(tmp_path, monkeypatch):
    """The model has random weights of the real size on a GPU, and of a small size here."""
    read_config = gpu.read_config
    monkeypatch.setattr(gpu, "read_config", lambda size: read_config("toy") | {"tie_word_embeddings": True})
    folder = gpu_minimal.write_model(tmp_path, toy=False)
    gpu_minimal.write_row(tmp_path, 56)
    model = gpu_minimal.one_file.load(folder)
    assert model.lm_head.weight is model.model["embed_tokens"].weight
    assert gpu_minimal.one_file.read_rows(tmp_path / "rows.jsonl", ["solution"])


@pytest.mark.slow
def test_parts_run_at_toy_size(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["first_gpu_hour.py", "--out", str(tmp_path), "--toy"])
    assert first_gpu_hour.main() == 0, (tmp_path / "summary.md").read_text()
    lines = read_lines(tmp_path / "summary.jsonl")
    states = {line["part"]: line["state"] for line in lines if "state" in line}
    skipped = {name for name, part in PARTS.items() if not all(map(find_spec, part.needs))}
    assert states.keys() == PARTS.keys()
    assert {name for name, state in states.items() if state == "done"} == PARTS.keys() - skipped
    assert PARTS.keys() - {line["part"] for line in lines if "name" in line} <= skipped
