"""No option is dead: each changes the metrics of a run of a few steps, or has a test of its own that is named here."""

import functools
import itertools
import typing

import pytest
from runs import LETTERS, STAGE, leave_out, metrics

from minivlmrl import generate, train
from minivlmrl.data.boxes import SPACES
from minivlmrl.generate import make_choose
from minivlmrl.hub.recipe_values import option_paths
from minivlmrl.objectives.policy_losses import CORRECTION_MODES
from minivlmrl.rows import Processor
from minivlmrl.run.batches import load_datasets
from minivlmrl.run.config import RunConfig, load_config
from minivlmrl.run.model import build_model
from recipes import localisation
from recipes.kto import KTOConfig

from stages import ONE, STAGES
from tiny import FILES, of_file

SFT, DPO, KTO, RM = (
    ["--stages=sft"],
    ["--stages=dpo"],
    of_file("kto", STAGE | {"max_steps": 2}),
    ["--stages=reward_model"],
)
GRPO, PPO = (["--stages=grpo", LETTERS], ["--stages=ppo", LETTERS])
BASES = {"sft": SFT, "dpo": DPO, "reward_model": RM, "grpo": GRPO, "ppo": PPO}
# a second iteration at a high rate leaves the ratio far from 1, where clipping and the KL penalty show
FAR = [*GRPO, "--grpo.num_iterations=2", "--grpo.learning_rate=3e-2", "--grpo.lr_scheduler_type=constant"]
# "drift": the sampler records log-probabilities that are not quite the trainer's
DRIFT = ["drift", *GRPO, "--rollout.max_logp_mismatch=.inf"]
FILM = ["film", "--data.video={min_pixels: 784, max_pixels: 6272}", *SFT]
# later rollouts of a policy that has moved away from its reference
PPO_KL = [*PPO, "--ppo.num_ppo_epochs=1", "--ppo.learning_rate=3e-2", "--ppo.kl_coef=0.5"]
TWO_STEPS, THREE_STEPS = ([f"--{stage}.max_steps={steps}" for stage in STAGES] for steps in (2, 3))
STAGE_OPTIONS = {  # what all stages inherit: each tried on one of them, in turn
    "max_steps": 2, "prompts_per_step": 2, "learning_rate": 1e-3, "lr_scheduler_type": "cosine", "min_lr_ratio": 0.5,
    "warmup_steps": 2, "adam_beta2": 0.5,
}  # fmt: skip
MOVING = ["--reference.sync_ref_model", "--reference.ref_model_sync_steps=1"]
DISTILL = [*of_file("distill", STAGE | {"max_steps": 2}), LETTERS, "--distill.teacher_prompt=teachers:hint"]
OPTIONS = [  # field, another value, base
    ("reference.sync_ref_model", "true", [*DPO, "--reference.ref_model_sync_steps=1"]),
    ("reference.ref_model_mixup_alpha", 0.1, [*DPO, *MOVING]),
    ("reference.ref_model_sync_steps", 2, [*DPO, *MOVING, "--dpo.max_steps=3"]),
    ("reference.num_shared_layers", 1, DPO),
    ("reference.pattern", "visual.merger", [*DPO, "--reference.num_shared_layers=1"]),
    ("distill.teacher_beta", 1.0, DISTILL),
    ("distill.num_generations", 4, DISTILL),
    ("distill.steps_per_generation", 2, DISTILL),
    ("distill.num_iterations", 2, DISTILL),
    *[
        (f"{stage}.{name}", value, [*BASES[stage], f"--{stage}.max_steps=3"])
        for stage, (name, value) in zip(itertools.cycle(STAGES), STAGE_OPTIONS.items(), strict=False)
    ],
    ("optimizer.weight_decay", 1.0, [*SFT, "--sft.learning_rate=3e-2"]),
    ("optimizer.max_grad_norm", 0.01, [*SFT, "--optimizer.max_grad_norm=1e9", "--sft.max_steps=3"]),
    ("dpo.micro_batch_size", 2, [*DPO, "--dpo.loss_type=aot"]),
    ("dpo.loss_type", "[sigmoid, sft]", DPO),
    ("dpo.loss_weights", "[0.8, 0.2]", [*DPO, "--dpo.loss_type=[sigmoid, sft]"]),
    ("dpo.beta", 0.5, DPO),
    ("dpo.label_smoothing", 0.2, DPO),
    ("dpo.label_smoothing", 0.2, [*DPO, "--dpo.loss_type=robust"]),
    ("dpo.f_alpha_divergence_coef", 0.9, [*DPO, "--dpo.f_divergence_type=alpha_divergence"]),
    ("dpo.ld_alpha", 0.5, ["own", *DPO]),
    ("dpo.use_weighting", "true", DPO),
    ("kto.beta", 0.5, KTO),
    ("kto.desirable_weight", 0.5, KTO),
    ("kto.undesirable_weight", 0.5, KTO),
    ("reward_model.center_rewards_coefficient", 1.0, RM),
    ("grpo.num_generations", 4, GRPO),
    ("grpo.steps_per_generation", 2, GRPO),
    ("grpo.num_iterations", 3, [*FAR, "--grpo.max_steps=3"]),
    ("grpo.micro_batch_size", 1, [*GRPO, "--grpo.loss_type=bnpo"]),
    ("grpo.epsilon_low", 0.001, FAR),
    ("grpo.epsilon_high", 0.001, [*FAR, "--grpo.epsilon_low=0"]),
    ("grpo.beta", 0.5, FAR),
    ("grpo.beta", 0.5, [*GRPO, "--grpo.loss_type=rloo"]),
    ("grpo.use_bias_correction_kl", "false", [*FAR, "--grpo.beta=0.5"]),
    ("grpo.top_entropy_quantile", 0.3, GRPO),
    ("grpo.entropy_coef", 0.5, GRPO),
    ("grpo.rollout_correction", "sequence_truncate", DRIFT),
    ("grpo.rollout_correction_bounds", [0.9, 1.2], [*DRIFT, "--grpo.rollout_correction=token_truncate"]),
    ("grpo.mask_truncated_completions", "true", GRPO),
    ("grpo.soft_punish_cache", 4, GRPO),
    ("grpo.max_num_gen_batches", 2, [*GRPO, "--sampling.max_new_tokens=1", "--grpo.num_generations=2"]),
    ("ppo.num_generations", 3, PPO),
    ("ppo.num_mini_batches", 2, PPO),
    ("ppo.num_ppo_epochs", 1, PPO),
    ("ppo.cliprange", 0.001, [*PPO, "--ppo.learning_rate=3e-2"]),
    ("ppo.vf_coef", 1.0, PPO),
    ("ppo.kl_coef", 0.0, PPO_KL),
    ("ppo.kl_estimator", "k3", PPO_KL),
    ("ppo.missing_eos_penalty", 1.0, PPO),
    ("ppo.critic", "separate", PPO),
    ("ppo.gamma", 0.5, PPO),
    ("ppo.lam", 0.5, PPO),
    ("sampling.temperature", 0.5, GRPO),
    ("sampling.top_k", 5, GRPO),
    ("sampling.top_p", 0.3, GRPO),
    ("sampling.min_p", 0.9, GRPO),
    ("sampling.repetition_penalty", 3.0, GRPO),
    ("sampling.max_new_tokens", 3, GRPO),
    ("sampling.stop_token_ids", "[40, 41, 42, 43, 44]", GRPO),
    ("sampling.stop_strings", "[e, a]", GRPO),
    ("rewards.letters", 0.5, [*GRPO, "--grpo.scale_rewards=none"]),
    ("seed", 1, SFT),
    ("seed", 1, GRPO),
    ("stages", "[sft, grpo]", SFT),
    ("model.dtype", "bfloat16", SFT),
    ("model.freeze", "[vision]", SFT),
    *[
        (f"adapter.{name}", value, [*SFT, "--adapter.r=4"])
        for name, value in {"r": 2, "alpha": 8, "target": "merger"}.items()
    ],
    ("adapter.dropout", 0.3, [*SFT, "--adapter.r=4"]),
    ("data.task", "shapes(demonstrations=8, pairs=8, wrong_demonstrations=1.0)", SFT),
    ("data.prompt_template", "'Look. {problem}'", ["own", *SFT]),
    ("data.system_prompt", "Be brief.", ["own", *SFT]),
    ("data.template", "{add_vision_id: true}", ["own", *SFT]),
    ("data.min_pixels", 112 * 112, ["own", *SFT]),
    ("data.max_pixels", 28 * 28, ["own", *SFT]),
    ("data.train_file", "{folder}/other.jsonl", ["own", *SFT]),
    ("data.video", "{fps: 1, min_pixels: 784, max_pixels: 6272}", FILM),
    ("data.task", f"{localisation.__file__}:TASK", SFT),
]


