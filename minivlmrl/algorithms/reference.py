"""The reference model: the policy as a stage found it, to measure how far training has moved."""

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from minivlmrl.adapters.lora import AdapterCopy, adapter_parameters, adapters
from minivlmrl.algorithms.reward_model import check_reward_model
from minivlmrl.batch import GroupBatch
from minivlmrl.hub.checker import Code, FilePath
from minivlmrl.logprobs import per_token_logps
from minivlmrl.scale.sharding import copy_model, is_sharded, reshard


@dataclass
class ReferenceConfig:
    """How stages treat the model that they hold the policy near."""

    sync_ref_model: bool = False  # move the reference towards the policy on the way
    # reference = (1 - alpha) reference + alpha policy ...
    ref_model_mixup_alpha: Annotated[float, "[0, 1]"] = 0.6
    ref_model_sync_steps: Annotated[int, ">= 1"] = 512  # ... every this many optimizer steps
    # vision tower, embeddings, this many layers: frozen, shared by both
    num_shared_layers: Annotated[int, ">= 0"] = 0
    # distill: the folder of a teacher; None: the policy as the stage found it
    teacher: FilePath | None = None
    # distill: "file.py:function", from a Row to what the teacher sees of it: docs/distill.md
    teacher_prompt: Code | None = None
    # distill: 0 is KL(teacher || student), 1 KL(student || teacher), between is Jensen-Shannon
    teacher_beta: Annotated[float, "[0, 1]"] = 0.5


class Reference:
    """A copy of the policy, or of its adapters, without gradients; what both share is frozen.

    Source: TRL's create_reference_model; TRL's sync_ref_model, TR-DPO (arXiv 2404.09656).
    """

    def __init__(self, policy: nn.Module, config):
        self.policy, self.config = policy, config
        shared = shared_parameters(policy, config.num_shared_layers)
        for parameter in shared:
            parameter.requires_grad_(False)
        if adapters(policy):  # the base is the policy's
            twin = AdapterCopy(policy)
        elif is_sharded(policy):  # cannot share: a unit belongs to one model
            twin = copy_model(policy, to_compute=not config.sync_ref_model)
        else:  # what deepcopy finds in its memo it takes as it is
            twin = copy.deepcopy(policy, {id(p): p for p in shared})
        self.model = twin.requires_grad_(False)

    @torch.no_grad()
    def logps(self, group: GroupBatch, temperature: float = 1.0) -> Tensor:
        """(R, T) log-probabilities of a batch's completions, nats."""
        reshard(self.policy)
        adapted = isinstance(self.model, AdapterCopy)
        with self.model.computing() if adapted else nullcontext(self.model) as model:
            logps, _ = per_token_logps(model, group, temperature)
            reshard(model)
        return group.pad(logps)

    @torch.no_grad()
    def after_step(self, steps: int):
        """Move towards the policy after every ref_model_sync_steps optimizer steps."""
        if self.config.sync_ref_model and steps % self.config.ref_model_sync_steps == 0:
            reshard(self.model)
            moving = adapter_parameters(self.policy) or self.policy.parameters()
            for own, moved in zip(self.model.parameters(), moving, strict=True):
                own.lerp_(moved, self.config.ref_model_mixup_alpha)


def shared_parameters(policy: nn.Module, layers: int) -> list[nn.Parameter]:
    """Vision tower, embeddings (and a tied head) and the first `layers` layers; nothing for 0."""
    if layers > len(policy.model.layers):
        raise ValueError(f"num_shared_layers is {layers}, of {len(policy.model.layers)} layers")
    if layers == 0:
        return []
    modules = [policy.visual, policy.model.embed_tokens, *policy.model.layers[:layers]]
    return [parameter for module in modules for parameter in module.parameters()]


def check_online(stage: str, run, kl_weight: float):
    """Refuse a recipe that cannot sample, has no reward, or sets what has no effect."""
    if run.sampling.temperature == 0:
        raise ValueError("sampling.temperature is 0: all completions of a group would be equal")
    if not run.rewards:
        raise ValueError(f"rewards: {stage} needs at least one")
    if "reward_model" in run.rewards:
        check_reward_model(run, stage)
    for name in ("sync_ref_model", "num_shared_layers"):
        if getattr(run.reference, name) and not kl_weight:
            weight = f"the weight of {stage}'s KL to it is 0"
            raise ValueError(f"reference.{name} needs a reference model; {weight}")
