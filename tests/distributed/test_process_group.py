"""Test World's collectives, and that any number of ranks has the results of one on very uneven rows."""

import os
import re
import sys
from functools import partial

import pytest
import torch

from minivlmrl.config.loading import load_config
from minivlmrl.distributed import network as network_file
from minivlmrl.distributed import process_group
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.process_group import setup as join  # pytest 8.0 runs a module's `setup` before its tests
from minivlmrl.distributed.value_models import save_value_model
from minivlmrl.model.build import random_model
from minivlmrl.model.value_head import ValueModel
from minivlmrl.run.evaluate import evaluate
from minivlmrl.run.setup import build_model
from minivlmrl.tasks import shapes
from tests.helpers.on_ranks import ONE, PROMPTS_PER_STEP, SHARDS_BYTES, Uneven, launch, shards_bytes, stage_on_ranks
from tests.helpers.stages import write_recipe
from tests.helpers.tiny import recipe

STAGE = {
    "max_steps": 3, "prompts_per_step": PROMPTS_PER_STEP, "micro_batch_size": 1, "learning_rate": 1e-4,
    "lr_scheduler_type": "constant",
}  # fmt: skip
RECIPE = recipe(
    STAGE, model={"dtype": "float64"}, sampling={"max_new_tokens": 12}, rewards={"letters": 1.0}, ppo={"kl_coef": 0.1}
)
EIGHT_BITS = "--optimizer.name=adamw_8bit"
REFERENCE = ["--stages=[grpo]", "--grpo.beta=0.1", "--grpo.num_iterations=2"]
TOOLS = [*REFERENCE, "--sampling.environment=tests.helpers.on_ranks:Eye", "--sampling.max_new_tokens=30"]
SHORT_HISTORY = [*TOOLS, "--sampling.history=1", "--grpo.loss_type=grpo", "--grpo.max_tokens_per_micro_batch=150"]
QWEN3 = ["--model.config=FOLDER/qwen3_vl.json"]
TWO_AT_A_TIME = [*REFERENCE, "--grpo.micro_batch_size=2"]
STAGES = {  # in float64; each stage has other collective operations
    "sft": ["--stages=[sft]"],
    "dpo": ["--stages=[dpo]"],
    "dpo precomputed": ["--stages=[dpo]", "--dpo.loss_type=[sigmoid, sft]", "--dpo.precompute_ref_log_probs=true"],
    "reward_model": ["--stages=[reward_model]"],
    "ppo": ["--stages=[ppo]"],
    "ppo with a critic": ["--stages=[ppo]", "--ppo.critic=separate"],
    "ppo in mini-batches": ["--stages=[ppo]", "--ppo.num_mini_batches=2"],
    "grpo": ["--stages=[grpo]"],
    "with a reference": REFERENCE,
    "resampled": ["--stages=[grpo]", "--grpo.max_num_gen_batches=3", "--grpo.num_generations=2",
                  "--sampling.max_new_tokens=1", "--grpo.steps_per_generation=2"],
    "rloo": [*REFERENCE, "--grpo.loss_type=rloo", "--grpo.steps_per_generation=2"],
    "resampled rloo": [*REFERENCE, "--grpo.loss_type=rloo", "--grpo.max_num_gen_batches=2",
                       "--grpo.top_entropy_quantile=0.5", "--sampling.max_new_tokens=2"],
    "with a reward model": ["--stages=[grpo]", "--rewards={letters: 0.5, reward_model: 1}",
                            "--reward_model.path=FOLDER/judge"],
    "with a reward model of another family": ["--stages=[grpo]", "--rewards={letters: 0.5, reward_model: 1}",
                                              "--reward_model.path=FOLDER/stranger"],
    "without the vision tower": [*REFERENCE, "--model.freeze=[vision, merger]"],
    "tools": TOOLS,
    "trajectories": [*SHORT_HISTORY, "--grpo.max_steps=2"],
    "Qwen3-VL": [*REFERENCE, *QWEN3],
    "Qwen3.5": [*REFERENCE, "--model.config=FOLDER/qwen3_5.json"],
    "two at a time": TWO_AT_A_TIME,
    "Qwen3-VL, two at a time": [*TWO_AT_A_TIME, *QWEN3],
    "float32": [*REFERENCE, "--model.dtype=float32", "--grpo.learning_rate=1e-5"],
    "experts": [*REFERENCE, "--model.config=FOLDER/qwen3_5_moe.json", "--optimizer.weight_decay=0.1"],
    "8 bits": [*REFERENCE, EIGHT_BITS],
}  # fmt: skip
SHARDED = ["--sharding.enabled=true"]
ONE_BY_ONE = [*SHARDED, "--rollout.gather_weights=false", "--model.activation_checkpointing=true"]
WAYS = {
    "replicated": [], "sharded": SHARDED, "layer by layer": ONE_BY_ONE,
    "replicas": [*ONE_BY_ONE, "--sharding.replicas=2"], "compute_dtype": ["--model.compute_dtype=float64"],
}  # fmt: skip
CASES = {  # {number of ranks: (stage, way)}; results must equal one process's results without sharding
    1: [("with a reference", "sharded")],
    2: [("sft", "replicated"), ("dpo", "replicated"), ("float32", "sharded"), ("with a reference", "compute_dtype"),
        ("with a reference", "layer by layer"), ("with a reward model", "layer by layer"),
        ("Qwen3-VL", "layer by layer"), ("Qwen3.5", "layer by layer"),
        ("with a reward model of another family", "layer by layer"), ("two at a time", "layer by layer"),
        ("ppo with a critic", "layer by layer"),
        ("Qwen3-VL, two at a time", "sharded"), ("experts", "replicated"),
        *((name, "sharded") for name in ("dpo precomputed", "reward_model", "ppo", "rloo", "resampled rloo",
                                         "without the vision tower", "experts", "8 bits"))],
    4: [("with a reference", "replicated"), ("with a reference", "replicas"),
        *((name, "sharded") for name in ("sft", "dpo", "grpo", "resampled", "ppo in mini-batches", "tools",
                                         "trajectories"))],
}  # fmt: skip
SAME_BY_CHANCE = {"rollout/logp_mismatch", "rollout/logp_mismatch_rms"}  # these metrics measure rounding differences


