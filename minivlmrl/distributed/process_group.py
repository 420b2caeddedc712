"""The processes of a run: which one this is, its share of the work, and what all ranks add up."""

import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

Value = TypeVar("Value")


@dataclass
class World:
    """The processes of this run, as torchrun started them; World() is one process on the CPU."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    # called in long work between states; StopSignals.stop_if_preempted ends it
    stop_if_preempted: Callable[[], None] = lambda: None
    ends_group: bool = True  # False: an engine that has joined the process group ends it

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[Value]) -> Sequence[Value]:
        """Take this rank's part of a sequence that all hold: in order, of nearly equal length."""
        begin = len(items) * self.rank // self.size
        end = len(items) * (self.rank + 1) // self.size
        return items[begin:end]

    def shard_evenly(self, items: Sequence[Value]) -> tuple[list[Value], int]:
        """Take every size-th item, so that all ranks have equally many for a sharded model.

        Returns them, and how many come before the one, if any, that another rank has too.
        """
        share = items[self.rank :: self.size]
        missing = math.ceil(len(items) / self.size) - len(share)
        return [*share, *items[:missing]], len(share)

    def sum(self, *values: float) -> list[float]:
        """Add up each value over all ranks."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)  # on the host: nobody waits for a GPU
        dist.all_reduce(total)
        return total.tolist()

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Join the tensors of all ranks, in rank order: (n, ...) -> (n * size, ...) everywhere."""
        if self.size == 1:
            return tensor
        joined = tensor.new_empty(self.size * len(tensor), *tensor.shape[1:])
        dist.all_gather_into_tensor(joined, tensor.contiguous())
        return joined

    def local(self, tensor: Tensor) -> Tensor:
        """Undo all_gather: this rank's (n, ...) rows of a (n * size, ...) tensor."""
        return tensor.unflatten(0, (self.size, -1))[self.rank]

    def gather_objects(self, value: Value) -> list[Value]:
        """Collect one small Python value of every rank, in rank order."""
        if self.size == 1:
            return [value]
        values = [value] * self.size  # each is replaced
        dist.all_gather_object(values, value)
        return values

    def run_on_all_ranks(self, work: Callable[[], Value]) -> Value:
        """Call work on every rank, longer than `timeout` if need be; all raise the error of one.

        Returns what this rank's work has returned.
        """
        if self.size == 1:
            return work()
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(work)
            # ranks that have finished hear of those that still work
            while self.sum(not future.done())[0]:
                wait([future], 0.1)
        for error in filter(None, self.gather_objects(future.exception())):
            raise error
        return future.result()

    def run_on_rank_zero(self, work: Callable[[], Value]) -> Value | None:
        """Call work on the first rank alone, see run_on_all_ranks; other ranks return None."""
        return self.run_on_all_ranks(work if self.is_main else lambda: None)

    def barrier(self):
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()

    def sum_gradients(self, parameters: Sequence[nn.Parameter]):
        """Add up the gradients of all ranks. No mean: each loss is divided by the global count."""
        if self.size == 1:
            return
        num_ranks = self.sum(*(parameter.grad is not None for parameter in parameters))
        # a parameter without a gradient on every rank keeps None, as in a single process
        trained = [parameter for parameter, n in zip(parameters, num_ranks, strict=True) if n]
        gradients = []
        for parameter in trained:
            if parameter.grad is None:  # a rank without images still takes part
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        flat_gradients = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat_gradients)
        totals = flat_gradients.split([gradient.numel() for gradient in gradients])
        for gradient, total in zip(gradients, totals, strict=True):
            gradient.copy_(total.view_as(gradient))


def setup(num_threads: int | None, timeout: float, sharded: bool) -> World:
    """Join the process group of torchrun, if any, and choose device, attention and CPU threads.

    Args:
        num_threads: of this process. None: its share of the cores; torchrun sets 1 for several.
        timeout: seconds that a rank waits for another before the run ends with an error.
        sharded: weights are sharded: a single process needs a group too.
    """
    rank = int(os.environ.get("RANK", 0))
    size = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    num_cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        num_cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(num_threads or max(1, num_cores // local_size))
    device = find_device(local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # cuDNN's attention may generate wrongly with fewer than 8 key heads (pytorch issue 193893)
    torch.backends.cuda.enable_cudnn_sdp(False)
    if size > 1 or sharded:
        # numbers, objects and offloaded parts go by gloo, which looks for the host's name where it
        # is not told a network: a container may have none
        if local_size == size and sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        time_limit = timedelta(seconds=timeout)
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]  # it is documented
        if size > 1:
            store = attempt_store(time_limit)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=time_limit
        )
    return World(rank, size, device)


def find_device(local_rank: int = 0) -> torch.device:
    """Choose the GPU of a rank, or the CPU if there is none (ValueError: CUDA cannot use it)."""
    if torch.cuda.is_available():
        num_gpus = torch.cuda.device_count()
        if local_rank >= num_gpus:
            raise ValueError(
                f"local rank {local_rank} has no GPU, {num_gpus} are visible: "
                f"start at most {num_gpus} (--nproc_per_node), or show more (CUDA_VISIBLE_DEVICES)"
            )
        return torch.device("cuda", local_rank)
    if torch.backends.cuda.is_built() and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        try:
            torch.cuda.init()
        except RuntimeError as error:
            # then there is nothing to miss; a fork asks nobody, and its parent found no GPU
            if not re.search("no NVIDIA driver|No CUDA GPUs|in forked subprocess", str(error)):
                raise ValueError(
                    f"CUDA cannot use this machine's GPU ({str(error).splitlines()[0]}): "
                    "mend it, or train on the CPU with CUDA_VISIBLE_DEVICES=-1"
                ) from error
    return torch.device("cpu")


def attempt_store(limit: timedelta) -> Store:
    """Make the store of the ranks' addresses, of each attempt of --max-restarts its own.

    torchrun (2.13) keeps one over all attempts, in which a restarted rank would find the address of
    a dead one (pytorch issue 135712). On several hosts not all know it, see docs/many_gpus.md.
    """
    store, _, _ = next(rendezvous("env://", timeout=limit))
    one_host = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if one_host else "0"
    return PrefixStore(attempt, store)


def shutdown(world: World):
    """Leave the process group, if there is one, all ranks together."""
    if dist.is_initialized():
        dist.barrier()  # a rank that leaves while another still works can abort
        if world.ends_group:
            dist.destroy_process_group()
