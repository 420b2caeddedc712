"""`replay RUN --step 73 --lines step73.html`: that step as a page to walk through, line by line.

`Film` follows the book's files, and those that it is asked for, with sys.settrace, and notes what
each line made. Of a call it keeps TWICE rounds of each loop and calls of each function, and counts
the others. Without --lines nothing of this runs.
"""

import base64
import io
import json
import sys
import threading
from collections import Counter
from dataclasses import is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from minivlmrl import train
from minivlmrl.attention import visible
from minivlmrl.batch import pack
from minivlmrl.hub.folder import json_text
from minivlmrl.logprobs import per_token_logps
from minivlmrl.run.completions import GROUPS, groups

PACKAGE = Path(train.__file__).parent
PAGE = Path(__file__).with_suffix(".html")
TWICE, SEEN = 2, 400  # SEEN: tokens of a run, at most, of which the page says who sees whom
ITEMS = 1000, 12, 4, 0  # of a container, and of those in it, that are shown


class Film:
    """Records a step from where train.train comes to it; `words`: files and folders to follow too.

    `with film:` follows this thread and those that begin in it.
    """

    def __init__(self, words: list[str], stage: str, number: int):
        self.step = (stage, number)
        self.images = None
        self.about = {"prompts": []}
        self.norms = {}
        self.events = []
        self.calls = []
        self.more = Counter()
        self.values = {}
        self.frames = {}  # calls by frame, None: left out
        self.root = None  # the call of train.train
        self.files = {str(path): path.stem for path in PACKAGE.glob("[a-z]*.py")}
        for word in words:
            at = [PACKAGE / word, PACKAGE.parent / word]
            found = [path for folder in at for path in folder.glob("[a-z]*.py")]
            found += [path for path in (Path(word), Path(word).absolute()) if path.is_file()]
            if not found:
                raise ValueError(f"--lines: {word} is no Python file, and no folder of minivlmrl")
            self.files |= {str(path): "/".join(path.absolute().parts[-2:])[:-3] for path in found}

    def __enter__(self):
        threading.settrace(self)
        sys.settrace(self)

    def __exit__(self, *error):
        sys.settrace(None)
        threading.settrace(None)

    def __call__(self, frame, event, arg):
        """Decide whether a call is followed: sys.settrace asks for each."""
        code, above = frame.f_code, frame.f_back
        if not self.root or frame in self.frames:  # the step is to come, or a generator goes on
            return self.line if self.root or code is train.train.__code__ else None
        while above and above not in self.frames:
            above = above.f_back
        caller = self.frames.get(above, self.root)
        if code.co_filename not in self.files or not caller or code.co_name[0] == "<":  # a lambda
            return None
        caller.times[code] += 1
        if caller.times[code] <= TWICE:
            self.follow(frame, caller.number)
        else:
            self.more[caller.number, caller.at, code.co_qualname] += 1
            self.frames[frame] = None
        return self.line

    def follow(self, frame, caller: int | None):
        """Begin a call. seen: name -> value, version; made: name -> line, since the last event."""
        call = SimpleNamespace(seen={}, made={}, times=Counter(), at=frame.f_lineno)
        call.number, self.frames[frame] = len(self.calls), call
        self.root = self.root or call
        code = frame.f_code
        self.calls.append([self.files[code.co_filename], code.co_qualname, caller])
        self.look(frame, call)
        call.made = {name: line for name, line in call.made.items() if "." not in name}
        self.note("c", frame, call)

    def line(self, frame, event, arg):
        """Note what a line has made when the next one begins or the call ends."""
        call = self.frames.get(frame)
        here = frame.f_locals
        if call:
            self.look(frame, call)
            if event == "return":
                self.note("r", frame, call, self.value("", arg, {}))
            elif event == "line":
                call.at = frame.f_lineno
                call.times[call.at] += 1
                if call.times[call.at] <= TWICE:
                    self.note("l", frame, call)
                else:
                    self.more[call.number, call.at, ""] += 1
        elif not self.root and (here["algorithm"].stage, here.get("number")) == self.step:
            self.images = here["algorithm"].processor.image_processor
            self.follow(frame, None)
        if event == "return" and not frame.f_code.co_flags & 0x20:  # of a generator
            self.frames.pop(frame, None)
        return self.line

    def look(self, frame, call):
        """Find what is new: locals, fields of self, in optimizer_step the gradients' norms."""
        here = dict(frame.f_locals)
        own = getattr(here.get("self"), "__dict__", {}).items()
        here |= {f"self.{name}": x for name, x in own if name[0] != "_"}
        if frame.f_code is train.optimizer_step.__code__:
            weights = here["algorithm"].trained.named_parameters()
            now = {name: x.grad.norm().item() for name, x in weights if x.grad is not None}
            self.norms = here["norms of gradients"] = self.norms if now == self.norms else now
        for name, x in here.items():
            version = len(x) if isinstance(x, list | dict | set) else 0
            if isinstance(x, Tensor) and not x.is_inference():
                version = x._version  # counts writes
            last, before = call.seen.get(name, (self, 0))
            if name[0] not in "._" and (last is not x or before != version):
                call.seen[name], call.made[name] = (x, version), call.at

    def note(self, kind: str, frame, call, *returned: int):
        """Add an event: c begins a call, l is a line that comes next, r leaves a call."""
        values = ((at, name, call.seen[name][0]) for name, at in call.made.items())
        made = [[at, name, self.value(name, x, frame.f_locals)] for at, name, x in values]
        call.made = {}
        self.events.append([kind, call.number, frame.f_lineno, made, *returned])

    def value(self, name: str, x, here: dict) -> int:
        """Number what the page shows of a value; equal ones are kept once."""
        shown = plain(x)
        if hasattr(x, "image_grid_thw"):  # a Prompt or a GroupBatch
            here, name, x = vars(x), "pixel_values", x.pixel_values
        grids = here.get("image_grid_thw", here.get("grid"))
        if name in ("patches", "pixel_values") and np.shape(x)[1:] == (self.images.patch_dim,):
            found = [] if grids is None else pictures(torch.as_tensor(x), grids, self.images)
            mean, std = map(torch.tensor, (self.images.image_mean, self.images.image_std))
            shown["pictures"] = []
            for frames in found:
                rgb = (frames[0].permute(1, 2, 0).cpu() * std + mean).clamp(0, 1) * 255
                image = PIL.Image.fromarray(rgb.round().byte().numpy())
                shown["pictures"].append(png(image))
        return self.values.setdefault(json_text(shown), len(self.values))

    def pause(self, algorithm, step):
        """Stop before the update, and describe the step's first prompts and who sees whom."""
        self.__exit__()
        rollout, processor, policy = step.rollout, algorithm.processor, algorithm.policy
        heat = algorithm.run.sampling.temperature
        prompts = [said for _, said in groups(algorithm, step)][:GROUPS] if rollout else []
        for index, said in zip(step.prompts, prompts, strict=False):
            said["pictures"] = [png(image) for image in rollout.rows[index].images]
            for one, drawn in zip(said["completions"], rollout.completions[index], strict=True):
                about = rollout.prompts[index], drawn, one["advantage"]
                maps = looked(policy, processor, *about, heat)
                one["maps"] = [matrix(x, 32) for x in maps]
        runs = []
        used = set()
        for group in (batch.group for batch in step.micro_batches):
            ids = group.input_ids.tolist()
            short = len(group.input_ids) <= SEEN
            rows = [row.tolist() for row in group.split(group.completion_ids)]
            sees = visible(group.layout).int().tolist() if short else []
            runs.append({"ids": ids, "rows": rows, "sees": sees})
            used.update(ids, *rows)
        words = {number: processor.tokenizer.decode([number]) for number in used}
        self.about = {"prompts": prompts, "runs": runs, "words": words}

    def write(self, path: Path, title: str):
        """Write the page."""
        files = {name: Path(file).read_text("utf-8") for file, name in self.files.items()}
        data = self.about | {"title": title, "files": files, "events": self.events}
        data |= {"calls": self.calls, "more": [[*key, n] for key, n in self.more.items()]}
        data["values"] = [json.loads(text) for text in self.values]
        rounded = json.loads(json_text(data), parse_float=lambda text: float(f"{float(text):.4g}"))
        text = json_text(rounded, separators=(",", ":")).replace("<", "\\u003c")
        path.write_bytes(PAGE.read_text("utf-8").replace("{{DATA}}", text).encode())
        print(f"wrote {path}")


