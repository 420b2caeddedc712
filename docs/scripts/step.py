"""Write docs/step.html: all lines of minimal.py in one GRPO step, with the values that they computed.

    python -m docs.scripts.step    # half a minute; then open docs/step.html in a browser

The tracer `Film` is called before every line of minimal.py. It records the first two rounds of a loop and the first two
calls by a line, and only counts later ones. The website build runs this script.
"""

import base64
import contextlib
import inspect
import io
import itertools
import json
import math
import random
import sys
import tempfile
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from torch import Tensor, nn

import minimal

REPEATS = 2
PAGE = Path(__file__).parents[1] / "step.html"
TEMPLATE = Path(__file__).with_name("step_template.html")
MAX_NUMBERS = 180  # a larger matrix is recorded as a heat map
MAX_ITEMS = 60, 12, 6, 0  # recorded items per container, by nesting depth
SFT = Namespace(max_steps=15, prompts_per_step=16, learning_rate=3e-3, warmup_steps=5, beta=0.0)
GRPO = Namespace(
    max_steps=1, prompts_per_step=2, learning_rate=3e-4, warmup_steps=1, beta=0.02, num_generations=8,
    max_new_tokens=20, reward=minimal.reward,
)  # fmt: skip


@dataclass
class Call:
    number: int
    line: int  # current line number
    times: Counter = field(default_factory=Counter)  # executions of a line, and calls by (line, function)
    seen: dict = field(default_factory=dict)  # {variable: (value, version)}


class Film:
    """Trace function for Python, which records executed lines of minimal.py."""

    def __init__(self):
        self.calls = []  # (function, number of the calling call)
        self.events = []  # ["call", "line" or "return", call, line, [[line, variable, value], ...], result]
        self.more = Counter()  # {(call, line, function or ""): calls or rounds not recorded}
        self.values = {}  # {description of a value as JSON: its number in the page}
        self.open = {}  # {frame: its Call, None if not recorded}

    def __call__(self, frame, event, arg):
        """Begin to record a call; Python calls this when a function starts or a generator continues."""
        code = frame.f_code
        if code.co_filename != minimal.__file__ or code.co_name.startswith("<"):
            return None
        if frame not in self.open:
            caller_frame = frame.f_back
            while caller_frame and caller_frame not in self.open:
                caller_frame = caller_frame.f_back
            self.open[frame] = self.begin(frame, self.open.get(caller_frame), is_first=not caller_frame)
        return self.trace

    def begin(self, frame, caller: Call | None, is_first: bool) -> Call | None:
        """Record a function call, if caller and line are recorded."""
        name = frame.f_code.co_qualname
        if caller:
            caller.times[caller.line, name] += 1
            if max(caller.times[caller.line], caller.times[caller.line, name]) > REPEATS:
                self.more[caller.number, caller.line, name] += 1
                return None
        elif not is_first:
            return None
        call = Call(len(self.calls), frame.f_lineno)
        self.calls.append([name, caller.number if caller else None])
        self.record("call", frame, call)
        return call

    def trace(self, frame, event, arg):
        """Record an executed line or a return; Python calls this before each line and at each return."""
        call = self.open[frame]
        if call and event == "return":
            self.record("return", frame, call, self.number(arg))
        elif call and event == "line":
            call.times[frame.f_lineno] += 1
            if call.times[frame.f_lineno] <= REPEATS:
                self.record("line", frame, call)
            else:
                self.more[call.number, frame.f_lineno, ""] += 1
            call.line = frame.f_lineno
        if event == "return" and not frame.f_code.co_flags & inspect.CO_GENERATOR:  # a generator continues later
            del self.open[frame]
        return self.trace

    def record(self, kind: str, frame, call: Call, returned: int | None = None):
        """Record an event in a call, with variables that changed since its last event."""
        made = []
        variables = frame.f_locals
        if frame.f_code is minimal.train.__code__:
            variables = variables | {"gradient norms": gradient_norms(variables["model"])}
        for name, x in variables.items():
            version = x._version if isinstance(x, Tensor) else len(x) if isinstance(x, list) else 0
            seen, seen_version = call.seen.get(name, (self, 0))
            is_new = seen != x if name == "gradient norms" else seen is not x or seen_version != version
            if is_new and name != "self":
                call.seen[name] = x, version
                made.append([call.line, name, self.number(x, name)])
        self.events.append([kind, call.number, frame.f_lineno, made, returned])

    def number(self, x, name="") -> int:
        """Return a value's index in the page's list of values, without duplicates."""
        return self.values.setdefault(json.dumps(describe(x, name), allow_nan=False), len(self.values))

    def page(self, tokenizer) -> str:
        """Return the page."""
        data = {
            "code": Path(minimal.__file__).read_text("utf-8"),
            "calls": self.calls,
            "events": self.events,
            "more": [[*key, count] for key, count in self.more.items()],
            "values": [json.loads(text) for text in self.values],
            "words": [tokenizer.decode([i], skip_special_tokens=False) for i in range(tokenizer.get_vocab_size())],
        }
        text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
        return TEMPLATE.read_text("utf-8").replace("{{DATA}}", text)


