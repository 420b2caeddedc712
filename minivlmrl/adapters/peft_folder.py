"""Folders of PEFT: adapter_config.json and adapter_model.safetensors, read and written."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from minivlmrl.adapters.lora import adapters, freeze_base, full, set_parameters, wrap
from minivlmrl.hub.checker import build, naming
from minivlmrl.hub.folder import read_json, write_json

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
REFUSED = {  # fields of PEFT's config that would change the result: the values with which they do not
    "use_qalora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None,),
}


@dataclass
class PeftConfig:
    """What is read of adapter_config.json; ranks and layers are those of the tensors."""

    peft_type: str
    lora_alpha: Annotated[float, "(0, inf)"]
    use_rslora: bool = False
    use_dora: bool = False
    alpha_pattern: dict[str, float] | None = None  # of some layers: name, end of a name or regex -> alpha


def load_adapter(model: nn.Module, folder: str | Path):
    """Put the adapters of a PEFT folder on a plain model and freeze the rest (ValueError: names what is wrong)."""
    folder, pairs = Path(folder), {}
    values = read_json(folder / CONFIG)
    config = build(PeftConfig, values, str(folder / CONFIG), json=True)
    with naming(folder / CONFIG):
        if config.peft_type != "LORA":
            raise ValueError(f"peft_type is {config.peft_type!r:.40}, it must be 'LORA'")
        for name, fine in REFUSED.items():
            if name in values and values[name] not in fine:
                raise ValueError(f"{name} is {values[name]!r:.60}, which is not supported; merge it with PEFT")
    file = folder / WEIGHTS
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: not a whole safetensors file ({error}); PEFT's .bin files are not read") from error
    with naming(file):
        for name, tensor in tensors.items():
            layer, which = _our_name(name)
            pairs.setdefault(layer, {})[which] = tensor
        if not pairs:
            raise ValueError("there is no adapter in it")
        for layer, pair in pairs.items():
            _wrap_for(model, layer, pair, config)
        weights = {f"{name}.lora_{which}": tensor for name, pair in pairs.items() for which, tensor in pair.items()}
        set_parameters(model, weights)
    freeze_base(model)


def _wrap_for(model: nn.Module, name: str, pair: dict[str, Tensor], config: PeftConfig):
    """Exchange a layer for one with an adapter as large as in the file."""
    found = dict(model.named_modules()).get(name)
    if not isinstance(found, nn.Linear) or name == "lm_head":
        raise ValueError(f"{name:.80} is no linear layer of this model that can have an adapter")
    expected = {"A", "B", "magnitude"} if config.use_dora else {"A", "B"}
    if pair.keys() != expected:
        there, asked = (", ".join(f"lora_{which}" for which in sorted(names)) for names in (pair, expected))
        raise ValueError(f"{name} has {there} alone, there must be {asked}")
    r = len(pair["A"])
    shapes = tuple(pair["A"].shape), tuple(pair["B"].shape)
    if shapes != ((r, found.in_features), (found.out_features, r)):
        maps = f"{found.in_features} numbers to {found.out_features}"
        raise ValueError(f"{name} maps {maps}, but lora_A and lora_B are {shapes}; take the adapter of this base")
    patterns = (config.alpha_pattern or {}).items()  # PEFT takes the first that fits
    fits = [alpha for pattern, alpha in patterns if re.match(rf"(.*\.)?({pattern})$", _their_name(name))]
    wrap(model, name, r, [*fits, config.lora_alpha][0] / (math.sqrt(r) if config.use_rslora else r), config.use_dora)


def _our_name(name: str) -> tuple[str, str]:
    """The layer of a tensor in the file, and which of it; transformers has called the parts of models in two ways."""
    name = name.replace(".lora_magnitude_vector", ".lora_magnitude")
    match = re.fullmatch(rf"{re.escape(PREFIX)}(.+)\.lora_(A|B|magnitude)(?:\.default)?(?:\.weight)?", name)
    if not match:
        raise ValueError(f"unexpected tensor {name:.80}; an adapter has only lora_A and lora_B of linear layers")
    return re.sub(r"^model\.(?=visual\.)|^model\.language_(?=model\.)", "", match[1]), match[2]


def save_adapter(folder: Path, model: nn.Module, base: str | None = None):
    """Write the adapters of a model into a folder that PEFT loads on transformers' class of the base.

    Args:
        base: what PEFT should load as the base, a folder or the id of a repository.
    """
    gather_adapter(model, base)(folder)


def gather_adapter(model: nn.Module, base: str | None = None) -> Callable[[Path], None]:
    """What writes the adapters of a model, as they are now, into a folder; all ranks of a sharded model call this."""
    tensors, ranks, alphas, dora = {}, {}, {}, False
    for name, layer in adapters(model).items():
        theirs = _their_name(name)
        ranks[theirs] = r = len(layer.lora_A)
        alphas[theirs] = layer.scaling * r  # scaled by alpha / r, also where it was alpha / sqrt(r)
        for which, matrix in (("A", layer.lora_A), ("B", layer.lora_B)):
            tensors[f"{PREFIX}{theirs}.lora_{which}.weight"] = full(matrix).cpu().contiguous()
        if dora := layer.lora_magnitude is not None:
            tensors[f"{PREFIX}{theirs}.lora_magnitude_vector"] = full(layer.lora_magnitude).cpu().contiguous()
    r, alpha = max(ranks.values()), max(alphas.values())
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True}
    config |= {"r": r, "lora_alpha": alpha, "target_modules": sorted(ranks), "lora_dropout": 0.0, "bias": "none"}
    config["rank_pattern"] = {name: own for name, own in ranks.items() if own != r}
    config["alpha_pattern"] = {name: own for name, own in alphas.items() if own != alpha}
    config["use_dora"] = dora

    def write(folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / CONFIG, config)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return write


def also_adapter(model: nn.Module, more: Callable[[Path], None] | None) -> Callable[[Path], None] | None:
    """Of a model with adapters: what writes them into the folder `adapter` beside more, gathered now by all ranks."""
    if not adapters(model):
        return more
    write_adapter = gather_adapter(model, getattr(model, "adapter_base", None))

    def write(folder: Path):
        write_adapter(folder / "adapter")
        if more is not None:
            more(folder)

    return write


def _their_name(name: str) -> str:
    """A layer's name in transformers >= 4.52, such as model.language_model.layers.0.mlp.up_proj."""
    return f"model.{name}" if name.startswith("visual.") else name.replace("model.", "model.language_model.", 1)
