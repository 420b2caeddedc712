"""Mixture-of-experts (MoE) layers for Qwen3-VL-MoE and Qwen3.5-MoE.

A router selects k of E small MLPs (experts) per token. Experts are plain MLPs, so LoRA, NF4 and FSDP need no special
code. Weight files stack all experts of a layer in two tensors; `split_tensors` and `stack_tensors` convert them.

Dimension letters: k experts per token, N tokens, D hidden_size, E experts.
Source: modeling_qwen3_vl_moe.py and modeling_qwen3_5_moe.py in transformers 5.23.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from minivlmrl.errors import UserError, require
from minivlmrl.kernels.dense_attention import Reorder
from minivlmrl.model.config import ModelConfig
from minivlmrl.model.decoder import DecoderLayer
from minivlmrl.model.families.base import Family
from minivlmrl.model.plain_weights import Weight
from minivlmrl.model.vision import MLP

NumExperts = Annotated[int, "[1, 1e6]"]


@dataclass
class ExpertsConfig(ModelConfig):
    """Decoder config for MoE models; subclasses override the defaults."""

    num_experts: NumExperts = 1
    num_experts_per_tok: NumExperts = 1
    moe_intermediate_size: NumExperts = 1
    # intermediate size of the shared expert, None = no shared expert
    shared_expert_intermediate_size: ClassVar[int | None] = None

    def __post_init__(self):
        chosen = self.num_experts_per_tok
        expected = f"num_experts ({self.num_experts}) or less"
        require(chosen <= self.num_experts, "num_experts_per_tok", chosen, expected)

    def has_experts(self, index: int) -> bool:
        """Return whether a decoder layer has experts instead of a dense MLP."""
        return True


class Experts(nn.Module):
    """MoE layer with k routed experts per token and, in Qwen3.5, a gated shared expert."""

    def __init__(self, model_config: ExpertsConfig, index: int):
        super().__init__()
        self.index = index
        self.top_k = model_config.num_experts_per_tok
        width = model_config.hidden_size
        self.gate = nn.Linear(width, model_config.num_experts, bias=False)
        self.experts = nn.ModuleList(
            MLP(width, model_config.moe_intermediate_size, bias=False) for _ in range(model_config.num_experts)
        )
        self.shared_expert = None
        if model_config.shared_expert_intermediate_size:
            self.shared_expert = MLP(width, model_config.shared_expert_intermediate_size, bias=False)
            self.shared_expert_gate = nn.Linear(width, 1, bias=False)

    def forward(self, x: Tensor, sum_over_ranks: Callable | None = None) -> Tensor:
        """Compute outputs (N, D) from x (N, D), without index_add, which is not deterministic on GPUs.

        Args:
            sum_over_ranks: function that sums token counts over ranks, if weights are sharded (distributed/fsdp.py).
        """
        logits = self.gate(x)
        wide = torch.promote_types(logits.dtype, torch.float32)
        weights, ids = logits.softmax(-1, wide).topk(self.top_k)  # (N, k) probabilities and ids of the selected experts
        weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(logits.dtype)
        order = ids.flatten().argsort(stable=True)  # (N k,) indices sorted by expert, then by token
        back = order.argsort()
        copies = Reorder.apply(x.repeat_interleave(self.top_k, 0), order, back)  # (N k, D) copies, sorted by expert
        counts = self.counts(ids)
        used = counts
        if sum_over_ranks is not None and torch.is_grad_enabled():
            # FSDP reduces gradients over ranks, so an expert must run on all ranks or on none
            used = sum_over_ranks(counts)
        parts = []
        for expert, tokens, uses in zip(self.experts, copies.split(counts), used, strict=True):
            if uses:  # unused experts get no gradient
                parts.append(expert(tokens))
        outputs = Reorder.apply(torch.cat(parts), back, order)
        outputs = outputs.view(*ids.shape, -1)  # expert outputs (N, k, D), most probable expert first
        out = outputs[:, 0] * weights[:, :1]
        for i in range(1, self.top_k):
            out = out + outputs[:, i] * weights[:, i, None]
        if self.shared_expert is not None:
            out = out + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        return out

    def counts(self, ids: Tensor) -> list[int]:
        """Count tokens per expert."""
        if ids.is_meta:  # in a memory estimate, all tokens go to the first expert
            return [ids.numel()] + [0] * (len(self.experts) - 1)
        return ids.flatten().bincount(minlength=len(self.experts)).tolist()


def place_experts(layer: DecoderLayer, model_config: ExpertsConfig, index: int):
    """Replace the MLP of a decoder layer by experts, if the config has experts in this layer."""
    if model_config.has_experts(index):
        layer.mlp = Experts(model_config, index)


# {stacked tensor in weight files: expert weights it contains}
FUSED = {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}


@dataclass
class StackedExperts:
    """Expert weights in a layer, which weight files store as one tensor."""

    experts: list[list[Weight]]  # weights per expert, such as [gate_proj, up_proj]
    transposed: bool

    def stack(self, full: Callable[[Weight], Tensor]) -> Tensor:
        """Stack all experts in one tensor, after gathering sharded weights with the function `full`."""
        experts = []
        for weights in self.experts:
            experts.append(torch.cat([full(weight) for weight in weights]))
        stacked = torch.stack(experts)
        return stacked.mT.contiguous() if self.transposed else stacked


class ExpertsFamily(Family):
    transposed: ClassVar[bool]  # whether weight files have transposed expert weights, as for Qwen3-VL-MoE

    # adapter.target=experts: LoRA adapters for experts and routers
    adapter_targets: ClassVar[dict[str, re.Pattern[str]]] = {
        "experts": re.compile(r"\.mlp\.(experts\.|gate$|shared_expert_gate$)")
    }
    not_quantized = (".mlp.gate",)  # routers are not quantized to NF4
    in_cuda_graphs = False  # CUDA graphs need fixed shapes, but token counts per expert vary
    in_vllm = False

    def read_text(self, text: dict) -> dict:
        """Read num_experts from config.json; transformers 5 calls it num_local_experts."""
        text = dict(text)
        count = text.pop("num_local_experts", None)
        if text.get("num_experts") is None:
            text["num_experts"] = count
        return text

    def split_tensors(
        self, tensors: Iterable[tuple[str, Tensor]], model_config: ExpertsConfig, file: Path
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors from a weight file, with stacked experts split into single weights."""
        for name, tensor in tensors:
            layer_name, _, kind = name.rpartition(".")
            if kind not in FUSED:
                yield name, tensor
                continue
            parts = FUSED[kind]
            E = model_config.num_experts
            size = model_config.moe_intermediate_size
            shape = (E, 2 * size, model_config.hidden_size)
            if kind == "down_proj":
                shape = (E, model_config.hidden_size, size)
            if self.transposed and tensor.shape != shape:
                tensor = tensor.mT
            if tensor.shape != shape:
                raise UserError(
                    f"{file}: the tensor {name} has shape {tuple(tensor.shape)}, but the {E} experts of config.json "
                    f"have {shape}. Check that no expert is missing or transposed. Use the config.json that belongs to "
                    "this folder, or save the model again with save_pretrained."
                )
            for index, expert in enumerate(tensor):
                for part, weight in zip(parts, expert.chunk(len(parts)), strict=True):
                    yield f"{layer_name}.{index}.{part}.weight", weight.contiguous()

    def stack_tensors(self, weights: dict[str, Weight], model_config: ExpertsConfig):
        """Stack all expert weights, as weight files store them."""
        for name in list(weights):
            layer_name, first, _ = name.partition(".0.down_proj")
            if not first or not layer_name.endswith(".mlp.experts"):
                continue
            for kind, parts in FUSED.items():
                experts = []
                for i in range(model_config.num_experts):
                    experts.append([weights.pop(f"{layer_name}.{i}.{part}.weight") for part in parts])
                weights[f"{layer_name}.{kind}"] = StackedExperts(experts, self.transposed)

    def uses_every_parameter(self, model_config: ExpertsConfig, index: int) -> bool:
        return not model_config.has_experts(index)

    def share_counts(self, model: nn.Module, sum_counts: Callable):
        """Make MoE layers in a sharded model sum token counts over ranks."""
        for module in model.modules():
            if isinstance(module, Experts):
                module.forward = partial(module.forward, sum_over_ranks=sum_counts)
