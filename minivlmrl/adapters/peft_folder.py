"""Folders of PEFT: adapter_config.json and adapter_model.safetensors, read and written."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from minivlmrl.adapters.lora import LoRALinear, adapters, full, set_parameters, wrap
from minivlmrl.hub.family import hub_name, memory_name
from minivlmrl.hub.folder import read_json, save_tensors, write_json
from minivlmrl.hub.recipe_values import build, naming, require

Form = tuple[int, float]  # r and scaling of LoRALinear
LAYER = re.compile(r"[\w.]+")
CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
TENSOR = re.compile(re.escape(PREFIX) + r"(.+)\.(lora_[AB])(?:\.default)?\.weight")
# fields of PEFT's config that would change the result, unless they say nothing
REFUSED = "use_dora use_qalora bias lora_bias fan_in_fan_out modules_to_save layer_replication"
REFUSED += " trainable_token_indices target_parameters alora_invocation_tokens"


@dataclass
class PeftConfig:
    """What is read of adapter_config.json; ranks and layers are those of the tensors."""

    peft_type: Literal["LORA"]
    lora_alpha: Annotated[float, "(0, inf)"]
    use_rslora: bool = False
    # of some layers: name or end of a name -> alpha; PEFT's regular expressions are refused
    alpha_pattern: dict[str, Annotated[float, "(0, inf)"]] | None = None


def load_adapter(model: nn.Module, folder: str | Path):
    """Put a PEFT folder's adapters on a model, freeze the rest (ValueError: what is wrong)."""
    forms, weights = _read(model.requires_grad_(False), Path(folder))
    for name, form in forms.items():
        wrap(model, name, *form)
    set_parameters(model, weights)


def begin_with(model: nn.Module, folder: str | Path):
    """Give a model's adapters the values of a PEFT folder's (ValueError: theirs are others)."""
    read, weights = _read(model, Path(folder))
    placed = {name: (layer.r, layer.scaling) for name, layer in adapters(model).items()}
    for name in sorted(read.keys() | placed.keys()):
        forms = read.get(name), placed.get(name)
        theirs, ours = ("r {}, scaling {:g}".format(*x) if x else "no adapter" for x in forms)
        if theirs != ours:
            cure = f"the recipe says {ours}: change adapter.r, alpha or target"
            raise ValueError(f"adapter.path: {folder} has {theirs} on {name}, {cure}")
    set_parameters(model, weights)


def _read(model: nn.Module, folder: Path) -> tuple[dict[str, Form], dict[str, Tensor]]:
    """Read the form of the adapter of each layer of a model, and all weights."""
    values = read_json(folder / CONFIG)
    config = build(PeftConfig, values, str(folder / CONFIG), json=True)
    with naming(folder / CONFIG):
        for name in REFUSED.split():
            if values.get(name) not in (None, False, [], "none"):
                raise ValueError(f"{name} is {values[name]!r:.60}: merge it with PEFT")
        for name in config.alpha_pattern or {}:
            require(LAYER.fullmatch(name), "alpha_pattern", name, "a layer's name or its end")
    file = folder / WEIGHTS
    pairs = {}
    weights = {}
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        cure = "PEFT's .bin files are not read"
        raise ValueError(f"{file}: not a whole safetensors file ({error}); {cure}") from error
    with naming(file):
        for name, tensor in tensors.items():
            kind = tensor.is_floating_point() and tensor.element_size() > 1 and tensor.dtype
            require(kind and tensor.isfinite().all(), name, kind or tensor.dtype, "finite floats")
            if not (match := TENSOR.fullmatch(name)):
                cure = "an adapter has lora_A and lora_B alone"
                raise ValueError(f"unexpected tensor {name:.80}; {cure}")
            layer = hub_name(match[1])  # the file has any of transformers' names
            pairs.setdefault(layer, {})[match[2]] = weights[f"{layer}.{match[2]}"] = tensor
        if not pairs:
            raise ValueError("there is no adapter in it")
        forms = {name: _form(model, name, pair, config) for name, pair in pairs.items()}
    return forms, weights


def _form(model: nn.Module, name: str, pair: dict[str, Tensor], config: PeftConfig) -> Form:
    """Check the tensors of a layer's adapter; its rank and scaling."""
    base = dict(model.named_modules()).get(name)
    if not isinstance(base, nn.Linear | LoRALinear) or name == "lm_head":
        raise ValueError(f"{name:.80} is no linear layer of this model that can have an adapter")
    shapes = {which: tuple(tensor.shape) for which, tensor in pair.items()}
    r = (*shapes.get("lora_A", ()), 0)[0]
    rows = base.out_features
    columns = base.in_features
    if shapes != {"lora_A": (r, columns), "lora_B": (rows, r)} or not r:
        there = ", ".join(f"{which} {shape}" for which, shape in shapes.items())
        asked = f"lora_A (r, {columns}) and lora_B ({rows}, r)"
        raise ValueError(f"{name} has {there}; there must be {asked}: take the one of this base")
    patterns = (config.alpha_pattern or {}).items()
    whole = f".{memory_name(name)}"
    fits = [alpha for end, alpha in patterns if whole.endswith(f".{end}")]  # PEFT takes the first
    divisor = math.sqrt(r) if config.use_rslora else r  # rsLoRA, arXiv 2312.03732
    return r, [*fits, config.lora_alpha][0] / divisor


def gather_adapter(model: nn.Module, base: str | None = None) -> Callable[[Path], None]:
    """Return what writes a model's adapters as they are now into a folder; all ranks call this."""
    layers = {memory_name(name): layer for name, layer in adapters(model).items()}
    tensors = {}
    for name, layer in layers.items():
        for kind, weight in (("A", layer.lora_A), ("B", layer.lora_B)):
            tensors[f"{PREFIX}{name}.lora_{kind}.weight"] = full(weight).cpu().contiguous()
    ranks = {name: layer.r for name, layer in layers.items()}
    # also where alpha / sqrt(r) was it
    alphas = {name: layer.scaling * ranks[name] for name, layer in layers.items()}
    r = max(ranks.values())
    alpha = max(alphas.values())
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True}
    config |= {"base_model_name_or_path": base, "target_modules": sorted(ranks)}
    config |= {"r": r, "lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none"}
    config["rank_pattern"] = {name: rank for name, rank in ranks.items() if rank != r}
    config["alpha_pattern"] = {name: value for name, value in alphas.items() if value != alpha}

    def write(folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / CONFIG, config)
        save_tensors(tensors, folder / WEIGHTS)

    return write
