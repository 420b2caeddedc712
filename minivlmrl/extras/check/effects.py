"""Find options that have no effect because of another option in the recipe.

Ineffective options cause notes, not errors, so that one override, such as --grpo.num_iterations=1, can change a recipe.
"""

import inspect
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import get_args

from minivlmrl.config.import_utils import parameters_of, resolve_object
from minivlmrl.config.loss_forms import like_grpo_loss
from minivlmrl.config.options import NO_TRUNCATION, GRPOOptions, RunConfig, TrainingOptions
from minivlmrl.config.types import Part
from minivlmrl.losses.grpo import grpo_loss
from minivlmrl.losses.preference import SMOOTHED
from minivlmrl.run.evaluate import UNFILTERED
from minivlmrl.trainers.base import Trainer

# options without effect: names, reason, condition
Rule = tuple[str, str, Callable[[RunConfig], object]]


def on_policy(config: RunConfig) -> bool:
    """Return whether each rollout is used for one optimizer step, so that all policy ratios are 1."""
    return config.grpo.num_iterations * config.grpo.steps_per_generation == 1


def own_loss(config: RunConfig) -> bool:
    """Return whether the GRPO loss is the user's own function, which may use any grpo option."""
    return ":" in config.grpo.loss_type


def weighs_tokens(config: RunConfig) -> bool:
    corrects_kl = config.grpo.beta > 0 and config.grpo.use_bias_correction_kl and config.grpo.kl_estimator != "k2"
    return bool(config.grpo.rollout_correction) or config.grpo.top_entropy_quantile < 1 or corrects_kl


PARTS = {*get_args(Part)}
CLIPS = "grpo.epsilon_low grpo.epsilon_high"
KL = "grpo.kl_estimator grpo.use_bias_correction_kl"
RULES: list[Rule] = [
    ("eval_steps best_metric data.eval_rows data.eval_without_images data.eval_rewards",
     "there are no rows to evaluate unless data.eval_file or data.task is set",
     lambda r: not (r.data.eval_file or r.data.task)),
    ("eval_steps best_metric data.eval_without_images data.eval_rewards",
     "data.eval_rows is 0, so nothing is evaluated", lambda r: r.data.eval_rows == 0),
    *((option, f"it is at least the max_steps of every stage, and {always} after each stage anyway",
       lambda r, option=option: all(getattr(r, name).max_steps <= getattr(r, option) for name in r.stage_names))
      for option, always in (("eval_steps", "a run evaluates"), ("save_steps", "weights are saved"))),
    ("data.image_root data.format data.columns data.skip_unreadable data.image data.video data.max_prompt_tokens",
     "data.task generates all rows, so no file is read", lambda r: r.data.task),
    ("num_logged_prompts", "completions are only logged if log_completions is above 0",
     lambda r: not r.log_completions),
    ("adapter.alpha adapter.dropout adapter.target adapter.quantize save",
     "there is no adapter unless adapter.r > 0", lambda r: r.adapter.r == 0),
    ("model.freeze", "a base with adapters is frozen anyway, and these parts have no adapters",
     lambda r: r.adapter.r and {*r.model.freeze} <= PARTS - {*r.adapter.target} and {*r.adapter.target} <= PARTS),
    ("save", "nothing is saved before the end unless save_steps, best_metric or several stages are set",
     lambda r: r.adapter.r and not r.save_steps and r.best_metric is None and len(r.stages) < 2),
    ("sharding.replicas sharding.cpu_offload sharding.once_per_step",
     "no weights are sharded unless sharding.enabled is true", lambda r: not r.sharding.enabled),
    ("rollout.gather_weights",
     "each rank has all weights unless sharding.enabled or model.compute_dtype is set",
     lambda r: not r.uses_fsdp),
    ("rollout.max_logp_mismatch",
     "log-probabilities of sampler and trainer are not compared with adapter.dropout > 0, because only "
     "the trainer applies dropout",
     lambda r: r.sampling.engine == "native" and r.adapter.dropout > 0),
    ("reward_model.path", "no reward uses a reward model unless rewards contains reward_model",
     lambda r: "reward_model" not in r.rewards),
    *((f"{stage}.min_lr_ratio", "lr_scheduler_type constant keeps the learning rate as it is",
       lambda r, stage=stage: getattr(r, stage).lr_scheduler_type == "constant")
      for stage in ("sft", "dpo", "reward_model", "grpo", "ppo")),
    ("reference.ref_model_mixup_alpha reference.ref_model_sync_steps",
     "the reference moves only if reference.sync_ref_model is true", lambda r: not r.reference.sync_ref_model),
    ("dpo.precompute_ref_log_probs", "there is no reference with reference_free", lambda r: r.dpo.reference_free),
    ("dpo.label_smoothing", f"only the losses {', '.join(SMOOTHED)} use it",
     lambda r: not {*r.dpo.loss_type} & {*SMOOTHED}),
    ("dpo.beta dpo.ld_alpha dpo.f_divergence_type dpo.f_alpha_divergence_coef",
     "the loss sft is the same for every value",
     lambda r: r.dpo.loss_type == ["sft"]),
    ("dpo.f_alpha_divergence_coef", "there is no alpha unless dpo.f_divergence_type is alpha_divergence",
     lambda r: r.dpo.f_divergence_type != "alpha_divergence"),
    (CLIPS, "loss_types sapo and vespo do not clip the ratio of policies",
     lambda r: r.grpo.loss_type in ("sapo", "vespo")),
    ("grpo.epsilon_low", "loss_type cispo clips the ratio of policies only from above",
     lambda r: r.grpo.loss_type == "cispo"),
    (CLIPS, "the ratio of policies is 1 unless num_iterations * steps_per_generation > 1",
     lambda r: on_policy(r) and not own_loss(r) and r.grpo.loss_type != "cispo"),
    ("grpo.importance_sampling_level", "loss_type rloo uses ratios of whole completions",
     lambda r: r.grpo.loss_type == "rloo"),
    ("grpo.importance_sampling_level", "loss_type vespo weights whole completions",
     lambda r: r.grpo.loss_type == "vespo" and not (r.grpo.beta > 0 and r.grpo.use_bias_correction_kl)),
    ("grpo.importance_sampling_level",
     "ratios of 1 have the same gradient at every level; the level matters only with num_iterations * "
     "steps_per_generation > 1, rollout_correction, top_entropy_quantile < 1, or beta > 0 and use_bias_correction_kl",
     lambda r: on_policy(r) and not own_loss(r) and not weighs_tokens(r)),
    (KL, "there is no KL unless beta > 0", lambda r: r.grpo.beta == 0),
    (KL, "loss_type rloo subtracts the k1 estimate of the KL from the reward",
     lambda r: r.grpo.loss_type == "rloo"),
    ("grpo.use_bias_correction_kl",
     "the correction does not change the gradient of kl_estimator k2 unless num_iterations * "
     "steps_per_generation > 1", lambda r: r.grpo.kl_estimator == "k2" and on_policy(r)),
    ("grpo.scale_rewards", "leave-one-out advantages are not divided",
     lambda r: r.grpo.advantages_name == "rloo"),
    ("grpo.scale_rewards grpo.soft_punish_cache",
     "GDPO normalizes each reward instead of the weighted sum of the rewards",
     lambda r: r.grpo.advantages_name == "gdpo"),
    ("grpo.beta", "loss_type rloo subtracts the KL from the sum of rewards, which GDPO does not use",
     lambda r: r.grpo.advantages_name == "gdpo" and r.grpo.loss_type == "rloo"),
    ("grpo.multi_objective_aggregation", "the option advantages or loss_type rloo already defines the advantages",
     lambda r: r.grpo.advantages is not None or r.grpo.loss_type == "rloo"),
    ("grpo.rollout_correction grpo.top_entropy_quantile grpo.entropy_coef",
     "a loss_type from a file computes the whole loss", lambda r: own_loss(r)),
    ("grpo.rollout_correction_bounds", "there is no correction to bound unless rollout_correction is set",
     lambda r: not r.grpo.rollout_correction),
    ("ppo.critic_path", "the critic is a head on the policy unless critic is separate",
     lambda r: r.ppo.critic != "separate"),
    ("ppo.kl_estimator", "there is no KL unless kl_coef > 0", lambda r: r.ppo.kl_coef == 0),
    ("ppo.cliprange", "the ratio of policies is 1 unless num_ppo_epochs * num_mini_batches > 1",
     lambda r: r.ppo.num_ppo_epochs * r.ppo.num_mini_batches == 1),
    (" ".join(f"sampling.{name}" for name in NO_TRUNCATION),
     "temperature 0 always takes the most likely token", lambda r: r.sampling.temperature == 0),
    ("sampling.history", "completions have only one turn unless environment is set",
     lambda r: r.sampling.environment is None),
    ("sampling.vllm", "these options are read only with engine vllm",
     lambda r: r.sampling.engine == "native"),
]  # fmt: skip


