"""Load and save LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from os.path import isabs, isdir
from pathlib import Path
from typing import Annotated, Literal

from torch import Tensor, nn

from minivlmrl.config.options import LoRAOptions
from minivlmrl.config.parsing import build
from minivlmrl.config.types import FilePath, VisualPart
from minivlmrl.errors import UserError, error_context, require, truncate
from minivlmrl.files import save_tensors, unchanged
from minivlmrl.json_files import read_json, write_json
from minivlmrl.model.checkpoint import check_loaded, read_tensors
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.families.registry import hub_name, module_name
from minivlmrl.model.lora import LoRALinear, adapters, add_lora, set_parameters
from minivlmrl.model.plain_weights import PackedLinear, gather_full_tensor, is_adapter, part_of

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
# paths of the adapter inside a PEFT folder, a checkpoint, and a run folder
INNER_FOLDERS = "", "adapter", "checkpoint/adapter"
TENSOR = re.compile(re.escape(PREFIX) + r"(.+)\.(lora_[AB])(?:\.default)?\.weight")
MERGE = "Merge the adapter into its base model with PEFT, and load the merged model."
# settings in adapter_config.json that change results, but are not supported
UNSUPPORTED = (
    "use_dora", "use_qalora", "bias", "lora_bias", "fan_in_fan_out", "layer_replication", "rank_pattern",
    "trainable_token_indices", "target_parameters", "alora_invocation_tokens", "use_rslora", "alpha_pattern",
)  # fmt: skip


@dataclass
class PeftConfig:
    """Fields read from adapter_config.json; layer names and rank are read from the tensors."""

    peft_type: Literal["LORA"]
    lora_alpha: Annotated[float, "(0, inf)"]


def load_adapter(model: VisionLanguageModel, folder: str | Path):
    """Add adapters and modules_to_save from a PEFT folder, and freeze all other parameters."""
    shapes, weights = _read(model.requires_grad_(False), folder)
    model.modules_to_save = _parts(weights)
    for name, shape in shapes.items():
        add_lora(model, name, *shape)
    set_parameters(model, weights)


def load_adapter_weights(model: VisionLanguageModel, folder: str | Path):
    """Load weights from a PEFT folder into existing adapters, and into modules_to_save."""
    folder_shapes, weights = _read(model, folder)
    parts = _parts(weights)
    if parts != sorted(model.modules_to_save):
        raise UserError(
            f"adapter.path: {folder} has all weights of the parts [{', '.join(parts)}], but adapter.modules_to_save is "
            f"[{', '.join(model.modules_to_save)}]. Set adapter.modules_to_save to [{', '.join(parts)}]."
        )
    model_shapes = {name: (layer.r, layer.scaling) for name, layer in adapters(model).items()}
    found, expected = (
        {name: f"r {r} and scaling {scaling:g}" for name, (r, scaling) in shapes.items()}
        for shapes in (folder_shapes, model_shapes)
    )
    for name in sorted(dict(found.items() ^ expected.items())):
        raise UserError(
            f"adapter.path: for the layer {name}, {folder} has {found.get(name, 'no adapter')}, but the recipe has "
            f"{expected.get(name, 'no adapter')}. Change adapter.r, adapter.alpha or adapter.target to match it."
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
    """Return True for a folder with an adapter but no full model."""
    return not (Path(folder) / "config.json").is_file() and any(
        (Path(folder) / inner / CONFIG).is_file() for inner in INNER_FOLDERS
    )


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
        whole = []  # names of parameters saved in full (modules_to_save)
        for name, tensor in read_tensors(folder / WEIGHTS):
            match = TENSOR.fullmatch(name)
            if match and match[2] == "lora_A":
                require(tensor.dim() == 2, name, tuple(tensor.shape), "the shape of a matrix")
                shapes[hub_name(match[1])] = len(tensor)
            elif not match:
                whole.append(_whole_name(name))
        ranks = set(shapes.values())
        require(len(ranks) == 1, "the ranks of the layers", sorted(ranks), f"one rank. {MERGE}")
    [r] = ranks
    target = ["|".join(map(re.escape, sorted(shapes)))]
    return LoRAOptions(
        FilePath(str(folder)), r, config.lora_alpha, target=target, modules_to_save=_parts(whole), quantize=quantize
    )


def _whole_name(name: str) -> str:
    """Convert the name of a tensor in modules_to_save to a parameter name."""
    parameter = hub_name(name.removeprefix(PREFIX))
    if not parameter.startswith("visual."):
        raise UserError(
            f"the tensor {name:.80} is not a lora_A or lora_B of a linear layer, or of the vision tower or merger. "
            f"{MERGE}"
        )
    return parameter


def _parts(names: Iterable[str]) -> list[VisualPart]:
    """Return the model parts of parameters in modules_to_save, such as "merger"."""
    return sorted({"merger" if part_of(name) == "merger" else "vision" for name in names if not is_adapter(name)})


def _read(model: VisionLanguageModel, folder: str | Path) -> tuple[dict[str, tuple[int, float]], dict[str, Tensor]]:
    """Read a PEFT folder; return {layer: (r, scaling)} and {parameter name: weight}."""
    folder = find_adapter(folder)
    with unchanged(folder):
        config = _read_config(folder / CONFIG)
        file = folder / WEIGHTS
        layer_pairs = {}  # layer -> {"lora_A": tensor, "lora_B": tensor}
        weights = {}
        with error_context(file):
            for name, tensor in read_tensors(file):
                check_loaded(tensor, name, file)
                match = TENSOR.fullmatch(name)
                if not match:
                    name = _whole_name(name)
                    _check_whole(model, name, tensor)
                    weights[name] = tensor
                    continue
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
            if values.get(name) not in (None, False, [], {}, "none"):
                raise UserError(f"{name} is {truncate(values[name], 60)}, which is not supported. {MERGE}")
    return config


def _check_shape(
    model: VisionLanguageModel, name: str, pair: dict[str, Tensor], config: PeftConfig
) -> tuple[int, float]:
    """Check shapes of lora_A and lora_B, and return (r, scaling)."""
    layer = dict(model.named_modules()).get(name)
    if not isinstance(layer, nn.Linear | LoRALinear | PackedLinear) or name == "lm_head":
        raise UserError(
            f"the adapter's layer {name:.80} is not a linear layer of this model, or is the head. If this is not the "
            f"adapter's base model, load that. Otherwise: {MERGE}"
        )
    shapes = {kind: tuple(tensor.shape) for kind, tensor in pair.items()}
    r, *_ = shapes.get("lora_A") or [0]
    if not r or shapes != {"lora_A": (r, layer.in_features), "lora_B": (layer.out_features, r)}:
        raise UserError(
            f"the adapter of the layer {name} has the shapes {shapes}, but this model needs lora_A "
            f"(r, {layer.in_features}) and lora_B ({layer.out_features}, r). Load the adapter's own base model."
        )
    return r, config.lora_alpha / r


def _check_whole(model: VisionLanguageModel, name: str, tensor: Tensor):
    """Check the shape of a tensor in modules_to_save."""
    parameter = dict(model.named_parameters()).get(name)
    shape = None if parameter is None else tuple(parameter.shape)
    if shape != tuple(tensor.shape):
        raise UserError(
            f"the tensor {name} has the shape {tuple(tensor.shape)}, but this model's shape is {shape}. Load the "
            "adapter's own base model."
        )


def gather_adapter(model: VisionLanguageModel, base: str | None = None) -> Callable[[Path], None]:
    """Gather adapters and modules_to_save; all ranks must call this.

    Returns a function that writes them to a PEFT folder, for one rank to call.

    Args:
        base: base model for adapter_config.json, a folder or repository.
    """
    layers = {module_name(name): layer for name, layer in adapters(model).items()}
    whole = [name for name, _ in model.named_parameters() if part_of(name) in model.modules_to_save]
    tensors = {
        f"{PREFIX}{module_name(name)}{'.weight' if is_adapter(name) else ''}": (
            gather_full_tensor(parameter).cpu().contiguous()
        )
        for name, parameter in model.named_parameters()
        if is_adapter(name) or name in whole
    }
    layer = next(iter(layers.values()))  # all layers have the same rank, alpha and dropout
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "base_model_name_or_path": base,
        "target_modules": sorted(layers),
        "modules_to_save": sorted({module_name(name).rpartition(".")[0] for name in whole}) or None,
        "r": layer.r,
        "lora_alpha": layer.scaling * layer.r,
        "lora_dropout": layer.dropout,
        "bias": "none",
    }

    def write(folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / CONFIG, config)
        save_tensors(tensors, folder / WEIGHTS)

    return write
