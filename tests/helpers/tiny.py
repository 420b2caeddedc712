"""Tiny models whose weights reveal mistakes, and random prompts."""

import json

import pytest
import torch

from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Completion, Prompt
from minivlmrl.model import packing
from minivlmrl.model.config import ModelConfig
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.families.registry import find_family
from minivlmrl.model.plain_weights import is_adapter
from minivlmrl.tasks import shapes

# config.json for whole runs, as small as the architecture allows
RUN_MODEL = {
    "model_type": "qwen2_5_vl", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "rope_scaling": {"mrope_section": [2, 3, 3]},
    "rms_norm_eps": 1e-6,
    "vision_config": {
        "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
        "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [0],
    },
}  # fmt: skip
# Qwen3-VL as small as RUN_MODEL; head_dim differs from hidden_size / num_attention_heads
RUN_QWEN3 = {
    "model_type": "qwen3_vl",
    "text_config": {
        "vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 24,
        "num_attention_heads": 2, "num_key_value_heads": 1, "rope_scaling": {"mrope_section": [4, 4, 4]},
    },
    "vision_config": {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
        "patch_size": 14, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    },
}  # fmt: skip
# recurrent layer sizes in Qwen3.5: value heads are more and larger than key heads
RECURRENT = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
LAYERS = {"full_attention_interval": 2, "head_dim": 32, "partial_rotary_factor": 0.25}
RUN_QWEN35 = {
    "model_type": "qwen3_5",
    "text_config": {
        **RECURRENT, **LAYERS, "vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": {"mrope_section": [2, 1, 1]},
    },
    "vision_config": {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
        "patch_size": 14, "num_position_embeddings": 16,
    },
}  # fmt: skip

# mixture of experts, 2 experts per token; in Qwen3-VL, only the first of two layers
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MANY = EXPERTS | {"num_experts": 24, "moe_intermediate_size": 8}  # some experts get no token in a micro-batch
RUN_QWEN3_MOE = {
    **RUN_QWEN3, "model_type": "qwen3_vl_moe",
    "text_config": RUN_QWEN3["text_config"] | MANY | {"mlp_only_layers": [1]},
}  # fmt: skip
RUN_QWEN35_MOE = {
    **RUN_QWEN35, "model_type": "qwen3_5_moe",
    "text_config": RUN_QWEN35["text_config"] | MANY | {"shared_expert_intermediate_size": 20},
}  # fmt: skip


def recipe(stage: dict, **sections) -> dict:
    """Return a recipe for RUN_MODEL with options `stage` in all stages; `sections` are merged into it."""
    base = {
        "num_threads": 1, "state_minutes": 0, "model": {"config": "model.json"}, "data": {"task": "shapes"},
        "sampling": {"max_new_tokens": 6}, "sft": stage, "dpo": stage, "reward_model": stage,
        "grpo": stage | {"num_generations": 3}, "ppo": stage | {"num_generations": 2},
    }  # fmt: skip
    base = json.loads(json.dumps(base))  # copies, because YAML would write shared objects as aliases
    for name, value in sections.items():
        base[name] = base.get(name, {}) | value if isinstance(value, dict) else value
    return base


IMAGE = 293
VIDEO = 294
VISION_START = 290
VISION_END = 291


def config(tied: bool = False, layers: int = 3, model_type: str = "qwen2_5_vl") -> ModelConfig:
    """Return a small model config with small windows: an image within one window would hide mistakes."""
    family = find_family(model_type)
    text = {"mrope_section": (2, 3, 3)}
    if model_type == "qwen2_vl":
        own = {"intermediate_size": 64}
    elif model_type in ("qwen3_vl", "qwen3_vl_moe"):
        text = {"head_dim": 24, "mrope_section": (6, 3, 3)}
        own = {"intermediate_size": 64, "patch_size": 14}
        own |= {"num_position_embeddings": 36, "deepstack_visual_indexes": (2, 0)}
    elif model_type in ("qwen3_5", "qwen3_5_moe"):  # every second layer has attention
        text = {**LAYERS, **RECURRENT, "mrope_section": (2, 1, 1)}
        own = {"intermediate_size": 64, "patch_size": 14, "num_position_embeddings": 36}
    else:
        own = {"intermediate_size": 44, "fullatt_block_indexes": (1, 3), "tokens_per_second": 2}
    if model_type == "qwen3_vl_moe":
        text |= {**EXPERTS, "mlp_only_layers": [1]}
    elif model_type == "qwen3_5_moe":
        text |= {**EXPERTS, "shared_expert_intermediate_size": 20}
    vision = family.vision_config_type(depth=4, hidden_size=32, num_heads=2, out_hidden_size=64, **own)
    if model_type != "qwen3_5_moe":  # it has no dense MLP
        text["intermediate_size"] = 96
    return family.config_type(
        model_type=model_type,
        **{"vocab_size": 300, "hidden_size": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e6} | text,
        num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, image_token_id=IMAGE,
        video_token_id=VIDEO, vision_start_token_id=VISION_START, vision_end_token_id=VISION_END, bos_token_id=1,
        eos_token_id=2, vision_config=vision,
    )  # fmt: skip


