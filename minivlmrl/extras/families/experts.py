"""Mixtures of experts (MoE), which replace the decoder MLPs in Qwen3-VL-MoE and Qwen3.5-MoE.

For each token, a router selects k of E experts, which are small MLPs. Each expert is a module of the class MLP, so that
LoRA, NF4 and FSDP need no code for experts. Weight files have two tensors with all experts of a layer: `split_experts`
splits them when a model is loaded, and `stack_experts` stacks them when a model is saved.

Dimension letters: k experts per token, N tokens, D hidden_size, E experts.
Source: modeling_qwen3_vl_moe.py and modeling_qwen3_5_moe.py in transformers 5.23.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from minivlmrl.extras.families.sections import ExpertsConfig
from minivlmrl.kernels.dense_attention import Reorder
from minivlmrl.model.config import ModelConfig
from minivlmrl.model.decoder import DecoderLayer
from minivlmrl.model.plain_weights import Weight
from minivlmrl.model.vision import MLP


class Experts(nn.Module):
    """MoE layer with k routed experts per token; Qwen3.5 adds a gated shared expert."""

    def __init__(self, width: int, sizes: ExpertsConfig, index: int):
        super().__init__()
        self.index = index
        self.top_k = sizes.num_experts_per_tok
        self.gate = nn.Linear(width, sizes.num_experts, bias=False)
        self.experts = nn.ModuleList(
            MLP(width, sizes.moe_intermediate_size, bias=False) for _ in range(sizes.num_experts)
        )
        self.shared_expert = None
        if sizes.shared_expert_intermediate_size:
            self.shared_expert = MLP(width, sizes.shared_expert_intermediate_size, bias=False)
            self.shared_expert_gate = nn.Linear(width, 1, bias=False)

    def forward(self, x: Tensor, sum_over_ranks: Callable | None = None) -> Tensor:
        """Compute the MoE layer's outputs (N, D) for tokens x (N, D).

        The MoE layer reorders tokens instead of calling index_add, which is not deterministic on GPUs.

        Args:
            sum_over_ranks: function that sums expert token counts over ranks, if the
                weights are sharded; see distributed/fsdp.py.
        """
        logits = self.gate(x)
        probabilities, ids = choose_experts(logits, self.top_k)
        weights = probabilities.gather(1, ids)
        weights = (weights / weights.sum(-1, keepdim=True)).to(logits.dtype)  # (N, k)
        order = ids.flatten().argsort(stable=True)  # (N k,) sorted by expert, then by token
        back = order.argsort()
        copies = Reorder.apply(x.repeat_interleave(self.top_k, 0), order, back)  # (N k, D)
        counts = self.counts(ids)
        used = counts
        if sum_over_ranks is not None and torch.is_grad_enabled():
            # FSDP sums an expert's gradients over all ranks, so if one rank needs an expert, all ranks must run it.
            used = sum_over_ranks(counts)
        parts = []
        for expert, tokens, uses in zip(self.experts, copies.split(counts), used, strict=True):
            if uses:  # an expert without tokens does not run, and gets no gradient
                parts.append(expert(tokens))
        per_rank = Reorder.apply(torch.cat(parts), back, order).view(*ids.shape, -1)  # (N, k, D)
        out = per_rank[:, 0] * weights[:, :1]
        for rank in range(1, self.top_k):  # summed in the router's probability order
            out = out + per_rank[:, rank] * weights[:, rank, None]
        if self.shared_expert is not None:
            out = out + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        return out

    def counts(self, ids: Tensor) -> list[int]:
        if ids.is_meta:  # token ids are unknown in a memory estimate, so the first expert gets all tokens
            return [ids.numel()] + [0] * (len(self.experts) - 1)
        return ids.flatten().bincount(minlength=len(self.experts)).tolist()


def choose_experts(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Select the k most probable experts for each token from router logits (N, E).

    Returns:
        probabilities (N, E) in float32 or wider, and ids (N, k).
    """
    probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    return probabilities, probabilities.topk(top_k, dim=-1).indices


def place_experts(layer: DecoderLayer, config: ModelConfig, index: int):
    """Replace the MLP of a decoder layer by a mixture of experts, if config.json says that the layer has experts."""
    if config.experts is not None and config.experts.has_experts(index):
        layer.mlp = Experts(config.hidden_size, config.experts, index)


# a weight file stores gate_proj and up_proj of all experts as one tensor, gate_up_proj
FUSED = {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}


def split_experts(
    tensors: Iterable[tuple[str, Tensor]], config: ModelConfig, file: Path, *, transposed: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a weight file, and split each tensor of all experts into the experts' own weights.

    Args:
        transposed: whether stacked experts may be transposed, as in Qwen3-VL-MoE on the hub.
    Raises:
        ValueError: a stacked tensor's shape does not match config.json.
    """
    for name, tensor in tensors:
        layer_name, _, kind = name.rpartition(".")
        if config.experts is None or kind not in FUSED:
            yield name, tensor
            continue
        parts = FUSED[kind]
        E = config.experts.num_experts
        size = config.experts.moe_intermediate_size
        shape = (E, 2 * size, config.hidden_size)
        if kind == "down_proj":
            shape = (E, config.hidden_size, size)
        if transposed and tensor.shape != shape:
            tensor = tensor.mT
        if tensor.shape != shape:
            raise ValueError(
                f"{file}: the tensor {name} has shape {tuple(tensor.shape)}, but the {E} experts of config.json have "
                f"{shape}. Check that no expert is missing or transposed. Use the config.json that belongs to this "
                "folder, or save the model again with save_pretrained."
            )
        for index, expert in enumerate(tensor):
            for part, weight in zip(parts, expert.chunk(len(parts)), strict=True):
                yield f"{layer_name}.{index}.{part}.weight", weight.contiguous()


@dataclass
class StackedExperts:
    """Weights of all experts in a layer, which a weight file stores as one tensor."""

    experts: list[list[Weight]]  # for each expert, the weights that FUSED lists
    transposed: bool

    def stack(self, full: Callable[[Weight], Tensor]) -> Tensor:
        """Stack the weights of all experts; `full` is a function that gathers a sharded weight."""
        stacked = torch.stack([torch.cat([*map(full, parts)]) for parts in self.experts])
        return stacked.mT.contiguous() if self.transposed else stacked


def stack_experts(weights: dict[str, Weight], config: ModelConfig, *, transposed: bool):
    """Replace the weights of single experts by stacked weights of all experts, in place."""
    if config.experts is None:
        return
    for name in list(weights):
        layer_name, first, _ = name.partition(".0.down_proj")
        if not first or not layer_name.endswith(".mlp.experts"):
            continue
        for kind, parts in FUSED.items():
            experts = []
            for i in range(config.experts.num_experts):
                experts.append([weights.pop(f"{layer_name}.{i}.{part}.weight") for part in parts])
            weights[f"{layer_name}.{kind}"] = StackedExperts(experts, transposed)


def count_over_ranks(model: nn.Module, sum_counts: Callable):
    """Make the MoE layers of a sharded model add up each expert's token count over all ranks."""
    for module in model.modules():
        if isinstance(module, Experts):
            module.forward = partial(module.forward, sum_over_ranks=sum_counts)
