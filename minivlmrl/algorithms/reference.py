"""The reference model: the policy as a stage found it, to measure how far training has moved."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from minivlmrl.adapters.lora import AdapterCopy, adapters
from minivlmrl.batch import GroupBatch
from minivlmrl.logprobs import per_token_logps
from minivlmrl.scale.sharding import copy_model, reshard


class Reference:
    """A copy of the policy, or of its adapters alone, without gradients.

    Source: TRL's create_reference_model.
    """

    def __init__(self, policy: nn.Module):
        # copied adapters compute on the policy's base
        model = AdapterCopy(policy) if adapters(policy) else copy_model(policy, to_compute=True)
        self.policy = policy
        self.model = model.requires_grad_(False)

    @torch.no_grad()
    def logps(self, group: GroupBatch, temperature: float = 1.0) -> Tensor:
        """Compute log-probabilities of a batch's completions, (R, T) nats."""
        with computing(self.model, self.policy) as model:
            logps, _ = per_token_logps(model, group, temperature)
            reshard(model)
        return group.pad(logps)


@contextmanager
def computing(model: nn.Module, policy: nn.Module) -> Iterator[nn.Module]:
    """Give a model that computes beside the policy; copied adapters compute on its base."""
    reshard(policy)
    if not isinstance(model, AdapterCopy):
        yield model
        return
    with model.computing() as adapted:
        yield adapted
        reshard(adapted)
