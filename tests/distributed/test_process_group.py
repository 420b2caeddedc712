"""Test the collectives of World, and that two ranks compute the results of one process on uneven rows."""

import os
import re
import sys

import pytest
import torch

from minivlmrl.config.loading import load_config
from minivlmrl.distributed import network as network_file
from minivlmrl.distributed import process_group
from minivlmrl.distributed.value_models import save_value_model
from minivlmrl.model.build import random_model
from minivlmrl.model.value_head import ValueModel
from minivlmrl.run.evaluate import evaluate
from minivlmrl.run.setup import build_model
from minivlmrl.tasks import shapes
from tests.helpers.children import fork_ranks
from tests.helpers.on_ranks import ONE, PROMPTS_PER_STEP, SHARDS_BYTES, Uneven, launch, shards_bytes, stage_on_ranks
from tests.helpers.stages import write_recipe
from tests.helpers.tiny import recipe

STAGE = {
    "max_steps": 3, "prompts_per_step": PROMPTS_PER_STEP, "micro_batch_size": 1, "learning_rate": 1e-4,
    "lr_scheduler_type": "constant",
}  # fmt: skip
SMALL = {"sampling": {"max_new_tokens": 12}, "rewards": {"letters": 1.0}, "ppo": {"kl_coef": 0.1}}
RECIPE = recipe(STAGE, model={"dtype": "float64"}, **SMALL)
EIGHT_BITS = "--optimizer.name=adamw_8bit"
REFERENCE = ["--stages=[grpo]", "--grpo.beta=0.1", "--grpo.num_iterations=2"]
TOOLS = [*REFERENCE, "--sampling.environment=tests.helpers.on_ranks:Eye", "--sampling.max_new_tokens=30"]
SHORT_HISTORY = [*TOOLS, "--sampling.history=1", "--grpo.loss_type=grpo", "--grpo.max_tokens_per_micro_batch=150"]
SHARDED = ["--sharding.enabled=true"]
ONE_BY_ONE = [*SHARDED, "--rollout.gather_weights=false", "--model.activation_checkpointing=true"]


def prepare(folder):
    """Write a recipe, model configs, and a reward model whose head is not 0."""
    write_recipe(folder, RECIPE)
    model, processor = random_model(folder / "model.json", shapes.tokenizer(), 1)
    judge = ValueModel(model.double())
    torch.nn.init.normal_(judge.score.weight, generator=torch.Generator().manual_seed(2))
    save_value_model(folder / "judge", judge, processor, ONE)


def assert_equal(result, alone, relative, limit):
    assert (result.texts, result.evaluation) == (alone.texts, pytest.approx(alone.evaluation, rel=relative))
    for line, expected in zip(result.lines, alone.lines, strict=True):
        assert line.keys() == expected.keys()
        for name in line.keys() - {"rollout/logp_mismatch", "rollout/logp_mismatch_rms"}:  # rounding errors
            if name == "rewards/accuracies" and abs(expected["rewards/margins"]) < 1e-9:
                continue  # the policy equals its reference, so rounding decides
            assert line[name] == pytest.approx(expected[name], rel=relative, abs=relative), name
    for parameter, value in alone.weights.items():
        torch.testing.assert_close(result.weights[parameter], value, rtol=0, atol=limit, msg=parameter)


def evaluation(folder, overrides, world):
    config = load_config(folder / "recipe.yaml", ["--data.eval_rewards=[letters, format]", *overrides])
    model, processor = build_model(config, world)
    return evaluate(model, processor, [Uneven()[i] for i in range(config.data.eval_rows)], config, world)


FUNCTIONS = {"stage": stage_on_ranks, "evaluation": evaluation}
GRPO = ["stage", *REFERENCE, "--grpo.max_steps=2"]
TRAJECTORIES = ["stage", *SHORT_HISTORY, "--grpo.max_steps=2", "--grpo.num_iterations=1"]
ONE_PASS = [*GRPO, "--grpo.num_iterations=1"]
SHARING = [*ONE_PASS, "--adapter.r=2"]  # policy and reference share the base model
# the tower and merger are trained in full beside adapters, and the reference has its own copies
PARTS = [*SHARING, "--adapter.modules_to_save=[vision, merger]"]
FOLDER = [*GRPO, "--reference.path=FOLDER/judge"]
EXPERTS = [*GRPO, "--model.config=FOLDER/qwen3_5_moe.json", "--optimizer.weight_decay=0.1"]
COUNTS = {f"{count} rows": ["evaluation", f"--data.eval_rows={count}"] for count in (5, 1)}
# adapters of the policy, and a critic with only a head, whose single row leaves one rank without rows
ADAPTED = ["stage", "--stages=[ppo]", "--ppo.max_steps=2", "--adapter.r=4",
           "--adapter.target=[language, merger]", "--ppo.learning_rate=1e-3", EIGHT_BITS]  # fmt: skip
