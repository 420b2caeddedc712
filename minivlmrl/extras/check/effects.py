"""Reject recipes that set an option which has no effect because of another option.

The method TrainingOptions.without_effect lists the options of a training stage that have no effect.
"""

from collections.abc import Callable, Iterator
from operator import attrgetter

from minivlmrl.config.options import NO_TRUNCATION, RunConfig, TrainingOptions
from minivlmrl.errors import error_context

# (options, reason why they have no effect, function that tells whether the rule applies to a recipe)
Rule = tuple[str, str, Callable[[RunConfig, bool], object]]


def on_policy(run: RunConfig) -> bool:
    """Return True if GRPO takes one optimizer step per rollout, so every ratio of new to old probabilities is 1."""
    return run.grpo.num_iterations * run.grpo.steps_per_generation == 1


def own_loss(run: RunConfig) -> bool:
    """Return True if the GRPO loss is a user's function, which may use any option of grpo."""
    return ":" in run.grpo.loss_type


def weighs_tokens(run: RunConfig) -> bool:
    corrects_kl = run.grpo.beta > 0 and run.grpo.use_bias_correction_kl
    return bool(run.grpo.rollout_correction) or run.grpo.top_entropy_quantile < 1 or corrects_kl


CLIPS = "grpo.epsilon_low grpo.epsilon_high"
KL = "grpo.kl_estimator grpo.use_bias_correction_kl"
RULES: list[Rule] = [
    ("eval_steps best_metric data.eval_rows data.eval_without_images data.eval_rewards",
     "there are no rows to evaluate unless data.eval_file or data.task is set",
     lambda r, _: not (r.data.eval_file or r.data.task)),
    ("data.image_root data.format data.columns data.skip_unreadable data.eval_file",
     "data.task generates all rows, so no file is read", lambda r, _: r.data.task),
    ("num_logged_prompts", "completions are only logged if log_completions is above 0",
     lambda r, _: not r.log_completions),
    ("adapter.path adapter.alpha adapter.dropout adapter.target adapter.quantize save",
     "there is no adapter unless adapter.r > 0", lambda r, _: r.adapter.r == 0),
    ("sharding.replicas sharding.cpu_offload sharding.once_per_step",
     "no weights are sharded unless sharding.enabled is true", lambda r, _: not r.sharding.enabled),
    ("rollout.gather_weights", "an engine other than native has its own copy of the weights",
     lambda r, _: r.sampling.engine != "native"),
    ("rollout.gather_weights",
     "each rank has all weights unless sharding.enabled or model.compute_dtype is set",
     lambda r, _: r.sampling.engine == "native" and not r.uses_fsdp),
    ("rollout.max_logp_mismatch",
     "log-probabilities of sampler and trainer are not compared with adapter.dropout > 0, because only "
     "the trainer applies dropout",
     lambda r, _: r.sampling.engine == "native" and r.adapter.dropout > 0),
    ("reference.path",
     "no stage of this recipe keeps a reference model; grpo has one only with beta > 0, and dpo only "
     "without reference_free", lambda _, has_reference: not has_reference),
    ("reward_model.path", "no reward uses a reward model unless rewards has reward_model",
     lambda r, _: "reward_model" not in r.rewards),
    ("dpo.f_divergence_type", "the loss sft is the same for every divergence",
     lambda r, _: r.dpo.loss_type == ["sft"]),
    ("dpo.f_alpha_divergence_coef", "there is no alpha unless dpo.f_divergence_type is alpha_divergence",
     lambda r, _: r.dpo.f_divergence_type != "alpha_divergence"),
    (CLIPS, "loss_types sapo and vespo do not clip the ratio of policies",
     lambda r, _: r.grpo.loss_type in ("sapo", "vespo")),
    ("grpo.epsilon_low", "loss_type cispo clips the ratio of policies only from above",
     lambda r, _: r.grpo.loss_type == "cispo"),
    (CLIPS, "the ratio of policies is 1 unless num_iterations * steps_per_generation > 1",
     lambda r, _: on_policy(r) and not own_loss(r) and r.grpo.loss_type != "cispo"),
    ("grpo.importance_sampling_level", "loss_type rloo uses ratios of whole completions",
     lambda r, _: r.grpo.loss_type == "rloo"),
    ("grpo.importance_sampling_level",
     "ratios of 1 have the same gradient at every level; the level matters only with num_iterations * "
     "steps_per_generation > 1, rollout_correction, top_entropy_quantile < 1, or beta > 0 and use_bias_correction_kl",
     lambda r, _: on_policy(r) and not own_loss(r) and not weighs_tokens(r)),
    (KL, "there is no KL unless beta > 0", lambda r, _: r.grpo.beta == 0),
    (KL, "loss_type rloo subtracts the k1 estimate of the KL from the reward",
     lambda r, _: r.grpo.loss_type == "rloo"),
    ("grpo.use_bias_correction_kl",
     "the correction does not change the gradient of kl_estimator k2 unless num_iterations * "
     "steps_per_generation > 1", lambda r, _: r.grpo.kl_estimator == "k2" and on_policy(r)),
    ("grpo.scale_rewards", "leave-one-out advantages are not divided",
     lambda r, _: r.grpo.advantages_name == "rloo"),
    ("grpo.scale_rewards grpo.soft_punish_cache",
     "GDPO normalises each reward instead of the weighted sum of the rewards",
     lambda r, _: r.grpo.advantages_name == "gdpo"),
    ("grpo.beta", "loss_type rloo subtracts the KL from the sum of rewards, which GDPO does not use",
     lambda r, _: r.grpo.advantages_name == "gdpo" and r.grpo.loss_type == "rloo"),
    ("grpo.multi_objective_aggregation", "advantages or loss_type rloo already determines the advantages",
     lambda r, _: r.grpo.advantages is not None or r.grpo.loss_type == "rloo"),
    ("grpo.rollout_correction grpo.top_entropy_quantile grpo.entropy_coef",
     "a loss_type from a file computes the whole loss", lambda r, _: own_loss(r)),
    ("grpo.rollout_correction_bounds", "there is no correction to bound unless rollout_correction is set",
     lambda r, _: not r.grpo.rollout_correction),
    ("ppo.critic_path", "the critic is a head on the policy unless critic is separate",
     lambda r, _: r.ppo.critic != "separate"),
    ("ppo.kl_estimator", "there is no KL unless kl_coef > 0", lambda r, _: r.ppo.kl_coef == 0),
    ("ppo.cliprange", "the ratio of policies is 1 unless num_ppo_epochs * num_mini_batches > 1",
     lambda r, _: r.ppo.num_ppo_epochs * r.ppo.num_mini_batches == 1),
    (" ".join(f"sampling.{name}" for name in NO_TRUNCATION),
     "temperature 0 always takes the most likely token", lambda r, _: r.sampling.temperature == 0),
    ("sampling.history", "completions have only one turn unless environment is set",
     lambda r, _: r.sampling.environment is None),
    ("sampling.cuda_graph", "engine vllm itself chooses when to use CUDA graphs",
     lambda r, _: r.sampling.engine == "vllm"),
    ("sampling.vllm", "these options are read only with engine vllm",
     lambda r, _: r.sampling.engine == "native"),
]  # fmt: skip


