"""Test the Sampler: random keys, ends of completions, decode steps, and embeddings of a frozen vision tower."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.processor import Processor
from minivlmrl.distributed.weights import is_sharded
from minivlmrl.extras.families.qwen3_vl import Qwen3VisionTransformer
from minivlmrl.generation import cuda_graphs, generate, stop_strings
from minivlmrl.generation.sampler import Sampler
from minivlmrl.generation.stop_strings import StopStrings
from minivlmrl.model.vision import VisionTransformer
from tests.distributed.test_fsdp import sharded_model
from tests.helpers import tiny
from tests.helpers.draws import STOP, ids_of, options, prompts
from tests.helpers.stages import ONE, snapshot

KEYS = ["a", "b", "c", "d", "e"]


@pytest.fixture
def sampler(tokenizer_300):
    def sampler(model=None, world=ONE, gather_weights=True, keeps_vision=False, **values):
        processor = Processor(tokenizer_300, ImageProcessor())
        sampling = options(**{"stop_token_ids": list(STOP)} | values)
        model = model or tiny.model()
        return Sampler(model, processor, sampling, world, gather_weights, keeps_vision)

    return sampler


def sample_pairs(sampler, keys=KEYS):
    rows = prompts(5)
    return ids_of(sampler([rows[KEYS.index(key)] for key in keys], 2, keys))


@pytest.mark.parametrize("values", [
    {"max_batch_tokens": 60},
    {"top_k": 20, "repetition_penalty": 1.3, "stop_strings": ["a"]},
    {"captured": True},
], ids=str)  # fmt: skip
def test_samples_depend_only_on_keys(sampler, values):
    captured = values.pop("captured", False)
    own = sampler(tiny.model(dtype=torch.float64), **values)
    own.captured = captured
    each = {key: sample_pairs(own, [key]) for key in KEYS}
    for keys in (KEYS, ["e", "a", "d"], KEYS[::-1]):
        assert sample_pairs(own, keys) == [ids for key in keys for ids in each[key]]
    assert ids_of(own(prompts(5), 2, [f"{key}2" for key in KEYS])) != sample_pairs(own)
    for stop in values.get("stop_strings", ()):  # more than one completion ends with the stop string
        assert sum(stop in own.processor.tokenizer.decode(ids[-1:]) for pair in each.values() for ids in pair) > 1
        assert not any(stop in own.processor.tokenizer.decode(ids[:-1]) for pair in each.values() for ids in pair)


def test_stop_strings_get_the_prompt_of_each_completion(sampler, monkeypatch):
    """A stop string may begin in the prompt and end in the completion."""
    given = []
    monkeypatch.setattr(stop_strings, "StopStrings", lambda *inputs: given.extend(inputs[2]) or StopStrings(*inputs))
    sample_pairs(sampler(stop_strings=["a"]))
    expected = [prompt.input_ids for prompt in prompts(5) for _ in range(2)]
    assert [ids.tolist() for ids in given] == [ids.tolist() for ids in expected]


def test_the_longest_prompt_decides_whether_a_batch_is_too_long(sampler):
    own = sampler()
    lengths = [len(prompt.input_ids) for prompt in prompts(5)]
    assert len(set(lengths)) > 1
    own.model.config = replace(own.model.config, max_position_embeddings=max(lengths) + 12)
    sample_pairs(own)
    own.model.config = replace(own.model.config, max_position_embeddings=max(lengths) + 11)
    with pytest.raises(ValueError, match=f"a prompt of {max(lengths)} tokens and sampling.max_new_tokens, which is 12"):
        sample_pairs(own)


def test_the_largest_stop_token_must_be_in_the_vocabulary(sampler):
    sample_pairs(sampler(stop_token_ids=[0, 299]))
    with pytest.raises(ValueError, match=r"stop_token_ids contains 300, but .* has only 300 tokens"):
        sample_pairs(sampler(stop_token_ids=[0, 300]))


@pytest.fixture
def decodes(monkeypatch):
    """Record the class of each decode step, and whether the model's weights are sharded."""
    seen, original = [], generate.Decode.__call__

    def call(self, model, *inputs):
        seen.append((type(self), is_sharded(model)))
        return original(self, model, *inputs)

    monkeypatch.setattr(generate.Decode, "__call__", call)
    return seen


