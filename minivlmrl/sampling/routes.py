"""Which experts compute each token: they must be the same in training as in sampling.

A token's route is the set of its experts in all layers. It is kept as one number, the sum of a
random number for each of them: equal sets have equal sums, in any order.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from minivlmrl.generate import Choose
from minivlmrl.hub.experts import Experts
from minivlmrl.rows import Completion


def routes_of(decoder: nn.Module, select: Tensor | None) -> Tensor | None:
    """Add up the routes (n,) int64 of a decoder's last forward; None: it has no experts.

    Args:
        select: (n,) which of the tokens its last layer has computed; None: all.
    """
    routes = None
    for index, layer in enumerate(decoder.layers):
        if not isinstance(layer.mlp, Experts):
            continue
        ids = layer.mlp.ids  # (tokens, k)
        generator = torch.Generator().manual_seed(index)
        codes = torch.randint(2**62, (len(layer.mlp.experts),), generator=generator)
        layer_routes = codes.to(ids.device)[ids].sum(1)
        if select is not None and index + 1 < len(decoder.layers):
            layer_routes = layer_routes[select]
        routes = layer_routes if routes is None else routes + layer_routes
    return routes


class RouteLog:
    """The route after which each token of a rollout is drawn.

    Args:
        shape: completions and most tokens of one.
    """

    def __init__(self, shape: tuple[int, int]):
        self.kept = torch.zeros(shape, dtype=torch.long)
        self.latest = None  # (n,) of the last forward: a prompt's, or a row's

    def after_forward(self, decoder: nn.Module, arguments: tuple, states: Tensor):
        """Take the routes of a forward of the decoder: a hook."""
        attention, select = (*arguments, None)[2:4]
        routes = routes_of(decoder, select)
        if hasattr(attention, "answer_spans"):  # some rows of a decoding have read answers
            self.latest[[span.row for span in attention.answer_spans]] = routes
        else:
            self.latest = routes

    def keeping(self, choose: Choose) -> Choose:
        """Let a `choose` keep the routes of the forward before it."""

        def choose_and_keep(logits: Tensor, rows: Tensor, counts: Tensor):
            repeats = len(rows) // len(self.latest)  # a prompt is read once for its completions
            self.kept[rows.cpu(), counts.cpu()] = self.latest.repeat_interleave(repeats).cpu()
            return choose(logits, rows, counts)

        return choose_and_keep

    def hand_over(self, completions: Iterable[Completion]):
        """Give each completion its routes (most tokens,)."""
        for completion, routes in zip(completions, self.kept, strict=True):
            completion.routes = routes


def join_routes(completions: Sequence[Completion]) -> Tensor | None:
    """Lay the routes of completions end to end, (M,); None: no sampler has told them."""
    if not all(hasattr(completion, "routes") for completion in completions):
        return None
    return torch.cat([completion.routes[: len(completion.ids)] for completion in completions])
