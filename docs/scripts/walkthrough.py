"""Generate docs/walkthrough.md and its images, which follow one prompt through a GRPO step.

The page shows the first GRPO step in the default recipe, with 12 SFT steps before GRPO. Weights
and activations are float64, so that no printed number depends on the machine. `python -m
docs.scripts.make_pages` writes the page, and a test compares the page with this script's output.
"""

import contextlib
import copy
import html
import inspect
import io
import itertools
import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from torch import Tensor, nn

from docs.scripts.draw import BLUES, FAINT, INK, ORANGES, PAPER, SOFT, Picture
from minivlmrl.data import image
from minivlmrl.data.processor import Processor
from minivlmrl.diagnostics.replay import go_to, run_config
from minivlmrl.diagnostics.trace import StepTracer
from minivlmrl.losses import grpo
from minivlmrl.losses.advantages import EPSILON, group_advantages
from minivlmrl.model import attention, logprobs, rope, vision
from minivlmrl.rewards.columns import call_rewards
from minivlmrl.run import loop
from minivlmrl.run.optimizer import finish_gradients
from minivlmrl.run.rollout_log import groups

DOCS = Path(__file__).parents[1]
RECIPE = DOCS.parent / "recipes" / "shapes.yaml"
PROMPT, OPTIONS = 1, ["--sft.max_steps=12", "--model.dtype=float64", "--num_threads=1"]
COMMAND = f"python -m minivlmrl replay recipes/shapes.yaml --prompt={PROMPT} {' '.join(OPTIONS)}"
TRACE_OPTIONS = ["--grpo.prompts_per_step=2", "--grpo.num_generations=4"]
HEAD = f"""\
# Walkthrough

What does a GRPO step compute, from pixels to the weights' update? Each section shows a function, and its numbers for
one image and one question. This command prints the completions, rewards and log-probabilities below:

```bash
{COMMAND}
```

SFT has run for 12 of 40 steps, so that the completions still differ. The step is computed in float64, so that every
machine prints the same numbers.

For a step from your own run, use `python -m minivlmrl replay runs/shapes --stage=grpo --step=5 --prompt=4`. With
`--trace=step5.html`, this command writes [a page](step.html) that shows every line of the reading list with its
tensors. `--trace=step5.html,my_rewards.py` adds your own file.

[![Each line of grpo_loss with the tensors that it computed](step.png)](step.html)

![A GRPO step as a flow chart](step.svg)

The pictures count tokens in the prompt (P), in all completions (M) and in the packed sequence (N), completions per
prompt (G) and in total (n), and rewards (K).
"""
WHY = """\
# RGB
An image is an array with height x width x 3 values from 0 to 255, for red, green and blue.

<img src='walkthrough.png' width='168' alt='a purple triangle'>

# Patches
A patch has {patch_dim} normalised values: 3 channels x 2 frames x {side} x {side} pixels. A still image has two equal
frames. The four patches for one image token follow one another.

# Attention windows
Most blocks in the vision tower attend only within windows, so the tokens are sorted by window, as
[this picture](windows.svg) shows for a larger image.

![The image, its patches in their order, and the order of image tokens by window](walkthrough_patches.svg)

# Image tokens
A small MLP, the merger, turns four patches into one vector with a word embedding's width.

# Prompt
The chat template turns the messages into text. {merged} placeholders stand for the image tokens.

# Positions
For text, the three axes count up together. An image has one position in time, and counts height and width from there.
The text after the image continues from the largest position, as [this picture](mrope.svg) shows.

# Packed sequence
The prompt is processed once for eight completions. A completion's token attends to the prompt and to earlier tokens in
the same completion (`GroupAttention`). The last token in a completion predicts nothing and is left out, so the
sequence has {length} + {M} - 8 = {N} tokens. The picture shows a smaller sequence with two prompts:

![Each line is a token, and its colours show the tokens to which it attends](mask.svg)

# Log-probabilities
The hidden state before a token gives {vocab} logits. The token's log-probability is its logit minus the logsumexp over
the logits.

![The eight completions, token by token, shaded by probability](walkthrough_tokens.svg)

# Text
The rewards read text. If a token ends inside a multi-byte character, the broken character is shown as \ufffd.

# Rewards
The format gets a reward with weight {form:g}, and the right answer a reward with weight {truth:g}.

# Advantages
The advantage is (reward - mean) / (standard deviation + {epsilon:g}) over the eight completions. The two right answers
are {best:.2g} standard deviations above the group's mean.

# Loss
The ratios are 1 and the advantages add up to 0, so [the loss is 0](faq.md#why-is-my-loss-0). The gradient is not 0:
each token contributes -advantage times the log-probability's gradient.

# Gradient
These are gradient norms for the whole step with {prompts} prompts. The gradient reaches every module, and the vision
tower through the image tokens.

# Update
AdamW changes each weight by about the learning rate. The two right answers become more likely, and the two completions
without the format less likely. Most wrong answers with the format also become more likely, because they share tokens
with the right answers.

![Gradient norms of the modules, and the change of each completion's log-probability](walkthrough_update.svg)
"""


