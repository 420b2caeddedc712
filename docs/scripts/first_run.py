"""Train the default run, and draw README's animation, docs/images/first_run.svg.

    python -m docs.scripts.first_run    # six minutes; trains as `python train.py`, with the same options

Before every fourth GRPO step, the policy answers the held-out rows at temperature 1, with the same random numbers per
row as in the run's evaluations. So the curve's first and last point equal `accuracy_sampled` in the run's table, and
the run itself does not change.
"""

import base64
import io
import sys
from html import escape
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from docs.scripts.picture import BLUES, DOCS, FAINT, FONT, INK, ORANGES, SOFT, Picture
from minivlmrl.config.loading import load_config
from minivlmrl.config.options import RunConfig
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Row
from minivlmrl.generation.sampler import Sampler
from minivlmrl.model.checkpoint import load_model, load_processor
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.rewards.registry import held_out_rewards
from minivlmrl.rewards.text import find_answer
from minivlmrl.run.callbacks import Callback, default_callbacks
from minivlmrl.run.datasets import load_task
from minivlmrl.run.evaluate import generate_for_rows
from minivlmrl.run.loop import run_training
from minivlmrl.tasks.shapes import CHANCE

SHOWN = 4  # images in the animation
EVERY = 4  # GRPO steps between moments of the animation
LEFT, RIGHT, BOTTOM, TOP = 58, 640, 408, 238  # edges of the chart in pixels
REST, END, SECONDS = 3, 14, 0.25  # repeats of the first and last moment; seconds per moment


class Moment(NamedTuple):
    step: int
    accuracy: float
    answers: list[str | None]  # to the first SHOWN rows


class Recorder(Callback):
    """Record answers to held-out rows before every fourth GRPO step."""

    def __init__(self, config: RunConfig):
        self.rewards = held_out_rewards(config)
        self.sampling = config.sampling
        self.rows = load_task(config, {})["eval"]
        self.moments = []

    def on_step_begin(self, trainer, optimizer, step, number, batches):
        if trainer.stage == "grpo" and number % EVERY == 0:
            self.record(trainer.policy, trainer.processor, number)

    def record(self, policy: VisionLanguageModel, processor: Processor, step: int):
        """Answer all held-out rows, as `evaluate` does for accuracy_sampled."""

        def describe(row, completions, scores) -> tuple[str | None, float]:
            return find_answer(processor.decode(completions[0].ids)), scores[0][0]

        sample = Sampler(policy, processor, self.sampling)
        batches = generate_for_rows(sample, self.rows, 1, self.rewards, "evaluation", describe)
        answers, scores = zip(*chain.from_iterable(batches), strict=True)
        self.moments.append(Moment(step, round(sum(scores) / len(scores), 3), list(answers[:SHOWN])))


def record_run(options: list[str]) -> tuple[list[Row], list[Moment]]:
    """Train with these options; return the rows in the animation, and its moments."""
    config = load_config("shapes.yaml", options)
    recorder = Recorder(config)
    if run_training(config, [*default_callbacks(config), recorder]) != 0:
        raise SystemExit("the run was interrupted, so the animation was not drawn")
    checkpoint = Path(config.output_dir, "checkpoint")
    recorder.record(load_model(checkpoint), load_processor(checkpoint), config.grpo.max_steps)
    return [recorder.rows[number] for number in range(SHOWN)], recorder.moments


def draw(rows: list[Row], moments: list[Moment]) -> str:
    """Return the animated SVG; viewers without animation show its last moment."""
    title = f"A model learns to name shapes in held-out pictures over {moments[-1].step} steps of GRPO"
    picture = Picture(748, 430, title)
    picture.text(20, 34, "What is it? The model's answers, right and wrong:", 25, anchor="start", bold=True)
    for number, row in enumerate(rows):
        picture.lines += tile(number, row, [moment.answers[number] for moment in moments])
    picture.text(20, 224, "accuracy on 256 held-out pictures", 23, INK, "start")
    chart(picture, moments)
    return picture.svg()


