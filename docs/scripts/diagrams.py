"""Draw the diagrams in docs/ that need no trained model; `python -m docs.scripts.make_pages` writes their files.

Functions call training code, so that diagrams change with it.
"""

from types import SimpleNamespace

import torch

from docs.scripts.picture import BLUES, FAINT, INK, ORANGES, SOFT, Picture
from minivlmrl.losses.grpo import TermInputs, clipped
from minivlmrl.losses.ppo import gae
from minivlmrl.model.families.qwen2_5_vl import Qwen2_5VisionConfig
from minivlmrl.model.rope import get_rope_index
from minivlmrl.model.vision import window_order

IMAGE, TEXT = 0, 1  # token ids in the M-RoPE diagram
STEPS = {  # {function in minimal.py: (result, its shape or description)}
    "make_prompt": ("token ids, patches", "(L,), (P, 294)"),
    "sample": ("completions", "(G, T), token ids"),
    "reward": ("rewards", "(G,), from texts"),
    "group_advantages": ("advantages", "(G,), in the group"),
    "log_probabilities": ("log-probabilities", "(G, T) nats, with gradient"),
    "grpo_loss": ("the loss", "a scalar"),
    "loss.backward": ("gradients", "a sum over the prompts"),
    "optimizer.step": ("new weights", "AdamW"),
}


def step() -> str:
    """Draw a GRPO step as a flow chart, from a data row to new weights, which sample the next rollout."""
    width, height, gap, left, top = 178, 82, 34, 24, 92
    picture = Picture(left + 4 * (width + gap) + 10, top + 2 * height + 98, "A GRPO step as a flow")
    picture.text(left, 28, "A GRPO step, function by function", 16, anchor="start", bold=True)
    picture.text(left, top - 10, "sampling, without gradient", 12, BLUES[0], "start")
    lower, right = top + height + 74, left + 3 * (width + gap)
    picture.text(left, lower - 10, "training, with gradient", 12, ORANGES[0], "start")
    for number, (name, (made, form)) in enumerate(STEPS.items()):
        row, col = divmod(number, 4)
        x, y, color = left + col * (width + gap), (top, lower)[row], (BLUES, ORANGES)[row][1]
        picture.box(x, y, width, height, FAINT, color, 2)
        picture.text(x + width / 2, y + 26, name, 14, bold=True)
        picture.text(x + width / 2, y + 48, made, 13)
        picture.text(x + width / 2, y + 66, form, 12, SOFT)
        if col < 3:
            picture.arrow((x + width + 3, y + height / 2), (x + width + gap - 3, y + height / 2))
    middle, x = top + height + 32, left + width - 14
    picture.arrow((right + width / 2, top + height + 3), (right + width / 2, middle), (x, middle), (x, lower - 3))
    y, over, x = lower + height / 2, top - 26, left + 1.5 * width + gap
    picture.arrow((right + width + 3, y), (right + width + 16, y), (right + width + 16, over), (x, over), (x, top - 3))
    picture.text(right + width + 14, over - 6, "the new weights sample the next completions", 12, SOFT, "end")
    return picture.svg()


def clip() -> str:
    """Draw min(r A, clip(r, 0.8, 1.2) A) for positive and for negative advantage."""
    size, left, top, gap = 250, 64, 76, 74
    picture = Picture(2 * left + 2 * size + gap - 24, top + size + 56, "The clipped term over the ratio")
    picture.text(left, 28, "Objective of a token: min(r A, clip(r, 0.8, 1.2) A)", 16, anchor="start", bold=True)
    picture.text(
        left,
        48,
        "A flat line has no gradient. A token that moved against its advantage is never clipped.",
        12,
        SOFT,
        "start",
    )
    for panel, (advantage, colors) in enumerate(((1.0, BLUES), (-1.0, ORANGES))):
        clip_panel(picture, left + panel * (size + gap), top, size, advantage, colors)
    return picture.svg()


def clip_panel(picture: Picture, left: int, top: int, size: int, advantage: float, colors: tuple[str, ...]):
    """Draw a token's objective at this advantage, for ratios from 0.4 to 1.6."""
    lowest = min(1.6 * advantage, 0.0)

    def at(ratio: float, gain: float) -> tuple[float, float]:
        return round(left + (ratio - 0.4) / 1.2 * size, 2), round(top + size - (gain - lowest) / 1.6 * size, 2)

    for edge in (0.8, 1.0, 1.2):
        picture.line([at(edge, lowest), at(edge, lowest + 1.6)], FAINT, 2)
        picture.text(at(edge, 0)[0], top + size + 18, f"{edge:g}", 12, SOFT)
    for gain in (0.0, advantage):
        picture.text(left - 8, at(0.4, gain)[1] + 4, f"{gain:g}", 12, SOFT, "end")
    picture.line([at(0.4, 0), at(1.6, 0)], SOFT)
    picture.line([at(0.4, 0.4 * advantage), at(1.6, 1.6 * advantage)], colors[2], 1.5)  # without clipping
    ratio = torch.linspace(0.4, 1.6, 121, dtype=torch.float64)[:, None]
    advantages = torch.tensor([[advantage]], dtype=torch.float64)
    inputs = TermInputs(ratio.log(), ratio.log(), ratio, advantages, torch.ones_like(ratio), 0.2, 0.2)
    gains = -clipped(inputs)[0]
    picture.line([at(*point) for point in torch.cat([ratio, gains], 1).tolist()], colors[0], 3)
    picture.text(left + size / 2, top + size + 40, "ratio r = pi / pi_old", 13)
    words = f"A = {advantage:+g}: {('worse', 'better')[advantage > 0]} than its group"
    picture.text(left + size / 2, top - 8, words, 13, colors[0], bold=True)


