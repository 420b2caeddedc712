"""Test that a run ends at its start, with one message, if the network does not work."""

import socket
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from minivlmrl.distributed import network, process_group
from tests.helpers.children import exit_code, fork
from tests.helpers.pretend_cuda import CUDA, PretendCuda

CPU = torch.device("cpu")
PROBLEM = f"^rank 0 on {socket.gethostname()} cannot exchange tensors with the other ranks. Check that all 2 have .*: "


@pytest.fixture
def store(monkeypatch):
    """Return a store in which rank 1 has started."""
    store = dist.HashStore()
    store.set("started/1", "")
    monkeypatch.setattr(network, "find_store", lambda limit: store)
    return store


@pytest.mark.skipif(sys.platform != "linux", reason="gloo uses GLOO_SOCKET_IFNAME on Linux only")
def test_an_interface_that_does_not_exist_is_named(monkeypatch, store):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    # The failed process group changes the names of later groups. DTensor compares meshes without the names of their
    # groups, and would reuse cached results with a wrong name.
    world = dist.distributed_c10d._world
    monkeypatch.setattr(world, "group_count", world.group_count)
    with pytest.raises(ValueError, match=PROBLEM + ".*Unable to find address for: eth7"):
        network.connect(0, 2, CPU, timedelta(seconds=30))
    assert not dist.is_initialized()


def test_a_rank_that_does_not_start_ends_the_others(store):
    store.delete_key("started/1")
    with pytest.raises(ValueError, match=PROBLEM + ".*[Tt]imeout"):
        network.connect(0, 2, CPU, timedelta(seconds=0.2))


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_network_that_does_not_answer_ends_the_process(monkeypatch, capfd, store):
    """Gloo waits for the address of a missing rank as for a connection that a firewall blocks."""
    monkeypatch.setattr(network, "CONNECT_SECONDS", 0.5)
    assert exit_code(fork(lambda: network.connect(0, 2, CPU, timedelta(seconds=60)))) == 2
    assert "closes ports between them: no answer within 0.5 seconds" in capfd.readouterr().err


def test_memory_that_runs_out_is_no_error_of_the_network(group_of_gpus, monkeypatch):
    def fail(tensor):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(dist, "all_reduce", fail)
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory"):
        network.connect(0, 2, CPU, timedelta(seconds=30))


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_store_that_cannot_be_reached(monkeypatch, rank):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(ValueError, match=f"^rank {rank} on .* cannot exchange tensors .*--master_addr"):
        network.connect(int(rank), 2, CPU, timedelta(seconds=1))


@pytest.fixture
def group_of_gpus(monkeypatch, store):
    """Imitate a process group of two ranks with GPUs; return its options and the devices of summed tensors."""
    options, sums = {}, []

    def init_process_group(backend, **given):
        options.update(given, backend=backend)

    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: sums.append(tensor.device))
    return options, sums


def test_gpus_are_connected_by_nccl_before_the_model_is_loaded(group_of_gpus):
    """Gloo transfers objects, and NCCL transfers tensors of the GPU in `device_id`."""
    options, sums = group_of_gpus
    with PretendCuda():
        network.connect(0, 2, CUDA, timedelta(seconds=30))
    assert options["backend"] == "cpu:gloo,cuda:nccl" and options["device_id"] == CUDA
    assert sums == [CPU, CUDA]


def test_a_barrier_waits_on_the_cpu(monkeypatch):
    """If the process group has a device, dist.barrier waits for all work of the GPUs."""
    groups = []
    monkeypatch.setattr(dist, "barrier", None)
    monkeypatch.setattr(dist, "monitored_barrier", lambda group, *_, **__: groups.append(group))
    monkeypatch.setattr(process_group, "barrier_group", "gloo")
    monkeypatch.setattr(process_group, "restart_watchdog", lambda *_: None)
    process_group.World(0, 2).barrier()
    assert groups == ["gloo"]
