"""Test that every option changes the results of a short run."""

import functools
import itertools
import json
import re
import shutil
import typing

import PIL.Image
import pytest

from minivlmrl.commands.train import train_recipe
from minivlmrl.config.loading import as_overrides
from minivlmrl.config.options import RunConfig
from minivlmrl.config.parsing import options_of
from minivlmrl.data.boxes import SPACES
from minivlmrl.data.processor import Processor
from minivlmrl.generation import sampler
from minivlmrl.generation.generate import make_token_sampler
from minivlmrl.losses.advantages import ADVANTAGES
from minivlmrl.losses.grpo_variants import CORRECTION_MODES
from minivlmrl.run.metrics import METRICS
from tests.helpers.runs import LETTERS, leave_out
from tests.helpers.stages import STAGES
from tests.helpers.tiny import RUN_MODEL
from tests.monitor.test_effects import CASES

SFT, DPO, RM = ["--stages=sft"], ["--stages=dpo"], ["--stages=reward_model"]
GRPO, PPO = (["--stages=grpo", LETTERS], ["--stages=ppo", LETTERS])
BASES = {"sft": SFT, "dpo": DPO, "reward_model": RM, "grpo": GRPO, "ppo": PPO}
# a second iteration at a high learning rate gives probability ratios far from 1, where clipping and KL matter
FAR = [*GRPO, "--grpo.num_iterations=2", "--grpo.learning_rate=3e-2", "--grpo.lr_scheduler_type=constant"]
DRIFT = ["drift", *GRPO, "--rollout.max_logp_mismatch=.inf"]
FILM = ["film", "--data.video={min_pixels: 784, max_pixels: 6272}", *SFT]
# a high learning rate moves the policy away from its reference, so that the KL is not 0
PPO_KL = [*PPO, "--ppo.num_iterations=1", "--ppo.learning_rate=3e-2", "--ppo.kl_coef=0.5"]
TWO_STEPS, THREE_STEPS = ([f"--{stage}.max_steps={steps}" for stage in STAGES] for steps in (2, 3))
# options that all stages inherit; each option is tested with one of the stages
STAGE_OPTIONS = {
    "max_steps": 2, "prompts_per_step": 2, "learning_rate": 1e-3, "lr_scheduler_type": "cosine", "min_lr_ratio": 0.5,
    "warmup_steps": 2, "adam_beta2": 0.5,
}  # fmt: skip


def changed(base, **sections):
    """Return (option, changed value, base options) for each value in {section: {name: value}}."""
    return [(f"{part}.{name}", value, base) for part, given in sections.items() for name, value in given.items()]


