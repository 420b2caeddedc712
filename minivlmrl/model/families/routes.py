"""Which experts compute each token: they must be the same in training as in sampling.

A token's route is the set of its experts in all layers. It is kept as one number, the sum of a
random number for each of them: equal sets have equal sums, in any order.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from minivlmrl.data.rows import Completion
from minivlmrl.model.families.experts import chosen_experts


def routes_of(
    chosen: dict[int, tuple[Tensor, Tensor]], decoder: nn.Module, select: Tensor | None
) -> Tensor:
    """Add up the routes (n,) int64 of a forward, from its chosen_experts.

    Args:
        select: (n,) which of the tokens its last layer has computed; None: all.
    """
    routes = 0
    for layer, (probabilities, ids) in chosen.items():
        generator = torch.Generator().manual_seed(layer)
        codes = torch.randint(2**62, probabilities.shape[1:], generator=generator)  # (E,)
        layer_routes = codes.to(ids.device)[ids].sum(1)
        if select is not None and layer + 1 < len(decoder.layers):
            layer_routes = layer_routes[select]
        routes = routes + layer_routes
    return routes


@contextmanager
def watch_routes(model: nn.Module, choose: Callable, kept: Tensor) -> Iterator[Callable]:
    """Yield a `choose` that keeps the route after which each token of a rollout is drawn.

    Args:
        kept: (completions, most tokens of one) int64, is written into.
    """
    latest = None  # (n,) of the last forward: a prompt's, or a row's

    def after_forward(decoder: nn.Module, arguments: tuple, states: Tensor):
        nonlocal latest
        attention, select = (*arguments, None)[2:4]
        routes = routes_of(chosen(), decoder, select)
        if hasattr(attention, "answer_spans"):  # some rows of a decoding have read answers
            latest[[span.row for span in attention.answer_spans]] = routes
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