def options_without_effect(config: RunConfig, trainers: dict[str, type[Trainer]]) -> Iterator[tuple[list[str], str]]:
    """Yield (options, reason) for options that the recipe sets, but that have no effect."""
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
    """Yield (options, reason) for all options without effect, also those with default values."""
    for name, section in vars(config).items():
        if isinstance(section, TrainingOptions) and name not in config.stage_names:
            options = [f"{name}.{option}" for option in vars(section)]
            if "reward_model" in config.rewards:  # the reward `reward_model` also uses reward_model.path
                options = [option for option in options if option != "reward_model.path"]
            yield options, f"`stages` does not include {name}"
    data = config.data
    if config.stages and data.files.keys() >= {*config.stage_names}:
        yield ["data.train_file", "data.train"], "data.files has the rows of all stages"
    if not any(trainer.samples_completions for trainer in trainers.values()):
        options = ["log_completions", "num_logged_prompts", "rollout.max_logp_mismatch"]
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
    if all(getattr(config, name).max_steps < config.reference.ref_model_sync_steps for name in trainers):
        yield (
            ["reference.sync_ref_model"],
            "no stage has as many steps as reference.ref_model_sync_steps, so the reference never moves",
        )
    for options, reason, applies in RULES:
        if applies(config):
            yield options.split(), reason
    for name in config.stage_names:
        if isinstance(section := getattr(config, name), GRPOOptions):
            yield from ignored_by_functions(name, section)


def ignored_by_functions(stage: str, section: GRPOOptions) -> Iterator[tuple[list[str], str]]:
    """Yield options that are not parameters of a user's loss or advantage function."""
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
