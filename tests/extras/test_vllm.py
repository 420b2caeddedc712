"""Test rollouts of vLLM with a stand-in, and with vLLM itself where vLLM is installed."""

import json
import logging
import sys
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from minivlmrl.config.import_utils import load_name
from minivlmrl.config.options import LoRAOptions
from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.processor import Processor
from minivlmrl.distributed.process_group import World
from minivlmrl.generation.sampler import ENGINES, Sampler
from minivlmrl.model.lora import adapters, init_adapters, inject_adapters, set_parameters
from tests.helpers import tiny, vllm_stand_in
from tests.helpers.draws import STOP, ids_of, options, prompts
from tests.helpers.pretend_cuda import CUDA
from tests.helpers.stages import ONE

RECORDED = Path(__file__).parents[1] / "recorded" / "vllm_0.32.0.json"
ENGINE = "--sampling.engine=vllm"
missing = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is missing: docs/use.md installs it")


@pytest.fixture(params=["stand-in", pytest.param("vllm", marks=[pytest.mark.slow, missing])])
def samplers(request, monkeypatch, tokenizer_300):
    if request.param == "stand-in":
        vllm_stand_in.install(monkeypatch)

    def samplers(kind="", **values):
        sampling = options(**{"stop_token_ids": list(STOP), "engine": "vllm"} | values)
        of = model_of(kind), Processor(tokenizer_300, ImageProcessor()), sampling, ONE
        return Sampler(*of), load_name(ENGINES["vllm"])(*of)

    return samplers


def model_of(kind):
    config = tiny.config(model_type=kind if kind.startswith("qwen") else "qwen2_5_vl")
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "mrope_section": (4, 6, 6)}  # head_dim 32
    if not isinstance(getattr(type(config), "head_dim", None), property):  # config.json of Qwen3 has head_dim
        sizes["head_dim"] = 32
    model = tiny.model_of(replace(config, **sizes, max_position_embeddings=512))
    if kind == "nf4":
        inject_adapters(model, LoRAOptions(r=2, target=["language", "vision"], quantize="nf4"))
        init_adapters(model, 0)
        set_parameters(model, {f"{name}.lora_B": layer.lora_B + 0.005 for name, layer in adapters(model).items()})
    return model


def compare(*samplers):
    ours, theirs = ([*chain(*sampler(prompts(5), 2, "abcde"))] for sampler in samplers)
    for mine, drawn in zip(ours, theirs, strict=True):
        assert mine.ids.tolist() == drawn.ids.tolist() and mine.stopped == drawn.stopped
        assert torch.allclose(mine.logps, drawn.logps, atol=2.5e-5, rtol=0)
        assert all(a.equal(b) for a, b in zip(mine.sampling_mask or (), drawn.sampling_mask or (), strict=True))


@pytest.mark.parametrize("values", [
    {}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.3},
    {"top_k": 5, "min_p": 0.1, "max_batch_tokens": 60}, {"stop_strings": ["a", "e"], "stop_token_ids": []},
    {"kind": "qwen3_vl"}, {"kind": "nf4"},
], ids=str)  # fmt: skip
def test_vllm_samples_the_same_tokens(samplers, values):
    own, engine = samplers(**values)
    compare(own, engine)
    # after a change of the weights, images have other embeddings
    own.model.visual.patch_embed.proj.weight.data.mul_(1.1)
    compare(own, engine)
    assert ids_of(engine(prompts(5)[1:2], 2, "b")) == ids_of(own(prompts(5), 2, "abcde"))[2:4]


def test_vllm_is_called_as_recorded(samplers, monkeypatch):
    (_, engine), calls = samplers(), Mock()
    vllm = engine.llm.llm_engine
    for name in ("reset_prefix_cache", "reset_encoder_cache", "add_request", "abort_request"):
        owner = engine.llm if "prefix" in name else vllm
        monkeypatch.setattr(owner, name, mock := Mock(wraps=getattr(owner, name)))
        calls.attach_mock(mock, name)
    found = {"ids": ids_of(engine(prompts(5), 2, "abcde")), "calls": [[one[0], *one.args] for one in calls.mock_calls]}
    shown = ("offset", "length", "max_tokens", "temperature", "ignore_eos", "extra_args")
    text = json.dumps(found, default=lambda value: [getattr(value, name, None) for name in shown])
    if not RECORDED.exists() and engine.llm is not vllm:
        RECORDED.write_text(text)  # recorded with the real vLLM
    assert json.loads(text) == json.loads(RECORDED.read_text())


