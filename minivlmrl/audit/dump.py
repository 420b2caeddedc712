"""A dumped step: what a trainer has written down of one optimizer step, step.json and step.safetensors in a folder.

Any trainer can write one, see docs/audit.md for the names. n rows (completions) of S tokens in M micro-batches; the
rollout that they come from has N completions with K rewards. Everything but ids and log-probabilities is optional.
"""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

KINDS = ("grpo", "dpo", "sft")
NEEDED = ("input_ids", "completion_mask", "per_token_logps")
BY_TOKEN = (*NEEDED, "attention_mask", "prompt_mask", "tool_mask", "old_per_token_logps", "ref_per_token_logps")
BY_TOKEN += ("sampler_logps", "entropies", "log_sum_sq_probs", "logps_gradient", "entropies_gradient")
BY_ROW = (*BY_TOKEN, "advantages", "micro_batch", "row", "pair", "chosen", "importance_sampling_ratio")


class Dump:
    """step.json as `about`; the tensors, floats in float64, by name; `eps` has the rounding of what they were."""

    def __init__(self, about: dict, tensors: dict[str, Tensor]):
        check(about, tensors)
        self.about, self.width = about, tensors["input_ids"].shape[1]
        self.forward = {}  # what is known to be different in the model's forward; None: something unknown is
        self.eps = {name: torch.finfo(x.dtype).eps for name, x in tensors.items() if x.is_floating_point()}
        self.tensors = {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}
        for name in BY_TOKEN:
            if name in tensors:
                self.tensors[name] = self.align(self.tensors[name])
        rows = torch.zeros(len(tensors["input_ids"]), dtype=torch.long)
        self.tensors.setdefault("micro_batch", rows)
        self.tensors.setdefault("attention_mask", torch.ones_like(self["input_ids"]))
        self.micro_batches = [(self["micro_batch"] == m).nonzero()[:, 0] for m in self["micro_batch"].unique()]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def get(self, name: str) -> Tensor | None:
        return self.tensors.get(name)

    def align(self, x: Tensor) -> Tensor:
        """(n, T) of the last T tokens -> (n, S), with zeros for those before."""
        return torch.nn.functional.pad(x, (self.width - x.shape[1], 0))

    def parameters(self, kind: str) -> dict[str, Tensor]:
        """Tensors of parameters: "grad" gives those with names grad.NAME, by NAME."""
        return {name.partition(".")[2]: x for name, x in self.tensors.items() if name.partition(".")[0] == kind}

    @property
    def completion(self) -> Tensor:
        """(n, S) bool: all columns after the prompt, padding too."""
        prompt = self.get("prompt_mask")
        prompt = self["attention_mask"] * (1 - self["completion_mask"].long()) if prompt is None else prompt
        ends = (prompt * torch.arange(1, self.width + 1)).amax(1) if prompt.any() else torch.zeros(len(prompt))
        return torch.arange(self.width) >= ends[:, None]


def check(about: dict, tensors: dict[str, Tensor]):
    """Refuse (ValueError) what is no step: it names the tensor and what to do."""
    if about.get("kind") not in KINDS:
        raise ValueError(f"step.json: kind is {about.get('kind')!r}, it must be one of {', '.join(KINDS)}")
    for name in NEEDED:
        if name not in tensors:
            raise ValueError(f"step.safetensors: {name} is missing; every step needs {', '.join(NEEDED)}")
    n, width = tensors["input_ids"].shape
    for name in BY_ROW:
        x = tensors.get(name)
        if x is not None and (len(x) != n or (name in BY_TOKEN and (x.dim() != 2 or x.shape[1] > width))):
            raise ValueError(f"step.safetensors: {name} is {tuple(x.shape)}, input_ids are {(n, width)}; one row each")


def read(folder: str | Path) -> Dump:
    """Read a folder with step.json and step.safetensors (ValueError: what is wrong with it)."""
    folder, tensors = Path(folder), {}
    try:
        about = json.loads((folder / "step.json").read_text(encoding="utf-8"))
        with safe_open(folder / "step.safetensors", framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, a handle is no dict
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder}: no readable step.json and step.safetensors ({error})") from error
    for name in ("model", "old_model", "ref_model"):
        if about.get(name):
            about[name] = str(folder / about[name])
    return Dump(about, tensors)


def write(folder: str | Path, about: dict, tensors: dict[str, Tensor]):
    """Write a step that `read` reads."""
    check(about, tensors)
    Path(folder).mkdir(parents=True, exist_ok=True)
    plain = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}
    save_file(plain, Path(folder) / "step.safetensors")
    (Path(folder) / "step.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
