"""Which rows each stage and the evaluation get, and in which order."""

import itertools
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Literal

import torch

from minivlmrl.data.file_dataset import FileDataset, RowOptions
from minivlmrl.data.mix import FileSection, mix, read_mix
from minivlmrl.hub.recipe_values import Code, FilePath, RewardName, require
from minivlmrl.reward_functions.names import columns_of
from minivlmrl.rows import Dataset, Processor, Prompt, Row
from minivlmrl.tasks.task import get_task

MOST_SKIPPED = 100  # rows one after the other that may be unreadable
AHEAD = 64  # rows of the next draw that threads make: 1.5 GB as patches if each has a megapixel
# what an algorithm may ask of its rows, besides a prompt, and the columns of a file that hold it
NEEDS = {"prompts": (), "demonstrations": ("completion",)}
NEEDS |= {"pairs": ("chosen", "rejected"), "labels": ("completion", "label")}


@dataclass
class DataSection(RowOptions):
    """Where rows come from: `task`, an embedded one, or files of your own: docs/data.md."""

    task: Code | None = None  # "shapes" or "file.py:TASK", beside the recipe, maybe with options
    train_file: FilePath | None = None  # problem or prompt, image(s), and what the stages need
    train: list[FileSection] = field(default_factory=list)  # several files instead of one
    files: dict[str, FilePath] = field(default_factory=dict)  # of stages: {sft: rows.jsonl}
    eval_file: FilePath | None = None  # problem or prompt, image(s), solution or chosen, rejected
    max_prompt_tokens: Annotated[int, ">= 1"] | None = None  # leave out longer training rows
    eval_rows: Annotated[int, ">= 1"] = 256  # held-out rows that are evaluated, at most
    eval_blind: bool = False  # on grey pictures and those of other rows too: docs/metrics.md
    min_pixels: int | None = None  # bounds of an image's area; None: as the model's folder says
    max_pixels: int | None = None  # upper bound of the area
    image_workers: Annotated[int, "[0, 64]"] = 2  # threads that prepare prompts; 0: steps wait
    skip_unreadable: bool = False  # leave out training rows whose image is broken, and count them
    template: dict = field(default_factory=dict)  # values for its chat: {enable_thinking: false}
    # of coordinates in answers; None: as the model's family writes them
    box_space: Literal["original", "resized", "thousandths", "unit"] | None = None
    answer: Literal["tags", "whole", "last_line"] = "tags"  # where it is: docs/rewards.md
    # the first is what counts
    eval_rewards: list[RewardName] = field(default_factory=lambda: ["accuracy", "format"])

    def __post_init__(self):
        super().__post_init__()
        template, asked = self.prompt_template, "a text with {problem} in it, the task's question"
        require("{problem}" in template or not self.task, "prompt_template", template, asked)
        require(self.eval_rewards, "eval_rewards", [], "names of rewards; the first is what counts")
        if "reward_model" in self.eval_rewards:
            raise ValueError("eval_rewards: reward_model judges training only; leave it out")


def load_datasets(run, stages: dict, reward_columns=(), eval_columns=("solution",)) -> dict:
    """Open the rows of a run: a dataset for each stage, and "eval" if there are held-out rows.

    Args:
        run: the recipe; rewards of its files are added to its own.
        stages: for each stage what its rows must have, a key of NEEDS.
        reward_columns, eval_columns: what rewards ask of rows answered in training, and held out.
    """
    config, files = run.data, run.data.files
    sources = [name for name in ("task", "train_file", "train") if getattr(config, name)]
    filed = bool(stages) and stages.keys() <= files.keys()
    if len(sources) > 1 or (sources == ["task"] and files) or not (sources or filed):
        ways = "data.task, data.train_file, data.train, or data.files of every stage"
        raise ValueError(f"data: set either {ways}; set are {', '.join(sources) or 'none'}")
    if config.task is not None:
        training, held_out = get_task(config.task).datasets(config, run.seed)
        for stage, needs in stages.items():
            if needs not in training:
                raise ValueError(f"stages: {stage} needs {needs}, data.task {config.task} has none")
        return {**{stage: training[needs] for stage, needs in stages.items()}, "eval": held_out}
    columns = NEEDS | {"prompts": tuple(reward_columns)}
    datasets = {}
    for stage, needs in stages.items():
        datasets[stage] = _training_rows(run, files.get(stage), columns[needs], needs == "prompts")
    if config.eval_file:  # its rows are asked for answers, unless all that is trained on are pairs
        needed = NEEDS["pairs"] if set(stages.values()) == {"pairs"} else eval_columns
        datasets["eval"] = _rows(config, config.eval_file, needed, config.eval_rows)
    return datasets


def _training_rows(run, file: str | None, columns: Sequence[str], judged: bool) -> Dataset:
    """Open the rows of a stage's file, or of the recipe's; several files are one dataset."""
    config = run.data
    path = file or run.data.train_file
    files = config.train if path is None else []
    if path is not None and Path(path).suffix in (".yaml", ".yml"):
        files = read_mix(Path(path))
    if not files:
        return _rows(config, path, columns)
    parts = []
    for section in files:
        if unknown := [name for name in section.rewards if name not in run.rewards]:
            lacks = f"the recipe has no reward {unknown[0]!r}; there are: {', '.join(run.rewards)}"
            raise ValueError(f"data.train: {section.file}: {lacks}")
        constants = {"row_rewards": section.rewards} if section.rewards else {}
        root = section.image_root or config.image_root
        needed = columns
        if section.rewards and judged:
            needed = columns_of(r for r in run.training_rewards if r.name in section.rewards)
        parts.append(_rows(config, section.file, needed, None, constants, image_root=root))
    return mix(parts, files)


