"""Find recipe options that have no effect because another option disables them.

They cause notes, not errors, because changing one option, such as grpo.num_iterations, can disable others.
"""

import inspect
from collections.abc import Iterator
from operator import attrgetter

from minivlmrl.config.import_utils import parameters_of, resolve_object
from minivlmrl.config.loading import inherited_sections
from minivlmrl.config.loss_forms import like_grpo_loss
from minivlmrl.config.options import NO_TRUNCATION, GRPOOptions, RunConfig, TrainingOptions
from minivlmrl.losses.grpo import grpo_loss
from minivlmrl.losses.preference import SMOOTHED
from minivlmrl.run.evaluate import UNFILTERED
from minivlmrl.trainers.base import Trainer

FILTERS = " ".join(f"sampling.{name}" for name in NO_TRUNCATION)


def rules(config: RunConfig) -> list[tuple[str, str, object]]:
    """List rules (options, reason, condition): if the condition is true, the options have no effect."""
    grpo = config.grpo
    ppo = config.ppo
    data = config.data
    sampling = config.sampling
    # one optimizer step per rollout: all policy ratios are 1
    on_policy = grpo.num_iterations * grpo.steps_per_generation == 1
    own_loss = ":" in grpo.loss_type  # a loss function in a user file may use any grpo option
    corrects_kl = grpo.beta > 0 and grpo.use_bias_correction_kl and grpo.kl_estimator != "k2"
    weighs_tokens = grpo.rollout_correction or grpo.top_entropy_quantile < 1 or corrects_kl
    return [
        ("eval_steps eval_on_start best_metric data.eval_without_images data.eval_rewards",
         "there are no rows to evaluate unless data.eval_file or data.task is set, and data.eval_rows is not 0",
         not (data.eval_file or data.task) or data.eval_rows == 0),
        ("data.image_root data.format data.columns data.skip_unreadable data.image data.video data.max_prompt_tokens",
         "data.task generates all rows, so no file is read", data.task),
        ("adapter.alpha adapter.dropout adapter.target adapter.modules_to_save adapter.quantize save",
         "there is no adapter unless adapter.r > 0", config.adapter.r == 0),
        ("sharding.replicas sharding.cpu_offload sharding.once_per_step",
         "no weights are sharded unless sharding.enabled is true", not config.sharding.enabled),
        ("rollout.gather_weights",
         "each rank has all weights unless sharding.enabled or model.compute_dtype is set", not config.uses_fsdp),
        ("rollout.max_logp_mismatch",
         "only the trainer applies adapter.dropout, so its log-probabilities are not compared with the sampler's",
         sampling.engine == "native" and config.adapter.dropout > 0),
        ("reward_model.path", "no reward uses a reward model unless rewards contains reward_model",
         "reward_model" not in config.rewards),
        ("reference.ref_model_mixup_alpha reference.ref_model_sync_steps",
         "the reference moves only if reference.sync_ref_model is true", not config.reference.sync_ref_model),
        ("reference.sync_ref_model",
         "no stage has as many steps as reference.ref_model_sync_steps, so the reference never moves",
         all(getattr(config, x).max_steps < config.reference.ref_model_sync_steps for x in config.stage_names)),
        ("dpo.label_smoothing", f"only the losses {', '.join(SMOOTHED)} use it",
         not {*config.dpo.loss_type} & {*SMOOTHED}),
        ("dpo.f_alpha_divergence_coef", "there is no alpha unless dpo.f_divergence_type is alpha_divergence",
         config.dpo.f_divergence_type != "alpha_divergence"),
        ("grpo.epsilon_low grpo.epsilon_high", "loss_types sapo and vespo do not clip the ratio of policies",
         grpo.loss_type in ("sapo", "vespo")),
        ("grpo.epsilon_low", "loss_type cispo clips the ratio of policies only from above", grpo.loss_type == "cispo"),
        ("grpo.epsilon_low grpo.epsilon_high",
         "the ratio of policies is 1 unless num_iterations * steps_per_generation > 1",
         on_policy and not own_loss and grpo.loss_type != "cispo"),
        ("grpo.importance_sampling_level", "loss_type rloo uses ratios of whole completions", grpo.loss_type == "rloo"),
        ("grpo.importance_sampling_level",
         "ratios of 1 have the same gradient at every level; the level matters only with num_iterations * "
         "steps_per_generation > 1, rollout_correction, top_entropy_quantile < 1, or beta > 0 and "
         "use_bias_correction_kl",
         on_policy and not own_loss and not weighs_tokens),
        ("grpo.kl_estimator grpo.use_bias_correction_kl", "there is no KL unless beta > 0", grpo.beta == 0),
        ("grpo.scale_rewards", "advantages rloo and gdpo do not use it",
         grpo.advantages_name in ("rloo", "gdpo")),
        ("grpo.multi_objective_aggregation", "the option advantages or loss_type rloo already defines the advantages",
         grpo.advantages is not None or grpo.loss_type == "rloo"),
        ("grpo.rollout_correction grpo.top_entropy_quantile grpo.entropy_coef",
         "a loss_type from a file computes the whole loss", own_loss),
        ("grpo.rollout_correction_bounds", "there is no correction to bound unless rollout_correction is set",
         not grpo.rollout_correction),
        ("ppo.critic_path", "the critic is a head on the policy unless critic is separate", ppo.critic != "separate"),
        ("ppo.kl_estimator", "there is no KL unless kl_coef > 0", ppo.kl_coef == 0),
        ("ppo.cliprange", "the ratio of policies is 1 unless num_iterations * steps_per_generation > 1",
         ppo.num_iterations * ppo.steps_per_generation == 1),
        (FILTERS, "temperature 0 always takes the most likely token", sampling.temperature == 0),
        ("sampling.history", "completions have only one turn unless environment is set", sampling.environment is None),
        ("sampling.vllm", "these options are read only with engine vllm", sampling.engine == "native"),
    ]  # fmt: skip


