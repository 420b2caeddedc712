"""Predict GRPO's communication, memory and efficiency on many cards. The script needs no card.

python benchmarks/many_cards.py                               # Qwen2.5-VL-3B on 8 cards
python benchmarks/many_cards.py --sizes 3b 7b 72b --cards 8 64 512

FSDP2 shards the model on the meta device, where tensors have shapes but no values, in a fake process group with one
rank per card. A step then runs, and each collective operation that FSDP calls is counted with its bytes. The memory is
estimated by `python -m minivlmrl memory`. Seconds and efficiency follow from the network table and from the assumptions
that the script prints, so they are predictions and not measurements.

A mode is one entry in MODES: the recipe options that change the communication.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from sizes import config_of
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from minivlmrl.config.loading import load_config
from minivlmrl.config.options import RunConfig
from minivlmrl.data.row_summary import RowSize
from minivlmrl.diagnostics.memory import BatchShape, MemoryEstimator, estimate_phases, meta_batch, peak_bytes
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.weights import begin_micro_batch, end_micro_batches, is_sharded, num_shards, reshard
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.trainable import trained_parameters
from minivlmrl.run.setup import choose_sharding

GB = 10**9
RECIPE = Path(__file__).parents[1] / "recipes" / "own_data.yaml"
CARDS_PER_HOST = 8
PROMPTS = 8  # prompts per card and step, each in its own micro-batch
TOKENS = (200, 1024)  # text and image tokens per prompt; the image has 896 x 896 pixels
OPTIONS = [
    "--grpo.micro_batch_size=1", "--grpo.num_generations=8", "--sampling.max_new_tokens=256",
    "--model.activation_checkpointing=true", "--model.dtype=float32", "--model.compute_dtype=bfloat16",
]  # fmt: skip
SHARDED, REPLICAS, ONCE = "--sharding.enabled=true", "--sharding.replicas=HOSTS", "--sharding.once_per_step=true"
LORA = ["--adapter.r=64", "--model.dtype=bfloat16", "--model.compute_dtype=null"]
# {name: options}; HOSTS is replaced by the host count. A mode that needs several hosts is skipped on one host.
MODES = {
    "sharded over all cards": [SHARDED],
    "a replica for each host": [SHARDED, REPLICAS],
    "once per step": [SHARDED, ONCE],
    "once per step, a replica for each host": [SHARDED, REPLICAS, ONCE],
    "LoRA, sharded over all cards": [*LORA, SHARDED],
    "LoRA, not sharded": LORA,
}
# {name: network cards per host}
NETWORKS = {"8 network cards a host": 8, "1 network card a host": 1}
NVLINK = 350  # GB/s that a card sends in a collective operation within a host
NETWORK_CARD = 45  # GB/s that one 400 Gb/s network card reaches
START = 20e-6  # seconds that a collective operation takes in addition to its bytes
HOP = 5e-6  # and seconds for each further card in its ring
STEP_SECONDS = 4.7  # seconds for a 3B step on one card without communication
STEP_PARAMETERS = 3_754_622_976  # parameter count to which STEP_SECONDS belongs
HIDDEN = 0.6  # fraction of a step that hides communication in the best case
ASSUMPTIONS = f"""Assumptions:
- A card has {PROMPTS} prompts in a step, in {PROMPTS} micro-batches, each with an image of 896 x 896 pixels and 8 \
completions of 256 tokens.
- A card sends {NVLINK} GB/s within its host (NVLink). A network card sends {NETWORK_CARD} GB/s (400 Gb/s).
- A collective operation takes {START * 1e6:g} microseconds, {HOP * 1e6:g} more for each further card of its ring, and \
the time for its bytes on the slowest link.
- A step of 3B takes {STEP_SECONDS} s without communication, scaled from phases that one H200 measured. Other sizes take
  as many seconds more as they have parameters more, and LoRA takes as long as full weights.
- The first efficiency hides no communication behind computation. The second hides it behind {HIDDEN:.0%} of a step.
- All cards have equally many tokens. Uneven completions make training wait, which is not in these numbers.
"""


class CollectiveCounter(TorchDispatchMode):
    """Count the collective operations on weights and gradients, and their full tensors' bytes."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()
        self.bytes = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kind, full = collective(function, args)
        # token counts are int64, and metrics are float64, see World.sum; FSDP gathers a unit whose weights have two
        # dtypes as uint8
        if full is not None and full.dtype in (torch.float32, torch.bfloat16, torch.uint8):
            self.calls[kind] += 1
            self.bytes[kind] += full.nbytes
        return function(*args, **(kwargs or {}))


