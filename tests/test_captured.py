"""Decoding over static tensors draws what generate draws: alone, compiled, and as a graph of the pretended card."""

from functools import partial

import pytest
import torch
from pretend_cuda import CUDA, PretendCuda, pretend

from minivlmrl.adapters.lora import LoRAConfig, adapter_parameters, draw_adapters, quantize_base
from minivlmrl.decoder import Qwen2_5_VL
from minivlmrl.generate import SamplingConfig, draw_by, generate, sample_completions, uniform_numbers
from minivlmrl.rows import Processor
from minivlmrl.sampling import captured
from minivlmrl.scale.ranks import World
from minivlmrl.scale.sharding import recompute_blocks

import tiny
from draws import STOP, options, prompts

SETTINGS = [
    {}, dict(temperature=0), dict(temperature=0.7, top_k=5, repetition_penalty=1.3, min_new_tokens=6),
    dict(top_p=0.8, min_p=0.05, max_length=52),
]  # fmt: skip


def assert_same(ours, expected, close=1e-5):
    """Equal tokens and ends, and log-probabilities that differ by rounding."""
    pairs = [pair for groups in zip(ours, expected, strict=True) for pair in zip(*groups, strict=True)]
    for a, b in pairs:
        assert a.ids.tolist() == b.ids.tolist() and a.stopped == b.stopped
        torch.testing.assert_close(a.logps, b.logps, atol=close, rtol=0)
    return {len(a.ids) for a, _ in pairs}


def both(model, count, generations, stop=STOP, watch=None, **setting):
    """Draws of generate_captured and of generate, by the same numbers."""
    sampling = options(**{"max_new_tokens": 20} | setting)
    draw = draw_by(uniform_numbers([str(i) for i in range(count)], generations, 20))
    arguments = model, prompts(count), generations, sampling, stop, draw, watch
    return captured.generate_captured(*arguments), generate(*arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_it_draws_what_generate_draws(setting, dtype):
    """Prompts of several lengths, groups of one and more; rows end one after the other, or none does."""
    model, lengths = tiny.model(dtype=dtype), set()
    for count, generations, stop in ((5, 3, STOP), (4, 2, ()), (1, 8, range(60)), (7, 1, STOP), (1, 1, ())):
        lengths |= assert_same(*both(model, count, generations, stop, **setting))
    assert len(lengths) > 2


def test_rows_move_together_and_keys_grow(monkeypatch):
    kept, keep = [], captured.DecodeState.keep
    monkeypatch.setattr(captured, "KEYS", 3)
    monkeypatch.setattr(captured, "SHRINK", 1)
    monkeypatch.setattr(captured.DecodeState, "keep", lambda s, alive: (kept.append(alive.shape), keep(s, alive)))
    assert_same(*both(tiny.model(dtype=torch.float64), 6, 4, range(40)))
    sizes = [rows * slots for rows, slots in kept]
    assert len(sizes) > 5 and sizes == sorted(sizes, reverse=True) and sizes[-1] < 6
    assert {rows for rows, _ in kept} > {6} and {slots for _, slots in kept} > {4}  # prompts leave, and slots


def test_a_watch_sees_every_token_and_ends_rows():
    def even(rows, ids, told):
        told |= dict(zip(rows.tolist(), ids.tolist(), strict=True))
        return ids % 5 == 0

    lengths = assert_same(*both(tiny.model(), 5, 3, watch=partial(even, told={})))
    assert len(lengths) > 4


@pytest.mark.parametrize("change", ["adapters", "4 bits", "recomputation", "qwen2_vl", "tied"])
def test_models_of_other_layers(change):
    model = tiny.model(tied=change == "tied", model_type="qwen2_vl" if change == "qwen2_vl" else "qwen2_5_vl")
    if change in ("adapters", "4 bits"):
        LoRAConfig(r=4).place(model)
        draw_adapters(model, 0)
        for parameter in adapter_parameters(model):
            torch.nn.init.normal_(parameter.data, std=0.2)
    if change == "4 bits":
        quantize_base(model)
    if change == "recomputation":
        recompute_blocks(model)
    assert_same(*both(model, 3, 2), close=1e-4)


def test_the_option_chooses(tokenizer_300, monkeypatch):
    """On a CPU only when asked, on a card always unless asked not to; with stop strings too."""
    chosen = [captured.with_graph(options(graph=graph), torch.device(device), None)
              for graph in ("auto", "always", "never") for device in ("cpu", "cuda")]  # fmt: skip
    assert chosen == [False, True, True, True, False, False]
    assert captured.with_graph(SamplingConfig(), torch.device("cuda"), None)
    assert not captured.with_graph(SamplingConfig(), torch.device("cuda"), object())
    with pytest.raises(ValueError, match="it needs rollout"):
        captured.with_graph(options(graph="always"), torch.device("cuda"), object())
    calls, call = [], captured.generate_captured
    monkeypatch.setattr(captured, "generate_captured", lambda *rest: (calls.append(1), call(*rest))[1])
    one, drawn = World(0, 1, torch.device("cpu")), []
    for graph in ("never", "always"):
        sampling = options(graph=graph, stop_strings=["e"])
        asked = prompts(4), 3, sampling, list("abcd"), one
        drawn.append(sample_completions(tiny.model(), Processor(tokenizer_300, None), *asked))
    assert len(assert_same(*drawn)) > 2 and calls == [1]


def test_logits_that_are_not_finite_end_it():
    model = tiny.model()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="not finite"):
        both(model, 1, 2)


