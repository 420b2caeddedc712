"""Run one small case of each benchmark and check its numbers, but not its times."""

import importlib
import json
import os
import re
import subprocess
import sys

import pytest
import yaml

from minivlmrl.config.loading import flat, load_config, to_yaml
from minivlmrl.trainers.registry import find_trainers
from tests.helpers.links import ROOT


@pytest.mark.slow
def test_parts_for_a_gpu_write_what_they_printed_and_logged(tmp_path):
    parts = "self_test", "step", "minimal_dpo"
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", tmp_path, "--toy", "--only", *parts]
    subprocess.run(command, check=True, env=os.environ | {"MINIVLMRL_KERNELS": "auto"})
    found = {part: json.loads((tmp_path / f"{part}.json").read_text()) for part in parts}
    assert all(part["status"] == 0 and part["printed"] for part in found.values())
    [timings], [metrics] = found["step"]["timings"], found["step"]["metrics"]
    assert timings["phases"]["backward"] > 0 and metrics["grad_norm"] > 0


@pytest.mark.slow
def test_grpo_step(monkeypatch, tmp_path):
    """The script itself asserts that ids and pixels of a prompt are equal."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    grpo_step = importlib.import_module("grpo_step")
    monkeypatch.setattr(grpo_step, "CASES", ((56, 2, 14), (224, 1, 20)))
    monkeypatch.setattr(sys, "argv", ["grpo_step.py", "--steps=1", f"--json={tmp_path / 'out.json'}"])
    grpo_step.main()
    cases = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert [case["prompt_tokens"] for case in cases] == [48, 288]
    for side in grpo_step.SIDES:
        for seconds in (case["sides"][side] for case in cases):
            assert seconds.keys() == {"step", *grpo_step.PARTS} and min(seconds.values()) > 0


@pytest.mark.slow
def test_learning(tmp_path):
    short = ["--data.eval_rows=2", "--sft.max_steps=1"]
    for stage in ("dpo", "reward_model", "grpo"):
        short += [f"--{stage}.max_steps=1", f"--{stage}.prompts_per_step=2"]
    names = ["shuffled rewards", "dpo", "reward model, grpo"]
    command = [sys.executable, ROOT / "benchmarks" / "learning.py", "--json", tmp_path / "out.json", "--seeds", "3"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for only in (names[:2], names):  # the second command trains what the file lacks
        subprocess.run([*command, "--only", *only, "--", *short], env=environment, check=True)
    found = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert len(found) == 3
    runs = {run["recipe"]: run for run in found}
    assert [*runs] == ["shapes.yaml", "shapes_dpo.yaml", "shapes_reward_model.yaml"]
    # after one step of SFT, all completions earn 0
    assert "equal for all completions" in str(runs["shapes.yaml"]["warnings"])
    assert runs["shapes_dpo.yaml"]["warnings"] == runs["shapes_reward_model.yaml"]["warnings"] == []
    assert "eval/pair_accuracy" in str(runs["shapes_dpo.yaml"]["results"])


@pytest.mark.slow
def test_same_curve(tmp_path):
    same_curve = importlib.import_module("benchmarks.same_curve")
    same_curve.main(["--toy", "--seeds=0", f"--work={tmp_path}", f"--json={tmp_path / 'out.json'}"])
    results = json.loads((tmp_path / "out.json").read_text())
    ours, theirs = results["runs"]
    assert (ours["side"], theirs["side"]) == same_curve.SIDES
    assert ours["steps"] == theirs["steps"] == [0, 1, 2] and ours["accuracy"][0] == theirs["accuracy"][0]
    for run in results["runs"]:
        assert run["cpu_seconds"][0] == 0 and run["cpu_seconds"] == sorted(run["cpu_seconds"])


def test_the_criterion_of_same_curve_pairs_runs_by_seed(scipy):
    same_curve = importlib.import_module("benchmarks.same_curve")
    accuracies = {
        "minivlmrl": ([0.0, 0.5, 0.1], [0.0, 0.5, 0.7], [0.0, 0.5, 0.4]),
        "TRL": ([0.0, 0.5, 0.2], [0.0, 0.5, 0.9]),
    }
    runs = [
        {"side": side, "seed": seed, "accuracy": values}
        for side, given in accuracies.items() for seed, values in enumerate(given)
    ]  # fmt: skip
    found = same_curve.compare(runs[::-1])["last"]
    assert (found["seeds"], found["seeds that TRL leads"]) == (2, 2)
    assert [found[name] for name in ("minivlmrl", "TRL", "lead")] == pytest.approx([0.4, 0.55, 0.15])
    low, high = found["interval"]
    assert low < 0 < high and found["p"] == pytest.approx(scipy.stats.ttest_rel([0.2, 0.9], [0.1, 0.7]).pvalue)


def test_the_criterion_of_methods_pairs_runs_by_seed(scipy):
    methods = importlib.import_module("benchmarks.methods")
    accuracies = {"sft": [0.5, 0.5, 0.4], "grpo": [0.6, 0.8, 0.7], "papo": [0.7, 0.9, 0.81], "nsr": [0.6, 0.9, 0.6]}
    runs = [
        {"arm": arm, "seed": seed, "accuracy": [0.1, value], "blind": [0.1, 0.3]}
        for arm, values in accuracies.items() for seed, value in enumerate(values)
    ]  # fmt: skip
    found = methods.compare(runs[::-1])
    assert found["sft"]["accuracy"] == {"mean": pytest.approx(1.4 / 3)}
    assert [found[arm]["accuracy"]["verdict"] for arm in ("grpo", "papo", "nsr")] == ["not shown", "more", "not shown"]
    for arm, start in (("grpo", "sft"), ("papo", "grpo"), ("nsr", "grpo")):
        low, high = scipy.stats.ttest_rel(accuracies[arm], accuracies[start]).confidence_interval()
        for measure in (found[arm]["accuracy"], found[arm]["sees"]):
            assert measure["difference"] == pytest.approx((low + high) / 2)
            assert measure["half_width"] == pytest.approx((high - low) / 2, rel=1e-3)
        assert found[arm]["blind"]["difference"] == 0


def test_a_study_runs_what_its_file_lacks(tmp_path):
    common = importlib.import_module("benchmarks.common")
    ran = []

    def run(arm: str, seed: int) -> dict:
        ran.append((arm, seed))
        return {"value": 2 * seed}

    keys = [{"arm": arm, "seed": seed} for arm in ("grpo", "gspo") for seed in (1, 2)]
    for part in (keys[1:3], keys):
        common.study(tmp_path / "out.json", part, run, lambda runs: {"sum": sum(run["value"] for run in runs)})
    assert ran == [("grpo", 2), ("gspo", 1), ("grpo", 1), ("gspo", 2)]
    results = json.loads((tmp_path / "out.json").read_text())
    assert [(run["arm"], run["seed"]) for run in results["runs"]] == ran and results["sum"] == 12
    assert all(run["commit"] == results["commit"] and run["cpu_seconds"] >= 0 for run in results["runs"])


@pytest.mark.parametrize(("gain", "shown"), [(0.3, "shows"), (0.01, "does not show"), (-0.3, "does the opposite")])
def test_the_criterion_of_a_page_is_a_paired_interval(scipy, gain, shown):
    papers = importlib.import_module("benchmarks.papers")
    theirs = [0.2, 0.5, 0.4, 0.1, 0.3]
    ours = [value + gain + noise for value, noise in zip(theirs, (0.02, -0.02, 0.05, -0.04, 0.0), strict=True)]
    found = papers.verdict("dppo", [[0.1, value] for value in ours], [[0.1, value] for value in theirs])
    low, high = scipy.stats.ttest_rel(ours, theirs).confidence_interval()
    assert found == (f"{sum(ours) / 5:.2f} against 0.30 with several steps ({low:+.2f} to {high:+.2f})", shown)


def test_arms_of_methods_have_the_options_of_grpo(monkeypatch):
    """An arm changes its stage, one function of its section, or the sampler, whose pictures the check must allow."""
    monkeypatch.chdir(ROOT)
    methods = importlib.import_module("benchmarks.methods")
    options, changed = {}, {}
    for arm in [arm for arm in methods.ARMS if arm != "sft"]:
        config = load_config("shapes.yaml", [*methods.COMMON, *methods.ARMS[arm]])
        [stage] = find_trainers(config)
        values = yaml.safe_load(to_yaml(config))
        options[arm] = flat({**values, "grpo": values.pop(stage), "stages": None})
        shared = options[arm].keys() & options["grpo"].keys()
        changed[arm] = {name for name in shared if options[arm][name] != options["grpo"][name]}
    assert changed == {
        "grpo": set(), "vppo": set(), "papo": set(), "pgpo": set(),
        "noisy_rollout": {"sampling.engine", "rollout.max_logp_mismatch"}, "nsr": {"grpo.advantages"},
        "aspo": {"grpo.loss_type"},
    }  # fmt: skip
    assert options["grpo"]["grpo.beta"] == 0


def test_the_page_says_of_methods_what_was_recorded(monkeypatch):
    """The verdicts in methods.json follow from its runs, and each number below the heading is one of its numbers."""
    methods = importlib.import_module("benchmarks.methods")
    recorded = json.loads((ROOT / "docs" / "curves" / "methods.json").read_text())
    assert methods.compare(recorded["runs"]) == recorded["comparison"]
    assert {"commit", "date", "processor", "command"} < recorded.keys()
    values = [value for arm in recorded["comparison"].values() for found in arm.values() if found != arm["seeds"]
              for value in found.values() if isinstance(value, float)]  # fmt: skip
    page = (ROOT / "docs" / "your_paper.md").read_text()
    section = page.partition("## What six papers did here")[2]
    numbers = re.findall(r"\d*\.\d+", section)
    assert len(numbers) > 40
    for number in numbers:
        decimals = len(number.partition(".")[2])
        assert any(f"{abs(value):.{decimals}f}" == number for value in values), number


def test_verdicts_of_old_and_new_runs_are_printed(tmp_path, monkeypatch, capsys):
    claims = importlib.import_module("benchmarks.claims")
    (tmp_path / "out.json").write_text(json.dumps({"runs": [{"name": "kl", "verdict": "holds here"}]}))
    monkeypatch.setitem(claims.TESTS, "length", lambda: ({}, False))
    monkeypatch.setattr("sys.argv", ["claims.py", "--json", str(tmp_path / "out.json"), "--only", "kl", "length"])
    claims.main()
    assert capsys.readouterr().out == "kl: holds here\nlength: does not hold here\n"


def test_an_exact_claim_is_as_recorded():
    runs = json.loads((ROOT / "docs" / "curves" / "claims.json").read_text())["runs"]
    [recorded] = [run for run in runs if run["name"] == "length"]
    claims = importlib.import_module("benchmarks.claims")
    assert (claims.begin(0, steps=0).answers().sum(1) - 1).abs().max() < 1e-12
    numbers, holds = claims.length()
    assert (numbers, claims.VERDICTS[holds]) == (recorded["numbers"], recorded["verdict"])
