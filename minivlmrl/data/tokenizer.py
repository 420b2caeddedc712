"""A tokenizer read from tokenizer.json, or a tiny one trained on the texts of an embedded task."""

from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from minivlmrl.data.chat_template import Control

# Qwen2's control tokens in their order; on the hub they are ids 151643 to 151656
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# how Qwen2 splits text before byte-pair encoding: contractions, words with one space, digits, ...
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# a tokenizer has to give this text back
PROBE = "Hello world 12\n\n  it'll cost 3 € | café 日本語 👩‍👩‍👧 \t\x00" + "".join(SPECIAL_TOKENS)


class Tokenizer:
    """Text to ids and back; special_tokens: control token -> id, Qwen2's and the backend's.

    Other added tokens (<tool_call>) are words: text that spells one is its id, as in transformers.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        self.backend = backend
        self.files: dict[str, bytes] = {}  # of the folder that it is from; a save writes them again
        backend.encode_special_tokens = True  # text that spells one is encoded as text
        backend.no_truncation()  # a file may come with the settings of a training run
        backend.no_padding()
        added_tokens = backend.get_added_tokens_decoder().values()
        # control tokens that the file has as plain words
        words = [t.content for t in added_tokens if t.content in SPECIAL_TOKENS and not t.special]
        backend.add_special_tokens(words)
        added_tokens = backend.get_added_tokens_decoder().items()
        self.special_tokens = {t.content: token_id for token_id, t in added_tokens if t.special}
        missing = set(SPECIAL_TOKENS) - self.special_tokens.keys()
        if missing:
            raise ValueError(f"tokenizer.json: the control token {min(missing)} is missing")

    def __len__(self) -> int:
        return 1 + max(self.backend.get_vocab().values())  # an added token may have any id

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, or the one id of a Control (ValueError: no Unicode text)."""
        if isinstance(text, Control):
            return [self.special_tokens[text]]
        try:
            return self.backend.encode(text, add_special_tokens=False).ids
        except TypeError as error:
            raise ValueError(f"{text!r:.60} is no Unicode text: half of a surrogate?") from error

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, control tokens by their names."""
        return self.backend.decode(ids, skip_special_tokens=False)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load the tokenizer.json of a Qwen2 folder (ValueError: missing, unreadable, loses text)."""
    if not Path(path).is_file():
        raise ValueError(
            f"{path}: no such file; transformers' "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes it "
            "from vocab.json and merges.txt"
        )
    try:
        tokenizer = Tokenizer(tokenizers.Tokenizer.from_file(str(path)))
        vocabulary = tokenizer.backend.get_vocab()
        missing = set(pre_tokenizers.ByteLevel.alphabet()) - vocabulary.keys()
        if missing:
            raise ValueError(f"{len(missing)} of the 256 bytes are no tokens of it")
        if len(set(vocabulary.values())) < len(vocabulary):
            raise ValueError("two of its tokens have the same id")
        decoded = tokenizer.decode(tokenizer.encode(PROBE))
        if decoded != PROBE:
            raise ValueError(f"it turns {PROBE[:40]!r} into {decoded[:40]!r}")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's Rust code raises such where it panics
        raise ValueError(f"{path}: not a readable tokenizer.json of Qwen2 ({error})") from error
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train byte-level BPE as Qwen2 has it (NFC, its split, control tokens last) on a few texts."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=max(0, vocab_size - len(SPECIAL_TOKENS)),
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    return Tokenizer(backend)
