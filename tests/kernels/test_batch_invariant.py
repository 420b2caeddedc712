"""In batch_invariant_mode, the sampler and the trainer compute equal bits, however the tokens are batched."""

import functools
import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import has_torch_function

from minivlmrl.data.rows import uniform_numbers
from minivlmrl.distributed.weights import compute_again
from minivlmrl.generation.generate import generate, make_token_sampler, sample_by_uniforms
from minivlmrl.kernels import batch_invariant, dense_attention
from minivlmrl.kernels.batch_invariant import batch_invariant_mode
from minivlmrl.kernels.float32_matmul import float32_matmul
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.packing import pack

import draws
import tiny

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
DTYPES = (torch.float32, torch.bfloat16)


def sample(model, prompts, generations=4, new_tokens=40, temperature=1.0, options=None):
    """Sample completions; some end early, so that fewer rows run in later steps."""
    keys = [f"key {i}" for i in range(len(prompts))]
    uniforms = sample_by_uniforms(uniform_numbers(keys, generations, new_tokens))
    if options is not None:
        return draws.sample(model, prompts, generations, options, draw=uniforms)
    sample_token = make_token_sampler(temperature, draws.STOP[:3], uniforms)
    return generate(model, prompts, generations, new_tokens, sample_token)


@torch.no_grad()
def score(model, prompts, completions, temperature=1.0):
    """Return the trainer's log-probabilities, for all tokens in order."""
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
    """Temperature 0 takes the likeliest token, with the log-probability at temperature 1."""
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
    """With two threads, torch divides a single row's sum at this length, but not the sums over two rows."""
    torch.set_num_threads(2)
    x = torch.rand(40, 2**18 + 5)
    rows = torch.cat([x[i : i + 1].sum(-1) for i in range(40)])
    assert not torch.equal(rows, x.sum(-1))
    with batch_invariant_mode():
        rows = torch.cat([batch_invariant.sum_rows(x[i : i + 1]) for i in range(40)])
        assert torch.equal(rows, batch_invariant.sum_rows(x))


@pytest.mark.parametrize("files", [
    pytest.param(["kernels.dense_attention", "kernels.shared_prefix"], id="rule 2"),
    pytest.param(["generation.generate"], id="rule 4"),
])  # fmt: skip
def test_without_a_rule_some_bits_differ(files, monkeypatch):
    """Rules 1 and 3 only make a difference on some processors, so they are not tested here."""
    for file in files:
        monkeypatch.setattr(f"minivlmrl.{file}.is_batch_invariant", lambda: False)
    model = tiny.model()
    prompts = draws.prompts(5)
    with batch_invariant_mode():
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


def products(x, weight):
    """Compute x @ weight.T (N, m) for x (N, n) in the three ways that models and kernels use."""
    zeros = x.new_zeros(len(x), len(weight))
    return torch.stack([F.linear(x, weight), torch.addmm(zeros, x, weight.T), float32_matmul(x, weight.T).to(x.dtype)])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("inner", [1, 2, 5, 8, 13, 16, 31, 33, 63, 64, 100, 294])
def test_a_row_of_a_product_does_not_depend_on_the_other_rows(dtype, inner):
    """Without padding, weights with few outputs or an odd inner size would give other bits to a row on its own."""
    generator = torch.Generator().manual_seed(inner)
    x = torch.randn(37, inner, generator=generator).to(dtype)
    with batch_invariant_mode():
        for outputs in (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 69):
            weight = torch.randn(outputs, inner, generator=generator).to(dtype)
            expected = products(x, weight)
            for size in (1, 7, 16):
                parts = torch.cat([products(rows, weight) for rows in x.split(size)], dim=1)
                assert torch.equal(parts, expected), f"{outputs} outputs, batches of {size} rows"
            assert torch.equal(products(x.flip(0), weight).flip(1), expected), f"{outputs} outputs, other order"