def _rows(config: DataSection, path: str, columns, limit=None, constants=(), **changed):
    options = {option.name: getattr(config, option.name) for option in fields(RowOptions)}
    return FileDataset(path, ("problem", *columns), limit, constants, **options | changed)


@dataclass
class MadeRow(Row):
    """A row whose prompt is made already, maybe by another thread."""

    made: Prompt | None = None

    def prompt(self, processor: Processor) -> Prompt:
        return self.made


class Batches(Iterator):
    """Endless draws of this rank's rows: every pass over the dataset has a new order.

    A draw has the prompts of `steps` optimizer steps, one step after the other. Each row gets a key
    that its random draws depend on, "seed/stage/draw/position": any number of ranks does the same.
    `draws` were made before a resume. Threads make the next prompts; errors are raised in a draw.
    """

    def __init__(self, dataset: Dataset, algorithm, draws: int = 0):
        data, size, seed = algorithm.run.data, algorithm.config.prompts_per_step, algorithm.run.seed
        self.dataset, self.world, self.draws = dataset, algorithm.world, draws
        self.key = f"{seed}/{algorithm.stage}"
        self.size = size
        self.processor, self.skip_unreadable = algorithm.processor, data.skip_unreadable
        self.skipped = set()  # numbers of rows that this rank has left out
        rows = size * algorithm.steps_per_rollout
        self.numbers = shuffled(len(dataset), rows, seed, draws * rows)
        # each with one CPU thread: with teams of their own all would wait longer
        one_thread = {"initializer": torch.set_num_threads, "initargs": (1,)}
        self.workers = ThreadPoolExecutor(max(1, data.image_workers), **one_thread)
        self.most = AHEAD if data.image_workers else 0
        self.coming = self.draw(draws)
        self.ahead = []

    def draw(self, number: int) -> list[tuple[int, str]]:
        """Of each row of the next draw: its number in the dataset, and its key."""
        numbers = next(self.numbers)
        size = self.size
        steps = (range(first, first + size) for first in range(0, len(numbers), size))
        positions = [i for step in steps for i in self.world.share(step)]
        return [(numbers[i], f"{self.key}/{number}/{i}") for i in positions]

    def __next__(self) -> list[Row]:
        drawn, self.coming = self.coming, self.draw(self.draws + 1)
        later = drawn[len(self.ahead) :]
        made = self.ahead + [self.workers.submit(self.make, *which) for which in later]
        self.ahead = [self.workers.submit(self.make, *which) for which in self.coming[: self.most]]
        try:
            rows = [self.noted(*future.result()) for future in made]
        except BaseException:  # the process ends: it need not wait for the other images
            self.workers.shutdown(wait=False, cancel_futures=True)
            raise
        self.draws += 1
        return rows

    def make(self, index: int, key: str) -> tuple[Row | None, dict[int, ValueError]]:
        """Make a row's prompt, or the next readable one's; and what was wrong, by number."""
        failures = {}
        for number in (number % len(self.dataset) for number in range(index, index + MOST_SKIPPED)):
            try:
                row = replace(self.dataset[number], index=number, key=key)
                return MadeRow(**vars(row), made=row.prompt(self.processor)), failures
            except ValueError as error:
                if not self.skip_unreadable:
                    raise
                failures[number] = error
        return None, failures

    def noted(self, row: Row | None, failures: dict[int, ValueError]) -> Row:
        """Count and name the rows that were left out for a row (ValueError: there is none)."""
        for number, failure in failures.items():
            if number not in self.skipped:
                self.skipped.add(number)
                warnings.warn(f"{failure}; row left out, {len(self.skipped)} so far", stacklevel=2)
        if row is None:
            before = f"so are the {MOST_SKIPPED - 1} rows before it"
            raise ValueError(f"{failure}; data.skip_unreadable: {before}")
        return row


def shuffled(size: int, per_draw: int, seed: int, skip: int = 0) -> Iterator[list[int]]:
    """Yield lists of per_draw row numbers, every pass in a new order, after the first `skip`."""
    if size == 0:
        raise ValueError("there are no rows to train on")
    generator = torch.Generator().manual_seed(seed)
    passes = (torch.randperm(size, generator=generator).tolist() for _ in itertools.count())
    numbers = itertools.islice(itertools.chain.from_iterable(passes), skip, None)
    while True:
        yield list(itertools.islice(numbers, per_draw))


def check_shares(stage: str, prompts_per_step: int, ranks: int):
    """Refuse a step that the ranks cannot share equally (ValueError)."""
    if over := prompts_per_step % ranks:
        low = prompts_per_step - over
        near = f"{low} or {low + ranks}" if low else ranks
        name = f"{stage}.prompts_per_step is {prompts_per_step}"
        raise ValueError(f"{name}, which {ranks} ranks cannot share equally: take {near}")
