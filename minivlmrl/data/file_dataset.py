"""A row of a file or a dataset folder -> Row: prompt, answers, columns, images and videos.

formats.py has the forms of other projects, conversations.py those of a prompt and its answers,
media.py of what is shown. docs/data.md has examples.
"""

import re
from collections import Counter
from os.path import getsize, isfile, normpath
from pathlib import Path
from typing import Annotated

from minivlmrl.config.options import RowOptions
from minivlmrl.config.parsing import did_you_mean, naming, read_value, require
from minivlmrl.data.conversations import PROMPTS, read_conversation
from minivlmrl.data.fetch import fetch_image
from minivlmrl.data.formats import to_columns
from minivlmrl.data.media import Media, check_unread, files_of, load_media, read_media
from minivlmrl.data.media_options import VideoOptions, media_options
from minivlmrl.data.messages import shown_parts_of
from minivlmrl.data.row_files import open_rows
from minivlmrl.data.rows import Row
from minivlmrl.files import digest


class FileDataset:
    """At most `limit` rows of a file or dataset folder; all are checked now and read when used.

    Rows must have the columns `required`; "problem" is a prompt, "completion" an answer. They get
    the columns of `constants` too.
    """

    def __init__(self, path, required=("problem",), limit=None, constants=(), **options):
        self.options = RowOptions(**options)
        self.required = required
        self.source = open_rows(path)
        self.constants = dict(constants)
        self.size = len(self.source) if limit is None else min(limit, len(self.source))
        if not self.size:
            raise ValueError(f"{path}: has no rows")
        self.folder = Path(self.options.image_root or self.source.folder)
        self.counts = Counter()  # (images, videos) of a row -> rows with as many
        self.asked = []  # of each row a hash of its prompt and of the sizes of what that shows
        self.columns = ()
        missing_files = []
        column_names = set()
        for index in range(self.size):
            row, media = self.read(index)
            column_names.update(row.columns)
            missing_files += self._count(row, media)
        if missing_files:
            raise ValueError(
                f"{path}: {len(missing_files)} file(s) that its rows name are not in {self.folder} "
                f"(data.image_root), such as {', '.join(missing_files[:5])}"
            )
        self.columns = sorted(column_names)

    def _count(self, row: Row, media: list[Media]) -> list[str]:
        """Count what a row shows, and hash what it asks; return its files that are missing."""
        answer_images = [part["image"] for part in answer_pictures(row)]
        with naming(row.where):
            files = list(files_of(media + answer_images, str(self.folder)))
            if self.source.is_downloaded:
                check_inside(self.folder, files)
        kinds = [item.kind for item in media]
        self.counts[kinds.count("image"), kinds.count("video")] += 1
        file_sizes = []
        missing_files = []
        for source, path in files:
            is_file = isfile(path)
            file_sizes.append(getsize(path) if is_file else len(source))
            if path and not is_file:
                missing_files.append(f"{source} ({re.sub(r'.*:(?=[0-9]+$)', 'line ', row.where)})")
        self.asked.append(hash(repr((row.messages, file_sizes))))
        return missing_files

    def __len__(self) -> int:
        return self.size

    def read(self, index: int) -> tuple[Row, list[Media]]:
        """Read a row without its images and videos, and list these in order of appearance."""
        columns = self.source[index]
        where = self.source.where(index)
        with naming(where):
            row, media = read_row(columns, self.required, self.options)
        row.where = where
        row.columns = dict.fromkeys(self.columns) | row.columns | self.constants
        return row, media

    def content(self, index: int) -> str:
        """Digest what a row asks and shows, files by what they hold."""
        row, media = self.read(index)
        hashed_parts: list[str | bytes | Path] = [repr(row.messages)]
        for source, path in files_of(media, str(self.folder)):
            hashed_parts.append(Path(path) if path else source)
        return digest(hashed_parts)

    def __getitem__(self, index: int) -> Row:
        row, media = self.read(range(self.size)[index])
        with naming(row.where):
            row.images, row.videos = load_media(media, self.folder)
            for part in answer_pictures(row):
                part["image"] = fetch_image(part["image"].source, self.folder)
        return row


