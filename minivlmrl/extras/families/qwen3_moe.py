"""Qwen3-VL-MoE and Qwen3.5-MoE: decoders with mixture-of-experts layers instead of MLPs."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from minivlmrl.errors import require
from minivlmrl.extras.families.experts import ExpertsConfig, ExpertsFamily, NumExperts, place_experts
from minivlmrl.extras.families.qwen3_5 import Layer, Qwen3_5, Qwen3_5Config
from minivlmrl.extras.families.qwen3_vl import Qwen3VL, Qwen3VLConfig
from minivlmrl.model.config import Size
from minivlmrl.model.decoder import DecoderLayer


@dataclass
class Qwen3VLMoeConfig(Qwen3VLConfig, ExpertsConfig):
    """Qwen3-VL-MoE decoder config with transformers defaults."""

    head_dim: Size = 0  # 0 = hidden_size / num_attention_heads
    num_experts: NumExperts = 60
    num_experts_per_tok: NumExperts = 4
    moe_intermediate_size: NumExperts = 1408
    # indices of layers with a dense MLP
    mlp_only_layers: list[Annotated[int, ">= 0"]] = field(default_factory=list)
    decoder_sparse_step: NumExperts = 1  # every n-th layer has experts

    def __post_init__(self):
        super().__post_init__()
        if not self.head_dim:
            self.head_dim = self.hidden_size // self.num_attention_heads
        size = self.moe_intermediate_size
        require(
            self.hidden_size not in (size, 2 * size),
            "moe_intermediate_size",
            size,
            "neither hidden_size nor half of it, because then the shapes in a file would not show whether the experts "
            "are transposed",
        )

    def has_experts(self, index: int) -> bool:
        return index not in self.mlp_only_layers and (index + 1) % self.decoder_sparse_step == 0


@dataclass
class Qwen3_5MoeConfig(Qwen3_5Config, ExpertsConfig):
    """Qwen3.5-MoE decoder config with transformers defaults."""

    intermediate_size: ClassVar[int] = 1  # not used: every layer has experts instead of an MLP
    num_experts: NumExperts = 256
    num_experts_per_tok: NumExperts = 8
    moe_intermediate_size: NumExperts = 512
    shared_expert_intermediate_size: NumExperts = 512

    def __post_init__(self):
        Qwen3_5Config.__post_init__(self)
        ExpertsConfig.__post_init__(self)


class ExpertsLayer(DecoderLayer):
    """Qwen3-VL-MoE decoder layer."""

    def __init__(self, model_config: Qwen3VLMoeConfig, index: int):
        super().__init__(model_config, index)
        place_experts(self, model_config, index)


class RecurrentExpertsLayer(Layer):
    """Qwen3.5-MoE decoder layer."""

    def __init__(self, model_config: Qwen3_5MoeConfig, index: int):
        super().__init__(model_config, index)
        place_experts(self, model_config, index)


class Qwen3VLMoe(ExpertsFamily, Qwen3VL):
    architecture = "Qwen3VLMoeForConditionalGeneration"
    config_type = Qwen3VLMoeConfig
    layer_type = ExpertsLayer
    supported: ClassVar[dict[str, tuple]] = {**Qwen3VL.supported, "norm_topk_prob": (True,)}
    transposed = True


class Qwen3_5Moe(ExpertsFamily, Qwen3_5):
    architecture = "Qwen3_5MoeForConditionalGeneration"
    config_type = Qwen3_5MoeConfig
    layer_type = RecurrentExpertsLayer
    supported: ClassVar[dict[str, tuple]] = {**Qwen3_5.supported, "norm_topk_prob": (True,)}
    transposed = False
