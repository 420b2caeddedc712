"""Test that ranks wait for slow work, but not for a rank that has ended, and not forever for a rank that hangs."""

import os
import threading
import time
from datetime import timedelta
from functools import partial

import pytest
import torch

from minivlmrl.commands.train import train_recipe
from minivlmrl.config.options import SamplingOptions, ShardingOptions
from minivlmrl.data.loader import Batches
from minivlmrl.distributed import process_group, saving
from minivlmrl.generation.sampler import Sampler
from minivlmrl.monitor import report
from minivlmrl.rewards.registry import Reward
from minivlmrl.run import process, state_files
from minivlmrl.run.metrics import MetricsLog
from minivlmrl.tasks.shapes import Shapes
from tests.helpers import tiny
from tests.helpers.children import fork_processes, fork_ranks, hook_call
from tests.helpers.runs import metrics

TIMEOUT = 2.0  # seconds, for collective operations
SLOW = 1.25 * TIMEOUT  # seconds of slow work


def slow_reward(world, completions, **columns):
    time.sleep(SLOW * world.rank)
    return [0.0] * len(completions)


@pytest.mark.parametrize("work", ["sampling", "reward own"])
def test_ranks_wait_for_slow_work_longer_than_the_timeout(work):
    def begin(world):
        if work == "sampling":
            sampler = Sampler(tiny.model(), tiny.processor(), SamplingOptions(), world)
            sampler.token_sampler = lambda *_: None
            sampler.sample_with = lambda *_: time.sleep(SLOW * world.rank) or []
            sampler([], 1, [])
        else:
            Reward("own", partial(slow_reward, world), world)(completions=["a"])
        assert world.sum(1) == [2]
        process_group.shutdown(world)

    assert fork_ranks(2, begin, TIMEOUT) == [0, 0]


TRACKER = f"""
import os, time

def tracker(config, steps, stack):
    time.sleep({SLOW})

    def log(values, step):
        time.sleep({SLOW} if step == 1 else 0)
    return log
"""


def slow(owner, name, rank, monkeypatch):
    original = getattr(owner, name)

    def call(*arguments, **options):
        time.sleep(SLOW if os.environ.get("RANK") == rank else 0)
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.slow
def test_a_run_waits_for_slow_work_of_one_rank(home, varied_rollouts, tmp_path, monkeypatch):
    """Rank 0 is slow in its tracker, its report page and its saves, and rank 1 is slow in loading rows."""
    options = ["--stages=[sft, grpo]", *(f"--{stage}.max_steps=2" for stage in ("sft", "grpo")), "--state_steps=1"]
    options += ["--data.eval_rows=2", "--eval_steps=1"]
    monkeypatch.setattr(report, "SECONDS", 0.01)
    (tmp_path / "my_tracker.py").write_text(TRACKER)
    options.append(f"--report_to=[{tmp_path}/my_tracker.py:tracker]")
    for owner, name in ((report, "write_page"), (state_files, "save_tensors"), (saving, "save_tensors")):
        slow(owner, name, "0", monkeypatch)
    slow(Shapes, "__getitem__", "1", monkeypatch)
    recipe = [str(home / "recipe.yaml"), f"--output_dir={tmp_path}/run", f"--timeout={TIMEOUT}", *options]
    assert fork_processes(2, lambda rank: train_recipe(recipe)) == [0, 0]
    assert len(metrics(tmp_path / "run")) == 4


def test_a_lost_rank_ends_the_wait_at_once(capfd, monkeypatch):
    monkeypatch.setattr(process, "LOST_RANK_REPORTS", 0.0)

    def begin(world):
        if world.rank == 1:
            time.sleep(0.3)
            os._exit(9)
        process.run_rank(world.barrier)

    start = time.monotonic()
    assert fork_ranks(2, begin, 300) == [1, 9]
    assert time.monotonic() - start < 60
    message = capfd.readouterr().err
    assert "rank 0 lost the connection to another rank, which ended or did not answer in time (" in message
    assert "Rank 1 failed to pass monitoredBarrier" in message and "continue with --resume=auto" in message


def test_rewards_run_on_the_gpu_of_their_rank(monkeypatch):
    """The current device of CUDA belongs to a thread, and is 0 in a new thread."""
    devices = threading.local()
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(devices, "current", device))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(devices, "current", 0))

    def device(completions, **columns):
        return [torch.cuda.current_device()] * len(completions)

    def begin(world):
        torch.cuda.set_device(world.rank)
        assert Reward("own", device, world)(completions=["a"]) == [world.rank]
        assert world.run_on_all_ranks(torch.cuda.current_device) == world.rank
        process_group.shutdown(world)

    assert fork_ranks(2, begin, TIMEOUT) == [0, 0]


def hang(*_):
    time.sleep(600)


def train(home, tmp_path, *options):
    fixed = ["--stages=[sft]", "--sft.max_steps=4", "--data.eval_rows=0", f"--output_dir={tmp_path}/run"]
    return train_recipe([str(home / "recipe.yaml"), *fixed, *options])


def check_resumed(home, tmp_path):
    assert fork_processes(2, lambda _: train(home, tmp_path, "--resume=auto")) == [0, 0]
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1, 2, 3]


def test_a_rank_that_hangs_in_reading_an_image(home, varied_rollouts, tmp_path, capfd):
    """In step 3, rank 1 hangs until rank 0 has ended, and rank 0 waits for a second."""
    rank_0_runs, rank_0_ends = os.pipe()

    def wait_for_the_end_of_rank_0(*_):
        os.read(rank_0_runs, 1)
        os._exit(9)

    def wait_for_a_second(*_):
        process_group.longest_wait = lambda _: timedelta(0, 1)

    def begin(rank):
        hook_call(Batches, "wait_for", 3, wait_for_the_end_of_rank_0 if rank == 1 else wait_for_a_second)
        try:
            return train(home, tmp_path, "--state_steps=1")
        finally:
            os.write(rank_0_ends, b".")

    assert fork_processes(2, begin) == [1, 9]
    message = capfd.readouterr().err
    assert "states/000002: continue with --resume=auto" in message
    check_resumed(home, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_that_hangs_in_a_tracker(home, varied_rollouts, tmp_path, capfd, ranks):
    def begin(rank):
        if rank == 0:
            hook_call(MetricsLog, "track", 3, hang)
        return train(home, tmp_path, "--state_steps=1", f"--max_wait_hours={30 / 3600}")

    assert fork_processes(ranks, begin) == [1] * ranks
    message = capfd.readouterr().err
    assert "in hang" in message  # the traceback of rank 0
    if ranks == 2:
        assert "states/000002: continue with --resume=auto" in message
        check_resumed(home, tmp_path)


def test_groups_of_replicas_have_the_timeout_of_the_run():
    def begin(world):
        from minivlmrl.distributed.fsdp import Sharding

        for replicas in (1, 2):
            mesh = Sharding(ShardingOptions(enabled=True, replicas=replicas), world, torch.float32).mesh
            for group in mesh.get_all_groups():
                assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == TIMEOUT
        process_group.shutdown(world)

    assert fork_ranks(2, begin, TIMEOUT) == [0, 0]
