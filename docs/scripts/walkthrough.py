"""Write docs/walkthrough.md and its pictures: what minimal.py computes in a GRPO step on one image.

Weights and activations are float64, so that printed numbers do not depend on the machine. `python -m
docs.scripts.make_pages` writes the page, and a test compares it with this script's output.
"""

import contextlib
import html
import inspect
import io
import itertools
import operator
import re
import sys
import textwrap
from argparse import Namespace
from functools import cache

import numpy as np
import PIL.Image
import torch
from torch import Tensor

import minimal
from docs.scripts.picture import BLUES, DOCS, FAINT, INK, ORANGES, PAPER, SOFT, Picture
from docs.scripts.step import GRPO, choose_rows, gradient_norms, trained_model

OPTIONS = Namespace(**vars(GRPO) | {"prompts_per_step": 1, "num_generations": 8})
HEAD = """\
# Walkthrough

In [minimal.py](../minimal.py), a GRPO step turns an image into new weights in eleven functions. A section shows the
tensors of one: shape, dtype and first values. `python -m docs.scripts.step` writes docs/step.html, with the tensors of
[each line](scripts/step.py):

[![Lines of grpo_loss with their tensors](images/step.png)](scripts/step.py)

The tiny model had only 15 SFT steps, so that its completions differ, and runs in float64, so that other machines print
the same.

![A GRPO step as a flow chart](images/step.svg)

Sizes: P patches, L prompt tokens, G completions, T tokens in the longest one.
"""
# sections: title, function, variables to print, and text, in which names in braces become numbers
SECTIONS = """\
# Patches: patchify image patches
The image becomes {P} patches of {side} x {side} pixels, with 3 channels x 2 frames x {side} x {side} = {numbers}
values; a still image has two equal frames. The four patches for one image token are adjacent rows.

<img src='images/walkthrough.png' width='168' alt='{solution}'>

# Prompt: render return
The chat template puts the question into a conversation, with a placeholder `<|image_pad|>` for each image token.

# Positions: mrope_positions
A token has a position in time, row and column, three equal ones in text. In an image that begins at p, row i and
column j have p, p + i and p + j. Text after it continues from the largest position:

![Positions of text and image tokens](images/mrope.svg)

# Vision tower: Vision.forward patches return
In the first of two blocks, a patch attends to its window, in the second to the whole image. An MLP, the merger, turns
four patches into one image token, as wide as a word embedding.

![Patches in their order, image tokens by window](images/walkthrough_patches.svg)

# Language model: QwenVL.forward mask x
Image tokens replace the placeholders. The three positions give the angles for the rotary embedding, and the causal mask
lets a token attend to itself and earlier ones. The decoder returns one hidden state per token, and keeps keys and
values of the prompt for all completions.

# Completions: sample probabilities
The model reads the prompt once, and then adds one token at a time to {G} completions, until all have ended. The mask is
False after the end.

# Log-probabilities: log_probabilities logits return
The hidden state before a token gives {vocab} logits. The log-probability is the logit of the token minus the logsumexp
over all. Darker tokens had lower ones:

![Completions, tokens shaded by probability](images/walkthrough_tokens.svg)

# Rewards: reward
A completion gets 0.5 for well-formed tags, and 1 more for the right answer, here {solution!r}:

# Advantages: group_advantages return
The advantage is (reward - mean) / (standard deviation + 0.0001), over the group.

# Loss: grpo_loss ratio loss
In the first step, policy, sampler and reference have the same weights, so all ratios are 1, and the KL is 0. The loss
of a token is minus its advantage. The mean over the group is about 0, but [the gradient is
not](metrics.md#why-is-my-loss-0).

# Update: train
The gradient reaches every module, the vision tower through the image tokens. AdamW changes weights by about the
learning rate, {learning_rate:g}. Right answers become likelier, completions without tags less likely. A wrong answer
with tags may become likelier, because right answers contain the same tags.

![Gradient norms, and changes of log-probabilities](images/walkthrough_update.svg)
"""
FOOT = """
## In the package

`train.py` does the same faster. It sorts patches [by window](images/windows.svg), so that no attention is computed
between windows, and packs prompts and completions of a step into one sequence:

![Attention mask of the packed sequence](images/mask.svg)
"""


@cache
def numbers() -> dict[str, dict]:
    """Run a GRPO step of minimal.py; return variables and result from the first call of each function.

    `train` also has gradient norms, and the change in each completion's log-probability.
    """
    model = trained_model()
    found, norms = {}, {}

    def look(frame, event, result):
        if event == "return" and frame.f_code.co_filename == minimal.__file__:
            name = frame.f_code.co_qualname
            found.setdefault(name, {**frame.f_locals, "return": result})
            if name == "grpo":  # returns after loss.backward(), so gradients exist
                norms.update(gradient_norms(model))

    rows = choose_rows(model, OPTIONS, {0.0, 0.5, 1.5})
    with contextlib.redirect_stdout(io.StringIO()):
        sys.setprofile(look)
        minimal.train(model, rows, minimal.grpo, OPTIONS)
        sys.setprofile(None)
    group = found["grpo"]
    with torch.no_grad():
        after = minimal.log_probabilities(model, group["prompt"], group["completions"])
    change = ((after - group["logps"]) * group["mask"]).sum(1).tolist()
    found["train"] |= {"norms": norms, "change": change}
    return found


