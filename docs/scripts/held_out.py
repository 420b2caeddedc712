"""Record a run of recipes/localisation.yaml in held_out.json, and animate it in held_out.svg.

    python -m docs.scripts.held_out --seed=1 --num_threads=1   # train again, with any options
    python -m docs.scripts.make_pages                          # draw the recorded run again

Before every fourth step of GRPO, the policy predicts the object's box in held-out images. It gives
DRAWN sampled answers for each of the SHOWN images, and one answer for each of HELD_OUT images. Each
image is always sampled with the same random numbers, so that boxes move only because the policy
changes.
"""

import base64
import io
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from html import escape
from pathlib import Path

import numpy as np

from docs.scripts.draw import FAINT, FONT, INK, SOFT, Picture
from minivlmrl.config.import_utils import recipes_folder
from minivlmrl.config.loading import load_config
from minivlmrl.data.boxes import parse_boxes
from minivlmrl.generation.sampler import Sampler
from minivlmrl.model.checkpoint import load_model, load_processor
from minivlmrl.rewards.boxes import mean_iou
from minivlmrl.rewards.text import find_answer
from minivlmrl.run.callbacks import Callback, default_callbacks
from minivlmrl.run.loop import run_training
from recipes.localisation import GRID, UNIT, Localisation, constant_box

SHOWN, DRAWN, HELD_OUT, EVERY = 8, 8, 256, 4
FILE = Path(__file__).with_suffix(".json")
# IoUs, and the RGB colours in which their boxes are drawn
SHARES, COLOURS = (0, 0.4, 0.7, 1), ((240, 101, 0), (224, 49, 118), (121, 64, 222), (16, 88, 200))
REST, END, MOMENT = 3, 14, 0.25  # extra moments at the first and last one; seconds per moment
TILE, GAP, LEFT, TOP = 124, 14, 24, 92  # side, distance, left and top of the images in pixels
CHART, FLOOR, WIDE, HIGH = 628, 390, 204, 278
MONO = FONT.replace("Helvetica, Arial, sans-serif", "ui-monospace, Menlo, Consolas, monospace")


class Recorder(Callback):
    """Callback that records the policy's answers to held-out images during training."""

    def __init__(self, sampling):
        pictures = Localisation(HELD_OUT, "test")
        self.sampling, self.rows, self.moments = sampling, [pictures[i] for i in range(HELD_OUT)], []

    def on_step_begin(self, trainer, optimizer, step, number, batches):
        if trainer.stage == "grpo" and number % EVERY == 0:
            self.look(trainer.policy, trainer.processor, number)

    def look(self, policy, processor, number: int):
        """Answer all pictures."""

        def answers(sampling, shown, count):
            prompts, keys = [row.prompt(processor) for row in self.rows[:shown]], [f"row {i}" for i in range(shown)]
            groups = Sampler(policy, processor, sampling)(prompts, count, keys)
            return [[find_answer(processor.decode(one.ids)) for one in group] for group in groups]

        drawn = answers(self.sampling, SHOWN, DRAWN)
        likeliest = answers(replace(self.sampling, temperature=0), SHOWN, 1)
        true = [row.columns["solution"] for row in self.rows]
        sizes, extents = [row.images[0].size for row in self.rows], [(GRID, GRID)] * HELD_OUT
        earned = mean_iou([one for [one] in answers(self.sampling, HELD_OUT, 1)], true, sizes, extents)
        moment = {"step": number, "iou": round(statistics.fmean(earned), 3), "drawn": drawn, "likeliest": likeliest}
        self.moments.append(moment)


