"""Stages on several processes of this machine: what each makes of the same rows on 1, 2 and 4 ranks, see test_ranks.py.

All cases of a world size run in one launch. Processes are forked from a server that has imported torch once.
"""

import contextlib
import multiprocessing
import os
import socket
import time
import traceback
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import PIL.Image
import torch

from minivlmrl import train
from minivlmrl.rewards import REWARDS
from minivlmrl.rows import Processor, Row
from minivlmrl.run import evaluate as rollout
from minivlmrl.run.batches import shuffled
from minivlmrl.run.config import load_config
from minivlmrl.run.optimizer import build_optimizer
from minivlmrl.scale import ranks as distributed
from minivlmrl.scale.sharding import is_sharded, reshard
from minivlmrl.tasks import shapes

SECONDS = 60  # most that a collective may take, so that a deadlock is a failure
ROWS, PROMPTS_PER_STEP = 12, 3


class Uneven:
    """Rows that no two ranks have alike: images from 28 x 28 to 168 x 140 pixels in all rows of the first step, in none
    of the second, in the last row of the third, the first of the fourth; answers of 1 to 40 words."""

    def __init__(self):
        draws = shuffled(ROWS, PROMPTS_PER_STEP, seed=0)
        steps = [next(draws) for _ in range(4)]
        self.with_image = {*steps[0], steps[2][-1], steps[3][0]}

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        words = " it is" * (1 + 7 * index % 20)
        images = []
        if index in self.with_image:
            size = (28 * (1 + index % 6), 28 * (1 + index % 5))
            images = [PIL.Image.linear_gradient("L").resize(size).rotate(17 * index).convert("RGB")]
        content = [{"type": "image"}] * len(images) + [{"type": "text", "text": f"What is it?{words[: index % 7]}"}]
        return Row(
            [{"role": "user", "content": content}], images, {"margin": 0.1 * index, "solution": "red square"},
            completion="a" + words, chosen=words + " a", rejected="no" + " no" * (40 - 3 * index),
        )  # fmt: skip


@dataclass
class Result:
    """What is the same on all ranks."""

    lines: list[dict] = field(default_factory=list)  # figures of each step
    weights: dict = field(default_factory=dict)  # whole, after the last step
    texts: list[str] = field(default_factory=list)  # online: what was drawn, in the order of the places


def letters(completions, **columns):
    return [sum(c.isalpha() for c in completion) / 6 for completion in completions]


def stage_on_ranks(folder: Path, overrides: list[str], world: distributed.World) -> Result:
    """Go through a stage."""
    overrides = [f"--output_dir={folder / 'out'}", *(text.replace("FOLDER", str(folder)) for text in overrides)]
    config = load_config(folder / "recipe.yaml", overrides)
    [stage] = config.stages
    model, processor = train.build_model(config, world)
    algorithm = train.ALGORITHMS[stage](config, model, processor, Uneven(), world)
    assert is_sharded(algorithm.trained) == config.sharding.enabled
    result, settings = Result(), getattr(config, stage)
    if hasattr(algorithm, "sample"):
        record(algorithm, result)
    optimizer = build_optimizer(algorithm.trained, settings)
    algorithm.begin()
    work = algorithm.batches()
    for _ in range(settings.max_steps):
        rate = settings.learning_rate
        result.lines.append(train.optimizer_step(algorithm, next(work), optimizer, rate, settings.max_grad_norm))
    reshard(algorithm.trained)
    for name, parameter in algorithm.trained.named_parameters():
        result.weights[name] = parameter.full_tensor() if config.sharding.enabled else parameter
    result.weights = {name: weight.detach().clone() for name, weight in result.weights.items()}
    return result


def record(algorithm, result):
    sample = algorithm.sample

    def spy(numbers):
        made = sample(numbers)
        size = algorithm.config.num_generations
        groups = {place: made.texts[i * size : (i + 1) * size] for i, place in enumerate(made.places)}
        everyones = {place: texts for part in algorithm.world.gather_objects(groups) for place, texts in part.items()}
        result.texts += [text for place in sorted(everyones) for text in everyones[place]]
        return made

    algorithm.sample = spy


def _rank(rank: int, size: int, port: int, folder: Path, cases: dict[str, list[str]], function):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    REWARDS["letters"] = letters
    rollout.judge = partial(rollout.judge, batch_size=1)  # so that ranks have unequal numbers of batches to judge
    Processor.stop_token_ids = property(lambda self: tuple(range(7, len(self.tokenizer), 8)))
    results = {}
    try:
        world = distributed.setup(1, SECONDS, sharded=True)
        for name, overrides in cases.items():
            results[name] = function(folder, overrides, world)
        torch.save(results, folder / f"{size}_{rank}.pt")
        world.barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)  # as distributed.exit_rank does


def launch(size: int, folder: Path, cases: dict[str, list[str]], function=stage_on_ranks) -> list[dict]:
    """Run cases on `size` ranks; what each rank made of each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["on_ranks"])
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [context.Process(target=_rank, args=(r, size, port, folder, cases, function)) for r in range(size)]
    for process in ranks:
        process.start()
    end = time.monotonic() + SECONDS + 10 * len(cases)
    while any(process.is_alive() for process in ranks) and not any(process.exitcode for process in ranks):
        if time.monotonic() > end:
            break
        ranks[0].join(0.1)
    time.sleep(0.5 if any(process.exitcode for process in ranks) else 0)  # for the others' tracebacks
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    assert codes == [0] * size, f"ranks ended with {codes}; what they said stands above"
    return [torch.load(folder / f"{size}_{rank}.pt", weights_only=False) for rank in range(size)]


assert shapes
