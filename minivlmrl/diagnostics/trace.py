"""Record the executed lines of one optimizer step, for `replay RUN --step 73 --trace step.html`.

`StepTracer` uses sys.settrace to trace the files in the README's reading list, and other files
that the command names. It records the values that each line assigned. Within a call, only the first
MAX_REPEATS executions of a line and calls of a function are recorded; later ones are only counted.
This module has no effect on a run without --trace.
"""

import ast
import base64
import inspect
import io
import json
import sys
import threading
from collections import Counter
from dataclasses import dataclass, is_dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Completion, Prompt
from minivlmrl.diagnostics.report import fill_template
from minivlmrl.json_files import json_text
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.packing import pack_turns
from minivlmrl.model.plain_weights import gather_full_tensor
from minivlmrl.run import loop
from minivlmrl.run.rollout_log import groups
from minivlmrl.trainers.base import MicroBatch, Step, Trainer

PACKAGE = Path(loop.__file__).parents[1]
# files in the README's reading list, in the same order; the page shows their lines
READING_LIST = (
    *("data/image", "data/messages", "data/chat_template", "data/rows", "data/processor"),
    *(
        "model/config",
        "model/rope",
        "model/vision",
        "model/attention",
        "model/packing",
        "model/decoder",
    ),
    "model/logprobs",
    *("generation/generate", "rewards/text", "rewards/columns", "losses/advantages", "losses/grpo"),
    *("trainers/rollout", "trainers/grpo", "run/loop"),
)
PAGE = Path(__file__).with_suffix(".html")
# maximum number of recorded executions of each line, and of recorded calls of each function that
# the lines call, within one call of a function
MAX_REPEATS = 2
# maximum number of recorded items of a container, by the depth of its nesting in other containers
MAX_ITEMS = (1000, 12, 4, 0)
# A matrix with at most this many floats, or five times as many integers, is recorded completely.
# This is enough for ids and log-probabilities of some thousand tokens. Larger matrices are usually
# activations; only the means of TILES_PER_SIDE x TILES_PER_SIDE tiles are recorded for them.
MAX_SHOWN_VALUES = 2600
TILES_PER_SIDE = 24
NUM_PROMPTS = 4  # prompts of the step that the page shows


@dataclass
class Call:
    number: int
    line: int  # line that is being executed
    times: Counter  # {line: execution count} and {code object: number of calls from here}
    last_values: dict  # {variable: (value, version_of(value))} at the last event
    changed: dict  # {variable: line that assigned it}, for variables assigned since the last event


