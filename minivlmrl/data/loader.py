"""Load row batches, one per rollout, in an order that depends only on the seed."""

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import torch

from minivlmrl.data.messages import as_turns
from minivlmrl.data.processor import Processor, images_in
from minivlmrl.data.rows import Dataset, Prompt, Row
from minivlmrl.errors import UserError

MAX_SKIPPED = 100  # end the run after this many consecutive unreadable rows
# rows to prepare in advance; patches from 64 one-megapixel images take 1.5 GB
MAX_AHEAD = 64
Result = TypeVar("Result")


class Batches(Iterator[list[Row]]):
    """Endless iterator over this rank's batches, one per rollout.

    A batch has rows for `options.steps_per_rollout` optimizer steps, sorted by step. Rows are shuffled for every pass
    over the dataset. Their random numbers have the seed "seed/stage/batch/position", so completions are the same on any
    number of ranks. Threads prepare the next batch.

    Args:
        batches_consumed: batches used before a resume.
    """

    def __init__(self, dataset: Dataset, trainer: Any, batches_consumed: int = 0):
        options = trainer.config.data
        seed = trainer.config.seed
        self.dataset = dataset
        self.world = trainer.world
        self.processor = trainer.processor
        self.skip_unreadable = options.skip_unreadable
        # Row fields whose images are decoded early, to skip unreadable rows
        self.checked_answers = trainer.answers if self.skip_unreadable else ()
        self.skipped: set[int] = set()  # this rank's unreadable rows, by index
        self.key = f"{seed}/{trainer.stage}"
        self.step_size = trainer.options.prompts_per_step
        batch_size = self.step_size * trainer.options.steps_per_rollout
        self.numbers = shuffled(len(dataset), batch_size, seed, skip=batches_consumed * batch_size)
        # one PyTorch thread per worker, because more would slow workers down
        num_workers = max(1, options.image_workers)
        self.workers = ThreadPoolExecutor(num_workers, initializer=torch.set_num_threads, initargs=(1,))
        self.max_ahead = MAX_AHEAD if options.image_workers else 0
        self.batches_consumed = batches_consumed
        self.next_batch = self.batch_rows(batches_consumed)
        self.ahead: list[Future] = []  # first rows of the next batch

    def batch_rows(self, number: int) -> list[tuple[int, str]]:
        """Return (dataset index, random seed text) for this rank's rows of a batch."""
        numbers = next(self.numbers)
        rows = []
        for first in range(0, len(numbers), self.step_size):
            for position in self.world.share(range(first, first + self.step_size)):
                rows.append((numbers[position], f"{self.key}/{number}/{position}"))
        return rows

    def __next__(self) -> list[Row]:
        batch = self.next_batch
        self.next_batch = self.batch_rows(self.batches_consumed + 1)
        futures = self.ahead + self.submit(batch[len(self.ahead) :])
        self.ahead = self.submit(self.next_batch[: self.max_ahead])
        try:
            rows = self.wait_for(futures)
        except BaseException:  # the process ends, so do not wait for other rows
            self.workers.shutdown(wait=False, cancel_futures=True)
            raise
        self.world.barrier("read images")  # may take longer than the run's timeout
        self.batches_consumed += 1
        return rows

    def submit(self, batch: list[tuple[int, str]]) -> list[Future]:
        return [self.workers.submit(self.prepare_row, index, key) for index, key in batch]

    def prepare_row(self, index: int, key: str) -> tuple[Row, dict[int, ValueError]]:
        """Load a row, or the next readable one, with its prompt and the errors of skipped rows."""

        def use(row: Row) -> Prompt:
            return readable_prompt(row, self.processor, self.checked_answers)

        row, prompt, failures = next_readable(self.dataset, index, use, self.skip_unreadable)
        row.key = key
        row.prepared_prompt = prompt
        return row, failures

    def row(self, index: int, key: str = "") -> Row:
        """Load a row with its prompt; `key` seeds its random numbers."""
        return self.rows([(index, key)])[0]

    def rows(self, rows: list[tuple[int, str]]) -> list[Row]:
        return self.wait_for(self.submit(rows))

    def wait_for(self, futures: Sequence[Future]) -> list[Row]:
        """Return prepared rows, and warn once per unreadable row."""
        rows = []
        for row, failures in (future.result() for future in futures):
            rows.append(row)
            for number in failures.keys() - self.skipped:
                self.skipped.add(number)
                warning = f"{failures[number]}; this row is skipped; {len(self.skipped)} so far"
                warnings.warn(warning, stacklevel=2)
        return rows


def readable_prompt(row: Row, processor: Processor, answers: Sequence[str]) -> Prompt:
    """Compute a row's prompt, and check that images in its answers can be decoded.

    Args:
        answers: Row fields with answers to train on.
    Raises:
        UserError: invalid prompt or unreadable image.
    """
    for name in answers:
        images_in(as_turns(getattr(row, name) or []))
    return row.prompt(processor)


def next_readable(
    rows: Dataset, index: int, use: Callable[[Row], Result], skips: bool = True
) -> tuple[Row, Result, dict[int, ValueError]]:
    """Return the row at `index`, or the next readable one.

    Args:
        use: raises UserError for an unreadable row, for example readable_prompt.
        skips: if False, raise the first unreadable row's error.
    Returns:
        Row, result of `use`, and {index of an unreadable row: error}.
    """
    failures = {}
    for distance in range(MAX_SKIPPED):
        number = (index + distance) % len(rows)
        try:
            row = replace(rows[number], index=number)
            return row, use(row), failures
        except ValueError as error:
            if not skips:
                raise
            failures[number] = error
    raise UserError(
        f"The run ends, because {MAX_SKIPPED} consecutive rows are unreadable, and data.skip_unreadable does not skip "
        f"that many rows. Correct the rows. The last error was: {list(failures.values())[-1]}"
    )


def shuffled(size: int, per_batch: int, seed: int, skip: int = 0) -> Iterator[list[int]]:
    """Yield lists of shuffled row indices, without those used before a resume."""
    if size == 0:
        raise UserError("the dataset has no rows to train on")
    generator = torch.Generator().manual_seed(seed)
    passes = (torch.randperm(size, generator=generator).tolist() for _ in itertools.count())
    numbers = itertools.islice(itertools.chain.from_iterable(passes), skip, None)
    while True:
        yield list(itertools.islice(numbers, per_batch))
