"""Generation against transformers' generate, against our own scorer, and against itself."""

import itertools
from dataclasses import replace

import pytest
import torch
from oracle import their_inputs

from minivlmrl.batch import pack
from minivlmrl.generate import generate, uniforms
from minivlmrl.hub.checkpoint import load_model
from minivlmrl.hub.tokenizer import train_tokenizer
from minivlmrl.logprobs import per_token_logps
from minivlmrl.run.config import NOT_HONOURED, SamplingConfig
from minivlmrl.sampling.stop_strings import StopStrings

import tiny

transformers = pytest.importorskip("transformers", reason="oracle missing: pip install transformers==5.23.0")

STOP = (7, 11, 13, 17, 19, 23, 29)  # common enough that some rows end early and others do not
GRIDS = [[(1, 6, 10)], [(1, 18, 4), (1, 4, 6)], [], [(1, 4, 4)], [(1, 10, 6)]]
SETTINGS = [
    dict(temperature=t, top_k=k, top_p=p, min_p=m, repetition_penalty=r)
    for t, k, p, m, r in itertools.product((1.0, 0.7), (0, 5), (1.0, 0.8), (0.0, 0.1), (1.0, 1.3))
] + [
    dict(min_new_tokens=6), dict(min_new_tokens=12, temperature=0.6, top_k=3, repetition_penalty=1.1),
    dict(top_k=1000), dict(temperature=3.0, min_p=0.5, top_p=0.5), dict(repetition_penalty=0.8, top_p=0.95),
]  # fmt: skip


