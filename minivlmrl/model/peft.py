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

from minivlmrl.config.parsing import build, check_field, error_context, read_json
from minivlmrl.files import save_tensors, write_json
from minivlmrl.model.decoder import Qwen2_5_VL
from minivlmrl.model.families.registry import hub_name, memory_name
from minivlmrl.model.lora import LoRALinear, adapters, add_lora, set_parameters
from minivlmrl.model.plain_weights import PackedLinear, gather_full_tensor

Form = tuple[int, float]  # r and scaling of LoRALinear
LAYER = re.compile(r"[\w.]+")
CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
TENSOR = re.compile(re.escape(PREFIX) + r"(.+)\.(lora_[AB])(?:\.default)?\.weight")
# fields of PEFT's config that would change the result, unless they say nothing
REFUSED = (
    "use_dora",
    "use_qalora",
    "bias",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
)


@dataclass
class PeftConfig:
    """What is read of adapter_config.json; ranks and layers are those of the tensors."""

    peft_type: Literal["LORA"]
    lora_alpha: Annotated[float, "(0, inf)"]
    use_rslora: bool = False
    # of some layers: name or end of a name -> alpha; PEFT's regular expressions are refused
    alpha_pattern: dict[str, Annotated[float, "(0, inf)"]] | None = None


def load_adapter(model: Qwen2_5_VL, folder: str | Path):
    """Put a PEFT folder's adapters on a model, freeze the rest (ValueError: what is wrong)."""
    forms, weights = _read(model.requires_grad_(False), folder)
    for name, form in forms.items():
        add_lora(model, name, *form)
    set_parameters(model, weights)


def begin_with(model: Qwen2_5_VL, folder: str | Path):
    """Give a model's adapters the values of a PEFT folder's (ValueError: theirs are others)."""
    read_forms, weights = _read(model, folder)
    placed_forms = {name: (layer.r, layer.scaling) for name, layer in adapters(model).items()}
    for name in sorted(read_forms.keys() | placed_forms.keys()):
        their_form = _form_text(read_forms.get(name))
        our_form = _form_text(placed_forms.get(name))
        if their_form != our_form:
            raise ValueError(
                f"adapter.path: {folder} has {their_form} on {name}, the recipe says {our_form}: "
                "change adapter.r, alpha or target"
            )
    set_parameters(model, weights)


def _form_text(form: Form | None) -> str:
    if form is None:
        return "no adapter"
    r, scaling = form
    return f"r {r}, scaling {scaling:g}"


def find_adapter(folder: str | Path) -> Path:
    """Find the adapter in a folder that PEFT or a run wrote, or in a run's checkpoint."""
    for inner in ("", "adapter", "checkpoint/adapter"):
        found_folder = Path(folder) / inner
        if (found_folder / CONFIG).is_file():
            return found_folder
    raise ValueError(
        f"{folder}: neither it nor its checkpoint/adapter has {CONFIG}; "
        "give a folder that PEFT wrote, or a run with adapter.r"
    )


def _read(model: Qwen2_5_VL, folder: str | Path) -> tuple[dict[str, Form], dict[str, Tensor]]:
    """Read the form of the adapter of each layer of a model, and all weights."""
    folder = find_adapter(folder)
    config = _read_config(folder / CONFIG)
    file = folder / WEIGHTS
    layer_pairs = {}  # layer -> {"lora_A": tensor, "lora_B": tensor}
    weights = {}
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file}: not a whole safetensors file ({error}); PEFT's .bin files are not read"
        ) from error
    with error_context(file):
        for name, tensor in tensors.items():
            is_float = tensor.is_floating_point() and tensor.element_size() > 1
            check_field(
                is_float and bool(tensor.isfinite().all()), name, tensor.dtype, "finite floats"
            )
            match = TENSOR.fullmatch(name)
            if match is None:
                raise ValueError(
                    f"unexpected tensor {name:.80}; an adapter has lora_A and lora_B alone"
                )
            layer_name, kind = match.groups()
            layer_name = hub_name(layer_name)  # the file has any of transformers' names
            layer_pairs.setdefault(layer_name, {})[kind] = tensor
            weights[f"{layer_name}.{kind}"] = tensor
        if not layer_pairs:
            raise ValueError("there is no adapter in it")
        forms = {name: _form(model, name, pair, config) for name, pair in layer_pairs.items()}
    return forms, weights


def _read_config(file: Path) -> PeftConfig:
    values = read_json(file)
    config = build(PeftConfig, values, str(file), json=True)
    with error_context(file):
        for name in REFUSED:
            if values.get(name) not in (None, False, [], "none"):
                raise ValueError(f"{name} is {values[name]!r:.60}: merge it with PEFT")
        for name in config.alpha_pattern or {}:
            check_field(
                LAYER.fullmatch(name) is not None,
                "alpha_pattern",
                name,
                "a layer's name or its end",
            )
    return config


def _form(model: Qwen2_5_VL, name: str, pair: dict[str, Tensor], config: PeftConfig) -> Form:
    """Check the tensors of a layer's adapter; its rank and scaling."""
    layer = dict(model.named_modules()).get(name)
    if not isinstance(layer, nn.Linear | LoRALinear | PackedLinear) or name == "lm_head":
        raise ValueError(f"{name:.80} is no linear layer of this model that can have an adapter")
    shapes = {kind: tuple(tensor.shape) for kind, tensor in pair.items()}
    r, *_ = shapes.get("lora_A") or [0]
    expected_shapes = {"lora_A": (r, layer.in_features), "lora_B": (layer.out_features, r)}
    if shapes != expected_shapes or not r:
        found_shapes = ", ".join(f"{kind} {shape}" for kind, shape in shapes.items())
        raise ValueError(
            f"{name} has {found_shapes}; there must be lora_A (r, {layer.in_features}) and "
            f"lora_B ({layer.out_features}, r): take the one of this base"
        )
    alpha = config.lora_alpha
    for name_end, value in (config.alpha_pattern or {}).items():
        if f".{memory_name(name)}".endswith(f".{name_end}"):
            alpha = value
            break  # PEFT takes the first that fits
    divisor = math.sqrt(r) if config.use_rslora else r  # rsLoRA, arXiv 2312.03732
    return r, alpha / divisor


def gather_adapter(model: Qwen2_5_VL, base: str | None = None) -> Callable[[Path], None]:
    """Return what writes a model's adapters as they are now into a folder; all ranks call this."""
    layers = {memory_name(name): layer for name, layer in adapters(model).items()}
    tensors = {}
    for name, layer in layers.items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = (
            gather_full_tensor(layer.lora_A).cpu().contiguous()
        )
        tensors[f"{PREFIX}{name}.lora_B.weight"] = (
            gather_full_tensor(layer.lora_B).cpu().contiguous()
        )
    ranks = {name: layer.r for name, layer in layers.items()}
    # PEFT divides by r again, also where the scaling was alpha / sqrt(r)
    alphas = {name: layer.scaling * layer.r for name, layer in layers.items()}
    r = max(ranks.values())
    alpha = max(alphas.values())
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "base_model_name_or_path": base,
        "target_modules": sorted(layers),
        "r": r,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "rank_pattern": {name: rank for name, rank in ranks.items() if rank != r},
        "alpha_pattern": {name: value for name, value in alphas.items() if value != alpha},
    }

    def write(folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / CONFIG, config)
        save_tensors(tensors, folder / WEIGHTS)

    return write