# ---- compiled ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "shapes"),
    [("eager", [(5, 3)])]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("eager", [(5, 3), (1, 2), (4, 1), (7, 2), (1, 1)]), ("inductor", [(5, 3)]))],
)  # fmt: skip
def test_a_step_compiles_without_graph_breaks_and_at_most_four_times(monkeypatch, backend, shapes):
    """For any number of prompts and slots, lengths and filters: one of each and several are other programs."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    model = tiny.telling_weights(Qwen2_5_VL(tiny.config(layers=1)))
    compiled = torch.compile(captured.decode_step, fullgraph=True, dynamic=len(shapes) > 1, backend=backend)
    monkeypatch.setattr(captured, "decode_step", compiled)
    for count, generations in shapes:
        assert_same(*both(model, count, generations, (), max_new_tokens=4, top_k=9, temperature=0.8), close=1e-4)
    assert 1 <= counters["stats"]["unique_graphs"] <= min(len(shapes), 4) and not counters["graph_break"]


# ---- as a graph ----------------------------------------------------------------------------------------------------


def on_card(model, stop, tokens=40, **setting):
    """Draws of the pretended card, and the card."""
    with PretendCuda() as gpu, torch.inference_mode():
        draw, sampling = (
            draw_by(uniform_numbers(list("abcd"), 3, tokens), CUDA),
            options(max_new_tokens=tokens, **setting),
        )
        drawn = captured.generate_captured(pretend(model), prompts(4), 3, sampling, stop, draw)
    return drawn, gpu


@pytest.mark.parametrize("setting", SETTINGS[::2], ids=str)
def test_a_graph_draws_what_the_cpu_draws(setting):
    """A capture refuses what the host would wait for, and a replay knows no Python: all that changes is in tensors."""
    sampling, draw = options(max_new_tokens=40, **setting), draw_by(uniform_numbers(list("abcd"), 3, 40))
    for stop in (range(60), ()):
        expected = generate(tiny.model(), prompts(4), 3, sampling, stop, draw)
        lengths = assert_same(on_card(tiny.model(), stop, **setting)[0], expected)
        assert len(lengths) > 4 or lengths == {40}


def test_a_captured_step_is_one_launch_and_the_host_waits_once_in_16():
    launches, waits = [], []
    for tokens in (16, 32, 48):
        _, gpu = on_card(tiny.model(), (), tokens)
        launches.append(gpu.launches.total())
        waits.append(gpu.waits.total())
    assert launches[2] - launches[1] <= launches[1] - launches[0] <= 16 + 2  # and the question
    assert waits[2] - waits[1] == waits[1] - waits[0] == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu_a_graph_draws_what_its_step_draws(monkeypatch, dtype):
    """The same kernels, captured or not; in float32 what generate draws there."""
    device, sampling, drawn = torch.device("cuda"), options(max_new_tokens=40, top_k=20, repetition_penalty=1.1), []
    model, draw = tiny.model(dtype=dtype).to(device), draw_by(uniform_numbers(list("abcd"), 3, 40), device)
    arguments = model, prompts(4), 3, sampling, STOP, draw
    for capture in (captured.Graph.capture, lambda graph: graph.function()):
        monkeypatch.setattr(captured.Graph, "capture", capture)
        drawn.append(captured.generate_captured(*arguments))
    assert_same(*drawn)
    if dtype == torch.float32:
        assert_same(drawn[0], generate(*arguments), close=1e-4)