def describe(x, name="", depth=0):
    """Describe a Python value as JSON: numbers and texts as they are, others as {"of": type, ...}."""
    if isinstance(x, str):
        return x[:400]
    if isinstance(x, list) and x and all(type(item) is int for item in x):
        return describe_tensor(torch.tensor(x), name) | {"of": "list of int"}
    if isinstance(x, np.ndarray | Tensor):
        return describe_tensor(torch.as_tensor(x).detach(), name)
    if isinstance(x, float):
        return float(f"{x:.4g}")
    if isinstance(x, int | None):
        return x
    if isinstance(x, PIL.Image.Image):
        return {"of": "image", "shape": [x.height, x.width], "picture": png(x)}
    items = x
    if isinstance(x, list | tuple):
        items = dict(enumerate(x))
    elif isinstance(x, minimal.Prompt | Namespace):
        items = vars(x)
    kind = type(x).__name__
    if not isinstance(items, dict) or not MAX_ITEMS[depth]:
        return {"of": getattr(x, "__name__", kind)}
    shown = itertools.islice(items.items(), MAX_ITEMS[depth])
    return {"of": kind, "size": len(items), "items": [[str(k), describe(v, str(k), depth + 1)] for k, v in shown]}


def describe_tensor(x: Tensor, name: str) -> dict:
    """Describe a tensor: dtype, shape, mean, minimum, maximum, and its first matrix or a heat map of it."""
    dtype = str(x.dtype).removeprefix("torch.")
    result = {"of": dtype, "shape": list(x.shape)}
    numbers = x.double()
    if x.numel() > 1:
        statistics = numbers.mean(), numbers.min(), numbers.max()
        result["stats"] = [float(f"{value.item():.4g}") for value in statistics]
    matrix = numbers.reshape(-1, *x.shape[-2:])[0] if x.dim() > 1 else numbers.reshape(1, -1)
    if matrix.numel() <= MAX_NUMBERS:
        return result | {"rows": [[float(f"{value:.4g}") for value in row] for row in matrix.tolist()]}
    limits = (24, 32) if x.is_floating_point() else (64, 64)
    size = [min(limit, length) for limit, length in zip(limits, matrix.shape, strict=True)]
    means = nn.functional.adaptive_avg_pool2d(matrix[None], size)[0]
    low, high = means.min(), means.max()
    levels = ((means - low) / (high - low).clamp(min=1e-300) * 255).round().byte()
    cells = base64.b64encode(levels.numpy().tobytes()).decode()
    result["heat"] = [*size, *(float(f"{value.item():.4g}") for value in (low, high)), cells]
    if name == "patches":
        result["picture"] = png(contact_sheet(x))
    return result


def contact_sheet(patches: Tensor) -> PIL.Image.Image:
    """Draw the first frame of all patches (P, 3 * 2 * side * side), 16 per row, with gaps."""
    side = math.isqrt(patches.shape[1] // 6)
    tiles = patches.view(-1, 3, 2, side, side)[:, :, 0].float()  # (P, 3, side, side)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (minimal.MEAN, minimal.STD))
    tiles = nn.functional.pad((tiles * std + mean).clamp(0, 1), (1, 1, 1, 1), value=1.0)
    sheet = nn.functional.pad(tiles, [0] * 7 + [-len(tiles) % 16], value=1.0).unflatten(0, (-1, 16))
    pixels = sheet.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)  # (rows * side, 16 * side, 3)
    return PIL.Image.fromarray((pixels * 255).round().byte().numpy())


def png(image: PIL.Image.Image) -> str:
    """Encode an image as a data URL."""
    file = io.BytesIO()
    image.convert("RGB").save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def gradient_norms(model: nn.Module) -> dict[str, float]:
    """Compute gradient norms per layer, block, or other module."""
    squares = Counter()
    for name, weight in model.named_parameters():
        parts = name.split(".")[:-1]
        module = ".".join(parts[: 3 if {"blocks", "layers"} & set(parts) else 2])
        squares[module] += 0.0 if weight.grad is None else weight.grad.square().sum().item()
    return {name: math.sqrt(value) for name, value in squares.items() if value}


def trained_model() -> minimal.QwenVL:
    """Return the built-in task's model in float64, after 15 SFT steps, so that its completions still differ."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        minimal.make_folder(folder)
        model = minimal.load(folder, dtype=torch.float64)
        minimal.train(model, [minimal.draw_row(wrong=0.5) for _ in range(96)], minimal.sft, SFT)
    return model


def choose_rows(model: minimal.QwenVL, options: Namespace, wanted: set[float]) -> list[dict]:
    """Return rows for a GRPO step, and set a random seed with which samples for all rows have all wanted rewards."""
    for seed in itertools.count():
        random.seed(seed)
        rows = [minimal.draw_row() for _ in range(options.prompts_per_step)]
        state = random.getstate()
        torch.manual_seed(seed)
        groups = []
        for row in random.sample(rows, len(rows)):  # same order as in `train`
            sampled = minimal.sample(
                model, minimal.make_prompt(model, row), options.num_generations, options.max_new_tokens
            )
            groups.append({minimal.reward(text, row["solution"]) for text in minimal.decode(model, *sampled)})
        if all(wanted <= group for group in groups):
            random.setstate(state)
            torch.manual_seed(seed)
            return rows


def page() -> str:
    """Record a GRPO step on two images with eight completions each, and return the page."""
    model = trained_model()
    rows = choose_rows(model, GRPO, {0.5, 1.5})
    film = Film()
    with contextlib.redirect_stdout(io.StringIO()):
        sys.settrace(film)
        minimal.train(model, rows, minimal.grpo, GRPO)
        sys.settrace(None)
    return film.page(model.tokenizer)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
