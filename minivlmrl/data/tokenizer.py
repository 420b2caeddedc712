"""Load a tokenizer from tokenizer.json, or train a tiny one on the texts of an embedded task."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from minivlmrl.config.parsing import read_json
from minivlmrl.config.types import Plain
from minivlmrl.data.chat_template import Control

# Qwen2's control tokens in order; in published checkpoints they have the ids 151643 to 151656
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
# Qwen2's split before byte-pair encoding: contractions, words with one space, digits, ...
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Components of tokenizer.json that do not make a text longer, or only once. Others, such as a chain
# of 40 replacements of "a" by "aa", could need more memory than a computer has; the library then
# aborts the process.
COMPONENTS = {
    "normalizer": ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents"),
    "pre_tokenizer": ("Split", "ByteLevel", "Digits"),
    "decoder": ("ByteLevel", "Fuse"),
    "post_processor": ("ByteLevel", "TemplateProcessing"),
}
LISTS = ("normalizers", "pretokenizers", "decoders", "processors")  # lists of a "Sequence"
# text that a tokenizer must reproduce after encoding and decoding
PROBE = "Hello world 12\n\n  it'll cost 3 € | café 日本語 👩‍👩‍👧 \t\x00" + "".join(SPECIAL_TOKENS)


class Tokenizer:
    """Converts text to token ids and back.

    `special_tokens` maps each control token of Qwen2 and of the backend to its id. Text that spells
    a control token is encoded as ordinary text. Text that spells another added token, such as
    <tool_call>, is encoded as this token, as in transformers.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        self.backend = backend
        self.files: dict[str, bytes] = {}  # {name: content} of the tokenizer's files, for saving
        backend.encode_special_tokens = True  # False would turn text into control tokens
        backend.no_truncation()  # a file may contain truncation and padding settings
        backend.no_padding()
        added_tokens = backend.get_added_tokens_decoder().values()
        # control tokens that the file lists as ordinary added tokens
        words = [t.content for t in added_tokens if t.content in SPECIAL_TOKENS and not t.special]
        backend.add_special_tokens(words)
        added_tokens = backend.get_added_tokens_decoder().items()
        self.special_tokens = {t.content: token_id for token_id, t in added_tokens if t.special}
        missing = set(SPECIAL_TOKENS) - self.special_tokens.keys()
        if missing:
            raise ValueError(f"tokenizer.json has no control token {min(missing)}")

    def __len__(self) -> int:
        return 1 + max(self.backend.get_vocab().values())  # an added token may have any id

    def encode(self, text: str) -> list[int]:
        """Encode a text, or a Control as its single id; raise ValueError for invalid Unicode."""
        if isinstance(text, Control):
            return [self.special_tokens[text]]
        try:
            return self.backend.encode(text, add_special_tokens=False).ids
        except TypeError as error:
            raise ValueError(
                f"{text!r:.60} is not valid Unicode, it may contain a lone surrogate"
            ) from error

    def decode(self, ids: list[int]) -> str:
        """Decode ids to text; control tokens are written by name."""
        return self.backend.decode(ids, skip_special_tokens=False)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a tokenizer.json; raise ValueError if it is missing, unreadable or loses text."""
    if not Path(path).is_file():
        raise ValueError(
            f"{path}: no such file. Write it from vocab.json and merges.txt with transformers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    try:
        content = read_json(Path(path))
        for part, allowed in COMPONENTS.items():
            check_components(part, list_components(content.get(part)), allowed)
        tokenizer = Tokenizer(tokenizers.Tokenizer.from_file(str(path)))
        vocabulary = tokenizer.backend.get_vocab()
        missing = set(pre_tokenizers.ByteLevel.alphabet()) - vocabulary.keys()
        if missing:
            raise ValueError(f"{len(missing)} of the 256 bytes have no token")
        if len(set(vocabulary.values())) < len(vocabulary):
            raise ValueError("two tokens have the same id")
        decoded = tokenizer.decode(tokenizer.encode(PROBE))
        if decoded != PROBE:
            raise ValueError(f"it encodes and decodes {PROBE[:40]!r} to {decoded[:40]!r}")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library's Rust code is a BaseException
        raise ValueError(f"{path}: not a usable tokenizer.json of Qwen2 ({error})") from error
    return tokenizer


def list_components(component: Plain) -> list[str]:
    """Return the types of a component of tokenizer.json and of the components in it."""
    if component is None:
        return []
    kind = component.get("type") if isinstance(component, dict) else None
    if kind != "Sequence":
        return [str(kind)]
    inner = [item for name in LISTS for item in component.get(name, [])]
    return [kind for item in inner for kind in list_components(item)]


def check_components(part: str, kinds: list[str], allowed: Sequence[str]):
    """Raise ValueError if a part of tokenizer.json has a component that it may not have."""
    for kind in kinds:
        if kind not in allowed:
            raise ValueError(
                f"its {part} contains {kind!r:.40}, but it may contain only {', '.join(allowed)}"
            )
    for kind in ("ByteLevel", "TemplateProcessing"):
        if kinds.count(kind) > 1:
            raise ValueError(f"its {part} contains {kind} {kinds.count(kind)} times; keep one")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train byte-level BPE with Qwen2's normalisation (NFC), split and control tokens on texts."""
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
