"""Test the tokenizer: round trips, equality with transformers, and control tokens."""

import json
import unicodedata

import pytest

from minivlmrl.data.tokenizer import SPECIAL_TOKENS, STRUCTURE, load_tokenizer, train_tokenizer, with_special_tokens
from minivlmrl.tasks import shapes

pytest.importorskip("hypothesis", reason="extra missing: pip install hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

TINY = shapes.tokenizer()

ORDINARY = [
    "What is it?",
    " <think>I see green</think><answer>green square</answer>",
    "It's 1234.5 metres;  they'LL\t\tsay:\n\n  'so what?' \r\n",
    "日本語とEnglish mixed — naïve café, e\u0301 → é, ﬁ, Ω",
    "emoji 👩‍👩‍👧 🇫🇷 and \x00 control \x7f characters",
    "def f(x):\n    return {x: [1, 2]}  # comment\n",
]


@given(st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_any_text_is_restored(text):
    assert TINY.decode(TINY.encode(text)) == unicodedata.normalize("NFC", text)


@given(st.lists(st.sampled_from([*SPECIAL_TOKENS, "<|", "|>", "im_start", "|", "<", " ", "x", "\n"]), max_size=6))
@settings(max_examples=100, deadline=None)
def test_no_text_becomes_a_token_of_the_structure(parts):
    text = "".join(parts)
    ids = TINY.encode(text)
    assert not {TINY.special_tokens[token] for token in STRUCTURE} & set(ids)
    assert TINY.decode(ids) == text


def test_training_keeps_to_the_vocabulary_size_and_control_tokens_are_the_last_ids_in_qwens_order():
    assert [TINY.special_tokens[token] for token in SPECIAL_TOKENS] == list(range(len(TINY) - 14, len(TINY)))
    # a vocabulary of 256 bytes and 14 control tokens has no merges
    assert len(train_tokenizer(["a a a b b ab ab"], vocab_size=256 + 14)) == 270


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "Qwen2Tokenizer"])
def test_equals_transformers(tmp_path, kind, transformers):
    TINY.save(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    theirs = getattr(transformers, kind).from_pretrained(tmp_path)
    assert len(theirs) == len(TINY)
    assert {token: theirs.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS} == TINY.special_tokens
    for text in ORDINARY:
        assert theirs(text)["input_ids"] == TINY.encode(text)
        assert theirs.decode(TINY.encode(text), clean_up_tokenization_spaces=False) == TINY.decode(TINY.encode(text))


def test_texts_are_divided_as_by_qwen(transformers):
    """Normalization, words and bytes are those of Qwen's class, so equal merges give equal ids."""
    theirs = transformers.Qwen2Tokenizer(vocab={}, merges=[])
    ours, expected = (json.loads(backend.to_str()) for backend in (TINY.backend, theirs.backend_tokenizer))
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        assert ours[name] == expected[name], name
    assert TINY.decode([len(TINY), *TINY.encode("red"), len(TINY) + 9]) == "red"  # embeddings without a token


def test_vocabulary_and_merges_without_tokenizer_json_are_refused(tmp_path):
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: the file does not exist\. .*vocab.*save_pretrained"):
        load_tokenizer(tmp_path / "tokenizer.json")


SAVED = json.loads(with_special_tokens(TINY.backend, TINY.special_tokens).to_str())


def load(folder, content):
    (folder / "tokenizer.json").write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return load_tokenizer(folder / "tokenizer.json")


def test_additions_to_every_text_are_removed(tmp_path):
    """Loading ignores truncation, padding, and tokens around each text that tokenizer.json asks for."""
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    fill = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0}
    piece = {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}
    template = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}, piece], "pair": []}
    token = {"id": "<|im_end|>", "ids": [TINY.special_tokens["<|im_end|>"]], "tokens": ["<|im_end|>"]}
    template |= {"pair": [*template["single"], {"Sequence": {"id": "B", "type_id": 1}}]}
    for added in (
        {"truncation": cut, "padding": fill | {"pad_token": "<|endoftext|>"}},
        {"post_processor": template | {"special_tokens": {"<|im_end|>": token}}},
    ):
        for text in ("", "a", "more than four tokens, and than nine"):
            assert load(tmp_path, SAVED | added).encode(text) == TINY.encode(text)


def test_qwens_control_tokens_are_always_control_tokens(tmp_path):
    words = [{**token, "special": False} for token in SAVED["added_tokens"]]
    loaded = load(tmp_path, SAVED | {"added_tokens": words})
    assert loaded.encode("<|im_end|>") == TINY.encode("<|im_end|>")
    assert loaded.special_tokens == TINY.special_tokens and len(loaded) == len(TINY)


def added(*tokens):
    """Return the content of a tokenizer.json with further tokens, each given as (name, is_special, options)."""
    new = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    words = []
    for i, (name, is_special, options) in enumerate(tokens):
        words.append({**new, **options, "id": len(TINY) + i, "content": name, "special": is_special})
    return SAVED | {"added_tokens": [*SAVED["added_tokens"], *words]}


