"""Load row batches, one per rollout, in an order that depends only on the seed."""

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from minivlmrl.data.messages import as_turns
from minivlmrl.data.processor import Processor, images_in
from minivlmrl.data.rows import Dataset, Prompt, Row
from minivlmrl.errors import UserError

MAX_SKIPPED = 100  # stop the run after this many consecutive unreadable rows
# rows to prepare in advance; patches from 64 one-megapixel images take 1.5 GB
MAX_AHEAD = 64
Result = TypeVar("Result")


class Batches(Iterator[list[Row]]):
    """Endless iterator over this rank's batches, one per rollout.

    A batch contains the rows for `options.steps_per_generation` optimizer steps, in step order. Rows are reshuffled
    every epoch. Each row has the sampling seed "seed/stage/batch/position", so the number of ranks does not change
    completions. Threads prepare the next batch.

    Args:
        batches_consumed: batches used before the run was resumed.
    """

    def __init__(self, dataset: Dataset, trainer: Any, batches_consumed: int = 0):
        options = trainer.config.data
        seed = trainer.config.seed
        self.dataset = dataset
        self.world = trainer.world
        self.processor = trainer.processor
        self.skip_unreadable = options.skip_unreadable
        # answer fields whose images are decoded in advance, to find and skip unreadable rows
        self.checked_answers = trainer.answers if self.skip_unreadable else ()
        self.skipped: set[int] = set()  # indices of unreadable rows on this rank
        self.key = f"{seed}/{trainer.stage}"
        self.step_size = trainer.options.prompts_per_step
        batch_size = self.step_size * trainer.options.steps_per_generation
        self.numbers = shuffled(len(dataset), batch_size, seed, skip=batches_consumed * batch_size)
        # one PyTorch thread per worker: more are slower
        self.workers = ThreadPoolExecutor(
            max(1, options.image_workers), initializer=torch.set_num_threads, initargs=(1,)
        )
        self.max_ahead = MAX_AHEAD if options.image_workers else 0
        self.batches_consumed = batches_consumed
        self.next_batch = self.batch_rows(batches_consumed)
        self.ahead: list[Future] = []  # rows of the next batch, in preparation

    def batch_rows(self, number: int) -> list[tuple[int, str]]:
        """Return (dataset index, seed string) for this rank's rows in a batch."""
        numbers = next(self.numbers)
        return [
            (numbers[position], f"{self.key}/{number}/{position}")
            for first in range(0, len(numbers), self.step_size)
            for position in self.world.share(range(first, first + self.step_size))
        ]

    def __next__(self) -> list[Row]:
        batch = self.next_batch
        self.next_batch = self.batch_rows(self.batches_consumed + 1)
        futures = self.ahead + self.submit(batch[len(self.ahead) :])
        self.ahead = self.submit(self.next_batch[: self.max_ahead])
        try:
            rows = self.wait_for(futures)
        except BaseException:  # the process will exit, so do not wait for rows in other threads
            self.workers.shutdown(wait=False, cancel_futures=True)
            raise
        self.world.barrier()  # no timeout: ranks may need minutes to read images
        self.batches_consumed += 1
        return rows

    def submit(self, batch: list[tuple[int, str]]) -> list[Future]:
        return [self.workers.submit(self.prepare_row, index, key) for index, key in batch]

    def prepare_row(self, index: int, key: str) -> tuple[Row, dict[int, ValueError]]:
        """Load a row and compute its prompt, or take the next readable row; also return errors of skipped rows."""
        use = partial(readable_prompt, processor=self.processor, answers=self.checked_answers)
        row, prompt, failures = next_readable(self.dataset, index, use, self.skip_unreadable)
        row.key = key
        row.prepared_prompt = prompt
        return row, failures

    def rows(self, rows: list[tuple[int, str]]) -> list[Row]:
        return self.wait_for(self.submit(rows))

    def wait_for(self, futures: Sequence[Future]) -> list[Row]:
        """Wait for prepared rows, and warn once per unreadable row.

        Worker threads do not warn: they work ahead, and a resumed run would repeat the warning.
        """
        rows = []
        for row, failures in (future.result() for future in futures):
            rows.append(row)
            for number in failures.keys() - self.skipped:
                self.skipped.add(number)
                warnings.warn(f"{failures[number]}; this row is skipped; {len(self.skipped)} so far", stacklevel=2)
        return rows


def readable_prompt(row: Row, processor: Processor, answers: Sequence[str]) -> Prompt:
    """Return a row's prompt; raise UserError if it is invalid, or if an image in prompt or answers is unreadable."""
    for name in answers:
        images_in(as_turns(getattr(row, name) or []))
    return row.prompt(processor)


def next_readable(
    rows: Dataset, index: int, use: Callable[[Row], Result], skips: bool = True
) -> tuple[Row, Result, dict[int, ValueError]]:
    """Find the first readable row, starting at `index`.

    Args:
        use: function such as readable_prompt that raises UserError for an unreadable row.
        skips: whether to skip unreadable rows.
    Returns:
        The row, use(row), and the errors of skipped rows as {row index: error}.
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
    """Yield batches of shuffled row indices, without the first `skip` ones."""
    if size == 0:
        raise UserError("the dataset has no rows to train on")
    generator = torch.Generator().manual_seed(seed)
    passes = (torch.randperm(size, generator=generator).tolist() for _ in itertools.count())
    numbers = itertools.islice(itertools.chain.from_iterable(passes), skip, None)
    while True:
        yield list(itertools.islice(numbers, per_batch))
