"""Record the default run in first_run.json, and draw README's animation of this run, first_run.svg.

python -m docs.scripts.first_run     # train as `python train.py` does, a few minutes; options are those of training
python -m docs.scripts.make_pages    # draw the recorded run again

Before every fourth GRPO step, the policy answers the run's held-out rows at temperature 1. Each row always has the same
random numbers as in the run's own evaluation, so the first and the last point equal `accuracy_sampled` in README's
table. Random numbers depend on keys, so the additional answers change nothing in the run.
"""

import base64
import io
import json
import sys
from html import escape
from itertools import chain, islice
from pathlib import Path

from docs.scripts.draw import BLUES, FAINT, FONT, INK, ORANGES, SOFT, Picture
from minivlmrl.config.import_utils import recipes_folder
from minivlmrl.config.loading import load_config
from minivlmrl.config.options import RunConfig
from minivlmrl.data.processor import Processor
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
EVERY = 4  # steps between two recordings
FILE = Path(__file__).with_suffix(".json")
# the chart's edges in pixels
LEFT, RIGHT, BOTTOM, TOP = 58, 640, 408, 238
REST, END, MOMENT = 3, 14, 0.25  # extra moments at the first and last one; seconds per moment


class Recorder(Callback):
    """Record the policy's answers to the held-out rows before each fourth GRPO step."""

    def __init__(self, config: RunConfig):
        self.rewards = held_out_rewards(config)
        self.sampling = config.sampling
        self.rows = load_task(config, {})["eval"]
        self.moments = []

    def on_step_begin(self, trainer, optimizer, step, number, batches):
        if trainer.stage == "grpo" and number % EVERY == 0:
            self.record_answers(trainer.policy, trainer.processor, number)

    def record_answers(self, policy: VisionLanguageModel, processor: Processor, step: int):
        """Answer all held-out rows, as `evaluate` does for its metric accuracy_sampled."""

        def describe(row, completions, scores) -> tuple[str | None, float]:
            return find_answer(processor.decode(completions[0].ids)), scores[0][0]

        sample = Sampler(policy, processor, self.sampling)
        parts = generate_for_rows(sample, self.rows, 1, self.rewards, "evaluation", describe)
        answers, scores = zip(*chain.from_iterable(parts), strict=True)
        accuracy = round(sum(scores) / len(scores), 3)
        self.moments.append({"step": step, "accuracy": accuracy, "answers": list(answers[:SHOWN])})


def png(image) -> str:
    """Encode an image as PNG, in base64."""
    image.save(file := io.BytesIO(), "png", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def record(options: list[str]):
    """Train with these options, and write first_run.json."""
    config = load_config(recipes_folder() / "shapes.yaml", options)
    folder = Path(config.output_dir)
    recorder = Recorder(config)
    run_training(config, [*default_callbacks(config), recorder])
    checkpoint = folder / "checkpoint"
    recorder.record_answers(load_model(checkpoint), load_processor(checkpoint), config.grpo.max_steps)
    recording = {
        "command": " ".join(["python -m docs.scripts.first_run", *options]),
        "summary": json.loads((folder / "summary.json").read_text()),
        "pictures": [row.columns | {"png": png(row.images[0])} for row in islice(recorder.rows, SHOWN)],
        "moments": recorder.moments,
    }
    text = json.dumps(recording, separators=(",", ":"))
    FILE.write_text(text.replace('{"step"', '\n{"step"') + "\n")


def held(values: list) -> list:
    """Repeat the first and the last value, so that the animation pauses at both ends."""
    return [values[0]] * REST + values + [values[-1]] * END


def moving(attribute: str, values: list, discrete=False, kind="animate", more="") -> str:
    """Return an SVG element that animates one attribute in its parent element in an endless loop."""
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


def colour(is_right: bool) -> str:
    """Return blue for right answers and orange for wrong answers."""
    return BLUES[0] if is_right else ORANGES[0]


def tile(number: int, shown: dict, moments: list[dict]) -> list[str]:
    """Draw a held-out image, and below it the model's answer at each moment."""
    middle = 748 / SHOWN * (number + 0.5)
    answers = [moment["answers"][number] for moment in moments]
    words = [(escape((answer or "no answer")[:16]), colour(answer == shown["solution"])) for answer in answers]
    return [
        f"<image x='{middle - 48:g}' y='56' width='96' height='96' style='image-rendering:pixelated' "
        f"href='data:image/png;base64,{shown['png']}'/>",
        column(middle, 182, words, 23, f"answer{number}"),
    ]


def chart(picture: Picture, moments: list[dict]):
    """Draw the accuracy on held-out images; the animation reveals the curve step by step."""
    last_step = moments[-1]["step"]

    def place(step: float, share: float) -> tuple[float, float]:
        return round(LEFT + (RIGHT - LEFT) * step / last_step, 1), round(BOTTOM - (BOTTOM - TOP) * share, 1)

    for share in (0, 0.5, 1):
        picture.line([place(0, share), place(last_step, share)], FAINT, 2)
        picture.text(LEFT - 12, place(0, share)[1] + 7, f"{share:g}", 21, SOFT, "end")
    picture.line([place(0, CHANCE), place(last_step, CHANCE)], "#adb5bd", 2)
    picture.text(RIGHT, place(0, CHANCE)[1] - 8, "chance", 21, SOFT, "end")
    points = [place(moment["step"], moment["accuracy"]) for moment in moments]
    widths = [f"{x - LEFT:g}" for x, _ in points]
    window = f"<rect x='{LEFT}' y='0' width='{RIGHT - LEFT}' height='{BOTTOM}'>{moving('width', widths)}</rect>"
    picture.lines.append(f"<clipPath id='now'>{window}</clipPath><g clip-path='url(#now)'>")
    picture.line(points, colour(True), 4)
    ball = moving("cx", [f"{x:g}" for x, _ in points]) + moving("cy", [f"{y:g}" for _, y in points])
    x, y = points[-1]
    picture.lines.append(f"</g><circle cx='{x:g}' cy='{y:g}' r='7' fill='{colour(True)}'>{ball}</circle>")
    numbers = [(f"{moment['accuracy']:.2f}", colour(True)) for moment in moments]
    picture.lines.append(column(728, TOP + 44, numbers, 38, "accuracy", "end"))
    steps = [(f"step {moment['step']}", INK) for moment in moments]
    picture.lines.append(column(728, TOP + 88, steps, 23, "step", "end"))


def draw() -> str:
    """Return the animated SVG; viewers without animation show its last moment."""
    data = json.loads(FILE.read_text())
    moments = data["moments"]
    picture = Picture(748, 430, "A model learns to name shapes in held-out pictures over 160 steps of GRPO")
    picture.text(20, 34, "What is it? The model's answers, right and wrong:", 25, anchor="start", bold=True)
    for number, shown in enumerate(data["pictures"]):
        picture.lines += tile(number, shown, moments)
    picture.text(20, 224, "accuracy on 256 held-out pictures", 23, INK, "start")
    chart(picture, moments)
    return picture.svg()


PICTURES = {"first_run.svg": draw}

if __name__ == "__main__":
    record(sys.argv[1:])