def prompts(count, seed=0):
    """One image, two, none ..., and text of several lengths around them."""
    generator = torch.Generator().manual_seed(seed)
    return [tiny.prompt(generator, GRIDS[i % len(GRIDS)], text=3 + i % 4) for i in range(count)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """transformers' model with telling weights, and ours read from the folder that transformers wrote."""
    config = transformers.AutoConfig.for_model(**tiny.config().to_dict())
    theirs = tiny.telling_weights(transformers.Qwen2_5_VLForConditionalGeneration(config)).eval()
    folder = tmp_path_factory.mktemp("checkpoint")
    theirs.save_pretrained(folder)
    return theirs, load_model(folder)


@pytest.fixture(scope="module")
def tokenizer():
    """One token for each of the model's: what the numbers it draws would say."""
    return train_tokenizer(["the cat sat on the mat, a small red cat"] * 3, vocab_size=tiny.config().vocab_size)


def their_tokens(theirs, inputs, stop=STOP, seed=0, **settings):
    """New ids (R, C) that transformers' generate draws by settings of our names, and by nothing else."""
    theirs.generation_config = transformers.GenerationConfig(eos_token_id=list(stop) or None, pad_token_id=0)
    if settings.setdefault("temperature", 1.0) == 0:
        settings = {name: value for name, value in settings.items() if name != "temperature"} | {"do_sample": False}
    torch.manual_seed(seed)
    settings = {"max_new_tokens": 12, "do_sample": True, "top_k": 0} | settings  # top_k: it would be 50
    return theirs.generate(**inputs, **settings)[:, inputs["input_ids"].shape[1] :]


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_equals_transformers_token_for_token(pair, penalty):
    """50 prompts in one batch of ours, one by one in theirs; two in five have two images or none."""
    theirs, model = pair
    rows = prompts(50)
    params = SamplingConfig(temperature=0, max_new_tokens=12, repetition_penalty=penalty)
    ours = generate(model, rows, 1, params, STOP)
    lengths = set()
    for row, [completion] in zip(rows, ours, strict=True):
        expected = their_tokens(theirs, their_inputs(row), temperature=0, repetition_penalty=penalty)
        assert completion.ids.tolist() == expected[0].tolist()
        assert completion.stopped == (completion.ids[-1].item() in STOP)
        lengths.add(len(completion.ids))
    assert len(lengths) > 3  # some stopped early: rows did leave the batch


@pytest.mark.parametrize("number, setting", enumerate(SETTINGS), ids=str)
def test_the_same_seed_draws_what_transformers_draws(pair, number, setting):
    """Single prompts: one row draws from the same random numbers until its end, wherever that is."""
    theirs, model = pair
    for seed, row in enumerate(prompts(3, seed=number)):
        expected = their_tokens(theirs, their_inputs(row), seed=seed, **setting)
        params = SamplingConfig(max_new_tokens=12, **setting)
        [[completion]] = generate(model, [row], 1, params, STOP, torch.Generator().manual_seed(seed))
        assert completion.ids.tolist() == expected[0].tolist()


@pytest.mark.parametrize("setting", SETTINGS[::6], ids=str)
def test_a_batch_draws_what_transformers_draws_for_a_batch(pair, setting):
    """5 prompts of any lengths and images, 3 completions each, without stop tokens: both draw 15 rows at each step.

    With stop tokens the draws go different ways once a row has ended: transformers goes on drawing padding for it.
    """
    theirs, model = pair
    rows = prompts(5)
    expected = their_tokens(theirs, left_padded(rows), stop=(), seed=0, num_return_sequences=3, **setting)
    params = SamplingConfig(max_new_tokens=12, **setting)
    ours = generate(model, rows, 3, params, (), torch.Generator().manual_seed(0))
    assert [c.ids.tolist() for group in ours for c in group] == expected.tolist()


def left_padded(rows):
    """transformers' inputs of several prompts."""
    inputs, longest = [their_inputs(row) for row in rows], max(len(row.input_ids) for row in rows)
    for row in inputs:
        row["attention_mask"] = torch.ones_like(row["input_ids"])
    batch = {
        name: torch.cat([row[name] for row in inputs if name in row]) for name in ("pixel_values", "image_grid_thw")
    }
    for name in ("input_ids", "mm_token_type_ids", "attention_mask"):
        left = [torch.nn.functional.pad(row[name], (longest - row[name].shape[1], 0)) for row in inputs]
        batch[name] = torch.cat(left)
    return batch


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("minimum", [0, 6])
def test_stop_strings_end_a_completion_where_transformers_ends_it(pair, tokenizer, temperature, minimum):
    """min_new_tokens holds back stop tokens, not stop strings, in theirs as in ours."""
    theirs, model = pair
    reader = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend)
    strings = ["at", "e", " m", "\x0f", "é", "!"]
    params = SamplingConfig(
        temperature=temperature, max_new_tokens=12, stop_strings=strings, min_new_tokens=minimum
    )  # fmt: skip
    ends = []
    for seed, row in enumerate(prompts(20)):
        settings = {"temperature": temperature, "stop_strings": strings, "min_new_tokens": minimum}
        expected = their_tokens(theirs, their_inputs(row), seed=seed, tokenizer=reader, **settings)
        generator = torch.Generator().manual_seed(seed)
        [[completion]] = generate(model, [row], 1, params, STOP, generator, tokenizer)
        assert completion.ids.tolist() == expected[0].tolist()
        by_text = any(string in tokenizer.decode(completion.ids.tolist()) for string in strings)
        assert completion.stopped == (by_text or completion.ids[-1].item() in STOP)
        ends.append((by_text, len(completion.ids)))
    assert 2 < sum(by_text for by_text, _ in ends) < 20 and len({length for _, length in ends}) > 3


def test_the_text_keeps_the_stop_string_and_what_its_token_says_beyond(tokenizer):
    """As transformers has it: a reward for </answer> finds it. Here a token "at" ends a completion with "a"."""
    params = SamplingConfig(max_new_tokens=40, stop_strings=["a"])
    completions = generate(tiny.model(), prompts(5), 8, params, (), torch.Generator().manual_seed(0), tokenizer)
    texts = [tokenizer.decode(c.ids.tolist()) for group in completions for c in group if c.stopped]
    assert all("a" in text for text in texts)
    assert any(text.endswith("at") for text in texts) and any(text.endswith("a") for text in texts)


