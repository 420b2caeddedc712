"""Whole runs through train.main: what they write, that they repeat to the byte, and that no option is dead."""

import dataclasses
import functools
import itertools
import json
import os
import sys
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from minivlmrl import generate, train
from minivlmrl import grpo as grpo_file
from minivlmrl.algorithms import algorithm as algorithm_file
from minivlmrl.algorithms import sft as sft_file
from minivlmrl.algorithms.preference_losses import DPO_LOSSES, F_DIVERGENCES
from minivlmrl.algorithms.sft_loss import SFT_LOSS_TYPES
from minivlmrl.data.boxes import SPACES
from minivlmrl.generate import sample
from minivlmrl.hub.checkpoint import load_model
from minivlmrl.losses import CORRECTION_MODES, IMPORTANCE_SAMPLING_LEVELS, KL_ESTIMATORS, LOSS_TYPES
from minivlmrl.rewards import REWARDS
from minivlmrl.rows import Processor
from minivlmrl.run.config import RunConfig, SamplingConfig, StageConfig, VideoSection, load_config
from minivlmrl.run.evaluate import Answer, Rollout
from minivlmrl.run.metrics import MetricsLog
from minivlmrl.run.optimizer import learning_rate
from minivlmrl.scale.ranks import World
from minivlmrl.tasks.localisation import Localisation, constant_box
from minivlmrl.tasks.shapes import Shapes, answer
from minivlmrl.tools import report

import tiny

ROOT = Path(__file__).parents[1]
CORES = len(getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count()))(0))  # macOS has no affinity
STAGE = {"max_steps": 3, "prompts_per_step": 4, "micro_batch_size": 4, "learning_rate": 3e-3}
RECIPE = {
    "stages": ["sft", "grpo"],
    "num_threads": 1,
    "model": {"config": "model.json"},
    "data": {"task": "shapes", "demonstrations": 8, "eval_rows": 4},
    "sampling": {"max_new_tokens": 6},
    "sft": STAGE,
    "dpo": STAGE,
    "reward_model": STAGE,
    "grpo": STAGE | {"num_generations": 3},
    "ppo": STAGE | {"num_generations": 2},
}
STAGES = ("sft", "dpo", "reward_model", "grpo", "ppo")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A recipe with its tiny model beside it."""
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "model.json").write_text(json.dumps(tiny.RUN_MODEL))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return folder


@pytest.fixture
def run(folder, tmp_path):
    """Train by the recipe with some fields changed; returns the run's folder."""

    def run(*overrides, name="run", recipe=folder / "recipe.yaml"):
        train.main([str(recipe), f"--output_dir={tmp_path / name}", *overrides])
        return tmp_path / name

    return run


@pytest.fixture
def plain(monkeypatch):
    """Leave out the picture, the slowest part of a small run."""
    monkeypatch.setattr(train, "write_report", lambda *_: None)


@pytest.fixture
def lively(monkeypatch):
    """Let an untrained model earn different rewards at different lengths: a reward for letters, many stop tokens."""

    def letters(completions, **columns):
        return [sum(c.isalpha() for c in completion) / 6 for completion in completions]

    monkeypatch.setitem(REWARDS, "letters", letters)
    monkeypatch.setattr(Processor, "stop_token_ids", property(lambda self: tuple(range(7, len(self.tokenizer), 8))))


@pytest.fixture(scope="module")
def checkpoint(folder):
    """The recipe's random model as a Hugging Face folder."""
    train.main([str(folder / "recipe.yaml"), f"--output_dir={folder / 'untrained'}", "--stages=[]"])
    return folder / "untrained" / "checkpoint"


@pytest.fixture(scope="module")
def rows(folder):
    """Eight pictures in a JSON lines file of the user's own, and the first four with other questions."""
    shapes, lines = Shapes(8, "own"), []
    for i in range(8):
        shapes[i].images[0].save(folder / f"{i}.png")
        lines.append({
            "problem": "Name it.", "image": f"{i}.png", "solution": shapes[i].columns["solution"],
            "completion": shapes[i].completion, "chosen": shapes[i].chosen, "rejected": shapes[i].rejected + " or so",
        })  # fmt: skip
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "other.jsonl").write_text("\n".join(json.dumps(line | {"problem": "Hm?"}) for line in lines[:4]))
    PIL.Image.new("RGB", (90, 50), "red").save(folder / "box.png")  # resized to 84 x 56
    box = {"problem": "Box it.", "image": "box.png", "solution": [0, 0, 45, 25]}
    (folder / "boxes.jsonl").write_text("\n".join([json.dumps(box)] * 4))
    tiny.write_video(folder / "film.mkv", [np.full((56, 56, 3), 10 * i, np.uint8) for i in range(24)], rate=8)
    film = {"problem": "What?", "video": "film.mkv", "completion": "It dawns."}
    (folder / "film.jsonl").write_text("\n".join([json.dumps(film)] * 4))
    return folder / "rows.jsonl"


@pytest.fixture(scope="module")
def own(checkpoint, rows):
    """Overrides that train the checkpoint on the user's rows."""
    return ["--model.config=null", f"--model.path={checkpoint}", "--data.task=null", f"--data.train_file={rows}"]


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


# what a run leaves behind


def test_a_run_writes_its_files(run, capsys):
    folder = run()
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoint", "config.yaml", "metrics.jsonl", "report.png", "summary.json", "timings.jsonl",
    ]  # fmt: skip
    with PIL.Image.open(folder / "report.png") as image:
        assert image.size[0] > 1000
        assert len(image.convert("L").getcolors()) > 10  # something is drawn
    load_model(folder / "checkpoint")
    assert "after grpo" in capsys.readouterr().out


def test_summary_schema(run, plain):
    table = summary(run())
    assert list(table) == ["chance", "start", "after_sft", "after_grpo", "seconds"]
    assert table["chance"] == 1 / 12
    for stage in ("start", "after_sft", "after_grpo"):
        assert list(table[stage]) == ["sampled", "greedy", "format"]
        assert all(0 <= share <= 1 for share in table[stage].values())
    assert list(table["seconds"]) == ["sft", "grpo"]
    assert all(seconds > 0 for seconds in table["seconds"].values())


def test_one_line_a_step(run, plain):
    folder = run()
    for file in ("metrics.jsonl", "timings.jsonl"):
        lines = [json.loads(line) for line in (folder / file).read_text().splitlines()]
        assert [(line["stage"], line["step"]) for line in lines] == [(s, i) for s in ("sft", "grpo") for i in range(3)]


