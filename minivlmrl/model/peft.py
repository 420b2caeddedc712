"""Load and save LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from os.path import isabs, isdir
from pathlib import Path
from typing import Annotated, Literal

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from minivlmrl.config.options import LoRAOptions
from minivlmrl.config.parsing import build
from minivlmrl.config.types import FilePath
from minivlmrl.errors import UserError, error_context, require, truncate
from minivlmrl.files import save_tensors, unchanged
from minivlmrl.json_files import read_json, write_json
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.families.registry import hub_name, module_name
from minivlmrl.model.lora import LoRALinear, adapters, add_lora, set_parameters
from minivlmrl.model.plain_weights import PackedLinear, gather_full_tensor

AdapterShape = tuple[int, float]  # (r, scaling)
LAYER = re.compile(r"[\w.]+")
CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
# adapter path inside a PEFT folder, a checkpoint, and a run folder
INNER_FOLDERS = "", "adapter", "checkpoint/adapter"
TENSOR = re.compile(re.escape(PREFIX) + r"(.+)\.(lora_[AB])(?:\.default)?\.weight")
MERGE = "Merge the adapter into its base model with PEFT, and load the merged model."
# unsupported adapter_config.json settings, rejected because they change the results
UNSUPPORTED = (
    "use_dora", "use_qalora", "bias", "lora_bias", "fan_in_fan_out", "modules_to_save", "layer_replication",
    "trainable_token_indices", "target_parameters", "alora_invocation_tokens",
)  # fmt: skip


@dataclass
class PeftConfig:
    """Fields read from adapter_config.json; layer names and ranks are read from the tensors."""

    peft_type: Literal["LORA"]
    lora_alpha: Annotated[float, "(0, inf)"]
    use_rslora: bool = False
    # {layer name suffix: alpha}; PEFT's regular expressions are not supported
    alpha_pattern: dict[str, Annotated[float, "(0, inf)"]] | None = None


def load_adapter(model: VisionLanguageModel, folder: str | Path):
    """Add adapters from a PEFT folder, and freeze all other parameters."""
    shapes, weights = _read(model.requires_grad_(False), folder)
    for name, shape in shapes.items():
        add_lora(model, name, *shape)
    set_parameters(model, weights)


def load_adapter_weights(model: VisionLanguageModel, folder: str | Path):
    """Load weights from a PEFT folder into existing adapters."""
    folder_shapes, weights = _read(model, folder)
    model_shapes = {name: (layer.r, layer.scaling) for name, layer in adapters(model).items()}
    for name in sorted(folder_shapes.keys() | model_shapes.keys()):
        folder_text, model_text = (
            "r {} and scaling {:g}".format(*shapes[name]) if name in shapes else "no adapter"
            for shapes in (folder_shapes, model_shapes)
        )
        if folder_text != model_text:
            raise UserError(
                f"adapter.path: for the layer {name}, {folder} has {folder_text}, but the recipe has {model_text}. "
                "Change adapter.r, adapter.alpha or adapter.target to match the folder."
            )
    set_parameters(model, weights)


def find_adapter(folder: str | Path) -> Path:
    """Find the adapter in a PEFT folder, a run or a checkpoint."""
    for found in (Path(folder) / inner for inner in INNER_FOLDERS):
        if (found / CONFIG).is_file():
            return found
    raise UserError(
        f"{folder} does not contain an adapter, because {CONFIG} is neither in this folder nor in its subfolders "
        "adapter/ and checkpoint/adapter/. Use a folder that PEFT wrote, or the folder of a run that set adapter.r."
    )


def is_adapter_folder(folder: str | Path) -> bool:
    """Check whether a folder has an adapter but no full model."""
    if (Path(folder) / "config.json").is_file():
        return False
    return any((Path(folder) / inner / CONFIG).is_file() for inner in INNER_FOLDERS)


def base_model(folder: str | Path) -> str:
    """Return the base model named in adapter_config.json, a folder or repository."""
    file = find_adapter(folder) / CONFIG
    base = read_json(file).get("base_model_name_or_path")
    if not isinstance(base, str) or not base or (isabs(base) and not isdir(base)):
        raise UserError(
            f"{file} does not name an existing base model (base_model_name_or_path is {base!r}). Correct this path, or "
            "merge the adapter with `minivlmrl merge`, and use the merged folder."
        )
    return base


def adapter_options(folder: str | Path, quantize: Literal["nf4"] | None = None) -> LoRAOptions:
    """Read rank, alpha and layers of a saved adapter, as options for the recipe section `adapter`."""
    folder = find_adapter(folder)
    config = _read_config(folder / CONFIG)
    with error_context(folder / WEIGHTS):
        shapes = {}
        for name, tensor in _read_tensors(folder / WEIGHTS).items():
            match = TENSOR.fullmatch(name)
            if match is not None and match[2] == "lora_A":
                require(tensor.dim() == 2, name, tuple(tensor.shape), "the shape of a matrix")
                shapes[hub_name(match[1])] = len(tensor)
        ranks = set(shapes.values())
        if len(ranks) != 1 or config.alpha_pattern:
            raise UserError(
                f"the layers have the ranks {sorted(ranks)} and alpha_pattern "
                f"{config.alpha_pattern}, but only one rank and one alpha are supported here. "
                "Merge the adapter with `minivlmrl merge`, and use the merged folder."
            )
    [r] = ranks
    alpha = config.lora_alpha * (math.sqrt(r) if config.use_rslora else 1)
    target = "|".join(map(re.escape, sorted(shapes)))
    return LoRAOptions(FilePath(str(folder)), r, alpha, target=[target], quantize=quantize)


def _read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"the file is not a complete safetensors file ({error}). Save the adapter again in the safetensors format; "
            "PEFT's .bin files are not supported."
        ) from error


def _read(model: VisionLanguageModel, folder: str | Path) -> tuple[dict[str, AdapterShape], dict[str, Tensor]]:
    """Read a PEFT folder; return {layer: (r, scaling)} and {parameter name: weight}."""
    folder = find_adapter(folder)
    with unchanged(folder):
        config = _read_config(folder / CONFIG)
        file = folder / WEIGHTS
        layer_pairs = {}  # layer -> {"lora_A": tensor, "lora_B": tensor}
        weights = {}
        with error_context(file):
            for name, tensor in _read_tensors(file).items():
                is_float = tensor.is_floating_point() and tensor.element_size() > 1
                is_valid = is_float and bool(tensor.isfinite().all())
                expected = "a finite float tensor with at least 16 bits per value"
                require(is_valid, name, tensor.dtype, expected)
                match = TENSOR.fullmatch(name)
                if match is None:
                    raise UserError(f"the tensor {name:.80} is not a lora_A or lora_B of a linear layer. {MERGE}")
                layer_name, kind = match.groups()
                layer_name = hub_name(layer_name)  # layer names depend on the transformers release
                layer_pairs.setdefault(layer_name, {})[kind] = tensor
                weights[f"{layer_name}.{kind}"] = tensor
            if not layer_pairs:
                raise UserError("the file does not contain any tensors. Save the adapter again.")
            shapes = {name: _check_shape(model, name, pair, config) for name, pair in layer_pairs.items()}
    return shapes, weights


def _read_config(file: Path) -> PeftConfig:
    values = read_json(file)
    config = build(PeftConfig, values, str(file), json=True)
    with error_context(file):
        for name in UNSUPPORTED:
            if values.get(name) not in (None, False, [], "none"):
                raise UserError(f"{name} is {truncate(values[name], 60)}, which is not supported. {MERGE}")
        for name in config.alpha_pattern or {}:
            is_name = LAYER.fullmatch(name) is not None
            require(is_name, "alpha_pattern", name, "a layer name or the end of a layer name")
    return config


def _check_shape(model: VisionLanguageModel, name: str, pair: dict[str, Tensor], config: PeftConfig) -> AdapterShape:
    """Check shapes of lora_A and lora_B, and return (r, scaling)."""
    layer = dict(model.named_modules()).get(name)
    if layer is None:
        raise UserError(
            f"the adapter changes the layer {name:.80}, which this model does not have. Use an adapter that was "
            "trained on this base model."
        )
    if not isinstance(layer, nn.Linear | LoRALinear | PackedLinear) or name == "lm_head":
        raise UserError(f"the layer {name:.80} is not a linear layer, or is the head. {MERGE}")
    shapes = {kind: tuple(tensor.shape) for kind, tensor in pair.items()}
    r, *_ = shapes.get("lora_A") or [0]
    expected_shapes = {"lora_A": (r, layer.in_features), "lora_B": (layer.out_features, r)}
    if shapes != expected_shapes or not r:
        found_shapes = ", ".join(f"{kind} {shape}" for kind, shape in shapes.items())
        raise UserError(
            f"the adapter of the layer {name} has {found_shapes}, but this model needs lora_A (r, {layer.in_features}) "
            f"and lora_B ({layer.out_features}, r). Use an adapter that was trained on this base model."
        )
    alpha = config.lora_alpha
    for name_end, value in (config.alpha_pattern or {}).items():
        if f".{module_name(name)}".endswith(f".{name_end}"):
            alpha = value
            break  # the first matching layer name determines alpha, as in PEFT
    divisor = math.sqrt(r) if config.use_rslora else r  # scaling in rsLoRA: alpha / sqrt(r) (arXiv 2312.03732)
    return r, alpha / divisor


def gather_adapter(model: VisionLanguageModel, base: str | None = None) -> Callable[[Path], None]:
    """Gather adapters on all ranks, and return a function for one rank that writes a PEFT folder.

    Args:
        base: base model for adapter_config.json, a folder or repository.
    """
    layers = {module_name(name): layer for name, layer in adapters(model).items()}
    tensors = {}
    for name, layer in layers.items():
        for kind, matrix in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B)):
            full = gather_full_tensor(matrix).cpu().contiguous()
            tensors[f"{PREFIX}{name}.{kind}.weight"] = full
    ranks = {name: layer.r for name, layer in layers.items()}
    # PEFT computes scaling = alpha / r, so rsLoRA adapters are saved as plain LoRA with another alpha
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
        "lora_dropout": max(layer.dropout for layer in layers.values()),
        "bias": "none",
        "rank_pattern": {name: rank for name, rank in ranks.items() if rank != r},
        "alpha_pattern": {name: value for name, value in alphas.items() if value != alpha},
    }

    def write(folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / CONFIG, config)
        save_tensors(tensors, folder / WEIGHTS)

    return write