def plain(x, depth: int = 0):
    """Describe a value as JSON: {"of": its type, ...}; numbers and texts are themselves."""
    if isinstance(x, np.ndarray) and x.dtype.kind in "biuf":
        x = torch.tensor(x)
    if isinstance(x, Tensor):
        return matrix(x.detach().cpu(), 22 >> depth)
    if isinstance(x, PIL.Image.Image):
        return {"of": "picture", "shape": x.size[::-1], "pictures": [png(x)]}
    if isinstance(x, str | bool | int | float | None):
        return x[:400] if isinstance(x, str) else x
    kind = type(x).__name__
    most = ITEMS[depth]
    inside = x
    if is_dataclass(x) and not isinstance(x, type):
        inside = vars(x)
    elif isinstance(x, list | tuple | range):
        inside = dict(enumerate(x))
    if not isinstance(inside, dict) or not most:
        return {"of": getattr(x, "__qualname__", kind)}
    items = [[str(key), plain(item, depth + 1)] for key, item in [*inside.items()][:most]]
    return {"of": kind, "size": len(inside), "items": items}


def matrix(x: Tensor, side: int) -> dict:
    """Describe a tensor: dtype, shape, [mean, least, largest, NaNs], rows of its first matrix.

    If these have over side x side numbers, means of tiles are kept, and the largest of long rows.
    """
    shown = {"of": str(x.dtype)[6:], "shape": [*x.shape]}
    known = x.float()[~x.isnan()]
    if not len(known):
        return shown
    low = known.min().item()
    high = known.max().item()
    shown["stats"] = known.mean().item(), low, high, x.numel() - len(known)
    x = x.reshape(-1, *x.shape[-2:])[0] if x.dim() > 1 else x.reshape(1, -1)[:, :2048]
    if x.numel() > side**2 and len(x) > 1:
        if x.shape[1] > 256:  # of logits the likeliest tokens
            top = x[:64].float().topk(3)
            shown["top"] = torch.stack([top.indices, top.values], dim=2).tolist()
        size = [min(side, n) for n in x.shape]
        x = torch.nn.functional.adaptive_avg_pool2d(x[None].float(), size)[0]
    return shown | {"rows": x.tolist()}


