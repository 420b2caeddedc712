"""docs/walkthrough.md and its drawings: the stops of tools/replay.py for one prompt of the default recipe.

The model has had 12 steps of SFT, and weights and activations are float64: so no number that is printed depends on the
machine. `python -m docs.make_pages` writes the page, and a test compares it with what the code prints.
"""

import contextlib
import copy
import html
import io
import itertools
import re
from functools import cache
from pathlib import Path

import numpy as np
import PIL.Image
from torch import nn

from docs.draw import BLUES, FAINT, INK, ORANGES, PAPER, SOFT, Picture
from minivlmrl.advantages import EPSILON
from minivlmrl.run.config import load_config
from minivlmrl.tools.replay import Stop, Walk, go_to, link

DOCS = Path(__file__).parent
PROMPT, OPTIONS = 1, ["--sft.max_steps=12", "--model.dtype=float64", "--num_threads=1"]
COMMAND = f"python -m minivlmrl replay recipes/shapes.yaml --prompt={PROMPT} {' '.join(OPTIONS)}"
HEAD = f"""\
# One prompt on its way through a GRPO step

What happens to one picture and one question in the first GRPO step of the default run. Below each title is the function
of the book that does it, linked to its line. All numbers come from this command, which takes some seconds:

```bash
{COMMAND}
```

`python -m minivlmrl replay runs/shapes --stage=grpo --step=73 --prompt=4` shows any step of a run of your own. It
trains again from the nearest state in `runs/shapes/states` (`--state_steps=20 --keep_states=99` keeps more of them).

Here SFT has only had 12 of its 40 steps, so that the eight completions differ, and all is computed in float64, so that
no digit depends on the machine: one thread, two threads and torch without AVX print the same.
`python -m docs.make_pages` writes this page anew, and [test_docs.py](../tests/test_docs.py) compares it.

Letters: P tokens of the prompt, R completions of the group, M their tokens together, T tokens of the longest.
"""
WHY = """\
# RGB
A picture is numbers from 0 to 255: height, width, and red, green, blue. This one is drawn by the task; yours come
from files.

<img src='walkthrough.png' width='168' alt='a purple triangle'>

# Resize
The tower needs sides that are multiples of a merged token, here {factor} pixels, and the area decides what a
picture costs. This one fits already.

# Patches
A patch is one row of {patch_dim} numbers: 3 channels x 2 frames (a still picture is shown twice) x {side} x {side}
pixels, normalised by mean and deviation. The four patches that will become one token come together.

# Windows
Attention over all patches of a large picture would be too dear, so most blocks attend inside windows. The tower sorts
tokens by window, and each window is one stretch.

![the picture, its patches in their order, and the order of merged tokens by windows](walkthrough_patches.svg)

# Merged tokens
Four patches side by side go through a small MLP. What comes out has the decoder's width and takes the place of a
word's embedding.

# Prompt
The template lays out the messages. The image is {merged} placeholders, one for each merged token.

# Positions
Text counts up on all three axes together. The image has one time, and its rows and columns count from there, so
tokens that are neighbours in the picture are neighbours in position. Text goes on after the largest.

# Run
The prompt is computed once for all eight completions. A completion's last token is predicted but predicts nothing, so
it is not in the run: {length} + {M} - 8 = {N} tokens.

# Logits
The state before a token makes {vocab} logits; the token's logit less the logsumexp of all is its log-probability. The
first completion's tokens: the form is nearly certain by now, the colour is not.

# Log-probabilities
The same for all M tokens, without ever holding M x {vocab} logits. They equal those of the sampler, which has computed
them token by token with kept keys. Rows are only padded for the loss.

![the eight completions, token by token, shaded by probability](walkthrough_tokens.svg)

# Text
Rewards judge text. A byte-level token that is half a character shows as a replacement mark.

# Rewards
1 for the form with weight {form:g}, and 1 for the right answer with weight {truth:g}.

# Advantages
(reward - mean) / (standard deviation + {epsilon:g}) of these eight. The two right answers are {best:.2g} deviations
above the group: no critic is needed to know that they are good.

# Ratio
How much likelier a token is now than when it was drawn. In the first step after a rollout the policy has not moved,
so all are 1 and nothing is clipped. In later passes over the rollout they differ.

# Loss
With ratios of 1 and advantages that add up to 0 the value is 0, whatever the model: it is no measure of progress. Its
gradient is -advantage x the gradient of the log-probability. The KL to the reference, the policy after SFT, is 0 in the
first step, too.

# Gradient
Of all {prompts} prompts of the step. It reaches every module, through the merged tokens also the vision tower.

# Update
AdamW moves each weight by about the learning rate, here still in its warmup. The two right answers become likelier, the
two without the form less likely. The wrong answers in the right form are a little below the group's mean, but share
their tokens with the right ones: most of them gain, too.

![gradient norms of the modules, and how far each completion's log-probability moves](walkthrough_update.svg)
"""


@cache
def begin() -> tuple[Walk, nn.Module]:
    """Train 12 steps of SFT and sample, some seconds; also a copy of the policy, which the walk's last stops train."""
    with contextlib.redirect_stdout(io.StringIO()):
        moment = go_to(load_config(DOCS.parent / "recipes" / "shapes.yaml", OPTIONS), "grpo", 0)
    return Walk(*moment, 0, PROMPT), copy.deepcopy(moment[0].policy)


