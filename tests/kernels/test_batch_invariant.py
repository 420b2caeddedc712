"""In batch_invariant_mode, the sampler and the trainer compute equal bits, however the tokens are batched."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from benchmarks import batch_invariant as benchmark
from minivlmrl.data.rows import uniform_numbers
from minivlmrl.generation.generate import generate, make_token_sampler, sample_by_uniforms
from minivlmrl.kernels import batch_invariant, dense_attention
from minivlmrl.kernels.batch_invariant import batch_invariant_mode
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.packing import pack

import draws
import tiny

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
DTYPES = (torch.float32, torch.bfloat16)


def sample(model, prompts, generations=4, new_tokens=40, temperature=1.0, options=None):
    """Sample completions, some of which end early, so that fewer rows run in later steps."""
    keys = [f"key {i}" for i in range(len(prompts))]
    uniforms = sample_by_uniforms(uniform_numbers(keys, generations, new_tokens))
    if options is not None:
        return draws.sample(model, prompts, generations, options, draw=uniforms)
    sample_token = make_token_sampler(temperature, draws.STOP[:3], uniforms)
    return generate(model, prompts, generations, new_tokens, sample_token)


@torch.no_grad()
def score(model, prompts, completions, temperature=1.0):
    """Return the log-probabilities of the trainer, for all tokens in order."""
    return per_token_logps(model, pack(prompts, completions, model.config), temperature)[0]


def ways_to_batch(model, prompts, completions, temperature=1.0):
    """Score the same tokens in several batches: {way: log-probabilities (M,)}."""
    pairs = list(zip(prompts, completions, strict=True))
    count = len(list(itertools.chain(*completions)))
    lengths = [len(c.ids) for c in itertools.chain(*completions)]
    backwards = [score(model, prompts[::-1], [g[::-1] for g in completions[::-1]], temperature)]
    parts = torch.cat(backwards).split(lengths[::-1])
    assert len(parts) == count
    return {
        "one batch": score(model, prompts, completions, temperature),
        "one prompt in a batch": torch.cat([score(model, [p], [g], temperature) for p, g in pairs]),
        "one completion in a batch": torch.cat([score(model, [p], [[c]], temperature) for p, g in pairs for c in g]),
        "in reverse order": torch.cat(parts[::-1]),
    }


def sampled_logps(completions):
    return torch.cat([c.sampled_logps for c in itertools.chain(*completions)])


def check(model_type, dtype, count=5, temperature=1.0, **sampling):
    model = tiny.model(model_type=model_type, dtype=dtype)
    prompts = draws.prompts(count)
    with batch_invariant_mode():
        completions = sample(model, prompts, temperature=temperature, **sampling)
        expected = sampled_logps(completions)
        for way, logps in ways_to_batch(model, prompts, completions, temperature).items():
            share = (logps == expected).float().mean().item()
            assert torch.equal(logps, expected), f"{model_type}, {dtype}, {way}: {share:.3f} of the bits are equal"
    return len(expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_sampler_and_trainer_compute_equal_bits(model_type, dtype):
    assert check(model_type, dtype) > 300


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_twenty_thousand_tokens_have_equal_bits(model_type, dtype):
    """20,000 tokens in all cases together."""
    assert check(model_type, dtype, count=20, generations=8) > 2500


@pytest.mark.parametrize("temperature", [0.7, 0.0])
def test_the_temperature_is_that_of_the_trainer(temperature):
    """A temperature of 0 takes the likeliest token, and its log-probability is that at a temperature of 1."""
    model = tiny.model()
    prompts = draws.prompts(3)
    with batch_invariant_mode():
        completions = sample(model, prompts, temperature=temperature)
        assert torch.equal(score(model, prompts, completions, temperature or 1.0), sampled_logps(completions))


def test_probabilities_over_the_tokens_that_filters_keep_have_equal_bits():
    model = tiny.model()
    prompts = draws.prompts(3)
    options = draws.options(top_k=5, top_p=0.8, temperature=0.7, repetition_penalty=1.3, max_new_tokens=30)
    with batch_invariant_mode():
        completions = sample(model, prompts, options=options)
        assert torch.equal(score(model, prompts, completions, 0.7), sampled_logps(completions))


def test_two_threads_compute_the_bits_of_one():
    model = tiny.model()
    prompts = draws.prompts(5)
    with batch_invariant_mode():
        completions = sample(model, prompts)
        torch.set_num_threads(2)
        assert torch.equal(score(model, prompts, completions), sampled_logps(completions))


def test_a_long_row_is_summed_alike_alone_and_in_a_batch():
    """With two threads, torch divides the sum of a single row of this length, but not the sums of two rows."""
    torch.set_num_threads(2)
    x = torch.rand(40, 2**18 + 5)
    rows = torch.cat([x[i : i + 1].sum(-1) for i in range(40)])
    assert not torch.equal(rows, x.sum(-1))
    with batch_invariant_mode():
        rows = torch.cat([batch_invariant.sum_rows(x[i : i + 1]) for i in range(40)])
        assert torch.equal(rows, batch_invariant.sum_rows(x))


@pytest.mark.parametrize("rule", [2, 4])
def test_without_a_rule_some_bits_differ(rule):
    """Rules 1 and 3 only make a difference on some processors, so they are not tested here."""
    model = tiny.model()
    prompts = draws.prompts(5)
    with batch_invariant_mode(), benchmark.without(rule):
        completions = sample(model, prompts)
        assert not torch.equal(score(model, prompts, completions), sampled_logps(completions))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_values_and_gradients_are_the_usual_ones(model_type):
    """In float64, both ways agree to 1e-11, for the log-probabilities, the entropies and all gradients."""
    model = tiny.model(model_type=model_type, dtype=torch.float64)
    prompts = draws.prompts(4)
    for prompt in prompts:
        prompt.pixel_values = prompt.pixel_values.double()
    generator = torch.Generator().manual_seed(0)
    completions = [[tiny.completion(generator, n) for n in (1, 5, 40)] for _ in prompts]
    batch = tiny.pack(prompts, completions, model.config)
    weights = torch.randn(len(batch.completion_ids), generator=generator, dtype=torch.float64)
    results = []
    for enabled in (False, True):
        model.zero_grad()
        with batch_invariant_mode(enabled):
            logps, entropies = per_token_logps(model, batch)
            (weights * (logps + 0.1 * entropies)).sum().backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        results.append({"logps": logps.detach(), "entropies": entropies.detach()} | grads)
    usual, invariant = results
    assert usual.keys() == invariant.keys() and len(usual) > 40
    for name, value in usual.items():
        torch.testing.assert_close(
            invariant[name], value, rtol=1e-11, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize(("ours", "theirs"), [
    (batch_invariant.silu, F.silu), (batch_invariant.gelu, F.gelu),
    (lambda x: batch_invariant.gelu(x, "tanh"), lambda x: F.gelu(x, approximate="tanh")),
    (batch_invariant.quick_gelu, lambda x: x * torch.sigmoid(1.702 * x)),
])  # fmt: skip
def test_activations_have_the_values_of_torch(ours, theirs):
    x = torch.linspace(-30, 30, 3001, dtype=torch.float64)
    with batch_invariant_mode():
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-13, atol=1e-14)
        x = x.float()
        assert torch.equal(torch.cat([ours(part) for part in x.split(7)]), ours(x))


def test_the_mode_ends_after_an_error():
    with pytest.raises(KeyError), batch_invariant_mode():
        assert batch_invariant.is_batch_invariant()
        raise KeyError
    assert not batch_invariant.is_batch_invariant()


def test_the_backward_pass_uses_the_usual_functions(monkeypatch):
    """The gradient of attention is that of the fused kernels, which do not store the scores."""
    calls = []
    usual = dense_attention.attention_scores
    modes = lambda *arguments: calls.append(batch_invariant.is_batch_invariant()) or usual(*arguments)  # noqa: E731
    monkeypatch.setattr(dense_attention, "attention_scores", modes)
    q = torch.randn(2, 4, 5, 8, requires_grad=True)
    with batch_invariant_mode():
        out = dense_attention.dense_attention(q, q[:, :2], q[:, 2:], is_causal=True)
        assert calls == [True]
        out.sum().backward()
    assert calls == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("variables", [
    {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
])  # fmt: skip
def test_older_processors_compute_equal_bits_too(variables):
    test = f"{__file__}::test_sampler_and_trainer_compute_equal_bits"
    command = [sys.executable, "-m", "pytest", "-n", "0", test]
    subprocess.run(command, env=os.environ | variables, check=True, stdout=subprocess.DEVNULL)
