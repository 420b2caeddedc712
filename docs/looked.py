"""Measure what maps of tools.lines.looked are worth, and draw looked.png: python docs/looked.py

The default run is trained, and once more with each group judged by the next picture's solution, a few minutes together.
Of both, and of the random weights that they began with, the greedy answers to PICTURES held-out pictures are mapped; so
is, by tiles of a merged token, how much their log-probabilities change where the picture is grey. See docs/metrics.md.
"""

import statistics
import tempfile
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from minivlmrl.config.import_utils import recipes_folder
from minivlmrl.config.options import SamplingOptions
from minivlmrl.diagnostics.trace import looked
from minivlmrl.generation.generate import Sampler
from minivlmrl.model.checkpoint import load_model, load_processor
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.packing import pack
from minivlmrl.rewards.registry import REWARDS
from minivlmrl.rewards.text import accuracy
from minivlmrl.run import loop
from minivlmrl.tasks.shapes import Shapes

PICTURES, SHOWN, SCALE, GAP = 24, 6, 2, 8
SHUFFLED = "--rewards={format: 0.5, shuffled: 1.0}"
QUICK = ["--data.eval_rows=32", "--num_threads=1"]
RUNS = {"untrained": ["--stages=[]"], "default run": [], "shuffled rewards": [SHUFFLED]}


def shuffled(answer_texts: list, solution: list, **columns) -> list[float | None]:
    """Judge each group of eight by the solution of the next one's picture."""
    return accuracy(answer_texts, [*solution[8:], *solution[:8]])


def train_all(folder: Path):
    """Train the runs that are not there yet."""
    REWARDS["shuffled"] = shuffled
    for name, options in RUNS.items():
        out = folder / name.replace(" ", "_")
        if not (out / "checkpoint").is_dir():
            loop.main([str(recipes_folder() / "shapes.yaml"), f"--output_dir={out}", *QUICK, *options])


def answer_of(policy, processor, prompt):
    """The likeliest answer."""
    sampling = SamplingOptions(temperature=0, max_new_tokens=20)
    [[completion]] = Sampler(policy, processor, sampling)([prompt], 1, ["greedy"])
    return completion


@torch.no_grad()
def occluded(policy, processor, row, completion, side: int) -> Tensor:
    """(tiles, tiles): by how many nats the answer's log-probability changes with a grey tile of `side` pixels."""

    def logp(image) -> float:
        prompt = processor(row.messages, [image])
        return per_token_logps(policy, pack([prompt], [[completion]], policy.config))[0].sum().item()

    [image] = row.images
    whole, count = logp(image), image.width // side
    change = torch.zeros(count, count)
    for y in range(count):
        for x in range(count):
            hidden = image.copy()
            hidden.paste((128, 128, 128), (x * side, y * side, (x + 1) * side, (y + 1) * side))
            change[y, x] = abs(logp(hidden) - whole)
    return change


def on_object(row) -> Tensor:
    """(height, width) bool: the pixels that are not background, whose colour is that of a corner without object."""
    pixels = np.asarray(row.images[0]).astype(int)
    background = max(map(tuple, pixels[[0, 0, -1, -1], [0, -1, 0, -1]]), key=sum)  # lighter than all objects
    return torch.from_numpy((pixels != background).any(-1))


def ranks(x: Tensor) -> list[float]:
    """Flat, by size."""
    return x.flatten().argsort().argsort().double().tolist()


def measure(policy, processor, row) -> dict:
    """Everything about one picture."""
    prompt = row.prompt(processor)
    completion, side = answer_of(policy, processor, prompt), processor.image_processor.factor
    [shown] = looked(policy, processor, prompt, completion)
    tiles = torch.nn.functional.avg_pool2d(shown[None], side)[0]
    hidden, inside = occluded(policy, processor, row, completion, side), on_object(row)
    return {
        "map": shown, "hidden": hidden,
        "right": accuracy([processor.decode(completion.ids)], [row.columns["solution"]])[0],
        "share": (shown[inside].sum() / shown.sum()).item(), "area": inside.double().mean().item(),
        "strength": shown.sum().item(), "change": hidden.mean().item(),
        "rank correlation": statistics.correlation(ranks(tiles), ranks(hidden)),
    }  # fmt: skip


def overlay(image: PIL.Image.Image, heat: Tensor) -> PIL.Image.Image:
    """Orange where `heat` (any size) is high, on the picture in grey."""
    size = image.width * SCALE, image.height * SCALE
    alpha = PIL.Image.fromarray((heat / heat.max() * 230).byte().numpy()).resize(size, PIL.Image.NEAREST)
    grey = image.convert("L").point(lambda x: 150 + x * 0.4).convert("RGB").resize(size, PIL.Image.NEAREST)
    return PIL.Image.composite(PIL.Image.new("RGB", size, (224, 88, 0)), grey, alpha)


def draw(rows, found: dict[str, list[dict]]) -> PIL.Image.Image:
    """A column for each picture: itself, its map, the grey tiles that matter, and the control's map."""
    side = rows[0].images[0].width * SCALE
    sheet = PIL.Image.new("RGB", (SHOWN * (side + GAP) - GAP, 4 * (side + GAP) - GAP), "white")
    for column, row in enumerate(rows[:SHOWN]):
        one, other = found["default run"][column], found["shuffled rewards"][column]
        cells = [row.images[0].resize((side, side), PIL.Image.NEAREST)]
        cells += [overlay(row.images[0], heat) for heat in (one["map"], one["hidden"], other["map"])]
        for number, cell in enumerate(cells):
            sheet.paste(cell, (column * (side + GAP), number * (side + GAP)))
    return sheet


def main(folder: Path):
    """Print a line for each run, and write the picture."""
    train_all(folder)
    shapes, found = Shapes(PICTURES, "eval"), {}
    rows = [shapes[i] for i in range(PICTURES)]
    for name in RUNS:
        checkpoint = folder / name.replace(" ", "_") / "checkpoint"
        policy, processor = load_model(checkpoint), load_processor(checkpoint)
        found[name] = [measure(policy, processor, row) for row in rows]
        numbers = [key for key, value in found[name][0].items() if isinstance(value, float)]
        means = {key: statistics.mean(one[key] for one in found[name]) for key in numbers}
        print(f"{name:18}", *(f"{key} {value:.3g}" for key, value in means.items()))
    draw(rows, found).save(Path(__file__).with_name("looked.png"), optimize=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch))