def check_effects(run: RunConfig, has_reference: bool):
    """Raise ValueError if an option is set that has no effect because of other options.

    A training stage's options are checked only if the recipe runs the stage. Otherwise run/setup.py prints a note.
    """
    unnamed = unnamed_stages(run)
    with error_context(run.recipe or "recipe"):
        for option, reason in options_without_effect(run, has_reference):
            if option.partition(".")[0] not in unnamed and is_set(option, run):
                value = attrgetter(option)(run)
                raise ValueError(f"{option} is {value!r} and has no effect: {reason}")


def is_set(option: str, config: RunConfig | TrainingOptions) -> bool:
    """Return True if the value of an option, such as "grpo.beta", differs from its default."""
    path, _, name = option.rpartition(".")
    section = attrgetter(path)(config) if path else config
    return getattr(section, name) != getattr(type(section)(), name)


def unnamed_stages(run: RunConfig) -> list[str]:
    sections = [name for name, value in vars(run).items() if isinstance(value, TrainingOptions)]
    return [name for name in sections if name not in run.stage_names]


def options_without_effect(run: RunConfig, has_reference: bool) -> Iterator[tuple[str, str]]:
    for options, reason, applies in RULES:
        if applies(run, has_reference):
            yield from ((option, reason) for option in options.split())
    for name, section in vars(run).items():
        if isinstance(section, TrainingOptions):
            for option, reason in section.without_effect():
                yield f"{name}.{option}", reason
