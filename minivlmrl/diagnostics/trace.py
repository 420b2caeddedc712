"""`replay RUN --step 73 --lines step73.html`: that step as a page to walk through, line by line.

`Film` follows the files of README's reading list, and those that it is asked for, with
sys.settrace, and notes what each line made. Of a call it keeps TWICE rounds of each loop and calls
of each function, and counts the others. Without --lines nothing of this runs.
"""

import base64
import inspect
import io
import json
import sys
import threading
from collections import Counter
from dataclasses import dataclass, is_dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from minivlmrl.config.parsing import json_text
from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Completion, Prompt
from minivlmrl.diagnostics.report import fill_template
from minivlmrl.generation.environments import pack_rollout
from minivlmrl.model.decoder import Qwen2_5_VL
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.plain_weights import gather_full_tensor
from minivlmrl.run import loop
from minivlmrl.run.rollout_log import GROUPS, groups
from minivlmrl.trainers.base import MicroBatch, Rollout, Step, Trainer

PACKAGE = Path(loop.__file__).parents[1]
# the files of README's reading list, in its order: their lines are shown
READING_LIST = (
    *("data/image", "data/messages", "data/chat_template", "data/rows", "data/processor"),
    *("model/rope", "model/vision", "model/attention", "model/packing", "model/decoder"),
    "model/logprobs",
    *("generation/generate", "rewards/text", "rewards/columns", "losses/advantages", "losses/grpo"),
    *("trainers/grpo", "run/loop"),
)
PAGE = Path(__file__).with_suffix(".html")
TWICE = 2
ITEMS = (1000, 12, 4, 0)  # of a container, and of those in it, that are shown
# So many floats of a matrix are all shown, and five times as many integers: (R, T) and (M,), (3, N)
# of some thousand tokens. What has more is an activation: means of SIDE x SIDE tiles are shown.
WHOLE = 2600
SIDE = 24


@dataclass
class Call:
    """A call that is followed."""

    number: int
    line: int  # where it is
    times: Counter  # rounds of lines, calls of functions
    seen: dict  # name -> value, version
    made: dict  # name -> line that made it, since the last event


