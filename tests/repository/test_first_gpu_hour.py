"""Check benchmarks/first_gpu_hour.py, which measures everything on a GPU and writes a page, without a GPU."""

import json
import sys

import pytest
from links import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import first_gpu_hour
from first_gpu_hour import PARTS, Part


def write(monkeypatch, tmp_path, *arguments):
    monkeypatch.setattr(sys, "argv", ["first_gpu_hour.py", "--out", str(tmp_path), *arguments])
    failed = first_gpu_hour.main()
    return failed, (tmp_path / "gpu_status.md").read_text()


def test_a_part_that_fails_or_takes_too_long_does_not_stop_the_next(monkeypatch, tmp_path):
    sleeper = "import subprocess; print('begun', flush=True); subprocess.run(['sleep', '60'])"
    parts = {
        "bad": Part(1, "-c \"print('so far'); raise OSError('no card')\"", ""),
        "slow": Part(0.02, f'-c "{sleeper}"', ""),
        "good": Part(1, "-c 'import sys; print(sys.argv[1:])' {out}", "--toy"),
    }
    monkeypatch.setattr(first_gpu_hour, "PARTS", parts)
    failed, page = write(monkeypatch, tmp_path, "--toy")
    assert failed == 2
    bad, slow, good = page.split("\n## ")
    assert "**failed**" in bad and "so far" in bad and "OSError: no card" in bad
    assert "**failed**: stopped after 0.02 minutes" in slow and "begun" in slow
    assert "failed" not in good and f"['{tmp_path}', '--toy']" in good


@pytest.mark.slow
def test_parts_run_at_toy_size(monkeypatch, tmp_path):
    """Run the parts at toy size, with only one of the four training runs."""
    parts = {name: part for name, part in PARTS.items() if name not in ("run_float32", "run_nf4", "vllm_run")}
    monkeypatch.setattr(first_gpu_hour, "PARTS", parts)
    failed, page = write(monkeypatch, tmp_path, "--toy")
    assert failed == 0, page
    assert "planned_gb" in page
    ways = ["ours", "ours, eager", "transformers"]
    cells = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    assert [way for _, rows, way, *_ in (row for row in cells if len(row) > 3) if rows == "64"] == ways
    kernels, step = (json.loads((tmp_path / f"{name}.json").read_text())["rows"] for name in ("kernels", "step"))
    ours = [row for row in kernels if row["way"].startswith("ours")]
    assert {row["table"].split()[0] for row in ours} == {"states", "windows", "decode"}
    assert not [row for row in ours if "skipped" in row]
    assert sorted(row["phase"] for row in step) == ["rollout"] * 2 + ["scoring"] * 3 + ["step"] * 3
