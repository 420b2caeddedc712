"""Follow the arrows: a task whose larger pictures need a longer thought, and what `recipes/arrows.yaml` trains on.

A picture has 4 x 3 cells of twelve colours, one 14 x 14 token each, and arrows from cell to neighbour. "From red" asks
where they end. The thought lists the cells that are visited, here in two moves:
    <think> red blue green</think><answer> green</answer>
Demonstrations take one or two moves, prompts one to four. Other ways in the picture have as many moves, so that no cell
but the start tells which end is meant: who guesses one of the ends is right in .19, .30, .43 and .50 of the pictures.
"""

import random
import re
from dataclasses import dataclass
from itertools import pairwise

import PIL.Image
import PIL.ImageDraw

from minivlmrl.data.conversations import conversation
from minivlmrl.hub.tokenizer import train_tokenizer
from minivlmrl.rows import Row
from minivlmrl.tasks.task import FRESH_ROWS, Task

COLORS = {"red": (215, 30, 35), "green": (20, 140, 50), "blue": (40, 70, 220), "yellow": (240, 215, 30)}
COLORS |= {"purple": (130, 40, 150), "gray": (120, 120, 120), "pink": (255, 160, 200), "brown": (120, 70, 30)}
COLORS |= {"cyan": (70, 220, 225), "white": (250, 250, 250), "orange": (250, 140, 20), "lime": (160, 240, 60)}
COLUMNS, ROWS, CELL = 4, 3, 14  # cells across and down a picture, pixels a side of a cell
CELLS = [(x, y) for y in range(ROWS) for x in range(COLUMNS)]
MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))  # up, right, down, left
PROBLEM, ANSWER = "From {}", "<think> {}</think><answer> {}</answer>"


def ways(moves: int, rng: random.Random) -> list[list[tuple[int, int]]]:
    """Draw two or more ways of so many moves from cell to neighbour, as many as fit; they share no cell."""
    while True:
        free = set(CELLS)
        found = []
        for start in rng.sample(CELLS, len(CELLS)):
            way = [start] if start in free else []
            while way and len(way) <= moves:
                near = [(way[-1][0] + x, way[-1][1] + y) for x, y in MOVES]
                near = [cell for cell in near if cell in free and cell not in way]
                way = [*way, rng.choice(near)] if near else []
            found += [way] if way else []
            free -= set(way)
        if len(found) > 1:
            return found


def draw(colors: dict, arrows: dict) -> PIL.Image.Image:
    """Draw the cells; an arrow has a black shaft in its own cell, and a head of that colour in the next one."""
    image = PIL.Image.new("RGB", (COLUMNS * CELL, ROWS * CELL))
    pen = PIL.ImageDraw.Draw(image)
    middle = (CELL - 1) / 2
    for (x, y), color in colors.items():
        pen.rectangle((x * CELL, y * CELL, (x + 1) * CELL - 1, (y + 1) * CELL - 1), fill=COLORS[color])
    for (x, y), (to_x, to_y) in arrows.items():
        u = to_x - x
        v = to_y - y

        def at(along, across, x=x, y=y, u=u, v=v):
            return x * CELL + middle + along * u - across * v, y * CELL + middle + along * v + across * u

        pen.polygon([at(-2, -1), at(-2, 1), at(6, 1), at(6, -1)], fill="black")
        pen.polygon([at(7.5, -4.5), at(7.5, 4.5), at(12.5, 0)], fill=COLORS[colors[x, y]])
    return image


@dataclass
class Arrows:
    """Pictures drawn on demand: row i of a seed is always the same; those with more than two moves are `unseen`."""

    size: int
    seed: str
    fewest: int = 1  # moves
    most: int = 4
    blank: bool = False  # no arrow is drawn: a control

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        rng = random.Random(f"arrows/{self.seed}/{index}")
        moves = rng.randint(self.fewest, self.most)
        way, *others = ways(moves, rng)
        colors = dict(zip(CELLS, rng.sample(list(COLORS), len(CELLS)), strict=True))
        arrows = {here: there for cells in (way, *others) for here, there in pairwise(cells)}
        names = [colors[cell] for cell in way]
        problem = PROBLEM.format(names[0])
        columns = {"problem": problem, "solution": names[-1], "moves": moves, "unseen": moves > 2}
        image = draw(colors, {} if self.blank else arrows)
        return Row(conversation(problem, {"image": 1}), [image], columns, ANSWER.format(" ".join(names), names[-1]))


def correct(answer_texts, solution, moves, k=1, **columns):
    """Reward 1 for the right colour; rows with other than k moves are not judged. For evaluation."""
    texts = [(text or "").strip() for text in answer_texts]
    return [float(a == s) if m == k else None for a, s, m in zip(texts, solution, moves, strict=True)]


def thought(completions, moves, k=1, **columns):
    """Count the moves that are listed in the thought of rows with k moves. For evaluation."""
    texts = [re.match(r"<think>([a-z ]*)", text) for text in completions]
    return [float(len(t[1].split()) - 1 if t else 0) if m == k else None for t, m in zip(texts, moves, strict=True)]


def tokenizer():
    """Train byte-level BPE on everything the task says: every colour is one token."""
    said = [text.format(*[name] * 2) for name in COLORS for text in (ANSWER, f"user\n{PROBLEM}")]
    return train_tokenizer(["system\nYou are a helpful assistant.", "assistant\n", *said], vocab_size=512)


def task(fewest: int = 1, blank: bool = False) -> Task:
    """Make the task, or a control of it."""

    def datasets(data, seed, demonstrations=FRESH_ROWS):
        demonstrations = Arrows(demonstrations, f"{seed}/sft", most=2, blank=blank)
        prompts = Arrows(FRESH_ROWS, f"{seed}/grpo", fewest, blank=blank)
        return {"demonstrations": demonstrations, "prompts": prompts}, Arrows(data.eval_rows, "eval", blank=blank)

    return Task(datasets, tokenizer, chance=lambda held_out: 1 / len(COLORS), chance_name="chance")


TASK = task()
HARD = task(fewest=3)
BLANK = task(blank=True)