def test_each_row_of_a_batch_ends_by_its_own_text(tokenizer):
    """Strings that begin with a prompt's last letter, too; test_stop_strings.py holds the rule to transformers'."""
    rows = prompts(10)
    letters = [chr(code) for code in range(33, 127)]
    strings = [tokenizer.decode(row.input_ids[-1:].tolist()) + letter for row in rows for letter in letters]
    params = SamplingConfig(max_new_tokens=30, stop_strings=strings)
    out = generate(tiny.model(), rows, 6, params, (), torch.Generator().manual_seed(0), tokenizer)
    lengths = []
    for row, group in zip(rows, out, strict=True):
        for completion in group:
            alone, first = StopStrings(strings, tokenizer, [row.input_ids]), torch.tensor([0])
            *before, last = [alone.completed(first, token[None]).item() for token in completion.ids]
            assert not any(before) and last == completion.stopped
            lengths.append((completion.stopped, len(completion.ids)))
    assert (True, 1) in lengths and (False, 30) in lengths and len(set(lengths)) > 9


def test_max_length_counts_prompt_and_completion(pair):
    theirs, model = pair
    rows = prompts(10)
    longest = max(len(row.input_ids) for row in rows)
    params = SamplingConfig(temperature=0, max_length=longest + 2, max_new_tokens=30)
    for row, [completion] in zip(rows, generate(model, rows, 1, params, STOP), strict=True):
        theirs.generation_config = transformers.GenerationConfig(eos_token_id=list(STOP), pad_token_id=0)
        most = min(longest + 2, len(row.input_ids) + 30)
        expected = theirs.generate(**their_inputs(row), max_length=most, do_sample=False)[0, len(row.input_ids) :]
        assert completion.ids.tolist() == expected.tolist()
        assert completion.stopped == (completion.ids[-1].item() in STOP)


CONFIGS = [
    {}, {"do_sample": True}, {"temperature": 0.3, "top_k": 4}, {"do_sample": True, "temperature": 1e-6},
    {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.1, "top_k": 1, "top_p": 0.001},
    {"do_sample": True, "top_k": 0, "top_p": 0.8, "min_p": 0.02, "use_cache": True, "bos_token_id": 5},
    {"do_sample": True, "temperature": 2.0, "top_k": None, "eos_token_id": 23, "min_new_tokens": 3},
    {"repetition_penalty": 1.3, "max_new_tokens": 5}, {"do_sample": True, "max_new_tokens": 5, "max_length": 3},
    {"do_sample": True, "max_length": 61, "num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0},
    {"stop_strings": "a", "eos_token_id": [7, 11]}, {"stop_strings": ["e", "at"], "do_sample": True},
]  # fmt: skip


@pytest.mark.parametrize("values", CONFIGS, ids=str)
def test_a_generation_config_draws_what_it_draws_in_transformers(pair, tokenizer, values):
    """A top_k that is not said is 50 of 300 tokens here: not having it would show."""
    theirs, model = pair
    reader = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend)
    length = {} if values.keys() & {"max_new_tokens", "max_length"} else {"max_new_tokens": 20}
    params = SamplingConfig.from_generation_config(values, **length)
    for seed, row in enumerate(prompts(5)):
        theirs.generation_config = transformers.GenerationConfig(**{"pad_token_id": 0} | values)
        torch.manual_seed(seed)
        expected = theirs.generate(**their_inputs(row), tokenizer=reader, **length)[0, len(row.input_ids) :]
        [[completion]] = generate(model, [row], 1, params, (), torch.Generator().manual_seed(seed), tokenizer)
        assert completion.ids.tolist() == expected.tolist()


def test_overrides_win_over_the_generation_config():
    hub = {"do_sample": True, "temperature": 1e-6, "repetition_penalty": 1.05, "eos_token_id": [151645, 151643]}
    read = SamplingConfig.from_generation_config
    assert read(hub) == SamplingConfig(
        temperature=1e-6, top_k=50, repetition_penalty=1.05, stop_token_ids=[151645, 151643]
    )  # fmt: skip
    assert read(hub, temperature=0.7, top_k=0, repetition_penalty=1.0, stop_token_ids=None) == SamplingConfig(0.7)
    assert read(hub, temperature=0.0).top_k == 0
    assert read({"top_k": 7}, temperature=0.5) == SamplingConfig(0.5, top_k=7)
    assert read({"max_length": 9}, max_new_tokens=8).max_length is None


