"""Build a model from config.json, with random or given weights."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from minivlmrl.data.chat_template import ChatTemplate
from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.image_settings import read_image_processor
from minivlmrl.data.processor import Processor
from minivlmrl.data.tokenizer import Tokenizer
from minivlmrl.errors import UserError
from minivlmrl.json_files import read_json
from minivlmrl.model import config_json
from minivlmrl.model.config import ModelConfig
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.families.registry import CONTROL_TOKENS, find_family

# vocabulary size for a tokenizer trained on the rows, if config.json has no vocab_size
TRAINED_TOKENS = 512
# name suffixes of layers that write to the residual stream
INTO_RESIDUAL = ("o_proj", "out_proj", "down_proj", "mlp.fc2", "mlp.linear_fc2", "attn.proj")
# {ImageProcessor field: VisionConfig field with the same value}
PATCHES = {"patch_size": "patch_size", "temporal_patch_size": "temporal_patch_size", "merge_size": "spatial_merge_size"}


def random_model(config_file: str | Path, tokenizer: Tokenizer, seed: int) -> tuple[VisionLanguageModel, Processor]:
    """Build a model with random weights, and its processor."""
    model = random_weights(config_file, tokenizer, seed)
    return model, random_processor(model.config, tokenizer)


def random_weights(config_file: str | Path, tokenizer: Tokenizer, seed: int) -> VisionLanguageModel:
    config = config_for(config_file, tokenizer)
    model = model_from_config(config, config_file)
    initialize(model, torch.Generator().manual_seed(seed))
    return model


def model_from_config(model_config: ModelConfig, where: str | Path) -> VisionLanguageModel:
    """Build a model with uninitialized weights."""
    try:
        return find_family(model_config.model_type).build_model(model_config)
    except (RuntimeError, OverflowError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{where}: a model with these sizes cannot be built ({reason}). Correct the sizes.") from error


def config_for(config_file: str | Path, tokenizer: Tokenizer) -> ModelConfig:
    """Read config.json, with special token ids and (if missing) vocabulary size from a tokenizer."""
    config = read_sizes(config_file, len(tokenizer))
    token_ids = {name: tokenizer.special_tokens[token] for name, token in CONTROL_TOKENS.items()}
    # a larger vocab_size adds unused embedding rows
    vocab_size = max(len(tokenizer), config.vocab_size)
    return replace(config, vocab_size=vocab_size, **token_ids)


def read_sizes(config_file: str | Path, vocab_size: int = TRAINED_TOKENS) -> ModelConfig:
    """Read config.json for a model with random weights; `vocab_size` applies if the file has none."""
    return config_json.from_dict({"vocab_size": vocab_size} | read_json(Path(config_file)), str(config_file))


def random_processor(
    model_config: ModelConfig, tokenizer: Tokenizer, min_pixels: int | None = None, max_pixels: int | None = None
) -> Processor:
    """Build a processor (tokenizer, image settings, template) for a random model."""
    family = find_family(model_config.model_type)
    patches = {name: getattr(model_config.vision_config, field) for name, field in PATCHES.items()}
    token_pixels = (patches["patch_size"] * patches["merge_size"]) ** 2
    images = read_image_processor(
        {**family.images, **patches}, "data", min_pixels or token_pixels, max_pixels or ImageProcessor.max_pixels
    )
    images = replace(images, videos=family.read_videos({}, "data", images))
    return Processor(tokenizer, images, ChatTemplate(family.template), box_space=family.box_space)


@torch.no_grad()
def initialize(model: VisionLanguageModel, generator: torch.Generator):
    """Initialize weights: matrices N(0, 1/fan_in), embeddings N(0, 0.02^2), norms 1, biases 0.

    Learned position embeddings have standard deviation vision_config.initializer_range. Output projections in attention
    and MLP are divided by sqrt(2 n) for n blocks, as in GPT-2.
    """
    for module in model.modules():
        if isinstance(module, nn.RMSNorm | nn.LayerNorm) or hasattr(module, "resets_itself"):
            cast(Any, module).reset_parameters()
    for name, parameter in model.named_parameters():
        if name.endswith("embed_tokens.weight"):
            parameter.normal_(0, 0.02, generator=generator)
        elif name.endswith("pos_embed.weight"):
            parameter.normal_(0, model.config.vision_config.initializer_range, generator=generator)
        elif parameter.dim() > 1:
            blocks = model.visual.blocks if name.startswith("visual.") else model.model.layers
            into_residual = name.removesuffix(".weight").endswith(INTO_RESIDUAL)
            scale = 1 / math.sqrt(2 * len(blocks)) if into_residual else 1.0
            parameter.normal_(0, scale / math.sqrt(parameter[0].numel()), generator=generator)
        elif name.endswith(".bias"):
            parameter.zero_()


def assign(model: VisionLanguageModel, weights: dict[str, Tensor]):
    """Load weights by name into a model on the meta device."""
    model.load_state_dict(weights, assign=True, strict=False)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
