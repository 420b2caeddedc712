"""tokenizer.json through the `tokenizers` library, plus a tiny one trained on the spot for the embedded task."""

from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

# Qwen2's control tokens in their order; on the hub they are ids 151643 to 151656
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
# how Qwen2 cuts text before byte-pair encoding: contractions, words with one leading sign or space, single digits, ...
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Tokenizer:
    """Text to ids and back. Control tokens come in by id only: text that spells one is encoded as plain text."""

    def __init__(self, backend: tokenizers.Tokenizer):
        self.backend = backend
        self.backend.encode_special_tokens = True

    @classmethod
    def from_file(cls, path: str | Path) -> "Tokenizer":
        """Load a tokenizer.json.

        Raises:
            ValueError: the file is missing or not a tokenizer.json.
        """
        if not Path(path).is_file():
            raise ValueError(f"{path}: no such file; a Qwen2.5-VL folder has a tokenizer.json")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path}: not a readable tokenizer.json ({error})") from error

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Train byte-level BPE as Qwen2 has it (NFC, its split, its control tokens at the end) on a few texts."""
        backend = tokenizers.Tokenizer(models.BPE())
        backend.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        backend.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - len(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
        )
        backend.train_from_iterator(texts, trainer)
        backend.add_special_tokens(list(SPECIAL_TOKENS))
        return cls(backend)

    def __len__(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self.backend.decode(ids, skip_special_tokens=False)

    def token_id(self, token: str) -> int:
        token_id = self.backend.token_to_id(token)
        if token_id is None:
            raise ValueError(f"tokenizer.json: the control token {token} is missing")
        return token_id

    def save(self, path: str | Path):
        self.backend.save(str(path))
