"""Read and write a recorded optimizer step: step.json and step.safetensors.

A step has n rows (completions) with S tokens, in M micro-batches. The rows come from a rollout with N completions and
K rewards per completion.
"""

import math
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path, PurePosixPath

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import pad

from minivlmrl.errors import UserError, error_context, require
from minivlmrl.extras.parity import units
from minivlmrl.extras.parity.step_format import BY_ROW, BY_TOKEN, MODELS, NEEDED, OPTIONS, check_fields
from minivlmrl.files import save_tensors
from minivlmrl.json_files import read_json, write_json

# exceptions for tensors or fields with a wrong type or shape
DAMAGES = TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError
OTHER_STEP = "../{}/"  # folder of the step that sampled a row; {} = step number


class SearchEndedError(Exception):
    """The search for known bugs in a step reached its time limit."""


class Dump(dict):
    """Recorded optimizer step as {name: tensor}, with floats in float64; `about` has the fields in step.json."""

    tolerance = 1e-5  # largest relative error with which a simulated bug explains the numbers
    case_tolerance = 0.0  # maximum error in a test case of a loss; 0 for recorded steps
    read: set[str] | None = None  # tensors and options read by a tested loss
    simpler: Callable = list  # function that lists simplified test cases of a loss
    deadline = math.inf  # end of the bug search, on the clock time.thread_time()
    part: Tensor | None = None  # rows for which log-probs are recomputed, None = all

    def __init__(self, about: dict, tensors: dict[str, Tensor]):
        check_step(about, tensors)
        self.about = about
        self.cache = {}  # results of forward and backward passes
        self.usual_answers = {}  # {stage: recomputed numbers without simulated bugs}
        ones = torch.ones_like(tensors["input_ids"])
        n, self.width = ones.shape
        self.all_rows = torch.arange(n)
        self.eps = {}  # {tensor name: machine epsilon of the recorded dtype}
        self["micro_batch"] = self.all_rows * 0
        self["attention_mask"] = ones
        self["tool_mask"] = ones
        if about.get("rollout_tokens"):
            self["rollout_tokens"] = self.all_rows * 0 + about["rollout_tokens"]
        for name, x in tensors.items():
            if x.is_floating_point():
                self.eps[name] = torch.finfo(x.dtype).eps
                x = x.double()
            if name in BY_TOKEN or (name in BY_ROW and x.shape[1:].numel() > 1):
                # tensors with only the last T tokens: pad with zeros on the left
                x = pad(x, (self.width - x.shape[1], 0))
            self[name] = x
        other_tokens = self["attention_mask"] * (1 - self["completion_mask"].long())
        prompt_tokens = self.get("prompt_mask", other_tokens)
        # (n, S) mask: all columns after the prompt, including padding
        self.completion = prompt_tokens.flip(1).cumsum(1).flip(1) == 0
        self.num_rows = n
        self.num_columns = self.completion[0].sum()
        # columns beyond max_completion_length are padding, even stop tokens
        longest = about.get("max_completion_length") or self.width
        self.within_limit = self.completion & (self.completion.cumsum(1) <= longest)
        self["lengths"] = self["completion_mask"].sum(1)
        self["row_lengths"] = self["attention_mask"].sum(1)
        if about.get("stop_token_ids"):
            self["ended"] = (self.is_stop(self["input_ids"]) & self.within_limit).any(1)

    # wrong row and token indices, and masks, for simulated bugs (units.py)
    rows = cached_property(units.row_orders)
    rollout_rows = cached_property(lambda self: units.row_orders(self, of_rollout=True))
    row_sets = cached_property(units.row_sets)
    columns = cached_property(units.token_orders)
    regions = cached_property(lambda self: units.token_regions(self, *self.turns()))

    @cached_property
    def micro_batches(self) -> list[Tensor]:
        numbers = self["micro_batch"]
        return [self.all_rows[numbers == number] for number in numbers.unique()]

    @property
    def optimizer(self) -> dict:
        return self.about.get("optimizer", {})

    def check_time(self):
        if time.thread_time() > self.deadline:
            raise SearchEndedError

    def is_stop(self, ids: Tensor) -> Tensor:
        return torch.isin(ids, torch.tensor(self.about.get("stop_token_ids") or []))

    def has(self, *names: str) -> bool:
        return self.keys() >= {*names}

    def reads(self, name: str) -> bool:
        """Return whether a tested loss uses this tensor or option; True for recorded steps."""
        return self.read is None or name in self.read

    def turns(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return completion token ids, and masks for sampled tokens and tool responses, all (n, S)."""
        if self.sampled is not None:
            ids, drawn_flags = self.sampled[..., : self.width]
            return ids, drawn_flags == 1, drawn_flags == 0
        tool_mask = self["tool_mask"].bool()
        return self["input_ids"], self.within_limit & tool_mask, self.completion & ~tool_mask

    @cached_property
    def sampled(self) -> Tensor | None:
        """Token ids from the sampler, aligned with input_ids, and flags: 1 = sampled, 0 = tool response, -1 = padding.

        Shape (2, n, S + L) if input_ids are (n, S) and sampler_ids have L columns. None if sampler_ids is missing, or
        input_ids are wrong.
        """
        if "sampler_ids" not in self:
            return None
        row = self.get("row", self.all_rows)
        both = torch.stack([self["sampler_ids"][row], self["sampler_mask"][row]], 1)
        begins = (~self.completion).sum(1).tolist()
        rows = []
        for begin, x in zip(begins, both, strict=True):
            x = x[:, x[0] >= 0]
            # a negative pad size truncates the row
            rows.append(pad(x, (begin, self.width + both.shape[2] - begin - x.shape[1]), value=-1))
        return torch.stack(rows, 1)

    @cached_property
    def tokenizer(self):
        # imported late: only steps with a model need the tokenizers package
        from minivlmrl.data.tokenizer import load_tokenizer

        return load_tokenizer(Path(self.about["model"]) / "tokenizer.json")

    def text(self, ids: Tensor) -> str:
        """Decode token ids; -1 is padding."""
        return self.tokenizer.decode(ids[ids >= 0].tolist())

    def parameters(self, kind: str) -> dict[str, Tensor]:
        """Return {parameter: tensor} of one kind, such as "grad" for gradients."""
        return {name.removeprefix(f"{kind}."): x for name, x in self.items() if name.startswith(f"{kind}.")}


def check_step(about: dict, tensors: dict[str, Tensor]):
    """Raise ValueError if a tensor or field of a step is missing or wrong."""
    missing = [f"the tensor {name} is missing" for name in NEEDED if name not in tensors]
    if about.get("kind") not in (*OPTIONS,):
        missing.append(f"the field kind is {about.get('kind')!r}")
    if missing:
        raise UserError(
            f"{missing[0]}. A step needs the tensors {', '.join(NEEDED)} and the field kind, which must be grpo, dpo "
            "or sft. Steps of KTO, distillation and trajectories are not supported."
        )
    check_fields(about)
    n, width = tensors["input_ids"].shape
    for name in tensors.keys() & BY_ROW:
        shape = tuple(tensors[name].shape)
        by_token = len(shape) == 2 and shape[1] <= width
        if shape[0] != n or (name in BY_TOKEN and not by_token):
            raise UserError(f"the tensor {name} has shape {shape}, which does not match that of input_ids {(n, width)}")
    if (tensors.get("row", torch.zeros(1)) < 0).any():
        raise UserError("the tensor row has a negative number, but it must count rollout completions from 0")
    for name in MODELS:
        text = about.get(name) or ""
        inside = PurePosixPath(text.removeprefix(OTHER_STEP))
        is_inside = not inside.is_absolute() and ".." not in inside.parts
        expected = f"a folder inside the step, such as {name}, or one inside {OTHER_STEP}"
        with error_context("step.json"):
            require(is_inside, name, text, expected)


def read(folder: str | Path) -> Dump:
    """Read a recorded step; raises ValueError if the step is not valid."""
    folder = Path(folder)
    try:
        about = read_json(folder / "step.json")
        tensors = load_file(folder / "step.safetensors")
        d = Dump(about, tensors)
        about |= {name: str(folder / about[name]) for name in MODELS if about.get(name)}
        return d
    except (OSError, SafetensorError, ValueError, *DAMAGES) as error:
        raise UserError(f"{folder} is not a valid step, as in docs/numerical_parity.md: {error}") from error


def write(folder: str | Path, about: dict, tensors: dict[str, Tensor]):
    """Write step.json and step.safetensors into a folder; raises ValueError if a tensor or field is wrong."""
    copies = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}
    Dump(about, copies)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(copies, folder / "step.safetensors")
    write_json(folder / "step.json", about)
