"""Check benchmarks/first_gpu_hour.py, a script of GPU measurements, on a machine without a GPU."""

import importlib
import sys
from importlib.util import find_spec

import pytest

from tests.helpers.links import ROOT
from tests.helpers.runs import read_lines

sys.path.insert(0, str(ROOT / "benchmarks"))
import first_gpu_hour
from first_gpu_hour import PARTS


def test_parts_exist_and_the_important_ones_fit_twelve_minutes():
    important = list(PARTS)[: list(PARTS).index("default_run") + 1]
    assert sum(PARTS[name].seconds for name in important) <= 12 * 60
    assert {"self_test", "tests", "step", "transformers", "trl_sdpa", "lora", "nf4", "decode"} <= {*important}
    for part in PARTS.values():
        script, function, *_ = part.command.split()
        assert getattr(importlib.import_module(script.removesuffix(".py")), function).is_part


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