def test_on_a_gpu_vllm_sleeps_between_rollouts(monkeypatch, tokenizer_300):
    """vLLM allocates memory for weights before the weights arrive, and for keys and values afterwards."""
    module, calls, given = vllm_stand_in.install(monkeypatch), [], {}

    class LLM(vllm_stand_in.LLM):
        def __init__(self, *args, **options):
            given.update(options)
            super().__init__(*args, **options)
            self.sleep = lambda level: calls.append(f"sleep {level}")
            self.wake_up = lambda tags: calls.append(f"wake {tags}")

        def collective_rpc(self, name, kwargs):
            calls.append(name)
            super().collective_rpc(name, kwargs)

    monkeypatch.setattr(sys.modules["vllm"], "LLM", LLM)
    processor = Processor(tokenizer_300, ImageProcessor())
    sampling = options(engine="vllm", stop_token_ids=list(STOP))
    engine = module.VLLMSampler(model_of(""), processor, sampling, World(device=CUDA))
    assert (given["enable_sleep_mode"], given["enforce_eager"], given["skip_mm_profiling"]) == (True, False, False)
    monkeypatch.setattr(Sampler, "__call__", lambda *_: calls.append("sample"))
    engine(prompts(1), 2, "a")
    rollout = ["wake ['weights']", "reload_weights", "wake ['kv_cache']", "sample", "sleep 2"]
    assert calls == ["sleep 2", *rollout]


def test_the_runner_v2_interface_maps_slots_to_rows(monkeypatch):
    module = vllm_stand_in.install(monkeypatch)
    sample_token = lambda logits, rows, counts: (torch.tensor([4, 2]), rows.float(), rows == 1)  # noqa: E731
    monkeypatch.setattr(module.TokenChooser, "sampling", sampling := module.Sampling(sample_token, 2))
    chooser, batch = module.TokenChooser(None, None), SimpleNamespace(idx_mapping_np=torch.tensor([3, 0]))
    assert all(chooser.add_request(slot, SimpleNamespace(extra_args={"row": row})) for slot, row in ((3, 1), (0, 0)))
    assert chooser.apply(torch.zeros(2, 6), batch).argmax(-1).tolist() == [4, 2]
    assert sampling.steps[0][0].tolist() == [1, 0] and sampling.ended == ["1"] and sampling.counts.tolist() == [1, 1]


def test_a_run_equals_a_run_with_the_native_engine(stage, monkeypatch):
    vllm_stand_in.install(monkeypatch)
    own, engine = (stage("grpo", *more, dtype=torch.float32).go(2) for more in ((), (ENGINE,)))
    # the mismatch metrics measure rounding differences
    chance = {"rollout/logp_mismatch": 0, "rollout/logp_mismatch_rms": 0}
    assert [line | chance for line in own] == [line | chance for line in engine]


@pytest.mark.parametrize(("of", "name", "fault"), [
    ("file_weights", "stale tower", lambda model: dict(model.model.named_parameters(prefix="model"))),
    ("file_weights", "missed hand-over", lambda model: {}),
    ("FIXED_OPTIONS", "wrong pixels", {"mm_device_do_normalize": True, "load_format": "dummy"}),
])  # fmt: skip
def test_a_wrong_policy_in_vllm_is_refused_in_the_first_rollout(stage, monkeypatch, of, name, fault):
    monkeypatch.setattr(vllm_stand_in.install(monkeypatch), of, fault)
    with pytest.raises(ValueError, match=r"vLLM computes a different policy: its log-probabilities for row \d differ"):
        stage("grpo", ENGINE, dtype=torch.float32).next()
    stage("grpo", ENGINE, "--rollout.max_logp_mismatch=.inf", dtype=torch.float32).next()


FLOAT, HALF = torch.float32, torch.bfloat16


