"""Messages, images and videos -> a Prompt, the only form in which a question reaches the model."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import PIL.Image
import torch
from torch import Tensor

from minivlmrl.data.chat import IMAGE, VIDEO, Control, QwenTemplate, content_parts, part_kind
from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.media import SAMPLING_OPTIONS
from minivlmrl.data.template import ChatTemplate
from minivlmrl.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from minivlmrl.data.video import Video, VideoProcessor

ENDS = ("<|im_end|>", "<|endoftext|>")
NO_SIZES = ("type", "text", "image", "image_url", "video", "video_url")  # keys of a part that say what, not how large


@dataclass
class Prompt:
    """One question as tensors."""

    input_ids: Tensor  # (P,) int64, image placeholders expanded
    pixel_values: Tensor  # (patches of all its images and videos, in order of appearance, patch_dim) float32
    grid_thw: Tensor  # (images and videos, 3) int64: patches in time, height, width
    second_per_grid_ts: Tensor | None = None  # (images and videos,) float32: time step to time step, 0 for an image


@dataclass
class Processor:
    """Tokenizer, chat template and image settings of one checkpoint."""

    tokenizer: Tokenizer
    image_processor: ImageProcessor
    template: QwenTemplate | ChatTemplate = field(default_factory=QwenTemplate)
    add_vision_id: bool = False  # number the images and videos of a prompt: "Picture 1: "
    special: dict[str, int] = field(init=False)  # control token -> id
    carried: dict[str, bytes] = field(default_factory=dict, repr=False)  # the folder's files that a save keeps, by name

    def __post_init__(self):
        self.special = {name: self.tokenizer.token_id(name) for name in SPECIAL_TOKENS} | self.tokenizer.special_tokens

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """A completion ends with either: <|im_end|> closes a turn, <|endoftext|> a document."""
        return tuple(self.special[end] for end in ENDS)

    def __call__(
        self, messages: list[dict], images: Sequence[PIL.Image.Image] = (), videos: Sequence[Video] = ()
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
        placeholders = ["image" if piece is IMAGE else "video" for piece in pieces if piece is IMAGE or piece is VIDEO]
        if placeholders != [kind for kind, *_ in seen]:
            raise ValueError(f"the chat template shows {placeholders}, the messages have {[kind for kind, *_ in seen]}")
        tokens_of_each = iter([self.image_processor.num_tokens(grid) for _, _, grid, _ in seen])
        ids = []
        for piece in pieces:
            ids += self._encode(piece) * (next(tokens_of_each) if piece is IMAGE or piece is VIDEO else 1)
        return Prompt(
            torch.tensor(ids),
            torch.cat([torch.zeros(0, self.image_processor.patch_dim), *(pixels for _, pixels, _, _ in seen)]),
            torch.tensor([grid for _, _, grid, _ in seen], dtype=torch.long).view(-1, 3),
            torch.tensor([seconds for *_, seconds in seen], dtype=torch.float32),
        )

    def _see(self, messages, images, videos) -> list[tuple[str, Tensor, tuple[int, int, int], float]]:
        """For each image and video part: its kind, pixel_values, grid_thw and seconds between time steps."""
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
            sizes = {name: value for name, value in part.items() if name not in (*NO_SIZES, *SAMPLING_OPTIONS)}
            if kind == "image":
                seen.append((kind, *self.image_processor(next(waiting[kind]), **sizes), 0.0))
            else:
                seen.append((kind, *see_video(next(waiting[kind]), **sizes)))
        return seen

    def encode_completion(self, messages: list[dict], completion: str | list[dict]) -> tuple[Tensor, Tensor]:
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
        turns = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        laid_out = self.template.render_completion(messages, turns, add_vision_id=self.add_vision_id)
        if laid_out[-1][0] not in ENDS:
            raise ValueError(f"the chat template closes a turn with {laid_out[-1][0]!r}, at which no completion stops")
        pieces = [(self._encode(piece), trained) for piece, trained in laid_out]
        ids = [token for tokens, _ in pieces for token in tokens]
        return torch.tensor(ids), torch.tensor([trained for tokens, trained in pieces for _ in tokens])

    def _encode(self, piece: str) -> list[int]:
        return [self.special[piece]] if isinstance(piece, Control) else self.tokenizer.encode(piece)

    def decode(self, ids: Tensor) -> str:
        """Text of a completion without its stop token."""
        ids = ids.tolist()
        return self.tokenizer.decode(ids[:-1] if ids and ids[-1] in self.stop_token_ids else ids)