@dataclass
class Stop:
    """A section of the walkthrough: a function, its printed lines, and data for images."""

    title: str
    code: Callable
    lines: list[str]
    data: dict = field(default_factory=dict)


class Walk:
    """Follow one prompt and its completions through a training step."""

    def __init__(self, trainer, optimizer, step, rows):
        self.trainer, self.optimizer, self.step, self.index = trainer, optimizer, step, PROMPT
        self.policy, self.temperature = trainer.policy, trainer.run.sampling.temperature
        self.row, [batch] = rows[PROMPT], step.micro_batches
        [self.batch] = trainer.micro_batches([step.rollout.groups[PROMPT]], batch.advantages)
        self.batch.normalizer, self.group = batch.normalizer, self.batch.group
        [self.prompt], self.ids = self.group.prompts, self.group.completion_ids.split(self.group.layout.row_lengths)

    def stops(self) -> Iterator[Stop]:
        """Yield all sections in order; the last sections train the model for one step."""
        for part in (self.see, self.ask, self.answer, self.earn, self.learn):
            yield from part()

    @torch.no_grad()
    def see(self) -> Iterator[Stop]:
        """Yield the sections about images: from pixels to the decoder's input vectors."""
        settings, grids = self.trainer.processor.image_processor, self.prompt.image_grid_thw
        pixels = np.asarray(image.to_rgb(self.row.images[0]))
        yield Stop("RGB", image.load_image, [shown("pixels", pixels, 9)], {"pixels": pixels})
        lines = [shown("pixel_values", self.prompt.pixel_values), shown("image_grid_thw", grids)]
        yield Stop("Patches", image.patchify, lines, {"grid": grids[0].tolist(), "side": settings.patch_size})
        order, windows, frames = vision.window_order(grids, self.policy.config.vision_config)
        lines = [shown("order", order, 16), f"patches per window {windows}, per frame {frames}"]
        yield Stop("Attention windows", vision.window_order, lines, {"order": order.tolist()})
        merged = self.policy.visual(self.group.pixel_values, grids)
        yield Stop("Image tokens", vision.VisionTransformer.forward, [shown("vision_embeds", merged)])

    def ask(self) -> Iterator[Stop]:
        """Yield the sections about the prompt: its ids, positions, and packed sequence."""
        ids, lengths, config = self.prompt.input_ids, self.group.layout.row_lengths, self.policy.config
        same = [(word, len(list(some))) for word, some in itertools.groupby(self.spell(ids))]
        words = " ".join(f"{word} x {count}" if count > 1 else word for word, count in same)
        yield Stop("Prompt", Processor.__call__, [shown("input_ids", ids), *textwrap.wrap(words, 100)])
        positions = rope.get_rope_index(ids, self.prompt.image_grid_thw, config, self.prompt.second_per_grid_ts)
        start = max(0, int((ids == config.image_token_id).int().argmax()) - 2)
        lines = [shown("position_ids", positions), f"from token {start} on:"]
        for name, axis in zip(("time", "height", "width"), positions.tolist(), strict=True):
            lines.append(f"  {name:<7}" + " ".join(f"{x:2}" for x in axis[start : start + 21]))
        yield Stop("Positions", rope.get_rope_index, lines)
        lines = [f"a prompt of {len(ids)} tokens and completions of {lengths} tokens, each without its last token"]
        lines.append(f"as separate rows, they would be {sum(len(ids) + n - 1 for n in lengths)} tokens")
        yield Stop("Packed sequence", attention.GroupLayout, [shown("input_ids", self.group.input_ids), *lines])

    @torch.no_grad()
    def answer(self) -> Iterator[Stop]:
        """Yield the sections about the completions: their log-probabilities and texts."""
        words = [self.spell(row) for row in self.ids]
        rows = self.logps()
        lines = [shown("logps", rows[self.group.completion_mask.bool()]), shown("padded", rows, 0)]
        lines.append(shown("sampler_logps", self.batch.sampler_logps[self.group.completion_mask.bool()]))
        yield Stop("Log-probabilities", logprobs.per_token_logps, lines, {"words": words, "logps": rows.tolist()})
        texts = map(self.trainer.processor.decode, self.ids)
        yield Stop("Text", Processor.decode, [f"{number}  {text!r}" for number, text in enumerate(texts)])

    def earn(self) -> Iterator[Stop]:
        """Yield the sections about the completions' rewards and advantages."""
        about = list(groups(self.trainer, self.step))[self.index]
        lines = ["".join(f"{name:>12}" for name in ("completion", *self.trainer.run.rewards, "sum"))]
        for number, said in enumerate(about["completions"]):
            cells = number, *map(clean, said["rewards"].values()), clean(said["reward"])
            lines.append("".join(f"{cell:>12}" for cell in cells))
        yield Stop("Rewards", call_rewards, [*lines, f"solution: {about['solution']!r}"], about)
        yield Stop("Advantages", group_advantages, [shown("advantages", self.batch.advantages, 20)])

    def learn(self) -> Iterator[Stop]:
        """Yield the sections about the loss, its gradient, and the change by the optimizer step."""
        norms, before, limit = {}, self.logps(), self.trainer.run.optimizer.max_grad_norm
        with torch.no_grad():
            share = self.trainer.loss(self.batch)[0].item()
        self.optimizer.register_step_pre_hook(lambda *_: norms.update(gradient_norms(self.trainer.trained)))
        metrics = loop.optimizer_step(self.trainer, self.step, self.optimizer, 0)
        text = f"loss of the step: {clean(metrics['loss'])}; share of this prompt: {clean(share)}"
        yield Stop("Loss", grpo.grpo_loss, [text])
        lines = [f"{name:<24}{clean(value):>9}" for name, value in norms.items()]
        lines.append(f"all weights: {clean(metrics['grad_norm'])}, before it is clipped to {limit:g}")
        yield Stop("Gradient", finish_gradients, lines, {"norms": norms})
        change = ((self.logps() - before) * self.batch.loss_mask).sum(1).tolist()
        lines = [f"learning rate {metrics['learning_rate']:.3g}; change of the log-probability of each completion:"]
        data = {"change": change, "metrics": metrics}
        yield Stop("Update", loop.optimizer_step, [*lines, "  ".join(map(clean, change))], data)

    @torch.no_grad()
    def logps(self) -> Tensor:
        """Compute the completions' log-probabilities (R, T) under the current policy."""
        return self.group.pad(logprobs.per_token_logps(self.policy, self.group, self.temperature)[0])

    def spell(self, ids: Tensor) -> list[str]:
        """Return each token's text, with escapes such as \\n for invisible characters."""
        decode = self.trainer.processor.tokenizer.decode
        return [repr(decode([number]))[1:-1] for number in ids.tolist()]


