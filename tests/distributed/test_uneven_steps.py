"""Compare steps on 4 and 8 ranks, whose tensors have different shapes, with steps in one process.

Every fourth row has completions of one token, every third row has equal rewards, and most rows have no image.
"""

import dataclasses
import inspect
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from minivlmrl.distributed.weights import units
from minivlmrl.generation.sampler import Sampler
from minivlmrl.rewards.registry import REWARDS
from minivlmrl.run import loop
from tests.distributed import test_process_group as two
from tests.helpers.on_ranks import SHARDS_BYTES, launch, stage_on_ranks
from tests.helpers.tiny import RUN_MODEL

ONCE = "--sharding.once_per_step=true"
STEPS = ["--{}.prompts_per_step=24", "--{}.max_steps=2"]
GRPO = ["--stages=[grpo]", *(step.format("grpo") for step in STEPS), "--rewards={uneven: 1}"]
PPO = ["--stages=[ppo]", *(step.format("ppo") for step in STEPS)]
STAGES = "sft", "dpo", "reward_model"
OFFLINE = {name: [f"--stages=[{name}]", *(step.format(name) for step in STEPS)] for name in STAGES}
RESAMPLED = ["--grpo.max_num_gen_batches=3", "--sampling.max_new_tokens=2"]
RECIPES = {  # two steps, with six micro-batches on each of 4 ranks, or three micro-batches on each of 8 ranks
    **OFFLINE,
    "dpo of two": [*OFFLINE["dpo"], "--dpo.loss_type=[sigmoid, sft]"],
    "grpo": GRPO,
    "reference": [*two.REFERENCE, *GRPO, "--grpo.num_iterations=1"],
    "resampled": [*GRPO, *RESAMPLED, "--grpo.num_generations=2", "--grpo.steps_per_generation=2"],
    "rloo": [*two.REFERENCE, *GRPO, *RESAMPLED, "--grpo.loss_type=rloo", "--grpo.top_entropy_quantile=0.5"],
    "reward model": [*GRPO, "--rewards={uneven: 0.5, reward_model: 1}", "--reward_model.path=FOLDER/judge"],
    "tools": [*two.TOOLS, *GRPO],
    "experts": [*two.EXPERTS[1:], *GRPO],
    "Qwen3-VL": [*GRPO, "--model.config=FOLDER/qwen3_vl.json"],
    "Qwen3.5": [*GRPO, "--model.config=FOLDER/qwen3_5.json"],
    "token budget": [*GRPO, "--grpo.max_tokens_per_micro_batch=90"],
    "two at a time": [*GRPO, "--grpo.micro_batch_size=2"],
    "frozen tower": [*GRPO, "--model.freeze=[vision]"],
    "8 bits": [*GRPO, two.EIGHT_BITS],
    "ppo": [*PPO, "--ppo.steps_per_generation=2"],
    "adapters": [*two.ADAPTED[1:], "--ppo.critic=separate", *PPO],
    "NF4": [*two.NF4[1:], *PPO],
}  # fmt: skip
REPLICAS = [*two.ONE_BY_ONE, "--sharding.replicas=2"]
WAYS = {
    "replicated": [], "sharded": two.SHARDED, "layer by layer": two.ONE_BY_ONE, "replicas": REPLICAS,
    "once": [*two.SHARDED, ONCE], "once, layer by layer": [*two.ONE_BY_ONE, ONCE], "once, replicas": [*REPLICAS, ONCE],
    "compute_dtype": ["--model.compute_dtype=float64"],
}  # fmt: skip
CASES = [
    *(("grpo", way) for way in WAYS), ("sft", "sharded"), ("sft", "once"), ("sft", "replicas"),
    ("dpo", "replicated"), ("dpo of two", "sharded"), ("reward_model", "sharded"), ("resampled", "sharded"),
    ("rloo", "sharded"), ("reward model", "layer by layer"),
    ("tools", "sharded"), ("Qwen3.5", "layer by layer"), ("two at a time", "layer by layer"), ("ppo", "sharded"),
    ("reference", "once, replicas"), ("experts", "replicas"), ("experts", "once, replicas"), ("experts", "once"),
    ("Qwen3-VL", "once"), ("token budget", "once"), ("frozen tower", "once"), ("frozen tower", "replicas"),
    ("8 bits", "once"), ("adapters", "sharded"), ("adapters", "once"), ("adapters", "once, replicas"),
    *([("NF4", "once, layer by layer")] if SHARDS_BYTES else []),
]  # fmt: skip


