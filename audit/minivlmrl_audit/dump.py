"""What a trainer has written down of one optimizer step: step.json and step.safetensors.

n rows (completions) of S tokens in M micro-batches, out of a rollout of N completions with K
rewards. docs/audit.md has the names. Everything but NEEDED is optional.
"""

import json
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import pad

from minivlmrl.hub.folder import read_json, save_tensors
from minivlmrl.hub.tokenizer import load_tokenizer
from minivlmrl_audit import moves

# what computing with a field or tensor of another type or shape than docs/audit.md says may raise
DAMAGES = TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RuntimeError
NEEDED = ("input_ids", "completion_mask", "per_token_logps")
LOGPS = "old_per_token_logps", "ref_per_token_logps", "sampler_logps"
OUTPUTS = "entropies", "log_sum_sq_probs", "logps_gradient", "entropies_gradient"
BY_TOKEN = (*NEEDED, "attention_mask", "prompt_mask", "tool_mask", *LOGPS, *OUTPUTS)
NUMBERED = "advantages", "micro_batch", "row", "pair", "chosen", "importance_sampling_ratio"
BY_ROW = (*BY_TOKEN, *NUMBERED)


class Dump:
    """A step in memory: `about` is step.json; tensors by name, floats in float64."""

    def __init__(self, about: dict, tensors: dict[str, Tensor]):
        missing = [name for name in NEEDED if name not in tensors]
        if missing or about.get("kind") not in ("grpo", "dpo", "sft"):
            what = f"{missing[0]} is missing" if missing else f"kind is {about.get('kind')!r}"
            kinds = "and a kind: grpo, dpo or sft"
            raise ValueError(f"{what}; a step has {', '.join(NEEDED)}, {kinds}")
        n, self.width = tensors["input_ids"].shape
        for name in tensors.keys() & BY_ROW:
            x = tensors[name]
            by_token = x.dim() == 2 and x.shape[1] <= self.width
            if len(x) != n or (name in BY_TOKEN and not by_token):
                ids = f"input_ids are {(n, self.width)}: one row for each"
                raise ValueError(f"{name} is {tuple(x.shape)}, but {ids}")
        # what is known to be different in the forward and in ids, None: something unknown; and
        # during a search what was computed already, and of which rows
        self.about = about
        self.forward = {}
        self.ids = {}
        self.known = None
        self.part = None
        floats = {name for name, x in tensors.items() if x.is_floating_point()}
        self.eps = {name: torch.finfo(tensors[name].dtype).eps for name in floats}
        self.tensors = {name: x.double() if name in floats else x for name, x in tensors.items()}
        for name in self.tensors.keys() & BY_TOKEN:
            self.tensors[name] = self.align(self.tensors[name])
        self.tensors.setdefault("micro_batch", torch.zeros(n, dtype=torch.long))
        self.tensors.setdefault("attention_mask", torch.ones_like(self["input_ids"]))
        parts = self["micro_batch"]
        self.micro_batches = [(parts == m).nonzero()[:, 0] for m in parts.unique()]
        other = self["attention_mask"] * (1 - self["completion_mask"].long())
        prompt = self.get("prompt_mask", other)
        ends = (prompt * torch.arange(1, self.width + 1)).amax(1, keepdim=True)
        # (n, S): the columns after the prompt, padding too
        self.completion = torch.arange(self.width) >= ends
        self.starts = ends[:, 0].tolist()

    # what mistakes are composed of in this step: see moves.py
    rows = cached_property(moves.row_orders)
    rollout_rows = cached_property(lambda self: moves.row_orders(self, of_rollout=True))
    columns = cached_property(moves.token_orders)
    regions = cached_property(lambda self: moves.token_regions(self, *self.turns()))
    edges = cached_property(lambda self: moves.token_regions(self, *self.turns(), "edges"))

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def get(self, name: str, other: Tensor | None = None) -> Tensor | None:
        return self.tensors.get(name, other)

    def align(self, x: Tensor) -> Tensor:
        """Pad (n, T) of the last T tokens to (n, S), zeros before."""
        return pad(x, (self.width - x.shape[1], 0))

    def turns(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tell ids (n, S), which of them were drawn, and which a tool's answer forced."""
        if (sampled := None if self.ids is None else self.sampled(self.ids)) is not None:
            ids, drawn = sampled[..., : self.width]
            return ids, drawn == 1, drawn == 0
        tool = self.get("tool_mask", torch.ones_like(self["input_ids"])).bool()
        return self["input_ids"], self.completion & tool, self.completion & ~tool

    def sampled(self, change: dict) -> Tensor | None:
        """Lay out what the sampler had after the prompt; with a deviation `ids`.

        (2, n, S + L): ids, and whether it drew them; -1 where it had none.
        """
        if (ids := self.get("sampler_ids")) is None:
            return None
        kind, text, *how = change.get("ids", ("", ""))
        row = self.get("row", torch.arange(len(ids)))
        ids, drawn = (self[name][row] for name in ("sampler_ids", "sampler_mask"))
        if kind == "rows":
            ids, drawn = (x[self.rows[text]] for x in (ids, drawn))
        real = ids >= 0
        regions = moves.token_regions(self, ids, drawn == 1, drawn == 0) if how else {}
        region = regions[text] if how else ~real
        laid = torch.full((2, len(ids), self.width + ids.shape[1]), -1)
        for i, begin in enumerate(self.starts):
            lists = (x[i][real[i]].tolist() for x in (ids, drawn, region))
            parts = moves.edited(*lists, *(how or ("x",)), again=self.again)
            for out, x in zip(laid, parts, strict=True):
                out[i, begin : begin + len(x)] = torch.tensor(x)[: len(out[i]) - begin]
        return laid

    def again(self, ids: list[int]) -> list[int]:
        """Decode ids to text and encode it again."""
        tokenizer = load_tokenizer(Path(self.about["model"]) / "tokenizer.json")
        tokenizer.backend.encode_special_tokens = False
        return tokenizer.encode(tokenizer.decode(ids))

    def parameters(self, kind: str) -> dict[str, Tensor]:
        """Select tensors kind.NAME, by NAME."""
        split = ((name.partition("."), x) for name, x in self.tensors.items())
        return {name: x for (of, _, name), x in split if of == kind}


def read(folder: str | Path) -> Dump:
    """Read a step (ValueError: what is wrong with its folder)."""
    folder = Path(folder)
    try:
        about = read_json(folder / "step.json")
        with safe_open(folder / "step.safetensors", framework="pt") as file:
            names = list(file.keys())  # a handle is no dict
            tensors = {name: file.get_tensor(name) for name in names}
        folders = {name: of for name, of in about.items() if name.endswith("model") and of}
        about |= {name: str(folder / of) for name, of in folders.items()}
        return Dump(about, tensors)
    except (OSError, SafetensorError, ValueError, *DAMAGES) as error:
        raise ValueError(f"{folder} is no step: {error}") from error


def join(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join tensors of micro-batches: rows are padded on the left."""
    tensors = {}
    for name, first in parts[0].items():
        x = [part[name] for part in parts]
        width = max(part[name].shape[-1] for part in parts)
        by_token = name in BY_ROW and first.dim() == 2
        tensors[name] = torch.cat([pad(y, (width - y.shape[1], 0)) for y in x] if by_token else x)
    return tensors


def write(folder: str | Path, about: dict, tensors: dict[str, Tensor]):
    """Write a step that `read` reads (ValueError: it would not)."""
    Dump(about, tensors)
    Path(folder).mkdir(parents=True, exist_ok=True)
    copies = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}
    save_tensors(copies, Path(folder) / "step.safetensors")
    (Path(folder) / "step.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