def test_figures_of_a_step(run, plain):
    sft, *_, grpo = metrics(run())
    assert set(sft) == {"stage", "step", "loss", "entropy", "grad_norm", "learning_rate"}
    assert set(grpo) == {
        "stage", "step", "loss", "entropy", "grad_norm", "learning_rate", "reward", "reward_std", "rewards/format",
        "rewards/accuracy", "frac_reward_zero_std", "clip_ratio/low_mean", "clip_ratio/high_mean",
        "clip_ratio/region_mean", "completions/mean_length", "completions/clipped_ratio", "rollout/logp_mismatch",
    }  # fmt: skip


def test_figures_of_the_other_stages(run, plain):
    lines = metrics(run("--stages=[dpo, reward_model, ppo]", "--ppo.kl_coef=0.1"))
    dpo, reward_model, ppo = (line for line in lines if line["step"] == 1)
    common = {"stage", "step", "loss", "grad_norm", "learning_rate"}
    pairs = {"rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"}
    assert set(dpo) == common | pairs | {"entropy", "logps/chosen", "logps/rejected"}
    assert set(reward_model) == common | pairs
    assert set(ppo) == common | {
        "policy_loss", "value_loss", "approx_kl", "clip_ratio/policy", "clip_ratio/value", "ratio", "entropy", "reward",
        "rewards/format", "rewards/accuracy", "completions/mean_length", "completions/clipped_ratio",
    }  # fmt: skip


def test_pairs_are_judged_after_stages_that_can_tell(run, plain):
    table = summary(run("--stages=[sft, dpo, reward_model]", "--data.eval_rows=5"))
    assert ["pairs" in table[name] for name in ("start", "after_sft", "after_dpo", "after_reward_model")] == [
        False, False, True, True,
    ]  # fmt: skip
    assert all(table[name]["pairs"] * 5 in range(6) for name in ("after_dpo", "after_reward_model"))


def test_without_matplotlib_the_run_ends_well_and_says_what_is_missing(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    folder = run()
    assert not (folder / "report.png").exists()
    assert (folder / "summary.json").exists()
    assert "pip install 'minivlmrl[report]'" in capsys.readouterr().out


# a run repeats


def test_the_same_seed_gives_the_same_bytes(run, plain, lively):
    first, second = (run("--rewards.letters=1", name=name) for name in ("a", "b"))
    assert (first / "metrics.jsonl").read_bytes() == (second / "metrics.jsonl").read_bytes()
    weights = [(folder / "checkpoint" / "model.safetensors").read_bytes() for folder in (first, second)]
    assert weights[0] == weights[1]


def test_another_seed_gives_other_random_weights(run, plain):
    folders = [run("--stages=[]", f"--seed={seed}", name=str(seed)) for seed in (0, 1)]
    first, second = (load_file(folder / "checkpoint" / "model.safetensors") for folder in folders)
    assert not torch.equal(first["lm_head.weight"], second["lm_head.weight"])


def test_the_written_config_repeats_the_run_from_any_folder(run, plain, tmp_path, monkeypatch):
    first = run("--grpo.learning_rate=1e-3", "--seed=3", name="a")
    monkeypatch.chdir(tmp_path)
    second = run(name="b", recipe=first / "config.yaml")
    assert (first / "metrics.jsonl").read_bytes() == (second / "metrics.jsonl").read_bytes()
    configs = [yaml.safe_load((folder / "config.yaml").read_text()) for folder in (first, second)]
    assert configs[0] | {"output_dir": ""} == configs[1] | {"output_dir": ""}


def test_a_trained_checkpoint_answers_as_the_model_did(run, plain, monkeypatch):
    """What the first run says at its end, a second one that loads the checkpoint says at its start."""
    said = []

    def evaluate(*arguments):
        said.append(original(*arguments))
        return said[-1]

    original = train.evaluate
    monkeypatch.setattr(train, "evaluate", evaluate)
    first = run(name="a")
    run("--model.config=null", f"--model.path={first / 'checkpoint'}", "--stages=[]", name="b")
    assert len(said) == 4
    assert said[2] == said[3]
    assert said[0].answers != said[2].answers  # training did change the answers


# the numbers


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampler_and_trainer_agree_on_log_probabilities(run, plain, lively, temperature):
    lines = metrics(run("--stages=[grpo]", "--rewards.letters=1", f"--sampling.temperature={temperature}"))
    assert len(lines) == 3
    for line in lines:
        assert line["grad_norm"] > 0
        assert line["rollout/logp_mismatch"] < 1e-5


def test_the_mismatch_is_measured_on_fresh_completions_only(run, plain, lively):
    lines = metrics(run("--stages=[grpo]", "--rewards.letters=1", "--grpo.num_iterations=2", "--grpo.max_steps=4"))
    assert ["rollout/logp_mismatch" in line for line in lines] == [True, False, True, False]


def test_sft_learns_its_demonstrations(run, plain):
    lines = metrics(run("--stages=[sft]", "--sft.max_steps=40", "--sft.learning_rate=1e-2", "--data.eval_rows=1"))
    assert lines[0]["loss"] > 5
    assert lines[-1]["loss"] < 1.5


def test_grpo_learns_its_reward(run, plain, lively):
    options = ["--grpo.max_steps=30", "--grpo.num_generations=8", "--grpo.learning_rate=1e-2", "--data.eval_rows=1"]
    lines = metrics(run("--stages=[grpo]", "--rewards={letters: 1, format: 0, accuracy: 0}", *options))
    first, last = (sum(line["reward"] for line in part) / 5 for part in (lines[:5], lines[-5:]))
    assert last > first + 0.3


@pytest.mark.parametrize("stage", STAGES)
def test_micro_batches_add_up_to_the_step(run, plain, lively, monkeypatch, stage):
    """One step of four prompts is the same step in four pieces."""
    pieces = []
    for size in (4, 1):
        original, count = train.ALGORITHMS[stage].loss, []
        with monkeypatch.context() as patch:
            patch.setattr(train.ALGORITHMS[stage], "loss", lambda *a, f=original, count=count: count.append(1) or f(*a))
            folder = run(
                f"--stages=[{stage}]", "--rewards.letters=1", f"--{stage}.micro_batch_size={size}",
                f"--{stage}.max_steps=1", "--model.dtype=float64", name=str(size),
            )  # fmt: skip
        assert len(count) == 4 // size
        pieces.append(metrics(folder)[0])
    whole, split = pieces
    for name in whole.keys() - {"stage", "rollout/logp_mismatch"}:
        assert split[name] == pytest.approx(whole[name], rel=1e-6, abs=1e-12), name


def test_every_step_begins_without_gradient(run, plain):
    """At learning rate 0 and with all rows in every step, all steps have one gradient."""
    options = ["--sft.learning_rate=0", "--data.demonstrations=4", "--sft.prompts_per_step=4"]
    norms = [line["grad_norm"] for line in metrics(run("--stages=[sft]", *options))]
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)


