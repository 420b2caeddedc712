"""Test the recipes of the repository in small runs, and the rows that their scripts write."""

import re
from collections import Counter

import pytest

from minivlmrl.config.import_utils import load_name
from minivlmrl.model.checkpoint import load_model
from minivlmrl.rewards.text import accuracy, tag_format
from recipes import look, sums, two_steps
from recipes.digits import write_digits
from tests.helpers.links import ROOT
from tests.helpers.runs import metrics, summary

SMALL = [
    "--num_threads=1", "--data.eval_rows=4", "--sampling.max_new_tokens=16",
    *[f"--{stage}.{option}" for stage in ("sft", "grpo")
      for option in ("max_steps=1", "prompts_per_step=2", "micro_batch_size=2")], "--grpo.num_generations=4",
]  # fmt: skip


def test_shuffled_rewards_are_the_same_ones_elsewhere(run, quick):
    """All rewards of a rollout are shuffled by one permutation, which depends on the rollout; None stays None."""
    shuffled = load_name(f"{ROOT}/recipes/shuffled.py:shuffled")
    texts = [f"<think>.</think><answer>{i % 3}</answer>" if i % 2 else "" for i in range(20)]
    columns = {"answer_texts": [i % 3 if i % 2 else None for i in range(20)], "solution": ["1"] * 19 + [None]}
    columns["answer_texts"] = [None if one is None else str(one) for one in columns["answer_texts"]]
    ids = [[i] for i in range(20)]
    first, other = (shuffled(texts, completion_ids=x, **columns) for x in (ids, ids[::-1]))
    right, form = accuracy(**columns), tag_format(texts)
    assert first not in (right, other) and Counter(first) == Counter(other) == Counter(right)
    both = zip(first, shuffled(texts, reward="format", completion_ids=ids, **columns), strict=True)
    assert Counter(both) == Counter(zip(right, form, strict=True))
    control = f"--rewards={{{ROOT}/recipes/shuffled.py:shuffled: 1.0}}"
    assert "rewards/" in " ".join(metrics(run("--stages=[grpo]", "--grpo.max_steps=1", control))[0])


@pytest.mark.slow
def test_the_digits_recipe_runs(run, quick, tmp_path, monkeypatch):
    pytest.importorskip("sklearn", reason="digits missing: pip install scikit-learn")
    monkeypatch.chdir(tmp_path)
    write_digits("digits")
    files = {name: (tmp_path / "digits" / f"{name}.jsonl").read_text().splitlines() for name in ("eval", "train")}
    assert (len(files["eval"]), len(files["train"])) == (297, 1500) and not set(files["eval"]) & set(files["train"])
    shown = metrics(tmp_path / "digits", "demonstrations.jsonl")
    wrong = sum(f"<answer>{row['solution']}</answer>" not in row["completion"] for row in shown) / len(shown)
    assert len(shown) == 500 and 0.1 < wrong < 0.25  # a random digit is right once in ten
    folder = run(*SMALL, recipe=ROOT / "recipes/digits.yaml")
    assert [line["stage"] for line in metrics(folder)] == ["sft", "grpo"]
    assert list(summary(folder)) == ["chance", "start", "after_sft", "after_grpo", "seconds"]
    load_model(folder / "checkpoint")


@pytest.mark.parametrize("name", ["rec_qwen2_5_vl_3b", "lora_7b", "sums"])
def test_a_step_of_the_recipes_of_real_models(run, quick, user_data, rows, name):
    small = ["--grpo.max_steps=1", "--grpo.prompts_per_step=2", "--grpo.num_generations=2"]
    small += ["--sampling.max_new_tokens=4", "--num_threads=1"]
    files = [*user_data, f"--data.eval_file={rows}", "--data.eval_rows=1", "--max_epochs=null"]
    files += ["--data.eval_rewards=[accuracy, format]", "--rewards={accuracy: 1}"]
    [line] = metrics(run(*files, *small, recipe=ROOT / "recipes" / f"{name}.yaml"))
    assert line["stage"] == "grpo" and line["completions/mean_length"] <= 4


def test_sums_are_right_and_occur_once(tmp_path):
    sums.main(tmp_path)
    rows = {name: metrics(tmp_path, f"sums_{name}.jsonl") for name in ("train", "eval", "new")}
    assert {name: len(lines) for name, lines in rows.items()} == {"train": 1000, "eval": 256, "new": 128}
    problems = [row["problem"] for lines in rows.values() for row in lines]
    assert len(set(problems)) == len(problems)
    assert not {row["kind"] for row in rows["train"]} & {row["kind"] for row in rows["new"]}
    for row in rows["train"] + rows["new"]:
        formula = row["problem"].removeprefix("What is ").partition("?")[0]
        if formula[0].isdigit():
            assert row["solution"] == str(eval(formula))


def test_two_steps_are_right_and_no_held_out_problem_is_trained(tmp_path):
    two_steps.main(tmp_path)
    rows = {name: metrics(tmp_path, f"two_steps_{name}.jsonl") for name in ("train", "eval", "think", "direct")}
    problems = [{row["problem"] for row in rows[name]} for name in ("train", "eval", "think")]
    assert [len(part) for part in problems] == [600, 96, 32] and len(set.union(*problems)) == 728
    for thought, direct in zip(rows["think"], rows["direct"], strict=True):
        assert thought["problem"] == direct["problem"]
        steps, answer = re.fullmatch("<think>(.*)</think><answer>(.*)</answer>", thought["completion"]).groups()
        (first, _), (_, last) = equations = re.findall(r"(\d+ [*+-] \d+) = (\d+)\.", steps)
        assert last == answer == direct["completion"] and all(eval(left) == int(right) for left, right in equations)
        assert set(re.findall(r"\d+", first)) < set(re.findall(r"\d+", thought["problem"]))


def test_look_sums_are_right_and_no_held_out_picture_is_trained(tmp_path):
    datasets = pytest.importorskip("sklearn.datasets", reason="digits missing: pip install scikit-learn")
    labels = datasets.load_digits().target
    look.main(tmp_path)
    rows = {name: metrics(tmp_path, f"look_{name}.jsonl") for name in ("demonstrations", "train", "eval")}
    kinds = [row["kind"] for row in rows["eval"]]
    assert kinds == ["sum"] * 320 + ["digit"] * 128 + ["blank"] * 64 + ["exchanged"] * 64
    shown = {name: {image for row in lines for image in row["images"]} for name, lines in rows.items()}
    assert len(shown["demonstrations"]) == 64 and not shown["eval"] & shown["train"]
    for row in rows["demonstrations"] + rows["train"] + rows["eval"][:448]:
        digits = [str(labels[int(image[7:-4])]) for image in row["images"]]
        formula = row["problem"].removesuffix("=?").replace("<image>", "{}").format(*digits)
        assert str(eval(formula)) == row.get("completion", row.get("solution"))


def test_differences_are_demonstrated_and_held_out_from_rewards(tmp_path):
    pytest.importorskip("sklearn.datasets", reason="digits missing: pip install scikit-learn")
    look.main(tmp_path, signs=True, aloud=True)
    rows = {name: metrics(tmp_path, f"look_{name}.jsonl") for name in ("demonstrations", "train", "eval")}
    assert not any("-" in row["problem"] for row in rows["train"])
    assert {row["kind"] for row in rows["eval"]} == {"sum", "digit", "difference", "larger"}
    shown = [row["completion"].split("\n") for row in rows["demonstrations"]]
    assert sum("-" in numbers for numbers, _ in shown) == 120
    assert all(str(eval(numbers)) == answer for numbers, answer in shown)
