"""Show progress on the terminal."""

from collections.abc import Collection, Iterator
from typing import TypeVar

from minivlmrl.run.progress_bar import ProgressBar

Item = TypeVar("Item")


def with_bar(name: str, items: Collection[Item]) -> Iterator[Item]:
    """Yield the items with a progress bar on stderr, if it is a terminal."""
    with ProgressBar(name, len(items), leave=False) as bar:
        for item in items:
            yield item
            bar.update()
