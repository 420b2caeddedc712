"""Load and save LoRA adapters in PEFT's format: adapter_config.json, adapter_model.safetensors."""

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

AdapterShape = tuple[int, float]  # r and scaling of a LoRALinear
LAYER = re.compile(r"[\w.]+")
CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
TENSOR = re.compile(re.escape(PREFIX) + r"(.+)\.(lora_[AB])(?:\.default)?\.weight")
# fields of PEFT's config that are not supported, because they change the result if they are set
UNSUPPORTED = (
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
    """Fields of adapter_config.json that are used. Ranks and layers are taken from the tensors."""

    peft_type: Literal["LORA"]
    lora_alpha: Annotated[float, "(0, inf)"]
    use_rslora: bool = False
    # layer name or end of a layer name -> alpha; PEFT's regular expressions are not supported
    alpha_pattern: dict[str, Annotated[float, "(0, inf)"]] | None = None


def load_adapter(model: Qwen2_5_VL, folder: str | Path):
    """Add the adapters of a PEFT folder to a model, and freeze all other parameters.

    Raises:
        ValueError: the folder is no adapter of this model, or uses an unsupported feature.
    """
    shapes, weights = _read(model.requires_grad_(False), folder)
    for name, shape in shapes.items():
        add_lora(model, name, *shape)
    set_parameters(model, weights)


def begin_with(model: Qwen2_5_VL, folder: str | Path):
    """Initialise the adapters of a model with the weights of a PEFT folder.

    Raises:
        ValueError: the folder has adapters on other layers, or with another r or scaling.
    """
    folder_shapes, weights = _read(model, folder)
    model_shapes = {name: (layer.r, layer.scaling) for name, layer in adapters(model).items()}
    for name in sorted(folder_shapes.keys() | model_shapes.keys()):
        folder_text = _shape_text(folder_shapes.get(name))
        model_text = _shape_text(model_shapes.get(name))
        if folder_text != model_text:
            raise ValueError(
                f"adapter.path: {folder} has {folder_text} on {name}, but the recipe sets "
                f"{model_text}. Change adapter.r, adapter.alpha or adapter.target."
            )
    set_parameters(model, weights)


def _shape_text(shape: AdapterShape | None) -> str:
    if shape is None:
        return "no adapter"
    r, scaling = shape
    return f"r {r}, scaling {scaling:g}"


def find_adapter(folder: str | Path) -> Path:
    """Find the adapter folder in a folder that PEFT wrote, or in a run's folder or checkpoint."""
    for inner in ("", "adapter", "checkpoint/adapter"):
        found_folder = Path(folder) / inner
        if (found_folder / CONFIG).is_file():
            return found_folder
    raise ValueError(
        f"{folder}: there is no {CONFIG} in it, in adapter/ or in checkpoint/adapter/. "
        "Give a folder that PEFT wrote, or the folder of a run with adapter.r."
    )


def _read(
    model: Qwen2_5_VL, folder: str | Path
) -> tuple[dict[str, AdapterShape], dict[str, Tensor]]:
    """Read the rank and scaling of each layer's adapter, and all weights by parameter name."""
    folder = find_adapter(folder)
    config = _read_config(folder / CONFIG)
    file = folder / WEIGHTS
    layer_pairs = {}  # layer -> {"lora_A": tensor, "lora_B": tensor}
    weights = {}
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file}: not a complete safetensors file ({error}). PEFT's .bin files are not "
            "supported."
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
                    f"unexpected tensor {name:.80}; only lora_A and lora_B are supported"
                )
            layer_name, kind = match.groups()
            layer_name = hub_name(layer_name)  # files have the names of different transformers
            layer_pairs.setdefault(layer_name, {})[kind] = tensor
            weights[f"{layer_name}.{kind}"] = tensor
        if not layer_pairs:
            raise ValueError("the file contains no adapter")
        shapes = {
            name: _check_shape(model, name, pair, config) for name, pair in layer_pairs.items()
        }
    return shapes, weights


def _read_config(file: Path) -> PeftConfig:
    values = read_json(file)
    config = build(PeftConfig, values, str(file), json=True)
    with error_context(file):
        for name in UNSUPPORTED:
            if values.get(name) not in (None, False, [], "none"):
                raise ValueError(
                    f"{name} is {values[name]!r:.60}, which is not supported. Merge the adapter "
                    "into its base model with PEFT."
                )
        for name in config.alpha_pattern or {}:
            check_field(
                LAYER.fullmatch(name) is not None,
                "alpha_pattern",
                name,
                "a layer name or the end of one",
            )
    return config


def _check_shape(
    model: Qwen2_5_VL, name: str, pair: dict[str, Tensor], config: PeftConfig
) -> AdapterShape:
    """Check the shapes of a layer's lora_A and lora_B, and return its rank and scaling."""
    layer = dict(model.named_modules()).get(name)
    if not isinstance(layer, nn.Linear | LoRALinear | PackedLinear) or name == "lm_head":
        raise ValueError(f"{name:.80} is not a linear layer of this model that can have an adapter")
    shapes = {kind: tuple(tensor.shape) for kind, tensor in pair.items()}
    r, *_ = shapes.get("lora_A") or [0]
    expected_shapes = {"lora_A": (r, layer.in_features), "lora_B": (layer.out_features, r)}
    if shapes != expected_shapes or not r:
        found_shapes = ", ".join(f"{kind} {shape}" for kind, shape in shapes.items())
        raise ValueError(
            f"{name} has {found_shapes}, but this model needs lora_A (r, {layer.in_features}) and "
            f"lora_B ({layer.out_features}, r). Use an adapter that was trained on this base model."
        )
    alpha = config.lora_alpha
    for name_end, value in (config.alpha_pattern or {}).items():
        if f".{memory_name(name)}".endswith(f".{name_end}"):
            alpha = value
            break  # PEFT uses the first match
    divisor = math.sqrt(r) if config.use_rslora else r  # rsLoRA, arXiv 2312.03732
    return r, alpha / divisor


def gather_adapter(model: Qwen2_5_VL, base: str | None = None) -> Callable[[Path], None]:
    """Gather the current adapters, and return a function that writes them to a PEFT folder.

    All ranks must call gather_adapter; one of them may then call the returned function.
    """
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
    # alpha is scaling * r even if the scaling was alpha / sqrt(r), because PEFT divides it by r
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