@pytest.mark.parametrize(("graph", "on_a_gpu"), [("auto", True), ("never", False)])
def test_the_option_cuda_graph_selects_the_decode_step(sampler, decodes, graph, on_a_gpu):
    sample_pairs(sampler(cuda_graph=graph))
    assert set(decodes) == {(generate.Decode, False)}
    assert sampler(world=SimpleNamespace(device=torch.device("cuda")), cuda_graph=graph).captured == on_a_gpu


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("gather_weights", "captured"), [(True, True), (True, False), (False, False)])
def test_sharded_weights_sample_the_same_tokens(sampler, decodes, gather_weights, captured):
    """A CUDA graph needs weights that are gathered into a model without hooks."""
    own = sampler(sharded_model(), ONE, gather_weights)
    own.captured = captured
    found = sample_pairs(own)
    assert set(decodes) == {(cuda_graphs.CapturedDecode if captured else generate.Decode, not gather_weights)}
    assert found == sample_pairs(sampler())


FROZEN = "--model.freeze=[vision, merger]"


@pytest.mark.parametrize(("model", "tower", "more"), [
    ("model", VisionTransformer, ["--grpo.num_iterations=2"]),
    ("model", VisionTransformer, ["--grpo.max_tokens_per_micro_batch=90", "--grpo.steps_per_generation=2"]),
    ("qwen3_vl", Qwen3VisionTransformer, []),
], ids=["twice", "pieces", "Qwen3-VL, whose decoder's first layers see more of it"])  # fmt: skip
def test_a_frozen_tower_encodes_each_image_once_per_rollout(stage, monkeypatch, model, tower, more):
    seen, forward = [], tower.forward
    monkeypatch.setattr(tower, "forward", lambda self, x, grid: seen.append(len(x)) or forward(self, x, grid))
    run = stage("grpo", "--grpo.beta=0.1", FROZEN, *more, model=model)
    lines, once = run.go(3), sum(seen)
    assert len(seen) == run.batches.batches_consumed
    again = stage("grpo", "--grpo.beta=0.1", FROZEN, *more, model=model)
    again.trainer.sampler.keeps_vision = False
    expected = again.go(3)
    assert sum(seen) - once >= 2 * once
    for line, other in zip(lines, expected, strict=True):
        assert line == pytest.approx(other, rel=1e-12, abs=1e-12)
    weights = snapshot(run.model)
    for name, weight in snapshot(again.model).items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-12, msg=name)


ENGINES = """
from minivlmrl.generation.sampler import Sampler

class Counting(Sampler):
    calls = []

    @classmethod
    def check(cls, run):
        if run.sampling.top_k == 9:
            raise ValueError("no top_k of 9")

    def __init__(self, *arguments, strength=1.0):
        super().__init__(*arguments)
        self.strength = strength

    def __call__(self, prompts, num_generations, keys):
        self.calls.append((self.step, len(prompts)))
        return super().__call__(prompts, num_generations, keys)

class Changed(Sampler):
    def __call__(self, prompts, num_generations, keys):
        return self.change(*super().__call__(prompts, num_generations, keys))

class Even(Changed):
    # the second prompt gets one completion of the first, so that the total stays right
    def change(self, first, second, *groups):
        return [first[1:], [first[0], *second], *groups]

class NotFinite(Changed):
    def change(self, *groups):
        groups[0][0].logps = groups[0][0].logps / 0
        return list(groups)
"""


@pytest.fixture
def engine_file(tmp_path):
    (tmp_path / "my_engine.py").write_text(ENGINES)
    return tmp_path / "my_engine.py"


def test_a_custom_engine_samples_rollouts(stage, engine_file):
    """The custom engine wraps the native sampler, so the steps of both runs are equal."""
    reused = "--grpo.steps_per_generation=2"
    expected = stage("grpo", reused).go(4)
    run = stage("grpo", f"--sampling.engine={engine_file}:Counting(strength=0.5)", reused)
    assert run.go(4) == expected
    assert (run.trainer.sampler.strength, run.trainer.sampler.calls) == (0.5, [(0, 8), (2, 8)])


@pytest.mark.parametrize(("engine", "options", "expected"), [
    ("Counting", ["--sampling.top_k=9"], "no top_k of 9"),
    ("Counting(a=1)", [], r"^sampling\.engine .*: the engine has no option 'a'; its options are: strength"),
    ("Counting(world=1)", [], "the engine has no option 'world'"),
    ("Counting", ["--sampling.environment=recipes/zoom.py:Zoom"], "it must be native with an environment"),
    ("Even", [], r"lists of \[2, 4, 3, 3\] completions, but it must return 3 for each of the 4 prompts"),
    ("NotFinite", [], "sampling.engine returned log-probabilities that are NaN or infinite"),
])  # fmt: skip
def test_a_wrong_engine_is_named(stage, engine_file, engine, options, expected):
    with pytest.raises(ValueError, match=expected):
        stage("grpo", f"--sampling.engine={engine_file}:{engine}", *options).go(1)
