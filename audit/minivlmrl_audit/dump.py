"""Read and write a dumped optimizer step: step.json and step.safetensors.

A step has n rows (completions) of S tokens in M micro-batches. Its rows come from a rollout of N completions with K
rewards each. docs/audit.md lists all tensors and fields. Only the tensors in NEEDED and the field `kind` are required.
"""

import math
import time
from functools import cached_property
from pathlib import Path, PurePosixPath

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from minivlmrl_audit import perturbations, step_names, units
from minivlmrl_audit.formulas import first
from minivlmrl_audit.minivlmrl_api import (
    check_field,
    error_context,
    load_tokenizer,
    read_json,
    save_tensors,
    write_json,
)
from minivlmrl_audit.options import OPTIONS
from minivlmrl_audit.step_fields import check_fields

# exceptions that a field or tensor with a wrong type or shape can cause
DAMAGES = TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError
NEEDED = step_names.NEEDED
BY_TOKEN = NEEDED + step_names.BY_TOKEN
BY_ROW = BY_TOKEN + step_names.BY_ROW
INDICES = {*step_names.INDICES}
MODELS = "model", "old_model", "ref_model"  # fields with folders of weights
OF_ROLLOUT = "../{}/"  # folder of the step that sampled a row, beside the folder of this step


class SearchEndedError(Exception):
    """The time of a search is over."""


