"""Messages and images -> a Prompt, the only form in which a question reaches the model."""

from dataclasses import dataclass, field

import PIL.Image
import torch
from torch import Tensor

from minivlmrl.data.chat import IMAGE, Control, render, render_completion
from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.tokenizer import SPECIAL_TOKENS, Tokenizer


@dataclass
class Prompt:
    """One question as tensors."""

    input_ids: Tensor  # (P,) int64, image placeholders expanded
    pixel_values: Tensor  # (patches of all its images and videos, in order of appearance, patch_dim) float32
    grid_thw: Tensor  # (images and videos, 3) int64: patches in time, height, width
    second_per_grid_ts: Tensor | None = None  # (images and videos,) float32: from one time step to the next


@dataclass
class Processor:
    """Tokenizer and image settings of one checkpoint."""

    tokenizer: Tokenizer
    image_processor: ImageProcessor
    special: dict[str, int] = field(init=False)  # control token -> id

    def __post_init__(self):
        self.special = {name: self.tokenizer.token_id(name) for name in SPECIAL_TOKENS}

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """A completion ends with either: <|im_end|> closes a turn, <|endoftext|> a document."""
        return self.special["<|im_end|>"], self.special["<|endoftext|>"]

    def __call__(self, messages: list[dict], images: list[PIL.Image.Image]) -> Prompt:
        """Render a conversation up to where the assistant has to answer.

        Args:
            messages: see chat.render.
            images: one for each image part, in order.
        Raises:
            ValueError: the number of image parts is not the number of images; see also chat.render and image.py.
        """
        pieces = render(messages)
        placeholders = sum(piece is IMAGE for piece in pieces)  # by identity: text may spell the same
        if placeholders != len(images):
            raise ValueError(
                f"the prompt has {placeholders} image placeholder(s) but {len(images)} image(s) came with it; "
                "put one placeholder where each image belongs"
            )
        processed = [self.image_processor(image) for image in images]
        tokens_per_image = iter([self.image_processor.num_tokens(grid) for _, grid in processed])
        ids = []
        for piece in pieces:
            ids += self._encode(piece) * (next(tokens_per_image) if piece is IMAGE else 1)
        return Prompt(
            torch.tensor(ids),
            torch.cat([torch.zeros(0, self.image_processor.patch_dim), *(pixels for pixels, _ in processed)]),
            torch.tensor([grid for _, grid in processed], dtype=torch.long).view(-1, 3),
        )

    def encode_completion(self, completion: str | list[dict]) -> tuple[Tensor, Tensor]:
        """Turn an answer into tokens, as the model has to write them behind a prompt.

        Args:
            completion: text, or turns that begin and end with the assistant's; see chat.render_completion.
        Returns:
            ids (C,) int64: the text, then <|im_end|>; of several turns also what stands between them.
            trained (C,) bool: written by the assistant; all of them if the completion is one turn.
        Raises:
            ValueError: see chat.render_completion.
        """
        turns = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        pieces = [(self._encode(piece), trained) for piece, trained in render_completion(turns)]
        ids = [token for tokens, _ in pieces for token in tokens]
        return torch.tensor(ids), torch.tensor([trained for tokens, trained in pieces for _ in tokens])

    def _encode(self, piece: str) -> list[int]:
        return [self.special[piece]] if isinstance(piece, Control) else self.tokenizer.encode(piece)

    def decode(self, ids: Tensor) -> str:
        """Text of a completion without its stop token."""
        ids = ids.tolist()
        return self.tokenizer.decode(ids[:-1] if ids and ids[-1] in self.stop_token_ids else ids)
