"""Connect all ranks at the start, so wrong network settings fail early."""

import os
import socket
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from minivlmrl.errors import UserError, in_one_line, is_out_of_memory

CONNECT_SECONDS = 60.0  # timeout for connecting, after all ranks have started


def connect(rank: int, size: int, device: torch.device, limit: timedelta):
    """Create the process group, and test it with an all-reduce on CPU and GPU, which makes NCCL connect.

    Args:
        limit: timeout for other ranks to start, and for collective operations.

    Raises:
        UserError: a rank did not start, or ranks cannot exchange tensors.
    """
    problem = (
        f"rank {rank} on {socket.gethostname()} cannot exchange tensors with the other ranks. Check that all {size} "
        "have started without an error, with one --master_addr and --master_port (or --rdzv_endpoint), that "
        "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name an interface that connects the hosts, and that no firewall "
        "closes ports between them"
    )
    # end the process after CONNECT_SECONDS, because gloo and NCCL would wait forever for an unreachable rank
    timer = threading.Timer(CONNECT_SECONDS, end_process, [f"{problem}: no answer within {CONNECT_SECONDS:g} seconds"])
    timer.daemon = True
    has_gpu = device.type == "cuda"
    try:
        store = find_store(limit)
        keys = [f"started/{number}" for number in range(size)]
        store.set(keys[rank], "")
        store.wait(keys, limit)
        timer.start()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if has_gpu else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=limit,
            device_id=device if has_gpu else None,
        )
        for place in dict.fromkeys((torch.device("cpu"), device)):
            dist.all_reduce(torch.ones(1, device=place))
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise UserError(f"{problem}: {in_one_line(error)}") from error
    finally:
        timer.cancel()


def find_store(limit: timedelta) -> Store:
    """Return the torch.distributed store in which ranks look up each other's addresses.

    On a single host, store keys begin with torchrun's restart count, because older keys contain addresses of dead
    processes (pytorch 135712). With several hosts, all keys begin with 0, because restart counts can differ between
    hosts (docs/many_gpus.md).
    """
    if "WORLD_SIZE" not in os.environ:  # one process, without torchrun
        return dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    store, _, _ = next(rendezvous("env://", timeout=limit))
    one_host = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    return PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if one_host else "0", store)


def end_process(message: str):
    """Print a message and exit: Python exceptions cannot interrupt gloo or NCCL."""
    print(message, file=sys.stderr, flush=True)
    os._exit(2)