class Dump(dict):
    """A dumped step in memory: a dict from names to tensors. Floating-point tensors are in float64.

    The attribute `about` is the content of step.json.
    """

    def __init__(self, about: dict, tensors: dict[str, Tensor]):
        check_step(about, tensors)
        self.about = about
        # Deviations that the audit has found in the step's forward and in its token ids. {} means that there is none,
        # and None that the values differ for an unknown reason.
        self.forward = {}
        self.ids = {}
        self.cache = {}  # results of the model's forwards and backwards
        # results of the stages without a deviation; a deviation may not enlarge their units much
        self.usual_answers = {}
        self.tolerance = 1e-5  # largest error that an explanation may leave; each search sets it
        self.deadline = math.inf  # time.monotonic() at which a search ends
        self.part = None  # rows whose log-probabilities are recomputed; None means all rows
        ones = torch.ones_like(tensors["input_ids"])
        n, self.width = ones.shape
        self.all_rows = torch.arange(n)
        self.eps = {}  # machine epsilon of the dtype in which each float tensor was dumped
        self["micro_batch"] = self.all_rows * 0
        self["attention_mask"] = ones
        self["tool_mask"] = ones
        if about.get("rollout_tokens"):
            self["rollout_tokens"] = self.all_rows * 0 + about["rollout_tokens"]
        for name, x in tensors.items():
            if x.is_floating_point():
                self.eps[name] = torch.finfo(x.dtype).eps
                x = x.double()
            is_by_token = name in BY_TOKEN or (name in BY_ROW and x.shape[1:].numel() > 1)
            if is_by_token:  # a tensor for only the last T tokens is padded with zeros on the left
                x = pad(x, (self.width - x.shape[1], 0))
            self[name] = x
        numbers = self["micro_batch"]
        self.micro_batches = [self.all_rows[numbers == m] for m in numbers.unique()]
        other_tokens = self["attention_mask"] * (1 - self["completion_mask"].long())
        prompt_tokens = self.get("prompt_mask", other_tokens)
        # (n, S) mask of all columns after the prompt, including padding
        self.completion = prompt_tokens.flip(1).cumsum(1).flip(1) == 0
        # (n, S) mask of the columns that may hold sampled tokens; all columns after them are padding, whose id may be
        # that of a stop token
        longest = about.get("max_completion_length") or self.width
        self.within_limit = self.completion & (self.completion.cumsum(1) <= longest)
        self.add_row_numbers()

    # orders and sets of rows, tokens, images and parameters for composed causes, see units.py
    rows = cached_property(units.row_orders)
    rollout_rows = cached_property(lambda self: units.row_orders(self, of_rollout=True))
    row_sets = cached_property(units.row_sets)
    rollout_sets = cached_property(units.rollout_sets)
    spans = cached_property(units.spans)
    pictures = cached_property(units.picture_sets)
    parts = cached_property(units.parts_of_model)
    columns = cached_property(units.token_orders)
    regions = cached_property(lambda self: units.token_regions(self, *self.turns()))

    @property
    def optimizer(self) -> dict:
        return self.about.get("optimizer", {})

    @property
    def schedule(self) -> dict:
        return self.about.get("schedule", {})

    def check_time(self):
        """Raise SearchEndedError after the deadline of a search."""
        if time.monotonic() > self.deadline:
            raise SearchEndedError

    def add_row_numbers(self):
        """Add tensors (n,) with one number for each row, which formulas in the YAML files use."""
        ids = self["input_ids"]
        counted_mask = self["completion_mask"]
        attended = self["attention_mask"]
        is_text = attended.bool() & ~self.completion & (ids != self.about.get("image_token_id"))
        texts = [ids[row][is_text[row]].tolist() for row in self.all_rows]
        self["lengths"] = counted_mask.sum(1)
        self["num_turns"] = first(self.turns()[1]).sum(1)
        self["row_lengths"] = attended.sum(1)
        self["prompt_text"] = torch.tensor([texts.index(text) for text in texts])
        if "ref_per_token_logps" in self:
            policy_logps = self.get("old_per_token_logps", self["per_token_logps"])
            gaps = policy_logps - self["ref_per_token_logps"]
            self["row_kl"] = (gaps * counted_mask).sum(1)
        if "entropies" in self:
            self["row_entropies"] = (self["entropies"] * counted_mask).sum(1)
        if self.about.get("stop_token_ids"):
            self["ended"] = (self.is_stop(ids) & self.within_limit).any(1)

    def is_stop(self, ids: Tensor) -> Tensor:
        """Return a bool mask, shaped like ids, of the stop tokens that end a turn."""
        return torch.isin(ids, torch.tensor(self.about.get("stop_token_ids") or []))

    def model_dtype(self) -> str | None:
        """Return the name of the dtype in which the trainer's model ran."""
        return self.about.get("autocast") or self.about.get("dtype")

    def has(self, *names: str) -> bool:
        return all(name in self for name in names)

    def has_advantage(self) -> Tensor:
        """Return a mask (n,) of the rows with an advantage other than 0."""
        return (self["advantages"].view(len(self.all_rows), -1) != 0).any(1)

    def of_rollout(self, name: str) -> Tensor:
        """Return the tensor `name` (n,) of the rows in the order of the rollout's completions (N,).

        Returns ones if the step does not have exactly one row for each completion of the rollout.
        """
        order = self.get("row", self.all_rows).argsort()
        if len(order) != len(self["group"]):
            return torch.ones(len(self["group"]))
        return self[name][order].double()

    def turns(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return token ids (n, S), a mask of sampled tokens, and a mask of tool-response tokens."""
        sampled = self.sampled(self.ids)
        if sampled is not None:
            ids, drawn_flags = sampled[..., : self.width]
            return ids, drawn_flags == 1, drawn_flags == 0
        tool_mask = self["tool_mask"].bool()
        return self["input_ids"], self.within_limit & tool_mask, self.completion & ~tool_mask

    def sampled(self, change: dict | None) -> Tensor | None:
        """Return the sampler's tokens after the prompt, changed by a deviation of `ids`.

        Returns a tensor (2, n, S + L) with the token ids, and with 1 for each sampled token and 0 for each token of a
        tool response; -1 is padding. Returns None if the dump does not contain the sampler's ids, or if the ids differ
        for an unknown reason.
        """
        if change is None or "sampler_ids" not in self:
            return None
        kind, unit, text = change.get("ids", ("", "", None))
        row = self.get("row", self.all_rows)
        if kind == "rows":
            row = row[self.rows[unit]]
        ids = self["sampler_ids"][row]
        drawn_flags = self["sampler_mask"][row]
        is_real = ids >= 0
        regions = {}
        if text:
            regions = units.token_regions(self, ids, drawn_flags == 1, drawn_flags == 0)
        region = regions.get(unit, ids * 0)
        rows = []
        for i, begin in enumerate((~self.completion).sum(1).tolist()):
            lists = [x[i][is_real[i]].tolist() for x in (ids, drawn_flags, region)]
            values = torch.tensor(perturbations.edited(self, *lists, text)).long()
            end = self.width + ids.shape[1] - begin - values.shape[1]
            rows.append(pad(values, (begin, end), value=-1))  # a negative end truncates the row
        return torch.stack(rows, 1)

    def again(self, ids: list[int]) -> list[int]:
        """Decode token ids to text, and return the ids from encoding this text again."""
        tokenizer = load_tokenizer(Path(self.about["model"]) / "tokenizer.json")
        tokenizer.backend.encode_special_tokens = False
        return tokenizer.encode(tokenizer.decode(ids))

    def parameters(self, kind: str) -> dict[str, Tensor]:
        """Return the tensors whose names begin with `kind` and a dot, without this prefix."""
        prefix = f"{kind}."
        return {name.removeprefix(prefix): x for name, x in self.items() if name.startswith(prefix)}


def check_step(about: dict, tensors: dict[str, Tensor]):
    """Check the fields of a step, and that it has all required tensors, with consistent shapes.

    Raises ValueError if a required tensor is missing, if the kind is not supported, if a field has a wrong type, if a
    tensor of indices is not of integers, or if a tensor's shape does not fit input_ids.
    """
    missing = [f"the tensor {name} is missing" for name in NEEDED if name not in tensors]
    if about.get("kind") not in (*OPTIONS,):
        missing.append(f"the field kind is {about.get('kind')!r}")
    if missing:
        raise ValueError(
            f"{missing[0]}. A step needs the tensors {', '.join(NEEDED)} and the field kind, which "
            "must be grpo, dpo or sft. Steps of KTO, distillation and trajectories are not supported."
        )
    check_fields(about)
    n, width = tensors["input_ids"].shape
    for name in INDICES & tensors.keys():
        dtype = tensors[name].dtype
        is_integer = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
        check_field(is_integer, f"the dtype of the tensor {name}", dtype, "an integer dtype")
    for name in tensors.keys() & BY_ROW:
        shape = tuple(tensors[name].shape)
        by_token = len(shape) == 2 and shape[1] <= width
        if shape[0] != n or (name in BY_TOKEN and not by_token):
            raise ValueError(
                f"the tensor {name} has shape {shape}, but input_ids has shape {(n, width)}. It must "
                f"have {n} rows, and at most {width} columns if it has one value for each token."
            )
    check_row_numbers(tensors)


def check_row_numbers(tensors: dict[str, Tensor]):
    """Raise ValueError if `row` does not hold indices of the completions in the rollout."""
    row = tensors.get("row")
    count = next((len(tensors[name]) for name in step_names.OF_ROLLOUT if name in tensors), None)
    if row is None or count is None:
        return
    for i, number in enumerate(row.flatten().tolist()):
        expected = f"a number from 0 to {count - 1}, because the rollout has {count} completions"
        check_field(0 <= number < count, f"element {i} of the tensor row", number, expected)


def check_model_folders(about: dict):
    """Raise ValueError if a field names a folder of weights outside of the folders of steps."""
    for name in MODELS:
        text = about.get(name) or ""
        inside = PurePosixPath(text.removeprefix(OF_ROLLOUT))
        is_inside = not inside.is_absolute() and ".." not in inside.parts
        expected = f"a folder inside the step, such as {name}, or one inside {OF_ROLLOUT}"
        with error_context("step.json"):
            check_field(is_inside, name, text, expected)


def read(folder: str | Path) -> Dump:
    """Read a dumped step from a folder.

    Raises ValueError if a file is missing or unreadable, or if it lacks required content.
    """
    folder = Path(folder)
    if not (folder / "step.json").is_file():
        raise ValueError(
            f"{folder} is not a dumped step, because it does not contain step.json. "
            "docs/audit.md explains how to dump a step."
        )
    try:
        about = read_json(folder / "step.json")
        tensors = load_file(folder / "step.safetensors")
        d = Dump(about, tensors)
        check_model_folders(about)
        about |= {name: str(folder / about[name]) for name in MODELS if about.get(name)}
        return d
    except (OSError, SafetensorError, ValueError, *DAMAGES) as error:
        raise ValueError(f"{folder} is not a valid step: {error}") from error


def join(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate the tensors of micro-batches along rows, with 2-D tensors padded on the left."""
    tensors = {}
    for name in parts[0]:
        values = [part[name] for part in parts]
        if values[0].dim() == 2:
            rows = [row for x in values for row in x]
            tensors[name] = pad_sequence(rows, batch_first=True, padding_side="left")
        else:
            tensors[name] = torch.cat(values)
    return tensors


def write(folder: str | Path, about: dict, tensors: dict[str, Tensor]):
    """Write a step into a folder, after checking that `read` accepts it.

    Raises ValueError if the step lacks required content, see `read`.
    """
    copies = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}
    Dump(about, copies)
    check_model_folders(about)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(copies, folder / "step.safetensors")
    write_json(folder / "step.json", about)
