"""Test the notes about options that have no effect in a recipe, and the errors about options that contradict."""

import pytest

from minivlmrl.config.loading import as_overrides, load_config
from minivlmrl.config.options import RunConfig
from minivlmrl.monitor.check.effects import options_without_effect
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
KL = {"grpo.beta": 0.1}
SFT = {"stages": ["sft"]}
NOT_EVALUATED = {"data.eval_rows": 0}
# (option, value, recipes in which the option has no effect, recipes in which the option has an effect)
CASES = [
    ("eval_steps", 2, [FILES, NOT_EVALUATED], [{}, FILES | {"data.eval_file": "rows.jsonl"}]),
    ("best_metric", "eval/accuracy_greedy", [FILES, NOT_EVALUATED], [{}]),
    ("save", "adapter", [{}], [ADAPTER]),
    *((f"adapter.{name}", value, [{}], [ADAPTER]) for name, value in {
        "alpha": 8.0, "dropout": 0.1, "target": ["vision"], "modules_to_save": ["vision"], "quantize": "nf4",
    }.items()),
    *((f"data.{name}", value, [{}], [FILES]) for name, value in {
        "image_root": "folder", "format": "my_format.py:read", "columns": {"label": "solution"},
        "skip_unreadable": True, "image": {"max_pixels": 3136}, "video": {"nframes": 4},
        "max_prompt_tokens": 100,
    }.items()),
    *((f"data.{name}", value, [FILES, NOT_EVALUATED], [{}]) for name, value in {
        "eval_without_images": True, "eval_rewards": ["iou"],
    }.items()),
    *((f"sharding.{name}", value, [{}], [SHARDED]) for name, value in {"replicas": 2, "cpu_offload": True}.items()),
    ("sharding.once_per_step", True, [{}, {"model.compute_dtype": "bfloat16"}], [SHARDED]),
    ("rollout.gather_weights", False, [{}, VLLM], [SHARDED, SHARDED | VLLM, {"model.compute_dtype": "bfloat16"}]),
    ("rollout.max_logp_mismatch", 0.1, [ADAPTER | {"adapter.dropout": 0.1}], [{}, VLLM]),
    ("reference.path", "folder", [{}], [KL, {"stages": ["dpo"]}]),
    ("reference.sync_ref_model", True, [{}, KL], [KL | {"reference.ref_model_sync_steps": 100}]),
    *((f"reference.ref_model_{name}", value, [{}], [{"reference.sync_ref_model": True}])
      for name, value in {"mixup_alpha": 0.3, "sync_steps": 8}.items()),
    ("dpo.label_smoothing", 0.1, [{"dpo.loss_type": ["hinge", "sft"]}], [{}, {"dpo.loss_type": ["hinge", "robust"]}]),
    ("dpo.f_alpha_divergence_coef", 0.9, [{}], [{"dpo.f_divergence_type": "alpha_divergence"}]),
    ("reward_model.path", "folder", [{"stages": ["reward_model"]}], [{"rewards": {"reward_model": 1.0}}]),
    *((f"sampling.{name}", value, [{"sampling.temperature": 0.0}, SFT], [{}]) for name, value in {
        "top_k": 5, "top_p": 0.5, "min_p": 0.5,
    }.items()),
    *((f"sampling.{name}", value, [SFT], [{}]) for name, value in {
        "temperature": 0.7, "repetition_penalty": 1.2, "engine": "vllm",
    }.items()),
    ("sampling.history", 2, [{}], [{"sampling.environment": "zoom.py:Zoom"}]),
    ("sampling.cuda_graph", "never", [], [{}, VLLM]),  # evaluations do not use vLLM
    ("sampling.vllm", {"dtype": "float32"}, [{}, VLLM | SFT], [VLLM, {"sampling.engine": "my_vllm.py:VLLMSampler"}]),
    ("grpo.epsilon_low", 0.1, [{}, TWICE | {"grpo.loss_type": "cispo", "grpo.epsilon_high": 5.0}],
     [TWICE, {"grpo.steps_per_generation": 2}, OWN_LOSS]),
    ("grpo.epsilon_high", 1.3, [{}, TWICE | {"grpo.loss_type": "vespo"}],
     [TWICE, OWN_LOSS, {"grpo.loss_type": "cispo"}]),
    *((f"grpo.{name}", value, [OWN_LOSS], [{}]) for name, value in {
        "rollout_correction": "token_mask", "top_entropy_quantile": 0.5, "entropy_coef": 0.5,
    }.items()),
    ("grpo.importance_sampling_level", "sequence",
     [{}, TWICE | RLOO, KL | {"grpo.use_bias_correction_kl": False}, KL | {"grpo.kl_estimator": "k2"}],
     [TWICE, KL, KL | {"grpo.loss_type": "vespo"}, OWN_LOSS, {"grpo.rollout_correction": "token_mask"},
      {"grpo.top_entropy_quantile": 0.5}]),
    ("grpo.kl_estimator", "k2", [{}], [KL]),
    ("grpo.use_bias_correction_kl", False, [{}], [KL]),
    ("grpo.scale_rewards", "none", [RLOO, GDPO, OWN_ADVANTAGES, {"grpo.advantages": "rloo"}], [{}]),
    ("grpo.multi_objective_aggregation", "normalize_then_sum", [RLOO, OWN_ADVANTAGES], [{}]),
    ("grpo.rollout_correction_bounds", [0.5, 2.0], [{}], [{"grpo.rollout_correction": "token_mask"}]),
    ("ppo.critic_path", "folder", [{}], [{"ppo.critic": "separate"}]),
    ("ppo.kl_estimator", "k3", [{"ppo.kl_coef": 0.0}], [{}]),
    ("ppo.cliprange", 0.1, [{"ppo.num_iterations": 1}], [{}, {"ppo.num_iterations": 1, "ppo.steps_per_generation": 2}]),
]  # fmt: skip