class Film:
    """Records a step from where train_stage comes to it.

    `with film:` follows this thread and those that begin in it.
    """

    image_processor: ImageProcessor  # known when the step begins

    def __init__(self, names: list[str], stage: str, number: int):
        """Follow the reading list in step `number` of a stage.

        names: files and folders to follow too.
        """
        self.step = stage, number
        self.about = {"prompts": []}
        self.norms = {}
        self.events = []
        self.calls = []
        self.more = Counter()  # calls and rounds that are not followed
        self.values = {}
        self.frames = {}  # calls by frame, None: left out
        self.root = None  # the call of train_stage
        self.files = {str(PACKAGE / f"{name}.py"): name for name in READING_LIST}
        for name in names:
            for path in python_files(name):
                self.files[str(path)] = "/".join(path.absolute().parts[-2:])[:-3]

    def __enter__(self):
        threading.settrace(self)
        sys.settrace(self)

    def __exit__(self, *error):
        sys.settrace(None)
        threading.settrace(None)

    def __call__(self, frame, event, arg):
        """Decide whether a call is followed: sys.settrace asks for each."""
        code = frame.f_code
        if not self.root:  # the step is to come
            return self.line if code is loop.train_stage.__code__ else None
        if frame in self.frames:  # a generator goes on
            return self.line
        above = frame.f_back
        while above and above not in self.frames:
            above = above.f_back
        caller = self.frames.get(above, self.root)
        is_lambda = code.co_name[0] == "<"
        if code.co_filename not in self.files or not caller or is_lambda:
            return None
        caller.times[code] += 1
        if caller.times[code] <= TWICE:
            self.follow(frame, caller.number)
        else:
            self.more[caller.number, caller.line, code.co_qualname] += 1
            self.frames[frame] = None
        return self.line

    def follow(self, frame, caller_number: int | None):
        """Begin a call; its arguments are what it has made so far."""
        call = Call(len(self.calls), frame.f_lineno, Counter(), {}, {})
        self.frames[frame] = call
        self.root = self.root or call
        code = frame.f_code
        self.calls.append([self.files[code.co_filename], code.co_qualname, caller_number])
        self.look(frame, call)
        call.made = {name: line for name, line in call.made.items() if "." not in name}
        self.note("c", frame, call)

    def line(self, frame, event, arg):
        """Note what a line has made when the next one begins or the call ends."""
        call = self.frames.get(frame)
        if call:
            self.look(frame, call)
            if event == "return":
                self.note("r", frame, call, self.value("", arg, {}))
            elif event == "line":
                self.next_line(frame, call)
        elif not self.root:
            names = frame.f_locals
            if (names["trainer"].stage, names.get("number")) == self.step:
                self.image_processor = names["trainer"].processor.image_processor
                self.follow(frame, None)
        if event == "return" and not frame.f_code.co_flags & inspect.CO_GENERATOR:
            self.frames.pop(frame, None)
        return self.line

    def next_line(self, frame, call: Call):
        """Note that a line comes next, or count it if it came TWICE."""
        call.line = frame.f_lineno
        call.times[call.line] += 1
        if call.times[call.line] <= TWICE:
            self.note("l", frame, call)
        else:
            self.more[call.number, call.line, ""] += 1

    def look(self, frame, call: Call):
        """Find what is new: locals, fields of self, in optimizer_step the gradients' norms."""
        values = dict(frame.f_locals)
        for name, x in getattr(values.get("self"), "__dict__", {}).items():
            if name[0] != "_":
                values[f"self.{name}"] = x
        if frame.f_code is loop.optimizer_step.__code__:
            weights = values["trainer"].trained.named_parameters()
            norms = {name: p.grad.norm().item() for name, p in weights if p.grad is not None}
            if norms != self.norms:  # one object while equal
                self.norms = norms
            values["norms of gradients"] = self.norms
        for name, x in values.items():
            version = version_of(x)
            seen_value, seen_version = call.seen.get(name, (self, 0))
            if name[0] not in "._" and (seen_value is not x or seen_version != version):
                call.seen[name] = (x, version)
                call.made[name] = call.line

    def note(self, kind: str, frame, call: Call, *returned: int):
        """Add an event: c begins a call, l is a line that comes next, r leaves a call."""
        made_values = []
        for name, line in call.made.items():
            x, _ = call.seen[name]
            made_values.append([line, name, self.value(name, x, frame.f_locals)])
        call.made = {}
        self.events.append([kind, call.number, frame.f_lineno, made_values, *returned])

    def value(self, name: str, x, names: dict) -> int:
        """Number what the page shows of a value; equal ones are kept once."""
        value_json = to_json(x)
        # a Prompt and a GroupBatch have both; else they are beside each other
        grids = getattr(x, "image_grid_thw", names.get("image_grid_thw", names.get("grid")))
        patches = getattr(x, "pixel_values", x)
        is_named = patches is not x or name in ("patches", "pixel_values")
        if (
            isinstance(value_json, dict)
            and is_named
            and grids is not None
            and np.shape(patches)[1:] == (self.image_processor.patch_dim,)
        ):
            frames = pictures(torch.as_tensor(patches), grids, self.image_processor)
            value_json["pictures"] = list(map(self.first_frame, frames))
        return self.keep(value_json)

    def keep(self, value_json) -> int:
        """Number a description; a container has the numbers of its items, so equal ones are one."""
        if isinstance(value_json, dict) and "items" in value_json:
            for item in value_json["items"]:
                item[1] = self.keep(item[1])
        return self.values.setdefault(json_text(value_json), len(self.values))

    def first_frame(self, frames: Tensor) -> str:
        """Make a data URL of the first of normalised frames (frames, 3, height, width)."""
        mean = torch.tensor(self.image_processor.image_mean)
        std = torch.tensor(self.image_processor.image_std)
        rgb = (frames[0].permute(1, 2, 0).cpu() * std + mean).clamp(0, 1) * 255
        return png(PIL.Image.fromarray(rgb.round().byte().numpy()))

    def pause(self, trainer: Trainer, step: Step):
        """Stop before the update, and describe the step's runs and its first prompts."""
        self.__exit__()
        runs = [describe_packed_run(batch) for batch in step.micro_batches]
        words = {}
        for run in runs:
            for token_id in run["ids"] + run["targets"]:
                words[token_id] = trainer.processor.tokenizer.decode([token_id])
        self.about = {
            "prompts": describe_prompts(trainer, step, step.rollout) if step.rollout else [],
            "numbers": list(step.prompts),
            "runs": runs,
            "words": words,
        }

    def write(self, path: Path, title: str):
        """Write the page."""
        data = self.about | {
            "title": title,
            "files": {name: Path(file).read_text("utf-8") for file, name in self.files.items()},
            "events": self.events,
            "calls": self.calls,
            "more": [[*key, count] for key, count in self.more.items()],
            "values": [json.loads(text) for text in self.values],
        }
        rounded = json.loads(json_text(data), parse_float=lambda text: float(f"{float(text):.4g}"))
        fill_template(PAGE, json_text(rounded, separators=(",", ":")), path)
        print(f"wrote {path}")


