"""The model families Qwen3-VL-MoE and Qwen3.5-MoE, whose decoder layers have mixtures of experts instead of MLPs."""

import re
from dataclasses import replace
from functools import partial

from minivlmrl.extras.families import qwen3_5, qwen3_vl
from minivlmrl.extras.families.experts import count_over_ranks, place_experts, split_experts, stack_experts
from minivlmrl.extras.families.sections import ExpertsConfig
from minivlmrl.model.config import ModelConfig
from minivlmrl.model.decoder import DecoderLayer
from minivlmrl.model.families.registry import ModelSpec

# keys of each model family's config.json that describe experts, with transformers' defaults
QWEN3_VL = {
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
QWEN3_5 = {
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}


class ExpertsLayer(DecoderLayer):
    """Qwen3-VL-MoE decoder layer."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index)
        place_experts(self, config, index)


class RecurrentExpertsLayer(qwen3_5.Layer):
    """Qwen3.5-MoE decoder layer."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index)
        place_experts(self, config, index)


# regular expression for the layers that get adapters with adapter.target=experts: experts and routers
ROUTED = re.compile(r"\.mlp\.(experts\.|gate$|shared_expert_gate$)")


def with_experts(spec: ModelSpec, transposed: bool, **changes) -> ModelSpec:
    """Copy the ModelSpec of a model family with dense MLPs, and replace the MLPs by experts."""
    return replace(
        spec,
        sections={**spec.sections, "experts": ExpertsConfig},
        transposed_experts=transposed,
        split_tensors=partial(split_experts, transposed=transposed),
        stack_tensors=partial(stack_experts, transposed=transposed),
        count_over_ranks=count_over_ranks,
        adapter_targets={"experts": ROUTED},
        not_quantized=(".mlp.gate",),
        in_vllm=False,
        **changes,
    )


DENSE_QWEN3_VL = qwen3_vl.SPECS["qwen3_vl"]
DENSE_QWEN3_5 = qwen3_5.SPECS["qwen3_5"]
SPECS = {
    "qwen3_vl_moe": with_experts(
        DENSE_QWEN3_VL,
        transposed=True,
        architecture="Qwen3VLMoeForConditionalGeneration",
        defaults={**qwen3_vl.TEXT_DEFAULTS, "head_dim": None},
        experts=QWEN3_VL,
        model=partial(DENSE_QWEN3_VL.model, layer_type=ExpertsLayer),
    ),
    "qwen3_5_moe": with_experts(
        DENSE_QWEN3_5,
        transposed=False,
        architecture="Qwen3_5MoeForConditionalGeneration",
        text={**DENSE_QWEN3_5.text, "intermediate_size": 1},  # not used by any layer
        experts=QWEN3_5,
        model=partial(DENSE_QWEN3_VL.model, layer_type=RecurrentExpertsLayer),
    ),
}