HEEDED = {
    "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "max_length",
    "min_new_tokens", "stop_strings", "eos_token_id",
}  # fmt: skip
WITHOUT_EFFECT = {  # on the draw of one completion: of beams, caches, outputs and speed
    "early_stopping", "length_penalty", "use_mtp", "use_cache", "cache_implementation", "cache_config", "max_cache_len",
    "renormalize_logits", "remove_invalid_values", "num_return_sequences", "output_attentions", "output_hidden_states",
    "output_scores", "output_logits", "return_dict_in_generate", "pad_token_id", "bos_token_id",
    "decoder_start_token_id", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit",
    "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "speculation_type", "compile_config",
    "disable_compile", "continuous_batching_config", "low_memory", "prefill_chunk_size", "transformers_version",
}  # fmt: skip


def test_every_key_of_a_generation_config_is_known():
    keys = {name for name in vars(transformers.GenerationConfig()) if not name.startswith("_")}
    assert keys == HEEDED | WITHOUT_EFFECT | set(NOT_HONOURED)


@pytest.mark.parametrize("name", NOT_HONOURED)
def test_a_key_that_changes_the_draw_and_is_not_supported_is_refused(name):
    SamplingConfig.from_generation_config({name: NOT_HONOURED[name]})
    with pytest.raises(ValueError, match=rf"{name} = 7 changes what is drawn"):
        SamplingConfig.from_generation_config({name: 7})


@pytest.mark.parametrize("bad", [{"do_sample": True, "temperature": "hot"}, {"repetition_penalty": -1},
                                 {"eos_token_id": "x"}, {"max_new_tokens": 2.5}], ids=str)  # fmt: skip
def test_a_generation_config_with_a_wrong_value_is_refused(bad):
    name = "stop_token_ids" if "eos_token_id" in bad else list(bad)[-1]
    with pytest.raises(ValueError, match=f"generation_config: {name} is"):
        SamplingConfig.from_generation_config(bad)


def test_tokens_are_handed_out_as_they_come():
    rows, params, told = prompts(3), SamplingConfig(max_new_tokens=9), []
    arguments = (tiny.model(), rows, 4, params, STOP)
    plain = generate(*arguments, torch.Generator().manual_seed(0))
    out = generate(*arguments, torch.Generator().manual_seed(0), on_tokens=lambda *step: told.append(step))
    written = [[id_ for rows, ids in told for row, id_ in zip(rows, ids, strict=True) if row == i] for i in range(12)]
    assert written == [c.ids.tolist() for group in out for c in group]
    assert written == [c.ids.tolist() for group in plain for c in group]
    assert len(told) == 9 and len(told[0][0]) > len(told[-1][0])


def test_own_stop_tokens_replace_the_given_ones():
    params = SamplingConfig(max_new_tokens=30, stop_token_ids=[5, 6, 8])
    out = generate(tiny.model(), prompts(5), 4, params, STOP, torch.Generator().manual_seed(0))
    last = {c.ids[-1].item() for group in out for c in group if c.stopped}
    assert last and last <= {5, 6, 8}
    assert any(set(STOP) & set(c.ids.tolist()) for group in out for c in group)


@pytest.mark.parametrize("setting, message", [
    (dict(max_length=20), r"max_length is 20, but prompt 1 alone has \d\d tokens"),
    (dict(stop_token_ids=[3, 300]), "stop_token_ids has 300, but the model's tokens end at 299"),
    (dict(stop_strings=["a"]), "stop_strings need a tokenizer"),
], ids=str)  # fmt: skip
def test_what_cannot_be_drawn_is_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        generate(tiny.model(), prompts(2), 1, SamplingConfig(**setting), STOP)


def test_sampler_logps_equal_the_scorer_in_float32():
    """Token in, token out: what the sampler recorded is what training computes, to 1e-5 nats."""
    model = tiny.model()
    rows = prompts(5)
    params = SamplingConfig(temperature=0.8, max_new_tokens=12)
    completions = generate(model, rows, 6, params, STOP, torch.Generator().manual_seed(0))
    batch = pack(rows, [[c.ids for c in group] for group in completions], model.config)
    logps, _ = per_token_logps(model, batch, temperature=0.8)
    recorded = torch.cat([c.logps for group in completions for c in group])
    assert (logps - recorded).abs().max() < 1e-5
    assert len({len(c.ids) for group in completions for c in group}) > 3


