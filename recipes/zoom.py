"""Look again: a picture whose answer is only seen in a closer look, and what `recipes/zoom.yaml` trains on.

The picture has 64 pixels a side; the model is shown 32. In one of four quarters is a square of stripes whose colours
mix to one grey at that size: 1 of 12 labels, which nothing tells but `<zoom>`, the quarter in full. A completion:
    <think>southwest</think><zoom>southwest</zoom>[the crop: forced tokens]<answer>red rows</answer>
Demonstrations say where the square is and what the crop shows, mostly "nothing": one in ten looks where the square is,
the others anywhere, out of habit twice as often to the northwest.
"""

import random
import re
from dataclasses import dataclass

import PIL.Image
import PIL.ImageDraw

from minivlmrl.data.messages import conversation
from minivlmrl.data.rows import Row
from minivlmrl.data.tokenizer import train_tokenizer
from minivlmrl.tasks.registry import FRESH_ROWS, Task

COLORS = {
    "red": (250, 5, 5),
    "green": (5, 250, 5),
    "blue": (5, 5, 250),
    "cyan": (5, 250, 250),
    "pink": (250, 5, 250),
    "yellow": (250, 250, 5),
}
LABELS = [f"{color} {way}" for color in COLORS for way in ("rows", "columns")]
CORNERS = ["northwest", "northeast", "southwest", "southeast"]  # a token each
HABIT = (2, 1, 1, 1)  # how often a demonstration looks there
PROBLEM = "Stripes?"
NOTHING = "nothing"
# pixels a side
SIDE = 64  # of a picture
SHOWN = 32  # of what is shown of it
QUARTER = 32
SQUARE = 24  # of stripes
ANSWER = "<answer>{}</answer>"


def draw(rng: random.Random, label: str | None = None, others: int = 0) -> tuple[PIL.Image.Image, str, int]:
    """Draw a picture; returns its label and the quarter of the stripes too.

    Two stripes of complements are as wide as a pixel of what is shown, and on its grid: all labels are one grey there.

    Args:
        others: so many of the other quarters have a dark square.
    """
    random_label = rng.choice(LABELS)
    label = label or random_label
    quarter = rng.randrange(4)
    image = paper(rng)
    stripes(image, label, *corner(rng, quarter))
    pen = PIL.ImageDraw.Draw(image)
    empty_quarters = [q for q in range(4) if q != quarter]
    for other in rng.sample(empty_quarters, others):
        x, y = corner(rng, other)
        pen.rectangle([x, y, x + SQUARE - 1, y + SQUARE - 1], (60, 60, 60))
    return image, label, quarter


def paper(rng: random.Random) -> PIL.Image.Image:
    """Begin a picture: one light colour."""
    return PIL.Image.new("RGB", (SIDE, SIDE), tuple(rng.randint(215, 255) for _ in range(3)))


def stripes(image: PIL.Image.Image, label: str, left: int, top: int):
    """Draw the square of stripes of a label."""
    color, way = label.split()
    complement = tuple(255 - value for value in COLORS[color])
    pen = PIL.ImageDraw.Draw(image)
    right = left + SQUARE - 1
    bottom = top + SQUARE - 1
    for i in range(SQUARE):
        tint = complement if i % 2 else COLORS[color]
        if way == "rows":
            pen.line([(left, top + i), (right, top + i)], fill=tint)
        else:
            pen.line([(left + i, top), (left + i, bottom)], fill=tint)