def prepare(folder):
    """Write the recipe's files to a folder: a model, and reward models with non-zero heads."""
    write_recipe(folder, RECIPE)
    for name, config in (("judge", "model"), ("stranger", "qwen3_vl")):
        model, processor = random_model(folder / f"{config}.json", shapes.tokenizer(), 1)
        judge = ValueModel(model.double())
        torch.nn.init.normal_(judge.score.weight, generator=torch.Generator().manual_seed(2))
        save_value_model(folder / name, judge, processor, ONE)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return each case's and rank's results, by number of ranks; "alone" has those of one process."""
    folder = tmp_path_factory.mktemp("ranks")
    prepare(folder)
    start = dict(random_model(folder / "model.json", shapes.tokenizer(), 0)[0].double().named_parameters())
    found = {"start": start, "alone": launch(1, folder, STAGES)[0]}
    for size, cases in CASES.items():
        found[size] = launch(size, folder, {(name, way): [*STAGES[name], *WAYS[way]] for name, way in cases})
    return found


def assert_equal(result, alone, relative, limit):
    """Compare one rank's result with one process's result."""
    assert (result.texts, result.evaluation) == (alone.texts, pytest.approx(alone.evaluation, rel=relative))
    for line, expected in zip(result.lines, alone.lines, strict=True):
        assert line.keys() == expected.keys()
        for name in line.keys() - SAME_BY_CHANCE:
            if name == "rewards/accuracies" and abs(expected["rewards/margins"]) < 1e-9:
                continue  # policy and reference are equal, so rounding decides
            assert line[name] == pytest.approx(expected[name], rel=relative, abs=relative), name
    for parameter, value in alone.weights.items():
        torch.testing.assert_close(result.weights[parameter], value, rtol=0, atol=limit, msg=parameter)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "name", "way"), [(size, *case) for size, cases in CASES.items() for case in cases])
def test_any_number_of_ranks_makes_the_same(results, size, name, way):
    close = (1e-5, 1e-6) if name == "float32" else (1e-12, 1e-12)
    for rank in results[size]:
        assert_equal(rank[name, way], results["alone"][name], *close)


@pytest.mark.slow
def test_the_cases_change_weights_and_lengths(results):
    """All trained weights have moved by far more than the tolerance, and completions have many lengths."""
    for name, result in results["alone"].items():
        assert all(line["grad_norm"] > 1e-3 for line in result.lines), name
    texts = [text for _, group in results["alone"]["grpo"].texts for text in group]
    assert len({len(text) for text in texts}) > 5
    vision = [name.startswith("visual.") for name in results["start"]]
    for case, expected in (("sft", [True] * len(vision)), ("without the vision tower", [not part for part in vision])):
        weights = results["alone"][case].weights
        assert [bool((weights[n] - start).abs().max() > 1e-6) for n, start in results["start"].items()] == expected


# faster versions of these tests, with one launch for one rank and one launch for two ranks
def evaluation(folder, overrides, world):
    """Evaluate data.eval_rows rows."""
    config = load_config(folder / "recipe.yaml", ["--data.eval_rewards=[letters, format]", *overrides])
    model, processor = build_model(config, world)
    return evaluate(model, processor, [Uneven()[i] for i in range(config.data.eval_rows)], config, world)


FUNCTIONS = {"stage": partial(stage_on_ranks, num_held_out=0), "evaluation": evaluation}
GRPO = ["stage", *REFERENCE, "--grpo.max_steps=2"]
QUICK_TOOLS = ["stage", *TOOLS, "--grpo.max_steps=2", "--grpo.num_iterations=1"]
QUICK_TRAJECTORIES = ["stage", *SHORT_HISTORY, "--grpo.max_steps=2", "--grpo.num_iterations=1"]
MOVING = [*GRPO, "--grpo.num_iterations=1", "--reference.sync_ref_model=true", "--reference.ref_model_sync_steps=1"]
SHARING = [*MOVING, "--adapter.r=2"]  # the base model
FOLDER = [*GRPO, "--reference.path=FOLDER/judge"]
EXPERTS = ["stage", *STAGES["experts"], "--grpo.max_steps=2"]
COUNTS = {f"{count} rows": ["evaluation", f"--data.eval_rows={count}"] for count in (5, 1)}
# the policy's adapters, a critic's head, without rows on one rank, and a reference that is the base
ADAPTED = ["stage", "--stages=[ppo]", "--ppo.max_steps=2", "--adapter.r=4",
           "--adapter.target=[language, merger]", "--ppo.learning_rate=1e-3", EIGHT_BITS]  # fmt: skip
# a critic with its own adapters: on one rank over the same base, sharded over a copy of the base
CRITIC = [*ADAPTED, "--ppo.critic=separate"]
DROPOUT = ["--adapter.dropout=0.3", "--adapter.target=[language, vision, merger]"]
# only the tower is trained, so that texts have no gradient; the second step has no image on any rank
TOWER = ["stage", "--stages=[sft]", "--model.freeze=[language, embeddings]", "--optimizer.weight_decay=0.1",
         "--sft.max_steps=4"]  # fmt: skip
TOWER_ADAPTERS = ["stage", "--stages=[dpo]", "--adapter.r=4", "--adapter.target=[vision]", "--dpo.max_steps=4"]
# only some quantized layers have adapters
NF4 = [*ADAPTED, "--adapter.quantize=nf4", "--adapter.target=['.*[qv]_proj', merger]"]
ONCE = [*ONE_BY_ONE, "--sharding.once_per_step=true"]
QUICK = {
    "replicated": GRPO, "experts, once": [*EXPERTS, *ONCE],
    "pieces": [*GRPO, *ONE_BY_ONE, "--grpo.max_tokens_per_micro_batch=90", "--sampling.max_batch_tokens=120"],
    "5 rows": COUNTS["5 rows"], "1 rows, layer by layer": [*COUNTS["1 rows"], *ONE_BY_ONE],
    "adapters, sharded": [*ADAPTED, *SHARDED], "critic": CRITIC, "critic, sharded": [*CRITIC, *SHARDED],
    "dropout": [*ADAPTED, *DROPOUT],
    "dropout, layer by layer": [*ADAPTED, *DROPOUT, *ONE_BY_ONE], "tools, sharded": [*QUICK_TOOLS, *SHARDED],
    "trajectories, sharded": [*QUICK_TRAJECTORIES, *SHARDED, "--sampling.max_batch_tokens=120"],
    "moving, compute_dtype": [*MOVING, "--model.compute_dtype=float64"],
    "tower, replicated": TOWER, "tower, sharded": [*TOWER, *SHARDED], "tower, once": [*TOWER, *ONCE],
    "tower adapters, replicated": TOWER_ADAPTERS, "tower adapters, once": [*TOWER_ADAPTERS, *ONCE],
    "folder, sharded": [*FOLDER, *SHARDED], "sharing, layer by layer": [*SHARING, *ONE_BY_ONE],
}  # fmt: skip
NF4_WAYS = {"NF4, layer by layer": [*NF4, *ONE_BY_ONE]}


def quick(folder, overrides, world):
    return FUNCTIONS[overrides[0]](folder, overrides[1:], world)


@pytest.fixture(scope="module")
def quick_results(tmp_path_factory):
    """Return one process's results, and each rank's results for all QUICK cases on two ranks."""
    folder = tmp_path_factory.mktemp("quick")
    prepare(folder)
    alone = {
        "replicated": GRPO, "tools": QUICK_TOOLS, "trajectories": QUICK_TRAJECTORIES,
        **COUNTS, "moving": MOVING, "moving in half": [*MOVING, "--model.compute_dtype=float32"], "experts": EXPERTS,
        "sharing": SHARING, "folder": FOLDER, "adapters": ADAPTED, "critic": CRITIC, "NF4": NF4,
        "tower": TOWER, "tower adapters": TOWER_ADAPTERS,
    }  # fmt: skip
    return launch(1, folder, alone, quick)[0], launch(2, folder, QUICK | (NF4_WAYS if SHARDS_BYTES else {}), quick)


# {case of QUICK: the case of one process with equal results}
EQUAL = {
    "replicated": "replicated", "pieces": "replicated", "experts, once": "experts",
    "tools, sharded": "tools", "trajectories, sharded": "trajectories", "adapters, sharded": "adapters",
    "critic": "critic", "critic, sharded": "critic",
    **{f"tower, {way}": "tower" for way in ("replicated", "sharded", "once")},
    "tower adapters, replicated": "tower adapters", "tower adapters, once": "tower adapters",
}  # fmt: skip


@pytest.mark.parametrize("way", [*EQUAL, *map(shards_bytes, NF4_WAYS)])
def test_two_ranks_equal_one(quick_results, way):
    """Results of two steps are equal in float64."""
    alone, process_group = quick_results
    limit = 1e-11 if way.startswith(("adapters", "critic", "NF4")) else 1e-12
    for rank in process_group:
        assert_equal(rank[way], alone[EQUAL.get(way, "NF4")], limit, limit)


def test_the_cases_have_tool_results_several_turns_and_trained_adapters(quick_results):
    """Completions have images and texts from a tool, trajectories have several turns, and adapters and critics move."""
    alone, _ = quick_results
    texts = [text for _, group in alone["tools"].texts for text in group]
    assert {text.count("<|vision_start|>") for text in texts} >= {0, 1, 2} and any("dark" in text for text in texts)
    assert all(1.5 < line["mean_turns"] < 3 for line in alone["trajectories"].lines)
    weights = {case: alone[case].weights.items() for case in ("adapters", "NF4", "critic")}
    moved = {case: [name for name, value in items if value.any()] for case, items in weights.items()}
    for case in ("adapters", "NF4"):
        assert "critic.weight" in moved[case] and any(re.match("policy.*lora_B", name) for name in moved[case])
    assert {name.partition(".")[0] for name in moved["critic"] if "lora_B" in name} == {"policy", "critic"}


@pytest.mark.parametrize("way", ["moving, compute_dtype", "folder, sharded", "sharing, layer by layer"])
def test_two_ranks_have_the_same_reference_as_one(quick_results, way):
    """The reference is updated after each step. A rank stores copies only of its rows in trained parameters."""
    alone, process_group = quick_results
    expected = alone[way.partition(",")[0]]
    for rank in process_group:
        assert_equal(rank[way], expected, 1e-12, 1e-12)
    first, second = (rank[way].reference for rank in process_group)
    if "compute" in way:  # each rank has all rows
        first, second = first, [rows[:0] for rows in second]
    joined = [torch.cat(parts) for parts in zip(first, second, strict=True)]
    torch.testing.assert_close(joined, expected.reference, rtol=0, atol=1e-12)
    trained = [name for name in expected.weights if ".lora_" in name or not way.startswith("sharing")]
    assert [len(rows) for rows in joined] == [len(expected.weights[name]) for name in trained]


def test_the_reference_is_updated_in_the_dtype_of_the_parameters(quick_results):
    """Small updates would be lost in the compute dtype, so the reference has the parameters' dtype."""
    alone, _ = quick_results
    torch.testing.assert_close(alone["moving in half"].reference, alone["moving"].reference, rtol=0, atol=1e-5)
    assert not torch.equal(alone["moving in half"].reference[0], alone["moving"].reference[0].float().double())


