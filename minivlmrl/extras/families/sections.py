"""Sections of a ModelConfig that only Qwen3.5 and mixtures of experts have."""

from dataclasses import dataclass, field
from typing import Annotated

from minivlmrl.errors import check_field
from minivlmrl.model.config import ModelConfig, Size

NumExperts = Annotated[int, "[1, 1e6]"]


@dataclass(frozen=True)
class ExpertsConfig:
    """Mixture-of-experts sizes, named as in config.json."""

    num_experts: NumExperts  # E
    num_experts_per_tok: NumExperts  # k
    moe_intermediate_size: NumExperts  # I
    # width of the shared expert, which processes all tokens; None without a shared expert
    shared_expert_intermediate_size: NumExperts | None = None
    # indices of decoder layers with a dense MLP instead of experts
    mlp_only_layers: list[Annotated[int, ">= 0"]] = field(default_factory=list)
    decoder_sparse_step: NumExperts = 1  # every decoder_sparse_step-th layer has experts

    def has_experts(self, index: int) -> bool:
        return index not in self.mlp_only_layers and (index + 1) % self.decoder_sparse_step == 0

    def check(self, config: ModelConfig, transposed: bool):
        """Raise ValueError for sizes of experts in config.json that minivlmrl cannot load.

        `transposed` is True if the experts' matrices may be transposed in a weight file.
        """
        size, chosen = self.moe_intermediate_size, self.num_experts_per_tok
        check_field(
            chosen <= self.num_experts, "num_experts_per_tok", chosen, f"num_experts ({self.num_experts}) or less"
        )
        check_field(
            not transposed or config.hidden_size not in (size, 2 * size),
            "moe_intermediate_size",
            size,
            "neither hidden_size nor half of it, because then the shapes in a file would not show whether the experts "
            "are transposed",
        )


@dataclass(frozen=True)
class RecurrentConfig:
    """Sizes in Qwen3.5's recurrent layers, named as in config.json."""

    linear_num_key_heads: Size
    linear_num_value_heads: Size
    linear_key_head_dim: Size
    linear_value_head_dim: Size
    linear_conv_kernel_dim: Annotated[int, ">= 2"]  # convolution kernel size, in tokens

    def check(self, config: ModelConfig, transposed: bool):
        """Raise ValueError if the sizes of recurrent layers in config.json contradict each other."""
        types = list(config.layer_types)
        check_field(
            len(types) == config.num_hidden_layers and "full_attention" in types,
            "layer_types",
            types,
            f"a list of {config.num_hidden_layers} layer types with at least one full_attention",
        )
        num_values, num_keys = self.linear_num_value_heads, self.linear_num_key_heads
        name = "linear_num_key_heads"
        check_field(num_values % num_keys == 0, name, num_keys, f"a divisor of linear_num_value_heads ({num_values})")
