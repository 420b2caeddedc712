"""Test that options are refused only in recipes in which they have no effect."""

from pathlib import Path

import pytest

from minivlmrl.commands.train import train_recipe
from minivlmrl.config.import_utils import recipes_folder
from minivlmrl.config.loading import as_overrides, load_config
from minivlmrl.config.options import RunConfig
from minivlmrl.extras.check import effects as validation
from minivlmrl.extras.check.command import main as check_main
from minivlmrl.extras.check.effects import check_effects
from minivlmrl.trainers.registry import find_trainer, find_trainers

TWICE = {"grpo.num_iterations": 2}
OWN_LOSS = {"grpo.loss_type": "tests.helpers.by_hand:reinforce"}
OWN_ADVANTAGES = {"grpo.advantages": "tests.helpers.by_hand:max_rl"}
RLOO = {"grpo.loss_type": "rloo"}
GDPO = {"grpo.multi_objective_aggregation": "normalize_then_sum"}
FILES = {"data.task": None, "data.train_file": "rows.jsonl"}
ADAPTER = {"adapter.r": 4}
SHARDED = {"sharding.enabled": True}
VLLM = {"sampling.engine": "vllm"}
GREEDY = {"sampling.temperature": 0.0}
KL = {"grpo.beta": 0.1}
# (option, value, recipes in which the option has no effect, recipes in which the option has an effect)
CASES = [
    ("eval_steps", 2, [FILES], [{}, FILES | {"data.eval_file": "rows.jsonl"}]),
    ("best_metric", "eval/accuracy_greedy", [FILES], [{}]),
    ("num_logged_prompts", 3, [{"log_completions": 0}], [{}]),
    ("save", "adapter", [{}], [ADAPTER]),
    *((f"adapter.{name}", value, [{}], [ADAPTER]) for name, value in {
        "path": "folder", "alpha": 8.0, "dropout": 0.1, "target": ["vision"], "quantize": "nf4",
    }.items()),
    *((f"data.{name}", value, [{}], [FILES]) for name, value in {
        "image_root": "folder", "format": "my_format.py:read", "columns": {"label": "solution"},
        "skip_unreadable": True, "eval_file": "rows.jsonl",
    }.items()),
    *((f"data.{name}", value, [FILES], [{}]) for name, value in {
        "eval_rows": 3, "eval_without_images": True, "eval_rewards": ["iou"],
    }.items()),
    *((f"sharding.{name}", value, [{}], [SHARDED]) for name, value in {"replicas": 2, "cpu_offload": True}.items()),
    ("sharding.once_per_step", True, [{}, {"model.compute_dtype": "bfloat16"}], [SHARDED]),
    ("rollout.gather_weights", False, [{}, SHARDED | VLLM], [SHARDED, {"model.compute_dtype": "bfloat16"}]),
    ("rollout.max_logp_mismatch", 0.1, [ADAPTER | {"adapter.dropout": 0.1}],
     [{}, VLLM]),
    ("reference.path", "folder", [{}], [KL, {"stages": ["dpo"]}]),
    ("dpo.f_divergence_type", "js_divergence", [{"dpo.loss_type": ["sft"]}], [{}]),
    ("dpo.f_alpha_divergence_coef", 0.9, [{}], [{"dpo.f_divergence_type": "alpha_divergence"}]),
    ("reward_model.path", "folder", [{"stages": ["reward_model"]}], [{"rewards": {"reward_model": 1.0}}]),
    *((f"sampling.{name}", value, [GREEDY], [{}]) for name, value in {"top_k": 5, "top_p": 0.5, "min_p": 0.5}.items()),
    ("sampling.history", 2, [{}], [{"sampling.environment": "zoom.py:Zoom"}]),
    ("sampling.cuda_graph", "never", [VLLM], [{}]),
    ("sampling.vllm", {"dtype": "float32"}, [{}], [VLLM, {"sampling.engine": "my_vllm.py:VLLMSampler"}]),
    ("grpo.min_lr_ratio", 0.5, [{"grpo.lr_scheduler_type": "constant"}], [{}, {"grpo.lr_scheduler_type": "cosine"}]),
    ("grpo.epsilon_low", 0.1, [{}, TWICE | {"grpo.loss_type": "cispo"}],
     [TWICE, {"grpo.steps_per_generation": 2}, OWN_LOSS]),
    ("grpo.epsilon_high", 0.3, [{}, TWICE | {"grpo.loss_type": "vespo"}],
     [TWICE, OWN_LOSS, {"grpo.loss_type": "cispo"}]),
    *((f"grpo.{name}", value, [OWN_LOSS], [{}]) for name, value in {
        "rollout_correction": "token_mask", "top_entropy_quantile": 0.5, "entropy_coef": 0.5,
    }.items()),
    ("grpo.importance_sampling_level", "sequence", [{}, TWICE | RLOO, KL | {"grpo.use_bias_correction_kl": False}],
     [TWICE, KL, OWN_LOSS, {"grpo.rollout_correction": "token_mask"}, {"grpo.top_entropy_quantile": 0.5}]),
    ("grpo.kl_estimator", "k2", [{}, KL | RLOO], [KL]),
    ("grpo.use_bias_correction_kl", False, [{}, KL | RLOO, KL | {"grpo.kl_estimator": "k2"}],
     [KL, KL | TWICE | {"grpo.kl_estimator": "k2"}]),
    ("grpo.beta", 0.1, [RLOO | {"grpo.advantages": "gdpo"}], [{}, RLOO, {"grpo.advantages": "gdpo"}]),
    ("grpo.scale_rewards", "none", [RLOO, GDPO, {"grpo.advantages": "rloo"}], [{}, OWN_ADVANTAGES]),
    ("grpo.multi_objective_aggregation", "normalize_then_sum", [RLOO, OWN_ADVANTAGES], [{}]),
    ("grpo.soft_punish_cache", 4, [GDPO, {"grpo.advantages": "gdpo"}], [{}, OWN_ADVANTAGES]),
    ("grpo.rollout_correction_bounds", [0.5, 2.0], [{}], [{"grpo.rollout_correction": "token_mask"}]),
    ("ppo.critic_path", "folder", [{}], [{"ppo.critic": "separate"}]),
    ("ppo.kl_estimator", "k3", [{"ppo.kl_coef": 0.0}], [{}]),
    ("ppo.cliprange", 0.1, [{"ppo.num_ppo_epochs": 1}], [{}, {"ppo.num_ppo_epochs": 1, "ppo.num_mini_batches": 2}]),
]  # fmt: skip