def test_with_dropout_sharded_ranks_equal_replicated_ones(quick_results):
    """Each rank has its own dropout masks, so that results differ from one process's results."""
    for rank in quick_results[1]:
        assert_equal(rank["dropout, layer by layer"], rank["dropout"], 1e-11, 1e-11)
        assert rank["dropout"].lines[1]["loss"] != pytest.approx(rank["adapters, sharded"].lines[1]["loss"], rel=1e-6)


@pytest.mark.parametrize("way", ["5 rows", "1 rows, layer by layer"])
def test_two_ranks_evaluate_like_one(quick_results, way):
    """With only one row, one rank repeats the other rank's row."""
    alone, process_group = quick_results
    for rank in process_group:
        assert repr(rank[way]) == repr(alone[way.partition(",")[0]])  # NaN is not equal to itself


def test_equal_shares():
    """Seven items on three ranks: each rank gets three, and two ranks repeat the first item."""
    process_group = [World(rank, 3, torch.device("cpu")) for rank in range(3)]
    found = [rank.shard_evenly([*range(7)]) for rank in process_group]
    assert found == [([0, 3, 6], 3), ([1, 4, 0], 2), ([2, 5, 0], 2)]
    assert [rank.shard_evenly([8, 9]) for rank in process_group] == [([8], 1), ([9], 1), ([8], 0)]
    assert [rank.shard_evenly([]) for rank in process_group] == [([], 0)] * 3


