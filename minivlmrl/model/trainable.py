"""Select which parameters are trained."""

from collections.abc import Sequence

from torch import nn

from minivlmrl.config.types import LAYERS, Frozen
from minivlmrl.errors import UserError, pluralize, require
from minivlmrl.model.plain_weights import has_adapters, is_adapter, part_of


def select_trained(model: nn.Module, freeze: Sequence[Frozen]):
    """Set requires_grad of all parameters; `freeze` lists frozen model parts and layers."""
    names = [name for name, _ in model.named_parameters()]
    frozen_layers = layer_prefixes(freeze, names)
    adapted = has_adapters(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained(name, freeze, frozen_layers, adapted))
    if not trained_parameters(model):
        raise UserError(
            f"model.freeze is [{', '.join(freeze)}], so no parameter would be trained. Freeze "
            "fewer parts, or add another part to adapter.target."
        )


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def layer_prefixes(freeze: Sequence[Frozen], names: Sequence[str]) -> tuple[str, ...]:
    """Return name prefixes of frozen layers: ("model.layers.0.", "model.layers.1.") for "layers.0-1".

    Raises:
        UserError: a range has layers that the model lacks.
    """
    prefixes = []
    for text in freeze:
        match = LAYERS.fullmatch(text)
        if match is None:
            continue
        kind = {"layers": "model.layers.", "visual.blocks": "visual.blocks."}[match[1]]
        count = len({name.partition(kind)[2].partition(".")[0] for name in names if kind in name})
        first, last = int(match[2]), int(match[3] or match[2])
        expected = f"a range within 0-{count - 1}, because the model has {pluralize(count, 'such layer')}"
        require(first <= last < count, "model.freeze", text, expected)
        prefixes += [f"{kind}{number}." for number in range(first, last + 1)]
    return tuple(prefixes)


def is_trained(name: str, freeze: Sequence[Frozen], frozen_layers: tuple[str, ...], adapted: bool) -> bool:
    """Check whether a parameter is trained: not frozen, and in an adapter if the model has adapters.

    In a value model, the value head is trained, but not the LM head.
    """
    if name in ("score.weight", "backbone.lm_head.weight"):
        return name == "score.weight"
    name = name.removeprefix("backbone.")
    frozen = part_of(name) in freeze or name.startswith(frozen_layers)
    return not frozen and (is_adapter(name) or not adapted)
