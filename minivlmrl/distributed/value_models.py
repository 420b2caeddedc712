"""Load and save reward models and critics, which have a value head."""

from functools import partial
from pathlib import Path

import torch

from minivlmrl.config.options import RunConfig
from minivlmrl.data.processor import Processor
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.saving import save_model
from minivlmrl.distributed.weights import recompute_blocks, reshard
from minivlmrl.files import HEAD_FILE, save_tensors
from minivlmrl.model.checkpoint import check_same_inputs
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.lora import init_adapters, inject_adapters
from minivlmrl.model.plain_weights import gather_full_tensor
from minivlmrl.model.trainable import select_trained
from minivlmrl.model.value_head import ValueModel, load_value_model


def save_value_model(
    folder: str | Path,
    model: ValueModel,
    processor: Processor,
    world: World,
    base: str | None = None,
    merge: bool = True,
):
    """Save a value model folder, with the head in score.safetensors; all ranks must call this.

    Args:
        base: base model, for adapter_config.json.
        merge: if False, save only adapters and head.
    """
    reshard(model.score)
    head = {"score.weight": gather_full_tensor(model.score.weight).cpu()}
    save_model(folder, model.backbone, processor, world, base, lambda new: save_tensors(head, new / HEAD_FILE), merge)


def load_critic(
    folder: str | Path, policy: VisionLanguageModel, processor: Processor, config: RunConfig, device: torch.device
) -> ValueModel:
    """Load a value model as a critic, applying the options `adapter` and `model.freeze`."""
    check_same_inputs(folder, policy, processor)
    inject = partial(inject_adapters, options=config.adapter)
    critic = load_value_model(folder, policy.lm_head.weight.dtype, device, policy.sharding, inject)
    critic.backbone.save_dtype = policy.save_dtype
    init_adapters(critic.backbone, config.seed)
    if config.model.activation_checkpointing and not policy.sharding:
        recompute_blocks(critic.backbone)
    select_trained(critic, config.model.freeze)
    return critic
