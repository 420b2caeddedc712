"""Compare stop strings with StopStringCriteria of transformers and with the decoded text."""

import pytest
import torch

from minivlmrl.data.tokenizer import train_tokenizer
from minivlmrl.generation.stop_strings import StopStrings, token_bytes

TEXTS = ["the cat sat on the mat </answer> <answer>a cat</answer>", "naïve café 猫が好き 🐈 tea"] * 3


@pytest.fixture(scope="module")
def tokenizer():
    """Return a tokenizer with single bytes, parts of words, whole words and control tokens."""
    return train_tokenizer(TEXTS, vocab_size=330)


def test_token_bytes_decode_like_the_tokenizer(tokenizer):
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        ids = torch.randint(0, len(tokenizer) + 5, (12,), generator=generator).tolist()
        assert b"".join(token_bytes(tokenizer, i) for i in ids).decode(errors="replace") == tokenizer.decode(ids)
    assert token_bytes(tokenizer, len(tokenizer)) == b""


@pytest.mark.parametrize(
    "strings", [["e"], ["t <", "é"], ["q", "the cat"], ["<|im_end|>"], [" t", "tt", "aa", "<<", "\n"]], ids=str
)
def test_completions_end_where_transformers_stops(tokenizer, strings, transformers):
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend)
    criteria = transformers.generation.stopping_criteria.StopStringCriteria(theirs, strings)
    known = {i: token_bytes(tokenizer, i) for i in range(len(tokenizer))}
    pieces = [i for i, text in known.items() if any(text in string.encode() for string in strings)]
    near = [i for i, text in known.items() if set(text) & set("".join(strings).encode())]
    pool = torch.tensor(pieces * 4 + near + [len(tokenizer), len(tokenizer) + 9])
    generator = torch.Generator().manual_seed(0)
    ids = pool[torch.randint(0, len(pool), (1000, 30), generator=generator)]
    for row in range(0, 1000, 3):  # insert some whole stop strings, because long ones are rare by chance
        whole = torch.tensor(tokenizer.encode(strings[row % len(strings)]))
        ids[row, 3 + row % 10 :][: len(whole)] = whole
    prompt = 5
    ours = StopStrings(strings, tokenizer, list(ids[:, :prompt]))
    rows, hits = torch.arange(1000), 0
    for end in range(prompt, 30):
        expected = criteria(ids[:, : end + 1], None)
        assert torch.equal(ours.completed(rows, ids[:, end]), expected)
        hits += int(expected.sum())
    assert 10 < hits < 25_000 - 10