def tile(number: int, row: Row, answers: list[str | None]) -> list[str]:
    """Draw a held-out image, with the model's answer at each moment below."""
    middle = 748 / SHOWN * (number + 0.5)
    solution = row.columns["solution"]
    words = [(escape((answer or "no answer")[:16]), color(answer == solution)) for answer in answers]
    row.images[0].save(file := io.BytesIO(), "png", optimize=True)
    return [
        f"<image x='{middle - 48:g}' y='56' width='96' height='96' style='image-rendering:pixelated' "
        f"href='data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}'/>",
        column(middle, 182, words, 23, f"answer{number}"),
    ]


def chart(picture: Picture, moments: list[Moment]):
    """Draw the accuracy on held-out images, a curve that the animation reveals step by step."""
    last_step = moments[-1].step

    def place(step: float, share: float) -> tuple[float, float]:
        return round(LEFT + (RIGHT - LEFT) * step / last_step, 1), round(BOTTOM - (BOTTOM - TOP) * share, 1)

    for share in (0, 0.5, 1):
        picture.line([place(0, share), place(last_step, share)], FAINT, 2)
        picture.text(LEFT - 12, place(0, share)[1] + 7, f"{share:g}", 21, SOFT, "end")
    picture.line([place(0, CHANCE), place(last_step, CHANCE)], "#adb5bd", 2)
    picture.text(RIGHT, place(0, CHANCE)[1] - 8, "guessing", 21, SOFT, "end")
    points = [place(moment.step, moment.accuracy) for moment in moments]
    widths = [f"{x - LEFT:g}" for x, _ in points]
    window = f"<rect x='{LEFT}' y='0' width='{RIGHT - LEFT}' height='{BOTTOM}'>{moving('width', widths)}</rect>"
    picture.lines.append(f"<clipPath id='now'>{window}</clipPath><g clip-path='url(#now)'>")
    picture.line(points, color(True), 4)
    ball = moving("cx", [f"{x:g}" for x, _ in points]) + moving("cy", [f"{y:g}" for _, y in points])
    x, y = points[-1]
    picture.lines.append(f"</g><circle cx='{x:g}' cy='{y:g}' r='7' fill='{color(True)}'>{ball}</circle>")
    numbers = [(f"{moment.accuracy:.2f}", color(True)) for moment in moments]
    picture.lines.append(column(728, TOP + 44, numbers, 38, "accuracy", "end"))
    steps = [(f"step {moment.step}", INK) for moment in moments]
    picture.lines.append(column(728, TOP + 88, steps, 23, "step", "end"))


def color(is_right: bool) -> str:
    """Return blue for right and orange for wrong answers."""
    return BLUES[0] if is_right else ORANGES[0]


def column(x: float, y: float, lines: list[tuple[str, str]], size: int, name: str, anchor: str = "middle") -> str:
    """Return an animated text, one line per moment.

    `lines` has (text, color) per moment, drawn below each other; a window one line high moves over them.
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
        f"<text font-size='{size}' text-anchor='{anchor}' font-weight='bold' {FONT}>{written}</text></g></g>"
    )


def moving(attribute: str, values: list[str], discrete: bool = False, kind: str = "animate", more: str = "") -> str:
    """Return an SVG element that animates an attribute of its parent in an endless loop."""
    values = [values[0]] * REST + values + [values[-1]] * END
    mode = " calcMode='discrete'" if discrete else ""
    return (
        f"<{kind} attributeName='{attribute}'{more} values='{';'.join(values)}' dur='{len(values) * SECONDS:g}s'"
        f"{mode} repeatCount='indefinite'/>"
    )


if __name__ == "__main__":
    (DOCS / "images" / "first_run.svg").write_text(draw(*record_run(sys.argv[1:])), encoding="utf-8")
