"""Reject options that have no effect in combination with other options, before the run starts.

Each function below checks one section, and yields (option, reason) for every option that has no
effect because of other options' values. `check_effects` raises an error for the first such
option whose value is not the default. The section of a stage, also of a stage in your own file, can
check its own options in a method, see `TrainingOptions.without_effect`.
"""

from collections.abc import Iterator
from operator import attrgetter

from minivlmrl.config.options import NO_TRUNCATION, GRPOOptions, RunConfig, TrainingOptions
from minivlmrl.errors import error_context

WithoutEffect = Iterator[tuple[str, str]]  # option ("grpo.beta"), and why it has no effect


def check_effects(run: RunConfig, has_reference: bool):
    """Raise ValueError if an option is set that has no effect because of other options.

    Options for stages that the recipe does not name are not checked here, because run/setup.py
    prints a note about these options.

    Args:
        run: run config.
        has_reference: True if a stage in the recipe has a reference model in memory.
    """
    unnamed = unnamed_stages(run)
    with error_context(run.recipe or "recipe"):
        for option, reason in options_without_effect(run, has_reference):
            if option.partition(".")[0] not in unnamed and is_set(option, run):
                value = attrgetter(option)(run)
                raise ValueError(f"{option} is {value!r} and has no effect: {reason}")


def check_dtypes(run: RunConfig):
    """Raise ValueError if a recipe trains in float16, whose gradients would need loss scaling.

    Hidden gradients below 6e-8 are 0 in float16, and activations above 65,504 are inf. bfloat16 has
    float32's range. A recipe without stages only evaluates, which works in float16.
    """
    for option in ("dtype", "compute_dtype"):
        if run.stage_names and getattr(run.model, option) == "float16":
            raise ValueError(
                f"model.{option} is 'float16', in which small gradients become 0, because there is no "
                "loss scaling; train in bfloat16, or in float32 on GPUs without bfloat16 (T4, V100)"
            )


def is_set(option: str, config: RunConfig | TrainingOptions) -> bool:
    """Return True if an option, such as "beta" or "grpo.beta", differs from its default."""
    path, _, name = option.rpartition(".")
    section = attrgetter(path)(config) if path else config
    return getattr(section, name) != getattr(type(section)(), name)


def unnamed_stages(run: RunConfig) -> list[str]:
    """Return the names of the sections of stages that are not in `stages`."""
    unnamed = []
    for name, section in vars(run).items():
        if isinstance(section, TrainingOptions) and name not in run.stage_names:
            unnamed.append(name)
    return unnamed


def options_without_effect(run: RunConfig, has_reference: bool) -> WithoutEffect:
    """Yield every option that has no effect because of other options, and the reason.

    Options whose value is the default are yielded, too.
    """
    yield from check_data(run)
    if not run.log_completions:
        yield "num_logged_prompts", "completions are only logged if log_completions is above 0"
    yield from check_adapter(run)
    yield from check_sharding(run)
    yield from check_rollout(run)
    yield from check_reference(run, has_reference)
    yield from check_reward_model(run)
    yield from check_dpo(run)
    yield from check_grpo_clipping(run.grpo)
    yield from check_grpo_kl(run.grpo)
    yield from check_grpo_rewards(run.grpo)
    yield from check_grpo_corrections(run.grpo)
    yield from check_ppo(run)
    yield from check_sampling(run)
    for name, section in vars(run).items():
        if isinstance(section, TrainingOptions):
            for option, reason in section.without_effect():
                yield f"{name}.{option}", reason


def check_data(run: RunConfig) -> WithoutEffect:
    """Check file options if there is a task, and evaluation options without rows."""
    if not (run.data.eval_file or run.data.task):
        evaluation = ("data.eval_rows", "data.eval_without_images", "data.eval_rewards")
        for option in ("eval_steps", "best_metric", *evaluation):
            yield option, "there are no rows to evaluate unless data.eval_file or data.task is set"
    if run.data.task:
        for name in (
            "image_root",
            "format",
            "columns",
            "train_answers",
            "skip_unreadable",
            "eval_file",
        ):
            yield f"data.{name}", "data.task generates all rows, so no file is read"


