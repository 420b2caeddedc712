"""What the routers of a model with experts do in training: which tokens go where, and balance."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from minivlmrl.model.config import ModelConfig
from minivlmrl.model.decoder import TextModel
from minivlmrl.model.families.experts import chosen_experts
from minivlmrl.model.families.registry import ChosenExperts
from minivlmrl.model.families.routes import routes_of
from minivlmrl.model.packing import GroupBatch

T = TypeVar("T")


class Gatherer(Protocol):
    """Collects values of all ranks: distributed/process_group.World."""

    def gather_objects(self, value: T) -> list[T]: ...


def load_balancing_loss(chosen: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """E times the sum over experts of (choices / tokens) times (mean probability).

    It is k where all experts are chosen alike, more where routers prefer the same few.

    Args:
        chosen: of each layer probabilities (tokens, E) and chosen ids (tokens, k), see
            choose_experts; the means are over the tokens of all layers together.
    Source: Switch Transformer (arXiv 2101.03961), eq. 4 to 6; equals transformers 5.23's
        load_balancing_loss_func.
    """
    probabilities, ids = map(torch.cat, zip(*chosen, strict=True))
    num_tokens, num_experts = probabilities.shape
    choices = ids.flatten().bincount(minlength=num_experts)
    return num_experts / num_tokens * (choices * probabilities.mean(0)).sum()


class RouterLog:
    """Counts the tokens of each expert, of text and of images apart."""

    def __init__(self, config: ModelConfig, world: Gatherer):
        self.config = config
        self.world = world
        self.counts: list[Tensor] = []  # of each micro-batch since the last `take`: (2, layers, E)

    def watch(self, model: nn.Module) -> AbstractContextManager[Callable[[], ChosenExperts]]:
        """Make a context in which a function returns the experts that the latest forward chose."""
        return chosen_experts(model)

    def differing_routes(
        self, group: GroupBatch, chosen: ChosenExperts, decoder: TextModel, sampler_routes: Tensor
    ) -> Tensor:
        """Mark the tokens (M,) that have other experts in training than in sampling with 1."""
        routes = routes_of(chosen, decoder, group.layout.predict_index)
        return (routes != sampler_routes.to(routes.device)).float()

    def add(self, group: GroupBatch, chosen: ChosenExperts) -> dict[str, Tensor]:
        """Take the chosen_experts of a micro-batch; returns what is logged of it."""
        experts = self.config.experts
        assert experts is not None
        num_layers = self.config.num_hidden_layers
        is_image = torch.zeros_like(group.input_ids).index_fill(0, group.vision_index, 1)
        counts = is_image.new_zeros(2, num_layers, experts.num_experts)
        metrics = {"aux_loss": load_balancing_loss(chosen.values())}
        for layer, (probabilities, ids) in chosen.items():
            if layer + 1 == num_layers:
                is_image = is_image[group.layout.predict_index]
            cells = is_image[:, None], ids
            counts[:, layer].index_put_(cells, torch.ones_like(ids), accumulate=True)
            entropy = torch.special.entr(probabilities.detach()).sum(1)  # nats
            metrics[f"experts/entropy/{layer}"] = entropy.mean()
        self.counts.append(counts)
        return metrics

    def take(self) -> dict[str, list]:
        """Count the tokens since the last call, on all ranks; {}: there are no experts.

        Returns:
            {"experts/tokens": (2, layers, E)}, those of text and those of images.
        """
        if not self.counts:
            return {}
        own_counts = torch.stack(self.counts).sum(0).cpu()
        counts = torch.stack(self.world.gather_objects(own_counts)).sum(0)
        self.counts = []
        return {"experts/tokens": counts.tolist()}
