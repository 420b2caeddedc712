"""Test that a run ends at its start, and names the hosts, if the network does not work."""

import os
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from minivlmrl.distributed import network, process_group
from tests.helpers.children import exit_code, fork, fork_ranks
from tests.helpers.pretend_cuda import CUDA, PretendCuda

CPU = torch.device("cpu")
HOST = socket.gethostname()


def store_of(hosts):
    store = dist.HashStore()
    for rank, host in enumerate(hosts):
        store.set(f"host/{rank}", host)
    return store


@pytest.mark.skipif(sys.platform != "linux", reason="gloo uses GLOO_SOCKET_IFNAME on Linux only")
def test_an_interface_that_does_not_exist_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    # The failed process group changes the names of later groups. DTensor compares meshes without the names of their
    # groups, and would reuse cached results with a wrong name.
    world = dist.distributed_c10d._world
    monkeypatch.setattr(world, "group_count", world.group_count)
    with pytest.raises(ValueError) as raised:
        network.connect(store_of(["", "other"]), 0, 2, CPU, timedelta(seconds=30))
    message = str(raised.value)
    assert message.startswith(f"rank 0 on {HOST} cannot exchange tensors with the ranks on {HOST}, other (")
    assert (
        "Unable to find address for: eth7). GLOO_SOCKET_IFNAME=eth7, NCCL_SOCKET_IFNAME=not set, and the interf"
        in message
    )
    assert "Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to an interface that connects the hosts, and" in message
    assert not dist.is_initialized()


def test_ranks_that_do_not_start_are_named():
    with pytest.raises(ValueError, match=r"ranks \[1, 3\] of 4 did not start within 0.2 seconds; look .* --node_rank"):
        store = store_of([])
        store.set("host/2", "two")
        network.connect(store, 0, 4, CPU, timedelta(seconds=0.2))


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_network_that_does_not_answer_ends_the_process(monkeypatch, capfd):
    """Gloo waits for the address of a missing rank as for a connection that a firewall blocks."""
    monkeypatch.setattr(network, "CONNECT_SECONDS", 0.5)
    store = store_of(["", "far"])
    assert exit_code(fork(lambda: network.connect(store, 0, 2, CPU, timedelta(seconds=60)))) == 2
    errors = capfd.readouterr().err
    assert f"rank 0 on {HOST} cannot exchange tensors with the ranks on {HOST}, far (no answer within 0.5 s" in errors


@pytest.mark.parametrize(("error", "kind", "message"), [
    (RuntimeError("[../pair.cc:534] Connection closed by peer [127.0.0.1]:15258"), ValueError,
     rf"^rank 0 on {HOST} has lost the connection to another rank; look for an earlier error of that rank"),
    (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError, "^CUDA out of memory"),
])  # fmt: skip
def test_an_error_that_is_not_of_the_network_is_not_told_as_one(group_of_gpus, monkeypatch, error, kind, message):
    def fail(tensor):
        raise error

    monkeypatch.setattr(dist, "all_reduce", fail)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(kind, match=message):
        network.connect(store_of(["", "other"]), 0, 2, CPU, timedelta(seconds=30))


@pytest.mark.parametrize(("rank", "expected"), [
    ("1", "cannot connect at {}.*--master_addr"),
    ("0", "cannot connect at {} .*1/2 clients joined.*that no rank ended with an error before"),
])  # fmt: skip
def test_a_store_that_cannot_be_reached_is_named(monkeypatch, rank, expected):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(ValueError, match=f"rank {rank} on .* {expected.format(f'127.0.0.1:{port}')}"):
        network.attempt_store(timedelta(seconds=1))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these options of connections")
def test_a_wait_without_a_limit_ends_with_a_dead_host():
    """The kernel probes a silent host after a quarter of the timeout, and later ends the connection."""
    names = socket.SO_KEEPALIVE, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT

    def begin(world):
        found = []
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError), socket.fromfd(int(number), socket.AF_INET, socket.SOCK_STREAM) as x:
                x.getpeername()
                levels = [socket.SOL_SOCKET] + [socket.IPPROTO_TCP] * 4
                found.append([x.getsockopt(*pair) for pair in zip(levels, names, strict=True)])
        assert [1, 3, 3, 3, 12000] in found, found
        world.barrier()

    assert fork_ranks(2, begin, 12) == [0, 0]


@pytest.fixture
def group_of_gpus(monkeypatch):
    """Imitate a process group of two ranks with GPUs; return its options and the devices of summed tensors."""
    options, sums = {}, []

    def init_process_group(backend, **given):
        options.update(given, backend=backend)

    def all_reduce(tensor):
        sums.append(tensor.device)
        tensor.mul_(2)

    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return options, sums


def test_gpus_are_connected_by_nccl_before_the_model_is_loaded(group_of_gpus):
    """Gloo transfers objects, and NCCL transfers tensors of the GPU in `device_id`."""
    options, sums = group_of_gpus
    with PretendCuda():
        network.connect(store_of(["", "other"]), 0, 2, CUDA, timedelta(seconds=30))
    assert options["backend"] == "cpu:gloo,cuda:nccl" and options["device_id"] == CUDA
    assert sums == [CPU, CUDA]


def test_gpus_that_exchange_wrong_numbers_are_refused(group_of_gpus):
    message = r"\(the sum of 3 ones is 2 on cpu\). .*NCCL_SOCKET_IFNAME=not set, .* On GPUs, NCCL_DEBUG=INFO"
    with PretendCuda(), pytest.raises(ValueError, match=message):
        network.connect(store_of(["", "b", "c"]), 0, 3, CUDA, timedelta(seconds=30))


def test_a_barrier_waits_on_the_cpu(monkeypatch):
    """If the process group has a device, dist.barrier waits for all work of the GPUs."""
    groups = []
    monkeypatch.setattr(dist, "barrier", None)
    monkeypatch.setattr(dist, "monitored_barrier", lambda group, *_, **__: groups.append(group))
    monkeypatch.setattr(process_group, "barrier_group", "gloo")
    monkeypatch.setattr(process_group, "restart_watchdog", lambda *_: None)
    process_group.World(0, 2).barrier()
    assert groups == ["gloo"]