def page() -> str:
    """Return walkthrough.md."""
    parts = [HEAD]
    sections = re.findall(r"^# (.+): (\S+)(.*)\n((?:(?!# ).*\n)+)", SECTIONS, flags=re.MULTILINE)
    for number, (title, name, names, text) in enumerate(sections, start=1):
        variables = numbers()[name]
        lines = [shown(key if key != "return" else "returns", variables[key]) for key in names.split()]
        _, line = inspect.getsourcelines(operator.attrgetter(name)(minimal))
        parts.append(f"## {number}. {title}\n\n[`{name}`](../minimal.py#L{line})\n\n{text.strip().format(**facts())}\n")
        if lines := lines + more_lines(title):
            parts.append("\n".join(["```text", *lines, "```", ""]))
    return "\n".join(parts) + FOOT


def facts() -> dict:
    """Return {name: number} for names in braces in docs/walkthrough.md."""
    group, patches = numbers()["grpo"], numbers()["patchify"]
    counts = {"P": len(patches["patches"]), "side": patches["patch"], "numbers": patches["patches"].shape[1]}
    counts |= {"vocab": numbers()["log_probabilities"]["logits"].shape[-1]}
    counts |= {
        "G": OPTIONS.num_generations,
        "solution": group["row"]["solution"],
        "learning_rate": OPTIONS.learning_rate,
    }
    return counts


def more_lines(title: str) -> list[str]:
    """Return the printed lines in a section that show no variable."""
    group = numbers()["grpo"]
    if title == "Prompt":
        runs = [(word, len([*same])) for word, same in itertools.groupby(spell(group["prompt"].ids))]
        return textwrap.wrap(" ".join(f"{word} x {count}" if count > 1 else word for word, count in runs), 100)
    if title == "Positions":
        return [shown("returns", group["prompt"].positions)]
    if title == "Completions":
        return [shown("completions", group["completions"]), shown("mask", group["mask"])]
    if title == "Rewards":
        return [f"{value:.1f}  {text!r}" for value, text in zip(group["rewards"], group["texts"], strict=True)]
    return []


def spell(ids: Tensor) -> list[str]:
    """Return token texts, with escapes such as \\n for invisible characters."""
    decode = numbers()["grpo"]["model"].tokenizer.decode
    return [repr(decode([number], skip_special_tokens=False))[1:-1] for number in ids.tolist()]


def clean(value: float) -> str:
    """Format a number with three significant digits; below 2e-7, rounding errors become 0."""
    return f"{0.0 if abs(value) < 2e-7 else value:.3g}" if isinstance(value, float) else str(value)


def shown(name: str, value, count: int = 3) -> str:
    """Format a value in one line: name, and for a tensor shape, dtype and first `count` numbers."""
    if isinstance(value, list):
        value = torch.tensor(value)
    if isinstance(value, PIL.Image.Image):
        value = np.asarray(value)
    if not isinstance(value, Tensor | np.ndarray):
        return f"{name} {clean(value)}"
    flat, dtype = value.reshape(-1), str(value.dtype).removeprefix("torch.")
    values = [*map(clean, flat[:count].tolist()), *["..."] * (count < len(flat))]
    return " ".join([name, str(tuple(value.shape)), dtype, *values])


def write_picture():
    """Write the prompt image to docs/walkthrough.png, unless the file already shows it."""
    path, pixels = DOCS / "images/walkthrough.png", np.asarray(numbers()["patchify"]["image"])
    if not path.is_file() or not np.array_equal(np.asarray(PIL.Image.open(path)), pixels):
        PIL.Image.fromarray(pixels).save(path)