class StepTracer:
    """Records the executed lines of one optimizer step, beginning with its rollout in train_stage.

    `with tracer:` traces the current thread, and the threads that are started in the block.
    """

    image_processor: ImageProcessor  # is set when the step begins

    def __init__(self, extra_files: list[str], stage: str, number: int):
        """Prepare to trace a step.

        Args:
            extra_files: files and folders to trace in addition to READING_LIST.
            stage: the step's stage.
            number: step number in its stage, from 0.
        """
        self.step = stage, number
        self.description = {"prompts": []}
        self.norms = {}
        self.events = []
        self.calls = []
        self.more = Counter()  # counts of calls and executed lines that are not recorded
        self.values = {}
        self.frames = {}  # {frame: Call, or None for a call that is not recorded}
        self.root = None  # the Call of train_stage
        self.files = {str(PACKAGE / f"{name}.py"): name for name in READING_LIST}
        for name in extra_files:
            for path in python_files(name):
                self.files[str(path)] = "/".join(path.absolute().parts[-2:])[:-3]

    def __enter__(self):
        threading.settrace(self)
        sys.settrace(self)

    def __exit__(self, *error):
        sys.settrace(None)
        threading.settrace(None)

    def __call__(self, frame, event, arg):
        """Decide whether to trace a call. Python invokes this method when every call starts."""
        code = frame.f_code
        if not self.root:  # the requested step has not begun
            return self.line if code is loop.train_stage.__code__ else None
        if frame in self.frames:  # a generator resumes
            return self.line
        caller_frame = frame.f_back
        while caller_frame and caller_frame not in self.frames:
            if caller_frame.f_code.co_name == "on_step_begin":
                return None  # callbacks, such as InputCheck, are not part of the step
            caller_frame = caller_frame.f_back
        caller = self.frames.get(caller_frame, self.root)
        is_lambda = code.co_name[0] == "<"
        if code.co_filename not in self.files or not caller or is_lambda:
            return None
        caller.times[code] += 1
        if caller.times[code] <= MAX_REPEATS:
            self.follow(frame, caller.number)
        else:
            self.more[caller.number, caller.line, code.co_qualname] += 1
            self.frames[frame] = None
        return self.line

    def follow(self, frame, caller_number: int | None):
        """Begin to record a call; its arguments are the first values that are recorded."""
        call = Call(len(self.calls), frame.f_lineno, Counter(), {}, {})
        self.frames[frame] = call
        self.root = self.root or call
        code = frame.f_code
        self.calls.append([self.files[code.co_filename], code.co_qualname, caller_number])
        self.record_changes(frame, call)
        call.changed = {name: line for name, line in call.changed.items() if "." not in name}
        self.add_event("c", frame, call)

    def line(self, frame, event, arg):
        """Record the values that a line assigned. Python invokes this method after each line."""
        call = self.frames.get(frame)
        if call:
            self.record_changes(frame, call)
            if event == "return":
                self.add_event("r", frame, call, self.value("", arg, {}))
            elif event == "line":
                self.next_line(frame, call)
        elif not self.root:
            frame_locals = frame.f_locals
            if (frame_locals["trainer"].stage, frame_locals.get("number")) == self.step:
                self.image_processor = frame_locals["trainer"].processor.image_processor
                self.follow(frame, None)
        if event == "return" and not frame.f_code.co_flags & inspect.CO_GENERATOR:
            self.frames.pop(frame, None)
        return self.line

    def next_line(self, frame, call: Call):
        """Record the line that is executed next, or count it after MAX_REPEATS executions."""
        call.line = frame.f_lineno
        call.times[call.line] += 1
        if call.times[call.line] <= MAX_REPEATS:
            self.add_event("l", frame, call)
        else:
            self.more[call.number, call.line, ""] += 1

    def record_changes(self, frame, call: Call):
        """Find the local variables and fields of `self` that have changed since the last event.

        In optimizer_step, all parameters' gradient norms are recorded as one more variable.
        """
        values = dict(frame.f_locals)
        for name, x in getattr(values.get("self"), "__dict__", {}).items():
            if name[0] != "_":
                values[f"self.{name}"] = x
        if frame.f_code is loop.optimizer_step.__code__:
            weights = values["trainer"].trained.named_parameters()
            norms = {name: p.grad.norm().item() for name, p in weights if p.grad is not None}
            if (
                norms != self.norms
            ):  # equal norms keep the same object, so that they do not count as changed
                self.norms = norms
            values["norms of gradients"] = self.norms
        for name, x in values.items():
            version = version_of(x)
            seen_value, seen_version = call.last_values.get(name, (self, 0))
            if name[0] not in "._" and (seen_value is not x or seen_version != version):
                call.last_values[name] = (x, version)
                call.changed[name] = call.line

    def add_event(self, kind: str, frame, call: Call, *returned: int):
        """Append an event to the record: "c" for a call, "l" for a line, "r" for a return."""
        assigned = []
        empty_lines = lines_without_values(frame.f_code.co_filename)
        for name, line in call.changed.items():
            x, _ = call.last_values[name]
            if line in empty_lines and isinstance(x, Tensor | np.ndarray):
                dtype = str(x.dtype).removeprefix("torch.")
                value = self.value_index({"of": f"uninitialised {dtype}", "shape": list(x.shape)})
            else:
                value = self.value(name, x, frame.f_locals)
            assigned.append([line, name, value])
        call.changed = {}
        self.events.append([kind, call.number, frame.f_lineno, assigned, *returned])

    def value(self, name: str, x, frame_locals: dict) -> int:
        """Store a value's description, and return its index. Equal descriptions share one."""
        value_json = to_json(x)
        # The image grids in a Prompt or GroupBatch are its attribute. The grids of a tensor of
        # patches are a local variable in the same function.
        grids = getattr(
            x, "image_grid_thw", frame_locals.get("image_grid_thw", frame_locals.get("grid"))
        )
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
        return self.value_index(value_json)

    def value_index(self, value_json) -> int:
        """Store a description and return its index. Container items are stored separately."""
        if isinstance(value_json, dict) and "items" in value_json:
            for item in value_json["items"]:
                item[1] = self.value_index(item[1])
        return self.values.setdefault(json_text(value_json), len(self.values))

    def first_frame(self, frames: Tensor) -> str:
        """Encode the first normalised frame from (frames, 3, height, width) as a data URL."""
        mean = torch.tensor(self.image_processor.image_mean)
        std = torch.tensor(self.image_processor.image_std)
        rgb = (frames[0].permute(1, 2, 0).cpu() * std + mean).clamp(0, 1) * 255
        return png(PIL.Image.fromarray(rgb.round().byte().numpy()))

    def pause(self, trainer: Trainer, step: Step):
        """Stop tracing before the optimizer update, and record what the page shows below the code.

        The page shows the step's packed sequences, and the first prompts with their completions.
        """
        self.__exit__()
        runs = [describe_packed_run(batch) for batch in step.micro_batches]
        words = {}
        for run in runs:
            for token_id in run["ids"] + run["targets"]:
                words[token_id] = trainer.processor.tokenizer.decode([token_id])
        self.description = {
            "prompts": describe_prompts(trainer, step),
            # each step prompt's index among the rollout's prompts
            "numbers": [group[0].index // len(group) for group in step.groups],
            "runs": runs,
            "words": words,
        }

    def write(self, path: Path, title: str):
        """Write the recorded step's page."""
        data = self.description | {
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
    """Return the Python files that a name on the command line stands for.

    Args:
        name: a Python file, or a folder in minivlmrl.

    Raises:
        ValueError: the name is neither a Python file nor a folder in minivlmrl.
    """
    path = Path(name)
    paths = [path, path.absolute()] if path.is_file() else []
    for folder in (PACKAGE / name, PACKAGE.parent / name):
        paths += folder.glob("[a-z]*.py")
    if not paths:
        raise ValueError(
            f"--trace: {name} is neither a Python file nor a folder of minivlmrl, such as losses"
        )
    return paths


@cache
def lines_without_values(file: str) -> set[int]:
    """Return a file's lines that assign the memory of torch.empty or a similar function.

    This memory contains arbitrary numbers, which the page must not show as values.
    """
    lines = set()
    for node in ast.walk(ast.parse(Path(file).read_text("utf-8"))):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            function = node.value.func
            name = getattr(function, "attr", getattr(function, "id", ""))
            if name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"):
                lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def version_of(x) -> int:
    """Return a number that changes when a tensor is modified or a container changes its size."""
    if isinstance(x, Tensor) and not x.is_inference():
        return x._version
    return len(x) if isinstance(x, list | dict | set) else 0


def describe_packed_run(batch: MicroBatch) -> dict:
    """Describe a packed sequence: its tokens, its part lengths, and its completions.

    The page derives the attention mask from the part lengths. A test compares this mask
    with the model's mask, attention.visible.
    """
    layout = batch.group.layout
    rows = (
        layout.row_index // batch.group.completion_mask.shape[1]
    )  # (M,): each completion token's row
    spans = []  # for each prompt, [row, token count] for each part of its completions
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
        # for each row, its completion's index in the rollout
        "completions": to_json(getattr(batch, "completion_index", None)),
        "trained": batch.loss_mask.sum(
            1
        ).tolist(),  # number of tokens in each row that the loss uses
    }


def describe_prompts(trainer: Trainer, step: Step) -> list[dict]:
    """Describe a step's first prompts by texts, rewards, images and saliency maps."""
    lines = list(groups(trainer, step))[:NUM_PROMPTS]
    for group, line in zip(step.groups, lines, strict=False):
        line["pictures"] = [png(image) for image in group[0].row.images]
        for shown, sample in zip(line["completions"], group, strict=True):
            maps = saliency_maps(
                trainer.policy,
                trainer.processor,
                sample.prompt,
                sample.completion,
                shown["advantage"],
                trainer.run.sampling.temperature,
            )
            shown["maps"] = [to_json(x) for x in maps]
    return lines


def to_json(x, depth: int = 0):
    """Describe a value as JSON: numbers and texts as they are, others as {"of": type, ...}."""
    if isinstance(x, np.ndarray) and x.dtype.kind in "biuf":
        x = torch.tensor(x)
    if isinstance(x, Tensor):
        return matrix(gather_full_tensor(x).cpu())  # x is a DTensor if the run is sharded
    if isinstance(x, PIL.Image.Image):
        return {"of": "picture", "shape": x.size[::-1], "pictures": [png(x)]}
    if isinstance(x, str):
        return x[:400]
    if isinstance(x, int | float | None):
        return x
    fields = x
    if is_dataclass(x):  # not for a class, because vars() of a class is not a dict
        fields = vars(x)
    elif isinstance(x, list | tuple | range):
        fields = dict(enumerate(x))
    type_name = type(x).__name__
    if not isinstance(fields, dict) or not MAX_ITEMS[depth]:
        return {"of": getattr(x, "__qualname__", type_name)}
    shown = islice(fields.items(), MAX_ITEMS[depth])
    items = [[str(key), to_json(value, depth + 1)] for key, value in shown]
    return {"of": type_name, "size": len(fields), "items": items}


def matrix(x: Tensor) -> dict:
    """Describe a tensor by dtype, shape, [mean, min, max, number of NaNs], and its first matrix.

    A matrix with too many numbers (see MAX_SHOWN_VALUES) is reduced to tile means, and if its
    rows have more than 256 numbers, also to the three largest numbers in its first 64 rows.
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
    max_values = MAX_SHOWN_VALUES if x.is_floating_point() else 5 * MAX_SHOWN_VALUES
    if rows.numel() > max_values:
        if rows.shape[1] > 256:  # probably logits, so the three likeliest tokens are recorded
            top = rows[:64].float().topk(3)
            tensor_json["top"] = torch.stack([top.indices, top.values], dim=2).tolist()
        height, width = rows.shape
        size = (min(TILES_PER_SIDE, height), min(TILES_PER_SIDE, width))
        rows = adaptive_avg_pool2d(rows[None].float(), size)[0]
    return tensor_json | {"rows": rows.tolist()}


def png(image: PIL.Image.Image) -> str:
    """Encode an image as a data URL; images wider or higher than 160 pixels are reduced."""
    image = image.convert("RGB")
    image.thumbnail((160, 160))
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def pictures(patches: Tensor, grids: Tensor, images: ImageProcessor) -> list[Tensor]:
    """Convert patches back to one tensor (frames, 3, height, width) per image or video.

    This is image.patchify's inverse.
    """
    m, n, p = images.merge_size, images.temporal_patch_size, images.patch_size
    grids = torch.as_tensor(grids).view(-1, 3)
    result = []
    for part, (t, h, w) in zip(patches.split(grids.prod(1).tolist()), grids.tolist(), strict=True):
        # (t, h / m, w / m, m, m, 3, n, p, p) -> (t, n, 3, h / m, m, p, w / m, m, p)
        cut = part.reshape(t, h // m, w // m, m, m, 3, n, p, p).permute(0, 6, 5, 1, 3, 7, 2, 4, 8)
        result.append(cut.reshape(t * n, 3, h * p, w * p))
    return result


def saliency_maps(
    policy: VisionLanguageModel,
    processor: Processor,
    prompt: Prompt,
    completion: Completion,
    weight: float = 1.0,
    temperature: float = 1.0,
) -> list[Tensor]:
    """Compute gradient saliency maps for a prompt's images.

    The maps show the gradient of `weight` times the completion's log-probability, with respect
    to the normalised pixels. docs/metrics.md explains what such maps do not show.

    Args:
        policy: model that computes the log-probability.
        processor: the model's processor.
        prompt: prompt with images.
        completion: the prompt's completion.
        weight: the log-probability's factor, usually the advantage.
        temperature: sampling temperature by which the logits are divided.

    Returns:
        One float32 map (height, width) per image: the absolute gradients, summed over frames and
        colours, in nats per standard deviation of a colour.
    """
    pixels = prompt.pixel_values.detach().clone().requires_grad_()
    prompt = replace(prompt, pixel_values=pixels, vision_embeds=None)
    group = pack_turns([prompt], [[completion]], policy.config, policy.lm_head.weight.device)
    logps, _ = per_token_logps(policy, group, temperature)
    [gradient] = torch.autograd.grad(weight * (logps * group.policy_mask).sum(), pixels)
    slopes = pictures(gradient.float(), prompt.image_grid_thw, processor.image_processor)
    return [picture.abs().sum((0, 1)).cpu() for picture in slopes]
