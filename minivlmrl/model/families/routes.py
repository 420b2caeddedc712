"""Which experts compute each token: they must be the same in training as in sampling.

A token's route is the set of its experts in all layers. It is kept as one number, the sum of a
random number for each of them: equal sets have equal sums, in any order.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from minivlmrl.data.rows import Completion
from minivlmrl.model.attention import Attention, DecodeAttention
from minivlmrl.model.decoder import Qwen2_5_VL, TextModel
from minivlmrl.model.families.experts import chosen_experts
from minivlmrl.model.families.registry import ChosenExperts

T = TypeVar("T")


def routes_of(chosen: ChosenExperts, decoder: TextModel, select: Tensor | None) -> Tensor:
    """Add up the routes (n,) int64 of a forward, from its chosen_experts.

    Args:
        select: (n,) which of the tokens its last layer has computed; None: all.
    """
    routes = []
    for layer, (probabilities, ids) in chosen.items():
        generator = torch.Generator().manual_seed(layer)
        codes = torch.randint(2**62, probabilities.shape[1:], generator=generator)  # (E,)
        layer_routes = codes.to(ids.device)[ids].sum(1)
        if select is not None and layer + 1 < len(decoder.layers):
            layer_routes = layer_routes[select]
        routes.append(layer_routes)
    return torch.stack(routes).sum(0)


@contextmanager
def watch_routes(
    model: Qwen2_5_VL, choose: Callable[[Tensor, Tensor, Tensor], T], kept: Tensor
) -> Iterator[Callable[[Tensor, Tensor, Tensor], T]]:
    """Yield a `choose` that keeps the route after which each token of a rollout is drawn.

    Args:
        kept: (completions, most tokens of one) int64, is written into.
    """
    latest = kept.new_zeros(0)  # (n,) of the last forward: a prompt's, or a row's

    def after_forward(decoder: TextModel, arguments: tuple, states: Tensor):
        nonlocal latest
        attention: Attention = arguments[2]
        select: Tensor | None = (*arguments, None)[3]
        routes = routes_of(chosen(), decoder, select)
        if isinstance(attention, DecodeAttention) and attention.response_rows:
            latest[list(attention.response_rows)] = routes
        else:
            latest = routes

    def choose_and_keep(logits: Tensor, rows: Tensor, counts: Tensor):
        repeats = len(rows) // len(latest)  # a prompt is read once for its completions
        kept[rows.cpu(), counts.cpu()] = latest.repeat_interleave(repeats).cpu()
        return choose(logits, rows, counts)

    with chosen_experts(model) as chosen, model.model.register_forward_hook(after_forward):
        yield choose_and_keep


def join_routes(completions: Sequence[Completion]) -> Tensor | None:
    """Lay the routes of completions end to end, (M,); None if the sampler did not record them."""
    routes = []
    for completion in completions:
        if completion.routes is None:
            return None
        routes.append(completion.routes[: len(completion.ids)])
    return torch.cat(routes)
