"""Task for recipes/arrows.yaml: follow arrows through an image. Longer paths need a longer thought.

An image has 4 x 3 cells with twelve colours and arrows between neighbouring cells. Each cell is one token with 14 x 14
pixels. The prompt "From red" asks for the cell in which the arrows from red end. The thought lists the visited cells,
for example for a path with two moves:
    <think> red blue green</think><answer> green</answer>
Demonstrations have one or two moves, and prompts have one to four. An image contains several equally long paths, so the
correct end depends on the start. A random guess among the ends is correct for 0.19, 0.30, 0.43 and 0.50 of the images
with one, two, three and four moves.
"""

import random
import re
from dataclasses import dataclass
from itertools import pairwise

import PIL.Image
import PIL.ImageDraw

from minivlmrl.data.messages import conversation
from minivlmrl.data.rows import Row
from minivlmrl.data.tokenizer import train_tokenizer
from minivlmrl.tasks.registry import FRESH_ROWS, Task

COLORS = {
    "red": (215, 30, 35),
    "green": (20, 140, 50),
    "blue": (40, 70, 220),
    "yellow": (240, 215, 30),
    "purple": (130, 40, 150),
    "gray": (120, 120, 120),
    "pink": (255, 160, 200),
    "brown": (120, 70, 30),
    "cyan": (70, 220, 225),
    "white": (250, 250, 250),
    "orange": (250, 140, 20),
    "lime": (160, 240, 60),
}
COLUMNS = 4  # cells across an image
ROWS = 3  # cells down an image
CELL = 14  # a cell's side in pixels
CELLS = [(x, y) for y in range(ROWS) for x in range(COLUMNS)]
MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))  # up, right, down, left
PROBLEM = "From {}"
ANSWER = "<think> {}</think><answer> {}</answer>"


def ways(moves: int, rng: random.Random) -> list[list[tuple[int, int]]]:
    """Sample two or more disjoint paths with `moves` moves between neighbouring cells, as many as fit."""
    while True:
        free = set(CELLS)
        found_ways = []
        for start in rng.sample(CELLS, len(CELLS)):
            if start not in free:
                continue
            way = walk(start, moves, free, rng)
            if way:
                found_ways.append(way)
                free -= set(way)
        if len(found_ways) > 1:
            return found_ways


def walk(start: tuple[int, int], moves: int, free: set, rng: random.Random) -> list[tuple[int, int]]:
    """Sample a path over free cells. Return an empty path if the path cannot be continued."""
    way = [start]
    for _ in range(moves):
        x, y = way[-1]
        neighbours = [(x + right, y + down) for right, down in MOVES]
        open_cells = [cell for cell in neighbours if cell in free and cell not in way]
        if not open_cells:
            return []
        way.append(rng.choice(open_cells))
    return way


def draw(colors: dict, arrows: dict) -> PIL.Image.Image:
    """Draw the cells and arrows.

    An arrow has a black shaft in its own cell, and a head in the next cell with the first cell's colour.
    """
    image = PIL.Image.new("RGB", (COLUMNS * CELL, ROWS * CELL))
    pen = PIL.ImageDraw.Draw(image)
    for (x, y), color in colors.items():
        left = x * CELL
        top = y * CELL
        pen.rectangle((left, top, left + CELL - 1, top + CELL - 1), fill=COLORS[color])
    for cell, next_cell in arrows.items():
        shaft = [(-2, -1), (-2, 1), (6, 1), (6, -1)]
        head = [(7.5, -4.5), (7.5, 4.5), (12.5, 0)]
        pen.polygon(turned(shaft, cell, next_cell), fill="black")
        pen.polygon(turned(head, cell, next_cell), fill=COLORS[colors[cell]])
    return image


def turned(corners: list, cell: tuple[int, int], next_cell: tuple[int, int]) -> list:
    """Rotate the corners of an arrow that points right, towards the next cell, and move them to its cell.

    corners: (x, y) in pixels, relative to the cell's middle.
    """
    right = next_cell[0] - cell[0]  # the direction: (1, 0) right, (0, 1) down
    down = next_cell[1] - cell[1]
    middle_x = cell[0] * CELL + (CELL - 1) / 2
    middle_y = cell[1] * CELL + (CELL - 1) / 2
    placed = []
    for along, across in corners:
        x = middle_x + along * right - across * down
        y = middle_y + along * down + across * right
        placed.append((x, y))
    return placed


@dataclass
class Arrows:
    """Dataset with images that are drawn on demand. With the same seed, row i is always the same.

    The column `unseen` is true for rows with more than two moves, because demonstrations have at most two.
    """

    size: int
    seed: str
    fewest_moves: int = 1
    most_moves: int = 4
    blank: bool = False  # draw no arrows, as a control

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        rng = random.Random(f"arrows/{self.seed}/{index}")
        moves = rng.randint(self.fewest_moves, self.most_moves)
        all_ways = ways(moves, rng)
        colors = dict(zip(CELLS, rng.sample(list(COLORS), len(CELLS)), strict=True))
        arrows = {}
        if not self.blank:
            for way in all_ways:
                arrows.update(pairwise(way))
        names = [colors[cell] for cell in all_ways[0]]
        problem = PROBLEM.format(names[0])
        columns = {"problem": problem, "solution": names[-1], "moves": moves, "unseen": moves > 2}
        completion = ANSWER.format(" ".join(names), names[-1])
        return Row(conversation(problem, {"image": 1}), [draw(colors, arrows)], columns, completion)


def correct(answer_texts, solution, moves, k=1, **columns):
    """Return 1 for the correct colour, for evaluation. Rows with more or fewer than k moves are not judged."""
    values = []
    for text, truth, count in zip(answer_texts, solution, moves, strict=True):
        is_right = (text or "").strip() == truth
        values.append(float(is_right) if count == k else None)
    return values


def thought(completions, moves, k=1, **columns):
    """Count the moves that a thought lists, for evaluation. Rows with more or fewer than k moves are not judged."""
    values = []
    for text, count in zip(completions, moves, strict=True):
        match = re.match(r"<think>([a-z ]*)", text)
        listed = len(match[1].split()) - 1 if match else 0
        values.append(float(listed) if count == k else None)
    return values


def tokenizer():
    """Train byte-level BPE on all texts in the task, so that every colour is one token."""
    texts = ["system\nYou are a helpful assistant.", "assistant\n"]
    for name in COLORS:
        texts += [ANSWER.format(name, name), f"user\n{PROBLEM.format(name)}"]
    return train_tokenizer(texts, vocab_size=512)


def task(fewest_moves: int = 1, blank: bool = False) -> Task:
    """Create the task, or with `blank` a control without arrows."""

    def datasets(data, seed, demonstrations=FRESH_ROWS):
        training = {
            "demonstrations": Arrows(demonstrations, f"{seed}/sft", most_moves=2, blank=blank),
            "prompts": Arrows(FRESH_ROWS, f"{seed}/grpo", fewest_moves, blank=blank),
        }
        return training, Arrows(data.eval_rows, "eval", blank=blank)

    return Task(datasets, tokenizer, chance=lambda held_out: 1 / len(COLORS), chance_name="chance")


TASK = task()
HARD = task(fewest_moves=3)
BLANK = task(blank=True)