# (option, changed value, base options)
OPTIONS = [
    ("seed", 1, SFT),
    ("seed", 1, GRPO),
    ("stages", "[sft, grpo]", SFT),
    *[
        (f"{stage}.{name}", value, [*BASES[stage], f"--{stage}.max_steps=3"])
        for stage, (name, value) in zip(itertools.cycle(STAGES), STAGE_OPTIONS.items(), strict=False)
    ],
    *changed(SFT, model={"dtype": "bfloat16", "freeze": "[vision]"}),
    *changed(SFT, data={"task": "shapes(demonstrations=8, pairs=8, wrong_demonstrations=1.0)"}),
    *changed(["own", *SFT], data={
        "prompt_template": "'Look. {problem}'", "system_prompt": "Be brief.", "min_pixels": 112 * 112,
        "chat_template_kwargs": "{add_vision_id: true}", "max_pixels": 28 * 28, "train_file": "{home}/other.jsonl",
    }),
    *changed(FILM, data={"video": "{fps: 1, min_pixels: 784, max_pixels: 6272}"}),
    *changed([*SFT, "--adapter.r=4"], adapter={"r": 2, "alpha": 8, "target": "merger", "dropout": 0.3}),
    *changed([*SFT, "--sft.learning_rate=3e-2"], optimizer={"weight_decay": 1.0}),
    *changed([*SFT, "--optimizer.max_grad_norm=1e9", "--sft.max_steps=3"], optimizer={"max_grad_norm": 0.01}),
    *changed(DPO, dpo={
        "loss_type": "[sigmoid, sft]", "beta": 0.5, "label_smoothing": 0.2, "reference_free": "true",
    }),
    *changed(["own", *DPO], dpo={"ld_alpha": 0.5}),
    *changed([*DPO, "--dpo.loss_type=aot"], dpo={"micro_batch_size": 2}),
    *changed([*DPO, "--dpo.loss_type=robust"], dpo={"label_smoothing": 0.2}),
    *changed([*DPO, "--dpo.loss_type=[sigmoid, sft]"], dpo={"loss_weights": "[0.8, 0.2]"}),
    *changed([*DPO, "--dpo.f_divergence_type=alpha_divergence"], dpo={"f_alpha_divergence_coef": 0.9}),
    *changed(RM, reward_model={"center_rewards_coefficient": 1.0}),
    *changed(GRPO, grpo={
        "num_generations": 4, "steps_per_generation": 2, "top_entropy_quantile": 0.3, "entropy_coef": 0.5,
        "mask_truncated_completions": "true", "soft_punish_cache": 4,
    }),
    *changed(GRPO, sampling={
        "temperature": 0.5, "top_k": 5, "top_p": 0.3, "min_p": 0.9, "repetition_penalty": 3.0, "max_new_tokens": 3,
        "stop_token_ids": "[40, 41, 42, 43, 44]", "stop_strings": "[e, a]",
    }),
    *changed(FAR, grpo={"epsilon_low": 0.001, "beta": 0.5}),
    *changed([*FAR, "--grpo.max_steps=3"], grpo={"num_iterations": 3}),
    *changed([*FAR, "--grpo.epsilon_low=0"], grpo={"epsilon_high": 0.001}),
    *changed([*FAR, "--grpo.beta=0.5"], grpo={"use_bias_correction_kl": "false"}),
    *changed([*GRPO, "--grpo.loss_type=bnpo"], grpo={"micro_batch_size": 1}),
    *changed([*GRPO, "--grpo.loss_type=rloo"], grpo={"beta": 0.5}),
    *changed([*GRPO, "--sampling.max_new_tokens=1", "--grpo.num_generations=2"], grpo={"max_num_gen_batches": 2}),
    *changed([*GRPO, "--grpo.scale_rewards=none"], rewards={"letters": 0.5}),
    *changed(DRIFT, grpo={"rollout_correction": "sequence_truncate"}),
    *changed([*DRIFT, "--grpo.rollout_correction=token_truncate"], grpo={"rollout_correction_bounds": [0.9, 1.2]}),
    *changed(PPO, ppo={
        "num_generations": 3, "steps_per_generation": 2, "num_iterations": 1, "vf_coef": 1.0, "critic": "separate",
        "missing_eos_penalty": 1.0, "gamma": 0.5, "lam": 0.5,
    }),
    *changed([*PPO, "--ppo.learning_rate=3e-2"], ppo={"cliprange": 0.001}),
    *changed(PPO_KL, ppo={"kl_coef": 0.0, "kl_estimator": "k3"}),
]  # fmt: skip


def choices(name):
    section, name = name.split(".")
    hint = typing.get_type_hints(typing.get_type_hints(RunConfig)[section])[name]
    parts = [hint, *typing.get_args(hint)]
    values = next(typing.get_args(part) for part in parts if typing.get_origin(part) is typing.Literal)
    return (("null",) if type(None) in parts else ()) + values


