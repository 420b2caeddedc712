"""Test whole runs through train_recipe: output files, exact repetition, and refused recipes."""

import functools
import json
import os
import re
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
import yaml

from minivlmrl.config.loading import load_config
from minivlmrl.distributed import process_group
from minivlmrl.distributed.process_group import World
from minivlmrl.model.checkpoint import load_model
from minivlmrl.run.callbacks import Callback
from minivlmrl.run.loop import run_training
from minivlmrl.trainers import sft as sft_file
from tests.helpers.runs import metrics, summary

ROLLOUT = {"reward", *(f"rewards/{name}/{kind}" for name in ("format", "accuracy") for kind in ("mean", "std"))}
ROLLOUT |= {f"completions/{of}_{kind}length" for of in ("mean", "min", "max") for kind in ("", "terminated_")}
ROLLOUT |= {"completions/clipped_ratio"}


def test_the_files_and_metrics_of_a_run(run, capsys):
    folder = run()
    assert sorted(path.name for path in folder.iterdir()) == [
        ".minivlmrl", ".minivlmrl.lock", "checkpoint", "completions.jsonl", "config.yaml", "evaluations.jsonl",
        "images", "metrics.jsonl", "report.html", "summary.json", "timings.jsonl", "warnings.jsonl",
    ]  # fmt: skip
    load_model(folder / "checkpoint")
    printed = capsys.readouterr().out
    assert re.search(r"\nchance +0\.083 +0\.083\nstart( +\d\.\d{3}){3}\nafter sft ", printed)
    assert re.search(r"\nafter grpo .*\ntraining: sft \d+\.\d s, grpo \d+\.\d s\n", printed)
    table = summary(folder)
    assert list(table) == ["chance", "start", "after_sft", "after_grpo", "seconds"]
    assert table["chance"] == 1 / 12
    for stage in ("start", "after_sft", "after_grpo"):
        assert list(table[stage]) == ["eval/accuracy_sampled", "eval/accuracy_greedy", "eval/format_sampled"]
        assert all(0 <= share <= 1 for share in table[stage].values())
    assert list(table["seconds"]) == ["sft", "grpo"]
    assert all(seconds > 0 for seconds in table["seconds"].values())
    for file in ("metrics.jsonl", "timings.jsonl"):
        steps = [(line["stage"], line["step"]) for line in metrics(folder, file)]
        assert steps == [(s, i) for s in ("sft", "grpo") for i in range(3)]
    sft, *_, grpo = metrics(folder)
    assert set(sft) == {"stage", "step", "loss", "entropy", "grad_norm", "learning_rate"}
    assert set(grpo) == {
        "stage", "step", "loss", "entropy", "grad_norm", "learning_rate", "reward_std", "group_reward_std",
        "frac_reward_zero_std",
        "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "rollout/logp_mismatch",
        "rollout/logp_mismatch_rms",
    } | ROLLOUT  # fmt: skip


def test_the_metrics_of_the_other_stages(run, quick):
    """Only dpo and reward_model compare two answers, and so report eval/pair_accuracy."""
    folder = run("--stages=[sft, dpo, reward_model, ppo]", "--ppo.kl_coef=0.1", "--data.eval_rows=5")
    _, dpo, reward_model, ppo = (line for line in metrics(folder) if line["step"] == 1)
    common = {"stage", "step", "loss", "grad_norm", "learning_rate"}
    pairs = {"rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"}
    assert set(dpo) == common | pairs | {"entropy", "logps/chosen", "logps/rejected"}
    assert set(reward_model) == common | pairs
    assert set(ppo) == common | {
        "policy_loss", "value_loss", "approx_kl", "clip_ratio/policy", "clip_ratio/value", "ratio", "entropy",
        "rollout/logp_mismatch", "rollout/logp_mismatch_rms",
    } | ROLLOUT  # fmt: skip
    table = summary(folder)
    judged = [name for name, values in table.items() if name != "seconds" and "eval/pair_accuracy" in str(values)]
    assert judged == ["after_dpo", "after_reward_model"]
    assert all(table[name]["eval/pair_accuracy"] * 5 in range(6) for name in judged)


def test_the_written_config_repeats_the_run_from_any_folder(run, quick, tmp_path, monkeypatch):
    first = run("--grpo.learning_rate=1e-3", "--seed=3", name="a")
    monkeypatch.chdir(tmp_path)
    second = run(name="b", recipe=first / "config.yaml")
    assert (first / "metrics.jsonl").read_bytes() == (second / "metrics.jsonl").read_bytes()
    configs = [yaml.safe_load((folder / "config.yaml").read_text()) for folder in (first, second)]
    assert configs[0] | {"output_dir": ""} == configs[1] | {"output_dir": ""}


@pytest.mark.parametrize(("option", "variable", "ranks", "expected"), [
    (2, "3", 1, 2), (None, "", 1, 8), (None, "3", 1, 3), (None, "5,2", 1, 5), (None, "0", 1, 8), (None, "many", 1, 8),
    (None, "1", 1, 1), (None, "1", 2, 4), (None, "3", 2, 3), (None, "", 9, 1),
])  # fmt: skip
def test_num_threads(monkeypatch, option, variable, ranks, expected):
    chosen = []
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    process_group.setup(option, 60, sharded=False)
    assert chosen == [expected]