def check_inside(folder: Path, files: list[tuple[str | bytes, str]]):
    """Refuse files of a row (ValueError) that are outside of a folder: somebody else named them."""
    for source, path in files:
        if path and not Path(normpath(path)).is_relative_to(normpath(folder)):
            raise ValueError(
                f"{source!r} is outside of {folder}; a data set by its id names only its own files"
            )


def answer_pictures(row: Row) -> list[dict]:
    """List the parts of a row's answers that show something."""
    parts = []
    for answer in (row.completion, row.chosen, row.rejected):
        if isinstance(answer, list):
            parts += shown_parts_of(answer)
    return parts


def read_row(columns: dict, required, options: RowOptions) -> tuple[Row, list[Media]]:
    """Read one row without its images and videos, and list these in order of appearance."""
    # pandas writes NaN for what is missing
    written = {name: value for name, value in columns.items() if value == value}
    columns = to_columns(written, options.columns)
    _check_columns(columns, required)
    row_media = read_media(columns)
    prompt_template = options.prompt_template
    if "{problem}" not in prompt_template:
        question_columns = [name for name in PROMPTS if columns.get(name) is not None]
        require(
            not question_columns,
            "data.prompt_template",
            prompt_template,
            f"a text with {{problem}} in it, as the row has {question_columns}",
        )
        columns = columns | {"problem": prompt_template}
        prompt_template = "{problem}"
    media = []
    try:
        messages, media, answers = read_conversation(
            columns, row_media, prompt_template, options.system_prompt, media_options(options)
        )
    finally:  # also where the text says <image> and none came
        if not media and not any(row_media.values()):
            check_unread(columns)
    for name in required:
        if name != "problem" and name not in answers and columns.get(name) is None:
            existing_columns = sorted(column for column in written if written[column] is not None)
            raise ValueError(
                f"column {name!r} is missing; the row has {existing_columns}; "
                f"data.columns: {{YOURS: {name}}} renames one"
                f"{did_you_mean(name, existing_columns)}"
            )
    return Row(
        messages,
        [],
        columns,
        completion=answers.get("completion"),
        chosen=answers.get("chosen"),
        rejected=answers.get("rejected"),
    ), media


def _check_columns(columns: dict, required):
    """Refuse columns with names that mean something else, and values that rewards could not use."""
    for name, value in columns.items():
        if value is None:
            continue
        if name in RESERVED:
            require(False, f"column {name!r}", value, RESERVED[name])
        if name in CHECKED and (name != "label" or name in required):
            read_value(CHECKED[name], value, f"column {name!r}", json=True)
        if name == "solution":
            require(str(value).count("<answer>") <= 1, "column 'solution'", value, "one answer")


# what rewards are given besides the columns of their rows, which these names would hide
GIVEN = {
    "prompts",
    "images",
    "row_names",
    "completions",
    "completion_ids",
    "answer_texts",
    "turn_texts",
    "image_sizes",
    "answer_extents",
    "reward_model_scores",
    "row_rewards",
    "environments",
    "extras",
    "trainer_state",
    "log_metric",
    "log_extra",
}
COLUMNS_TOO = {"fps", "min_frames", "max_frames"}  # options of a video, but common names of columns
RESERVED = {  # names that no column may have: why
    **dict.fromkeys(
        GIVEN - {"images"},
        "called otherwise: this is the name of something else that rewards are given; rename it",
    ),
    **dict.fromkeys(
        vars(VideoOptions()).keys() - COLUMNS_TOO,
        'beside its source as an option, {"image": ..., "max_pixels": 200704}, or called otherwise',
    ),
}
Side = Annotated[float, "(0, inf)"]
CHECKED = {  # column: what it must be
    "margin": Annotated[float, "(-inf, inf)"],  # by how much chosen is better
    "ref_chosen_logps": Annotated[float, "(-inf, 0]"],  # of the reference, summed over the answer
    "ref_rejected_logps": Annotated[float, "(-inf, 0]"],
    "answer_extent": tuple[Side, Side],  # width, height
    "label": bool,  # the completion is good
}