def advantages() -> str:
    """Draw values and advantages for an answer with eight tokens; the critic's value jumps after the token `blue`."""
    words = ["think", "I", "see", "blue", "answer", "blue", "square", "end"]
    values = torch.tensor([[0.5, 0.5, 0.5, 0.5, 0.9, 0.9, 0.95, 0.95]], dtype=torch.float64)
    rewards = torch.tensor([[0.0] * 7 + [1.0]], dtype=torch.float64)
    step, left, top, unit, band = 78, 120, 62, 70, 106
    rows = {"value V": values} | {f"A, lam {lam:g}": gae(rewards, values, lam=lam)[0] for lam in (0.0, 0.95, 1.0)}
    picture = Picture(left + step * len(words) + 24, top + band * len(rows) + 62, "GAE over one answer")
    picture.text(
        left,
        26,
        "GAE over one answer: which tokens get credit for the reward of 1 at its end",
        15,
        anchor="start",
        bold=True,
    )
    for number, word in enumerate(words):
        picture.text(left + (number + 0.5) * step, 54, word, 12, bold=number == 3)
    for row, (name, numbers) in enumerate(rows.items()):
        floor = top + row * band + 92
        picture.text(left - 16, floor - 20, name, 13, INK, "end", bold=True)
        picture.line([(left, floor), (left + step * len(words), floor)], SOFT)
        for number, value in enumerate(numbers[0].tolist()):
            x, height = left + number * step + 14, round(unit * abs(value), 2)
            color = FAINT if row == 0 else BLUES[1]
            picture.box(x, floor - height, step - 28, max(height, 1), color, SOFT if row == 0 else BLUES[0], 1)
            picture.text(x + step / 2 - 14, floor - height - 5, f"{value:.2f}", 12)
    picture.note(
        left,
        top + band * len(rows) + 12,
        "After the token 'blue' the critic predicts 0.9 instead of 0.5. With lam 0, a token gets only the change of",
        "the value that it caused. With lam 1, it gets the final reward minus the value before it. 0.95 is in between.",
    )
    return picture.svg()


