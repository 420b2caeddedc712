"""Run one small case for each benchmark, and check the numbers that --json writes. No test depends on the time."""

import importlib
import json
import subprocess
import sys

import pytest
from links import ROOT


def run(tmp_path, script, *arguments):
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--json", str(tmp_path / "out.json"), *arguments]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    return result.stdout, json.loads((tmp_path / "out.json").read_text())


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """A function that runs a script's main in this process, for example call("grpo_step", "--steps=1", CASES=...).

    Keyword arguments replace constants in the script, so that it has less work.
    """
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.chdir(tmp_path)

    def call(script, *arguments, **less):
        for name, value in less.items():
            monkeypatch.setattr(f"{script}.{name}", value)
        monkeypatch.setattr(sys, "argv", [script, "--json", str(tmp_path / "out.json"), *arguments])
        importlib.import_module(script).main()
        return capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())

    return call


@pytest.mark.slow
def test_a_machine_without_other_trainers_measures_our_side():
    """A rented machine has neither TRL nor a network, so scripts import other trainers only where they compare them."""
    missing = "import sys; sys.modules.update(dict.fromkeys(('trl', 'datasets', 'transformers', 'liger_kernel')))"
    names = "gpu_kernels, gpu_parts, gpu_step, grpo_step"
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}", "PATH": "", "OMP_NUM_THREADS": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = "-1"
    run = "sys.argv[1:] = ['--toy', '--repeats=1']; gpu_step.main(); gpu_parts.step(toy=True)"
    command = [sys.executable, "-c", f"{missing}; import {names}; {run}"]
    table = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    assert table.count("transformers is not installed and is left out") == 2
    assert "| step | ours |" in table and '"name": "phase: rollout"' in table


@pytest.mark.slow
def test_grpo_step(call):
    """TRL and our trainer both run. The script asserts that their ids, pixels and log-probabilities are equal."""
    table, numbers = call("grpo_step", "--steps", "1", "--threads", "1", CASES=((56, 2, 14), (224, 1, 20)))
    assert "TRL ms" in table
    assert [case["prompt_tokens"] for case in numbers["cases"]] == [48, 288]
    assert all(case["ours_ms"] > 0 and case["trl_ms"] > 0 and case["ratio"] > 0 for case in numbers["cases"])
    assert f"control: the same step in two processes has the ratio {numbers['control']:.2f}" in table
    assert numbers["control"] > 0 and numbers["other_cores"] >= 0


def test_the_load_of_other_programs_leaves_out_our_own(monkeypatch, call):
    """In ten seconds, the machine was busy for 8 s, of which this process used 5 s."""
    load = importlib.import_module("grpo_step").OtherLoad
    times = iter([(0.0, 100.0), (10.0, 103.0)])
    monkeypatch.setattr(load, "now", lambda self: next(times))
    assert load().cores() == pytest.approx(0.3)


@pytest.mark.slow
def test_learning(tmp_path):
    short = ["--data.eval_rows=2", "--sft.max_steps=1"]
    for stage in ("dpo", "reward_model", "grpo"):
        short += [f"--{stage}.max_steps=1", f"--{stage}.prompts_per_step=2"]
    names = ["shuffled rewards", "dpo", "reward model, grpo"]
    table, numbers = run(tmp_path, "learning.py", "--seeds", "3", "--jobs", "2", "--only", *names, "--", *short)
    assert [(row["name"], row["seed"]) for row in numbers["runs"]] == [(name, 3) for name in names]
    assert "| no: " in table  # one step does not improve the model
    assert all("sampled" in row and row["cpu_seconds"] > 0 and row["warnings"] == [] for row in numbers["runs"])
    assert numbers["runs"][1]["pairs"] is not None


def test_an_adapter_adds_two_kernels_to_a_decode_step(monkeypatch):
    """With float32 adapters there would be five: three conversions, and products that GPUs compute slowly.

    An adapted layer also has a product each for q, k and v, which are otherwise one product.
    """
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    kernel_counts = importlib.import_module("kernel_counts")
    config = importlib.import_module("sizes").config_of("toy")
    plain, adapted = (kernel_counts.count(config, r) for r in (0, 4))
    num_adapters = 7 * config.num_hidden_layers
    separate = 2 * config.num_hidden_layers
    assert adapted[0].total() - plain[0].total() == 2 * num_adapters + separate
    assert adapted[0]["mm"] - plain[0]["mm"] == num_adapters
    assert adapted[0]["addmm"] - plain[0]["addmm"] == num_adapters + separate
    assert plain[0]["decode_attention"] == config.num_hidden_layers and plain[1] == adapted[1]
    assert adapted[2].total() - plain[2].total() == 5 * num_adapters  # the trainer's adapters stay float32
