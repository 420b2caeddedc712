"""The reference model: the policy as a stage found it, to measure how far training has moved."""

import copy

import torch

from minivlmrl.decoder import Qwen2_5_VL
from minivlmrl.run.config import ReferenceConfig
from minivlmrl.scale.sharding import copy_model, is_sharded, reshard


class Reference:
    """A copy of the policy without gradients.

    With num_shared_layers = k the vision tower, the embeddings and the first k decoder layers are frozen in the policy
    and exist once for both; only the layers above are copied. (A head that is tied to the embeddings is frozen too.)
    Of sharded models they are frozen just so, but each rank copies its parts of them: a unit belongs to one model.

    Args:
        policy: the model as it is now.
    Raises:
        ValueError: the model has fewer layers than are to be shared.
    Source: TRL's create_reference_model; the mixing is that of TR-DPO (arXiv 2404.09656) and TRL's sync_ref_model.
    """

    def __init__(self, policy: Qwen2_5_VL, config: ReferenceConfig):
        self.policy, self.config = policy, config
        shared = shared_parameters(policy, config.num_shared_layers)
        for parameter in shared:
            parameter.requires_grad_(False)
        # what deepcopy finds in its memo it takes as it is
        twin = copy_model(policy) if is_sharded(policy) else copy.deepcopy(policy, {id(p): p for p in shared})
        self.model = twin.requires_grad_(False)
        self.steps = 0

    @torch.no_grad()
    def after_step(self):
        """Call after every optimizer step: every ref_model_sync_steps the reference moves towards the policy."""
        self.steps += 1
        if self.config.sync_ref_model and self.steps % self.config.ref_model_sync_steps == 0:
            reshard(self.model)
            for mine, theirs in zip(self.model.parameters(), self.policy.parameters(), strict=True):
                mine.lerp_(theirs, self.config.ref_model_mixup_alpha)  # (1 - alpha) reference + alpha policy


def shared_parameters(policy: Qwen2_5_VL, layers: int) -> list[torch.nn.Parameter]:
    """What policy and reference have in common below decoder layer `layers`; nothing for 0."""
    if layers > len(policy.model.layers):
        raise ValueError(f"num_shared_layers is {layers}, the model has {len(policy.model.layers)} layers")
    if layers == 0:
        return []
    modules = [policy.visual, policy.model.embed_tokens, *policy.model.layers[:layers]]
    return [parameter for module in modules for parameter in module.parameters()]
