"""Which rows each stage and the evaluation get, and in which order."""

import itertools
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from minivlmrl.config.options import DataOptions, RowOptions
from minivlmrl.config.parsing import did_you_mean, require
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.mixture import mix, read_mix
from minivlmrl.data.rows import Dataset, Processor, Prompt, Row
from minivlmrl.rewards.registry import columns_of, training_rewards
from minivlmrl.tasks.registry import get_task

MAX_SKIPPED = 100  # rows one after the other that may be unreadable
MAX_AHEAD = 64  # rows of the next draw that threads make: 1.5 GB as patches at a megapixel each
# what an algorithm may ask of its rows, besides a prompt, and the columns of a file that hold it
NEEDS = {
    "prompts": (),
    "demonstrations": ("completion",),
    "pairs": ("chosen", "rejected"),
    "labels": ("completion", "label"),
}


def load_datasets(run, stages: dict, reward_columns=(), eval_columns=("solution",)) -> dict:
    """Open the rows of a run: a dataset for each stage, and "eval" if there are held-out rows.

    Args:
        run: the recipe; rewards of its files are added to its own.
        stages: for each stage what its rows must have, a key of NEEDS.
        reward_columns, eval_columns: what rewards ask of rows answered in training, and held out.
    """
    config = run.data
    files = config.files
    sources = [name for name in ("task", "train_file", "train") if getattr(config, name)]
    has_files = bool(stages) and stages.keys() <= files.keys()  # of all stages
    is_clear = len(sources) == 1 or (not sources and has_files)
    if not is_clear or (sources == ["task"] and files):
        raise ValueError(
            "data: set either data.task, data.train_file, data.train, or data.files of every "
            f"stage; set are {', '.join(sources) or 'none'}"
        )
    if config.task is not None:
        return load_task(run, stages)
    columns = NEEDS | {"prompts": tuple(reward_columns)}
    datasets = {}
    for stage, needs in stages.items():
        datasets[stage] = _training_rows(run, files.get(stage), columns[needs], needs == "prompts")
    if (
        config.eval_file and config.eval_rows
    ):  # its rows are asked for answers, unless all that is trained on are pairs
        if set(stages.values()) == {"pairs"}:
            eval_columns = NEEDS["pairs"]
        datasets["eval"] = _rows(config, config.eval_file, eval_columns, config.eval_rows)
    return datasets


def load_task(run, stages: dict[str, str]) -> dict[str, Dataset]:
    """Take the rows of the embedded task that a recipe names."""
    training, held_out = get_task(run.data.task).datasets(run.data, run.seed)
    datasets = {}
    for stage, needs in stages.items():
        if needs not in training:
            raise ValueError(f"stages: {stage} needs {needs}, data.task {run.data.task} has none")
        datasets[stage] = training[needs]
    if run.data.eval_rows:
        datasets["eval"] = held_out
    return datasets


def _training_rows(run, file: str | None, columns: Sequence[str], is_judged: bool) -> Dataset:
    """Open the rows of a stage's file, or of the recipe's; several files are one dataset."""
    config = run.data
    path = file or config.train_file
    sections = config.train if path is None else []
    if path is not None and Path(path).suffix in (".yaml", ".yml"):
        sections = read_mix(Path(path))
    if not sections:
        return _rows(config, path, columns)
    parts = []
    for section in sections:
        for name in section.rewards:
            if name not in run.rewards:
                raise ValueError(
                    f"data.train: {section.file}: the recipe has no reward {name!r}; "
                    f"there are: {', '.join(run.rewards)}{did_you_mean(name, run.rewards)}"
                )
        constants = {"row_rewards": section.rewards} if section.rewards else {}
        needed_columns = columns
        if section.rewards and is_judged:
            rewards = [r for r in training_rewards(run) if r.name in section.rewards]
            needed_columns = columns_of(rewards)
        changed = {}
        for name in ("image_root", "prompt_template"):
            if getattr(section, name) is not None:
                changed[name] = getattr(section, name)
        parts.append(_rows(config, section.file, needed_columns, constants=constants, **changed))
    return mix(parts, sections)


