"""Train a stage on 1, 2 and 4 local processes with the same rows, for test_process_group.py.

All cases for a world size run in one launch, which forks the test's single-threaded process.
"""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import PIL.Image
import pytest
import torch

from minivlmrl.config.loading import load_config
from minivlmrl.config.options import DataOptions
from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.loader import Batches
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Row
from minivlmrl.distributed import process_group
from minivlmrl.distributed.weights import is_sharded, reshard
from minivlmrl.extras.agents import tool_sampler
from minivlmrl.rewards.registry import REWARDS
from minivlmrl.run import loop, setup, state_files
from minivlmrl.run.optimizer import build_optimizer
from minivlmrl.tasks import shapes
from minivlmrl.trainers import registry
from tests.helpers.children import fork_processes
from tests.helpers.talk import IMAGE_PART, text, user

SECONDS = 300  # collective timeout, long enough for a busy machine; a deadlock fails the test
ROWS, PROMPTS_PER_STEP = 16, 4
ONE = process_group.World()
SHARDS_BYTES = torch.__version__ >= "2.13"  # whether torch can shard 4-bit weights, uint8 tensors


def shards_bytes(*values, marks=()):
    """Return a parametrize case, skipped if torch cannot shard 4-bit weights."""
    unless = pytest.mark.skipif(not SHARDS_BYTES, reason="torch before 2.13 cannot shard integer weights")
    return pytest.param(*values, marks=[unless, *marks])


class Uneven:
    """Rows with very different sizes, so that ranks get tensors with different shapes.

    Images have 28 x 28 to 168 x 140 pixels, only in the rows `with_image`; answers have 1 to 40 words.
    """

    def __init__(self, with_image: set[int] = frozenset(range(ROWS))):
        self.with_image = with_image

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        words = " it is" * (1 + 7 * index % 20)
        images = []
        if index in self.with_image:
            size = (28 * (1 + index % 6), 28 * (1 + index % 5))
            images = [PIL.Image.linear_gradient("L").resize(size).rotate(17 * index).convert("RGB")]
        content = [IMAGE_PART] * len(images) + [text(f"What is it?{words[: index % 7]}")]
        return Row(
            [user(content)], images, {"margin": 0.1 * index, "solution": "red square"},
            completion="a" + words, chosen=words + " a", rejected="no" + " no" * (40 - 2 * index),
        )  # fmt: skip


def sharing(prompts_per_step: int, world: process_group.World, stage: str = "sft") -> SimpleNamespace:
    """Return an object with the trainer attributes that Batches reads."""
    options = SimpleNamespace(prompts_per_step=prompts_per_step, steps_per_generation=1)
    return SimpleNamespace(
        stage=stage, options=options, config=SimpleNamespace(seed=0, data=DataOptions()), world=world,
        processor=Processor(shapes.tokenizer(), ImageProcessor()), answers=(),
    )  # fmt: skip


def uneven(stage: str) -> Uneven:
    """Return rows with images in step 1 (all rows), step 3 (last row) and step 4 (first row)."""
    draws = Batches(Uneven(), sharing(PROMPTS_PER_STEP, ONE, stage))
    steps = [[row.index for row in next(draws)] for _ in range(4)]
    return Uneven({*steps[0], steps[2][-1], steps[3][0]})


@dataclass
class Result:
    """Results of a stage, equal on all ranks except for `reference`."""

    lines: list[dict] = field(default_factory=list)  # metrics per step
    weights: dict = field(default_factory=dict)  # full weights after the last step
    evaluation: dict = field(default_factory=dict)  # metrics on held-out rows
    texts: list[tuple[str, list[str]]] = field(default_factory=list)  # (row key, completions) from all rollouts
    reference: list = field(default_factory=list)  # this rank's shards of the reference model


class Eye:
    """Environment whose tool `look` returns a corner of the row's image, or a text without an image."""

    max_tool_calls = 2

    def reset(self, images, **columns):
        self.images = images

    def look(self):
        return self.images[0].crop((0, 0, 28, 20)) if self.images else "dark"


def eager(text, tools, ended):
    """Return a tool call for any text with at least 3 characters: a random model writes no valid calls."""
    return [("look", "")] if len(text) > 2 and not ended else []


def trainer_on_rank(folder: Path, overrides: list[str], world: process_group.World):
    overrides = [f"--output_dir={folder / 'out'}", *(text.replace("FOLDER", str(folder)) for text in overrides)]
    config = load_config(folder / "recipe.yaml", overrides)
    [stage] = config.stage_names
    model, processor = setup.build_model(config, world)
    return registry.find_trainer(stage, config)(config, model, processor, world)


def stage_on_ranks(folder: Path, overrides: list[str], world: process_group.World) -> Result:
    trainer = trainer_on_rank(folder, overrides, world)
    config, stage = trainer.config, trainer.stage
    assert is_sharded(trainer.trained) == config.uses_fsdp
    result = Result()
    settings = getattr(config, stage)
    if hasattr(trainer, "generate_rollout"):
        record(trainer, result)
    optimizer = build_optimizer(trainer.trained, settings, config.optimizer)
    batches = Batches(uneven(stage), trainer)
    held_out = [Uneven()[i] for i in range(6)]
    held_out[1].completion = held_out[1].rejected = None  # five rows have answers, so one of two ranks repeats a row
    held_out[4].rejected = "no"  # shorter, and so more likely than the chosen answer
    steps = trainer.steps(batches)
    for number in range(settings.max_steps):
        result.lines.append(loop.optimizer_step(trainer, next(steps), optimizer, number))
    result.evaluation = trainer.evaluate(held_out)
    reshard(trainer.trained)
    for name, parameter in trainer.trained.named_parameters():
        weight = parameter.full_tensor() if config.uses_fsdp else parameter
        result.weights[name] = weight.detach().clone()
    if trainer.reference is not None:
        result.reference = [state_files.local_rows(p)[0].clone() for p in trainer.reference.model.parameters()]
    return result


def record(trainer, result):
    generate_rollout = trainer.generate_rollout

    def spy(rows):
        made = generate_rollout(rows)
        texts = [[trainer.processor.decode(sample.completion.ids) for sample in group] for group in made.groups]
        keys = [group[0].row.key for group in made.groups]
        parts = trainer.world.gather_objects(list(zip(keys, texts, strict=True)))
        result.texts += sorted(pair for part in parts for pair in part)
        return made

    trainer.generate_rollout = spy


def launch(size: int, folder: Path, cases: dict[str, list[str]], function=stage_on_ranks) -> list[dict]:
    """Run all cases on `size` ranks; return {case: result} per rank."""

    def work(rank):
        REWARDS["letters"], tool_sampler.find_calls = "tests.helpers.stages:letters", eager
        tool_sampler.ToolEpisode.closes_a_call = lambda self, searched_from: True  # search for calls after every token
        Processor.stop_token_ids = property(lambda self: tuple(range(7, len(self.tokenizer), 8)))
        world = process_group.setup(1, SECONDS, sharded=True)
        results = {name: function(folder, overrides, world) for name, overrides in cases.items()}
        torch.save(results, folder / f"{size}_{rank}.pt")
        world.barrier()

    assert fork_processes(size, work) == [0] * size, "see the tracebacks of the ranks above"
    return [torch.load(folder / f"{size}_{rank}.pt", weights_only=False) for rank in range(size)]