def recipe(options, **more):
    sections = [name.partition(".")[0] for name in options]
    stage = next((name for name in sections if name in ("dpo", "ppo")), "grpo")
    base = {"data.task": "shapes", "model.config": "model.json", "stages": [stage]}
    return as_overrides(base | options | more)


def notes_of(config):
    trainers = {name: find_trainer(name, config) for name in config.stage_names}
    return {name: reason for names, reason in options_without_effect(config, trainers) for name in names}


@pytest.fixture
def empty(tmp_path):
    (tmp_path / "recipe.yaml").write_text("seed: 0")
    return tmp_path / "recipe.yaml"


@pytest.mark.parametrize("option", ["dtype", "compute_dtype"])
def test_float16_is_refused_for_training_only(option):
    config = RunConfig()
    setattr(config.model, option, "float16")
    with pytest.raises(ValueError, match=rf"model.{option} .*is float16, .* train in bfloat16, or in float32"):
        find_trainers(config)
    config.stages = []
    assert find_trainers(config) == {}
    for dtype in ("float32", "bfloat16", "float64"):
        config = RunConfig()
        setattr(config.model, option, dtype)
        assert find_trainers(config)


@pytest.mark.parametrize(("name", "value", "without", "with_it"), CASES, ids=[name for name, *_ in CASES])
def test_an_option_without_effect_is_a_note(empty, name, value, without, with_it):
    for others in without:
        assert notes_of(load_config(empty, recipe(others | {name: value})))[name]
        assert name not in notes_of(load_config(empty, recipe(others)))
    for others in with_it:
        assert name not in notes_of(load_config(empty, recipe(others | {name: value})))


@pytest.mark.parametrize(("options", "message"), [
    ({"adapter.path": "folder"}, r"adapter\.path is .*folder, but r is 0, so the model would be trained without the"),
    ({"data.eval_file": "rows.jsonl"}, r"data\.eval_file is .*rows\.jsonl, but evaluations would use the rows"),
    ({"dpo.loss_type": ["exo_pair"]}, r"^dpo\.loss_type exo_pair takes the logarithm of label_smoothing"),
    ({"grpo.epsilon_high": 0.1}, r"epsilon_low is 0\.2, but it must be between 0 and epsilon_high"),
])  # fmt: skip
def test_contradictions_are_errors(empty, options, message):
    with pytest.raises(ValueError, match=message):
        find_trainers(load_config(empty, recipe(options)))
