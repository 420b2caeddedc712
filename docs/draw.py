"""Draw the three pictures of the README from the functions that training uses: python docs/draw.py

mask.svg     who sees whom in a packed run with two groups: attention.visible
windows.svg  the attention windows of an odd grid of the vision tower, and their order: vision.window_order
mrope.svg    the positions of text, an image and text on three axes: rope.get_rope_index
"""

from pathlib import Path
from types import SimpleNamespace

import torch

from minivlmrl.attention import GroupLayout, visible
from minivlmrl.hub.model_config import VisionConfig
from minivlmrl.rope import get_rope_index
from minivlmrl.vision import window_order

INK, SOFT, PAPER, FAINT = "#1f2933", "#66727f", "#ffffff", "#e8ecf0"
BLUES, ORANGES = ("#1f4e79", "#5b8db8", "#9cc0de"), ("#9c4a00", "#dd8a3c", "#f3bd87")
FONT = "font-family='Helvetica, Arial, sans-serif'"
IMAGE, TEXT = 0, 1  # token ids of the M-RoPE picture


class Picture:
    """An SVG file on a white background of its own, so it reads the same on a dark page."""

    def __init__(self, width: int, height: int, title: str):
        self.lines = [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' "
            f"height='{height}' role='img' aria-label='{title}'>",
            f"<rect width='{width}' height='{height}' rx='8' fill='{PAPER}'/>",
        ]

    def box(self, x: float, y: float, width: float, height: float, fill: str, stroke: str = PAPER, thick: float = 1):
        """Draw a rectangle."""
        self.lines.append(
            f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' fill='{fill}' stroke='{stroke}' "
            f"stroke-width='{thick:g}'/>"
        )

    def text(self, x: float, y: float, words: str, size: int = 13, fill: str = INK, anchor: str = "middle", bold=False):
        """Write words whose middle, start or end is at x, their baseline at y."""
        weight = " font-weight='bold'" if bold else ""
        self.lines.append(
            f"<text x='{x:g}' y='{y:g}' font-size='{size}' fill='{fill}' text-anchor='{anchor}' {FONT}{weight}>"
            f"{words}</text>"
        )

    def note(self, x: float, y: float, *lines: str):
        """Write lines below each other, the first with its baseline at y."""
        for number, words in enumerate(lines):
            self.text(x, y + 17 * number, words, 12, INK, "start")

    def line(self, points: list[tuple[float, float]], stroke: str = SOFT, thick: float = 1):
        """Draw a line through points."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.lines.append(f"<polyline points='{path}' fill='none' stroke='{stroke}' stroke-width='{thick:g}'/>")

    def svg(self) -> str:
        """The file."""
        return "\n".join([*self.lines, "</svg>"]) + "\n"


def mask() -> str:
    """Two prompts with two completions each, as one run."""
    prompts, completions = [4, 3], [[4, 3], [3, 4]]
    layout, cell, left, top = GroupLayout(prompts, completions), 24, 128, 92
    sees = visible(layout).tolist()
    names, colours, spans, start = iter("pabqcd"), (*BLUES, *ORANGES), [], 0
    for group, prompt in enumerate(prompts):
        for length in [prompt, *(n - 1 for n in completions[group])]:
            spans.append((next(names), length, colours[len(spans)], start))
            start += length
    of_token = [number for number, (_, length, _, _) in enumerate(spans) for _ in range(length)]
    size = cell * len(sees)
    picture = Picture(left + size + 24, top + size + 76, "The attention mask of a packed run with two groups")
    picture.text((left + size) / 2 + 12, 28, "Who sees whom in a packed run", 16, bold=True)
    picture.text((left + size) / 2 + 12, 48, "row: the token that attends; column: the token that is seen", 12, SOFT)
    for i, row in enumerate(sees):
        for j, seen in enumerate(row):
            colour = spans[of_token[j]][2] if seen else FAINT
            picture.box(left + j * cell, top + i * cell, cell, cell, colour)
    for number, (name, length, colour, first) in enumerate(spans):
        for k in range(length):
            label = f"{name}<tspan font-size='9' dy='3'>{k}</tspan>"
            picture.text(left + (first + k + 0.5) * cell, top - 12, label, 12)
        picture.box(left + first * cell + 1, top - 5, length * cell - 2, 3, colour, colour, 0)
        words = f"{'completion' if number % 3 else 'prompt'} {name}"
        picture.text(left - 14, top + (first + length / 2) * cell + 4, words, 12, INK, "end", bold=number % 3 == 0)
        picture.box(left - 8, top + first * cell + 1, 3, length * cell - 2, colour, colour, 0)
    middle = sum(length for _, length, _, _ in spans[:3]) * cell
    picture.line([(left, top + middle), (left + size, top + middle)], INK, 1.5)
    picture.line([(left + middle, top), (left + middle, top + size)], INK, 1.5)
    picture.note(
        30,
        top + size + 26,
        "A prompt is in the run once; all its completions read it there. Nothing else",
        "is shared. A completion's last token is predicted but not in the run,",
        "because no token follows it.",
    )
    return picture.svg()


def windows() -> str:
    """6 x 11 merged tokens of an image of 168 x 308 pixels."""
    rows, cols, cell, left, top = 6, 11, 46, 30, 72
    config = VisionConfig()
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
    centres = {}
    for position, (token, window) in enumerate(zip(order.tolist(), window_of, strict=True)):
        row, col = divmod(token, cols)
        x, y = left + col * cell, top + row * cell
        picture.box(x, y, cell, cell, palette[window % len(palette)])
        picture.text(x + cell / 2, y + cell / 2 + 5, str(position), 14)
        centres.setdefault(window, []).append((row, col))
    for tokens in centres.values():
        (first_row, first_col), (last_row, last_col) = tokens[0], tokens[-1]
        size = (last_col - first_col + 1) * cell, (last_row - first_row + 1) * cell
        picture.box(left + first_col * cell, top + first_row * cell, *size, "none", INK, 2)
    picture.note(
        left,
        top + rows * cell + 26,
        "Each window is one consecutive run, so attention needs no mask and no padding.",
        "Windows at the right and bottom edges are smaller.",
        "Blocks 7, 15, 23 and 31 attend to the whole frame instead.",
    )
    return picture.svg()


def mrope() -> str:
    """3 text tokens, an image of 3 x 4 merged tokens, 3 text tokens."""
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


PICTURES = {"mask.svg": mask, "windows.svg": windows, "mrope.svg": mrope}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (Path(__file__).parent / name).write_text(draw(), encoding="utf-8")