# (option, values of the option, base options); no two values may give the same run
ENUMERATIONS = [
    *[(name, choices(name), base) for name, base in {
        "sft.loss_type": SFT,
        "dpo.f_divergence_type": DPO,
        "grpo.loss_type": [*FAR, "--grpo.micro_batch_size=2", "--grpo.epsilon_high=1.5"],  # cispo needs 1 or more
        "grpo.importance_sampling_level": [*FAR, "--grpo.beta=0.5"],
        "grpo.kl_estimator": [*FAR, "--grpo.beta=0.5"],
        "grpo.scale_rewards": GRPO,
        "grpo.multi_objective_aggregation": GRPO,
        "data.answer_format": ["boxes", "--stages=grpo", f"--rewards={{{__file__}:lengths: 1}}"],
    }.items()],
    ("grpo.advantages", ADVANTAGES, GRPO),
    ("grpo.rollout_correction", CORRECTION_MODES, [*DRIFT, "--grpo.rollout_correction_bounds=[null, 1.5]"]),
    ("data.box_space", SPACES, ["boxes", "--stages=grpo", "--rewards={iou: 1}"]),
]  # fmt: skip
EVALUATED = ["evaluated", *SFT]
OWN = ["own", *SFT]
SEVERAL = [*OWN, "--data.train_file=null", "--data.train=[{file: {home}/rows.jsonl}]"]
# (option, changed value, base options, prefix of the changed output files or "error")
OUTPUTS = [
    *[(f"{stage}.micro_batch_size", 1, BASES[stage], METRICS) for stage in ("sft", "reward_model", "ppo")],
    *[(f"{stage}.max_tokens_per_micro_batch", 100, BASES[stage], METRICS) for stage in ("grpo", "ppo")],
    ("optimizer.name", "adamw_8bit", [*SFT, "--sft.max_steps=3"], METRICS),
    ("max_epochs", 0.5, SFT, METRICS),
    ("model.config", "{home}/tied.json", SFT, METRICS),
    ("adapter.quantize", "nf4", [*SFT, "--adapter.r=4"], METRICS),
    ("adapter.modules_to_save", ["merger"], [*SFT, "--adapter.r=4"], METRICS),
    ("data.files", "{sft: {home}/other.jsonl}", OWN, METRICS),
    ("data.train", "[{file: {home}/other.jsonl}]", SEVERAL, METRICS),
    ("data.format", f"{__file__}:upper", OWN, METRICS),
    ("data.columns", "{solution: key}", ["own", *GRPO, "--rewards={letters: 1}"], "completions.jsonl"),
    ("data.image_root", "{home}/elsewhere", OWN, METRICS),
    ("data.image", "{resized_height: 28, resized_width: 28}", OWN, METRICS),
    ("eval_steps", 1, EVALUATED, "evaluations.jsonl"),
    ("eval_on_start", "false", EVALUATED, "evaluations.jsonl"),
    ("data.eval_rows", 2, EVALUATED, "evaluations.jsonl"),
    ("data.eval_rewards", "[format]", EVALUATED, "evaluations.jsonl"),
    ("data.eval_without_images", "true", EVALUATED, "evaluations.jsonl"),
    ("data.eval_file", "{home}/other.jsonl", ["own", *EVALUATED], "evaluations.jsonl"),
    ("best_metric", "eval/loss", [*EVALUATED, "--eval_steps=1"], "best"),
    ("log_completions", 0, GRPO, "completions.jsonl"),
    ("save_steps", 1, SFT, "checkpoint"),
    ("state_steps", 1, SFT, "states"),
    ("state_minutes", 9, SFT, "states"),
    ("report_to", "[tensorboard]", SFT, "tensorboard"),
    ("rollout.max_logp_mismatch", 0.1, DRIFT, "error"),
]  # fmt: skip


# options with tests of their own, because they need several processes, other hardware or more time
ELSEWHERE = """
output_dir num_threads save resume check_memory timeout model.path model.save_dtype
model.compute_dtype model.activation_checkpointing adapter.path data.max_prompt_tokens data.image_workers
data.skip_unreadable sharding.enabled sharding.replicas sharding.cpu_offload sharding.once_per_step
rollout.gather_weights sampling.max_batch_tokens sampling.cuda_graph sampling.environment sampling.history
sampling.engine sampling.vllm reward_model.path ppo.critic_path reference.path reference.sync_ref_model
reference.ref_model_mixup_alpha reference.ref_model_sync_steps dpo.precompute_ref_log_probs max_wait_hours
"""


@pytest.fixture(scope="module")
def run_outputs(home, user_data):
    """Return a cached function that runs a recipe and returns its output files and its error as {name: bytes}."""
    (home / "tied.json").write_text(json.dumps(RUN_MODEL | {"tie_word_embeddings": True}))
    (home / "elsewhere").mkdir()
    for number in range(8):
        PIL.Image.new("RGB", (56, 56), "gray").save(home / "elsewhere" / f"{number}.png")

    @functools.cache
    def run_outputs(*overrides):
        with pytest.MonkeyPatch.context() as patch:
            kinds = {"own", "boxes", "film", "drift", "evaluated"} & {*overrides}
            options = [override for override in overrides if override not in kinds]
            if kinds & {"own", "boxes", "film"}:
                options = [*user_data, *options]
            for kind in kinds & {"boxes", "film"}:
                options.insert(len(user_data), f"--data.train_file={home / kind}.jsonl")
                patch.setattr(Processor, "decode", boxed)
            if "drift" in kinds:
                patch.setattr(sampler, "make_token_sampler", drifting)
            if "evaluated" not in kinds:
                patch.setattr("minivlmrl.run.results.evaluate", lambda *_: {})
            leave_out(patch)
            for module in ("trainers.base", "distributed.value_models", "run.results"):
                patch.setattr(f"minivlmrl.{module}.save_model", note_save)
            folder = home / "option"
            shutil.rmtree(folder, ignore_errors=True)
            outputs = {"error": b""}
            try:
                train_recipe([str(home / "recipe.yaml"), f"--output_dir={folder}", *TWO_STEPS, *options])
            except ValueError as error:
                outputs["error"] = str(error).encode()
        for path in folder.rglob("*"):
            if path.is_file():
                outputs[str(path.relative_to(folder))] = path.read_bytes()
        return outputs

    return run_outputs


