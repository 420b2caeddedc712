"""Environment for recipes/site.yaml: an agent presses 3 to 6 coloured buttons in the order that a goal gives.

A screen shows a red, a green and a blue button. Their shapes and positions are random in each round, and the agent
presses a button by naming its shape. A turn names the next colour, then the shapes of the red, the green and the blue
button, and presses a button:
    <think>green square circle triangle</think><click>circle</click>
The agent only gets the newest screen and the remaining goal, whose last word is the next colour: "blue red green". The
correct button leads to the next screen; any other button ends the episode. A screen does not show the next colour.
Demonstrations are single turns from any round. Less than half press the next colour; the remaining demonstrations press
red.
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
HABIT = "red"  # the button colour that uninformed demonstrations always press
SHAPES = ["square", "triangle", "circle"]  # each is one token
CHANCE = sum(len(SHAPES) ** -length for length in range(3, 7)) / 4  # success rate with random presses
CELL = 28  # side in pixels of a screen quarter
BUTTON = 24


def draw_screen(rng: random.Random) -> tuple[PIL.Image.Image, dict[str, str]]:
    """Draw a screen with a button for each colour in three of the four quarters.

    Returns:
        The screen, and the shape for each colour.
    """
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
    """Sample a goal with 3 to 6 colours, in which neighbours are different."""
    goal = []
    for _ in range(rng.randint(3, 6)):
        goal.append(rng.choice([color for color in COLORS if color not in goal[-1:]]))
    return goal


class Site:
    """Environment in which the agent presses buttons in the goal's order."""

    max_tool_calls = 6
    declare_tools = False  # calls are written in tags, so the prompt needs no tool descriptions

    def reset(self, goal, site_key, **columns):
        self.goal = goal
        self.rng = random.Random(site_key)
        self.done = False
        self.right = 0
        self._next_screen()

    def click(self, shape: str) -> PIL.Image.Image:
        """Press the button with a shape: square, triangle or circle."""
        is_right = shape == self.shapes[self.goal[self.right]]
        self.right += is_right
        self.done = not is_right or self.right == len(self.goal)
        if not self.done:
            self._next_screen()
        return self.screen

    def observe(self, rounds: list[tuple[str, list[dict]]]) -> list[dict]:
        """Return a message with the newest screen and the remaining goal, whose last word is the next colour."""
        left = self.goal[len(rounds) :]
        picture = {"type": "image", "image": self.screen}
        text = {"type": "text", "text": " ".join(reversed(left))}
        return [{"role": "user", "content": [picture, text]}]

    def get_reward(self) -> float:
        return self.right / len(self.goal)

    def _next_screen(self):
        self.screen, self.shapes = draw_screen(self.rng)


class Forgetful(Site):
    """Control experiment: the goal is always shown in full, so the agent does not know its progress."""

    def observe(self, rounds):
        return super().observe([])


class Blind(Site):
    """Control experiment: all screens are grey images."""

    def _next_screen(self):
        super()._next_screen()
        self.screen = PIL.Image.new("RGB", self.screen.size, "grey")


@dataclass
class Visits:
    """Dataset with episodes that are created on demand. With the same seed, row i is always the same.

    A demonstration is a single turn from any round.
    """

    size: int
    seed: str
    environment: type = Site
    demonstrated: bool = False
    informed: float = 0.45  # fraction of demonstrations that press the next colour

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
    """Return 1 if the goal was reached, for evaluation."""
    return [float(site.right == len(site.goal)) for site in environments]


def pressed(environments, **columns):
    """Count the correct presses, for evaluation."""
    return [float(site.right) for site in environments]


def tokenizer():
    """Train byte-level BPE on all texts in the task; each tag is one token."""
    base = ["system\nYou are a helpful assistant.", "assistant\n"]
    questions = [f"user\n{color} {color}" for color in COLORS]
    spoken = [" ".join(["red", *SHAPES]), *SHAPES, *COLORS]
    trained = train_tokenizer([*base, *questions, *spoken], vocab_size=384)
    for tag in ("think", "click"):
        trained.backend.add_tokens([f"<{tag}>", f"</{tag}>"])
    return trained


def task(**options) -> Task:
    """Create the task; Visits' options make it a control."""

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
