"""Show on the terminal how far a comparison or a search is."""

from collections.abc import Collection, Iterator
from typing import TypeVar

from minivlmrl.run.progress_bar import ProgressBar

Item = TypeVar("Item")


def with_bar(name: str, items: Collection[Item]) -> Iterator[Item]:
    """Yield the items, and show on stderr, if it is a terminal, how many are done."""
    with ProgressBar(name, len(items), leave=False) as bar:
        for item in items:
            yield item
            bar.update()