def png(image: PIL.Image.Image) -> str:
    """Write a picture as a data URL, at most 160 pixels a side."""
    image, out = image.convert("RGB"), io.BytesIO()
    image.thumbnail((160, 160))
    image.save(out, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def pictures(patches: Tensor, grids, images) -> list[Tensor]:
    """Undo image.patchify: (frames, 3, height, width) of each picture or video."""
    m, n, p = images.merge_size, images.temporal_patch_size, images.patch_size
    grids, found = torch.as_tensor(grids).view(-1, 3), []
    for part, (t, h, w) in zip(patches.split(grids.prod(1).tolist()), grids.tolist(), strict=True):
        cut = part.reshape(t, h // m, w // m, m, m, 3, n, p, p).permute(0, 6, 5, 1, 3, 7, 2, 4, 8)
        found.append(cut.reshape(t * n, 3, h * p, w * p))
    return found


def looked(policy, processor, prompt, completion, weight=1.0, temperature=1.0) -> list[Tensor]:
    """Measure how much each pixel could change weight times a completion's log-probability.

    Of each picture (height, width) float32: the absolute gradient, added up over frames and
    colours, in nats for a colour's standard deviation. docs/metrics.md says what it is not.
    """
    pixels = prompt.pixel_values.detach().clone().requires_grad_()
    seen = replace(prompt, pixel_values=pixels, vision_embeds=None)
    group = pack([seen], [[completion]], policy.config, policy.lm_head.weight.device)
    logps, _ = per_token_logps(policy, group, temperature)
    [gradient] = torch.autograd.grad(weight * (logps * group.written).sum(), pixels)
    found = pictures(gradient, prompt.image_grid_thw, processor.image_processor)
    return [picture.abs().sum((0, 1)).cpu() for picture in found]
