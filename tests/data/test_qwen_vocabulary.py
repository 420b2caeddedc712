"""Compare the token ids of Qwen's published vocabulary with transformers on random texts."""

import base64
import hashlib
import importlib.metadata
import itertools
import random

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from minivlmrl.data.tokenizer import QWEN2_SPLIT, SPECIAL_TOKENS, load_tokenizer

pytestmark = pytest.mark.slow
# ids 151657 to 151664 are added tokens, but not control tokens
WORDS = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>",
)  # fmt: skip


def ranks():
    """Return the bytes of Qwen's tokens in the order of their ids, from a file of Alibaba's package dashscope."""
    try:
        package = importlib.metadata.distribution("dashscope")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vocabulary missing: pip install --no-deps dashscope==1.17.0")
    content = package.locate_file("dashscope/resources/qwen.tiktoken").read_bytes()
    assert hashlib.sha256(content).hexdigest().startswith("b2b1b8df")
    lines = [line.split() for line in content.splitlines()]
    assert [int(rank) for _, rank in lines] == list(range(151643))
    return [base64.b64decode(token) for token, _ in lines]


def parts_of(token, rank):
    """Return the two tokens that byte-pair encoding merges into `token`."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [rank.get(a + b, len(rank)) for a, b in itertools.pairwise(parts)]
        best = pairs.index(min(pairs))
        assert pairs[best] < rank[token]
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts


@pytest.fixture(scope="session")
def vocabulary():
    """Return {token: id} and the merges, as in vocab.json and merges.txt."""
    tokens = ranks()
    rank = {token: i for i, token in enumerate(tokens)}
    # GPT-2 writes printable bytes unchanged, and other bytes as the characters from U+0100
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in seen}
    letters |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in letters)}
    spelled = [token.decode("latin-1").translate(letters) for token in tokens]
    merges = [tuple(spelled[rank[part]] for part in parts_of(token, rank)) for token in tokens if len(token) > 1]
    assert len(merges) == 151387
    return {text: i for i, text in enumerate(spelled)}, merges


@pytest.fixture(scope="session")
def qwen(vocabulary, tmp_path_factory):
    """Load our tokenizer from a tokenizer.json like the published file."""
    backend = Backend(models.BPE(*vocabulary))
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    backend.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    path = tmp_path_factory.mktemp("qwen") / "tokenizer.json"
    backend.save(str(path))
    return load_tokenizer(path)


@pytest.fixture(scope="session")
def theirs(vocabulary, transformers):
    tokenizer = transformers.Qwen2Tokenizer(*vocabulary)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS[1:]])
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in WORDS])
    return tokenizer


def test_the_ids_of_added_tokens(qwen, theirs):
    assert len(qwen) == len(theirs) == 151665
    assert [qwen.backend.token_to_id(token) for token in (*SPECIAL_TOKENS, *WORDS)] == list(range(151643, 151665))
    assert theirs.convert_tokens_to_ids([*SPECIAL_TOKENS, *WORDS]) == list(range(151643, 151665))
    assert qwen.special_tokens == {token: 151643 + i for i, token in enumerate(SPECIAL_TOKENS)}


SPACES = [" ", "  ", "\n", "\r\n", "\t", "   \n \n", "\u00a0", "\u3000", "\u2028", "\x00", "\ufeff"]
SCRIPTS = [
    (0x20, 0x7F), (0xA0, 0x250), (0x300, 0x370), (0x370, 0x530), (0x5D0, 0x6FF), (0x900, 0xE80), (0x1100, 0x1200),
    (0x1E00, 0x2200), (0x2200, 0x2BFF), (0x3040, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A4), (0xE000, 0xF900),
    (0xF900, 0x10000), (0x1F000, 0x1FB00), (0x20000, 0x2FA20), (0xE0000, 0x110000),
]  # fmt: skip
PIECES = [
    "don't", "They'LL", "'ſ", "I'm", "3.14159", "1234567890", "٣٤", "½", "e\u0301", "é", "A\u030a", "Å", ">\u0338",
    "\u1112\u1161\u11ab", "ﬁ", "Ω", "👩‍👩‍👧", "🇫🇷", "日本語", "中文。", "def f(x):\n    return x", "</answer>",
    "<think>", "\\boxed{42}", "...", "—", "https://a.b/c?d=e&f", "(123,456),(789,1000)", "<tool_call>", "<|fim_pad|>",
    "_", "ÀÈ", "ß", "İ", "\u200d",
]  # fmt: skip


def drawn_text(seed):
    """Return a random text with words, white space and characters in one script."""
    rng = random.Random(seed)
    kinds = [lambda: rng.choice(PIECES), lambda: rng.choice(SPACES)]
    kinds.append(lambda: chr(rng.choice(range(*rng.choice(SCRIPTS)))))
    return "".join(rng.choice(kinds)() for _ in range(rng.randrange(1, 20)))


def test_2000_random_texts_have_the_ids_of_transformers(qwen, theirs):
    for seed in range(2000):
        text = drawn_text(seed)
        ids = theirs(text)["input_ids"]
        assert qwen.encode(text) == ids, repr(text)
        assert qwen.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False), repr(text)


def test_rows_above_the_vocabulary_decode_to_nothing(qwen):
    """A random model may sample ids above 151664, which have embeddings but no token."""
    assert qwen.decode([151665, 151935, 9707, 152063]) == "Hello"
