"""A folder's generation_config.json draws what it draws in transformers; what has no counterpart is refused."""

import pytest
import torch

from minivlmrl.sampling.filters import SamplingOptions
from minivlmrl.sampling.generation_config import NOT_SUPPORTED, from_generation_config
from minivlmrl.sampling.stop_strings import StopStrings

from draws import prompts, sample, seeded

CONFIGS = [
    {}, {"do_sample": True}, {"temperature": 0.3, "top_k": 4}, {"do_sample": True, "temperature": 1e-6},
    {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.1, "top_k": 1, "top_p": 0.001},
    {"do_sample": True, "top_k": 0, "top_p": 0.8, "min_p": 0.02, "use_cache": True, "bos_token_id": 5},
    {"do_sample": True, "temperature": 2.0, "top_k": None, "eos_token_id": 23, "min_new_tokens": 3},
    {"repetition_penalty": 1.3, "max_new_tokens": 5}, {"do_sample": True, "max_new_tokens": 5, "max_length": 3},
    {"do_sample": True, "num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0},
    {"stop_strings": "a", "eos_token_id": [7, 11]}, {"stop_strings": ["e", "at"], "do_sample": True},
]  # fmt: skip


@pytest.mark.parametrize("values", CONFIGS, ids=str)
def test_a_generation_config_draws_what_it_draws_in_transformers(pair, oracle, tokenizer_300, values):
    """A top_k that is not said is 50 of 300 tokens here: not having it would show."""
    theirs, model = pair
    reader = oracle.transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer_300.backend)
    length = {} if "max_new_tokens" in values else {"max_new_tokens": 20}
    sampling = from_generation_config(values, **length)
    for seed, row in enumerate(prompts(2)):
        theirs.generation_config = oracle.transformers.GenerationConfig(**{"pad_token_id": 0} | values)
        torch.manual_seed(seed)
        inputs = oracle.their_inputs(row)
        expected = theirs.generate(**inputs, tokenizer=reader, **length)[0, len(row.input_ids) :]
        wrap = None
        if sampling.stop_strings:
            wrap = StopStrings(sampling.stop_strings, tokenizer_300, [row.input_ids]).ending
        [[completion]] = sample(model, [row], 1, sampling, (), seeded(seed), wrap)
        assert completion.ids.tolist() == expected.tolist()


def test_overrides_win_over_the_generation_config():
    hub = {"do_sample": True, "temperature": 1e-6, "repetition_penalty": 1.05, "eos_token_id": [151645, 151643]}
    read = from_generation_config
    own = {"temperature": 1e-6, "repetition_penalty": 1.05, "stop_token_ids": [151645, 151643]}
    assert read(hub) == SamplingOptions(top_k=50, **own)
    assert read(hub, temperature=0.7, top_k=0, repetition_penalty=1.0, stop_token_ids=None) == SamplingOptions(0.7)
    assert read(hub, temperature=0.0).top_k == 0
    assert read({"top_k": 7}, temperature=0.5) == SamplingOptions(0.5, top_k=7)
    assert read({"max_length": 9}, max_new_tokens=8).max_new_tokens == 8
    with pytest.raises(ValueError, match="max_length counts the prompt; give max_new_tokens"):
        read({"max_length": 9})


def test_keys_that_are_refused_are_keys_of_transformers(transformers):
    """All 72 were looked up: the others change no draw, or are heeded."""
    keys = {name for name in vars(transformers.GenerationConfig()) if not name.startswith("_")}
    assert set(NOT_SUPPORTED) <= keys and (len(keys), len(NOT_SUPPORTED)) == (72, 26)


@pytest.mark.parametrize("name", NOT_SUPPORTED)
def test_a_key_that_changes_the_draw_and_is_not_supported_is_refused(name):
    from_generation_config({name: NOT_SUPPORTED[name]})
    with pytest.raises(ValueError, match=rf"{name} = 7 changes what is drawn"):
        from_generation_config({name: 7})


@pytest.mark.parametrize("bad", [{"do_sample": True, "temperature": "hot"}, {"repetition_penalty": -1},
                                 {"eos_token_id": "x"}, {"max_new_tokens": 2.5}], ids=str)  # fmt: skip
def test_a_generation_config_with_a_wrong_value_is_refused(bad):
    name = "stop_token_ids" if "eos_token_id" in bad else list(bad)[-1]
    with pytest.raises(ValueError, match=f"generation_config: {name} is"):
        from_generation_config(bad)