def corner(rng: random.Random, quarter: int) -> tuple[int, int]:
    """Draw where a square of a quarter begins, on the grid of what is shown."""
    steps = (QUARTER - SQUARE) // 2  # of two pixels, one of what is shown
    left = QUARTER * (quarter % 2) + 2 * rng.randint(0, steps)
    top = QUARTER * (quarter // 2) + 2 * rng.randint(0, steps)
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
        self.picture = picture
        self.answered = 0

    def zoom(self, corner: str) -> PIL.Image.Image:
        """Show a quarter in full: northwest, northeast, southwest or southeast."""
        answer = self._show(CORNERS.index(corner))
        self.answered += 1
        return answer

    def _show(self, quarter: int) -> PIL.Image.Image:
        return crop(self.picture, quarter)

    def get_reward(self) -> float:
        """Pay for calls that could be answered: a form that earns nothing is lost."""
        return self.answered / self.max_tool_calls


class Lost(Quarters):
    """A control: whichever quarter is asked for, it shows one that a picture's row draws for it."""

    def reset(self, lost_quarters, **columns):
        super().reset(**columns)
        self.lost_quarters = lost_quarters

    def _show(self, quarter: int) -> PIL.Image.Image:
        return crop(self.picture, self.lost_quarters[quarter])


class Blind(Quarters):
    """A control: crops are grey."""

    def _show(self, quarter: int) -> PIL.Image.Image:
        return PIL.Image.new("RGB", (QUARTER, QUARTER), "grey")


@dataclass
class Stripes:
    """Pictures with one square of stripes, drawn on demand: row i of a seed is always the same."""

    size: int
    seed: str
    environment: type = Quarters
    silent: bool = False  # no thought
    informed: float = 0.0  # share of demonstrations that look at the right quarter on purpose
    others: int = 0  # dark squares in other quarters

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        rng = random.Random(f"zoom/{self.seed}/{index}")
        image, label, right_quarter = draw(rng, others=self.others)
        [asked_quarter] = rng.choices(range(4), HABIT)
        lost_quarters = [rng.randrange(4) for _ in CORNERS]  # what Lost shows instead
        if rng.random() < self.informed:
            asked_quarter = right_quarter
        columns = {
            "problem": PROBLEM,
            "solution": label,
            "corner": CORNERS[right_quarter],
            "picture": image,
            "lost_quarters": lost_quarters,
        }
        environment = self.environment()
        environment.reset(**columns)
        given_quarter = lost_quarters[asked_quarter] if self.environment is Lost else asked_quarter
        read_label = label if given_quarter == right_quarter else NOTHING
        if self.environment is Blind:
            read_label = rng.choice(LABELS)
        thought = "" if self.silent else f"<think>{CORNERS[right_quarter]}</think>"
        call = f"<zoom>{CORNERS[asked_quarter]}</zoom>"
        completion = demonstration(thought + call, environment.zoom(CORNERS[asked_quarter]), read_label)
        return Row(conversation(PROBLEM, {"image": 1}), [shown(image)], columns, completion)


def demonstration(thought_and_call: str, crop: PIL.Image.Image, label: str) -> list[dict]:
    """Write an assistant's turn: the call, the crop, then the answer."""
    content = [
        {"type": "text", "text": thought_and_call},
        {"type": "image", "image": crop},
        {"type": "text", "text": ANSWER.format(label)},
    ]
    return [{"role": "assistant", "content": content}]


def looks(completions, corner, **columns):
    """Reward 1 for a look at the corner of the stripes. For evaluation."""
    values = []
    for text, right in zip(completions, corner, strict=True):
        match = re.search(r"<zoom>(\w+)</zoom>", text)
        values.append(float(match is not None and match[1] == right))
    return values


def tokenizer():
    """Train byte-level BPE on all texts of the task; each tag is one token, as Qwen3's <think> is."""
    texts = ["system\nYou are a helpful assistant.", f"user\n{PROBLEM}", "assistant\n"]
    trained = train_tokenizer([*texts, *CORNERS, *LABELS, NOTHING], vocab_size=384)
    for tag in ("think", "zoom", "answer"):
        trained.backend.add_tokens([f"<{tag}>", f"</{tag}>"])
    return trained


def task(**options) -> Task:
    """Make the task; with options of Stripes a control, or a harder one."""

    def datasets(data, seed, demonstrations=FRESH_ROWS):
        training = {
            "demonstrations": Stripes(demonstrations, f"{seed}/sft", **options),
            "prompts": Stripes(FRESH_ROWS, f"{seed}/grpo", **options),
        }
        return training, Stripes(data.eval_rows, "eval", **options)

    return Task(datasets, tokenizer, chance=lambda held_out: 1 / len(LABELS), chance_name="chance")


TASK = task(informed=0.1)
BLIND = task(informed=0.1, environment=Blind)
LOST = task(informed=0.1, environment=Lost)
SILENT = task(silent=True)
INFORMED = task(silent=True, informed=0.33)
OTHERS = task(informed=0.1, others=2)
