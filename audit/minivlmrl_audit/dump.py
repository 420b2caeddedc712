"""What a trainer has written down of one optimizer step: step.json and step.safetensors.

n rows (completions) of S tokens in M micro-batches, out of a rollout of N completions with K
rewards. docs/audit.md has the names. Everything but NEEDED is optional.
"""

from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from minivlmrl_audit import moves
from minivlmrl_audit.minivlmrl_api import load_tokenizer, read_json, save_tensors, write_json
from minivlmrl_audit.options import OPTIONS

# what computing with a field or tensor of another type or shape than docs/audit.md says may raise
DAMAGES = TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError
NAMES = moves.TABLE
NEEDED = NAMES["needed"]
BY_TOKEN = NEEDED + NAMES["by token"]
BY_ROW = BY_TOKEN + NAMES["by row"]


class Dump(dict):
    """A step in memory: `about` is step.json; tensors by name, floats in float64."""

    def __init__(self, about: dict, tensors: dict[str, Tensor]):
        check_step(about, tensors)
        self.about = about
        self.optimizer = about.get("optimizer", {})
        # which deviations the forward and the ids of this step are known to have; ids are None
        # where something unknown is wrong with them
        self.forward = {}
        self.ids = {}
        self.cache = {}  # what the model computed already
        self.usual_answers = {}  # of stages as they are defined: their units are usual
        self.tolerance = 1e-5  # during a search: of what an explanation leaves
        self.part = None  # during a search: of which rows log-probabilities are
        ones = torch.ones_like(tensors["input_ids"])
        n, self.width = ones.shape
        self.all_rows = torch.arange(n)
        self.eps = {}  # of the types in which floats were written
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
            if is_by_token:  # of the last T tokens: zeros before
                x = pad(x, (self.width - x.shape[1], 0))
            self[name] = x
        numbers = self["micro_batch"]
        self.micro_batches = [self.all_rows[numbers == m] for m in numbers.unique()]
        other_tokens = self["attention_mask"] * (1 - self["completion_mask"].long())
        prompt_tokens = self.get("prompt_mask", other_tokens)
        # (n, S): the columns after the prompt, padding too
        self.completion = prompt_tokens.flip(1).cumsum(1).flip(1) == 0
        self.add_row_numbers()

    # what mistakes are composed of in this step: see moves.py
    rows = cached_property(moves.row_orders)
    rollout_rows = cached_property(lambda self: moves.row_orders(self, of_rollout=True))
    row_sets = cached_property(moves.row_sets)
    rollout_sets = cached_property(moves.rollout_sets)
    spans = cached_property(moves.spans)
    pictures = cached_property(moves.picture_numbers)
    parts = cached_property(moves.parts_of_model)
    columns = cached_property(moves.token_orders)
    regions = cached_property(lambda self: moves.token_regions(self, *self.turns()))

    def add_row_numbers(self):
        """Compute what causes and units are told by, a number of each row."""
        ids = self["input_ids"]
        counted_mask = self["completion_mask"]
        attended = self["attention_mask"]
        is_text = attended.bool() & ~self.completion & (ids != self.about.get("image_token_id"))
        texts = [ids[row][is_text[row]].tolist() for row in self.all_rows]
        self["lengths"] = counted_mask.sum(1)
        self["num_turns"] = moves.first(self.turns()[1]).sum(1)
        self["row_lengths"] = attended.sum(1)
        self["prompt_text"] = torch.tensor([texts.index(text) for text in texts])
        if "ref_per_token_logps" in self:
            policy_logps = self.get("old_per_token_logps", self["per_token_logps"])
            gaps = policy_logps - self["ref_per_token_logps"]
            self["row_kl"] = (gaps * counted_mask).sum(1)
        if "entropies" in self:
            self["row_entropies"] = (self["entropies"] * counted_mask).sum(1)
        if self.about.get("stop_token_ids"):
            self["ended"] = (self.is_stop(ids) & self.completion).any(1)

    def is_stop(self, ids: Tensor) -> Tensor:
        """Mark the tokens that end a turn."""
        return torch.isin(ids, torch.tensor(self.about.get("stop_token_ids") or []))

    def has(self, *names: str) -> bool:
        return all(name in self for name in names)

    def of_rollout(self, name: str) -> Tensor:
        """Order numbers of the rows as the rollout's completions (N,); 1 where it has more."""
        order = self.get("row", self.all_rows).argsort()
        if len(order) != len(self["group"]):
            return torch.ones(len(self["group"]))
        return self[name][order].double()

    def turns(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tell ids (n, S), which of them were drawn, and which a tool's answer forced."""
        sampled = self.sampled(self.ids)
        if sampled is not None:
            ids, drawn_flags = sampled[..., : self.width]
            return ids, drawn_flags == 1, drawn_flags == 0
        tool_mask = self["tool_mask"].bool()
        return self["input_ids"], self.completion & tool_mask, self.completion & ~tool_mask

    def sampled(self, change: dict | None) -> Tensor | None:
        """Lay out what the sampler had after the prompt; with a deviation `ids`.

        (2, n, S + L): ids, and whether it drew them; -1 where it had none.
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
            regions = moves.token_regions(self, ids, drawn_flags == 1, drawn_flags == 0)
        region = regions.get(unit, ids * 0)
        rows = []
        for i, begin in enumerate((~self.completion).sum(1).tolist()):
            lists = [x[i][is_real[i]].tolist() for x in (ids, drawn_flags, region)]
            values = torch.tensor(moves.edited(*lists, text, again=self.again)).long()
            end = self.width + ids.shape[1] - begin - values.shape[1]
            rows.append(pad(values, (begin, end), value=-1))  # or cut
        return torch.stack(rows, 1)

    def again(self, ids: list[int]) -> list[int]:
        """Decode ids to text and encode it again."""
        tokenizer = load_tokenizer(Path(self.about["model"]) / "tokenizer.json")
        tokenizer.backend.encode_special_tokens = False
        return tokenizer.encode(tokenizer.decode(ids))

    def parameters(self, kind: str) -> dict[str, Tensor]:
        """Select tensors kind.NAME, by NAME."""
        prefix = f"{kind}."
        return {name.removeprefix(prefix): x for name, x in self.items() if name.startswith(prefix)}


def check_step(about: dict, tensors: dict[str, Tensor]):
    """Check that a step has what each needs, in one shape (ValueError: what is wrong)."""
    missing = [f"{name} is missing" for name in NEEDED if name not in tensors]
    if about.get("kind") not in OPTIONS:
        missing.append(f"kind is {about.get('kind')!r}")
    if missing:
        raise ValueError(
            f"{missing[0]}; a step has {', '.join(NEEDED)}, and a kind: grpo, dpo or sft; of KTO "
            "it would lack the pairs of its KL, of distillation the teacher, of trajectories turns"
        )
    n, width = tensors["input_ids"].shape
    for name in tensors.keys() & BY_ROW:
        shape = tuple(tensors[name].shape)
        by_token = len(shape) == 2 and shape[1] <= width
        if shape[0] != n or (name in BY_TOKEN and not by_token):
            raise ValueError(f"{name} is {shape}, but input_ids are {(n, width)}: one row for each")


def read(folder: str | Path) -> Dump:
    """Read a step (ValueError: what is wrong with its folder)."""
    folder = Path(folder)
    if not (folder / "step.json").is_file():
        raise ValueError(
            f"{folder} is no step: it has no step.json; dump one, docs/audit.md says how"
        )
    try:
        about = read_json(folder / "step.json")
        tensors = load_file(folder / "step.safetensors")
        for name, model_folder in about.items():
            if name.endswith("model") and model_folder:
                about[name] = str(folder / model_folder)
        return Dump(about, tensors)
    except (OSError, SafetensorError, ValueError, *DAMAGES) as error:
        raise ValueError(f"{folder} is no step: {error}") from error


def join(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join tensors of micro-batches: rows are padded on the left."""
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
    """Write a step that `read` reads (ValueError: it would not)."""
    copies = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}
    Dump(about, copies)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(copies, folder / "step.safetensors")
    write_json(folder / "step.json", about)
