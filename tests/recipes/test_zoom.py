"""Test recipes/zoom.py, a task whose answer is visible only in a crop."""

import random
import runpy

from minivlmrl.config.options import DataOptions
from tests.helpers.links import ROOT
from tests.helpers.runs import summary

RECIPE = ROOT / "recipes" / "zoom.yaml"
TASK = runpy.run_path(str(ROOT / "recipes" / "zoom.py"))


def test_what_is_shown_does_not_tell_the_label():
    """For all 12 labels, the shrunk images are equal and the crops differ, whatever the seed."""
    for seed in range(10):
        drawn = [TASK["draw"](random.Random(seed), label) for label in TASK["LABELS"]]
        assert len({TASK["shown"](image).tobytes() for image, *_ in drawn}) == 1
        assert len({TASK["crop"](image, quarter).tobytes() for image, _, quarter in drawn}) == 12


def rows(count=60):
    training, _ = TASK["TASK"].datasets(DataOptions(eval_rows=count), 0)
    return [training["demonstrations"][i] for i in range(count)]


def parts_of(row):
    """Return the place of the stripes in the thought, the requested corner, the crop and the answer of a row."""
    message, crop, answer = row.completion[0]["content"]
    place, _, requested = message["text"].partition("<zoom>")
    place = place.removeprefix("<think>").removesuffix("</think>")
    return place, requested.removesuffix("</zoom>"), crop["image"], answer["text"]


def test_a_demonstration_says_the_place_looks_anywhere_and_reads_what_is_there():
    found = rows()
    for row in found:
        place, requested, crop, answer = parts_of(row)
        right, label = row.columns["corner"], row.columns["solution"]
        assert place == right and row.images[0].size == (32, 32)
        assert answer == f"<answer>{label if requested == right else 'nothing'}</answer>"
        tool = TASK["Quarters"]()
        tool.reset(**row.columns)
        assert tool.zoom(requested).tobytes() == crop.tobytes()
    looks = [parts_of(row)[1] == row.columns["corner"] for row in found]
    assert 5 < sum(looks) < 25  # a quarter of 60 is 15


def test_the_recipe_runs(run, quick, monkeypatch):
    """GRPO begins before the model knows the answer format, so most completions call no tool."""
    monkeypatch.chdir(ROOT)
    small = [f"--{s}.{o}" for s in ("sft", "grpo") for o in ("max_steps=1", "prompts_per_step=2", "micro_batch_size=2")]
    table = summary(run("--num_threads=1", "--data.eval_rows=2", *small, recipe=RECIPE))
    assert {"eval/recipes/zoom.py:looks_sampled"} <= set(table["after_grpo"])