def python_files(name: str) -> list[Path]:
    """Find a Python file, or those of a folder of minivlmrl (ValueError: it is neither)."""
    path = Path(name)
    paths = [path, path.absolute()] if path.is_file() else []
    for folder in (PACKAGE / name, PACKAGE.parent / name):
        paths += folder.glob("[a-z]*.py")
    if not paths:
        raise ValueError(f"--lines: {name} is no Python file, and no folder of minivlmrl")
    return paths


def version_of(x) -> int:
    """Return a number that changes when a container grows or a tensor is written."""
    if isinstance(x, Tensor) and not x.is_inference():
        return x._version
    return len(x) if isinstance(x, list | dict | set) else 0


def describe_packed_run(batch: MicroBatch) -> dict:
    """List the tokens of a packed run, where they lie, and which completions its rows are.

    The page says who sees whom by these lengths; a test holds that against attention.visible.
    """
    layout = batch.group.layout
    rows = layout.row_index // batch.group.completion_mask.shape[1]  # (M,)
    spans = []  # of each prompt: row and number of tokens of its completions; a row may have several
    num_tokens = 0
    for group in layout.completion_spans:
        spans.append([])
        for span in group:
            spans[-1].append([rows[num_tokens].item(), len(span) + 1])
            num_tokens += len(span) + 1
    return {
        "ids": batch.group.input_ids.tolist(),
        "targets": batch.group.completion_ids.tolist(),
        "prompt_lengths": layout.prompt_lengths,
        "completion_spans": spans,
        # of a rollout, each row's number there
        "completions": to_json(getattr(batch, "completion_index", None)),
        "trained": batch.loss_mask.sum(1).tolist(),  # tokens of each row that the loss counts
    }


def describe_prompts(trainer: Trainer, step: Step, rollout: Rollout) -> list[dict]:
    """Describe the first prompts of a rollout: texts, rewards, and where the rewards looked."""
    lines = list(groups(trainer, step))[:GROUPS]
    for index, line in zip(step.prompts, lines, strict=False):
        line["pictures"] = [png(image) for image in rollout.rows[index].images]
        for shown, completion in zip(line["completions"], rollout.completions[index], strict=True):
            maps = looked(
                trainer.policy,
                trainer.processor,
                rollout.prompts[index],
                completion,
                shown["advantage"],
                trainer.run.sampling.temperature,
            )
            shown["maps"] = [to_json(x) for x in maps]
    return lines