# torch functions that have a rule, with their arguments' shapes
RULES = {
    "linear": (F.linear, (5, 7), (3, 7), (3,)),
    "linear without bias": (F.linear, (5, 7), (3, 7)),
    "linear with two batch axes": (F.linear, (2, 5, 7), (3, 7), (3,)),
    "linear of a vector": (F.linear, (7,), (3, 7), (3,)),
    "addmm": (lambda total, a, b: torch.addmm(total, a, b, alpha=0.7), (5, 3), (5, 7), (7, 3)),
    "silu": (F.silu, (301, 5)),
    "gelu": (F.gelu, (301, 5)),
    "gelu, tanh": (lambda x: F.gelu(x, approximate="tanh"), (301, 5)),
    "torch.sigmoid": (torch.sigmoid, (301, 5)),
    "Tensor.sigmoid": (lambda x: x.sigmoid(), (301, 5)),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_has_the_value_and_the_gradients_of_torch(name, monkeypatch):
    """In float64 to 1e-13. The calls are counted, because a function without a rule would agree, too."""
    function, *shapes = RULES[name]
    calls = []
    for replaced, rule in list(batch_invariant.RULES.items()):
        count = lambda *given, rule=rule, **more: calls.append(rule) or rule(*given, **more)  # noqa: E731
        monkeypatch.setitem(batch_invariant.RULES, replaced, count)
    generator = torch.Generator().manual_seed(0)
    arguments = [8 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    results = []
    for enabled in (False, True):
        inputs = [x.clone().requires_grad_() for x in arguments]
        with batch_invariant_mode(enabled):
            out = function(*inputs)
            out.square().sum().backward()
        assert len(calls) == enabled
        results.append([out.detach(), *(x.grad for x in inputs)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("function", [F.silu, F.gelu, lambda x: F.gelu(x, approximate="tanh"), torch.sigmoid])
def test_an_activation_does_not_depend_on_the_other_numbers(function):
    x = torch.linspace(-30, 30, 3001)
    with batch_invariant_mode():
        assert torch.equal(torch.cat([function(part) for part in x.split(7)]), function(x))


def test_in_place_activations_are_refused():
    with batch_invariant_mode(), pytest.raises(ValueError, match="silu has inplace=True; leave inplace out"):
        F.silu(torch.ones(3), inplace=True)


@pytest.mark.parametrize("in_thread", [False, True])
def test_recomputed_activations_follow_the_rules(in_thread, monkeypatch):
    """Tensor.backward runs outside torch's function mode, and the mode belongs to one thread."""
    calls = []
    usual = batch_invariant.silu
    monkeypatch.setitem(batch_invariant.RULES, F.silu, lambda x, inplace: calls.append(x) or usual(x))
    x = torch.randn(5, 7, requires_grad=True)
    with batch_invariant_mode():
        backward = functools.partial(compute_again(F.silu, x).sum().backward, retain_graph=True)
        assert len(calls) == 1
        for passes in (1, 2):
            if in_thread:
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(backward).result()
            else:
                backward()
            assert len(calls) == 1 + passes
        F.silu(x)
    assert len(calls) == 4


def test_a_block_inside_the_mode_can_leave_it(monkeypatch):
    calls = []
    monkeypatch.setitem(batch_invariant.RULES, F.silu, lambda x, inplace: calls.append(x) or x)
    with batch_invariant_mode():
        with batch_invariant_mode(False):
            F.silu(torch.ones(3))
        assert not calls
        F.silu(torch.ones(3))
    assert len(calls) == 1


def test_without_the_mode_torch_calls_its_functions_directly():
    """The usual path must not pay for the mode, neither before it, nor after it, nor with enabled=False."""
    x = torch.ones(3)
    assert not has_torch_function((x,))
    with batch_invariant_mode(False):
        assert not has_torch_function((x,))
    with batch_invariant_mode():
        assert has_torch_function((x,))
    assert not has_torch_function((x,))


def test_the_mode_ends_after_an_error():
    with pytest.raises(KeyError), batch_invariant_mode():
        assert batch_invariant.is_batch_invariant()
        raise KeyError
    assert not batch_invariant.is_batch_invariant()


def test_the_backward_pass_uses_the_usual_functions(monkeypatch):
    """Attention's gradient comes from the fused kernels, which do not store the scores."""
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
