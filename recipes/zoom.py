"""Look again: a picture whose answer is only seen in a closer look, and what `recipes/zoom.yaml` trains on.

The picture has 64 pixels a side; the model is shown 32. In one of four quarters is a square of stripes whose colours
mix to one grey at that size: 1 of 12 labels, which nothing tells but `<zoom>`, the quarter in full. A completion:
    <think>southwest</think><zoom>southwest</zoom>[the crop: forced tokens]<answer>red rows</answer>
Demonstrations say where the square is and what the crop shows, mostly "nothing": one in ten looks where the square is,
the others anywhere, out of habit twice as often to the northwest.
"""

import functools
import random
import re
from dataclasses import dataclass

import PIL.Image
import PIL.ImageDraw

from minivlmrl.data.conversations import conversation
from minivlmrl.hub.tokenizer import train_tokenizer
from minivlmrl.rows import Row
from minivlmrl.tasks.task import FRESH_ROWS, Task

COLORS = {"red": (250, 5, 5), "green": (5, 250, 5), "blue": (5, 5, 250)}
COLORS |= {"cyan": (5, 250, 250), "pink": (250, 5, 250), "yellow": (250, 250, 5)}
LABELS = [f"{color} {way}" for color in COLORS for way in ("rows", "columns")]
CORNERS = ["northwest", "northeast", "southwest", "southeast"]  # a token each
HABIT = (2, 1, 1, 1)  # how often a demonstration looks there
PROBLEM, NOTHING = "Stripes?", "nothing"
# pixels a side: picture, what is shown of it, quarter, stripes
SIDE = 64
SHOWN = 32
QUARTER = 32
SQUARE = 24
ANSWER = "<answer>{}</answer>"


def draw(rng: random.Random, label: str | None = None, others: int = 0) -> tuple[PIL.Image.Image, str, int]:
    """Draw a picture; returns its label and the quarter of the stripes too.

    Two stripes of complements are as wide as a pixel of what is shown, and on its grid: all labels are one grey there.

    Args:
        others: so many of the other quarters have a dark square.
    """
    drawn = rng.choice(LABELS)
    quarter = rng.randrange(4)
    image = paper(rng)
    stripes(image, label or drawn, *corner(rng, quarter))
    pen = PIL.ImageDraw.Draw(image)
    last = SQUARE - 1
    for other in rng.sample([q for q in range(4) if q != quarter], others):
        x, y = corner(rng, other)
        pen.rectangle([x, y, x + last, y + last], (60, 60, 60))
    return image, label or drawn, quarter


def paper(rng: random.Random) -> PIL.Image.Image:
    """Begin a picture: one light colour."""
    return PIL.Image.new("RGB", (SIDE, SIDE), tuple(rng.randint(215, 255) for _ in range(3)))


def stripes(image: PIL.Image.Image, label: str, left: int, top: int):
    """Draw the square of stripes of a label."""
    color, way = label.split()
    pen = PIL.ImageDraw.Draw(image)
    last = SQUARE - 1
    for i in range(SQUARE):
        tint = tuple(255 - v if i % 2 else v for v in COLORS[color])
        x1, y1, x2, y2 = (0, i, last, i) if way == "rows" else (i, 0, i, last)
        pen.line([(left + x1, top + y1), (left + x2, top + y2)], fill=tint)


