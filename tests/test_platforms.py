"""What macOS and Windows do otherwise: a run where Python lacks and refuses what Windows does, and units of macOS."""

import os
import subprocess
import sys

import pytest

from minivlmrl.run.metrics import peak_memory

RUN = """
import sys
from pretend_windows import pretend

def train(*options):
    from minivlmrl.train import main
    short = ["--sft.max_steps=1", "--grpo.max_steps=2", "--grpo.prompts_per_step=2", "--data.eval_rows=2"]
    logs = ["--log_completions=1", "--state_steps=1", "--rewards={../my_rewards.py:length: 1.0}"]
    assert main(["shapes.yaml", *short, *logs, *options]) == 0

train("--output_dir=linux")
for name in [name for name in sys.modules if name.startswith("minivlmrl")]:
    del sys.modules[name]  # imported again where nothing is as here
pretend()
train("--output_dir=windows", "--grpo.max_steps=1")
train("--output_dir=windows", "--resume=auto")
from minivlmrl.environments.tool_calls import time_limit
from minivlmrl.hub.folder import locked
from minivlmrl.scale.ranks import World
with time_limit(1), locked("windows", World()), locked("windows", World()):
    pass
"""
OTHER = {"timings.jsonl", "config.yaml", "page.html", "summary.json", "run.json", "complete.json"}  # times, options


@pytest.mark.slow
def test_windows_trains_resumes_and_saves_the_same_bytes(tmp_path):
    (home := tmp_path / "home").mkdir()
    reward = "def length(completions, **columns):\n    return [*map(len, completions)]\n"
    (tmp_path / "my_rewards.py").write_text(reward)
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNDEFAULTENCODING": "1"}
    done = subprocess.run([sys.executable, "-c", RUN], cwd=home, env=environment, capture_output=True, text=True)
    assert "ValueError: output_dir: another run is writing into windows" in done.stderr.splitlines()[-1], done.stderr
    assert not [line for line in done.stderr.splitlines() if "EncodingWarning" in line and "/minivlmrl/" in line]
    files = []
    for run in (home / "linux", home / "windows"):
        written = [path for path in run.rglob("*") if path.is_file() and path.name not in OTHER]
        files.append({path.relative_to(run): path.read_bytes() for path in written})
    assert files[0] == files[1] and len(files[0]) > 9


def test_the_most_memory_of_a_process_is_said_in_another_unit_on_macos_and_not_on_windows(monkeypatch):
    [here] = peak_memory().values()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert peak_memory() == {"peak_memory_gib": pytest.approx(here / 1024, abs=1e-3)}
    monkeypatch.setitem(sys.modules, "resource", None)
    assert peak_memory() == {}