def test_shares_of_ranks_differ_by_at_most_one():
    def shares(items, size):
        return [World(rank, size, torch.device("cpu")).share(items) for rank in range(size)]

    assert shares([1, 2, 3, 4], 2) == [[1, 2], [3, 4]]
    assert shares([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4, 5]]
    assert shares(range(2), 4) == [range(0), range(1), range(1, 1), range(1, 2)]


@pytest.mark.skipif(sys.platform != "linux", reason="only there it is called lo")
@pytest.mark.parametrize(("hosts", "network"), [(1, "lo"), (2, None)])
def test_ranks_on_one_machine_need_no_host_name(monkeypatch, hosts, network):
    """With one host gloo uses the loopback interface, because a container may not resolve its own host name."""
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": str(2 // hosts), "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(network_file, "attempt_store", lambda limit: None)
    monkeypatch.setattr(network_file, "connect", lambda *_: None)
    monkeypatch.setattr(process_group, "waiting_group", None)
    monkeypatch.setattr(process_group.dist, "new_group", lambda **_: None)
    process_group.setup(torch.get_num_threads(), 30.0, sharded=False)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == network


def test_cudnns_attention_is_off_in_training():
    torch.backends.cuda.enable_cudnn_sdp(True)
    join(torch.get_num_threads(), 30.0, False)
    assert not torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cuda.flash_sdp_enabled()