def to_json(x, depth: int = 0):
    """Describe a value as JSON: {"of": its type, ...}; numbers and texts are themselves."""
    if isinstance(x, np.ndarray) and x.dtype.kind in "biuf":
        x = torch.tensor(x)
    if isinstance(x, Tensor):
        return matrix(gather_full_tensor(x).cpu())  # of a sharded run, too
    if isinstance(x, PIL.Image.Image):
        return {"of": "picture", "shape": x.size[::-1], "pictures": [png(x)]}
    if isinstance(x, str):
        return x[:400]
    if isinstance(x, int | float | None):
        return x
    fields = x
    if is_dataclass(x):  # the vars of a class are no dict
        fields = vars(x)
    elif isinstance(x, list | tuple | range):
        fields = dict(enumerate(x))
    type_name = type(x).__name__
    if not isinstance(fields, dict) or not ITEMS[depth]:
        return {"of": getattr(x, "__qualname__", type_name)}
    shown = islice(fields.items(), ITEMS[depth])
    items = [[str(key), to_json(value, depth + 1)] for key, value in shown]
    return {"of": type_name, "size": len(fields), "items": items}


def matrix(x: Tensor) -> dict:
    """Describe a tensor: dtype, shape, [mean, least, largest, NaNs], rows of its first matrix.

    Of a matrix that is not WHOLE means of tiles, and the three largest numbers of long rows.
    """
    tensor_json = {"of": str(x.dtype)[6:], "shape": x.shape}
    valid_numbers = x.float()[~x.isnan()]
    if not len(valid_numbers):
        return tensor_json
    statistics = [valid_numbers.mean(), *valid_numbers.aminmax()]
    tensor_json["stats"] = [
        *[number.item() for number in statistics],
        x.numel() - len(valid_numbers),
    ]
    rows = x.reshape(-1, *x.shape[-2:])[0] if x.dim() > 1 else x.reshape(1, -1)
    most = WHOLE if x.is_floating_point() else 5 * WHOLE
    if rows.numel() > most:
        if rows.shape[1] > 256:  # of logits the likeliest tokens
            top = rows[:64].float().topk(3)
            tensor_json["top"] = torch.stack([top.indices, top.values], dim=2).tolist()
        height, width = rows.shape
        size = (min(SIDE, height), min(SIDE, width))
        rows = adaptive_avg_pool2d(rows[None].float(), size)[0]
    return tensor_json | {"rows": rows.tolist()}


def png(image: PIL.Image.Image) -> str:
    """Write a picture as a data URL, at most 160 pixels a side."""
    image = image.convert("RGB")
    image.thumbnail((160, 160))
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def pictures(patches: Tensor, grids: Tensor, images: ImageProcessor) -> list[Tensor]:
    """Undo image.patchify: (frames, 3, height, width) of each picture or video."""
    m, n, p = images.merge_size, images.temporal_patch_size, images.patch_size
    grids = torch.as_tensor(grids).view(-1, 3)
    result = []
    for part, (t, h, w) in zip(patches.split(grids.prod(1).tolist()), grids.tolist(), strict=True):
        # (t, h / m, w / m, m, m, 3, n, p, p) -> (t, n, 3, h / m, m, p, w / m, m, p)
        cut = part.reshape(t, h // m, w // m, m, m, 3, n, p, p).permute(0, 6, 5, 1, 3, 7, 2, 4, 8)
        result.append(cut.reshape(t * n, 3, h * p, w * p))
    return result


def looked(
    policy: Qwen2_5_VL, processor: Processor, prompt: Prompt, completion: Completion,
    weight: float = 1.0, temperature: float = 1.0,
) -> list[Tensor]:  # fmt: skip
    """Measure how much each pixel could change weight times a completion's log-probability.

    Of each picture (height, width) float32: the absolute gradient, added up over frames and
    colours, in nats for a colour's standard deviation. docs/metrics.md says what it is not.
    """
    pixels = prompt.pixel_values.detach().clone().requires_grad_()
    prompt = replace(prompt, pixel_values=pixels, vision_embeds=None)
    group = pack_rollout([prompt], [[completion]], policy.config, policy.lm_head.weight.device)
    logps, _ = per_token_logps(policy, group, temperature)
    [gradient] = torch.autograd.grad(weight * (logps * group.policy_mask).sum(), pixels)
    slopes = pictures(gradient, prompt.image_grid_thw, processor.image_processor)
    return [picture.abs().sum((0, 1)).cpu() for picture in slopes]