def check_adapter(run: RunConfig) -> WithoutEffect:
    if run.adapter.r == 0:
        names = ("path", "alpha", "dropout", "target", "quantize")
        for name in (*(f"adapter.{name}" for name in names), "save"):
            yield name, "there is no adapter unless adapter.r > 0"


def check_sharding(run: RunConfig) -> WithoutEffect:
    if not run.sharding.enabled:
        for name in ("replicas", "cpu_offload", "once_per_step"):
            yield f"sharding.{name}", "no weights are sharded unless sharding.enabled is true"


def check_rollout(run: RunConfig) -> WithoutEffect:
    engine = run.sampling.engine
    if engine != "native":
        yield "rollout.gather_weights", f"sampling.engine {engine} has its own copy of the weights"
    elif not run.uses_fsdp:
        reason = "each rank has all weights unless sharding.enabled or model.compute_dtype is set"
        yield "rollout.gather_weights", reason
    if run.rollout.batch_invariant:
        yield "rollout.max_logp_mismatch", "with rollout.batch_invariant, no difference is allowed"
    if engine == "native" and run.adapter.dropout > 0:
        yield (
            "rollout.max_logp_mismatch",
            "log-probabilities of sampler and trainer are not compared with adapter.dropout > 0, "
            "because only the trainer applies dropout",
        )


def check_reference(run: RunConfig, has_reference: bool) -> WithoutEffect:
    if not has_reference:
        for name in ("path", "sync_ref_model", "num_shared_layers"):
            yield (
                f"reference.{name}",
                "no stage of this recipe keeps a reference model; grpo has one only with beta > 0, "
                "and dpo only without reference_free and precompute_ref_log_probs",
            )
    if not run.reference.sync_ref_model:
        for name in ("ref_model_mixup_alpha", "ref_model_sync_steps"):
            yield (
                f"reference.{name}",
                "the reference model does not change unless reference.sync_ref_model is true",
            )
    if run.reference.num_shared_layers is None:
        reason = "no layers are shared unless reference.num_shared_layers is set"
        yield "reference.pattern", reason


def check_reward_model(run: RunConfig) -> WithoutEffect:
    if "reward_model" not in run.rewards:
        yield "reward_model.path", "no reward uses a reward model unless rewards has reward_model"


def check_dpo(run: RunConfig) -> WithoutEffect:
    if run.dpo.reference_free or run.reference.path or run.reference.sync_ref_model:
        yield (
            "dpo.precompute_ref_log_probs",
            "log-probabilities of a reference can be computed in advance only if the reference is "
            "the policy at the start of the stage, which is not the case with "
            "dpo.reference_free, reference.path or reference.sync_ref_model",
        )
    if run.dpo.loss_type == ["sft"]:
        yield "dpo.f_divergence_type", "the loss sft is the same for every divergence"
    if run.dpo.f_divergence_type != "alpha_divergence":
        yield (
            "dpo.f_alpha_divergence_coef",
            "there is no alpha unless dpo.f_divergence_type is alpha_divergence",
        )


def _on_policy(grpo: GRPOOptions) -> bool:
    """Return True if each rollout is used for only one optimizer step.

    In this case the step's policy is the policy that sampled the rollout, so all ratios of
    policies are 1.
    """
    return grpo.num_iterations * grpo.steps_per_generation == 1


