"""Stop strings against transformers' StopStringCriteria and against the decoded text."""

import pytest
import torch

from minivlmrl.hub.tokenizer import train_tokenizer
from minivlmrl.sampling.stop_strings import StopStrings, token_bytes

TEXTS = ["the cat sat on the mat </answer> <answer>a cat</answer>", "naïve café 猫が好き 🐈 tea"] * 3


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes, merges up to whole words, control tokens; the ids behind them stand for untrained rows."""
    return train_tokenizer(TEXTS, vocab_size=330)


def test_token_bytes_of_a_text_are_its_utf8(tokenizer):
    for text in (*TEXTS, "".join(map(chr, range(1, 0x250))), "🐈‍⬛ \U0010ffff \x00"):
        assert b"".join(token_bytes(tokenizer, i) for i in tokenizer.encode(text)).decode() == text
    assert {b for i in range(len(tokenizer)) for b in token_bytes(tokenizer, i)} == set(range(256))


def test_token_bytes_decode_to_what_the_tokenizer_decodes(tokenizer):
    """Any ids at all: broken characters, control tokens, ids without a token."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        ids = torch.randint(0, len(tokenizer) + 5, (12,), generator=generator).tolist()
        text = b"".join(token_bytes(tokenizer, i) or b"" for i in ids).decode(errors="replace")
        assert text == tokenizer.decode(ids)


def test_ids_without_a_token_have_no_bytes(tokenizer):
    assert token_bytes(tokenizer, len(tokenizer)) is None


@pytest.mark.parametrize(
    "strings", [["e"], ["at"], ["</answer>"], ["t <", "é"], ["ca", "the cat"], ["<|im_end|>"], ["🐈", "好"],
                [" t", "tt", "aa", "<<", "\n"]], ids=str)  # fmt: skip
def test_completions_end_where_transformers_stops(tokenizer, strings):
    """Tokens that are pieces of the strings, in any order; the rule is asked after every token, to the last."""
    transformers = pytest.importorskip("transformers", reason="oracle missing: pip install transformers==5.23.0")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend)
    criteria = transformers.generation.stopping_criteria.StopStringCriteria(theirs, strings)
    known = {i: token_bytes(tokenizer, i) for i in range(len(tokenizer))}
    pieces = [i for i, text in known.items() if any(text in string.encode() for string in strings)]
    near = [i for i, text in known.items() if set(text) & set("".join(strings).encode())]
    pool = torch.tensor(pieces * 4 + near + [len(tokenizer), len(tokenizer) + 9])
    generator = torch.Generator().manual_seed(0)
    ids = pool[torch.randint(0, len(pool), (1000, 30), generator=generator)]
    for row in range(0, 1000, 3):  # some whole ones too, for long strings are rare by chance
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


def test_a_text_may_begin_in_the_prompt_but_not_end_there(tokenizer):
    def ends(prompt, answer):
        [token_id] = tokenizer.encode(answer)
        rule = StopStrings(["ab"], tokenizer, [torch.tensor(tokenizer.encode(prompt))])
        return rule.completed(torch.tensor([0]), torch.tensor([token_id])).item()

    assert ends("xa", "b") and not ends("ab", "x") and not ends("x", "b")


def test_rows_keep_their_own_text(tokenizer):
    """Row 0 draws x a b, row 1 a b: numbers of rows say whose token it is, also when others have left."""
    x, a, b = (tokenizer.encode(letter)[0] for letter in "xab")
    rule = StopStrings(["ab"], tokenizer, [torch.tensor([x]), torch.tensor([x])])
    assert rule.completed(torch.tensor([0, 1]), torch.tensor([x, a])).tolist() == [False, False]
    assert rule.completed(torch.tensor([0, 1]), torch.tensor([a, b])).tolist() == [False, True]
    assert rule.completed(torch.tensor([0]), torch.tensor([b])).tolist() == [True]
