"""Record each token's experts during sampling, to check that training uses the same experts.

A token's route is the set of its experts in all layers. A route is stored as a hash: the sum
of one random integer per expert, so that expert order does not matter.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from minivlmrl.data.rows import Completion
from minivlmrl.model.attention import Attention, DecodeAttention
from minivlmrl.model.decoder import TextModel, VisionLanguageModel
from minivlmrl.model.families.experts import chosen_experts
from minivlmrl.model.families.registry import ChosenExperts

T = TypeVar("T")


def routes_of(chosen: ChosenExperts, decoder: TextModel, select: Tensor | None) -> Tensor:
    """Compute the routes (n,) int64 for a forward's tokens.

    Args:
        chosen: chosen_experts' result for this forward.
        select: (n,) indices for the tokens that the last layer processed. None means all tokens.
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
    model: VisionLanguageModel,
    sample_token: Callable[[Tensor, Tensor, Tensor], T],
    route_buffer: Tensor,
) -> Iterator[Callable[[Tensor, Tensor, Tensor], T]]:
    """Yield a token sampler that also records each token's route at the predicting position.

    Args:
        model: the model that generates.
        sample_token: the token sampler to extend; see generate.TokenSampler.
        route_buffer: (completions, maximum tokens) int64, to which the routes are written.
    """
    latest = route_buffer.new_zeros(0)  # (n,) routes in the last forward, for each prompt or row

    def after_forward(decoder: TextModel, arguments: tuple, states: Tensor):
        nonlocal latest
        attention: Attention = arguments[2]
        select: Tensor | None = (*arguments, None)[3]
        routes = routes_of(chosen(), decoder, select)
        if isinstance(attention, DecodeAttention) and attention.response_rows:
            latest[list(attention.response_rows)] = routes
        else:
            latest = routes

    def sample_and_record(logits: Tensor, rows: Tensor, counts: Tensor):
        # a prompt is computed only once, so its route is repeated for all completions
        repeats = len(rows) // len(latest)
        route_buffer[rows.cpu(), counts.cpu()] = latest.repeat_interleave(repeats).cpu()
        return sample_token(logits, rows, counts)

    with chosen_experts(model) as chosen, model.model.register_forward_hook(after_forward):
        yield sample_and_record


def join_routes(completions: Sequence[Completion]) -> Tensor | None:
    """Concatenate completion routes (M,), or return None if they were not recorded."""
    routes = []
    for completion in completions:
        if completion.routes is None:
            return None
        routes.append(completion.routes[: len(completion.ids)])
    return torch.cat(routes)
