"""Messages, images and videos -> a Prompt, the only form in which a question reaches the model.

Datasets: numbered rows, each a prompt with its images, answers to it, and the columns that rewards may ask for."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import PIL.Image
import torch
from torch import Tensor

from minivlmrl.chat import IMAGE, VIDEO, Control, QwenTemplate, content_parts, part_kind
from minivlmrl.data.conversations import read_conversation
from minivlmrl.data.media import SAMPLING_OPTIONS, Media, check_columns, place_media, read_media
from minivlmrl.data.template import ChatTemplate
from minivlmrl.data.video import Video, VideoProcessor
from minivlmrl.hub.tokenizer import SPECIAL_TOKENS, Tokenizer
from minivlmrl.image import ImageProcessor

ENDS = ("<|im_end|>", "<|endoftext|>")
NO_SIZES = (
    "type",
    "text",
    "image",
    "image_url",
    "video",
    "video_url",
)  # keys of a part that say what, not how large


@dataclass
class Prompt:
    """One question as tensors."""

    input_ids: Tensor  # (P,) int64, image placeholders expanded
    pixel_values: (
        Tensor  # (patches of all its images and videos, in order of appearance, patch_dim) float32
    )
    image_grid_thw: Tensor  # (images and videos, 3) int64: patches in time, height, width
    second_per_grid_ts: Tensor | None = (
        None  # (images and videos,) float32: time step to time step, 0 for an image
    )


@dataclass
class Processor:
    """Tokenizer, chat template and image settings of one checkpoint."""

    tokenizer: Tokenizer
    image_processor: ImageProcessor
    template: QwenTemplate | ChatTemplate = field(default_factory=QwenTemplate)
    add_vision_id: bool = False  # number the images and videos of a prompt: "Picture 1: "
    special: dict[str, int] = field(init=False)  # control token -> id
    carried: dict[str, bytes] = field(
        default_factory=dict, repr=False
    )  # the folder's files that a save keeps, by name

    def __post_init__(self):
        self.special = {
            name: self.tokenizer.token_id(name) for name in SPECIAL_TOKENS
        } | self.tokenizer.special_tokens

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """A completion ends with either: <|im_end|> closes a turn, <|endoftext|> a document."""
        return tuple(self.special[end] for end in ENDS)

    def __call__(
        self,
        messages: list[dict],
        images: Sequence[PIL.Image.Image] = (),
        videos: Sequence[Video] = (),
    ) -> Prompt:
        """Render a conversation up to where the assistant has to answer.

        Args:
            messages: see chat.render. An image or video part may say how large the model is to see it, such as
                {"type": "image", "max_pixels": 200704}: see ImageProcessor and VideoProcessor.
            images, videos: one for each image and video part, in order.
        Raises:
            ValueError: the parts of a kind are not as many as what came with them; see also chat.render, image.py and
                video.py.
        """
        pieces = self.template.render(messages, add_vision_id=self.add_vision_id)
        seen = self._see(messages, images, videos)
        # by identity: text may spell the same
        placeholders = [
            "image" if piece is IMAGE else "video"
            for piece in pieces
            if piece is IMAGE or piece is VIDEO
        ]
        if placeholders != [kind for kind, *_ in seen]:
            raise ValueError(
                f"the chat template shows {placeholders}, the messages have {[kind for kind, *_ in seen]}"
            )
        tokens_of_each = iter([self.image_processor.num_tokens(grid) for _, _, grid, _ in seen])
        ids = []
        for piece in pieces:
            ids += self._encode(piece) * (
                next(tokens_of_each) if piece is IMAGE or piece is VIDEO else 1
            )
        return Prompt(
            torch.tensor(ids),
            torch.cat(
                [
                    torch.zeros(0, self.image_processor.patch_dim),
                    *(pixels for _, pixels, _, _ in seen),
                ]
            ),
            torch.tensor([grid for _, _, grid, _ in seen], dtype=torch.long).view(-1, 3),
            torch.tensor([seconds for *_, seconds in seen], dtype=torch.float32),
        )

    def _see(
        self, messages, images, videos
    ) -> list[tuple[str, Tensor, tuple[int, int, int], float]]:
        """For each image and video part: its kind, pixel_values, image_grid_thw and seconds between time steps."""
        parts = [part for message in messages for part in content_parts(message) or ()]
        parts = [(kind, part) for part in parts if (kind := part_kind(part)) in ("image", "video")]
        for wanted, given in (("image", images), ("video", videos)):
            count = sum(kind == wanted for kind, _ in parts)
            if count != len(given):
                raise ValueError(
                    f"the prompt has {count} {wanted} placeholder(s) but {len(given)} {wanted}(s) came with it; "
                    f"put one placeholder where each {wanted} belongs"
                )
        waiting, seen = {"image": iter(images), "video": iter(videos)}, []
        see_video = VideoProcessor(self.image_processor)
        for kind, part in parts:
            sizes = {
                name: value
                for name, value in part.items()
                if name not in (*NO_SIZES, *SAMPLING_OPTIONS)
            }
            if kind == "image":
                seen.append((kind, *self.image_processor(next(waiting[kind]), **sizes), 0.0))
            else:
                seen.append((kind, *see_video(next(waiting[kind]), **sizes)))
        return seen

    def encode_completion(
        self, messages: list[dict], completion: str | list[dict]
    ) -> tuple[Tensor, Tensor]:
        """Turn an answer into tokens, as the model has to write them behind a prompt.

        Args:
            messages: the prompt.
            completion: text, or turns that begin and end with the assistant's; see chat.render_completion.
        Returns:
            ids (C,) int64: the text, then <|im_end|>; of several turns also what stands between them.
            trained (C,) bool: written by the assistant; all of them if the completion is one turn.
        Raises:
            ValueError: see chat.render_completion; or the template ends with a token that generation does not stop at.
        """
        turns = (
            [{"role": "assistant", "content": completion}]
            if isinstance(completion, str)
            else completion
        )
        laid_out = self.template.render_completion(
            messages, turns, add_vision_id=self.add_vision_id
        )
        if laid_out[-1][0] not in ENDS:
            raise ValueError(
                f"the chat template closes a turn with {laid_out[-1][0]!r}, at which no completion stops"
            )
        pieces = [(self._encode(piece), trained) for piece, trained in laid_out]
        ids = [token for tokens, _ in pieces for token in tokens]
        return torch.tensor(ids), torch.tensor(
            [trained for tokens, trained in pieces for _ in tokens]
        )

    def _encode(self, piece: str) -> list[int]:
        return [self.special[piece]] if isinstance(piece, Control) else self.tokenizer.encode(piece)

    def decode(self, ids: Tensor) -> str:
        """Text of a completion without its stop token."""
        ids = ids.tolist()
        return self.tokenizer.decode(ids[:-1] if ids and ids[-1] in self.stop_token_ids else ids)


@dataclass
class Row:
    """One example. An answer is text, or a list of turns that begins and ends with one of the assistant's."""

    messages: list[dict]  # the prompt, see chat.render
    images: list[
        PIL.Image.Image
    ]  # one for each image part of the prompt, in order; videos below likewise
    columns: dict = field(
        default_factory=dict
    )  # problem, solution, ...: what the rewards are given
    completion: str | list[dict] | None = None  # a demonstrated answer, for sft
    chosen: str | list[dict] | None = None  # the better of two answers, for preferences
    rejected: str | list[dict] | None = None  # the worse
    videos: list[Video] = field(default_factory=list)
    where: str = ""  # file and line that it is from, for errors

    def prompt(self, processor: Processor) -> Prompt:
        """Make tensors of what it asks (ValueError: see Processor; begins with where the row is from)."""
        try:
            return processor(self.messages, self.images, self.videos)
        except ValueError as error:  # a size that an image cannot be given shows only here
            raise ValueError(f"{self.where}: {error}" if self.where else str(error)) from error


