"""Load a tokenizer.json, or train a tiny tokenizer."""

import json
from collections.abc import Collection, Iterable
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from minivlmrl.errors import UserError, truncate
from minivlmrl.json_files import read_json

# Qwen2 control tokens, ordered by id (151643 to 151656 in published checkpoints)
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>",
    "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>",
    "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
# control tokens that only chat templates write: turn and document boundaries, placeholders
STRUCTURE = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>",
    "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
# Qwen2 pre-tokenizer: split into contractions, words, digits, ... before BPE
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# test text, which a tokenizer must encode and decode without a change
PROBE = "Hello world 12\n\n  it'll cost 3 € | café 日本語 👩‍👩‍👧 \t\x00" + "".join(SPECIAL_TOKENS)


class SpecialToken(str):
    """Control token such as <|im_end|>; a plain str "<|im_end|>" is ordinary text."""


class Tokenizer:
    """Convert text to token ids and back.

    `special_tokens` maps all control tokens to ids. Only chat templates can write the control tokens in `structure`:
    "<|im_end|>" in a message is ordinary text. Control tokens outside `structure`, such as "<tool_call>", can also be
    written in messages, as in transformers.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        self.backend = backend
        self.files: dict[str, bytes] = {}  # {file name: content}, saved with the model
        # disable truncation and padding set in tokenizer.json
        backend.no_truncation()
        backend.no_padding()
        self.special_tokens: dict[str, int] = {
            token.content: token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special or token.content in SPECIAL_TOKENS
        }
        missing = set(SPECIAL_TOKENS) - self.special_tokens.keys()
        if missing:
            raise UserError(f"the tokenizer has no control token {min(missing)}")
        self.reserve(STRUCTURE)

    def reserve(self, names: Iterable[str]):
        """Set the control tokens that only chat templates may write."""
        self.structure = frozenset(names)
        self.backend = with_special_tokens(self.backend, self.structure)
        # tokenize "<|im_end|>" in text as several ordinary tokens
        self.backend.encode_special_tokens = True

    def __len__(self) -> int:
        # highest id + 1, because some ids may be unused
        return 1 + max(self.backend.get_vocab().values())

    def encode(self, text: str) -> list[int]:
        if isinstance(text, SpecialToken):
            return [self.special_tokens[text]]
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """Decode token ids to text, including control tokens such as <|im_end|>."""
        return self.backend.decode(ids, skip_special_tokens=False)

    def save(self, path: str | Path):
        """Write a tokenizer.json with all control tokens marked as special tokens."""
        with_special_tokens(self.backend, self.special_tokens).save(str(path))


def with_special_tokens(backend: tokenizers.Tokenizer, names: Collection[str]) -> tokenizers.Tokenizer:
    """Return a tokenizer whose only special tokens are `names`."""
    added_tokens = backend.get_added_tokens_decoder().values()
    if all(token.special == (token.content in names) for token in added_tokens):
        return backend
    # a new tokenizer, because `tokenizers` cannot change the flag `special`
    content = json.loads(backend.to_str())
    for token in content["added_tokens"]:
        token["special"] = token["content"] in names
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load tokenizer.json."""
    advice = "write tokenizer.json with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    if not Path(path).is_file():
        raise UserError(f"{path}: the file does not exist. If the folder has vocab.json and merges.txt, {advice}")
    config_file = Path(path).with_name("tokenizer_config.json")
    config = read_json(config_file) if config_file.is_file() else {}
    try:
        read_json(Path(path))  # read_json raises clear errors for Git LFS pointers and invalid JSON
        backend = tokenizers.Tokenizer.from_file(str(path))
        vocabulary = backend.get_vocab()
        listed = (config.get("added_tokens_decoder") or {}).values()
        lacking = {token["content"] for token in listed} - vocabulary.keys()
        if lacking:
            raise UserError(f"it lacks {truncate(min(lacking), 60)}, which {config_file.name} lists; {advice}")
        missing = set(pre_tokenizers.ByteLevel.alphabet()) - vocabulary.keys()
        if missing:
            raise UserError(f"{len(missing)} of the 256 byte values have no token")
        tokenizer = Tokenizer(backend)
        decoded = tokenizer.decode(tokenizer.encode(PROBE))
        if decoded != PROBE:
            raise UserError(f"encoding and decoding changes {PROBE[:40]!r} to {decoded[:40]!r}")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a Rust panic in `tokenizers` raises a BaseException, not an Exception
        raise UserError(
            f"{path}: the file is not a usable tokenizer.json of Qwen2 ({error}); use the file of "
            "the model's original checkpoint"
        ) from error
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer.

    Args:
        vocab_size: maximum number of tokens, including control tokens; all 256 bytes are always added.
    """
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=max(0, vocab_size - len(SPECIAL_TOKENS)),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    return Tokenizer(backend)