OWN = added(
    ("<SEG>", False, {}), ("<|medicine|>", True, {}), ("<|medicine|>s", True, {}), ("<mask>", True, {"lstrip": True}),
    ("<end>", True, {"rstrip": True}), ("WORD", True, {"single_word": True}),
)  # fmt: skip
GROUNDING = "<|object_ref_start|>the cat<|object_ref_end|><|box_start|>(1,2),(30,4)<|box_end|>"
OWN_TEXTS = [
    GROUNDING, f"Where is {GROUNDING}?", "<|quad_start|>(1,2)<|quad_end|>", "<|medicine|> red", "a<|medicine|>s <SEG>",
    "a \n <mask> b", "<end>  \n b", "a WORD b", "SWORDS", "<think>e\u0301</think> <|medicine", "<| medicine|>",
]  # fmt: skip


@pytest.mark.parametrize("text", OWN_TEXTS)
def test_texts_with_added_tokens_have_the_ids_of_transformers(tmp_path, transformers, text):
    ours = load(tmp_path, OWN)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert ours.encode(text) == theirs(text)["input_ids"]
    assert set(OWN_TEXTS[:4]).isdisjoint([text]) or max(ours.encode(text)) >= len(TINY) - 11


def listed(content, **flags):
    return {"content": content, "lstrip": False, "normalized": False, "rstrip": False, "special": False} | flags


N = len(TINY)
ALL = {f"{token['id']}": {key: value for key, value in token.items() if key != "id"} for token in SAVED["added_tokens"]}
CONFIG = "tokenizer_config.json"
BY_ID = ALL | {f"{N + 1}": listed("<SEG>"), f"{N}": listed("<mask>", lstrip=True, special=True)}
LISTED_TEXTS = ["a \n <mask> b", "<SEG>it<SEG> WORDS <pad> the red square", "<|medicine|> <box>"]


def test_listed_tokens_that_the_file_lacks_are_refused_until_transformers_writes_it(tmp_path, transformers):
    content = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": BY_ID}
    (tmp_path / CONFIG).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"lacks '<SEG>', which tokenizer_config\.json lists; write .*save_pretrained"):
        load(tmp_path, SAVED)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path / "tokenizer.json")
    assert ours.backend.get_vocab() == theirs.get_vocab() and len(ours) > N
    for text in LISTED_TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"]


@pytest.mark.parametrize("name", STRUCTURE)
def test_only_names_of_the_structure_stay_text(tmp_path, transformers, name):
    """With `split_special_tokens`, transformers encodes special tokens in a text as ordinary text."""
    content = json.loads(json.dumps(OWN))
    for token in content["added_tokens"]:
        token["special"] = token["content"] in STRUCTURE
    text = f"a {name}<|medicine|> b{name}{GROUNDING} {name}\n"
    ids = load(tmp_path, OWN).encode(text)
    load(tmp_path, content)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert ids == theirs(text, split_special_tokens=True)["input_ids"]
    assert TINY.special_tokens[name] not in ids and TINY.special_tokens["<|box_start|>"] in ids


def test_a_reserved_name_stays_text_and_is_saved_as_a_special_token(tmp_path):
    loaded = load(tmp_path, OWN)
    assert loaded.special_tokens.keys() == TINY.special_tokens.keys() | {
        "<|medicine|>", "<|medicine|>s", "<mask>", "<end>", "WORD"
    }  # fmt: skip
    loaded.reserve([*STRUCTURE, "<|medicine|>"])
    medicine = loaded.special_tokens["<|medicine|>"]
    assert medicine not in loaded.encode("<|medicine|>") and medicine + 3 in loaded.encode("<end>")
    loaded.save(tmp_path / "saved.json")
    assert json.loads((tmp_path / "saved.json").read_text()) == OWN
    assert list(TINY.special_tokens) == list(SPECIAL_TOKENS)


MODEL = SAVED["model"]
VOCABULARY = {token: i for token, i in MODEL["vocab"].items() if token != "z"}
MERGES = [pair for pair in MODEL["merges"] if "z" not in "".join(pair)]


@pytest.mark.parametrize("changed, reason", [
    ({"model": MODEL | {"vocab": VOCABULARY, "merges": MERGES}}, "1 of the 256 byte values have no token"),
    ({"normalizer": {"type": "Lowercase"}}, "encoding and decoding changes .Hello .* to .hello "),
    ({"added_tokens": [t for t in SAVED["added_tokens"] if t["content"] != "<|vision_pad|>"]},
     r"no control token <\|vision_pad\|>"),
    # the package tokenizers panics, because its Rust code cuts the prefix from a merged token
    ({"model": MODEL | {"continuing_subword_prefix": "a long prefix"}}, ""),
])  # fmt: skip
def test_a_vocabulary_that_would_lose_text_is_refused(tmp_path, changed, reason):
    with pytest.raises(ValueError, match=rf"tokenizer\.json: .*{reason or 'not a usable'}"):
        load(tmp_path, SAVED | changed)