def test_learning_rate_docstring_example():
    config = StageConfig(learning_rate=1.0, warmup_steps=2, max_steps=6)
    assert [learning_rate(step, config) for step in range(6)] == [0.5, 1, 1, 0.75, 0.5, 0.25]


# no option is dead: each of these changes a run of a few steps

LETTERS = "--rewards={letters: 1, format: 0, accuracy: 0}"
SFT, DPO, RM = (["--stages=sft"], ["--stages=dpo"], ["--stages=reward_model"])
GRPO, PPO = (["--stages=grpo", LETTERS], ["--stages=ppo", LETTERS])
BASES = {"sft": SFT, "dpo": DPO, "reward_model": RM, "grpo": GRPO, "ppo": PPO}
# a second iteration at a high rate leaves the ratio far from 1, where clipping and the KL penalty show
FAR = [*GRPO, "--grpo.num_iterations=2", "--grpo.learning_rate=3e-2", "--grpo.lr_scheduler_type=constant"]
# "drift": the sampler records log-probabilities that are not quite the trainer's
DRIFT = ["drift", *GRPO, "--grpo.rollout_correction_max=1.5"]
BOXED = [*SFT, "--data.task=localisation"]
FILM = ["film", "--data.video.min_pixels=784", "--data.video.max_pixels=6272", *SFT]
# later rollouts of a policy that has moved away from its reference
PPO_KL = [*PPO, "--ppo.num_ppo_epochs=1", "--ppo.learning_rate=3e-2", "--ppo.kl_coef=0.5"]
STAGE_OPTIONS = {
    "max_steps": (2, []),
    "prompts_per_step": (2, []),
    "learning_rate": (1e-3, []),
    "lr_scheduler_type": ("cosine", []),
    "min_lr_ratio": (0.5, []),
    "warmup_steps": (2, []),
    "adam_beta1": (0.5, []),
    "adam_beta2": (0.5, []),
    "weight_decay": (1.0, ["learning_rate=3e-2"]),
    "max_grad_norm": (0.01, ["max_grad_norm=1e9"]),
    "freeze_vision_tower": ("true", []),
}
REFERENCE_OPTIONS = {
    "sync_ref_model": ("true", ["ref_model_sync_steps=1"]),
    "ref_model_mixup_alpha": (0.1, ["ref_model_sync_steps=1", "sync_ref_model=true"]),
    "ref_model_sync_steps": (2, ["ref_model_sync_steps=1", "sync_ref_model=true"]),
    "num_shared_layers": (1, []),
}
REFERENCED = {"dpo": DPO, "grpo": [*GRPO, "--grpo.beta=0.5"], "ppo": PPO_KL}
OPTIONS = [  # field, another value, base
    *[
        (f"{stage}.{n}", v, [*BASES[stage], *[f"--{stage}.{b}" for b in base]])
        for stage in STAGES
        for n, (v, base) in STAGE_OPTIONS.items()
    ],
    *[
        (f"{stage}.{n}", v, [*REFERENCED[stage], *[f"--{stage}.{b}" for b in base]])
        for stage in REFERENCED
        for n, (v, base) in REFERENCE_OPTIONS.items()
    ],
    ("dpo.micro_batch_size", 2, [*DPO, "--dpo.loss_type=aot"]),
    ("dpo.loss_type", "[sigmoid, sft]", DPO),
    ("dpo.loss_weights", "[0.8, 0.2]", [*DPO, "--dpo.loss_type=[sigmoid, sft]"]),
    ("dpo.beta", 0.5, DPO),
    *[("dpo.label_smoothing", 0.2, [*DPO, f"--dpo.loss_type={name}"]) for name in ("robust", "aot", "aot_unpaired")],
    ("dpo.label_smoothing", 0.2, [*DPO, "--dpo.loss_type=exo_pair", "--dpo.label_smoothing=0.1"]),
    ("dpo.smooth_sigmoid", "true", [*DPO, "--dpo.label_smoothing=0.1"]),
    ("dpo.f_alpha_divergence_coef", 0.9, [*DPO, "--dpo.f_divergence_type=alpha_divergence"]),
    ("dpo.ld_alpha", 0.5, ["own", *DPO]),
    ("dpo.use_weighting", "true", DPO),
    ("dpo.reference_free", "true", DPO),
    ("dpo.discopop_tau", 0.5, [*DPO, "--dpo.loss_type=discopop"]),
    ("reward_model.center_rewards_coefficient", 1.0, RM),
    ("grpo.num_generations", 4, GRPO),
    ("grpo.steps_per_generation", 2, GRPO),
    ("grpo.num_iterations", 3, FAR),
    ("grpo.micro_batch_size", 1, [*GRPO, "--grpo.loss_type=bnpo"]),
    ("grpo.epsilon_low", 0.001, FAR),
    ("grpo.epsilon_high", 0.001, [*FAR, "--grpo.epsilon_low=0"]),
    ("grpo.epsilon_high", 0.9, [*FAR, "--grpo.loss_type=cispo"]),
    ("grpo.delta", 1.01, FAR),
    ("grpo.beta", 0.5, FAR),
    ("grpo.beta", 0.5, [*GRPO, "--grpo.loss_type=rloo"]),
    ("grpo.kl_straight_through", "true", [*FAR, "--grpo.beta=0.5", "--grpo.use_bias_correction_kl=false"]),
    ("grpo.use_bias_correction_kl", "false", [*FAR, "--grpo.beta=0.5"]),
    ("grpo.top_entropy_quantile", 0.3, GRPO),
    ("grpo.entropy_coef", 0.5, GRPO),
    ("grpo.off_policy_mask_threshold", 0.0, FAR),
    ("grpo.rollout_correction_max", 1.2, [*DRIFT, "--grpo.rollout_correction=token_truncate"]),
    ("grpo.rollout_correction_min", 0.9, [*DRIFT, "--grpo.rollout_correction=token_truncate"]),
    ("grpo.sapo_temperature_pos", 3.0, [*FAR, "--grpo.loss_type=sapo"]),
    ("grpo.sapo_temperature_neg", 3.0, [*FAR, "--grpo.loss_type=sapo"]),
    ("grpo.vespo_k_pos", 1.0, [*FAR, "--grpo.loss_type=vespo"]),
    ("grpo.vespo_lambda_pos", 1.0, [*FAR, "--grpo.loss_type=vespo"]),
    ("grpo.vespo_k_neg", 1.0, [*FAR, "--grpo.loss_type=vespo"]),
    ("grpo.vespo_lambda_neg", 1.0, [*FAR, "--grpo.loss_type=vespo"]),
    ("grpo.mask_truncated_completions", "true", GRPO),
    ("grpo.soft_punish_cache", 4, GRPO),
    ("grpo.max_num_gen_batches", 2, [*GRPO, "--sampling.max_new_tokens=1", "--grpo.num_generations=2"]),
    ("grpo.normalize_advantages", "true", [*GRPO, "--grpo.loss_type=rloo"]),
    ("grpo.reward_clip_range", "[0.1, 0.4]", [*GRPO, "--grpo.loss_type=rloo"]),
    ("grpo.shuffle_rewards", "true", GRPO),
    ("ppo.num_generations", 3, PPO),
    ("ppo.num_mini_batches", 2, PPO),
    ("ppo.num_ppo_epochs", 1, PPO),
    ("ppo.cliprange", 0.001, [*PPO, "--ppo.learning_rate=3e-2"]),
    ("ppo.cliprange_value", 0.001, [*PPO, "--ppo.learning_rate=3e-2"]),
    ("ppo.vf_coef", 1.0, PPO),
    ("ppo.kl_coef", 0.0, PPO_KL),
    ("ppo.gamma", 0.5, PPO),
    ("ppo.lam", 0.5, PPO),
    ("ppo.whiten_rewards", "true", PPO),
    ("ppo.missing_eos_penalty", 1.0, PPO),
    ("sampling.temperature", 0.5, GRPO),
    ("sampling.top_k", 5, GRPO),
    ("sampling.top_p", 0.3, GRPO),
    ("sampling.min_p", 0.9, GRPO),
    ("sampling.repetition_penalty", 3.0, GRPO),
    ("sampling.max_new_tokens", 3, GRPO),
    ("sampling.max_length", 32, GRPO),  # prompts have 29 tokens
    ("sampling.min_new_tokens", 6, GRPO),
    ("sampling.stop_token_ids", "[40, 41, 42, 43, 44]", GRPO),
    ("sampling.stop_strings", "[e, a]", GRPO),
    ("sampling.temperature", 0.5, PPO),
    ("rewards.letters", 0.5, [*GRPO, "--grpo.scale_rewards=none"]),
    ("rewards.letters", 0.5, PPO),
    *[("seed", 1, base) for base in BASES.values()],
    ("stages", "[sft, grpo]", SFT),
    ("model.dtype", "bfloat16", SFT),
    ("data.demonstrations", 5, SFT),
    ("data.wrong_demonstrations", 1.0, SFT),
    ("data.pairs", 5, DPO),
    ("data.pairs", 5, RM),
    ("data.prompt_template", "'Look. {problem}'", ["own", *SFT]),
    ("data.system_prompt", "Be brief.", ["own", *SFT]),
    ("data.min_pixels", 112 * 112, ["own", *SFT]),
    ("data.max_pixels", 28 * 28, ["own", *SFT]),
    ("data.train_file", "{folder}/other.jsonl", ["own", *SFT]),
    ("data.add_vision_id", "true", ["own", *SFT]),
    ("data.video.fps", 1, FILM),
    ("data.video.min_frames", 8, FILM),
    ("data.video.max_frames", 4, FILM),
    ("data.video.min_pixels", 6272, FILM),
    ("data.video.max_pixels", 1568, FILM),
    ("data.video.total_pixels", 3 * 1568, FILM),
    ("data.task", "localisation", SFT),
    ("data.jitter", 0, BOXED),
    ("data.objects", "[2, 3]", BOXED),
    ("data.thinking", "position", BOXED),
]
ENUMERATIONS = [  # field, its values, base: no two values give the same run
    ("sft.loss_type", SFT_LOSS_TYPES, SFT),
    ("dpo.loss_type", tuple(DPO_LOSSES), [*DPO, "--dpo.label_smoothing=0.1"]),
    ("dpo.f_divergence_type", F_DIVERGENCES, DPO),
    ("grpo.loss_type", LOSS_TYPES, [*FAR, "--grpo.micro_batch_size=2"]),
    ("grpo.importance_sampling_level", IMPORTANCE_SAMPLING_LEVELS, [*FAR, "--grpo.beta=0.5"]),
    ("grpo.kl_estimator", KL_ESTIMATORS, [*FAR, "--grpo.beta=0.5"]),
    ("grpo.rollout_correction", ("null", *CORRECTION_MODES), DRIFT),
    ("grpo.scale_rewards", ("group", "batch", "none"), GRPO),
    ("grpo.multi_objective_aggregation", ("sum_then_normalize", "normalize_then_sum"), GRPO),
    ("ppo.critic", ("shared", "separate"), PPO),
    ("ppo.kl_estimator", ("k1", "k3"), PPO_KL),
    ("data.box_space", SPACES, ["boxes", "--stages=grpo", "--rewards={iou: 1}"]),
]
# these change something else than metrics.jsonl and have a test of their own: below, in test_invariance.py
# (micro_batch_size, precompute_ref_log_probs), in test_algorithms.py (reward_model.path, ppo.critic_path) or in
# test_media.py (allow_urls), test_resume.py (states, resume, timeout), test_sharding.py or test_ranks.py
OTHERS = {
    "sft.micro_batch_size", "reward_model.micro_batch_size", "ppo.micro_batch_size", "dpo.precompute_ref_log_probs",
    *(f"{stage}.save_steps" for stage in STAGES), "output_dir", "num_threads", "model.path", "model.config",
    "data.eval_rows", "data.eval_file", "data.eval_rewards", "reward_model.path", "ppo.critic_path", "data.allow_urls",
    "data.resize", "state_steps", "keep_states", "resume", "timeout", "model.activation_checkpointing",
    "rollout.gather_weights", "sharding.enabled", "sharding.compute_dtype", "sharding.replicas", "sharding.cpu_offload",
}  # fmt: skip