def _rows(config: DataOptions, path: str, columns, limit=None, constants=(), **changed):
    """Open a file of rows with these columns; `changed` are options of RowOptions."""
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
        data = algorithm.run.data
        seed = algorithm.run.seed
        self.dataset = dataset
        self.world = algorithm.world
        self.processor = algorithm.processor
        self.skip_unreadable = data.skip_unreadable
        self.skipped = set()  # numbers of rows that this rank has left out
        self.key = f"{seed}/{algorithm.stage}"
        self.step_size = algorithm.config.prompts_per_step
        draw_size = self.step_size * algorithm.steps_per_rollout
        self.numbers = shuffled(len(dataset), draw_size, seed, skip=draws * draw_size)
        # each with one CPU thread: with teams of their own all would wait longer
        num_workers = max(1, data.image_workers)
        self.workers = ThreadPoolExecutor(
            num_workers, initializer=torch.set_num_threads, initargs=(1,)
        )
        self.max_ahead = MAX_AHEAD if data.image_workers else 0
        self.draws = draws
        self.next_draw = self.draw(draws)
        self.ahead = []  # rows of it that threads make already

    def draw(self, number: int) -> list[tuple[int, str]]:
        """Of each row of the next draw: its number in the dataset, and its key."""
        numbers = next(self.numbers)
        rows = []
        for first in range(0, len(numbers), self.step_size):
            for position in self.world.share(range(first, first + self.step_size)):
                rows.append((numbers[position], f"{self.key}/{number}/{position}"))
        return rows

    def __next__(self) -> list[Row]:
        draw = self.next_draw
        self.next_draw = self.draw(self.draws + 1)
        futures = self.ahead + self.submit(draw[len(self.ahead) :])
        self.ahead = self.submit(self.next_draw[: self.max_ahead])
        try:
            rows = [self.noted(*future.result()) for future in futures]
        except BaseException:  # the process ends: it need not wait for the other images
            self.workers.shutdown(wait=False, cancel_futures=True)
            raise
        self.draws += 1
        return rows

    def submit(self, draw: list[tuple[int, str]]) -> list[Future]:
        """Let threads make the prompts of a part of a draw."""
        return [self.workers.submit(self.make, index, key) for index, key in draw]

    def make(self, index: int, key: str) -> tuple[Row | None, dict[int, ValueError]]:
        """Make a row's prompt, or the next readable one's; and what was wrong, by number."""
        failures = {}
        for distance in range(MAX_SKIPPED):
            number = (index + distance) % len(self.dataset)
            try:
                row = replace(self.dataset[number], index=number, key=key)
                return MadeRow(**vars(row), made=row.prompt(self.processor)), failures
            except ValueError as error:
                if not self.skip_unreadable:
                    raise
                failures[number] = error
        return None, failures

    def row(self, index: int) -> Row:
        """Make a row outside of a draw; without a key, as nothing is drawn for it."""
        return self.noted(*self.make(index, key=""))

    def noted(self, row: Row | None, failures: dict[int, ValueError]) -> Row:
        """Count and name the rows that were left out for a row (ValueError: there is none)."""
        for number, failure in failures.items():
            if number not in self.skipped:
                self.skipped.add(number)
                warnings.warn(f"{failure}; row left out, {len(self.skipped)} so far", stacklevel=2)
        if row is None:
            raise ValueError(
                f"{failure}; data.skip_unreadable: so are the {MAX_SKIPPED - 1} rows before it"
            )
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
    fits = prompts_per_step % ranks == 0
    name = f"{stage}.prompts_per_step"
    require(fits, name, prompts_per_step, f"a multiple of {ranks}, the number of ranks")
