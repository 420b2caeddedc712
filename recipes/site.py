"""A site of small screens, what recipes/site.yaml trains on: press 3 to 6 coloured buttons in the order of a goal.

A screen has a red, a green and a blue button. Their shapes and places are drawn anew each round, and a button is
pressed by naming its shape. A turn says which colour is next, then the shapes of the red, the green and the blue
button, and presses:
    <think>green square circle triangle</think><click>circle</click>
It is written from the newest screen and from what is left of the goal, whose last word is next: "blue red green". The
right button leads on, another one ends it. Nothing on a screen tells which colour is next.
Demonstrations are single turns of any round. Less than half of them press the colour that is next, the others red.
"""

import random
from dataclasses import dataclass

import PIL.Image
import PIL.ImageDraw

from minivlmrl.data.messages import conversation
from minivlmrl.data.rows import Row
from minivlmrl.data.tokenizer import train_tokenizer
from minivlmrl.tasks.registry import FRESH_ROWS, Task

COLORS = {"red": (220, 20, 20), "green": (20, 160, 20), "blue": (20, 20, 220)}
HABIT = "red"  # what the other demonstrations press
SHAPES = ["square", "triangle", "circle"]  # a token each
CHANCE = sum(len(SHAPES) ** -length for length in range(3, 7)) / 4  # of pressing anywhere
CELL = 28  # pixels a side of a quarter of the screen
BUTTON = 24


def draw_screen(rng: random.Random) -> tuple[PIL.Image.Image, dict[str, str]]:
    """Draw a button of each colour in three of the four quarters; returns their shapes by colour."""
    paper = tuple(rng.randint(200, 255) for _ in range(3))
    screen = PIL.Image.new("RGB", (2 * CELL, 2 * CELL), paper)
    pen = PIL.ImageDraw.Draw(screen)
    shapes = dict(zip(COLORS, rng.sample(SHAPES, 3), strict=True))
    quarters = rng.sample(range(4), 3)
    for (color, shape), quarter in zip(shapes.items(), quarters, strict=True):
        left = CELL * (quarter % 2) + (CELL - BUTTON) // 2
        top = CELL * (quarter // 2) + (CELL - BUTTON) // 2
        right = left + BUTTON - 1
        bottom = top + BUTTON - 1
        if shape == "square":
            pen.rectangle([left, top, right, bottom], COLORS[color])
        elif shape == "circle":
            pen.ellipse([left, top, right, bottom], COLORS[color])
        else:
            pen.polygon([((left + right) / 2, top), (left, bottom), (right, bottom)], COLORS[color])
    return screen, shapes


def draw_goal(rng: random.Random) -> list[str]:
    """Draw 3 to 6 colours; no two neighbours are alike."""
    goal = []
    for _ in range(rng.randint(3, 6)):
        goal.append(rng.choice([color for color in COLORS if color not in goal[-1:]]))
    return goal


class Site:
    """The environment."""

    max_tool_calls = 6
    declare_tools = False  # the call is in tags

    def reset(self, goal, site_key, **columns):
        self.goal = goal
        self.rng = random.Random(site_key)
        self.done = False
        self.right = 0
        self._next_screen()

    def click(self, shape: str) -> PIL.Image.Image:
        """Press the button of a shape: square, triangle or circle."""
        is_right = shape == self.shapes[self.goal[self.right]]
        self.right += is_right
        self.done = not is_right or self.right == len(self.goal)
        if not self.done:
            self._next_screen()
        return self.screen

    def observe(self, rounds: list[tuple[str, list[dict]]]) -> list[dict]:
        """Show the newest screen alone, and what is left of the goal, its next colour at the end."""
        left = self.goal[len(rounds) :]
        picture = {"type": "image", "image": self.screen}
        text = {"type": "text", "text": " ".join(reversed(left))}
        return [{"role": "user", "content": [picture, text]}]

    def get_reward(self) -> float:
        return self.right / len(self.goal)

    def _next_screen(self):
        self.screen, self.shapes = draw_screen(self.rng)


class Forgetful(Site):
    """A control: nothing is remembered, so that it does not know how far it is."""

    def observe(self, rounds):
        return super().observe([])


class Blind(Site):
    """A control: screens are grey."""

    def _next_screen(self):
        super()._next_screen()
        self.screen = PIL.Image.new("RGB", self.screen.size, "grey")


@dataclass
class Visits:
    """Rows drawn on demand: row i of a seed is always the same. A demonstration is a turn of any round."""

    size: int
    seed: str
    environment: type = Site
    demonstrated: bool = False
    informed: float = 0.45  # share of demonstrations that press what is next

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        site_key = f"site/{self.seed}/{index}"
        rng = random.Random(f"row/{site_key}")
        goal = draw_goal(rng)
        columns = {"goal": goal, "site_key": site_key, "solution": " ".join(goal)}
        site = self.environment()
        site.reset(**columns)
        num_pressed = rng.randrange(len(goal)) if self.demonstrated else 0
        for color in goal[:num_pressed]:
            site.click(site.shapes[color])
        color = goal[num_pressed]
        if rng.random() >= self.informed:
            color = HABIT
        [message] = site.observe([None] * num_pressed)
        picture, text = message["content"]
        turn = f"<think>{' '.join([color, *site.shapes.values()])}</think><click>{site.shapes[color]}</click>"
        return Row(conversation(text["text"], {"image": 1}), [picture["image"]], columns, turn)


def reached(environments, **columns):
    """Reward 1 for a goal that was reached. For evaluation."""
    return [float(site.right == len(site.goal)) for site in environments]


def pressed(environments, **columns):
    """Count the right buttons. For evaluation."""
    return [float(site.right) for site in environments]


def tokenizer():
    """Train byte-level BPE on everything the task says; a tag is a token."""
    base = ["system\nYou are a helpful assistant.", "assistant\n"]
    questions = [f"user\n{color} {color}" for color in COLORS]
    spoken = [" ".join(["red", *SHAPES]), *SHAPES, *COLORS]
    trained = train_tokenizer([*base, *questions, *spoken], vocab_size=384)
    for tag in ("think", "click"):
        trained.backend.add_tokens([f"<{tag}>", f"</{tag}>"])
    return trained


def task(**options) -> Task:
    """Make the task; with options of Visits a control."""

    def datasets(data, seed, demonstrations=FRESH_ROWS):
        training = {
            "demonstrations": Visits(demonstrations, f"{seed}/sft", demonstrated=True, **options),
            "prompts": Visits(FRESH_ROWS, f"{seed}/grpo", **options),
        }
        return training, Visits(data.eval_rows, "eval", **options)

    return Task(datasets, tokenizer, chance=lambda held_out: CHANCE, chance_name="chance")


TASK = task()
FORGETFUL = task(environment=Forgetful)
BLIND = task(environment=Blind)