def check_grpo_clipping(grpo: GRPOOptions) -> WithoutEffect:
    """Check the policy ratio's bounds and level.

    With a loss from a file, every option may have an effect, because the loss can have any option
    in the section as an argument.
    """
    if ":" in grpo.loss_type:
        return
    if grpo.loss_type in ("sapo", "vespo"):
        for option in ("grpo.epsilon_low", "grpo.epsilon_high"):
            yield option, f"loss_type {grpo.loss_type} does not clip the ratio of policies"
    elif grpo.loss_type == "cispo":
        yield "grpo.epsilon_low", "loss_type cispo clips the ratio of policies only from above"
    elif _on_policy(grpo):
        for option in ("grpo.epsilon_low", "grpo.epsilon_high"):
            yield (
                option,
                "the ratio of policies is 1 unless num_iterations * steps_per_generation > 1",
            )
    weighs_tokens = (
        grpo.rollout_correction
        or grpo.top_entropy_quantile < 1
        or (grpo.beta > 0 and grpo.use_bias_correction_kl)
    )
    if grpo.loss_type == "rloo":
        yield "grpo.importance_sampling_level", "loss_type rloo uses ratios of whole completions"
    elif _on_policy(grpo) and not weighs_tokens:
        yield (
            "grpo.importance_sampling_level",
            "ratios of 1 have the same gradient at every level; the level matters only with "
            "num_iterations * steps_per_generation > 1, rollout_correction, top_entropy_quantile "
            "< 1, or beta > 0 and use_bias_correction_kl",
        )


def check_grpo_kl(grpo: GRPOOptions) -> WithoutEffect:
    for option in ("grpo.kl_estimator", "grpo.use_bias_correction_kl"):
        if grpo.beta == 0:
            yield option, "there is no KL unless beta > 0"
        if grpo.loss_type == "rloo":
            yield option, "loss_type rloo subtracts the k1 estimate of the KL from the reward"
    if grpo.kl_estimator == "k2" and _on_policy(grpo):
        yield (
            "grpo.use_bias_correction_kl",
            "the correction does not change the gradient of kl_estimator k2 unless "
            "num_iterations * steps_per_generation > 1",
        )


def check_grpo_rewards(grpo: GRPOOptions) -> WithoutEffect:
    name = grpo.advantages_name
    if name == "rloo":
        yield "grpo.scale_rewards", "leave-one-out advantages are not divided"
    if name == "gdpo":
        for option in ("grpo.scale_rewards", "grpo.soft_punish_cache"):
            yield option, "GDPO normalises each reward instead of the weighted sum of the rewards"
        if grpo.loss_type == "rloo":
            yield "grpo.beta", "loss_type rloo subtracts the KL from a sum that GDPO does not use"
    if grpo.advantages is not None or grpo.loss_type == "rloo":
        yield "grpo.multi_objective_aggregation", f"advantages are computed by {name}"


def check_grpo_corrections(grpo: GRPOOptions) -> WithoutEffect:
    if ":" in grpo.loss_type:
        for name in ("rollout_correction", "top_entropy_quantile", "entropy_coef"):
            yield f"grpo.{name}", f"the function {grpo.loss_type} computes the whole loss"
    if not grpo.rollout_correction:
        reason = "there is no correction to bound unless rollout_correction is set"
        yield "grpo.rollout_correction_bounds", reason


def check_ppo(run: RunConfig) -> WithoutEffect:
    ppo = run.ppo
    if ppo.critic != "separate":
        yield "ppo.critic_path", "the critic is a head on the policy unless critic is separate"
    if ppo.kl_coef == 0:
        yield "ppo.kl_estimator", "there is no KL unless kl_coef > 0"
    if ppo.num_ppo_epochs * ppo.num_mini_batches == 1:
        yield (
            "ppo.cliprange",
            "the ratio of policies is 1 unless num_ppo_epochs * num_mini_batches > 1",
        )


def check_sampling(run: RunConfig) -> WithoutEffect:
    sampling = run.sampling
    if sampling.temperature == 0:
        for name in NO_TRUNCATION:
            yield f"sampling.{name}", "temperature 0 always takes the most likely token"
    if sampling.environment is None:
        yield "sampling.history", "completions have only one turn unless environment is set"
    if sampling.engine == "vllm":
        yield "sampling.cuda_graph", "engine vllm itself chooses when to use CUDA graphs"
    if sampling.engine == "native":  # an engine from a file may use vLLM's options too
        yield "sampling.vllm", "these options are read only with engine vllm"
