"""The process group of a run: rank, device, and collective operations over all ranks."""

import math
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Store

from minivlmrl.distributed.device import find_device
from minivlmrl.distributed.watchdog import log_stragglers, restart_watchdog, stop_watchdog

Value = TypeVar("Value")

NO_LIMIT = timedelta(days=30)  # the longest timeout that a process group accepts
LAST_ERRORS = 5.0  # seconds within which all ranks must raise an error to save a checkpoint together
# process group in which ranks wait for each other; None if there is only one rank
barrier_group: dist.ProcessGroup | None = None


@dataclass
class World:
    """Rank, number of ranks and device of a process. World() stands for a run with a single process."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    # function that slow work such as sampling calls often; it raises an exception after a signal such as SIGTERM
    stop_if_preempted: Callable[[], None] = lambda: None
    timeout: float = 600.0  # seconds that a collective operation waits for other ranks
    max_wait: float | None = None  # seconds that `barrier` waits for other ranks; None means no limit
    store: Store | None = None  # store in which ranks see whether another rank is late or has failed
    # whether `shutdown` destroys the process group at the end; False if vLLM destroys it
    ends_group: bool = True

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[Value]) -> Sequence[Value]:
        """Return a contiguous part of a sequence for this rank; the parts of all ranks have nearly equal lengths."""
        begin = len(items) * self.rank // self.size
        end = len(items) * (self.rank + 1) // self.size
        return items[begin:end]

    def shard_evenly(self, items: Sequence[Value]) -> tuple[list[Value], int]:
        """Return every N-th item of a sequence for N ranks, starting at this rank's number.

        All ranks get the same number of items, as FSDP requires: from [0, 1, 2], rank 0 gets [0, 2] and rank 1 gets [1,
        0].

        Returns:
            this rank's items, and how many of them, from the start, are not repeats.
        """
        share = items[self.rank :: self.size]
        missing = math.ceil(len(items) / self.size) - len(share)
        return [*share, *items[:missing]], len(share)

    def sum(self, *values: float) -> list[float]:
        """Add up each value over all ranks."""
        if self.size == 1:
            return list(values)
        # The sum over ranks is computed on the CPU, because a sum on the GPU would wait for the GPU's unfinished work.
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Concatenate the tensors (n, ...) of all ranks, in rank order. The result is (n * size, ...)."""
        if self.size == 1:
            return tensor
        # all_gather_into_tensor would be shorter, but torch 2.13 warns that it is deprecated
        tensors = tensor.new_empty(self.size, *tensor.shape)
        dist.all_gather(list(tensors.unbind()), tensor.contiguous())
        return tensors.flatten(0, 1)

    def gather_objects(self, value: Value) -> list[Value]:
        """Return a list of all ranks' values, which must be picklable, in rank order."""
        if self.size == 1:
            return [value]
        values = [value] * self.size  # placeholders, which all_gather_object replaces
        dist.all_gather_object(values, value)
        return values

    def exchange(self, values: Sequence[Value]) -> list[Value]:
        """Send one picklable value to each rank, and return the values that the ranks send to this rank, in rank order.

        Args:
            values: values[2] is sent to rank 2, for example.
        """
        pickled = [torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8) for value in values]
        sizes = torch.tensor([len(part) for part in pickled])
        arriving = torch.empty_like(sizes)
        dist.all_to_all_single(arriving, sizes)
        received = torch.empty(int(arriving.sum()), dtype=torch.uint8)
        dist.all_to_all_single(received, torch.cat(pickled), arriving.tolist(), sizes.tolist())
        return [pickle.loads(part.numpy().tobytes()) for part in received.split(arriving.tolist())]

    def barrier(self, work: str = "do its part"):
        """Wait until all ranks have done their work, which may take longer than World.timeout.

        After a minute, the rank prints which ranks it is waiting for. If a rank hangs for longer than World.max_wait,
        the waiting ranks raise an error, and the process of the hanging rank prints a traceback and ends with exit code
        1.

        Args:
            work: what the ranks are doing, for the message, such as "read images".

        Raises:
            RuntimeError: the process of a rank has ended, or a rank is more than World.max_wait late.
        """
        if self.size > 1:
            with log_stragglers(self.store, self.rank, self.size, work):
                monitored_barrier(longest_wait(self.max_wait))
        restart_watchdog(self.max_wait, self.size)

    def run_after_error(self, work: Callable[["World"], object], alone: bool) -> bool:
        """After an error, call the function `work`, which saves the run. Each rank with an error must call this method.

        If all ranks have an error, they call `work` together. Otherwise, the first rank that notices this calls `work`
        alone, and the other ranks wait, because torchrun ends all ranks as soon as one rank ends.

        Args:
            work: function that is called with the ranks that work together.
            alone: whether one rank can do the work without the others.
        Returns:
            True if the work was done.
        """
        if self.size == 1:
            work(self)
            return True
        store = self.store
        if store is None:
            return False
        errors = [f"error of rank {rank}" for rank in range(self.size)]
        own = str(self.rank)
        store.set(errors[self.rank], "")
        # Rank 0 is the first to give up, because only rank 0 knows the number of lines in the log files.
        limit = timedelta(seconds=LAST_ERRORS + min(self.rank, 1))
        with suppress(dist.DistError):  # another rank has no error
            store.wait(errors, limit)
            own = "all"
        workers = store.compare_set("ranks that save", "", own).decode()  # the first value counts
        if workers == "all":
            work(self)
        elif not alone:
            return False
        elif workers == str(self.rank):
            try:
                work(replace(self, rank=0, size=1))
            finally:
                store.set("saved", "")
        else:
            store.wait(["saved"], timedelta(seconds=self.timeout))
        return True

    def run_on_all_ranks(self, work: Callable[[], Value], name: str = "do its part") -> Value:
        """Call the function `work` on every rank; an error on any rank is raised on all ranks.

        There is no time limit for `work`.

        Returns:
            the value that `work` returned on this rank.
        """
        if self.size == 1:
            return work()
        future: Future[Value] = Future()
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        self.barrier(name)
        for error in filter(None, self.gather_objects(future.exception())):
            raise error from future.exception()  # which has this rank's traceback
        return future.result()

    def run_on_rank_zero(self, work: Callable[[], Value], name: str = "do its part") -> Value | None:
        """Call the function `work` on rank 0 and return its result; return None on other ranks.

        All ranks must call run_on_rank_zero; an error on rank 0 is raised on all ranks.
        """
        return self.run_on_all_ranks(work if self.is_main else lambda: None, name)

    def compute_on_rank_zero(self, work: Callable[[], Value], name: str = "do its part") -> Value:
        """Call the function `work` on rank 0, and return its picklable result on all ranks.

        All ranks must call compute_on_rank_zero; an error on rank 0 is raised on all ranks.
        """
        result = self.gather_objects(self.run_on_rank_zero(work, name))[0]
        return result  # pyright: ignore[reportReturnType] (None only if work returned None)

    def sum_gradients(self, parameters: Sequence[nn.Parameter]):
        """Replace each parameter's gradient with the sum of the gradients of all ranks."""
        # Losses are divided by counts over all ranks, such as the token count, so gradients are summed, not averaged.
        if self.size == 1:
            return
        num_ranks = self.sum(*(parameter.grad is not None for parameter in parameters))
        # A gradient that is None on all ranks stays None. With a gradient of 0, AdamW would decay the parameter.
        trained = [parameter for parameter, n in zip(parameters, num_ranks, strict=True) if n]
        gradients = []
        for parameter in trained:
            if parameter.grad is None:  # for example the vision tower on a rank without images
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        if not gradients:  # only the vision tower is trained, and no rank has an image
            return
        flat_gradients = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat_gradients)
        totals = flat_gradients.split([gradient.numel() for gradient in gradients])
        for gradient, total in zip(gradients, totals, strict=True):
            gradient.copy_(total.view_as(gradient))


