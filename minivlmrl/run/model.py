"""The model and processor that a recipe asks for."""

import torch
from torch import nn

from minivlmrl.hub.checkpoint import DTYPES, load_model, load_processor, random_model
from minivlmrl.rows import Processor
from minivlmrl.scale.ranks import World
from minivlmrl.scale.sharding import Sharding, recompute_blocks
from minivlmrl.tasks.table import get_task
from minivlmrl.tools.plan import check_memory


def build_model(config, world: World) -> tuple[nn.Module, Processor]:
    """Load the recipe's checkpoint, or make a random model for the embedded task."""
    section, data, sharding = config.model, config.data, None
    if (section.path is None) == (section.config is None):
        raise ValueError("model: set either model.path (a Hugging Face folder) or model.config (random weights)")
    dtype, recompute = DTYPES[section.dtype], section.activation_checkpointing
    if config.uses_fsdp:
        sharding = Sharding(config.sharding, world, dtype, recompute, DTYPES.get(section.compute_dtype))
    if section.path:
        processor = load_processor(section.path, data.min_pixels, data.max_pixels)  # before the weights: it may not fit
        if config.check_memory and world.device.type == "cuda":
            check_memory(config, world.size, torch.cuda.get_device_properties(world.device).total_memory)
        model = load_model(section.path, dtype, world.device, sharding)
    elif data.task is None:
        raise ValueError("model.config builds a model for an embedded task; with data.train_file set model.path")
    else:
        tokenizer = get_task(data.task).tokenizer()
        model, processor = random_model(section.config, tokenizer, config.seed, data.min_pixels, data.max_pixels)
        model = model.to(world.device, dtype)
        if sharding is not None:
            sharding.shard(model)
    if recompute and sharding is None:
        recompute_blocks(model)
    processor.image_processor.resize = data.resize or processor.image_processor.resize
    processor.add_vision_id, processor.answer = data.add_vision_id, data.answer
    return model, processor