def mask() -> str:
    """Draw the attention mask for a packed sequence: two prompts with two completions each."""
    prompts, completions = [4, 3], [[4, 3], [3, 4]]
    cell, left, top = 24, 128, 92
    names, colors, spans, start = iter("pabqcd"), (*BLUES, *ORANGES), [], 0
    for group, prompt in enumerate(prompts):
        for length in [prompt, *(n - 1 for n in completions[group])]:
            spans.append((next(names), length, colors[len(spans)], start))
            start += length
    of_token = [number for number, (_, length, _, _) in enumerate(spans) for _ in range(length)]
    # a group has three spans: the prompt and two completions
    sees = [
        [j <= i and other // 3 == own // 3 and other % 3 in (0, own % 3) for j, other in enumerate(of_token)]
        for i, own in enumerate(of_token)
    ]
    size = cell * len(sees)
    picture = Picture(left + size + 24, top + size + 76, "The attention mask of a packed run with two groups")
    picture.text((left + size) / 2 + 12, 28, "Which tokens attend to which in a packed sequence", 16, bold=True)
    picture.text(
        (left + size) / 2 + 12, 48, "row: the token that attends; column: the token that it attends to", 12, SOFT
    )
    for i, row in enumerate(sees):
        for j, seen in enumerate(row):
            color = spans[of_token[j]][2] if seen else FAINT
            picture.box(left + j * cell, top + i * cell, cell, cell, color)
    for number, (name, length, color, first) in enumerate(spans):
        for k in range(length):
            label = f"{name}<tspan font-size='9' dy='3'>{k}</tspan>"
            picture.text(left + (first + k + 0.5) * cell, top - 12, label, 12)
        picture.box(left + first * cell + 1, top - 5, length * cell - 2, 3, color, color, 0)
        words = f"{'completion' if number % 3 else 'prompt'} {name}"
        picture.text(left - 14, top + (first + length / 2) * cell + 4, words, 12, INK, "end", bold=number % 3 == 0)
        picture.box(left - 8, top + first * cell + 1, 3, length * cell - 2, color, color, 0)
    middle = sum(length for _, length, _, _ in spans[:3]) * cell
    picture.line([(left, top + middle), (left + size, top + middle)], INK, 1.5)
    picture.line([(left + middle, top), (left + middle, top + size)], INK, 1.5)
    picture.note(
        30,
        top + size + 26,
        "Each prompt occurs once, and all its completions attend to it. Nothing else",
        "is shared. The last token of a completion is predicted but is not in the",
        "sequence, because no token follows it.",
    )
    return picture.svg()


def windows() -> str:
    """Draw the attention windows for an image with 168 x 308 pixels, 6 x 11 merged tokens."""
    rows, cols, cell, left, top = 6, 11, 46, 30, 72
    config = Qwen2_5VisionConfig()
    merge = config.spatial_merge_size
    order, lengths, _ = window_order(torch.tensor([[1, rows * merge, cols * merge]]), config)
    palette = ("#cfe2f3", "#fbe0c4", "#d5ead0", "#e6d8ee", "#fdf1b8", "#f6cfcf")
    width = 2 * left + cols * cell
    picture = Picture(width, top + rows * cell + 78, "The attention windows of an odd grid, and their order")
    picture.text(width / 2, 26, "The vision tower's windows", 16, bold=True)
    side = config.window_size // config.patch_size // merge
    words = f"{rows} x {cols} tokens of {merge} x {merge} patches in windows of {side} x {side}"
    picture.text(width / 2, 48, f"{words}, numbered in the tower's order", 12, SOFT)
    window_of = [number for number, length in enumerate(lengths) for _ in range(length // merge**2)]
    centers = {}
    for position, (token, window) in enumerate(zip(order.tolist(), window_of, strict=True)):
        row, col = divmod(token, cols)
        x, y = left + col * cell, top + row * cell
        picture.box(x, y, cell, cell, palette[window % len(palette)])
        picture.text(x + cell / 2, y + cell / 2 + 5, str(position), 14)
        centers.setdefault(window, []).append((row, col))
    for tokens in centers.values():
        (first_row, first_col), (last_row, last_col) = tokens[0], tokens[-1]
        size = (last_col - first_col + 1) * cell, (last_row - first_row + 1) * cell
        picture.box(left + first_col * cell, top + first_row * cell, *size, "none", INK, 2)
    picture.note(
        left,
        top + rows * cell + 26,
        "The tokens of a window are consecutive, so attention needs no mask or padding.",
        "Windows at the right and bottom edges are smaller.",
        "Blocks 7, 15, 23 and 31 attend to the whole frame instead.",
    )
    return picture.svg()


def mrope() -> str:
    """Draw M-RoPE positions for 3 text tokens, an image with 3 x 4 merged tokens, and 3 text tokens."""
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    config = SimpleNamespace(image_token_id=IMAGE, video_token_id=-1, vision_config=vision)
    ids = torch.tensor([TEXT] * 3 + [IMAGE] * 12 + [TEXT] * 3)
    positions = get_rope_index(ids, torch.tensor([[1, 6, 8]]), config)
    axes = (("time", "#1f4e79", "#d3e3f1"), ("height", "#9c4a00", "#fae3cb"), ("width", "#2f6b2f", "#dcecd8"))
    step, unit, left, top, gap = 34, 11, 92, 84, 28
    most = int(positions.max()) + 1
    band = most * unit + gap
    width = left + len(ids) * step + 24
    picture = Picture(width, top + 3 * band + 56, "M-RoPE positions of text, an image and text on three axes")
    picture.text(width / 2, 26, "M-RoPE: three positions for each token", 16, bold=True)
    picture.text(width / 2, 46, "3 text tokens, an image of 3 x 4 merged tokens, 3 text tokens", 12, SOFT)
    for first, last, words in ((0, 3, "text"), (3, 15, "image, row by row"), (15, 18, "text")):
        x, end = left + first * step, left + last * step
        picture.line([(x + 3, top - 8), (end - 3, top - 8)], INK, 2)
        picture.text((x + end) / 2, top - 14, words, 12, INK, bold=True)
    for number, ((name, dark, light), values) in enumerate(zip(axes, positions.tolist(), strict=True)):
        floor = top + (number + 1) * band - 4
        picture.text(left - 14, floor - unit, name, 13, dark, "end", bold=True)
        picture.line([(left, floor), (left + len(values) * step, floor)], dark, 1)
        for index, value in enumerate(values):
            x, height = left + index * step + 2, (value + 1) * unit
            picture.box(x, floor - height, step - 4, height, light, light)
            picture.line([(x, floor - height), (x + step - 4, floor - height)], dark, 2.5)
            picture.text(x + step / 2 - 2, floor - height - 4, str(value), 12, dark, bold=True)
    picture.note(
        left,
        top + 3 * band + 20,
        "An image has one time; its rows and columns count up from there.",
        "Text continues one past the largest position of the image on any axis.",
    )
    return picture.svg()


PICTURES = {
    "images/step.svg": step,
    "images/clip.svg": clip,
    "images/gae.svg": advantages,
    "images/mask.svg": mask,
    "images/windows.svg": windows,
    "images/mrope.svg": mrope,
}