@pytest.fixture(scope="module")
def lines_of(folder, own):
    """Metrics of a run by its overrides, each run once; the logged learning rate alone is no effect."""

    @functools.cache
    def lines_of(*overrides):
        with pytest.MonkeyPatch.context() as patch:
            if overrides[0] == "own":
                overrides = (*own, *overrides[1:])
            if overrides[0] in ("boxes", "film"):
                overrides = (*own, f"--data.train_file={folder / overrides[0]}.jsonl", *overrides[1:])
                patch.setattr(Processor, "decode", boxed)
            if overrides[0] == "drift":
                overrides = overrides[1:]
                patch.setattr(generate, "sample", drifting)
            patch.setattr(train, "evaluate", lambda *_: train.Evaluation(0, 0, 0, []))
            for file in (train, algorithm_file):
                patch.setattr(file, "save_model", lambda *_: None)
            train.main([str(folder / "recipe.yaml"), f"--output_dir={folder / 'option'}", *overrides])
        return metrics(folder / "option")

    return lines_of


def drifting(*arguments):
    """The sampler, with log-probabilities that are off by -1 to 1 nats, each token by its own amount."""
    ids, logps = sample(*arguments)
    return ids, logps + (ids % 5 - 2) / 2


def boxed(processor, ids):
    """What an untrained model does not write: a box, at the image's corner."""
    return f"<answer>0 0 {ids[0] % 90 + 1} {ids[-1] % 50 + 1}</answer>"