def setup(num_threads: int | None, timeout: float, sharded: bool, max_wait: float | None = None) -> World:
    """Select this process's device and number of CPU threads, and connect the ranks that torchrun has started.

    Args:
        num_threads: number of CPU threads for this process; None uses default_num_threads.
        timeout: seconds that a rank waits for another rank in a collective operation before the
            run ends with an error. World.barrier has no such limit.
        sharded: True if weights are sharded; then even a single process needs a process group.
        max_wait: seconds that a rank waits for another rank in World.barrier; None means no limit.

    Raises:
        ValueError: there is no GPU for this rank, or the ranks cannot be connected.
    """
    rank = int(os.environ.get("RANK", 0))
    size = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.set_num_threads(num_threads or default_num_threads(local_size))
    device = find_device(local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = None
    if size > 1 or sharded:
        from minivlmrl.distributed.network import attempt_store, connect, ending_with_dead_hosts

        # Gloo may not find the network interface in a container, so a run on one host uses the loopback interface.
        if local_size == size and sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        time_limit = timedelta(seconds=timeout)
        # torch.distributed documents HashStore, but pyright considers the class private
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        if size > 1:
            store = attempt_store(time_limit)
        connect(store, rank, size, device, time_limit)
        if size > 1:
            global barrier_group
            with ending_with_dead_hosts(timeout):
                # pyright does not know that new_group returns a group to all members of the group
                barrier_group = dist.new_group(  # pyright: ignore[reportAssignmentType]
                    backend="gloo", timeout=longest_wait(max_wait)
                )
    return World(rank, size, device, timeout=timeout, max_wait=max_wait, store=store)


def longest_wait(max_wait: float | None) -> timedelta:
    return NO_LIMIT if max_wait is None else min(NO_LIMIT, timedelta(seconds=max_wait))


def monitored_barrier(limit: timedelta, names_all: bool = False):
    """Wait until all ranks have called monitored_barrier.

    Args:
        limit: time limit on rank 0; other ranks wait for rank 0 as long as the option max_wait_hours allows.
        names_all: whether the error lists all ranks that are late, which takes the whole time limit.

    Raises:
        RuntimeError: a rank has ended, or a rank is late by more than the limit. On rank 0, the message names a rank
            that is late, for example "Rank 1 failed to pass monitoredBarrier".
    """
    if barrier_group is not None:
        dist.monitored_barrier(barrier_group, limit, wait_all_ranks=names_all)


def default_num_threads(local_size: int) -> int:
    """Return OMP_NUM_THREADS, or the number of CPU cores divided by the number of processes on the host.

    If torchrun starts several processes, it sets OMP_NUM_THREADS=1 by default, so this value is ignored.
    """
    requested = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if requested.isdecimal() and int(requested) > (local_size > 1):
        return int(requested)
    num_cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        num_cores = len(os.sched_getaffinity(0))
    return max(1, num_cores // local_size)


def shutdown(world: World):
    """Wait for all ranks, and destroy the process group of the run, if there is one."""
    world.barrier("finish the run")
    stop_watchdog()
    if dist.is_initialized():
        dist.barrier()  # destroying the group while another rank still uses it can abort that rank
        if world.ends_group:
            dist.destroy_process_group()