def patches() -> str:
    """Draw the image with its patches in order, and its image tokens, colored by window."""
    values, windows = numbers()["patchify"], numbers()["Vision.forward"]["windows"]
    pixels, side, rows, cols = np.asarray(values["image"]), values["patch"], values["h"], values["w"]
    scale, left, top = 5, 24, 64
    size, cell = cols * side * scale, side * scale
    right = left + size + 48
    picture = Picture(right + size + 24, top + rows * cell + 44, "Patches and windows of the picture")
    picture.text(left + size / 2, 28, "patches, in their order", 14, bold=True)
    picture.text(right + size / 2, 28, "image tokens, in their order", 14, bold=True)
    picture.text(left + size / 2, 48, f"{rows} x {cols} patches of {side} x {side} pixels", 12, SOFT)
    picture.text(right + size / 2, 48, "color: a window of the vision tower", 12, SOFT)
    for y, line in enumerate(pixels.tolist()):
        starts = [0, *(x for x in range(1, len(line)) if line[x] != line[x - 1]), len(line)]
        for start, end in itertools.pairwise(starts):
            color = "#" + "".join(f"{value:02x}" for value in line[start])
            picture.box(left + start * scale, top + y * scale, (end - start) * scale, scale, color, color, 0.3)
    corners = [(col * cell, top + row * cell) for row, col in numbers()["Vision.forward"]["places"].tolist()]
    for number, (x, y) in enumerate(corners):
        picture.box(left + x, y, cell, cell, "none", PAPER, 0.7)
        middle = pixels[int((y - top + cell / 2) / scale), int((x + cell / 2) / scale)]
        ink, halo = (PAPER, INK) if middle.mean() < 128 else (INK, PAPER)
        picture.text(left + x + cell / 2, y + cell / 2 + 4, str(number), 11, ink, halo=halo)
    palette = (BLUES[2], ORANGES[2], "#d5ead0", "#e6d8ee")
    for number, ((x, y), (row, col)) in enumerate(zip(corners[::4], windows[::4].tolist(), strict=True)):
        picture.box(left + x, y, 2 * cell, 2 * cell, "none", INK, 1.5)
        picture.box(right + x, y, 2 * cell, 2 * cell, palette[2 * row + col])
        picture.text(right + x + cell, y + cell + 5, str(number), 15)
    picture.text(left, top + rows * cell + 24, "Thick lines: the 2 x 2 patches of one image token.", 12, SOFT, "start")
    return picture.svg()


def tokens() -> str:
    """Draw a row per completion and a box per token; less likely tokens are darker."""
    group = numbers()["grpo"]
    words = [spell(row[kept]) for row, kept in zip(group["completions"], group["mask"], strict=True)]
    scores = zip(group["rewards"].tolist(), group["advantages"].tolist(), strict=True)
    width = int(max(sum(8 + 7.2 * len(word) for word in row) for row in words))
    picture = Picture(width + 210, 76 + 28 * len(words), "The completions token by token")
    title = "Eight completions for one image. The darker a token, the less likely it was"
    picture.text(24, 28, title, 14, INK, "start", True)
    for x, name in ((width + 82, "reward"), (width + 160, "advantage")):
        picture.text(x, 52, name, 12, SOFT)
    for number, (row, logps, (reward, advantage)) in enumerate(
        zip(words, group["logps"].tolist(), scores, strict=True)
    ):
        x, y = 44.0, 62 + 28 * number
        picture.text(24, y + 16, str(number), 12, SOFT)
        for word, logp in zip(row, logps, strict=False):
            length = 8 + 7.2 * len(word)
            picture.box(x, y, length - 2, 22, shade(ORANGES[1], -logp / 4), FAINT)
            text = html.escape(word, quote=False).replace("\ufffd", "?")
            picture.text(x + length / 2 - 1, y + 15, text, 11)
            x += length
        picture.text(width + 82, y + 16, f"{reward:g}", 12)
        picture.text(width + 160, y + 16, f"{advantage:+.2f}", 12, bold=abs(advantage) > 1)
    return picture.svg()


def shade(color: str, share: float) -> str:
    """Return a color between white (share 0) and `color` (share 1)."""
    ends = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(255 + (end - 255) * min(1.0, share)):02x}" for end in ends)


def update() -> str:
    """Draw gradient norms per module, and the change in each completion's log-probability."""
    norms, change = numbers()["train"]["norms"], numbers()["train"]["change"]
    advantages = numbers()["grpo"]["advantages"].tolist()
    picture = Picture(760, 84 + 26 * max(len(norms), len(change)), "Gradients and what the update moves")
    picture.text(190, 28, "gradient norm by module", 14, bold=True)
    for row, (name, value) in enumerate(norms.items()):
        y, length = 62 + 26 * row, round(150 * value / max(norms.values()), 2)
        picture.text(160, y + 12, name, 12, INK, "end")
        picture.box(168, y, max(length, 1), 16, BLUES[1], BLUES[1], 0)
        picture.text(174 + length, y + 12, f"{value:.2g}", 11, SOFT, "start")
    picture.text(580, 28, "change of each completion's log-probability", 14, bold=True)
    picture.text(580, 48, "number, advantage, change; blue: above the mean", 12, SOFT)
    for row, (moved, advantage) in enumerate(zip(change, advantages, strict=True)):
        y, length = 62 + 26 * row, round(80 * abs(moved) / max(map(abs, change)), 2)
        color = BLUES[1] if advantage > 0 else ORANGES[1]
        picture.text(446, y + 12, f"{row}  {advantage:+.2f}", 12, INK, "end")
        picture.box(580 - length * (moved < 0), y, max(length, 1), 16, color, color, 0)
        x, anchor = (586 + length, "start") if moved > 0 else (574 - length, "end")
        picture.text(x, y + 12, f"{moved:+.2f}", 11, SOFT, anchor)
    picture.line([(580, 56), (580, 62 + 26 * len(change))], INK)
    return picture.svg()


PICTURES = {
    "images/walkthrough_patches.svg": patches,
    "images/walkthrough_tokens.svg": tokens,
    "images/walkthrough_update.svg": update,
}