def test_temperature_of_the_scorer_matters():
    model = tiny.model()
    rows = prompts(2)
    completions = generate(model, rows, 4, SamplingConfig(temperature=0.8), STOP, torch.Generator().manual_seed(0))
    batch = pack(rows, [[c.ids for c in group] for group in completions], model.config)
    recorded = torch.cat([c.logps for group in completions for c in group])
    assert (per_token_logps(model, batch, temperature=1.0)[0] - recorded).abs().max() > 0.1


def test_the_same_seed_gives_the_same_completions():
    model, rows = tiny.model(), prompts(3)
    params = SamplingConfig(max_new_tokens=8)

    def draw(seed):
        out = generate(model, rows, 4, params, STOP, torch.Generator().manual_seed(seed))
        return [c.ids.tolist() for group in out for c in group]

    assert draw(0) == draw(0) != draw(1)


def test_completions_end_with_the_first_stop_token():
    out = generate(
        tiny.model(), prompts(5), 8, SamplingConfig(max_new_tokens=10), STOP, torch.Generator().manual_seed(3)
    )
    everyone = [c for group in out for c in group]
    for completion in everyone:
        ids = completion.ids.tolist()
        assert not set(ids[:-1]) & set(STOP)
        assert completion.stopped == (ids[-1] in STOP)
        assert completion.stopped or len(ids) == 10
        assert len(completion.logps) == len(ids)
    assert {c.stopped for c in everyone} == {True, False}


def test_a_prompt_does_not_feel_its_neighbours():
    """Greedy completions of a prompt are the same alone and among prompts of other lengths."""
    model, rows = tiny.model(dtype=torch.float64), prompts(5)
    params = SamplingConfig(temperature=0, max_new_tokens=8)
    together = generate(model, rows, 1, params, STOP)
    for row, [completion] in zip(rows, together, strict=True):
        [[alone]] = generate(model, [row], 1, params, STOP)
        assert alone.ids.tolist() == completion.ids.tolist()


def test_a_prompt_is_read_once_for_all_its_completions(monkeypatch):
    """The decoder sees each prompt token once, then only new tokens."""
    model, rows, seen = tiny.model(), prompts(2), []
    forward = model.model.forward
    monkeypatch.setattr(model.model, "forward", lambda x, *rest: (seen.append(len(x)), forward(x, *rest))[1])
    generate(model, rows, 8, SamplingConfig(max_new_tokens=3), (), torch.Generator().manual_seed(0))
    assert seen == [sum(len(row.input_ids) for row in rows), 16, 16]


def test_completions_by_numbers_do_not_depend_on_what_is_generated_beside_them():
    model, rows = tiny.model(dtype=torch.float64), prompts(5)
    params, numbers = SamplingConfig(max_new_tokens=10), uniforms(list("abcde"), 3, 10)

    def draw(places):
        out = generate(model, [rows[i] for i in places], 3, params, STOP, uniforms=numbers[places])
        return [[c.ids.tolist() for c in group] for group in out]

    together = draw([0, 1, 2, 3, 4])
    assert draw([4, 2]) == [together[4], together[2]]
    assert [draw([i])[0] for i in range(5)] == together
    assert len({tuple(ids) for group in together for ids in group}) > 10


def test_logits_that_are_not_finite_end_the_generation():
    """Also where only a later token finds them so."""
    model, params = tiny.model(), SamplingConfig(max_new_tokens=4)
    with torch.no_grad():
        model.model.embed_tokens.weight[3:] = float("nan")
        model.model.embed_tokens.weight[290:294] = 0
    row = prompts(1)[0]
    row.input_ids.clamp_(max=2)
    row = replace(
        row, pixel_values=row.pixel_values[:0], image_grid_thw=row.image_grid_thw[:0], second_per_grid_ts=None
    )
    with pytest.raises(FloatingPointError, match="not finite"):
        generate(model, [row], 2, params, (), uniforms=uniforms(["a"], 2, 4))