def link(code: Callable) -> str:
    """Return a Markdown link to a function's source."""
    code = inspect.unwrap(code)
    path = Path(inspect.getsourcefile(code)).relative_to(DOCS.parent)
    return f"[`{code.__qualname__}`](../{path.as_posix()})"


def gradient_norms(model) -> dict[str, float]:
    """Compute the gradient norm for each layer, block, or other module."""
    squares = Counter()
    for name, parameter in model.named_parameters():
        parts = name.removeprefix("policy.").split(".")[:-1]
        module = ".".join(parts[: 3 if {"blocks", "layers"} & set(parts) else 2])
        squares[module] += 0.0 if parameter.grad is None else parameter.grad.square().sum().item()
    return {name: math.sqrt(value) for name, value in squares.items() if value}


def clean(value: float | None) -> str:
    """Format a number with three digits, and a rounding error as 0."""
    return f"{0.0 if abs(value) < 2e-7 else value:.3g}" if isinstance(value, float) else str(value)


def shown(name: str, value: Tensor | np.ndarray, count: int = 4) -> str:
    """Format a tensor as one line: name, shape, dtype and the first `count` elements."""
    flat, dtype = value.reshape(-1), str(value.dtype).removeprefix("torch.")
    numbers = [*map(clean, flat[:count].tolist()), *["..."] * (0 < count < len(flat))]
    return " ".join([name, str(tuple(value.shape)), dtype, *numbers])


def write_step_page():
    """Write step.html: the same step with two prompts and four completions for each prompt, line by line."""
    config, tracer = run_config(RECIPE, None, [*OPTIONS, *TRACE_OPTIONS]), StepTracer([], "grpo", 0)
    trainer, optimizer, step, _ = go_to(config, "grpo", 0, tracer)
    with tracer:
        loop.optimizer_step(trainer, step, optimizer, 0)
    tracer.write(DOCS / "step.html", "The first GRPO step of recipes/shapes.yaml")