def corner(rng: random.Random, quarter: int) -> tuple[int, int]:
    """Draw where a square of a quarter begins, on the grid of what is shown."""
    left, top = (QUARTER * i + 2 * rng.randint(0, (QUARTER - SQUARE) // 2) for i in (quarter % 2, quarter // 2))
    return left, top


def shown(image: PIL.Image.Image) -> PIL.Image.Image:
    """Shrink a picture to what the model sees of it: means of 2 x 2 pixels."""
    return image.resize((SHOWN, SHOWN), PIL.Image.Resampling.BOX)


def crop(image: PIL.Image.Image, quarter: int) -> PIL.Image.Image:
    """Cut out a quarter, 0 to 3."""
    left = QUARTER * (quarter % 2)
    top = QUARTER * (quarter // 2)
    return image.crop((left, top, left + QUARTER, top + QUARTER))


class Quarters:
    """The environment: `<zoom>northwest</zoom>` and the other corners."""

    max_tool_calls = 1
    declare_tools = False  # the call is in tags

    def reset(self, picture, **columns):
        self.picture, self.answered = picture, 0

    def zoom(self, corner: str) -> PIL.Image.Image:
        """Show a quarter in full: northwest, northeast, southwest or southeast."""
        shown = self._show(CORNERS.index(corner))
        self.answered += 1
        return shown

    def _show(self, quarter: int) -> PIL.Image.Image:
        return crop(self.picture, quarter)

    def get_reward(self) -> float:
        """Pay for calls that could be answered: a form that earns nothing is lost."""
        return self.answered / self.max_tool_calls


class Lost(Quarters):
    """A control: whichever quarter is asked for, it shows one that a picture's row draws for it."""

    def reset(self, found, **columns):
        super().reset(**columns)
        self.found = found

    def _show(self, quarter: int) -> PIL.Image.Image:
        return crop(self.picture, self.found[quarter])


class Blind(Quarters):
    """A control: crops are grey."""

    def _show(self, quarter: int) -> PIL.Image.Image:
        return PIL.Image.new("RGB", (QUARTER, QUARTER), "grey")


@dataclass
class Drawn:
    """Rows drawn on demand: row i of a seed is always the same."""

    size: int
    seed: str

    def __len__(self):
        return self.size


@dataclass
class Stripes(Drawn):
    """Pictures with one square of stripes."""

    environment: type = Quarters
    silent: bool = False  # no thought
    informed: float = 0.0  # share of demonstrations that look at the right quarter on purpose
    others: int = 0  # dark squares in other quarters

    def __getitem__(self, index):
        rng = random.Random(f"zoom/{self.seed}/{index}")
        image, label, right = draw(rng, others=self.others)
        [asked] = rng.choices(range(4), HABIT)
        found = [rng.randrange(4) for _ in CORNERS]
        asked = right if rng.random() < self.informed else asked
        columns = {"problem": PROBLEM, "solution": label, "corner": CORNERS[right], "picture": image, "found": found}
        environment = self.environment()
        environment.reset(**columns)
        given = found[asked] if self.environment is Lost else asked
        said = label if given == right else NOTHING
        if self.environment is Blind:
            said = rng.choice(LABELS)
        thought = "" if self.silent else f"<think>{CORNERS[right]}</think>"
        look = CORNERS[asked]
        completion = demonstration(f"{thought}<zoom>{look}</zoom>", environment.zoom(look), said=said)
        return Row(conversation(PROBLEM, {"image": 1}), [shown(image)], columns, completion)


def demonstration(*parts: str | PIL.Image.Image, said: str) -> list[dict]:
    """Write an assistant's turn: calls and crops, then the answer."""
    parts = [*parts, ANSWER.format(said)]
    parts = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts]
    return [{"role": "assistant", "content": parts}]


def looks(completions, corner, **columns):
    """Reward 1 for a look at the corner of the stripes. For evaluation."""
    asked = [re.search(r"<zoom>(\w+)</zoom>", text) for text in completions]
    return [float(a is not None and a[1] == right) for a, right in zip(asked, corner, strict=True)]


def tokenizer():
    """Train byte-level BPE on everything the task says."""
    return tokenizer_of([*CORNERS, *LABELS, NOTHING])


def tokenizer_of(said: list[str]):
    """Train byte-level BPE on the question and what may be said between tags; a tag is a token, as Qwen3's <think>."""
    base = ["system\nYou are a helpful assistant.", f"user\n{PROBLEM}", "assistant\n"]
    trained = train_tokenizer([*base, *said], vocab_size=384)
    trained.backend.add_tokens([f"<{slash}{tag}>" for tag in ("think", "zoom", "answer") for slash in ("", "/")])
    return trained


def task(kind: type = Stripes, tokenizer=tokenizer, **options) -> Task:
    """Make the task; with options of Stripes a control, or a harder one."""

    def datasets(data, seed, demonstrations=FRESH_ROWS):
        rows = functools.partial(kind, **options)
        training = {"demonstrations": rows(demonstrations, f"{seed}/sft"), "prompts": rows(FRESH_ROWS, f"{seed}/grpo")}
        return training, rows(data.eval_rows, "eval")

    return Task(datasets, tokenizer, chance=lambda held_out: 1 / len(LABELS), chance_name="chance")


TASK, BLIND, LOST = (task(informed=0.1, environment=kind) for kind in (Quarters, Blind, Lost))
SILENT = task(silent=True)
INFORMED = task(silent=True, informed=0.33)
OTHERS = task(informed=0.1, others=2)