def differ(first, second):
    """Whether some figure that both have differs by more than rounding does. The learning rate is no effect."""
    if len(first) != len(second):
        return True
    names = (first[0].keys() & second[0].keys()) - {"stage", "step", "learning_rate", "rollout/logp_mismatch"}
    figures = [(a[k], b[k]) for a, b in zip(first, second, strict=True) for k in names]
    return any(abs(a - b) > 1e-4 * max(abs(a), abs(b)) for a, b in figures)


@pytest.mark.parametrize(("name", "value", "base"), OPTIONS, ids=[f"{name}={v}" for name, v, _ in OPTIONS])
def test_no_dead_option(lines_of, plain, lively, folder, name, value, base):
    changed = f"--{name}={value}".replace("{folder}", str(folder))
    assert differ(lines_of(*base), lines_of(*base, changed))


@pytest.mark.parametrize(("name", "values", "base"), ENUMERATIONS, ids=[name for name, _, _ in ENUMERATIONS])
def test_no_two_values_are_alike(lines_of, plain, lively, name, values, base):
    for one, other in itertools.combinations(values, 2):
        assert differ(*(lines_of(*base, f"--{name}={value}") for value in (one, other))), (one, other)


def test_every_option_is_in_the_table():
    """A new field of the config needs a row above."""
    fields = set()
    for field in dataclasses.fields(RunConfig):
        section = field.default_factory() if field.default_factory is not dataclasses.MISSING else None
        nested = dataclasses.is_dataclass(section)
        fields |= {f"{field.name}.{f.name}" for f in dataclasses.fields(section)} if nested else {field.name}
    fields = fields - {"data.video"} | {f"data.video.{f.name}" for f in dataclasses.fields(VideoSection)}
    tested = {name.replace("rewards.letters", "rewards") for name, _, _ in OPTIONS}
    assert fields == tested | {name for name, _, _ in ENUMERATIONS} | OTHERS


def test_resize_reaches_the_image_processor(folder, own):
    """The two filters differ by a grey level here and there, too little for a figure of a run."""
    image, pixels = PIL.Image.effect_noise((100, 80), 50), {}
    for resize in ("pil", "torch", "null"):
        config = load_config(folder / "recipe.yaml", [*own, f"--data.resize={resize}"])
        pixels[resize] = train.build_model(config, World(0, 1, torch.device("cpu")))[1].image_processor(image)[0]
    assert torch.equal(pixels["null"], pixels["pil"])  # what the folder says
    assert 0 < (pixels["torch"] - pixels["pil"]).abs().max() < 0.1


@pytest.mark.parametrize("stage", STAGES)
def test_save_steps_writes_the_checkpoint_on_the_way(run, plain, monkeypatch, stage):
    steps, original = [], train.ALGORITHMS[stage].save
    monkeypatch.setattr(train.ALGORITHMS[stage], "save", lambda *a: steps.append(len(steps)) or original(*a))
    folder = run(f"--stages={stage}", f"--{stage}.save_steps=2", f"--{stage}.max_steps=5")
    assert len(steps) == 2 + 1  # after steps 2 and 4, and at the end
    assert (folder / ("reward_model" if stage == "reward_model" else "checkpoint") / "model.safetensors").is_file()


@pytest.mark.parametrize(("option", "expected"), [("2", 2), ("null", CORES)])
def test_num_threads(run, plain, monkeypatch, option, expected):
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    run("--stages=[]", f"--num_threads={option}")
    assert chosen == [expected]


def test_eval_rows_and_eval_file_choose_what_is_evaluated(run, plain, own, folder, monkeypatch):
    seen = []
    monkeypatch.setattr(
        train, "evaluate", lambda *arguments: seen.append(arguments[2]) or train.Evaluation(0, 0, 0, [])
    )
    run("--stages=[]", "--data.eval_rows=3")
    run(*own, "--stages=[]", f"--data.eval_file={folder / 'other.jsonl'}")
    assert [len(rows) for rows in seen] == [3, 4]
    assert seen[1][0].columns["problem"] == "Hm?"


# the user's own data and weights


@pytest.mark.parametrize("stage", STAGES)
def test_training_on_json_lines_from_a_checkpoint(run, own, rows, stage, lively):
    folder = run(*own, f"--stages=[{stage}]", f"--data.eval_file={rows}", "--rewards.letters=1")
    assert len(metrics(folder)) == 3
    assert all(line["grad_norm"] > 0 for line in metrics(folder))
    assert list(summary(folder)) == ["chance", "start", f"after_{stage}", "seconds"]
    assert summary(folder)["chance"] is None
    assert (folder / "report.png").is_file()


def test_held_out_pairs_need_no_solution(run, own, rows, tmp_path):
    """Then nothing is said of accuracy, only of the form and of the pairs."""
    file = rows.with_name("pairs.jsonl")
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    pairs = [{"image": line["image"], "prompt": "Hm?", "chosen": "a square", "rejected": "no"} for line in lines]
    file.write_text("\n".join(map(json.dumps, pairs)))
    folder = run(*own, f"--data.train_file={file}", f"--data.eval_file={file}", "--stages=[dpo]")
    assert set(summary(folder)["after_dpo"]) == {"format", "pairs"}
    assert set(summary(folder)["start"]) == {"format"}
    assert (folder / "report.png").is_file()


