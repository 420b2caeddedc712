"""Which parameters are trained: all, or those of adapters, less frozen parts; as a table too."""

import re
from typing import Literal

from torch import nn

from minivlmrl.adapters.lora import adapters, is_adapter, plain_weights

PART = {  # what a recipe calls the parts of a model, as beginnings of names
    "vision": "visual.",  # without the mergers, whose names are longer
    "merger": ("visual.merger.", "visual.deepstack_merger_list."),
    "language": "model.",  # without the embeddings
    "embeddings": ("model.embed_tokens.", "lm_head."),  # the head is often the same matrix
}
Part = Literal["vision", "merger", "language", "embeddings"]


def part_of(name: str) -> Part:
    """The part that a parameter of this name belongs to."""
    names = "merger", "embeddings", "vision", "language"
    return next(part for part in names if name.startswith(PART[part]))


def select_trained(model: nn.Module, freeze: list[Part]):
    """Choose what an optimizer takes: adapters where there are some, no parameter of frozen parts.

    Of a value model its head too, and not the head that predicts tokens.
    """
    has_adapters, trained = bool(adapters(model)), 0
    for name, parameter in model.named_parameters():
        own, chosen = name.removeprefix("backbone."), is_adapter(name) >= has_adapters
        chosen = own == "score.weight" or (
            name != "backbone.lm_head.weight" and part_of(own) not in freeze and chosen
        )
        trained += parameter.requires_grad_(chosen).requires_grad
    if not trained:
        why = "adapter.target names no other part" if has_adapters else "these are all parts"
        raise ValueError(f"model.freeze is [{', '.join(freeze)}], nothing is left to train: {why}")


def table(model: nn.Module) -> str:
    """What is trained, a line a part or kind of layer: name, layers, rank, parameters, share."""
    layers, kinds, weights = adapters(model), {}, plain_weights(model).values()
    base = sum(
        w.in_features * w.out_features if isinstance(w, nn.Linear) else w.numel() for w in weights
    )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            layer, kind = name.rpartition(".")[0], (part_of(name), "")
            if layer in layers:  # of all blocks
                kind = re.sub(r"\.\d+\.(?=.*\.)", ".*.", layer), f" x r {layers[layer].form[0]}"
            kinds.setdefault(kind, []).append((layer, parameter.numel()))
    counts = {kind: sum(size for _, size in tensors) for kind, tensors in kinds.items()}
    total = sum(counts.values())
    lines = [f"trained: {total:,} parameters, {total / base:.3%} of the base's {base:,}"]
    for (name, rank), count in counts.items():
        number = len({layer for layer, _ in kinds[name, rank]})
        lines.append(f"  {name:<40} {number:>4}{rank:<9}{count:>14,} {count / base:>8.3%}")
    return "\n".join(lines)
