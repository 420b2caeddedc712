"""Compare stop strings with transformers' StopStringCriteria and with the decoded text."""

import pytest
import torch

from minivlmrl.config.options import SamplingOptions
from minivlmrl.data.tokenizer import train_tokenizer
from minivlmrl.generation.stop_strings import StopStrings, token_bytes
from tests.helpers.draws import STOP, prompts, sample, seeded, their_tokens, with_extra_ends

TEXTS = ["the cat sat on the mat </answer> <answer>a cat</answer>", "naïve café 猫が好き 🐈 tea"] * 3


@pytest.fixture(scope="module")
def tokenizer():
    """Return a tokenizer with bytes, merges up to whole words, and control tokens."""
    return train_tokenizer(TEXTS, vocab_size=330)


def test_token_bytes_decode_like_the_tokenizer(tokenizer):
    """Test random ids: incomplete characters, control tokens, and ids without a token."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        ids = torch.randint(0, len(tokenizer) + 5, (12,), generator=generator).tolist()
        text = b"".join(token_bytes(tokenizer, i) for i in ids).decode(errors="replace")
        assert text == tokenizer.decode(ids)
    assert token_bytes(tokenizer, len(tokenizer)) == b""


@pytest.mark.parametrize(
    "strings", [["e"], ["t <", "é"], ["ca", "the cat"], ["<|im_end|>"], [" t", "tt", "aa", "<<", "\n"]], ids=str
)
def test_completions_end_where_transformers_stops(tokenizer, strings, transformers):
    """Check random token sequences that consist of the strings' pieces, after every token."""
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend)
    criteria = transformers.generation.stopping_criteria.StopStringCriteria(theirs, strings)
    known = {i: token_bytes(tokenizer, i) for i in range(len(tokenizer))}
    pieces = [i for i, text in known.items() if any(text in string.encode() for string in strings)]
    near = [i for i, text in known.items() if set(text) & set("".join(strings).encode())]
    pool = torch.tensor(pieces * 4 + near + [len(tokenizer), len(tokenizer) + 9])
    generator = torch.Generator().manual_seed(0)
    ids = pool[torch.randint(0, len(pool), (1000, 30), generator=generator)]
    for row in range(0, 1000, 3):  # insert some whole strings, because long ones are rare by chance
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


def test_a_long_stop_string_beside_a_short_one_is_found_across_tokens(tokenizer):
    """The text before a token is kept for the longest string."""
    bytes_in_order = [token_id for letter in "xyz!" for token_id in tokenizer.encode(letter)]
    rule = StopStrings(["q", "xyz!"], tokenizer, [torch.tensor(tokenizer.encode("a"))])
    ends = [rule.completed(torch.tensor([0]), torch.tensor([token_id])).item() for token_id in bytes_in_order]
    assert ends == [False] * (len(ends) - 1) + [True]
    assert len(ends) == 4


def test_a_stop_string_may_begin_in_the_prompt_but_not_end_there(tokenizer):
    def ends(prompt, answer):
        [token_id] = tokenizer.encode(answer)
        rule = StopStrings(["ab"], tokenizer, [torch.tensor(tokenizer.encode(prompt))])
        return rule.completed(torch.tensor([0]), torch.tensor([token_id])).item()

    assert ends("xa", "b") and not ends("ab", "x") and not ends("x", "b")


@pytest.mark.parametrize(("temperature", "rows"), [(0.0, 10), (1.0, 1)])
def test_stop_strings_end_a_completion_where_transformers_ends_it(pair, oracle, tokenizer_300, temperature, rows):
    """The batch has ten rows or one row."""
    theirs, model = pair
    reader = oracle.transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer_300.backend)
    strings = ["at", "e", " m", "\x0f", "é", "!"]
    settings = {"temperature": temperature, "stop_strings": strings}
    sampling, ends = SamplingOptions(**settings, max_new_tokens=12), []
    for first in range(0, 10, rows):
        batch = prompts(10)[first : first + rows]
        rule = StopStrings(strings, tokenizer_300, [row.input_ids for row in batch])
        wrap = lambda choose, rule=rule: with_extra_ends(choose, rule.completed)  # noqa: E731
        for row, [completion] in zip(batch, sample(model, batch, 1, sampling, STOP, seeded(first), wrap), strict=True):
            expected = their_tokens(theirs, oracle.their_inputs(row), seed=first, tokenizer=reader, **settings)
            assert completion.ids.tolist() == expected[0].tolist()
            by_text = any(string in tokenizer_300.decode(completion.ids.tolist()) for string in strings)
            assert completion.stopped == (by_text or completion.ids[-1].item() in STOP)
            ends.append((by_text, len(completion.ids)))
    assert 2 < sum(by_text for by_text, _ in ends) < 10 and len({length for _, length in ends}) > 3