@cache
def stops() -> list[Stop]:
    """Follow the prompt."""
    return list(begin()[0].stops())


def page() -> str:
    """The page."""
    _, *titles_and_texts = re.split(r"^# (.+)\n", WHY, flags=re.MULTILINE)
    titles_and_texts = [text.format(**numbers()) for text in titles_and_texts]
    why, parts = dict(zip(titles_and_texts[::2], map(str.strip, titles_and_texts[1::2]), strict=True)), [HEAD]
    for number, stop in enumerate(stops(), start=1):
        where = link(stop.code, "[`{name}`](../{path}#L{line})")
        parts.append(f"## {number}. {stop.title}\n\n{where}\n\n{why[stop.title]}\n")
        parts.append("\n".join(["```text", *stop.lines, "```", ""]))
    return "\n".join(parts)


def numbers() -> dict[str, float]:
    """The numbers that the texts name."""
    walk, settings = begin()[0], begin()[0].algorithm.processor.image_processor
    said, ids = data("Rewards")["completions"], walk.prompt.input_ids
    form, truth = walk.algorithm.run.rewards.values()
    sizes = {"factor": settings.factor, "patch_dim": settings.patch_dim, "side": settings.patch_size}
    counts = {"merged": len(data("Windows")["order"]), "vocab": walk.policy.config.vocab_size, "length": len(ids)}
    counts |= {"M": len(walk.group.completion_ids), "N": len(walk.group.input_ids)}
    rewards = {"form": form, "truth": truth, "epsilon": EPSILON, "best": max(one["advantage"] for one in said)}
    return sizes | counts | rewards | {"prompts": walk.algorithm.config.prompts_per_step}


def data(title: str) -> dict:
    """What a stop has for drawings."""
    return next(stop.data for stop in stops() if stop.title == title)


def write_picture():
    """Write walkthrough.png, if it does not show the picture yet."""
    path, pixels = DOCS / "walkthrough.png", data("RGB")["pixels"]
    if not path.is_file() or not np.array_equal(np.asarray(PIL.Image.open(path)), pixels):
        PIL.Image.fromarray(pixels).save(path)


def patches() -> str:
    """The picture with its patches in their order; beside it the merged tokens, numbered by windows."""
    pixels, side, order = data("RGB")["pixels"], data("Patches")["side"], data("Windows")["order"]
    (_, rows, cols), scale, left, top = data("Patches")["grid"], 5, 24, 64
    size, right = cols * side * scale, 24 + cols * side * scale + 48
    picture = Picture(right + size + 24, top + rows * side * scale + 44, "Patches and windows of the picture")
    picture.text(left + size / 2, 28, "patches, in the order of pixel_values", 14, bold=True)
    picture.text(right + size / 2, 28, "merged tokens, in the order of windows", 14, bold=True)
    picture.text(left + size / 2, 48, f"{rows} x {cols} patches of {side} x {side} pixels", 12, SOFT)
    picture.text(right + size / 2, 48, "colour: a window, one stretch of the tower's input", 12, SOFT)
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
        picture.text(x + cell / 2, y + cell / 2 + 4, str(number), 11, PAPER if middle.mean() < 128 else INK)
    palette = (BLUES[2], ORANGES[2], "#d5ead0", "#e6d8ee")
    for position, token in enumerate(order):
        row, col = divmod(token, cols // 2)
        picture.box(left + col * merged, top + row * merged, merged, merged, "none", INK, 1.5)
        picture.box(right + col * merged, top + row * merged, merged, merged, palette[position // 4 % 4])
        picture.text(right + (col + 0.5) * merged, top + (row + 0.5) * merged + 5, str(position), 15)
    picture.text(left, top + rows * cell + 24, "Thick lines: the 2 x 2 patches of one merged token.", 12, SOFT, "start")
    return picture.svg()


def tokens() -> str:
    """The completions, a row each: a box for each token, darker where it is less likely."""
    words, logps = data("Log-probabilities")["words"], data("Log-probabilities")["logps"]
    said = data("Rewards")["completions"]
    width = max(sum(8 + 7.2 * len(word) for word in row) for row in words)
    picture = Picture(int(width) + 210, 76 + 28 * len(words), "The completions token by token")
    picture.text(
        24, 28, "Eight answers to one picture: the darker, the less likely was the token", 14, INK, "start", True
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
    """A colour between white (0) and `colour` (1)."""
    ends = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(255 + (end - 255) * min(1.0, share)):02x}" for end in ends)


def token(picture: Picture, x: float, y: float, word: str, colour: str) -> float:
    """Draw a token; returns how wide it is."""
    width = 8 + 7.2 * len(word)
    picture.box(x, y, width - 2, 22, colour, FAINT)
    picture.text(x + width / 2 - 1, y + 15, html.escape(word, quote=False).replace("\ufffd", "?"), 11)
    return width


def update() -> str:
    """Gradient norms of the modules; and by how much the log-probability of each completion moves."""
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
    picture.text(580, 48, "number, advantage, change; blue: above the group's mean", 12, SOFT)
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