class Dataset(Protocol):
    """What the algorithms ask of data: a length and rows by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...


class JsonLines:
    """Rows of a JSON lines file.

    Each line is an object with a prompt, as needed with answers (`completion` for sft, `chosen` and `rejected` for
    preferences), `image` or `images` (a path, relative to the file, a list of paths, or what media.read_media knows
    beside), `video` or `videos`, `solution` (for the accuracy reward), and any other columns. Prompt and answers have
    one of the forms of conversations.read_conversation:

        {"image": "cat.jpg", "problem": "How many?", "solution": "2", "completion": "Two."}
        {"image": "cat.jpg", "prompt": [{"role": "user", "content": "How many?"}], "chosen": "Two.", "rejected": "One."}
        {"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "Two."}]}
        {"video": {"video": "cat.mp4", "fps": 1}, "problem": "How often does it blink?", "solution": "3"}

    Args:
        path: the file.
        required: columns that every row must have. "problem" stands for a prompt and "completion" for a demonstrated
            answer, in any form.
        prompt_template, system_prompt: see conversations.read_conversation.
        limit: read no more rows than this.
        constants: columns that every row gets unless it has them.
        video_options: what is asked of every video, see media.OPTIONS; a row's own options win.
        allow_urls: fetch images and videos from the net where a row names an http(s) URL.
    Raises:
        ValueError: the file or a line cannot be read, or a column is missing or wrong (with file and line number).
            Images and videos are read when a row is used; what is wrong with one names its row too.
    """

    def __init__(
        self,
        path: str | Path,
        required: tuple[str, ...] = ("problem",),
        prompt_template: str = "{problem}",
        system_prompt: str | None = None,
        limit: int | None = None,
        constants: dict | None = None,
        video_options: dict | None = None,
        allow_urls: bool = False,
    ):
        self.path, self.prompt_template, self.system_prompt = (
            Path(path),
            prompt_template,
            system_prompt,
        )
        self.constants, self.video_options, self.allow_urls = (
            constants or {},
            video_options or {},
            allow_urls,
        )
        if not self.path.is_file():
            raise ValueError(f"{path}: no such file")
        self.rows: list[
            tuple[int, Row, list[Media]]
        ] = []  # line number, the row without its images, where they are
        try:
            lines = self.path.read_text(encoding="utf-8").split(
                "\n"
            )  # not splitlines: it cuts at U+2028 too
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 ({error})") from error
        for number, line in enumerate(lines, start=1):
            if line.strip() and (limit is None or len(self.rows) < limit):
                try:
                    self.rows.append((number, *self._parse(line, required)))
                except ValueError as error:
                    raise ValueError(f"{path}:{number}: {error}") from error
        if not self.rows:
            raise ValueError(f"{path}: has no rows")
        self.columns = sorted(set().union(*(row.columns for _, row, _ in self.rows)))

    def _parse(self, line: str, required: tuple[str, ...]) -> tuple[Row, list[Media]]:
        try:
            columns = json.loads(line)
            json.dumps(
                columns, ensure_ascii=False
            ).encode()  # half a surrogate pair is JSON, but no text to tokenize
        except ValueError as error:
            raise ValueError(f"not JSON ({error})") from error
        if not isinstance(columns, dict):
            raise ValueError(f"a row must be an object with columns, it is {columns!r:.40}")
        margin = columns.get("margin")
        if margin is not None and (isinstance(margin, bool) or not isinstance(margin, int | float)):
            raise ValueError(
                f"column 'margin' must be a number, by how much chosen is better; it is {margin!r:.40}"
            )
        listed = {kind: read_media(columns, kind) for kind in ("image", "video")}
        counts = {kind: len(media) for kind, media in listed.items()}
        messages, answers = read_conversation(
            columns, counts, self.prompt_template, self.system_prompt
        )
        messages, media = place_media(messages, listed, self.video_options)
        check_columns(columns, media)
        present = {
            "problem",
            *answers,
            *(column for column, value in columns.items() if value is not None),
        }
        for column in required:
            if column not in present:
                raise ValueError(f"column {column!r} is missing; the row has {sorted(columns)}")
        columns |= {
            name: value for name, value in self.constants.items() if columns.get(name) is None
        }
        return Row(messages, [], columns, **answers), media

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        number, row, media = self.rows[index]
        where = f"{self.path}:{number}"
        try:
            loaded = [(one.kind, one.load(self.path.parent, self.allow_urls)) for one in media]
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        images, videos = (
            [item for kind, item in loaded if kind == wanted] for wanted in ("image", "video")
        )
        columns = {name: row.columns.get(name) for name in self.columns}
        return replace(row, images=images, videos=videos, columns=columns, where=where)