@pytest.mark.parametrize(("dtypes", "differences", "of_other_rank", "named"), [
    ((FLOAT, FLOAT), [[0.0, 0.002], [0.0, 0.0]], (0.0, ""), ("rows.jsonl:0", 0.002)),
    ((FLOAT, FLOAT), [[0.0, 0.002], [0.0, 0.003]], (0.0, ""), ("rows.jsonl:1", 0.003)),
    ((FLOAT, FLOAT), [[0.0, 0.0005], [0.0, 0.0]], (0.4, "rows.jsonl:7"), ("rows.jsonl:7", 0.4)),
    ((FLOAT, FLOAT), [[0.0, 0.0005], [0.0, 0.0]], (0.0, ""), None),
    ((FLOAT, HALF), [[0.0, 0.6], [0.0, 0.0]], (0.0, ""), None),
    ((HALF, FLOAT), [[0.0, 0.8], [0.0, 0.0]], (0.0, ""), ("rows.jsonl:0", 0.566)),
])  # fmt: skip
def test_the_first_rollout_of_vllm_is_compared_by_hand(monkeypatch, dtypes, differences, of_other_rank, named):
    """In float32 the largest difference of log-probabilities counts, and in 16 bits the root mean square."""
    module = vllm_stand_in.install(monkeypatch)
    groups = iter(differences)
    monkeypatch.setattr(module, "pack", lambda *_: None)
    monkeypatch.setattr(module, "per_token_logps", lambda *_: (torch.tensor(next(groups)), None))
    monkeypatch.setattr(module, "computed_dtype", lambda model: dtypes[0])
    monkeypatch.setattr(module, "engine_dtype", lambda sampling, dtype: dtypes[1])
    rank = SimpleNamespace(gather_objects=lambda worst: [of_other_rank, worst])
    model = SimpleNamespace(config=None)
    engine = SimpleNamespace(is_verified=False, model=model, sampling=options(), device="cpu", world=rank)
    rows = [SimpleNamespace(name=f"rows.jsonl:{number}") for number in range(2)]
    completions = [[SimpleNamespace(sampled_logps=torch.zeros(2))]] * 2

    def verify():
        module.VLLMSampler.verify_logps(engine, rows, [None] * 2, completions, 1.0)

    if named is None:
        verify()
        assert engine.is_verified
        return
    with pytest.raises(ValueError, match="log-probabilities for {} differ from the policy's by {} nats".format(*named)):
        verify()


@pytest.mark.parametrize(("option", "expected"), [
    ("--sampling.vllm={max_model_ln: 9}", "sampling.vllm: unknown key max_model_ln; did you mean max_model_len"),
    ("--sampling.vllm={worker_cls: mine.Worker}", "sampling.vllm: unknown key worker_cls"),
    ("--sampling.vllm={trust_remote_code: true}", "sampling.vllm: unknown key trust_remote_code"),
    ("--sampling.vllm={quantization: mine.py}", "sampling.vllm: quantization is 'mine.py', but it must be 'fp8'"),
    ("--sampling.vllm={kv_cache_dtype: {a: b}}", "sampling.vllm: kv_cache_dtype is {'a': 'b'}"),
    ("--sampling.vllm={max_model_len: 6}",
     "max_model_len is 6, which leaves no room .*, because sampling.max_new_tokens is 6"),
    ("--sampling.environment=recipes/zoom.py:Quarters", "engine is 'vllm', but it must be native with an environment"),
    ("--model.config=qwen3_5.json", "vllm does not support the model type qwen3_5"),
])  # fmt: skip
def test_unsupported_options_of_vllm_are_refused(stage, monkeypatch, option, expected):
    vllm_stand_in.install(monkeypatch)
    with pytest.raises(ValueError, match=expected):
        stage("grpo", ENGINE, option)


def test_vllm_must_be_installed(stage, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ValueError, match=r"needs vLLM; install it as docs/use\.md describes: .*NotFound"):
        stage("grpo", ENGINE)


def test_a_video_is_refused(samplers):
    prompt = prompts(1)[0]
    video = replace(prompt, input_ids=prompt.input_ids.where(prompt.input_ids != tiny.IMAGE, tiny.VIDEO))
    video.row = SimpleNamespace(name="rows.jsonl line 3")
    with pytest.raises(ValueError, match=r"rows\.jsonl line 3: the prompt contains a video, .*sampling\.engine=native"):
        samplers()[1]([video], 1, ["a"])


def test_prompts_that_leave_no_room_in_vllm_are_refused(samplers, stage, monkeypatch):
    """The error comes only in a rollout, because the rows of a task are not measured earlier."""
    lengths = [len(prompt.input_ids) for prompt in prompts(5)]
    limit = min(lengths) + 12  # just enough for the shortest prompt
    own, engine = samplers(vllm={"max_model_len": limit})
    rows = prompts(5)
    for number, row in enumerate(rows):
        row.row = SimpleNamespace(name=f"rows.jsonl:{number}")
    fits = lengths.index(min(lengths))
    assert ids_of(engine([rows[fits]], 2, "a")) == ids_of(own([rows[fits]], 2, "a"))
    longest = lengths.index(max(lengths))
    message = rf"rows\.jsonl:{longest}: the prompt has {max(lengths)} tokens, .* \(12\) exceeds .* \({limit}\)"
    with pytest.raises(ValueError, match=message):
        engine([rows[longest]], 2, "a")


def test_only_warnings_about_rotary_tables_are_dropped():
    record = lambda name: logging.LogRecord("", 30, "", 0, "%s: Failed to load weights", (name,), None)  # noqa: E731
    sampler = sys.modules[load_name(ENGINES["vllm"]).__module__]
    assert [sampler.is_news(record(name)) for name in ("MRotaryEmbedding", "RotaryEmbedding", "Linear")] == [0, 0, 1]