@pytest.fixture(scope="module")
def run_metrics(run_outputs):
    def run_metrics(*overrides):
        outputs = run_outputs(*overrides)
        assert not outputs["error"]
        return [json.loads(line) for line in outputs[METRICS].splitlines()]

    return run_metrics


def note_save(folder, *_, **__):
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "saves").open("a") as file:
        file.write("once more\n")


def drifting(*arguments):
    """Return a token sampler whose log-probabilities are wrong by -1 to 1 nats, depending on the token id."""
    choose = make_token_sampler(*arguments)

    def drift(logits, rows, step):
        ids, logps, ends = choose(logits, rows, step)
        return ids, logps + (ids % 5 - 2) / 2, ends

    return drift


def boxed(processor, ids):
    """Return a text with a box, which an untrained model would not generate."""
    return f"Here:\n<answer>0 0 {ids[0] % 90 + 1} {ids[-1] % 50 + 1}</answer>"


def lengths(answer_texts, **columns):
    return [float(len(text)) for text in answer_texts]


def upper(row):
    return row | {"problem": row["problem"].upper()}


def differ(first, second):
    """Return whether any metric, except the learning rate, differs between two runs by more than rounding."""
    if len(first) != len(second):
        return True
    names = (first[0].keys() & second[0].keys()) - {"stage", "step", "learning_rate"}
    values = [(a[k], b[k]) for a, b in zip(first, second, strict=True) for k in names if "mismatch" not in k]
    return any(abs(a - b) > 1e-4 * max(abs(a), abs(b)) for a, b in values)


@pytest.mark.parametrize(("name", "value", "base"), OPTIONS, ids=[f"{name}={v}" for name, v, _ in OPTIONS])
def test_no_dead_option(run_metrics, varied_rollouts, home, name, value, base):
    changed = f"--{name}={value}".replace("{home}", str(home))
    assert differ(run_metrics(*base), run_metrics(*base, changed))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "values", "base"), ENUMERATIONS, ids=[name for name, _, _ in ENUMERATIONS])
def test_no_two_values_give_the_same_run(run_metrics, varied_rollouts, name, values, base):
    for one, other in itertools.combinations(values, 2):
        assert differ(*(run_metrics(*base, *THREE_STEPS, f"--{name}={value}") for value in (one, other))), (one, other)


# soft_punish_cache is left out: it changes a metric, even where it does not change training
TRAINED = re.compile(r"grpo\.(?!soft)|ppo\.(kl|clip)|dpo\.(f_|label)|adapter\.(alpha|dropout|target)|reference\.ref_")
IDLE = [(name, value, others) for name, value, without, _ in CASES for others in without if TRAINED.match(name)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value", "others"), IDLE, ids=[f"{name} {others}" for name, _, others in IDLE])
def test_options_that_a_note_calls_idle_change_nothing(run_metrics, varied_rollouts, name, value, others):
    base = [*BASES.get(name.split(".")[0], GRPO), *as_overrides(others)]
    assert not differ(run_metrics(*base), run_metrics(*base, *as_overrides({name: value})))


@pytest.mark.parametrize(("name", "value", "base", "begin"), OUTPUTS, ids=[name for name, *_ in OUTPUTS])
def test_options_that_change_the_output_files(run_outputs, varied_rollouts, home, name, value, base, begin):
    if value == "[tensorboard]":
        pytest.importorskip("tensorboard", reason="extra missing: pip install tensorboard")
    both = []
    for options in (base, [*base, f"--{name}={value}"]):
        outputs = run_outputs(*(option.replace("{home}", str(home)) for option in options))
        assert not outputs["error"] or begin == "error"
        both.append({path: content for path, content in outputs.items() if path.startswith(begin)})
    assert both[0] != both[1]


def test_every_option_is_tested():
    tested = {{"rewards.letters": "rewards"}.get(name, name) for name, *_ in (*OPTIONS, *ENUMERATIONS, *OUTPUTS)}
    tested |= {f"{stage}.{name}" for stage in STAGES for name in STAGE_OPTIONS}
    assert {option.path for option in options_of(RunConfig)} == tested | {*ELSEWHERE.split()}
    assert tested.isdisjoint(ELSEWHERE.split())
