"""Test that a decode step captured as a CUDA graph samples the same tokens as the eager step."""

import gc
import weakref

import pytest
import torch

from minivlmrl.config.options import LoRAOptions
from minivlmrl.data.rows import uniform_numbers
from minivlmrl.distributed.weights import recompute_blocks
from minivlmrl.generation import cuda_graphs
from minivlmrl.generation.generate import sample_by_uniforms
from minivlmrl.kernels import backend, decode_attention
from minivlmrl.model.families.registry import FAMILIES
from minivlmrl.model.lora import init_adapters, inject_adapters, quantize_base
from tests.helpers import tiny
from tests.helpers.draws import STOP, options, prompts, sample
from tests.helpers.pretend_cuda import CUDA, PretendCuda, pretend


def assert_same(ours, expected, close=1e-5):
    """Assert that two lists of completions are equal up to rounding, and return the set of their lengths."""
    pairs = [pair for groups in zip(ours, expected, strict=True) for pair in zip(*groups, strict=True)]
    for a, b in pairs:
        assert a.ids.tolist() == b.ids.tolist() and a.stopped == b.stopped
        torch.testing.assert_close(a.logps, b.logps, atol=close, rtol=0)
    return {len(a.ids) for a, _ in pairs}


def both(model, count, generations, stop=STOP, **setting):
    """Return the completions of captured and of eager decode steps, which use the same random numbers."""
    sampling = options(**{"max_new_tokens": 20} | setting)
    draw = sample_by_uniforms(uniform_numbers([str(i) for i in range(count)], generations, 20))
    arguments = model, prompts(count), generations, sampling, stop, draw
    with torch.inference_mode():
        return sample(*arguments, decode=cuda_graphs.CapturedDecode()), sample(*arguments)


def test_row_key_buffers_grow(monkeypatch):
    kept = set()
    advance = cuda_graphs.StaticDecodeAttention.advance

    def spy(self, *given, **named):
        advance(self, *given, **named)
        kept.add(self.num_row_keys)
        assert all(x.shape[2] == self.num_row_keys < 2 * max(self.longest, 2) for x in self.row_kv[0])

    monkeypatch.setattr(cuda_graphs, "KEYS", 3)
    monkeypatch.setattr(cuda_graphs.StaticDecodeAttention, "advance", spy)
    assert_same(*both(tiny.model(dtype=torch.float64), 6, 4, range(40)))
    assert kept == {3, 6, 12, 20}


ADAPTED = {"4 bits": "language", "an adapter of values": ".*v_proj"}


@pytest.mark.parametrize("change", [*ADAPTED, "recomputation", "qwen2_vl", "qwen3_vl", "qwen3_5", "tied"])
def test_other_models_and_layers(change):
    kind = change if change in FAMILIES else "qwen2_5_vl"
    model = tiny.model(tied=change == "tied", model_type=kind, dtype=torch.float64)
    if change in ADAPTED:
        inject_adapters(model, LoRAOptions(r=4, target=[ADAPTED[change]]))
        init_adapters(model, 0)
        for parameter in tiny.adapter_parameters(model):
            torch.nn.init.normal_(parameter.data, std=0.2)
    if change == "4 bits":
        quantize_base(model)
    if change == "recomputation":
        recompute_blocks(model)
    assert_same(*both(model, 3, 2))


def on_card(model, stop=(), tokens=20, count=4, generations=3, decode=None, before=lambda: None, **setting):
    """Sample completions on the simulated GPU, and return the completions and the GPU."""
    with PretendCuda() as gpu, torch.inference_mode():
        before()
        draw = sample_by_uniforms(uniform_numbers(list("abcd")[:count], generations, tokens), CUDA)
        given = pretend(model), prompts(count), generations, options(max_new_tokens=tokens, **setting), stop, draw
        drawn = sample(*given, decode=decode or cuda_graphs.CapturedDecode())
    return drawn, gpu


SMALL = {"tokens": 5, "count": 1, "generations": 2}
FILTERED = {"temperature": 0.7, "top_k": 5, "repetition_penalty": 1.3}


@pytest.mark.parametrize(
    ("model_type", "setting", "stop"),
    [("qwen2_5_vl", {}, ()), ("qwen2_5_vl", FILTERED, range(60)), ("qwen3_5", {}, range(60))], ids=str,
)  # fmt: skip
def test_a_graph_samples_the_same_tokens_as_the_cpu(model_type, setting, stop):
    """The replay of a CUDA graph runs no Python code, so values that change between steps must be tensors."""
    sampling = options(max_new_tokens=20, **setting)
    draw = sample_by_uniforms(uniform_numbers(list("abcd"), 3, 20))
    expected = sample(tiny.model(model_type=model_type), prompts(4), 3, sampling, stop, draw)
    lengths = assert_same(on_card(tiny.model(model_type=model_type), stop, **setting)[0], expected)
    assert len(lengths) > 4 or lengths == {20}


def test_the_cpu_waits_once_in_16_captured_steps():
    on_card(tiny.model(), tokens=4)  # the first run computes tables that later runs find in a cache
    (_, shorter), (_, longer) = (on_card(tiny.model(), tokens=tokens) for tokens in (16, 32))
    assert longer.waits.total() - shorter.waits.total() == 1


def test_kernels_are_checked_before_a_graph_is_captured(monkeypatch):
    capturing = []

    def reject(device, kernel):
        capturing.append(PretendCuda.current.capturing)
        return "it is a stand-in"  # torch replaces a rejected kernel

    monkeypatch.setattr(decode_attention, "TILE_DTYPES", (torch.float32,))  # the simulated GPU has no 16-bit kernels
    monkeypatch.setattr(backend, "_rejection", reject)
    monkeypatch.setattr(backend, "INSTALLED", True)
    monkeypatch.setattr(backend, "_compiler_obstacle", lambda: None)
    monkeypatch.setattr(backend, "_warn", lambda message: None)
    on_card(tiny.model(), before=lambda: monkeypatch.delenv("MINIVLMRL_KERNELS"), **SMALL)
    assert capturing[0] is None and any(graph is not None for graph in capturing)


def test_a_graph_is_freed_with_its_decoder():
    """A CUDA graph occupies GPU memory, so freeing a graph must not wait for garbage collection."""
    gc.collect()
    gc.disable()
    try:
        decode = cuda_graphs.CapturedDecode()
        on_card(tiny.model(), decode=decode, **SMALL)
        assert decode.graph is not None
        gone = weakref.ref(decode)
        del decode
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu_a_graph_samples_the_same_tokens(monkeypatch, dtype):
    device = torch.device("cuda")
    sampling = options(max_new_tokens=40, top_k=20, repetition_penalty=1.1)
    drawn = []
    model = tiny.model(dtype=dtype).to(device)
    draw = sample_by_uniforms(uniform_numbers(list("abcd"), 3, 40), device)
    arguments = model, prompts(4), 3, sampling, STOP, draw
    for capture in (cuda_graphs.CapturedDecode.capture, cuda_graphs.CapturedDecode.step):
        monkeypatch.setattr(cuda_graphs.CapturedDecode, "capture", capture)
        drawn.append(sample(*arguments, decode=cuda_graphs.CapturedDecode()))
    assert_same(*drawn)
    if dtype == torch.float32:
        assert_same(drawn[0], sample(*arguments), close=1e-4)