def options_without_effect(config: RunConfig, trainers: dict[str, type[Trainer]]) -> Iterator[tuple[list[str], str]]:
    """Yield (options, reason) for options that the recipe changes without effect, each option once."""
    for name in config.unused_sections:
        yield [name], f"`stages` does not include {name}"
    for stage in config.data.files:
        if stage not in config.stage_names:
            yield [f"data.files.{stage}"], f"`stages` does not include {stage}"
    seen = set()
    for options, reason in reasons(config, trainers):
        changed = []
        for option in options:
            path, _, name = option.rpartition(".")
            section = attrgetter(path)(config) if path else config
            if option not in seen and getattr(section, name) != getattr(type(section)(), name):
                changed.append(option)
        seen |= {*changed}
        if changed:
            yield changed, reason


def reasons(config: RunConfig, trainers: dict[str, type[Trainer]]) -> Iterator[tuple[list[str], str]]:
    """Yield (options, reason) for all options without effect, including those with default values."""
    inherited = {name for trainer in trainers.values() for name in inherited_sections(trainer)}
    for name, section in vars(config).items():
        if isinstance(section, TrainingOptions) and name not in {*config.stage_names, *inherited}:
            options = [f"{name}.{option}" for option in vars(section)]
            if "reward_model" in config.rewards:  # the reward reads reward_model.path, even without this stage
                options = [option for option in options if option != "reward_model.path"]
            yield options, f"`stages` does not include {name}"
    data = config.data
    if config.stages and data.files.keys() >= {*config.stage_names}:
        yield ["data.train_file", "data.train"], "data.files has the rows of all stages"
    if not any(trainer.samples_completions for trainer in trainers.values()):
        options = ["log_completions", "rollout.max_logp_mismatch"]
        is_evaluated = data.eval_rewards is None and data.eval_rows and (data.eval_file or data.task)
        yield options if is_evaluated else ["rewards", *options], "no stage samples completions"
        options = [f"sampling.{name}" for name in ("engine", "vllm", "temperature", *UNFILTERED)]
        yield options, "no stage samples completions, and evaluations sample without these options"
    if trainers and not any(trainer.has_reference(getattr(config, name)) for name, trainer in trainers.items()):
        yield (
            ["reference.path", "reference.sync_ref_model"],
            "no stage of this recipe keeps a reference model; grpo has one only with beta > 0, and dpo only without "
            "reference_free",
        )
    for options, reason, applies in rules(config):
        if applies:
            yield options.split(), reason
    for name in config.stage_names:
        section = getattr(config, name)
        if isinstance(section, GRPOOptions):
            yield from ignored_by_functions(name, section)


def ignored_by_functions(stage: str, section: GRPOOptions) -> Iterator[tuple[list[str], str]]:
    """Yield (options, reason) for options without a parameter in a user-defined loss or advantage function."""
    of_losses = vars(section).keys() & inspect.signature(grpo_loss).parameters.keys() - {"loss_type", "advantages"}
    for option, text, names in (
        ("loss_type", section.loss_type, of_losses),
        ("advantages", section.advantages_name, {"scale_rewards"}),
    ):
        if ":" in text:
            function = resolve_object(option, text, {})[0]
            parameters = parameters_of(like_grpo_loss(function) if option == "loss_type" else function)
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
                ignored = [f"{stage}.{name}" for name in vars(section) if name in names - parameters.keys()]
                yield ignored, f"the function {stage}.{option} {text} has no parameter of this name"