@cache
def begin() -> tuple[Walk, nn.Module]:
    """Train 12 SFT steps, and sample completions, which takes some seconds.

    Also returns a copy of the policy, which the last sections of the walkthrough train.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        moment = go_to(run_config(RECIPE, None, OPTIONS), "grpo", 0)
    return Walk(*moment), copy.deepcopy(moment[0].policy)


@cache
def stops() -> list[Stop]:
    """Train a step, and return all sections of the walkthrough."""
    return list(begin()[0].stops())


def page() -> str:
    """The page."""
    _, *titles_and_texts = re.split(r"^# (.+)\n", WHY, flags=re.MULTILINE)
    titles_and_texts = [text.format(**numbers()) for text in titles_and_texts]
    why, parts = dict(zip(titles_and_texts[::2], map(str.strip, titles_and_texts[1::2]), strict=True)), [HEAD]
    for number, stop in enumerate(stops(), start=1):
        parts.append(f"## {number}. {stop.title}\n\n{link(stop.code)}\n\n{why[stop.title]}\n")
        parts.append("\n".join(["```text", *stop.lines, "```", ""]))
    return "\n".join(parts)


def numbers() -> dict[str, float]:
    """Return the numbers that the page's text mentions."""
    walk, settings = begin()[0], begin()[0].trainer.processor.image_processor
    said, ids = data("Rewards")["completions"], walk.prompt.input_ids
    form, truth = walk.trainer.run.rewards.values()
    sizes = {"factor": settings.factor, "patch_dim": settings.patch_dim, "side": settings.patch_size}
    counts = {
        "merged": len(data("Attention windows")["order"]),
        "vocab": walk.policy.config.vocab_size,
        "length": len(ids),
    }
    counts |= {"M": len(walk.group.completion_ids), "N": len(walk.group.input_ids)}
    rewards = {"form": form, "truth": truth, "epsilon": EPSILON, "best": max(one["advantage"] for one in said)}
    return sizes | counts | rewards | {"prompts": walk.trainer.config.prompts_per_step}


def data(title: str) -> dict:
    """Return the data for images in the section with this title."""
    return next(stop.data for stop in stops() if stop.title == title)


def write_picture():
    """Write the prompt's image to walkthrough.png, unless the file already has this image."""
    path, pixels = DOCS / "walkthrough.png", data("RGB")["pixels"]
    if not path.is_file() or not np.array_equal(np.asarray(PIL.Image.open(path)), pixels):
        PIL.Image.fromarray(pixels).save(path)