def collective(function, args: tuple) -> tuple[str, Tensor | None]:
    """Return a collective operation's kind and its full tensor; None for other operations."""
    match str(function):
        case "c10d._allgather_base_.default":
            return "gathered", args[0]
        case "c10d._reduce_scatter_base_.default":
            return "reduced", args[1]
        case "c10d.allreduce_.default":
            return "all-reduced", args[0][0]
    return "", None


@dataclass
class Communication:
    """A step's collective operations: {kind: number}, and {kind: bytes in the full tensors}."""

    calls: Counter
    bytes: Counter


def recipe(cards: int, mode: list[str]) -> RunConfig:
    """Return a mode's recipe for a given card count."""
    hosts = max(1, cards // CARDS_PER_HOST)
    options = [option.replace("HOSTS", str(hosts)) for option in mode]
    return load_config(RECIPE, [*OPTIONS, f"--grpo.prompts_per_step={PROMPTS * cards}", *options])


@contextmanager
def pretend_ranks(number: int) -> Iterator[None]:
    """Run a block in a process group in which only this process exists, and whose operations do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=number)
    try:
        yield
    finally:
        dist.destroy_process_group()


class MetaStream(torch.cpu.Stream):
    """A stream for the meta device, with events as FSDP2 expects them from every device except the CPU."""

    def record_event(self, event=None):
        return torch.cpu.Event()


def fsdp_on_meta():
    """Return patches with which FSDP2 computes on the meta device, which has no streams."""
    streams = SimpleNamespace(**vars(torch.cpu) | {"Stream": MetaStream})
    return (
        mock.patch.object(torch, "meta", streams, create=True),
        mock.patch.object(_fully_shard, "_get_device_from_mesh", lambda mesh: torch.device("meta")),
        mock.patch.object(_fsdp_param_group.FSDPParamGroup, "_validate_no_meta_params", lambda group: None),
    )


def count_step(run: RunConfig, estimator: MemoryEstimator, cards: int) -> Communication:
    """Count the collective operations in a step's micro-batches, and in gathering weights for a rollout.

    The first, one middle and the last micro-batch are run, because all middle micro-batches communicate equally.
    """
    streams, device, check = fsdp_on_meta()
    with pretend_ranks(cards), streams, device, check:
        model = estimator.build(run, "grpo")
        world = World(0, cards, torch.device("meta"))
        sharding = choose_sharding(run, world)
        if sharding:
            sharding.shard(model)
        shape = BatchShape(1, 2, 8, 4, 2)  # the communication does not depend on the token count
        batch = meta_batch(estimator.config, shape, torch.bfloat16)
        run_micro_batch(model, batch, PROMPTS - 1, world)  # because a run's first step gathers some weights once more
        total = Communication(Counter(), Counter())
        for index, times in ((0, 1), (1, PROMPTS - 2), (PROMPTS - 1, 1)):
            with CollectiveCounter() as counter:
                run_micro_batch(model, batch, index, world)
            add(total, counter, times)
        if sharding and run.rollout.gather_weights:
            reshard(model)
            with CollectiveCounter() as counter:
                sharding.gather(model)
            add(total, counter, 1)
    return total


def run_micro_batch(model: VisionLanguageModel, batch, index: int, world: World):
    """Run one micro-batch's forward and backward pass, as run.loop.optimizer_step does."""
    is_last = index + 1 == PROMPTS
    begin_micro_batch(model, is_last)
    logps, _ = per_token_logps(model, batch)
    logps.sum().backward()
    if is_last:
        end_micro_batches(model)
        if not is_sharded(model):
            world.sum_gradients(trained_parameters(model))


def add(total: Communication, counter: CollectiveCounter, times: int):
    """Add the operations that a counter has counted, `times` times."""
    for kind, number in counter.calls.items():
        total.calls[kind] += times * number
        total.bytes[kind] += times * counter.bytes[kind]


def seconds(communication: Communication, cards: int, shards: int, network_cards: int) -> float:
    """Return the seconds that a step's collective operations take, one after the other.

    Weights are gathered and gradients are reduced over `shards` cards, each of which sends (shards - 1) / shards of the
    tensor. Over hosts, all network cards in a host work for the one ring. Gradients are all-reduced over the replicas:
    each card does so for its own shard. Cards that hold different shards in the same host share its network cards.
    """
    replicas = cards // shards
    between_hosts = network_cards * NETWORK_CARD
    speed = NVLINK if shards <= CARDS_PER_HOST else min(NVLINK, between_hosts)
    calls = communication.calls
    sent = (communication.bytes["gathered"] + communication.bytes["reduced"]) * (shards - 1) / shards
    result = sent / speed / GB + (calls["gathered"] + calls["reduced"]) * (START + HOP * (shards - 1))
    if replicas > 1:
        rings = min(shards, CARDS_PER_HOST)
        speed = NVLINK if cards <= CARDS_PER_HOST else min(NVLINK, between_hosts / rings)
        sent = 2 * communication.bytes["all-reduced"] * (replicas - 1) / replicas
        result += sent / speed / GB + calls["all-reduced"] * (START + HOP * (replicas - 1))
    return result


def efficiency(step: float, communication: float) -> tuple[float, float]:
    """Return the fractions of linear speed if no communication is hidden, and if HIDDEN of a step hides it."""
    return step / (step + communication), step / (step + max(0.0, communication - HIDDEN * step))


def predict(size: str, cards: int, name: str) -> dict:
    """Return a mode's predictions for one model size and card count."""
    run = recipe(cards, MODES[name])
    # a 72B model's gathered weights do not fit a card, so its rollout gathers one layer at a time, see
    # docs/many_gpus.md
    run.rollout.gather_weights = size != "72b"
    estimator = MemoryEstimator(config_of(size))
    communication = count_step(run, estimator, cards)
    phases = estimate_phases(run, "grpo", estimator, cards, [RowSize(*TOKENS)], held_out=())
    step = STEP_SECONDS * estimator.parameters / STEP_PARAMETERS
    shards = num_shards(run.sharding, cards)
    networks = NETWORKS if cards > CARDS_PER_HOST else {"NVLink": 0}
    times = {network: seconds(communication, cards, shards, count) for network, count in networks.items()}
    return {
        "size": size, "cards": cards, "mode": name, "memory": peak_bytes(phases), "step": step,
        "bytes": communication.bytes, "calls": sum(communication.calls.values()), "seconds": times,
        "efficiency": {network: efficiency(step, value) for network, value in times.items()},
    }  # fmt: skip


def lines_of(row: dict) -> list[str]:
    """Return the table rows for one prediction, one row for each network."""
    moved = [f"{row['bytes'][kind] / GB:.0f}" for kind in ("gathered", "reduced", "all-reduced")]
    first = [row["size"], str(row["cards"]), row["mode"], f"{row['memory'] / GB:.1f}", *moved, f"{row['calls']:,}"]
    lines = []
    for network, value in row["seconds"].items():
        low, high = row["efficiency"][network]
        cells = [*first, network, f"{value:.2f} of {row['step'] + value:.1f}", f"{low:.0%} to {high:.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


HEADER = """| model | cards | mode | GB a card | GB gathered | GB reduced | GB all-reduced | collectives | network \
| seconds of communication of a step | efficiency |
|---|---|---|---|---|---|---|---|---|---|---|"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=("toy", "3b", "7b", "72b"), default=["3b"])
    parser.add_argument("--cards", nargs="+", type=int, default=[8])
    parser.add_argument("--json", type=Path, help="write the numbers here")
    o = parser.parse_args()
    begin = time.perf_counter()
    print(f"{ASSUMPTIONS}\n{HEADER}", flush=True)
    rows = []
    for size in o.sizes:
        for cards in o.cards:
            names = [name for name, mode in MODES.items() if cards > CARDS_PER_HOST or "HOSTS" not in "".join(mode)]
            for name in names:
                rows.append(predict(size, cards, name))
                print("\n".join(lines_of(rows[-1])), flush=True)
    print(f"\n{time.perf_counter() - begin:.0f} s")
    if o.json:
        o.json.write_text(json.dumps(rows) + "\n")


if __name__ == "__main__":
    main()