def png(image) -> str:
    """Encode an image as PNG, in base64."""
    image.save(file := io.BytesIO(), "png", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def record(options: list[str], folder: Path):
    """Train with these options, and write the recorded answers to held_out.json."""
    config = load_config(recipes_folder() / "localisation.yaml", [*options, f"--output_dir={folder}"])
    recorder = Recorder(config.sampling)
    run_training(config, [*default_callbacks(config), recorder])
    checkpoint = folder / "checkpoint"
    recorder.look(load_model(checkpoint), load_processor(checkpoint), config.grpo.max_steps)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    shown = recorder.rows[:SHOWN]
    kept = {
        "command": " ".join(["python -m docs.scripts.held_out", *options]),
        "pictures": [row.columns | {"png": png(row.images[0])} for row in shown],
        "rewards": [round(line["rewards/iou/mean"], 3) for line in lines if line["stage"] == "grpo"],
        "moments": recorder.moments,
    }
    FILE.write_text(json.dumps(kept, separators=(",", ":")).replace('{"step"', '\n{"step"') + "\n")


def held(values: list) -> list:
    """Repeat the first and the last value, so that the animation pauses at both ends."""
    return [values[0]] * REST + values + [values[-1]] * END


def moving(attribute: str, values: list, discrete=False, kind="animate", more="") -> str:
    """Return an SVG element that animates one attribute of its parent in an endless loop."""
    values = held(values)
    mode = " calcMode='discrete'" if discrete else ""
    return (
        f"<{kind} attributeName='{attribute}'{more} values='{';'.join(values)}' dur='{len(values) * MOMENT:g}s'"
        f"{mode} repeatCount='indefinite'/>"
    )


def column(x: float, y: float, lines: list[tuple[str, str]], size: int, name: str, anchor="middle", font=FONT) -> str:
    """Return an animated text that shows one line per moment.

    `lines` has the text and the colour for each moment. The lines are drawn below each other, and a
    window that is one line high moves over them.
    """
    step = 2 * size
    written = "".join(
        f"<tspan x='{x:g}' y='{y + step * i:g}' fill='{fill}'>{words}</tspan>" for i, (words, fill) in enumerate(lines)
    )
    shifts = [f"0 {-step * i}" for i in range(len(lines))]
    turn = moving("transform", shifts, True, "animateTransform", " type='translate'")
    window = f"x='{x - 150:g}' y='{y - 1.2 * size:g}' width='300' height='{1.6 * size:g}'"
    return (
        f"<clipPath id='{name}'><rect {window}/></clipPath>"
        f"<g clip-path='url(#{name})'><g transform='translate({shifts[-1]})'>{turn}"
        f"<text font-size='{size}' text-anchor='{anchor}' font-weight='bold' {font}>{written}</text></g></g>"
    )


def colour(share: float) -> str:
    """Interpolate the colour of an IoU between two entries of COLOURS."""
    values = (np.interp(share, SHARES, one) for one in zip(*COLOURS, strict=True))
    return "#" + "".join(f"{round(value):02x}" for value in values)


def judged(answers: list, true: list[int]) -> list[tuple[tuple, str]]:
    """Return each answer's box, or a point if the answer has none, with the colour of its IoU."""
    sizes, extents = [(GRID * UNIT,) * 2] * len(answers), [(GRID, GRID)] * len(answers)
    found = [parse_boxes(answer or "") for answer in answers]
    boxes = [some[0] if some else (GRID / 2,) * 4 for some in found]
    return list(zip(boxes, map(colour, mean_iou(answers, [true] * len(answers), sizes, extents)), strict=True))


def tile(number: int, shown: dict, moments: list[dict]) -> list[str]:
    """Draw a held-out image with its sampled boxes, and the greedy answer below."""
    x, y = LEFT + number % 4 * (TILE + GAP), TOP + number // 4 * (TILE + 50)
    middle = x + TILE / 2
    lines = [
        f"<text x='{middle:g}' y='{y - 8}' font-size='12' fill='{INK}' text-anchor='middle' {FONT}>"
        f"{shown['problem']}</text>",
        f"<image x='{x}' y='{y}' width='{TILE}' height='{TILE}' style='image-rendering:pixelated' "
        f"href='data:image/png;base64,{shown['png']}'/>",
        f"<g transform='translate({x} {y}) scale({TILE / GRID:g})' stroke-width='2.2' stroke-opacity='.6' "
        "fill-opacity='.07'>",
    ]
    for k in range(DRAWN):
        boxes = judged([moment["drawn"][number][k] for moment in moments], shown["solution"])
        paths = [f"M{a:g} {b:g}H{c:g}V{d:g}H{a:g}z" for (a, b, c, d), _ in boxes]
        fills = [fill for _, fill in boxes]
        lines.append(
            f"<path d='{paths[-1]}' color='{fills[-1]}' stroke='currentColor' fill='currentColor' "
            f"vector-effect='non-scaling-stroke'>{moving('d', paths)}{moving('color', fills)}</path>"
        )
    likeliest = [moment["likeliest"][number][0] for moment in moments]
    colours = [fill for _, fill in judged(likeliest, shown["solution"])]
    words = [(escape(answer or "no box"), fill) for answer, fill in zip(likeliest, colours, strict=True)]
    return [*lines, "</g>", column(middle, y + TILE + 20, words, 14, f"answer{number}", font=MONO)]


def chart(picture: Picture, rewards: list[float], moments: list[dict]):
    """Draw rewards in training and on held-out images; the curves appear step by step."""

    def at(step: float, value: float) -> tuple[float, float]:
        return round(CHART + WIDE * step / moments[-1]["step"], 1), round(FLOOR - HIGH * value, 1)

    stops = "".join(f"<stop offset='{share}' stop-color='{colour(share)}'/>" for share in SHARES)
    picture.lines.append(f"<linearGradient id='scale' x1='0' y1='1' x2='0' y2='0'>{stops}</linearGradient>")
    picture.box(CHART - 9, FLOOR - HIGH, 5, HIGH, "url(#scale)")
    for share in (0, 0.5, 1):
        picture.line([at(0, share), at(moments[-1]["step"], share)], FAINT)
        picture.text(CHART - 15, FLOOR - HIGH * share + 4, f"{share:g}", 12, SOFT, "end")
    _, blind = constant_box(Localisation(512, "test"))
    picture.line([at(0, blind), at(moments[-1]["step"], blind)], "#adb5bd")
    picture.text(CHART + WIDE, at(0, blind)[1] + 15, "a blind guess", 12, SOFT, "end")
    steps, earned = [moment["step"] for moment in moments], [moment["iou"] for moment in moments]
    points = [at(*point) for point in zip(steps, earned, strict=True)]
    widths = [f"{x - CHART:g}" for x, _ in points]
    picture.lines.append(
        f"<clipPath id='now'><rect x='{CHART}' y='0' width='{WIDE}' height='{FLOOR}'>{moving('width', widths)}</rect>"
        "</clipPath><g clip-path='url(#now)'>"
    )
    picture.line([at(step, reward) for step, reward in enumerate(rewards)], "#c5d7ea", 1.2)
    picture.line(points, colour(1), 3)
    picture.lines.append(
        f"</g><circle cx='{points[-1][0]:g}' cy='{points[-1][1]:g}' r='5' fill='{colour(1)}'>"
        f"{moving('cx', [f'{x:g}' for x, _ in points])}{moving('cy', [f'{y:g}' for _, y in points])}</circle>"
    )
    numbers = [(f"{value:.2f}", colour(1)) for value in earned]
    picture.lines.append(column(CHART + WIDE, 94, numbers, 32, "value", "end"))
    picture.text(CHART - 9, 68, "IoU of box and object", 13, INK, "start", bold=True)
    picture.text(CHART - 9, 85, "256 held-out pictures", 12, SOFT, "start")
    picture.text(CHART - 9, 100, "thin: rewards of training", 12, SOFT, "start")
    picture.text(CHART, FLOOR + 20, "0", 12, SOFT)
    picture.text(CHART + WIDE, FLOOR + 20, f"{steps[-1]} steps", 12, SOFT, "end")


def draw() -> str:
    """Return the animated SVG; viewers without animation show its last moment."""
    data = json.loads(FILE.read_text())
    moments = data["moments"]
    picture = Picture(860, 430, "A model learns to box objects in held-out pictures, over the steps of a run of GRPO")
    picture.text(LEFT, 34, "A model learns to see: GRPO with a reward for the box", 18, anchor="start", bold=True)
    picture.text(
        LEFT,
        58,
        "Held-out pictures, 8 sampled boxes each, coloured by their IoU; in digits the likeliest answer",
        13,
        SOFT,
        "start",
    )
    steps = [(f"step {moment['step']}", INK) for moment in moments]
    picture.lines.append(column(CHART + WIDE, 34, steps, 18, "step", "end"))
    for number, shown in enumerate(data["pictures"]):
        picture.lines += tile(number, shown, moments)
    chart(picture, data["rewards"], moments)
    return picture.svg()


PICTURES = {"held_out.svg": draw}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        record(sys.argv[1:], Path(scratch) / "run")