# a critic with adapters of its own: one process shares the base model, and sharded ranks copy the base model
CRITIC = [*ADAPTED, "--ppo.critic=separate"]
DROPOUT = ["--adapter.dropout=0.3", "--adapter.target=[language, vision, merger]"]
# only the vision tower is trained, so texts have no gradient; in the second step, no rank has an image
TOWER = ["stage", "--stages=[sft]", "--model.freeze=[language, embeddings]", "--optimizer.weight_decay=0.1",
         "--sft.max_steps=4"]  # fmt: skip
# some quantized layers have no adapters
NF4 = [*ADAPTED, "--adapter.quantize=nf4", "--adapter.target=['.*[qv]_proj', merger]"]
SFT = ["stage", "--stages=[sft]", "--sft.max_steps=1"]
DPO = ["stage", "--stages=[dpo]", "--dpo.max_steps=1", "--dpo.reference_free=true", "--dpo.beta=1e-3"]
ONCE = [*ONE_BY_ONE, "--sharding.once_per_step=true"]
CASES = {  # {case of two ranks: (case of one process with the same results, options)}
    "replicated": ("grpo", GRPO), "experts, once": ("experts", [*EXPERTS, *ONCE]),
    "pieces": ("grpo", [*GRPO, *ONE_BY_ONE, "--grpo.max_tokens_per_micro_batch=90", "--sampling.max_batch_tokens=120"]),
    "trajectories": ("trajectories", [*TRAJECTORIES, *SHARDED, "--sampling.max_batch_tokens=120"]),
    "adapters": ("adapters", [*ADAPTED, *SHARDED]), "critic": ("critic", [*CRITIC, *SHARDED]),
    "parts": ("parts", PARTS), "NF4": ("NF4", [*NF4, *ONE_BY_ONE]),
    "sft": ("sft", SFT), "dpo": ("dpo", [*DPO, *SHARDED]),
    "tower": ("tower", TOWER), "tower, sharded": ("tower", [*TOWER, *SHARDED]),
    "tower, once": ("tower", [*TOWER, *ONCE]),
    "parts, sharded": ("parts", [*PARTS, *SHARDED]), "parts, once": ("parts", [*PARTS, *ONCE]),
}  # fmt: skip
REFERENCES = {
    "one pass": [*ONE_PASS, "--model.compute_dtype=float64"], "folder": [*FOLDER, *SHARDED],
    "sharing": [*SHARING, *ONE_BY_ONE],
}  # fmt: skip
OTHERS = {
    "5 rows": COUNTS["5 rows"], "1 rows": [*COUNTS["1 rows"], *ONE_BY_ONE],
    "dropout": [*ADAPTED, *DROPOUT], "dropout, layer by layer": [*ADAPTED, *DROPOUT, *ONE_BY_ONE],
}  # fmt: skip


def quick(folder, overrides, world):
    return FUNCTIONS[overrides[0]](folder, overrides[1:], world)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    prepare(folder)
    alone = {
        "grpo": GRPO, "trajectories": TRAJECTORIES, **COUNTS, "one pass": ONE_PASS, "experts": EXPERTS, "tower": TOWER,
        "sharing": SHARING, "folder": FOLDER, "sft": SFT, "dpo": DPO,
        "adapters": ADAPTED, "parts": PARTS, "critic": CRITIC, "NF4": NF4,
    }  # fmt: skip
    cases = {name: options for name, (_, options) in CASES.items() if name != "NF4" or SHARDS_BYTES}
    return launch(1, folder, alone, quick)[0], launch(2, folder, cases | REFERENCES | OTHERS, quick)


@pytest.mark.parametrize("case", [shards_bytes(case) if case == "NF4" else case for case in CASES])
def test_two_ranks_equal_one(results, case):
    alone, ranks = results
    name, options = CASES[case]
    limit = 1e-11 if "--adapter.r=4" in options else 1e-12
    for rank in ranks:
        assert_equal(rank[case], alone[name], limit, limit)
        assert any(line["grad_norm"] > 1e-3 for line in rank[case].lines)


