"""Show a progress bar on stderr, if it is a terminal."""

from collections.abc import Collection, Iterator
from typing import TypeVar

from minivlmrl.run.progress_bar import ProgressBar

Item = TypeVar("Item")


def with_bar(name: str, items: Collection[Item]) -> Iterator[Item]:
    with ProgressBar(name, len(items), leave=False) as bar:
        for item in items:
            yield item
            bar.update()
