"""Check benchmarks/first_gpu_hour.py, which measures everything on a GPU and writes a page, without a GPU."""

import importlib
import json
import sys
from importlib.util import find_spec

import pytest

from tests.helpers.links import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import first_gpu_hour
from first_gpu_hour import PARTS, Part

NUMBER = 'print(\'{"card": "a card", "name": "%s", "value": 1.5, "unit": "s"}\', flush=True)\n'


def measure(monkeypatch, out, *arguments):
    """Run the script; return how many parts failed, the lines in summary.jsonl, and the text in summary.md."""
    monkeypatch.setattr(sys, "argv", ["first_gpu_hour.py", "--out", str(out), *arguments])
    failed = first_gpu_hour.main()
    lines = [json.loads(line) for line in (out / "summary.jsonl").read_text().splitlines()]
    return failed, lines, (out / "summary.md").read_text()


def states(lines):
    return {line["part"]: line["state"] for line in lines if "state" in line}


@pytest.fixture
def parts(monkeypatch, tmp_path):
    """Replace the script's parts by short parts; each one first writes a number."""
    scripts = {
        "bad": "raise OSError('no card')",
        "slow": "import subprocess; subprocess.run(['sleep', '60'])",
        "killed": "import os; os.kill(os.getpid(), 9)",
        "good": f"import os, sys; open({str(tmp_path / 'calls')!r}, 'a').write(f'{{sys.argv[1:]}}')",
        "long": "",
    }
    for name, text in scripts.items():
        (tmp_path / f"{name}.py").write_text(NUMBER % f"number of {name}" + text)
    found = {name: Part(1 if name == "slow" else 20, f"{tmp_path}/{name}.py") for name in scripts}
    found["good"] = found["good"]._replace(command=f"{tmp_path}/good.py some words")
    found["long"] = found["long"]._replace(seconds=10**4)
    found["needy"] = Part(20, f"{tmp_path}/good.py", ("pytest", "no_such_package"))
    monkeypatch.setattr(first_gpu_hour, "PARTS", found)
    return found


def test_failed_parts_do_not_stop_the_next_and_are_repeated_by_a_second_call(monkeypatch, tmp_path, parts):
    failed, lines, page = measure(monkeypatch, tmp_path / "out", "--toy")
    assert failed == 3
    assert states(lines) == {
        "bad": "failed: exit status 1, OSError: no card",
        "slow": "failed: stopped after 1 s",
        "killed": states(lines)["killed"],
        "good": "done",
        "long": "later: its time limit is 10000 s",
        "needy": "skipped: no_such_package is not installed",
    }
    assert states(lines)["killed"].startswith("failed: exit status")
    # numbers from failed parts are kept, and each number has the GPU name
    expected = [(part, "a card", f"number of {part}", 1.5) for part in ("bad", "slow", "killed", "good")]
    assert [(x["part"], x["card"], x["name"], x["value"]) for x in lines if "name" in x] == expected
    assert page.count("| number of ") == 4 and "| needy | skipped: no_such_package is not installed | 0 |" in page
    (tmp_path / "bad.py").write_text(NUMBER % "repaired")
    failed, lines, page = measure(monkeypatch, tmp_path / "out", "--toy", "--only", "bad", "good")
    assert failed == 0 and states(lines)["bad"] == states(lines)["good"] == "done" and "number of bad" not in page
    assert (tmp_path / "calls").read_text() == "['--toy', 'some', 'words']"  # the part that was done ran once


def test_parts_exist_and_the_important_ones_fit_twelve_minutes():
    important = list(PARTS)[: list(PARTS).index("default_run") + 1]
    assert sum(PARTS[name].seconds for name in important) <= 12 * 60
    assert {"self_test", "tests", "step", "transformers", "trl_sdpa", "lora", "nf4", "decode"} <= {*important}
    for part in PARTS.values():
        script, function, *_ = part.command.split()
        assert getattr(importlib.import_module(script.removesuffix(".py")), function).is_part


@pytest.mark.slow
def test_parts_run_at_toy_size(monkeypatch, tmp_path):
    """All parts run on a CPU and measure something, except those whose package is missing."""
    failed, lines, page = measure(monkeypatch, tmp_path, "--toy")
    assert failed == 0, page
    skipped = {name for name, part in PARTS.items() if not all(map(find_spec, part.needs))}
    assert states(lines).keys() == PARTS.keys()
    assert {name for name, state in states(lines).items() if state == "done"} == PARTS.keys() - skipped
    assert PARTS.keys() - {line["part"] for line in lines if "name" in line} <= skipped