@torch.no_grad()
def telling_weights(model: torch.nn.Module, seed: int = 0):
    """Set variance-preserving random matrices, and random biases and norm weights, so that mistakes change logits.

    Swapped height and width in vision rotary embeddings then change logits by 0.1 or more; with the default
    initialization, only by 5e-5, less than any tolerance.
    """
    generator = torch.Generator().manual_seed(seed)
    centered = {  # norms that scale by 1 + weight
        f"{name}.weight"
        for name, m in model.named_modules()
        if type(m).__name__ in ("CenteredRMSNorm", "Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm")
    }
    for name, p in sorted(model.named_parameters()):
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        if name.endswith("bias"):
            p.copy_(0.1 * noise)
        elif name.endswith("A_log"):  # the recurrent state decays over about 10 tokens
            p.copy_(0.5 * noise - 2)
        elif p.dim() == 1:  # norm weights
            p.copy_((name not in centered) + 0.2 * noise)
        elif "embed_tokens" in name:
            p.copy_(2 * noise / p.shape[1] ** 0.5)
        elif name.endswith("_proj"):  # one tensor for all experts in a layer, as in transformers
            p.copy_(noise / p.shape[2] ** 0.5)
        else:
            p.copy_(noise / p[0].numel() ** 0.5)
    return model


def model_of(model_config: ModelConfig, seed: int = 0) -> VisionLanguageModel:
    return telling_weights(find_family(model_config.model_type).build_model(model_config), seed)


def model(
    tied: bool = False, seed: int = 0, dtype: torch.dtype = torch.float32, model_type: str = "qwen2_5_vl"
) -> VisionLanguageModel:
    return model_of(config(tied, model_type=model_type), seed).to(dtype)


def processor() -> Processor:
    return Processor(shapes.tokenizer(), ImageProcessor())


def prompt(
    generator: torch.Generator, grids: list[tuple[int, int, int]], text: int = 5, dtype: torch.dtype = torch.float32
) -> Prompt:
    """Return a prompt with random text around random images and videos, given as (time, height, width) patches."""
    ids = [torch.randint(3, 280, (text,), generator=generator)]
    for t, h, w in grids:
        image = [VISION_START] + [IMAGE if t == 1 else VIDEO] * (t * h * w // 4) + [VISION_END]
        ids += [torch.tensor(image), torch.randint(3, 280, (text,), generator=generator)]
    pixels = torch.randn(sum(t * h * w for t, h, w in grids), 1176, generator=generator, dtype=dtype)
    seconds = torch.full((len(grids),), 0.75)
    return Prompt(torch.cat(ids), pixels, torch.tensor(grids, dtype=torch.long).view(-1, 3), seconds)


def write_video(
    path, frames, rate: int, container=None, codec: str = "ffv1", pix_fmt: str = "bgr0", rotation: int = 0, options=None
):
    """Write (H, W, 3) uint8 frames as a video, by default lossless, displayed with `rotation` degrees."""
    av = pytest.importorskip("av", reason="extra missing: pip install av")
    with av.open(str(path), "w", format=container, options=options or {}) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width, stream.pix_fmt = *frames[0].shape[:2], pix_fmt
        stream.options = {"qp": "0"} if codec == "libx264rgb" else {}
        if rotation:
            stream.set_display_rotation(rotation)
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def adapter_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for name, p in model.named_parameters() if is_adapter(name)]


def completion(generator: torch.Generator, length: int) -> torch.Tensor:
    return torch.randint(3, 280, (length,), generator=generator)


def to_completions(groups: list) -> list[list[Completion]]:
    """Wrap token ids in Completions with all tokens sampled by the policy; return Completions unchanged."""
    return [[x if isinstance(x, Completion) else Completion(x.cpu()) for x in group] for group in groups]


def pack(prompts: list, groups: list, *rest) -> packing.GroupBatch:
    return packing.pack(prompts, to_completions(groups), *rest)
