"""Distributed training: rank, device and collective operations."""

import math
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minivlmrl.distributed.device import find_device
from minivlmrl.distributed.watchdog import restart_watchdog, stop_watchdog

Value = TypeVar("Value")

NO_LIMIT = timedelta(days=30)  # process group timeout if max_wait_hours is not set
# process group for barriers, None with a single rank
barrier_group: dist.ProcessGroup | None = None


@dataclass
class World:
    """Rank, number of ranks and device; World() describes a single process."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    # function for long loops to call: raises an error if the process has received a signal such as SIGTERM
    stop_if_preempted: Callable[[], None] = lambda: None
    timeout: float = 600.0  # timeout of collective operations, in seconds
    max_wait: float | None = None  # timeout of `barrier`, in seconds; None = no limit
    # whether `shutdown` destroys the process group; False if vLLM does it instead
    ends_group: bool = True

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[Value]) -> Sequence[Value]:
        """Return this rank's contiguous slice of `items`; all ranks' slices have nearly equal lengths."""
        begin = len(items) * self.rank // self.size
        end = len(items) * (self.rank + 1) // self.size
        return items[begin:end]

    def shard_evenly(self, items: Sequence[Value]) -> tuple[list[Value], int]:
        """Return every N-th item, with N ranks; items repeat, because FSDP requires equal numbers on all ranks.

        Example: from [0, 1, 2], rank 0 gets [0, 2] and rank 1 gets [1, 0].

        Returns:
            this rank's items, and how many of them are not repeats.
        """
        share = items[self.rank :: self.size]
        missing = math.ceil(len(items) / self.size) - len(share)
        return [*share, *items[:missing]], len(share)

    def sum(self, *values: float) -> list[float]:
        """Sum values over all ranks."""
        if self.size == 1:
            return list(values)
        # on the CPU: a GPU sum would wait for unfinished kernels
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Concatenate tensors (n, ...) in rank order: (n * size, ...)."""
        if self.size == 1:
            return tensor
        # all_gather_into_tensor is deprecated in torch 2.13
        tensors = tensor.new_empty(self.size, *tensor.shape)
        dist.all_gather(list(tensors.unbind()), tensor.contiguous())
        return tensors.flatten(0, 1)

    def gather_objects(self, value: Value) -> list[Value]:
        """Gather a picklable value from each rank, in rank order."""
        if self.size == 1:
            return [value]
        values = [value] * self.size
        dist.all_gather_object(values, value)
        return values

    def barrier(self):
        """Wait for all ranks, which may take longer than World.timeout.

        After World.max_wait seconds, waiting ranks raise an error, and a late process prints a traceback and exits
        with code 1.

        Raises:
            RuntimeError: a rank has ended, or is late.
        """
        if self.size > 1:
            dist.monitored_barrier(barrier_group, longest_wait(self.max_wait))
        restart_watchdog(self.max_wait, self.size)

    def run_on_all_ranks(self, work: Callable[[], Value]) -> Value:
        """Call `work` on every rank, without a time limit; errors are raised on all ranks."""
        if self.size == 1:
            return work()
        future: Future[Value] = Future()
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        self.barrier()
        for error in filter(None, self.gather_objects(future.exception())):
            # mark an error of all ranks, after which they can still save a state together
            error.on_all_ranks = True  # pyright: ignore[reportAttributeAccessIssue]
            raise error from future.exception()  # also show the traceback of this rank's error
        return future.result()

    def run_on_rank_zero(self, work: Callable[[], Value]) -> Value | None:
        """Run `work` only on rank 0, but raise its error on all ranks; all ranks must call this.

        Other ranks return None.
        """
        return self.run_on_all_ranks(work if self.is_main else lambda: None)

    def compute_on_rank_zero(self, work: Callable[[], Value]) -> Value:
        """Run `work` on rank 0, and return its picklable result on all ranks; all ranks must call this.

        An error is also raised on all ranks.
        """
        result = self.run_on_rank_zero(work)
        return cast(Value, self.gather_objects(result)[0])

    def sum_gradients(self, parameters: Sequence[nn.Parameter]):
        """Sum gradients over all ranks."""
        # sum, not mean: losses are already divided by token or completion counts over all ranks
        if self.size == 1:
            return
        num_ranks = self.sum(*(parameter.grad is not None for parameter in parameters))
        for parameter, n in zip(parameters, num_ranks, strict=True):
            if not n:  # keep gradients None: with zeros, AdamW would apply weight decay
                continue
            if parameter.grad is None:  # vision weights have no gradient on a rank without images
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)  # one by one: a joined copy would need as much memory as the gradients


def setup(num_threads: int | None, timeout: float, sharded: bool, max_wait: float | None = None) -> World:
    """Select device and CPU threads, and connect the ranks started by torchrun.

    Args:
        num_threads: CPU threads, None = OMP_NUM_THREADS or CPU cores per process.
        timeout, max_wait: as in World.
        sharded: whether weights are sharded, which needs a process group even for one process.
    """
    rank = int(os.environ.get("RANK", 0))
    size = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if num_threads is None:
        # torchrun sets OMP_NUM_THREADS=1 for several processes; ignore this value
        requested = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
        if requested.isdecimal() and int(requested) > (local_size > 1):
            num_threads = int(requested)
        else:
            cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
            num_threads = max(1, len(cores) // local_size)
    torch.set_num_threads(num_threads)
    device = find_device(local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size > 1 or sharded:
        from minivlmrl.distributed.network import connect

        # on a single host, use the loopback interface, because gloo may find no other in a container
        if local_size == size and sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        connect(rank, size, device, timedelta(seconds=timeout))
    if size > 1:
        global barrier_group
        # this group has all ranks, so new_group never returns NON_GROUP_MEMBER
        barrier_group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=longest_wait(max_wait)))
    return World(rank, size, device, timeout=timeout, max_wait=max_wait)


def longest_wait(max_wait: float | None) -> timedelta:
    return NO_LIMIT if max_wait is None else min(NO_LIMIT, timedelta(seconds=max_wait))


def shutdown(world: World):
    """Wait for all ranks, and destroy the process group, if any."""
    world.barrier()
    stop_watchdog()
    if dist.is_initialized():
        dist.barrier()  # destroying a process group in use can abort another rank
        if world.ends_group:
            dist.destroy_process_group()