def test_without_an_eval_file_nothing_is_evaluated(run, own):
    folder = run(*own, "--stages=[sft]")
    assert list(summary(folder)) == ["chance", "seconds"]
    assert (folder / "report.png").is_file()


@pytest.mark.parametrize("stage", STAGES)
def test_text_only_rows_train_too(run, own, tmp_path, plain, lively, stage):
    row = {"problem": "1 + 1?", "solution": "2", "completion": "<answer>2</answer>", "chosen": "2", "rejected": "green"}
    (tmp_path / "text.jsonl").write_text(json.dumps(row))
    options = [f"--data.train_file={tmp_path / 'text.jsonl'}", LETTERS, f"--stages={stage}"]
    lines = metrics(run(*own, *options))
    assert len(lines) == 3
    assert all(line["grad_norm"] > 0 for line in lines)


def test_a_number_as_solution_is_judged_or_named(run, own, tmp_path, plain):
    (tmp_path / "sums.jsonl").write_text('{"problem": "1 + 1?", "solution": 2}\n')
    try:
        run(*own, f"--data.train_file={tmp_path / 'sums.jsonl'}", "--stages=[grpo]")
    except ValueError as error:
        assert "sums.jsonl:1" in str(error)


# what cannot run is refused


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--stages=[tpo]"], "stages: unknown algorithm 'tpo'; known are sft, dpo, reward_model, grpo, ppo"),
        (["--model.config=null"], r"model: set either model\.path .* or model\.config"),
        (["--model.path=/tmp"], r"model: set either model\.path .* or model\.config"),
        (["--model.dtype=int8"], r"model\.dtype is 'int8', it must be one of float32, bfloat16"),
        (["--model.config=null", "--model.path=/nowhere"], r"/nowhere: no such folder"),
        (["--rewards.brevity=1"], "unknown reward 'brevity'; registered are: .*accuracy, .*format"),
        (["--stages=[grpo]", "--sampling.temperature=0"], r"sampling\.temperature is 0"),
        (["--stages=[ppo]", "--sampling.temperature=0"], r"sampling\.temperature is 0"),
        (["--stages=[sft, ppo]", "--rewards=null"], "rewards is None"),
        (["--sft.loss_type=mse"], r"sft\.loss_type is 'mse'; known are nll, dft"),
        (["--stages=dpo", "--dpo.loss_type=ppo"], "dpo.loss_type is 'ppo'; known are sigmoid, hinge"),
        (["--stages=dpo", "--dpo.loss_weights=[1, 2]"], r"dpo.loss_type is \['sigmoid'\], loss_weights \[1.0, 2.0\]"),
        (["--stages=dpo", "--dpo.loss_type=exo_pair"], "dpo.loss_type exo_pair takes"),
        (["--stages=dpo", "--dpo.label_smoothing=0.5"], "dpo.label_smoothing is 0.5"),
        (["--stages=dpo", "--dpo.f_divergence_type=tv"], "dpo.f_divergence_type .*tv"),
        (
            ["--stages=dpo", "--dpo.f_divergence_type=js_divergence", "--dpo.loss_type=aot"],
            "dpo.loss_type aot is made for",
        ),
        (["--stages=dpo", "--dpo.use_weighting=true", "--dpo.loss_type=aot"], "dpo.loss_type aot sorts"),
        (["--stages=dpo", "--dpo.sync_ref_model=true", "--dpo.reference_free=true"], r"dpo\.sync_ref_model needs"),
        (
            ["--stages=dpo", "--dpo.num_shared_layers=1", "--dpo.precompute_ref_log_probs=true"],
            r"dpo\.num_shared_layers needs a reference model",
        ),
        (["--stages=dpo", "--dpo.num_shared_layers=3"], "num_shared_layers is 3, the model has 2 layers"),
        (["--stages=grpo", "--grpo.num_shared_layers=3", "--grpo.beta=1"], "num_shared_layers is 3, the model has 2"),
        (["--grpo.importance_sampling_level=word"], r"grpo\.importance_sampling_level is 'word'; known are token, seq"),
        (["--grpo.kl_estimator=k4"], r"grpo\.kl_estimator is 'k4'; known are k1, k2, k3"),
        (["--grpo.rollout_correction=all"], r"grpo\.rollout_correction is 'all'; known are None, token_truncate"),
        (["--grpo.loss_type=rloo", "--grpo.importance_sampling_level=sequence"], "rloo has its own"),
        (
            ["--grpo.soft_punish_cache=2", "--grpo.multi_objective_aggregation=normalize_then_sum"],
            r"grpo\.soft_punish_cache is added to the sum",
        ),
        (["--grpo.num_shared_layers=1"], r"grpo\.num_shared_layers needs a reference model; the weight"),
        (["--stages=ppo", "--ppo.kl_coef=0", "--ppo.sync_ref_model=true"], r"ppo\.sync_ref_model needs a reference"),
        (
            ["--stages=dpo", "--dpo.reference_free=true", "--dpo.precompute_ref_log_probs=true"],
            r"dpo\.precompute_ref_log_probs: with reference_free there is no reference",
        ),
        (
            ["--grpo.loss_type=rloo", "--grpo.multi_objective_aggregation=normalize_then_sum"],
            r"grpo\.multi_objective_aggregation: rloo has its own advantages",
        ),
        (["--grpo.normalize_advantages=true"], r"grpo\.normalize_advantages is an option of loss_type rloo"),
        (["--grpo.reward_clip_range=[0, 1]"], r"grpo\.reward_clip_range is an option of loss_type rloo"),
        (["--stages=ppo", "--ppo.critic=separate", "--ppo.critic_path=/gone"], "/gone: no such folder; a reward model"),
        (["--rewards={reward_model: 1}", "--reward_model.path=/gone"], "/gone: no such folder; a reward model"),
        (["--data.task=null"], r"set either data\.task .* or data\.train_file"),
        (["--data.task=counting"], r"data\.task is 'counting'; embedded tasks are shapes, localisation"),
        (["--data.task=localisation", "--stages=dpo"], "stages: dpo needs pairs, which data.task localisation does"),
        (["--data.task=localisation", "--stages=[sft, reward_model]"], "stages: reward_model needs pairs, which data"),
        (["--data.task=localisation", "--data.jitter=3"], "jitter is 3"),
        (["--data.jitter=-7"], "jitter.*-7"),
        (["--data.objects=[2, 1]"], r"objects.*\[2, 1\]"),
        (["--data.objects=[1, 2, 3]"], r"objects.*\[1, 2, 3\]"),
        (["--data.objects=[]"], r"objects.*\[\]"),
        (["--data.thinking=long"], "thinking.*'long'"),
        (["--data.box_space=pixels"], "box_space.*'pixels'.*original.*resized.*thousandths.*unit"),
        (["--data.eval_rewards=[accuracy]"], r"eval_rewards.*\['accuracy'\]"),
        (["--data.eval_rewards=[acuracy, format]"], "unknown reward 'acuracy'"),
        (
            ["--stages=[grpo]", "--grpo.loss_type=ppo"],
            "loss_type is 'ppo'; known are grpo, bnpo, dr_grpo, dapo, luspo, ",
        ),
    ],
)
def test_a_run_that_cannot_be_is_refused(run, plain, overrides, message):
    with pytest.raises(ValueError, match=message):
        run(*overrides)


