"""Metrics for MoE routers in training: the load-balancing loss and each expert's tokens."""

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
    """Interface for distributed/process_group.World, which collects values from all ranks."""

    def gather_objects(self, value: T) -> list[T]: ...


def load_balancing_loss(chosen: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Compute the routers' load-balancing loss.

    The loss is E times the sum over experts of (choices / tokens) x (mean probability). It equals k
    if all experts are chosen equally often, and is larger if the routers prefer a few experts.

    Args:
        chosen: probabilities (tokens, E) and chosen ids (tokens, k) for each layer; see
            choose_experts. Tokens from all layers are averaged together.
    Source: Switch Transformer (arXiv 2101.03961), eq. 4 to 6; equals transformers 5.23's
        load_balancing_loss_func.
    """
    probabilities, ids = map(torch.cat, zip(*chosen, strict=True))
    num_tokens, num_experts = probabilities.shape
    choices = ids.flatten().bincount(minlength=num_experts)
    return num_experts / num_tokens * (choices * probabilities.mean(0)).sum()


class RouterLog:
    """Count each expert's tokens, separately for text and images."""

    def __init__(self, config: ModelConfig, world: Gatherer):
        self.config = config
        self.world = world
        # token counts (2, layers, E) for each micro-batch since the last `take` call
        self.counts: list[Tensor] = []

    def watch(self, model: nn.Module) -> AbstractContextManager[Callable[[], ChosenExperts]]:
        """Return a context manager that records which experts are chosen in each forward.

        The context manager yields a function that returns the latest forward's experts; see
        chosen_experts.
        """
        return chosen_experts(model)

    def differing_routes(
        self, group: GroupBatch, chosen: ChosenExperts, decoder: TextModel, sampler_routes: Tensor
    ) -> Tensor:
        """Return (M,): 1 for tokens whose experts differ between training and sampling, else 0."""
        routes = routes_of(chosen, decoder, group.layout.predict_index)
        return (routes != sampler_routes.to(routes.device)).float()

    def add(self, group: GroupBatch, chosen: ChosenExperts) -> dict[str, Tensor]:
        """Count a micro-batch's tokens, and return its load-balancing loss and router entropy.

        Args:
            group: the micro-batch.
            chosen: chosen_experts' result for the micro-batch's forward.
        """
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
        """Sum the token counts since the last call over all ranks, and reset them.

        Returns:
            {"experts/tokens": (2, layers, E)}, text-token and image-token counts, or
            {} if no tokens were counted.
        """
        if not self.counts:
            return {}
        own_counts = torch.stack(self.counts).sum(0).cpu()
        counts = torch.stack(self.world.gather_objects(own_counts)).sum(0)
        self.counts = []
        return {"experts/tokens": counts.tolist()}
