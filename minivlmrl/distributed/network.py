"""Connect the ranks first, so that wrong network settings fail early."""

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

    The key prefix is the restart count, because older keys contain addresses of dead processes (pytorch 135712). With
    several hosts the prefix is 0, because a host may not know the restart count (docs/many_gpus.md).

    Raises:
        UserError: the store on rank 0 cannot be reached, or no other rank reaches it.
    """
    try:
        store, _, _ = next(rendezvous("env://", timeout=limit))
    except dist.DistError as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        rank = os.environ["RANK"]
        problem, cause = "cannot reach rank 0", "no firewall closes this port"
        if rank == "0":
            problem = "misses other ranks"
            cause = "no rank ended with an error before, and no other program uses this port"
        raise UserError(
            f"rank {rank} on {socket.gethostname()} {problem} at {address} ({first_line(error)}); check --master_addr "
            f"and --master_port, or --rdzv_endpoint, and that {cause}"
        ) from error
    one_host = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if one_host else "0"
    return PrefixStore(attempt, store)


def connect(store: Store, rank: int, size: int, device: torch.device, limit: timedelta):
    """Create the process group, and test it with an all-reduce on CPU and GPU.

    NCCL connects at the first collective operation, so errors appear before weights are loaded.

    Args:
        limit: timeout for other ranks to start, and for collective operations.

    Raises:
        UserError: a rank did not start, or ranks cannot exchange tensors.
    """
    hosts = wait_for_ranks(store, rank, size, limit)
    has_gpu = device.type == "cuda"
    # gloo and NCCL wait forever for unreachable ranks, so a timer ends the process
    late = describe(f"no answer within {CONNECT_SECONDS:g} seconds", hosts, rank, has_gpu)
    timer = threading.Timer(CONNECT_SECONDS, end_process, [late])
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
        if "by peer" in str(error):  # gloo's "Connection closed by peer" or "reset by peer"
            time.sleep(1)  # torchrun shows the first reported error: let the failed rank report first
            raise UserError(
                f"rank {rank} on {hosts[rank]} has lost the connection to another rank; look for an earlier error of "
                "that rank, or a firewall that closes ports between the hosts"
            ) from error
        raise UserError(describe(first_line(error), hosts, rank, has_gpu)) from error
    finally:
        timer.cancel()


def end_process(message: str):
    """Print a message and exit at once: Python exceptions cannot interrupt gloo or NCCL."""
    print(message, file=sys.stderr, flush=True)
    os._exit(2)


def wait_for_ranks(store: Store, rank: int, size: int, limit: timedelta) -> list[str]:
    """Wait until all ranks have started, and return their host names."""
    keys = [f"host/{number}" for number in range(size)]
    store.set(keys[rank], socket.gethostname())
    try:
        store.wait(keys, limit)
    except dist.DistError as error:
        missing = [str(number) for number in range(size) if not store.check([keys[number]])]
        raise UserError(
            f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(missing)} of {size} did not "
            f"start within {limit.total_seconds():g} seconds; look for an error on the host of that "
            "rank, and check that each host has its own --node_rank and the same --nnodes"
        ) from error
    return [name.decode() for name in store.multi_get(keys)]


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
        socket.TCP_USER_TIMEOUT: round(1000 * seconds),  # milliseconds within which the other host must confirm data
    }
    for number in set(os.listdir("/proc/self/fd")) - before:
        # OSError for files that are not TCP connections
        with suppress(OSError), socket.fromfd(int(number), socket.AF_INET, socket.SOCK_STREAM) as x:
            x.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in options.items():
                x.setsockopt(socket.IPPROTO_TCP, option, value)


def describe(problem: str, hosts: list[str], rank: int, has_gpu: bool) -> str:
    libraries = ("GLOO", "NCCL") if has_gpu else ("GLOO",)
    variables = [f"{library}_SOCKET_IFNAME" for library in libraries]
    chosen = [f"{name}={os.environ.get(name, 'not set')}" for name in variables]
    interfaces = ", ".join(name for _, name in socket.if_nameindex())
    debug = ", and run with NCCL_DEBUG=INFO to see what NCCL tries" if has_gpu else ""
    return (
        f"rank {rank} on {hosts[rank]} cannot exchange tensors with the ranks on "
        f"{', '.join(dict.fromkeys(hosts))} ({problem}). {', '.join(chosen)}, and the interfaces of "
        f"this host are {interfaces}. Set {' and '.join(variables)} to an interface that connects "
        f"the hosts, and check that no firewall closes ports between them{debug}."
    )


def first_line(error: Exception) -> str:
    """Return an error's first line, without a prefix such as gloo's [pair.cc:534]."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return line.rpartition("] ")[2].rstrip(".")