def test_own_data_needs_own_weights(run, rows):
    with pytest.raises(ValueError, match=r"with data\.train_file set model\.path"):
        run("--data.task=null", f"--data.train_file={rows}")


def test_no_rows_to_evaluate(run, plain):
    try:
        assert set(summary(run("--stages=[]", "--data.eval_rows=0"))) <= {"chance", "start", "seconds"}
    except ValueError as error:
        assert "eval_rows" in str(error)


def test_pixel_bounds_of_a_random_model_hold_or_are_refused(lines_of, plain, lively):
    try:
        assert differ(lines_of(*SFT), lines_of(*SFT, "--data.min_pixels=12544"))
    except ValueError as error:
        assert "min_pixels" in str(error)


@pytest.mark.parametrize("option", ["--data.system_prompt=Be brief.", "--data.prompt_template='Look. {problem}'"])
def test_prompts_of_the_embedded_task_can_be_set_or_are_refused(lines_of, plain, lively, option):
    try:
        assert differ(lines_of(*SFT), lines_of(*SFT, option))
    except ValueError as error:
        assert option[2:].partition("=")[0] in str(error)


# numbers that are no numbers


def test_a_loss_that_is_not_finite_stops_the_run_before_the_update(run, plain, monkeypatch):
    options = ["--stages=[sft]", "--sft.save_steps=1", "--sft.lr_scheduler_type=constant"]
    good = run(*options, "--sft.max_steps=1", name="good")
    calls = []

    def loss(*arguments, **counts):
        calls.append(1)
        return original(*arguments, **counts) * (float("nan") if len(calls) == 2 else 1)

    original = sft_file.sft_loss
    monkeypatch.setattr(sft_file, "sft_loss", loss)
    with pytest.raises(ValueError, match=r"sft step 1: loss nan.* lower sft\.learning_rate"):
        run(*options, name="bad")
    kept = [folder.parent / name / "checkpoint" / "model.safetensors" for name in ("good", "bad") for folder in [good]]
    assert kept[0].read_bytes() == kept[1].read_bytes()  # the weights of step 0
    assert [line["step"] for line in metrics(good.parent / "bad")] == [0]


def test_a_gradient_that_is_not_finite_stops_the_run(run, plain, monkeypatch):
    original = grpo_file.grpo_loss

    def loss(logps, *arguments, **options):
        value, diagnostics = original(logps, *arguments, **options)
        return value + (logps * 0).sum().sqrt(), diagnostics  # 0, but its slope is infinite

    monkeypatch.setattr(grpo_file, "grpo_loss", loss)
    with pytest.raises(ValueError, match=r"grpo step 0: loss .* gradient norm nan"):
        run("--stages=[grpo]")


def test_a_poisoned_weight_stops_sft(run, plain, own, checkpoint, tmp_path):
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(checkpoint / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="sft step 0: loss nan"):
        run(*own, f"--model.path={tmp_path}", "--stages=[sft]")


def test_a_learning_rate_that_destroys_the_weights_is_named(run, plain, lively):
    with pytest.raises(ValueError, match=r"grpo step \d.*grpo\.learning_rate"):
        run("--stages=[grpo]", "--rewards.letters=1", "--grpo.learning_rate=1e30")


def test_a_figure_that_is_no_number_is_null(tmp_path):
    log = MetricsLog(tmp_path, World(0, 1, torch.device("cpu")))
    log.stage("grpo", 1)
    log.step(0, {"reward": float("nan"), "loss": 1.5})
    assert log.end_stage() > 0
    assert metrics(tmp_path) == [{"stage": "grpo", "step": 0, "reward": None, "loss": 1.5}]


# two ranks


def test_the_second_rank_writes_nothing(tmp_path):
    log = MetricsLog(tmp_path, World(1, 2, torch.device("cpu")))
    log.stage("sft", 1)
    log.step(0, {"loss": 1.0})
    log.end_stage()
    assert not list(tmp_path.iterdir())


def test_the_report_shows_each_answer_under_its_own_row(tmp_path, monkeypatch):
    class Half(World):
        def sum(self, *values):
            return list(values)

        def most(self, number):
            return number

        def gather_objects(self, answers):
            return [answers, [Answer(rows[i].completion, float(i == 3), None) for i in (1, 3, 5)]]

    def perfect(model, processor, batch, *_):
        texts = [row.completion for row in batch]
        return Rollout([], [], texts, torch.ones(len(batch), 2), [(56, 56)] * len(batch))

    rows = Shapes(6, "report")
    monkeypatch.setattr("minivlmrl.run.evaluate.rollout", perfect)
    result = train.evaluate(None, None, rows, SamplingConfig(), Half(0, 2, torch.device("cpu")))
    assert [answer.text for answer in result.answers] == [rows[i].completion for i in range(6)]
    figure = strip(rows, {"start": result})
    for i, axis in enumerate(figure.axes):
        [said] = axis.texts
        assert answer(rows[i].columns["solution"]) == rows[i].completion
        assert axis.get_title() == rows[i].columns["solution"]
        assert said.get_text() == f"start\n{rows[i].columns['solution']}"
        assert said.get_color() == (report.WRONG if i in (1, 5) else report.RIGHT)
        assert not axis.lines  # no boxes


# boxes


def strip(rows, results):
    """The lower half of the report."""
    plt = pytest.importorskip("matplotlib.pyplot")
    figure = plt.figure()
    report._strip(figure, rows, results)
    plt.close(figure)
    return figure


