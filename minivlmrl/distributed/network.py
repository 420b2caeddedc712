"""Connect all ranks at the start, so that wrong network settings fail early."""

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from minivlmrl.errors import UserError, is_out_of_memory

CONNECT_SECONDS = 60.0  # timeout for connecting, after all ranks have started


def attempt_store(limit: timedelta) -> Store:
    """Return the torch.distributed store in which ranks look up each other's addresses.

    On a single host, store keys begin with torchrun's restart count, because older keys contain addresses of dead
    processes (pytorch 135712). With several hosts, all keys begin with 0, because restart counts can differ between
    hosts (docs/many_gpus.md).
    """
    try:
        store, _, _ = next(rendezvous("env://", timeout=limit))
    except dist.DistError as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise UserError(
            f"rank {os.environ['RANK']} on {socket.gethostname()} cannot connect at {address} ({first_line(error)}); "
            "check --master_addr and --master_port, or --rdzv_endpoint, that no rank ended with an error before, and "
            "that no firewall closes this port and no other program uses it"
        ) from error
    one_host = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    return PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if one_host else "0", store)


def connect(store: Store, rank: int, size: int, device: torch.device, limit: timedelta):
    """Create the process group, and test it with an all-reduce on CPU and GPU, which makes NCCL connect.

    Args:
        limit: timeout for other ranks to start, and for collective operations.

    Raises:
        UserError: a rank did not start, or ranks cannot exchange tensors.
    """
    keys = [f"host/{number}" for number in range(size)]
    store.set(keys[rank], socket.gethostname())
    try:
        store.wait(keys, limit)
    except dist.DistError as error:
        missing = [number for number in range(size) if not store.check([keys[number]])]
        raise UserError(
            f"ranks {missing} of {size} did not start within {limit.total_seconds():g} seconds; look for errors on "
            "their hosts, and check that each host has its own --node_rank and the same --nnodes"
        ) from error
    hosts = [name.decode() for name in store.multi_get(keys)]
    has_gpu = device.type == "cuda"
    # gloo and NCCL wait forever for unreachable ranks, so a timer ends the process
    timer = threading.Timer(
        CONNECT_SECONDS, end_process, [describe(f"no answer within {CONNECT_SECONDS:g} seconds", hosts, rank)]
    )
    timer.daemon = True
    timer.start()
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if has_gpu else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=limit,
            device_id=device if has_gpu else None,
        )
        for place in dict.fromkeys((torch.device("cpu"), device)):
            total = torch.ones(1, device=place)
            dist.all_reduce(total)
            if total.item() != size:
                raise RuntimeError(f"the sum of {size} ones is {total.item():g} on {place}")
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        if "by peer" in str(error):  # gloo messages: "Connection closed by peer", "reset by peer"
            time.sleep(1)  # torchrun shows only the first error, so let the failed rank report its own
            raise UserError(
                f"rank {rank} on {hosts[rank]} has lost the connection to another rank; look for an earlier error of "
                "that rank, or a firewall that closes ports between the hosts"
            ) from error
        raise UserError(describe(first_line(error), hosts, rank)) from error
    finally:
        timer.cancel()


def end_process(message: str):
    """Print a message and exit: Python exceptions cannot interrupt gloo or NCCL."""
    print(message, file=sys.stderr, flush=True)
    os._exit(2)


@contextmanager
def ending_with_dead_hosts(seconds: float) -> Iterator[None]:
    """Make process groups created in a `with` block raise an error if a host dies.

    On Linux, connections close if the other host has not answered for `seconds`. Long computations are safe, because
    the operating system answers TCP keep-alive probes.
    """
    if sys.platform != "linux":
        yield
        return
    before = set(os.listdir("/proc/self/fd"))
    yield
    pause = max(1, round(seconds / 4))
    options = {
        socket.TCP_KEEPIDLE: pause,  # seconds without data before a keep-alive probe
        socket.TCP_KEEPINTVL: pause,
        socket.TCP_KEEPCNT: 3,
        socket.TCP_USER_TIMEOUT: round(1000 * seconds),  # milliseconds until unacknowledged data closes a connection
    }
    for number in set(os.listdir("/proc/self/fd")) - before:
        # skip file descriptors that are not TCP sockets
        with suppress(OSError), socket.fromfd(int(number), socket.AF_INET, socket.SOCK_STREAM) as x:
            x.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in options.items():
                x.setsockopt(socket.IPPROTO_TCP, option, value)


def describe(problem: str, hosts: list[str], rank: int) -> str:
    variables = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
    chosen = ", ".join(f"{name}={os.environ.get(name, 'not set')}" for name in variables)
    interfaces = ", ".join(name for _, name in socket.if_nameindex())
    return (
        f"rank {rank} on {hosts[rank]} cannot exchange tensors with the ranks on "
        f"{', '.join(dict.fromkeys(hosts))} ({problem}). {chosen}, and the interfaces of this host are {interfaces}. "
        f"Set {' and '.join(variables)} to an interface that connects the hosts, and check that no firewall closes "
        "ports between them. On GPUs, NCCL_DEBUG=INFO shows what NCCL tries."
    )


def first_line(error: Exception) -> str:
    """Return an error's first line, without a prefix such as gloo's [pair.cc:534]."""
    return str(error).partition("\n")[0].rpartition("] ")[2].rstrip(".")