def choices(name):
    """What the Literal of a field names."""
    section, name = name.split(".")
    cls = KTOConfig if section == "kto" else typing.get_type_hints(RunConfig)[section]
    hint = typing.get_type_hints(cls)[name]
    parts = [hint, *typing.get_args(hint)]
    values = next(typing.get_args(part) for part in parts if typing.get_origin(part) is typing.Literal)
    return (("null",) if type(None) in parts else ()) + values


ENUMERATIONS = [  # field, its values, base: no two values give the same run
    *[(name, choices(name), base) for name, base in {
        "sft.loss_type": SFT,
        "dpo.f_divergence_type": DPO,
        "kto.loss_type": [*KTO, "--kto.undesirable_weight=0", "--kto.max_steps=3"],  # good answers get likelier
        "grpo.loss_type": [*FAR, "--grpo.micro_batch_size=2"],
        "grpo.importance_sampling_level": [*FAR, "--grpo.beta=0.5"],
        "grpo.kl_estimator": [*FAR, "--grpo.beta=0.5"],
        "grpo.scale_rewards": GRPO,
        "grpo.multi_objective_aggregation": GRPO,
        "data.answer": ["boxes", "--stages=grpo", f"--rewards={{{__file__}:said: 1}}"],
    }.items()],
    ("grpo.rollout_correction", CORRECTION_MODES, [*DRIFT, "--grpo.rollout_correction_bounds=[null, 1.5]"]),
    ("data.box_space", SPACES, ["boxes", "--stages=grpo", "--rewards={iou: 1}"]),
]  # fmt: skip
# These change something else than metrics.jsonl and have a test of their own: below, in test_invariance.py
# (micro_batch_size), test_reward_model.py (path), test_ppo.py (critic_path),
# test_results.py (evaluations, checkpoints), test_metrics.py (report_to),
# test_train.py (files and folders), test_template.py (template), test_resume.py (states, resume, timeout),
# test_tool_sampler.py (environment), test_reference.py (path), test_sharding.py or test_ranks.py.
OTHERS = {
    *(f"{stage}.micro_batch_size" for stage in ("sft", "reward_model", "ppo")),
    *("optimizer.name", "eval_steps", "save_steps", "max_epochs", "data.files"),
    *("reward_model.path", "ppo.critic_path", "reference.path"),
    *("output_dir", "num_threads", "model.path", "model.config"),
    *("model.activation_checkpointing", "model.compute_dtype"),
    *("data.eval_rows", "data.eval_file", "data.eval_rewards", "data.eval_blind", "data.resize", "data.template"),
    *("data.skip_unreadable", "data.image_workers", "data.train", "data.columns", "data.image_root"),
    "data.max_prompt_tokens",
    *("check_memory", "state_minutes", "state_steps", "resume", "timeout", "rollout.gather_weights"),
    *("adapter.path", "adapter.quantize", "sampling.max_tokens_at_once", "sampling.graph"),
    *("sampling.environment", "sampling.engine", "sampling.vllm"),
    *("grpo.max_tokens_per_micro_batch", "ppo.max_tokens_per_micro_batch"),
    *("sharding.enabled", "sharding.replicas", "sharding.cpu_offload"),
    *("log_completions", "keep_best", "report_to", "rollout.max_logp_mismatch"),
}


