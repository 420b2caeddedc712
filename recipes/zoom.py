"""Task and environment for recipes/zoom.yaml: the answer is only visible after zooming into the image.

Images have 64 x 64 pixels; the model sees 32 x 32. One quarter contains a striped square with one of 12 labels;
downscaled, all stripes are gray. The tool `<zoom>` shows a quarter in full resolution, and reveals the label:
    <think>southwest</think><zoom>southwest</zoom>[crop tokens]<answer>red rows</answer>
Demonstrations name a quarter and its content, mostly "nothing": one in ten zooms into the correct quarter, the others
into a random one, northwest twice as often.
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
    "red": (250, 5, 5), "green": (5, 250, 5), "blue": (5, 5, 250),
    "cyan": (5, 250, 250), "pink": (250, 5, 250), "yellow": (250, 250, 5),
}  # fmt: skip
LABELS = [f"{color} {way}" for color in COLORS for way in ("rows", "columns")]
CORNERS = ["northwest", "northeast", "southwest", "southeast"]  # quarter names, single tokens
INFORMED = 0.1  # fraction of demonstrations with the correct quarter
HABIT = (2, 1, 1, 1)  # relative zoom frequencies in demonstrations, ordered as in CORNERS
PROBLEM = "Stripes?"
NOTHING = "nothing"
# side lengths in pixels
SIDE = 64  # image
SHOWN = 32  # downscaled image, as the model sees it
QUARTER = 32  # quarter in full resolution
SQUARE = 24  # striped square
ANSWER = "<answer>{}</answer>"


def draw(rng: random.Random, label: str | None = None) -> tuple[PIL.Image.Image, str, int]:
    """Draw an image; return it with its label and the quarter (0 to 3) of the striped square.

    Two neighboring stripes have complementary colors, and become one gray pixel in the downscaled image.
    """
    random_label = rng.choice(LABELS)
    label = label or random_label
    quarter = rng.randrange(4)
    paper = tuple(rng.randint(215, 255) for _ in range(3))
    image = PIL.Image.new("RGB", (SIDE, SIDE), paper)
    stripes(image, label, *corner(rng, quarter))
    return image, label, quarter


def stripes(image: PIL.Image.Image, label: str, left: int, top: int):
    """Draw the striped square of a label."""
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
    """Sample the (left, top) corner of a square in a quarter, on the downscaled pixel grid."""
    steps = (QUARTER - SQUARE) // 2  # one step is two pixels, or one in the downscaled image
    left = QUARTER * (quarter % 2) + 2 * rng.randint(0, steps)
    top = QUARTER * (quarter // 2) + 2 * rng.randint(0, steps)
    return left, top


def shown(image: PIL.Image.Image) -> PIL.Image.Image:
    """Downscale an image for the model by averaging 2 x 2 pixels."""
    return image.resize((SHOWN, SHOWN), PIL.Image.Resampling.BOX)


def crop(image: PIL.Image.Image, quarter: int) -> PIL.Image.Image:
    """Crop a quarter (0 to 3)."""
    left = QUARTER * (quarter % 2)
    top = QUARTER * (quarter // 2)
    return image.crop((left, top, left + QUARTER, top + QUARTER))


class Quarters:
    """Environment with one tool: `<zoom>northwest</zoom>` shows this quarter in full resolution."""

    max_tool_calls = 1
    declare_tools = False  # calls are tags, so the prompt does not describe tools

    def reset(self, picture, **columns):
        self.picture = picture
        self.answered = 0

    def zoom(self, corner: str) -> PIL.Image.Image:
        """Show the northwest, northeast, southwest or southeast quarter of the image in full resolution."""
        shown_quarter = crop(self.picture, CORNERS.index(corner))
        self.answered += 1
        return shown_quarter

    def get_reward(self) -> float:
        """Return the fraction of valid calls; without this reward, policies forget the format."""
        return self.answered / self.max_tool_calls


@dataclass
class Stripes:
    """Images with one striped square; with the same seed, row i is always the same."""

    size: int
    seed: str

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        rng = random.Random(f"zoom/{self.seed}/{index}")
        image, label, right_quarter = draw(rng)
        [asked_quarter] = rng.choices(range(4), HABIT)
        for _ in CORNERS:
            rng.randrange(4)  # unused; keeps the rows of recorded runs
        if rng.random() < INFORMED:
            asked_quarter = right_quarter
        columns = {"problem": PROBLEM, "solution": label, "corner": CORNERS[right_quarter], "picture": image}
        read_label = label if asked_quarter == right_quarter else NOTHING
        thought_and_call = f"<think>{CORNERS[right_quarter]}</think><zoom>{CORNERS[asked_quarter]}</zoom>"
        completion = demonstration(thought_and_call, crop(image, asked_quarter), read_label)
        return Row(conversation(PROBLEM, {"image": 1}), [shown(image)], columns, completion)


def demonstration(thought_and_call: str, crop: PIL.Image.Image, label: str) -> list[dict]:
    """Build an assistant turn: reasoning, tool call, crop, answer."""
    content = [
        {"type": "text", "text": thought_and_call},
        {"type": "image", "image": crop},
        {"type": "text", "text": ANSWER.format(label)},
    ]
    return [{"role": "assistant", "content": content}]


def looks(completions, corner, **columns):
    """Reward 1 for zooming into the quarter with the striped square, else 0."""
    values = []
    for text, right in zip(completions, corner, strict=True):
        match = re.search(r"<zoom>(\w+)</zoom>", text)
        values.append(float(match is not None and match[1] == right))
    return values


def tokenizer():
    """Train a byte-level BPE tokenizer in which tags are single tokens, like <think> in Qwen3."""
    texts = ["system\nYou are a helpful assistant.", f"user\n{PROBLEM}", "assistant\n"]
    trained = train_tokenizer([*texts, *CORNERS, *LABELS, NOTHING], vocab_size=384)
    for tag in ("think", "zoom", "answer"):
        trained.backend.add_tokens([f"<{tag}>", f"</{tag}>"])
    return trained


def datasets(data, seed, demonstrations=FRESH_ROWS):
    training = {
        "demonstrations": Stripes(demonstrations, f"{seed}/sft"),
        "prompts": Stripes(FRESH_ROWS, f"{seed}/grpo"),
    }
    return training, Stripes(data.eval_rows, "eval")


TASK = Task(datasets, tokenizer, chance=1 / len(LABELS))