def test_the_cases_have_several_turns_many_lengths_and_trained_adapters(results):
    alone, _ = results
    assert all(1.5 < line["mean_turns"] < 3 for line in alone["trajectories"].lines)
    assert len({len(text) for _, group in alone["grpo"].texts for text in group}) > 5
    assert 0 < alone["dpo"].evaluation["eval/pair_accuracy"] < 1
    weights = {case: alone[case].weights.items() for case in ("adapters", "NF4", "critic")}
    moved = {case: [name for name, value in items if value.any()] for case, items in weights.items()}
    for case in ("adapters", "NF4"):
        assert "critic.weight" in moved[case] and any(re.match("policy.*lora_B", name) for name in moved[case])
    assert {name.partition(".")[0] for name in moved["critic"] if "lora_B" in name} == {"policy", "critic"}
    frozen, whole = alone["sharing"].weights, alone["parts"].weights
    moved_parts = {name for name, value in whole.items() if "lora_" not in name and not frozen[name].equal(value)}
    assert {name.split(".")[1] for name in moved_parts} == {"patch_embed", "blocks", "merger"}


@pytest.mark.parametrize("case", REFERENCES)
def test_two_ranks_have_the_same_reference_as_one(results, case):
    alone, ranks = results
    for rank in ranks:
        assert_equal(rank[case], alone[case], 1e-12, 1e-12)
    first, second = (rank[case].reference for rank in ranks)
    if case == "one pass":  # without sharding, each rank has all rows
        second = [rows[:0] for rows in second]
    joined = [torch.cat(parts) for parts in zip(first, second, strict=True)]
    torch.testing.assert_close(joined, alone[case].reference, rtol=0, atol=1e-12)
    trained = [name for name in alone[case].weights if ".lora_" in name or case != "sharing"]
    assert [len(rows) for rows in joined] == [len(alone[case].weights[name]) for name in trained]


def test_with_dropout_sharded_ranks_equal_replicated_ones(results):
    """Each rank has dropout masks of its own, so two ranks differ from one process."""
    for rank in results[1]:
        assert_equal(rank["dropout, layer by layer"], rank["dropout"], 1e-11, 1e-11)
        assert rank["dropout"].lines[1]["loss"] != pytest.approx(rank["adapters"].lines[1]["loss"], rel=1e-6)


@pytest.mark.parametrize("case", COUNTS)
def test_two_ranks_evaluate_like_one(results, case):
    alone, ranks = results
    for rank in ranks:
        assert repr(rank[case]) == repr(alone[case])  # repr, because NaN is not equal to itself


@pytest.mark.skipif(sys.platform != "linux", reason="only there it is called lo")
@pytest.mark.parametrize(("hosts", "network"), [(1, "lo"), (2, None)])
def test_ranks_on_one_machine_need_no_host_name(monkeypatch, hosts, network):
    """On one host, gloo uses the loopback interface, because a container may not resolve its own host name."""
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": str(2 // hosts), "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(network_file, "connect", lambda *_: None)
    monkeypatch.setattr(process_group, "barrier_group", None)
    monkeypatch.setattr(process_group.dist, "new_group", lambda **_: None)
    process_group.setup(torch.get_num_threads(), 30.0, sharded=False)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == network


def test_gradients_are_summed_one_by_one():
    """A joined copy would need as much memory as the gradients; a gradient that no rank has stays None."""

    def begin(world):
        parameters = [torch.nn.Parameter(torch.ones(n)) for n in (1, 2, 3)]
        parameters[0].grad = torch.full((1,), world.rank + 1.0)
        if world.rank == 0:  # as vision weights, if only one rank has images
            parameters[1].grad = torch.full((2,), 5.0)
        sizes = []
        all_reduce = process_group.dist.all_reduce
        process_group.dist.all_reduce = lambda x: (sizes.append(x.numel()), all_reduce(x))
        world.sum_gradients(parameters)
        process_group.dist.all_reduce = all_reduce
        assert [None if x.grad is None else x.grad.tolist() for x in parameters] == [[3.0], [5.0, 5.0], None]
        assert sizes == [3, 1, 2]  # first, which gradients the ranks have
        process_group.shutdown(world)

    assert fork_ranks(2, begin, 30.0) == [0, 0]
