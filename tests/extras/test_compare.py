"""Test the comparison of two groups of runs."""

import json

import yaml
from pytest import approx

from minivlmrl.__main__ import main
from minivlmrl.extras.compare import compare, difference, read_run
from tests.helpers.runs import write_lines


def write_run(folder, seed, stage, accuracy, beta=0.0):
    folder.mkdir()
    sections = {"grpo": {"beta": 0.0, "max_steps": 3}}
    if stage != "grpo":  # the section of an own stage starts from grpo, and grpo stays in the recipe
        sections = {"grpo": {"beta": 0.2, "max_steps": 3}, stage: {"beta": beta, "max_steps": 3, "keep": 0.5}}
    (folder / "config.yaml").write_text(yaml.safe_dump({"seed": seed, **sections}))
    steps = [{"stage": "sft", "step": 0, "loss": 1.0}]
    steps += [{"stage": stage, "step": i, "loss": 2.0, "reward": seed + i} for i in range(3)]
    write_lines(folder / "metrics.jsonl", steps)
    lines = [{"stage": stage, "step": i, "eval/accuracy_greedy": accuracy * i / 3} for i in (0, 3)]
    write_lines(folder / "evaluations.jsonl", lines)
    return folder


def test_groups_of_seeds_are_compared_in_pairs(tmp_path, monkeypatch, capsys):
    """Stages may have different names; a seed that only one group has is in the mean, but in no pair."""
    monkeypatch.chdir(tmp_path)
    first = [write_run(tmp_path / f"a{i}", i, "grpo", value) for i, value in enumerate([0.2, 0.4, 0.6])]
    second = [write_run(tmp_path / f"b{i}", i, "mine", value, 0.1) for i, value in enumerate([0.3, 0.5, 0.7, 0.9])]
    rows = {name: others for name, *others in compare([[*map(read_run, group)] for group in (first, second)])}
    assert next(iter(rows)) == "eval/accuracy_greedy, step 4"
    means = ["0.400 (0.200 to 0.600)", "0.600 (0.300 to 0.900)", "+0.100 ± 0.000 over 3 seeds"]
    assert rows["eval/accuracy_greedy, step 4"] == means
    assert rows["loss, step 4"][2] == "+0.000 ± 0.000 over 3 seeds: these seeds do not show a difference"
    assert main(["report", *map(str, first), "--against", *map(str, second)]) == 0
    differing = "options that differ: grpo|mine.beta: 0.0, 0.1; grpo|mine.keep: absent, 0.5\n"
    printed = capsys.readouterr().out
    assert differing in printed and "The runs end" not in printed
    assert main(["report", str(first[0]), "--against", str(second[1])]) == 0
    assert "no interval: 0 seeds in common" in capsys.readouterr().out
    with (second[1] / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "mine", "step": 3, "loss": 2.0}\n')
    assert main(["report", str(first[0]), "--against", str(second[1])]) == 0
    assert "The runs end at steps 4, 5: each metric is compared at the last step" in capsys.readouterr().out
    assert main(["report", str(first[0]), str(first[0]), "--against", str(second[1])]) == 2
    assert "have the same seed; the seeds are [0, 0]" in capsys.readouterr().err


def test_the_interval_is_that_of_student(monkeypatch):
    """Differences 1, 2 and 3 have standard deviation 1; with 2 degrees of freedom, t is 4.303."""
    assert difference([(0, 1), (0, 2), (0, 3)]) == approx((2, 4.303 / 3**0.5))
    mean, half = difference([(0, i) for i in (1, 3) * 6])  # 11 degrees: t is 2.201
    assert (mean, half) == (2, approx(2.201 * (12 / 11) ** 0.5 / 12**0.5, rel=1e-3))
    assert difference([(0, 1)]) is None


def test_last_stages_with_different_names_share_a_curve(tmp_path):
    from minivlmrl.monitor.report import collect_run, join_stages

    runs = [collect_run(write_run(tmp_path / stage, 0, stage, 0.5)) for stage in ("grpo", "mine")]
    join_stages(runs)
    for run in runs:
        assert list(run["steps_per_point"]) == ["sft", "grpo|mine"]
        assert {line["stage"] for line in json.loads(json.dumps(run["metrics"]))} == {"sft", "grpo|mine"}