@pytest.fixture(scope="module")
def lines_of(home, own):
    """Metrics of a run by its overrides, each run once; the logged learning rate alone is no effect."""

    @functools.cache
    def lines_of(*overrides):
        with pytest.MonkeyPatch.context() as patch:
            if overrides[0] == "own":
                overrides = (*own, *overrides[1:])
            if overrides[0] in ("boxes", "film"):
                overrides = (*own, f"--data.train_file={home / overrides[0]}.jsonl", *overrides[1:])
                patch.setattr(Processor, "decode", boxed)
            if overrides[0] == "drift":
                overrides = overrides[1:]
                patch.setattr(generate, "make_choose", drifting)
            leave_out(patch)
            patch.setattr("minivlmrl.run.results.evaluate", lambda *_: {})
            for module in ("algorithms.base", "algorithms.value_model", "run.results"):
                patch.setattr(f"minivlmrl.{module}.save_model", lambda *_: None)
            begin = [str(home / "recipe.yaml"), f"--output_dir={home / 'option'}", "--resume=never"]
            train.main([*begin, *TWO_STEPS, *overrides])
        return metrics(home / "option")

    return lines_of


def drifting(*arguments):
    """The sampler, with log-probabilities that are off by -1 to 1 nats, each token by its own amount."""
    choose = make_choose(*arguments)

    def drift(logits, rows, step):
        ids, logps, ends = choose(logits, rows, step)
        return ids, logps + (ids % 5 - 2) / 2, ends

    return drift


