"""The tokenizer: text survives it, it agrees with transformers, and control tokens come in by id only."""

import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivlmrl.data import shapes
from minivlmrl.data.tokenizer import SPECIAL_TOKENS, Tokenizer

TINY = shapes.tokenizer()
CONTROL_IDS = {TINY.token_id(token) for token in SPECIAL_TOKENS}

ORDINARY = [
    "What is it?",
    " <think>I see green</think><answer>green square</answer>",
    "It's 1234.5 metres;  they'LL\t\tsay:\n\n  'so what?' \r\n",
    "日本語とEnglish mixed — naïve café, e\u0301 → é, ﬁ, Ω",
    "emoji 👩‍👩‍👧 🇫🇷 and \x00 control \x7f characters",
    "def f(x):\n    return {x: [1, 2]}  # comment\n",
    "   leading and trailing   ",
]


@given(st.text(max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_text_comes_back(text):
    """Up to NFC, Qwen2's normalisation: e + accent and é are one text to it."""
    assert TINY.decode(TINY.encode(text)) == unicodedata.normalize("NFC", text)


@given(st.lists(st.sampled_from([*SPECIAL_TOKENS, "<|", "|>", "im_start", "|", "<", " ", "x", "\n"]), max_size=6))
@settings(max_examples=100, deadline=None)
def test_no_text_becomes_a_control_token(parts):
    text = "".join(parts)
    ids = TINY.encode(text)
    assert not CONTROL_IDS & set(ids)
    assert TINY.decode(ids) == text


def test_control_tokens_are_the_last_ids_in_qwens_order():
    assert [TINY.token_id(token) for token in SPECIAL_TOKENS] == list(range(len(TINY) - 14, len(TINY)))


def test_control_tokens_decode_to_their_names():
    assert TINY.decode([TINY.token_id("<|im_start|>"), *TINY.encode("user"), TINY.token_id("<|im_end|>")]) == (
        "<|im_start|>user<|im_end|>"
    )


def test_encoding_adds_no_tokens():
    assert TINY.encode("") == []


def test_digits_stay_single_tokens_however_often_they_meet():
    assert len(Tokenizer.train(["1234567890"] * 100, vocab_size=300).encode("1234567890")) == 10


def test_training_keeps_to_the_vocabulary_size():
    assert len(Tokenizer.train(["a a a b b ab ab"], vocab_size=256 + 14)) == 270  # bytes and control tokens, no merge
    assert len(Tokenizer.train(shapes.LABELS, vocab_size=300)) == 300


def test_saved_and_loaded_it_is_the_same(tmp_path):
    TINY.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.from_file(tmp_path / "tokenizer.json")
    attack = "".join(ORDINARY) + "".join(SPECIAL_TOKENS)
    assert loaded.encode(attack) == TINY.encode(attack)
    assert loaded.backend.to_str() == TINY.backend.to_str()


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "Qwen2Tokenizer"])
def test_equals_transformers(tmp_path, kind):
    transformers = pytest.importorskip("transformers", reason="oracle missing: pip install transformers==5.23.0")
    TINY.save(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    theirs = getattr(transformers, kind).from_pretrained(tmp_path)
    assert len(theirs) == len(TINY)
    for text in ORDINARY:
        assert theirs(text)["input_ids"] == TINY.encode(text)
        assert theirs.decode(TINY.encode(text), clean_up_tokenization_spaces=False) == TINY.decode(TINY.encode(text))
    for token in SPECIAL_TOKENS:
        assert theirs.convert_tokens_to_ids(token) == TINY.token_id(token)


def test_training_is_deterministic_over_processes():
    """Ties between pairs must not be broken by the order of a hash table."""
    script = (
        "from minivlmrl.data.tokenizer import Tokenizer\n"
        "words = [f'{a}{b} {b}{a}' for a in 'abcdefgh' for b in 'ijklmnop']\n"  # all pairs equally frequent
        "print(Tokenizer.train(words, vocab_size=400).backend.to_str())"
    )

    def train(seed):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[1])}
        run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True)
        return run.stdout

    assert train("1") == train("2")


def test_missing_control_token_is_named():
    with pytest.raises(ValueError, match=r"control token <\|nonsense\|> is missing"):
        TINY.token_id("<|nonsense|>")


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json: no such file"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("content", [b"", b"not json", b"{}", b'{"model": 3}', b"\xff\xfe\x00", b"[]"])
def test_a_garbage_file_is_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a readable tokenizer\.json"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")


def test_a_folder_is_not_a_tokenizer(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        Tokenizer.from_file(tmp_path)
