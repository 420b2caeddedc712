"""Select which parameters are trained."""

from collections.abc import Sequence

from torch import nn

from minivlmrl.config.types import LAYERS, Frozen, Part
from minivlmrl.errors import UserError, pluralize, require
from minivlmrl.model.plain_weights import has_adapters, is_adapter, part_of


def select_trained(model: nn.Module, freeze: Sequence[Frozen]):
    """Set requires_grad of all parameters.

    A model with adapters trains only these and its modules_to_save. A value model trains its value head, but not its
    LM head.

    Args:
        freeze: frozen model parts and layers.
    Raises:
        UserError: the model lacks a layer in `freeze`, or no parameter is trained.
    """
    frozen_layers = []  # name prefixes: ["model.layers.0.", "model.layers.1."] for "layers.0-1"
    for match in filter(None, map(LAYERS.fullmatch, freeze)):
        kind = {"layers": "model.layers.", "visual.blocks": "visual.blocks."}[match[1]]
        count = len({name.partition(kind)[2].partition(".")[0] for name, _ in model.named_parameters() if kind in name})
        first = int(match[2])
        last = int(match[3] or match[2])
        expected = f"a range within 0-{count - 1}, because the model has {pluralize(count, 'such layer')}"
        require(first <= last < count, "model.freeze", match[0], expected)
        frozen_layers += [f"{kind}{number}." for number in range(first, last + 1)]
    adapted = has_adapters(model)
    in_full: Sequence[Part] = getattr(getattr(model, "backbone", model), "modules_to_save", ())
    for name, parameter in model.named_parameters():
        inner_name = name.removeprefix("backbone.")  # value models put "backbone." before names
        is_frozen = name != "score.weight" and (
            name == "backbone.lm_head.weight"
            or part_of(inner_name) in freeze
            or inner_name.startswith(tuple(frozen_layers))
            or (adapted and not is_adapter(name) and part_of(inner_name) not in in_full)
        )
        parameter.requires_grad_(not is_frozen)
    if not trained_parameters(model):
        raise UserError(
            f"model.freeze is [{', '.join(freeze)}], so no parameter would be trained. Freeze "
            "fewer parts, or add another part to adapter.target."
        )


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
