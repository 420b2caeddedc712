"""Reference model for DPO and the KL penalty."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from minivlmrl.config.options import ReferenceOptions
from minivlmrl.data.processor import Processor
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.weights import copy_model, is_part, reshard
from minivlmrl.errors import error_phase
from minivlmrl.model.checkpoint import check_same_inputs, load_model
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.packing import GroupBatch
from minivlmrl.model.plain_weights import has_adapters


class Reference:
    """Reference model without gradients: a copy of the policy at the start of the stage, or a model from a folder.

    Without FSDP, a copy shares frozen parameters with the policy, like TRL's create_reference_model.
    """

    def __init__(self, policy: VisionLanguageModel, options: ReferenceOptions, processor: Processor, world: World):
        self.policy = policy
        if options.path is not None:
            check_same_inputs(options.path, policy, processor, "vocab_size")
            sharding = policy.sharding
            dtype = sharding.compute_dtype if sharding else policy.lm_head.weight.dtype
            model = load_model(options.path, dtype, world.device, sharding)
        elif has_adapters(policy):
            model = SwappedParameters(policy, [name for name, p in policy.named_parameters() if p.requires_grad])
        else:
            # keep the policy's dtype with sync_ref_model, whose small updates would be lost in 16 bits
            model = copy_model(policy, in_compute_dtype=not options.sync_ref_model)
        self.model = model.requires_grad_(False)

    @torch.no_grad()
    def logps(self, group: GroupBatch, temperature: float = 1.0) -> Tensor:
        """Compute reference log-probabilities (completions, tokens), in nats."""
        with error_phase("reference"), swapped_in(self.model, self.policy) as model:
            logps, _ = per_token_logps(model, group, temperature)
            reshard(model)
        return group.pad(logps)


class SwappedParameters(nn.Module):
    """Copies of a model's parameters, for example as a reference, to swap into the model for a forward pass."""

    def __init__(self, model: VisionLanguageModel, names: list[str]):
        super().__init__()
        # a list, in which torch does not register the policy as a submodule
        self.models = [model]
        self.names = names
        self.copies = nn.ParameterList([parameter.detach().clone() for parameter in self.originals()]).requires_grad_(
            False
        )

    def originals(self) -> list[nn.Parameter]:
        parameters = dict(self.models[0].named_parameters())
        return [parameters[name] for name in self.names]

    def exchange(self):
        """Swap the model's parameters with their copies; an FSDP model must be resharded first.

        Callers must swap back before a backward pass, because autograd does not notice new parameter.data.
        """
        for saved_copy, parameter in zip(self.copies, self.originals(), strict=True):
            if not is_part(parameter):
                # without allocating memory, which could fail after only some parameters were swapped
                parameter.data, saved_copy.data = saved_copy.data, parameter.data
                continue
            old_value = parameter.detach().clone()
            parameter.data.copy_(saved_copy)
            saved_copy.data.copy_(old_value)


@contextmanager
def swapped_in(
    model: VisionLanguageModel | SwappedParameters, policy: VisionLanguageModel
) -> Iterator[VisionLanguageModel]:
    """Yield the reference: a separate model, or the policy with reference parameters swapped in."""
    reshard(policy)
    if not isinstance(model, SwappedParameters):
        yield model
        return
    model.exchange()
    try:
        yield policy
        reshard(policy)
    finally:
        model.exchange()