def uneven_rewards(completions, margin, **columns):
    """Return rewards that are equal for all completions of every third row."""
    letters = [sum(c.isalpha() for c in completion) / 6 for completion in completions]
    return [0.5 if round(10 * row) % 3 == 0 else value for row, value in zip(margin, letters, strict=True)]


def uneven_steps(folder: Path, overrides: list[str], world):
    """Train a stage, and cut the completions of every fourth row after one token, except with tools."""
    REWARDS["uneven"] = uneven_rewards
    if overrides[: len(two.TOOLS)] == two.TOOLS:
        return stage_on_ranks(folder, overrides, world)
    sample = Sampler.__call__

    def cut(completion):
        values = {name: getattr(completion, name)[:1] for name in ("ids", "logps", "policy_mask")}
        return dataclasses.replace(completion, **values, stopped=True)

    def sample_and_cut(self, prompts, num_generations, keys):
        groups = sample(self, prompts, num_generations, keys)
        for key, group in zip(keys, groups, strict=True):
            if int(key.rpartition("/")[2]) % 4 == 1:
                group[:] = map(cut, group)
        return groups

    Sampler.__call__ = sample_and_cut
    try:
        return stage_on_ranks(folder, overrides, world)
    finally:
        Sampler.__call__ = sample


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    two.prepare(folder)
    return launch(1, folder, {name: RECIPES[name] for name, _ in CASES}, uneven_steps)[0]


@pytest.fixture(scope="module", params=[4, 8])
def ranks(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    two.prepare(folder)
    return launch(request.param, folder, {case: [*RECIPES[case[0]], *WAYS[case[1]]] for case in CASES}, uneven_steps)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_uneven_ranks_equal_one_process(one_process, ranks, case):
    expected = one_process[case[0]]
    assert all(line["grad_norm"] > 1e-3 for line in expected.lines)
    for rank in ranks:
        assert rank[case].texts == expected.texts
        for name, weight in expected.weights.items():
            torch.testing.assert_close(rank[case].weights[name], weight, rtol=0, atol=1e-14, msg=name)
            assert torch.equal(rank[case].weights[name], ranks[0][case].weights[name]), name


def count_communication(folder: Path, overrides: list[str], world):
    """Return [gathers, reductions, sums over replicas, units] of FSDP for each step of a stage."""
    calls = {"foreach_all_gather": 0, "foreach_reduce": 0, "all_reduce": 0}

    def counted(name, function):
        def call(*given):
            calls[name] += 1
            if name == "foreach_reduce":
                named = inspect.signature(function).bind(*given).arguments
                calls["all_reduce"] += named["all_reduce_group"] is not None and named["all_reduce_grads"]
            return function(*given)

        return call

    steps = []
    optimizer_step = loop.optimizer_step

    def step(trainer, *given):
        before = dict(calls)
        result = optimizer_step(trainer, *given)
        steps.append([calls[name] - before[name] for name in calls] + [len(units(trainer.trained))])
        return result

    with pytest.MonkeyPatch.context() as patch:
        for name in ("foreach_all_gather", "foreach_reduce"):
            patch.setattr(_fsdp_param_group, name, counted(name, getattr(_fsdp_param_group, name)))
        patch.setattr(loop, "optimizer_step", step)
        stage_on_ranks(folder, overrides, world)
    return steps


def test_communication_of_a_step(tmp_path):
    """With sharding.once_per_step, FSDP gathers and reduces each unit once, despite four micro-batches."""
    two.prepare(tmp_path)
    sft = ["--stages=[sft]", "--sft.prompts_per_step=8", "--sft.max_steps=2"]
    ways = {"sharded": two.SHARDED, "once": [*two.SHARDED, ONCE], "replicas": REPLICAS}
    for rank in launch(2, tmp_path, {name: [*sft, *way] for name, way in ways.items()}, count_communication):
        [*_, (gathers, reductions, sums, num_units)] = rank["once"]
        assert (gathers, reductions, sums) == (num_units, num_units, 0)
        [*_, (gathers, reductions, sums, _)] = rank["sharded"]
        assert gathers > 4 * num_units and reductions > 2 * num_units and sums == 0
        [*_, (_, reductions, sums, _)] = rank["replicas"]
        num_equal = RUN_MODEL["num_hidden_layers"] + 2  # layers, embedding and head have gradients in every micro-batch
        assert sums == reductions - 3 * num_equal  # 4 reductions, but only 1 sum, for each such unit
