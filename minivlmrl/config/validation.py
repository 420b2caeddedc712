"""What options need to have an effect: one that is set without it is refused, before a run begins.

"Set" means other than its default. A dataclass of options may have rows of its own, `needs`, whose
conditions name options of that section: so have the options of a stage that a file brings.
"""

from collections.abc import Iterable
from operator import attrgetter

from minivlmrl.config.options import TrainingOptions
from minivlmrl.config.parsing import naming
from minivlmrl.trainers.base import Trainer

FILES = "not data.task"  # a task makes its rows itself
HELD_OUT = "data.eval_file or data.task"
# ratios of probabilities leave 1: the policy moves between a rollout and the last step on it
PASSES = "grpo.num_iterations * grpo.steps_per_generation > 1"
OWN_LOSS = "':' in grpo.loss_type"  # it is handed the section, and may read any of it
REFERENCE = "stages_with_a_reference  # dpo that keeps one, grpo with beta > 0"
# option -> a condition on the recipe, in Python, as a user reads it who lacks it
NEEDS = {
    "eval_steps": HELD_OUT,
    "keep_best": HELD_OUT,
    "adapter.path": "adapter.r > 0",
    "adapter.alpha": "adapter.r > 0",
    "adapter.dropout": "adapter.r > 0",
    "adapter.target": "adapter.r > 0",
    "adapter.quantize": "adapter.r > 0",
    "data.image_root": FILES,
    "data.columns": FILES,
    "data.skip_unreadable": FILES,
    "data.eval_file": FILES,
    "data.eval_rows": HELD_OUT,
    "data.eval_blind": HELD_OUT,
    "data.eval_rewards": HELD_OUT,
    "sharding.replicas": "sharding.enabled",
    "sharding.cpu_offload": "sharding.enabled",
    "rollout.gather_weights": (
        "sampling.engine == 'own' and (sharding.enabled or model.compute_dtype)"
    ),
    # with dropout, which the sampler has not, the two are not compared
    "rollout.max_logp_mismatch": "adapter.dropout == 0 or sampling.engine != 'own'",
    "reference.path": REFERENCE,
    "reference.sync_ref_model": REFERENCE,
    "reference.ref_model_mixup_alpha": "reference.sync_ref_model",
    "reference.ref_model_sync_steps": "reference.sync_ref_model",
    "reference.num_shared_layers": REFERENCE,
    "reference.pattern": "reference.num_shared_layers is not None",
    "reward_model.path": "'reward_model' in rewards",
    # they are the policy's as it was
    "dpo.precompute_ref_log_probs": (
        "not (dpo.reference_free or reference.path or reference.sync_ref_model)"
    ),
    "dpo.f_divergence_type": "dpo.loss_type != ['sft']",
    "dpo.f_alpha_divergence_coef": "dpo.f_divergence_type == 'alpha_divergence'",
    "grpo.epsilon_low": (
        f"{OWN_LOSS} or {PASSES} and grpo.loss_type not in ('cispo', 'sapo', 'vespo')"
    ),
    "grpo.epsilon_high": (
        f"{OWN_LOSS} or grpo.loss_type == 'cispo'"
        f" or {PASSES} and grpo.loss_type not in ('sapo', 'vespo')"
    ),
    "grpo.rollout_correction": f"not {OWN_LOSS}",
    "grpo.top_entropy_quantile": f"not {OWN_LOSS}",
    "grpo.entropy_coef": f"not {OWN_LOSS}",
    # ratios of 1 have the same gradient by row and by token, unless tokens of a row weigh differently
    "grpo.importance_sampling_level": (
        f"{OWN_LOSS} or grpo.loss_type != 'rloo' and ({PASSES} or grpo.rollout_correction"
        " or grpo.top_entropy_quantile < 1 or grpo.beta > 0 and grpo.use_bias_correction_kl)"
    ),
    # the KL of rloo is in its reward
    "grpo.kl_estimator": "grpo.beta > 0 and grpo.loss_type != 'rloo'",
    "grpo.use_bias_correction_kl": (
        f"grpo.beta > 0 and grpo.loss_type != 'rloo' and (grpo.kl_estimator != 'k2' or {PASSES})"
    ),
    "grpo.scale_rewards": (
        "grpo.loss_type != 'rloo' and grpo.multi_objective_aggregation == 'sum_then_normalize'"
    ),
    "grpo.multi_objective_aggregation": "grpo.loss_type != 'rloo'",
    "grpo.soft_punish_cache": "grpo.multi_objective_aggregation == 'sum_then_normalize'",
    "grpo.rollout_correction_bounds": "grpo.rollout_correction",
    "ppo.critic_path": "ppo.critic == 'separate'",
    "ppo.kl_estimator": "ppo.kl_coef > 0",
    "ppo.cliprange": "ppo.num_ppo_epochs * ppo.num_mini_batches > 1",
}


def check_effects(run, algorithms: dict[str, type[Trainer]]):
    """Refuse a recipe (ValueError) with an option that has no effect beside the others.

    Of stages that it does not name run/setup.py only prints a note.
    """
    has_reference = [cls.has_reference(getattr(run, name)) for name, cls in algorithms.items()]
    facts = {"stages_with_a_reference": any(has_reference) or not algorithms}
    unnamed = unnamed_stages(run)
    needs = {option: need for option, need in NEEDS.items() if option.split(".")[0] not in unnamed}
    with naming(run.recipe or "recipe"):
        refuse_without("", run, needs.items(), facts)
        for name, section in vars(run).items():
            if name not in unnamed:
                refuse_without(f"{name}.", section, getattr(section, "needs", ()), facts)


def refuse_without(prefix: str, section, needs: Iterable[tuple[str, str]], facts: dict):
    """Refuse (ValueError) an option of a section that is set and lacks what it needs."""
    for option, need in needs:
        if is_set(option, section) and not eval(need, facts, vars(section)):
            value = attrgetter(option)(section)
            raise ValueError(f"{prefix}{option} is {value!r}, it has no effect: it needs {need}")


def is_set(option: str, section) -> bool:
    """Tell whether an option, "beta" or "grpo.beta", is other than its default."""
    find = attrgetter(option)
    return find(section) != find(type(section)())


def unnamed_stages(run) -> list[str]:
    """Name the sections of stages that a recipe does not name."""
    unnamed = []
    for name, section in vars(run).items():
        if isinstance(section, TrainingOptions) and name not in run.stage_names:
            unnamed.append(name)
    return unnamed
