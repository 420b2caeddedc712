"""Test sampling in blocks, interpreted by test_backend.py: with equal probabilities, the ids equal inverse_cdf's ids.

The kernels round probabilities in another way than torch's softmax. So the exact tests compute the kernels'
probabilities, and pass them to inverse_cdf.
"""

import math

import numpy as np
import pytest
import torch
from interpreter import INTERPRETED

from minivlmrl.data.rows import uniform_numbers
from minivlmrl.generation.block_sampling import make_block_sampler, samples_in_blocks
from minivlmrl.generation.generate import inverse_cdf, make_token_sampler, sample_by_uniforms
from minivlmrl.generation.sampler import Sampler
from minivlmrl.kernels import sample_blocks as module
from minivlmrl.kernels.sample_blocks import sample_blocks

import tiny
from draws import options, prompts

DEVICE = "cpu" if INTERPRETED else "cuda"
runs = pytest.mark.usefixtures() if INTERPRETED else pytest.mark.gpu  # a compiled kernel needs a GPU
interpreted = pytest.mark.skipif(not INTERPRETED, reason="rounds as numpy: `pytest -m slow` runs it interpreted")
EDGES = [0.0, 2**-53, 0.25, 0.5, 0.75, 1 - 2**-53]


def numbers(rows, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    return 3 * logits, torch.rand(rows, generator=generator, dtype=torch.float64)


@runs
def test_on_a_gpu_or_interpreted_powers_of_two_give_the_ids_of_inverse_cdf():
    """With temperature log2(e), exp(z / T) equals 2^z. So all probabilities and all token boundaries are exact.

    Tokens with probability 0 are on both sides of the block boundaries, and at the end.
    """
    V = 2 * module.BLOCK.value + 700
    weights = torch.zeros(V)
    chosen = [0, 5, 1022, 1025, 2046, 2050, 2600]
    weights[chosen] = torch.tensor([1 / 4, 1 / 8, 1 / 8, 1 / 4, 1 / 8, 1 / 16, 1 / 16])
    edges = weights[chosen].double().cumsum(0)
    uniforms = torch.cat([edges[:-1], edges - 2**-50, torch.tensor(EDGES, dtype=torch.float64)])
    logits = weights.log2().expand(len(uniforms), -1).contiguous()
    ids, logps = sample_blocks(logits.to(DEVICE), uniforms.to(DEVICE), math.log2(math.e))
    assert ids.tolist() == inverse_cdf(weights.expand(len(uniforms), -1), uniforms).tolist()
    assert ids[:13].tolist() == chosen[1:] + chosen
    torch.testing.assert_close(logps.cpu(), weights[ids.cpu()].log(), atol=1e-6, rtol=0)


@interpreted
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("width", [1, 1023, 1024, 5000])
def test_interpreted_the_ids_are_those_of_inverse_cdf(width, temperature):
    """The module's formula in numpy has the same rounding as the interpreter."""
    logits, uniforms = numbers(24, width)
    logits = logits.float()
    logits[::2, ::3] = float("-inf")
    logits[:, 0] = 0.0
    uniforms[: len(EDGES)] = torch.tensor(EDGES, dtype=torch.float64)
    ids, _ = sample_blocks(logits, uniforms, temperature)
    probs = kernel_probabilities(logits, temperature)
    assert ids.tolist() == inverse_cdf(probs, uniforms).tolist()
    assert (probs.gather(1, ids[:, None]) > 0).all()


def kernel_probabilities(logits, temperature):
    """Compute the kernels' probabilities (r, V), each rounded down to a multiple of 2^-52."""
    tops, sums = torch.empty(2, len(logits))
    k = module.LOG2E / temperature
    module._top_kernel[(len(logits),)](logits, tops, sums, logits.stride(0), logits.shape[1], k)
    differences = logits.numpy() * np.float32(k) - tops.numpy()[:, None]
    scales = np.float32(2.0**52) / sums.numpy()[:, None]
    return torch.from_numpy(np.exp2(differences) * scales) / 2.0**52


@runs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_on_a_gpu_or_interpreted_ids_and_log_probabilities_are_exact_to_float32(dtype, temperature):
    """The random number is inside the token's interval in the cumulative distribution in float64.

    Each row gives the same token in a separate batch.
    """
    logits, uniforms = numbers(9, 3001, seed=1)
    logits = logits.to(dtype)
    given = logits.to(DEVICE), uniforms.to(DEVICE)
    ids, logps = (x.cpu() for x in sample_blocks(*given, temperature))
    exact = (logits.double() / temperature).log_softmax(-1)
    torch.testing.assert_close(logps.double(), exact.gather(1, ids[:, None])[:, 0], atol=1e-5, rtol=0)
    ends = exact.exp().cumsum(-1).gather(1, ids[:, None])[:, 0]
    assert (uniforms <= ends + 1e-6).all() and (uniforms >= ends - logps.exp() - 1e-6).all()
    for row in range(len(logits)):
        alone = sample_blocks(*(x[row : row + 1] for x in given), temperature)
        assert alone[0].item() == ids[row] and alone[1].item() == logps[row]


@runs
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns in the interpreter
def test_on_a_gpu_or_interpreted_logits_that_are_not_finite_give_no_finite_log_probability():
    """The ids stay inside the vocabulary, so that the next step does not read outside the embeddings."""
    logits, uniforms = numbers(4, 2500)
    logits = logits.float()
    logits[0, 7] = float("nan")
    logits[1] = float("nan")
    logits[2, 2000] = float("inf")
    logits[3] = float("-inf")
    ids, logps = sample_blocks(logits.to(DEVICE), uniforms.to(DEVICE), 1.0)
    assert ((ids >= 0) & (ids < 2500)).all() and not logps.isfinite().any()


@runs
def test_on_a_gpu_or_interpreted_the_token_samplers_are_equal():
    """Rows and counts select the random numbers, and stop tokens end a row."""
    logits, _ = numbers(5, 300)
    logits = logits.float().to(DEVICE)
    uniforms = torch.rand(8, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    rows = torch.tensor([7, 0, 3, 5, 2], device=DEVICE)
    counts = torch.tensor([0, 5, 1, 1, 4], device=DEVICE)
    stops = range(0, 300, 2)
    ours = make_block_sampler(0.8, stops, uniforms, torch.device(DEVICE))(logits, rows, counts)
    sample = sample_by_uniforms(uniforms, DEVICE)
    expected = make_token_sampler(0.8, stops, sample, None, DEVICE)(logits, rows, counts)
    assert ours[0].tolist() == expected[0].tolist() and ours[2].tolist() == expected[2].tolist()
    torch.testing.assert_close(ours[1], expected[1], atol=1e-5, rtol=0)
    assert 0 < ours[2].sum() < 5


def test_what_is_sampled_in_blocks():
    """Greedy decoding and filters stay with torch, and so does everything on a CPU."""
    cpu = torch.device("cpu")
    assert samples_in_blocks(1.0, cpu) == INTERPRETED and not samples_in_blocks(0.0, cpu)


@interpreted
@pytest.mark.parametrize(("setting", "in_blocks"), [({}, True), ({"top_k": 5}, False), ({"temperature": 0}, False)])
def test_interpreted_a_sampler_uses_the_kernels_without_filters(monkeypatch, setting, in_blocks):
    calls = []
    monkeypatch.setattr(
        "minivlmrl.generation.block_sampling.sample_blocks", lambda *given: calls.append(1) or sample_blocks(*given)
    )
    sampling = options(max_new_tokens=3, stop_token_ids=[], **setting)
    draw = Sampler(tiny.model(), None, sampling).token_sampler(prompts(2), 1, ["a", "b"])
    logits, _ = numbers(2, tiny.config().vocab_size)
    given = torch.arange(2), torch.zeros(2, dtype=torch.long)
    found = draw(logits.float(), *given)
    assert len(calls) == in_blocks
    if in_blocks:
        sample = sample_by_uniforms(uniform_numbers(["a", "b"], 1, 3))
        expected = make_token_sampler(1.0, [], sample)(logits.float(), *given)
        assert found[0].tolist() == expected[0].tolist()