def recipe(options, **more):
    """Return overrides that add `options` to a plain recipe on the built-in task."""
    sections = [name.partition(".")[0] for name in options]
    stage = next((name for name in sections if name in ("dpo", "ppo")), "grpo")
    base = {"data.task": "shapes", "model.config": "model.json", "stages": [stage]}
    return as_overrides(base | options | more)


def has_reference(run):
    stages = [find_trainer(name, run).has_reference(getattr(run, name)) for name in run.stage_names]
    return any(stages) or not stages


def check(run):
    check_effects(run, has_reference(run))


@pytest.fixture
def empty(tmp_path):
    (tmp_path / "recipe.yaml").touch()
    return tmp_path / "recipe.yaml"


@pytest.mark.parametrize("option", ["dtype", "compute_dtype"])
def test_float16_is_refused_for_training_only(option):
    config = RunConfig()
    setattr(config.model, option, "float16")
    with pytest.raises(ValueError, match=rf"model.{option} is 'float16', .* train in bfloat16, or in float32"):
        find_trainers(config)
    config.stages = []
    assert find_trainers(config) == {}
    for dtype in ("float32", "bfloat16", "float64"):
        config = RunConfig()
        setattr(config.model, option, dtype)
        assert find_trainers(config)


@pytest.mark.parametrize(("name", "value", "without", "with_it"), CASES, ids=[name for name, *_ in CASES])
def test_an_option_without_effect_is_refused(empty, name, value, without, with_it):
    for others in without:
        with pytest.raises(ValueError) as error:
            check(load_config(empty, recipe(others | {name: value})))
        assert str(error.value).startswith(f"{empty}: {name} is ")
        assert " and has no effect: " in str(error.value) and "\n" not in str(error.value)
        check(load_config(empty, recipe(others)))
    for others in with_it:
        check(load_config(empty, recipe(others | {name: value})))


def test_cases_cover_every_rule(empty):
    unused = {(options, reason): condition for options, reason, condition in validation.RULES}
    assert len(unused) == len(validation.RULES) > 30
    for name, value, without, _ in CASES:
        for others in without:
            run = load_config(empty, recipe(others | {name: value}))
            for options, reason in list(unused):
                if name in options.split() and unused[options, reason](run, has_reference(run)):
                    del unused[options, reason]
    assert not list(unused)


def test_defaults_and_options_of_unused_stages_are_accepted(empty):
    """An option of a stage that the recipe does not train is only reported as a note."""
    check(load_config(empty, ["--grpo.kl_estimator=k3", "--adapter.alpha=32", "--data.eval_rows=256"]))
    check(load_config(empty, ["--stages=sft", "--grpo.kl_estimator=k2", "--grpo.min_lr_ratio=0.1"]))
    check(RunConfig())


@pytest.mark.parametrize("path", sorted(recipes_folder().glob("*.yaml")), ids=lambda path: path.name)
def test_every_recipe_loads_and_has_no_option_without_effect(path):
    config = load_config(path)
    assert config != RunConfig() and (config.model.config is None or Path(config.model.config).is_file())
    check(config)


@pytest.mark.parametrize("command", [train_recipe, check_main])
def test_options_are_checked_before_anything_is_loaded(command, empty, monkeypatch):
    monkeypatch.setattr("minivlmrl.distributed.process_group.setup", None)  # a call of None would fail
    with pytest.raises(ValueError, match=r"recipe\.yaml: adapter\.dropout is 0\.1 and has no effect: there is no"):
        command([str(empty), *recipe({"adapter.dropout": 0.1})])
