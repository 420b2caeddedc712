"""Test recipes/site.py, a task with a context window: screens, remembered text, demonstrations, and controls."""

import random
import re
import runpy
from collections import Counter
from itertools import pairwise
from pathlib import Path

from runs import summary

from minivlmrl.config.options import DataOptions
from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.processor import Processor

ROOT = Path(__file__).parents[2]
TASK = runpy.run_path(str(ROOT / "recipes" / "site.py"))
GOAL = ["blue", "red", "green", "red"]


def visit(name="Site", goal=GOAL):
    site = TASK[name]()
    site.reset(goal=goal, site_key="a", solution="")
    return site


def text_of(site, rounds):
    [message] = site.observe([None] * rounds)
    picture, text = message["content"]
    assert picture["image"] is site.screen
    return text["text"]


def test_screens_show_every_button_and_not_which_is_next():
    for seed in range(20):
        screen, shapes = TASK["draw_screen"](random.Random(seed))
        assert sorted(shapes.values()) == sorted(TASK["SHAPES"]) and [*shapes] == [*TASK["COLORS"]]
        pixels = {value: count for count, value in screen.getcolors()}
        sizes = {shapes[color]: pixels[value] for color, value in TASK["COLORS"].items()}
        assert sizes["square"] == 24 * 24 > sizes["circle"] > sizes["triangle"] > 200
    goals = [TASK["draw_goal"](random.Random(seed)) for seed in range(50)]
    assert {len(goal) for goal in goals} == {3, 4, 5, 6}
    assert all(a != b for goal in goals for a, b in pairwise(goal))
    assert visit().screen.tobytes() == visit(goal=["red", "blue", "red"]).screen.tobytes()


def test_right_buttons_lead_on_and_another_one_ends_it():
    site, seen = visit(), set()
    for i, color in enumerate(GOAL):
        assert not site.done and text_of(site, i) == " ".join(GOAL[i:][::-1])
        seen.add(site.screen.tobytes())
        site.click(site.shapes[color])
    assert site.done and len(seen) == 4 and site.get_reward() == 1 and TASK["reached"]([site]) == [1]
    for wrong in ("green", None):  # a word that is no shape ends the episode, too
        site = visit()
        site.click(site.shapes["blue"])
        site.click(site.shapes.get(wrong, "hexagon"))
        assert site.done and site.get_reward() == 0.25 and TASK["pressed"]([site]) == [1]
    assert {text_of(visit("Forgetful"), i) for i in range(4)} == {"red green red blue"}
    assert len(visit("Blind").screen.getcolors()) == 1


def test_demonstrations_are_turns_of_any_round_and_tokens_of_a_turn_do_not_grow():
    """Thoughts describe the screen; less than half the demonstrations press the next colour, the others red."""
    training, held_out = TASK["TASK"].datasets(DataOptions(eval_rows=8), 0)
    tokenizer = TASK["tokenizer"]()
    processor = Processor(tokenizer, ImageProcessor(patch_size=7, min_pixels=14 * 14))
    counts = Counter()
    for i in range(200):
        row = training["demonstrations"][i]
        left = row.messages[0]["content"][1]["text"].split()
        color, red, green, blue, pressed = re.findall(r"\w+", re.sub("</?(think|click)>", " ", row.completion))
        assert {"red": red, "green": green, "blue": blue}[color] == pressed and color in ("red", left[-1])
        assert len(tokenizer.encode(row.completion)) == 9
        counts[len(row.columns["goal"]) - len(left)] += 1
        if left[-1] != "red":
            counts["next" if color == left[-1] else "habit"] += 1
    assert {0, 1, 2, 3, 4, 5} < {*counts} and 0.35 < counts["next"] / (counts["next"] + counts["habit"]) < 0.55
    row = held_out[3]
    first = row.prompt(processor)
    assert first.image_grid_thw.tolist() == [[1, 8, 8]]
    assert len(first.input_ids) < 48 and row.messages[0]["content"][1]["text"].split() == row.columns["goal"][::-1]


def test_the_recipe_runs(run, plain, monkeypatch):
    """Run both stages; GRPO begins before the model knows the answer format, so most trajectories are one turn."""
    monkeypatch.chdir(ROOT)
    small = [f"--{s}.{o}" for s in ("sft", "grpo") for o in ("max_steps=1", "prompts_per_step=4", "micro_batch_size=4")]
    folder = run("--num_threads=1", "--data.eval_rows=8", *small, recipe=ROOT / "recipes" / "site.yaml")
    assert {"eval/recipes/site.py:pressed_sampled"} <= set(summary(folder)["after_grpo"])