def test_the_report_draws_true_and_answered_boxes():
    """In the picture of each row: black the truth, dotted the box before, dashed after, coloured by score."""

    def said(i, box, score):
        return Answer(f"<think>7 7 7 7</think><answer>{box}</answer>", score, (8, 8))

    rows = Localisation(3, "test")
    true = [" ".join(str(v // 7) for v in rows[i].columns["solution"]) for i in range(3)]
    before = [said(0, true[0], 1.0), said(1, "0 0 1 1", 0.1), said(2, "no box", 0.0)]
    after = [said(0, true[0], 1.0), said(1, true[1], 1.0), said(2, "0 0 8 8", 0.2)]
    results = {name: train.Evaluation(0, 0, 0, a) for name, a in (("start", before), ("after_sft", after))}
    axes = strip(rows, results).axes
    drawn = [
        [(line.get_color(), line.get_linestyle(), *corners(line)) for line in axis.lines] for axis in axes
    ]  # fmt: skip
    truth = [tuple(rows[i].columns["solution"]) for i in range(3)]
    assert drawn == [  # row 1 became right and comes first
        [("black", "-", *truth[1]), (report.WRONG, ":", 0, 0, 7, 7), (report.RIGHT, "--", *truth[1])],
        [("black", "-", *truth[0]), (report.RIGHT, ":", *truth[0]), (report.RIGHT, "--", *truth[0])],
        [("black", "-", *truth[2]), (report.WRONG, "--", 0, 0, 56, 56)],
    ]
    assert [axis.get_title() for axis in axes] == [rows[i].columns["problem"] for i in (1, 0, 2)]


def corners(line):
    """Edges of an outline; pixel 0 is drawn from -0.5 to 0.5."""
    x, y = ([value + 0.5 for value in values] for values in line.get_data())
    return min(x), min(y), max(x), max(y)


@pytest.mark.parametrize(
    ("solution", "count"), [([7, 14, 35, 42], 1), ([[7, 14, 35, 42], [0, 0, 7, 7]], 2), ("[7, 14, 35, 42]", 1)]
)
@pytest.mark.parametrize("column", ["problem", "prompt"])
def test_the_report_draws_solutions_and_prompts_in_every_form(solution, count, column):
    """Rewards read all of these; a row of one's own may ask by `prompt` instead of `problem`."""
    row = Localisation(1, "test")[0]
    row.columns = {column: "box the black circle", "solution": solution}
    results = {"start": train.Evaluation(0, 0, 0, [Answer("[14, 28, 70, 84]", 1.0, (112, 112))])}
    [axis] = strip([row], results).axes
    true = [line for line in axis.lines if line.get_color() == report.TRUE]
    assert [corners(line) for line in true] == [(7, 14, 35, 42), (0, 0, 7, 7)][:count]
    [answered] = [line for line in axis.lines if line.get_color() == report.RIGHT]
    assert corners(answered) == (7, 14, 35, 42)
    assert axis.get_title() == "box the black circle"


LOCALISATION = ROOT / "recipes" / "localisation.yaml"
SMALL = [
    "--num_threads=1", "--data.eval_rows=12", "--data.demonstrations=8",
    *[f"--{stage}.{option}" for stage in ("sft", "grpo")
      for option in ("max_steps=2", "prompts_per_step=4", "micro_batch_size=4")],
]  # fmt: skip


def test_the_localisation_recipe_runs(run, monkeypatch, capsys):
    outlines, original = [], report._outline
    monkeypatch.setattr(report, "_outline", lambda *arguments: outlines.append(arguments) or original(*arguments))
    folder = run(*SMALL, recipe=LOCALISATION)
    table, held_out = summary(folder), Localisation(12, "test")
    assert list(table) == ["chance", "start", "after_sft", "after_grpo", "seconds"]
    assert table["chance"] == constant_box(held_out)[1]
    assert any(held_out[i].columns["unseen"] for i in range(12))
    for name in ("start", "after_sft", "after_grpo"):
        assert list(table[name]) == [
            "sampled", "greedy", "format", "acc_0_5 sampled", "acc_0_5 greedy", "unseen sampled", "unseen greedy",
        ]  # fmt: skip
        assert all(0 <= figure <= 1 for figure in table[name].values())
    lines = metrics(folder)
    assert [(line["stage"], line["step"]) for line in lines] == [(s, i) for s in ("sft", "grpo") for i in (0, 1)]
    assert {"rewards/iou", "rewards/box_format", "kl"} <= set(lines[-1])
    assert sum(color == report.TRUE for *_, color, _ in outlines) == report.SHOWN
    with PIL.Image.open(folder / "report.png") as image:
        assert image.size[0] > 1000
    load_model(folder / "checkpoint")
    said = capsys.readouterr().out
    assert "after grpo" in said and "unseen greedy" in said and f"constant box {table['chance']:>9.3f}" in said


def test_the_localisation_recipe_repeats_to_the_byte(run, plain):
    first, second = (run(*SMALL, recipe=LOCALISATION, name=name) for name in ("a", "b"))
    assert (first / "metrics.jsonl").read_bytes() == (second / "metrics.jsonl").read_bytes()
    assert summary(first) | {"seconds": 0} == summary(second) | {"seconds": 0}


def test_eval_rewards_say_what_is_reported(run, plain):
    """The first is what counts, the second the form, further ones have figures of their own."""
    options = ["--stages=[]", "--data.task=localisation", "--data.eval_rows=2"]
    tables = [
        summary(run(*options, f"--data.eval_rewards=[{names}]", name=names))["start"]
        for names in ("giou, format", "iou, box_format, acc_0_5, giou")
    ]
    assert list(tables[0]) == ["sampled", "greedy", "format"]
    assert list(tables[1]) == [
        "sampled", "greedy", "format", "acc_0_5 sampled", "acc_0_5 greedy", "giou sampled", "giou greedy",
    ]  # fmt: skip
    assert tables[0]["greedy"] == tables[1]["giou greedy"] == -1  # an untrained model answers no box
    assert tables[1]["greedy"] == 0


def test_an_eval_reward_that_nobody_can_answer_is_refused(run, plain):
    """The reward model judges training's rollouts only."""
    with pytest.raises(ValueError, match="reward_model"):
        run("--stages=[]", "--data.eval_rewards=[reward_model, format]")


def test_localisation_trains_on_from_a_checkpoint(run, plain):
    first = run(*SMALL, "--stages=[sft]", "--sft.max_steps=1", recipe=LOCALISATION, name="a")
    model = ["--model.config=null", f"--model.path={first / 'checkpoint'}"]
    second = run(*SMALL, *model, "--stages=[grpo]", "--grpo.max_steps=1", recipe=LOCALISATION, name="b")
    assert summary(second)["start"] == summary(first)["after_sft"]
