"""Test that the folder of test vectors works on its own, and contains what parity compares with."""

import json
import re
import shutil
import subprocess
import sys

import numpy

from minivlmrl.extras.parity import vectors
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


def test_a_wrong_loss_in_numpy_fails(tmp_path):
    assert GRPO.count("np.minimum(ratio") == 1
    done = run_copy(tmp_path, GRPO.replace("np.minimum(ratio", "np.maximum(ratio"))
    assert done.returncode == 1 and "AssertionError: Case(name='grpo" in done.stderr


def test_the_readme_describes_all_options_and_counts():
    counts = {"grpo": 0, "dpo": 0, "sft": 0}
    for options in RECORDED["cases"].values():
        counts[options["kind"]] += 1
        assert all(re.search(rf"(?m)^\| [\w, ]*\b{name}\b[\w, ]* \|", README) for name in options)
    expected = f"grpo ({counts['grpo']} cases), dpo ({counts['dpo']}) or sft ({counts['sft']})"
    assert expected in README and f"{sum(counts.values())} losses" in README
    assert f"{sum(counts.values())} losses" in PAGE and f"TRL\n{RECORDED['trl']}" in PAGE
    assert f"This is version {RECORDED['version']}." in README and f"TRL {RECORDED['trl']}" in README


def test_an_error_is_relative_to_large_numbers_and_nan_is_an_error():
    assert vectors.error([1.0, 2.0], numpy.array([1.0, 4.0])) == 0.5
    assert vectors.error(0.25, 0.5) == 0.25
    assert not vectors.error([numpy.nan, 1.0], numpy.ones(2)) < 1e-6