def patches() -> str:
    """Draw the image with its patches in order, and its merged tokens, numbered by windows."""
    pixels, side, order = data("RGB")["pixels"], data("Patches")["side"], data("Attention windows")["order"]
    (_, rows, cols), scale, left, top = data("Patches")["grid"], 5, 24, 64
    size, right = cols * side * scale, 24 + cols * side * scale + 48
    picture = Picture(right + size + 24, top + rows * side * scale + 44, "Patches and windows of the picture")
    picture.text(left + size / 2, 28, "patches, in the order of pixel_values", 14, bold=True)
    picture.text(right + size / 2, 28, "image tokens, in the order of windows", 14, bold=True)
    picture.text(left + size / 2, 48, f"{rows} x {cols} patches of {side} x {side} pixels", 12, SOFT)
    picture.text(right + size / 2, 48, "colour: a window, a part of the tower's input", 12, SOFT)
    for y, line in enumerate(pixels.tolist()):
        starts = [0, *(x for x in range(1, len(line)) if line[x] != line[x - 1]), len(line)]
        for start, end in itertools.pairwise(starts):
            colour = "#" + "".join(f"{value:02x}" for value in line[start])
            picture.box(left + start * scale, top + y * scale, (end - start) * scale, scale, colour, colour, 0.3)
    cell, merged = side * scale, side * scale * 2
    for number in range(rows * cols):
        block, inside = divmod(number, 4)
        x = left + (block % (cols // 2) * 2 + inside % 2) * cell
        y = top + (block // (cols // 2) * 2 + inside // 2) * cell
        picture.box(x, y, cell, cell, "none", PAPER, 0.7)
        middle = pixels[int((y - top + cell / 2) / scale), int((x - left + cell / 2) / scale)]
        colours = (PAPER, INK) if middle.mean() < 128 else (INK, PAPER)
        picture.text(x + cell / 2, y + cell / 2 + 4, str(number), 11, colours[0], halo=colours[1])
    palette = (BLUES[2], ORANGES[2], "#d5ead0", "#e6d8ee")
    for position, token in enumerate(order):
        row, col = divmod(token, cols // 2)
        picture.box(left + col * merged, top + row * merged, merged, merged, "none", INK, 1.5)
        picture.box(right + col * merged, top + row * merged, merged, merged, palette[position // 4 % 4])
        picture.text(right + (col + 0.5) * merged, top + (row + 0.5) * merged + 5, str(position), 15)
    picture.text(left, top + rows * cell + 24, "Thick lines: the 2 x 2 patches of one image token.", 12, SOFT, "start")
    return picture.svg()


def tokens() -> str:
    """Draw each completion as a row with a box per token; less likely tokens are darker."""
    words, logps = data("Log-probabilities")["words"], data("Log-probabilities")["logps"]
    said = data("Rewards")["completions"]
    width = max(sum(8 + 7.2 * len(word) for word in row) for row in words)
    picture = Picture(int(width) + 210, 76 + 28 * len(words), "The completions token by token")
    picture.text(
        24, 28, "Eight completions for one image. The darker a token, the less likely it was", 14, INK, "start", True
    )
    for x, name in ((int(width) + 82, "reward"), (int(width) + 160, "advantage")):
        picture.text(x, 52, name, 12, SOFT)
    for number, (row, values, one) in enumerate(zip(words, logps, said, strict=True)):
        x, y = 44.0, 62 + 28 * number
        picture.text(24, y + 16, str(number), 12, SOFT)
        for word, logp in zip(row, values, strict=False):
            x += token(picture, x, y, word, shade(ORANGES[1], -logp / 4))
        picture.text(int(width) + 82, y + 16, f"{one['reward']:g}", 12)
        picture.text(int(width) + 160, y + 16, f"{one['advantage']:+.2f}", 12, bold=abs(one["advantage"]) > 1)
    return picture.svg()


def shade(colour: str, share: float) -> str:
    """Return a colour between white (share 0) and `colour` (share 1)."""
    ends = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(255 + (end - 255) * min(1.0, share)):02x}" for end in ends)


def token(picture: Picture, x: float, y: float, word: str, colour: str) -> float:
    """Draw a token's box, and return its width."""
    width = 8 + 7.2 * len(word)
    picture.box(x, y, width - 2, 22, colour, FAINT)
    picture.text(x + width / 2 - 1, y + 15, html.escape(word, quote=False).replace("\ufffd", "?"), 11)
    return width


def update() -> str:
    """Draw each module's gradient norm, and the change in completions' log-probabilities."""
    norms, change = data("Gradient")["norms"], data("Update")["change"]
    worth = [one["advantage"] for one in data("Rewards")["completions"]]
    picture = Picture(760, 84 + 26 * max(len(norms), len(change)), "Gradients and what the update moves")
    picture.text(190, 28, "gradient norm by module", 14, bold=True)
    for row, (name, value) in enumerate(norms.items()):
        y, length = 62 + 26 * row, round(170 * value / max(norms.values()), 2)
        picture.text(160, y + 12, name, 12, INK, "end")
        picture.box(168, y, max(length, 1), 16, BLUES[1], BLUES[1], 0)
        picture.text(174 + length, y + 12, f"{value:.2g}", 11, SOFT, "start")
    picture.text(580, 28, "change of each completion's log-probability", 14, bold=True)
    picture.text(580, 48, "number, advantage, change; blue: above the mean of the group", 12, SOFT)
    far = max(map(abs, change))
    for row, (moved, advantage) in enumerate(zip(change, worth, strict=True)):
        y, length = 62 + 26 * row, round(80 * abs(moved) / far, 2)
        colour = BLUES[1] if advantage > 0 else ORANGES[1]
        picture.text(446, y + 12, f"{row}  {advantage:+.2f}", 12, INK, "end")
        picture.box(580 - length * (moved < 0), y, max(length, 1), 16, colour, colour, 0)
        x, anchor = (586 + length, "start") if moved > 0 else (574 - length, "end")
        picture.text(x, y + 12, f"{moved:+.2f}", 11, SOFT, anchor)
    picture.line([(580, 56), (580, 62 + 26 * len(change))], INK)
    return picture.svg()


PICTURES = {"walkthrough_patches.svg": patches, "walkthrough_tokens.svg": tokens, "walkthrough_update.svg": update}
