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


PROBE = "Hello world 12\n\n  it'll cost 3 € | café 日本語 👩‍👩‍👧 \t\x00" + "".join(SPECIAL_TOKENS)  # has to come back


class Tokenizer:
    """Text to ids and back. Control tokens come in by id only: text that spells one is encoded as plain text.

    A control token is what tokenizer.json calls special, and Qwen2's own in any case. Other added tokens, such as
    <tool_call>, are words: text that spells one is that one id, as in transformers.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        self.backend = backend
        self.backend.encode_special_tokens = True
        # A file may come with the settings of a training run: cut at 512 tokens, fill up to 512 tokens.
        self.backend.no_truncation()
        self.backend.no_padding()
        added = self.backend.get_added_tokens_decoder().values()
        self.backend.add_special_tokens([t.content for t in added if t.content in SPECIAL_TOKENS and not t.special])

    @classmethod
    def from_file(cls, path: str | Path) -> "Tokenizer":
        """Load the tokenizer.json of any Qwen2 family folder.

        Raises:
            ValueError: the file is missing, not a tokenizer.json, or not one that can encode every text.
        """
        if not Path(path).is_file():
            advice = "a Qwen2-VL or Qwen2.5-VL folder has a tokenizer.json"
            if Path(path).with_name("vocab.json").is_file():
                advice = (
                    "vocab.json and merges.txt alone are not read, as they do not say which tokens were added; let "
                    "transformers write it: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
                )
            raise ValueError(f"{path}: no such file; {advice}")
        try:
            tokenizer = cls(tokenizers.Tokenizer.from_file(str(path)))
            tokenizer._check()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises bare Exception; its Rust code, where it panics, not even it
            raise ValueError(f"{path}: not a readable tokenizer.json of the Qwen2 family ({error})") from error
        return tokenizer

    def _check(self):
        """Refuse a vocabulary that would lose text without a word."""
        missing = [char for char in pre_tokenizers.ByteLevel.alphabet() if self.backend.token_to_id(char) is None]
        if missing:
            raise ValueError(f"{len(missing)} of the 256 bytes are no tokens of it")
        back = self.decode(self.encode(PROBE))
        if back != PROBE:
            raise ValueError(f"it turns {PROBE[:40]!r} into {back[:40]!r}")

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

    @property
    def special_tokens(self) -> dict[str, int]:
        """Ids of all control tokens, Qwen2's and those that a fine-tune added."""
        added = self.backend.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    def encode(self, text: str) -> list[int]:
        try:
            return self.backend.encode(text, add_special_tokens=False).ids
        except TypeError as error:
            raise ValueError(f"{text!r:.60} is no Unicode text: is half of a surrogate pair in it?") from error

    def decode(self, ids: list[int]) -> str:
        return self.backend.decode(ids, skip_special_tokens=False)

    def token_id(self, token: str) -> int:
        token_id = self.backend.token_to_id(token)
        if token_id is None:
            raise ValueError(f"tokenizer.json: the control token {token} is missing")
        return token_id

    def save(self, path: str | Path):
        self.backend.save(str(path))
