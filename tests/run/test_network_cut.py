"""Test runs on two hosts whose network is cut: network namespaces joined by a virtual cable (Linux, root, iproute2)."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest
import yaml

from tests.helpers.links import ROOT
from tests.helpers.runs import metrics
from tests.helpers.tiny import RUN_MODEL, recipe

IS_ROOT = sys.platform == "linux" and os.geteuid() == 0 and shutil.which("ip") is not None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not IS_ROOT, reason="network namespaces need Linux, root and iproute2"),
]
STAGE = {"max_steps": 400, "prompts_per_step": 4, "learning_rate": 3e-3}
RECIPE = recipe(STAGE, stages=["grpo"], data={"eval_rows": 0}, rewards={"REWARD": 1.0}, grpo={"num_generations": 2})
REWARD = """
import os, time
from pathlib import Path


def letters(completions, **columns):
    return [float("e" in text) for text in completions]


def slow(completions, **columns):
    if os.environ["RANK"] == "1":
        (Path(__file__).parent / "slow").touch()
        time.sleep(30)
    return [0.0] * len(completions)
"""


def ip(*words):
    subprocess.run(["ip", *words], check=True)


class Hosts:
    """Two network namespaces with the addresses 10.78.0.1 and 10.78.0.2."""

    def __init__(self, folder):
        self.folder = folder
        self.names = [f"minivlmrl-{os.getpid()}-{number}" for number in (0, 1)]
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        one, two = self.names
        ip("link", "add", "cable0", "netns", one, "type", "veth", "peer", "name", "cable1", "netns", two)
        for number, name in enumerate(self.names):
            ip("-n", name, "addr", "add", f"10.78.0.{number + 1}/24", "dev", f"cable{number}")
            ip("-n", name, "link", "set", f"cable{number}", "up")
        self.processes = []

    def start(self, *options):
        """Run torchrun with one rank in each namespace; their output is in 0.log and 1.log."""
        for number, name in enumerate(self.names):
            environment = {"GLOO_SOCKET_IFNAME": f"cable{number}", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
            launcher += [f"--node_rank={number}", "--master_addr=10.78.0.1", "--master_port=29500"]
            launcher += [f"--local_addr=10.78.0.{number + 1}", f"--rdzv_conf=is_host={1 - number}"]
            command = ["ip", "netns", "exec", name, *launcher, ROOT / "train.py", self.folder / "recipe.yaml"]
            with open(self.folder / f"{number}.log", "w") as log:
                self.processes.append(subprocess.Popen(
                    [*command, f"--output_dir={self.folder / 'run'}", *options], env=os.environ | environment,
                    stdout=log, stderr=log,
                ))  # fmt: skip

    def cut(self, state="down"):
        ip("-n", self.names[1], "link", "set", "cable1", state)

    def wait(self, seconds):
        """Return the exit codes of both torchruns; None for one that has not ended after some seconds."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and None in [process.poll() for process in self.processes]:
            time.sleep(0.1)
        return [process.returncode for process in self.processes]

    def log(self, number):
        return (self.folder / f"{number}.log").read_text()

    def wait_for(self, condition):
        while not condition():
            assert [process.poll() for process in self.processes] == [None, None], self.log(0) + self.log(1)
            time.sleep(0.05)

    def close(self):
        for name in self.names:
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
            for process in found:
                os.kill(int(process), 9)
            ip("netns", "del", name)
        for process in self.processes:
            process.wait()


@pytest.fixture
def hosts(tmp_path):
    (tmp_path / "model.json").write_text(json.dumps(RUN_MODEL))
    (tmp_path / "my_rewards.py").write_text(REWARD)
    text = yaml.safe_dump(RECIPE).replace("REWARD", f"{tmp_path}/my_rewards.py:letters")
    (tmp_path / "recipe.yaml").write_text(text)
    hosts = Hosts(tmp_path)
    yield hosts
    hosts.close()


def has_steps(folder, number):
    return (folder / "run" / "metrics.jsonl").is_file() and len(metrics(folder / "run")) >= number


def test_a_run_survives_a_cut_that_is_shorter_than_the_timeout(hosts, tmp_path):
    hosts.start("--timeout=60", "--grpo.max_steps=40")
    hosts.wait_for(lambda: has_steps(tmp_path, 3))
    hosts.cut()
    time.sleep(4)
    before = len(metrics(tmp_path / "run"))
    hosts.cut("up")
    assert before < 40
    assert hosts.wait(120) == [0, 0], hosts.log(0) + hosts.log(1)
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(40))


@pytest.mark.parametrize("reward", ["letters", "slow"])
def test_a_longer_cut_ends_both_hosts(hosts, tmp_path, reward):
    """Also if rank 0 waits without a limit, because rank 1 computes a reward for longer than the timeout."""
    hosts.start("--timeout=6", f"--rewards={{{tmp_path}/my_rewards.py:{reward}: 1.0}}")
    hosts.wait_for((tmp_path / "slow").exists if reward == "slow" else lambda: has_steps(tmp_path, 3))
    hosts.cut()
    assert hosts.wait(120) == [1, 1], hosts.log(0) + hosts.log(1)
    for number in (0, 1):
        assert "ended or did not answer in time, so rank" in hosts.log(number), hosts.log(number)