@pytest.mark.parametrize(("overrides", "message"), [
    (["--model.config=null"], r"model: set exactly one of model\.path .* and model\.config"),
    (["--rewards={own.py: 1}"], r"unknown reward 'own\.py'; .*; write own\.py:FUNCTION$"),
    (["--stages=sft, grpo"], r"unknown stage 'sft, grpo'; known .*name; write \[sft, grpo\]$"),
    (["--stages=[gropo]"], r"unknown stage 'gropo'; known .* dpo, grpo, .* sft, file\.py:name; did you mean grpo\?$"),
    (["--stages=[sft, ppo]", "--rewards=null"], "rewards is None"),
    (["--data.box_space=pixels"], "box_space.*'pixels'.*original.*resized.*thousandths.*unit"),
])  # fmt: skip
def test_invalid_recipes_are_refused(run, quick, overrides, message):
    with pytest.raises(ValueError, match=message):
        run(*overrides)


def test_a_step_that_the_ranks_cannot_share_is_refused_before_anything_is_loaded(run, monkeypatch):
    monkeypatch.setattr("minivlmrl.distributed.process_group.setup", lambda *_: World(0, 3, torch.device("cpu")))
    monkeypatch.setattr("minivlmrl.run.setup.load_datasets", None)  # calling it would fail
    monkeypatch.setattr("minivlmrl.run.loop.locked", lambda *_: nullcontext())
    monkeypatch.setattr("minivlmrl.run.loop.check_same", lambda *_: None)
    message = r"grpo\.prompts_per_step is 4, but it must be a multiple of 3, the number of ranks$"
    with pytest.raises(ValueError, match=message):
        run("--stages=[sft, grpo]", "--sft.prompts_per_step=3")


def test_memory_is_checked_before_rows_and_weights_are_read(run, user_data, monkeypatch):
    for name in ("load_datasets", "build_processor", "build_weights"):
        monkeypatch.setattr(f"minivlmrl.run.setup.{name}", None)  # calling it would fail
    refuse = Mock(side_effect=ValueError("sft needs more"))
    monkeypatch.setattr("minivlmrl.monitor.memory.memory_check.check_disk", refuse)
    with pytest.raises(ValueError, match="sft needs more"):
        run(*user_data, "--stages=[sft]")


def test_a_misspelled_hook_is_refused():
    with pytest.raises(ValueError, match=r"Mine\.on_step_ends would never be called; did you mean on_step_end"):
        type("Mine", (Callback,), {"on_step_ends": print})


def test_callbacks_are_called_in_order_and_do_not_change_the_run(run, home, tmp_path, quick):
    options = ["--stages=[sft]", "--sft.max_steps=2", "--eval_steps=1", "--state_steps=2"]
    config = load_config(home / "recipe.yaml", [f"--output_dir={tmp_path / 'a'}", *options])
    recorder = Mock(spec=Callback)
    recorder.state_dict.return_value = {"recorder": "text"}
    assert run_training(config, [recorder]) == 0
    step = ["on_step_begin", "after_step", "on_step_end", "on_evaluation"]
    begin = ["on_recipe", "on_setup", "on_rows", "on_model", "on_run_begin", "on_evaluation", "on_stage_begin"]
    assert [name for name, *_ in recorder.mock_calls] == [*begin, *step, *step[:3], "state_dict", step[3], "on_run_end"]
    losses = [line["loss"] for line in metrics(tmp_path / "a")]
    assert [call.args[3]["loss"] for call in recorder.on_step_end.mock_calls] == losses
    assert [call.args for call in recorder.on_evaluation.mock_calls] == [("sft", done, 4) for done in range(3)]
    saved = json.loads((tmp_path / "a" / "states" / "000002" / "run.json").read_text())
    assert saved["logs"] == {"recorder": "text"}
    assert not (tmp_path / "a" / "report.html").exists() and not (tmp_path / "a" / "warnings.jsonl").read_text()
    usual = run(*options, name="b")
    for name in ("metrics.jsonl", "evaluations.jsonl", "completions.jsonl", "checkpoint/model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (usual / name).read_bytes()


NOT_FINITE = {  # changes of the loss, and the sentence
    "loss": (lambda loss, logps: loss * float("nan"), "the loss nan"),
    "gradient": (lambda loss, logps: loss + (logps * 0).sum().sqrt(), "the loss .* gradient norm nan"),  # adds 0
}


@pytest.mark.parametrize("name", NOT_FINITE)
def test_a_step_that_is_not_finite_stops_the_run_before_the_update(run, quick, monkeypatch, name):
    options = ["--stages=[sft]", "--save_steps=1", "--sft.lr_scheduler_type=constant"]
    good = run(*options, "--sft.max_steps=1", name="good")
    bad = good.with_name("bad")
    original = sft_file.sft_loss
    change, sentence = NOT_FINITE[name]

    @functools.wraps(original)
    def loss(logps, *arguments, **counts):
        value = original(logps, *arguments, **counts)
        return change(value, logps) if len(metrics(bad)) == 1 else value

    monkeypatch.setattr(sft_file, "sft_loss", loss)
    with pytest.raises(ValueError, match=rf"sft step 1: {sentence}.* lower sft\.learning_rate"):
        run(*options, name="bad")
    kept = [(folder / "checkpoint" / "model.safetensors").read_bytes() for folder in (good, bad)]
    assert kept[0] == kept[1]  # the weights at step 0
    assert [line["step"] for line in metrics(bad)] == [0]
