"""Define the interface FileRows for datasets from files, and RowSelection, a dataset of selected rows."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from minivlmrl.data.rows import Row

if TYPE_CHECKING:
    from minivlmrl.data.media import Media


class FileRows(Sequence[Row]):
    """A dataset that is read from files, and whose rows can be inspected without decoding images."""

    prompt_hashes: list[int]  # a hash of each row's prompt and of the sizes of the row's files
    unread: list[str]  # columns that no stage and no reward reads

    @abstractmethod
    def describe(self) -> str:
        """Describe in words how many rows the dataset has, and how many images and videos per row."""

    @abstractmethod
    def read(self, index: int) -> "tuple[Row, list[Media]]":
        """Read a row without loading its images and videos, and list their sources in order."""

    @abstractmethod
    def outline(self, index: int) -> Row:
        """Read a row with the sizes of its images and videos, without decoding their pixels."""

    @abstractmethod
    def content(self, index: int) -> str:
        """Return a hash of a row's prompt and of the contents of its image and video files."""


class RowSelection(FileRows):
    """A dataset of rows that were selected from one or more other datasets.

    `picks` lists the selected rows in order, each as (dataset index, row index).
    """

    def __init__(self, parts: Sequence[FileRows], picks: list[tuple[int, int]]):
        self.parts = parts
        self.picks = picks
        if not picks:
            raise ValueError(
                "data: no rows remain in the dataset; check data.train_file, sampling and data.max_prompt_tokens"
            )

    def __len__(self) -> int:
        return len(self.picks)

    def __getitem__(self, index: int) -> Row:
        part, row = self.picks[index]
        return self.parts[part][row]

    def describe(self) -> str:
        total_rows = sum(map(len, self.parts))
        return f"{len(self)} selected out of {total_rows} in {len(self.parts)} file(s)"

    def read(self, index: int) -> "tuple[Row, list[Media]]":
        part, row = self.picks[index]
        return self.parts[part].read(row)

    def outline(self, index: int) -> Row:
        part, row = self.picks[index]
        return self.parts[part].outline(row)

    @property
    def unread(self) -> list[str]:
        return sorted({name for part in self.parts for name in part.unread})

    @property
    def prompt_hashes(self) -> list[int]:
        return [self.parts[part].prompt_hashes[row] for part, row in self.picks]

    def content(self, index: int) -> str:
        part, row = self.picks[index]
        return self.parts[part].content(row)
