"""The scripts for TRL on docs/public_task.md and docs/library.md run."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from links import ROOT
from trl_fixtures import model

from minivlmrl.__main__ import main

TASK_PAGE, LIBRARY_PAGE = ((ROOT / "docs" / f"{name}.md").read_text("utf-8") for name in ("public_task", "library"))


def script_of(page: str, text: str) -> str:
    """Return a page's first Python code block that contains a text."""
    return next(code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if text in code)


SCRIPT = script_of(TASK_PAGE, "import trl")
OUR_TRAINER = script_of(LIBRARY_PAGE, "minivlmrl.integrations.trl")
THEIR_TRAINER = re.search(r"^trl\.GRPOTrainer\(.*\n", SCRIPT, re.MULTILINE)[0]


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    assert main(["task", "shapes", str(folder)]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [THEIR_TRAINER, OUR_TRAINER], ids=["TRL's trainer", "our trainer"])
def test_the_script_trains_and_its_model_is_evaluated(task_folder, tmp_path, trainer, monkeypatch):
    """Training takes two steps instead of 160; the evaluation command also comes from the page."""
    folder = shutil.copytree(task_folder, tmp_path / "task")
    script = SCRIPT.replace("max_steps=160", "max_steps=2").replace("warmup_steps=5", "warmup_steps=0")
    (folder / "script.py").write_text(script.replace(THEIR_TRAINER, trainer))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "script.py"], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    weights = [dict(model(folder / name).named_parameters()) for name in ("model", "out/model")]
    assert max((weights[0][name] - weights[1][name]).abs().max() for name in weights[0]) > 1e-4
    [command] = re.findall(r"python -m minivlmrl (evaluate .*)", TASK_PAGE)
    monkeypatch.chdir(folder)
    assert main(command.split()) == 0
