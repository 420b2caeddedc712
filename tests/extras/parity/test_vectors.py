"""Test that the folder of test vectors works on its own, and contains what parity compares with."""

import json
import re
import shutil
import struct
import subprocess
import sys

import numpy
import pytest

from minivlmrl.extras.parity import vectors
from minivlmrl.extras.parity.loss import cases
from tests.helpers.links import ROOT

PAGE = (ROOT / "docs" / "library.md").read_text().partition("\n## Test vectors\n")[2]
README = (vectors.FOLDER / "README.md").read_text()
[GRPO] = re.findall(r"```python\n([^`]*)```", PAGE)
RECORDED = json.loads((vectors.FOLDER / "losses.json").read_text())
ALONE = """
import sys
for name in ("torch", "minivlmrl"):
    sys.modules[name] = None  # an import raises ImportError
"""


def run_copy(folder, code):
    """Run a program beside a copy of the folder, without PyTorch and minivlmrl."""
    shutil.copytree(vectors.FOLDER, folder / "vectors", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "test_grpo.py").write_text(ALONE + code)
    return subprocess.run([sys.executable, "test_grpo.py"], cwd=folder, capture_output=True, text=True)


def test_a_loss_in_numpy_passes_beside_a_copy_of_the_folder(tmp_path):
    done = run_copy(tmp_path, GRPO + "print(len(vectors.read_cases(**only)), vectors.__file__)\n")
    assert done.returncode == 0, done.stderr
    count, file = done.stdout.split()
    assert int(count) > 5 and file.startswith(str(tmp_path.resolve()))


@pytest.mark.parametrize("right, wrong", [
    ("np.minimum(ratio", "np.maximum(ratio"),
    ("* (ratio * A == objective)", "* 1"),
    ('batch["ref_per_token_logps"] - logps', 'logps - batch["ref_per_token_logps"]'),
    ("keepdims=True), 1)", "keepdims=True), 0)"),
])  # fmt: skip
def test_a_wrong_loss_in_numpy_fails(right, wrong, tmp_path):
    assert GRPO.count(right) == 1
    done = run_copy(tmp_path, GRPO.replace(right, wrong))
    assert done.returncode == 1 and "AssertionError: Case(name='grpo" in done.stderr


def test_the_reader_returns_what_parity_compares_with():
    """parity reads through `vectors`, so the tensors are decoded once more without safetensors, as the README says."""
    data = (vectors.FOLDER / "losses.safetensors").read_bytes()
    [length] = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    seen = set()
    for only in ({"kind": "grpo"}, {"kind": "grpo", "delta": 3.0}, {"kind": "dpo"}, {"kind": "sft"}):
        for name, options, batch, loss, gradient in cases(**only):
            assert options == RECORDED["cases"][name]
            for key, tensor in {**batch, "loss": loss, "gradient": gradient}.items():
                entry = header[f"{name}/{key}"]
                first, end = (8 + length + offset for offset in entry["data_offsets"])
                expected = numpy.frombuffer(data[first:end], "<f8").reshape(entry["shape"])
                assert entry["dtype"] == "F64" and numpy.array_equal(tensor.numpy(), expected)
                seen.add(f"{name}/{key}")
    assert seen == header.keys() - {"__metadata__"}
    assert len(RECORDED["cases"]) == len({name.partition("/")[0] for name in seen})


def test_the_readme_describes_all_options_and_counts():
    counts = {"grpo": 0, "dpo": 0, "sft": 0}
    for options in RECORDED["cases"].values():
        counts[options["kind"]] += 1
        assert all(re.search(rf"(?m)^\| [\w, ]*\b{name}\b[\w, ]* \|", README) for name in options)
    expected = f"grpo ({counts['grpo']} cases), dpo ({counts['dpo']}) or sft ({counts['sft']})"
    assert expected in README and f"{sum(counts.values())} losses" in README
    assert f"{sum(counts.values())} losses" in PAGE and f"TRL\n{RECORDED['trl']}" in PAGE
    assert f"This is version {RECORDED['version']}." in README and f"TRL {RECORDED['trl']}" in README


def test_cases_are_chosen_by_their_options():
    dapo = vectors.read_cases(loss_type="dapo", beta=0.0)
    assert dapo and all(case.options["loss_type"] == "dapo" and case.options["beta"] == 0 for case in dapo)
    assert all("delta" not in case.options for case in vectors.read_cases())
    assert {case.options["delta"] for case in vectors.read_cases(delta=3.0)} == {3.0}
    assert vectors.read_cases(loss_type="ipo")[0].options["loss_type"] == ["ipo"]
    assert vectors.read_cases(loss_type="unknown") == []


def test_an_error_is_relative_to_large_numbers_and_nan_is_an_error():
    assert vectors.error([1.0, 2.0], numpy.array([1.0, 4.0])) == 0.5
    assert vectors.error(0.25, 0.5) == 0.25
    assert not vectors.error([numpy.nan, 1.0], numpy.ones(2)) < 1e-6