def boxed(processor, ids):
    """What an untrained model does not write: a box, at the image's corner."""
    return f"Here:\n<answer>0 0 {ids[0] % 90 + 1} {ids[-1] % 50 + 1}</answer>"


def said(answer_texts, **columns):
    """A reward for the length of answers."""
    return [float(len(text)) for text in answer_texts]


def differ(first, second):
    """Whether some metric that both have differs by more than rounding does. The learning rate is no effect."""
    if len(first) != len(second):
        return True
    names = (first[0].keys() & second[0].keys()) - {"stage", "step", "learning_rate"}
    values = [(a[k], b[k]) for a, b in zip(first, second, strict=True) for k in names if "mismatch" not in k]
    return any(abs(a - b) > 1e-4 * max(abs(a), abs(b)) for a, b in values)


@pytest.mark.parametrize(("name", "value", "base"), OPTIONS, ids=[f"{name}={v}" for name, v, _ in OPTIONS])
def test_no_dead_option(lines_of, lively, home, name, value, base):
    changed = f"--{name}={value}".replace("{folder}", str(home))
    assert differ(lines_of(*base), lines_of(*base, changed))


@pytest.mark.parametrize(("name", "values", "base"), ENUMERATIONS, ids=[name for name, _, _ in ENUMERATIONS])
def test_no_two_values_are_alike(lines_of, lively, name, values, base):
    for one, other in itertools.combinations(values, 2):
        assert differ(*(lines_of(*base, *THREE_STEPS, f"--{name}={value}") for value in (one, other))), (one, other)


def test_every_option_is_in_the_table():
    """A new field of the config needs a row above."""
    tested = {name.replace("rewards.letters", "rewards") for name, _, _ in OPTIONS}
    tested |= {f"{stage}.{name}" for stage in STAGES for name in STAGE_OPTIONS}
    tested |= {name for name, _, _ in ENUMERATIONS}
    of_files = {name for name in tested if name.partition(".")[0] in FILES}
    assert set(option_paths(RunConfig)) == tested - of_files | OTHERS


def test_resize_can_be_the_size_of_every_image(home, own):
    """Its area keeps the bounds of the folder."""
    config = load_config(home / "recipe.yaml", [*own, "--data.resize=[50, 86]", "--data.min_pixels=784"])
    (_, processor), rows = build_model(config, ONE), load_datasets(config, {"sft": "demonstrations"})["sft"]
    seen = [rows[i].prompt(processor).image_grid_thw.tolist() for i in range(3)]
    assert seen == [[[1, 4, 6]]] * 3
    for wrong in ("50", "[50]", "[50, 0]", "[50, a]"):
        with pytest.raises(ValueError, match=r"data\.resize is .*, it must be of type 'pil' or 'torch' or tuple"):
            load_config(home / "recipe.yaml", [f"--data.resize={wrong}"])
