"""Mixtures of experts, Qwen3-VL-MoE's and Qwen3.5-MoE's: only the MLP of a decoder layer differs.

A router gives each token k of E experts, which are small MLPs. In memory they are plain linear
layers: adapters, 4 bits, sharding and states know them like any other. Files have those of a layer
as two tensors, which are split when they are read and stacked when they are written.

Dimension letters: N tokens, D hidden_size, E experts, k of them for each token, I their size.
Source: modeling_qwen3_vl_moe.py and modeling_qwen3_5_moe.py of transformers 5.23.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from minivlmrl.kernels.dense_attention import Reorder
from minivlmrl.model.config import ExpertsConfig, ModelConfig
from minivlmrl.model.decoder import DecoderLayer
from minivlmrl.model.families.registry import ChosenExperts
from minivlmrl.model.plain_weights import Weight
from minivlmrl.model.vision import MLP


class Experts(nn.Module):
    """An MLP of k experts for each token; Qwen3.5 adds a gated one for all tokens."""

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
        """(N, D) -> (N, D): one product an expert, of all its tokens.

        Rows are moved and never added up where they meet: forward and backward have no atomics.

        Args:
            sum_over_ranks: adds up counts where weights are sharded, see distributed/fsdp.py.
        """
        logits = self.gate(x)
        probabilities, ids = choose_experts(logits, self.top_k)
        weights = probabilities.gather(1, ids)
        weights = (weights / weights.sum(-1, keepdim=True)).to(logits.dtype)  # (N, k)
        order = ids.flatten().argsort(stable=True)  # (N k,): by expert, then by token
        back = order.argsort()
        copies = Reorder.apply(x.repeat_interleave(self.top_k, 0), order, back)  # (N k, D)
        counts = self.counts(ids)
        used = counts
        if sum_over_ranks is not None and torch.is_grad_enabled():
            used = sum_over_ranks(counts)  # with tokens of others it has a gradient here too
        parts = []
        for expert, tokens, uses in zip(self.experts, copies.split(counts), used, strict=True):
            if uses:  # an expert without tokens costs nothing, and has no gradient
                parts.append(expert(tokens))
        per_rank = Reorder.apply(torch.cat(parts), back, order).view(*ids.shape, -1)  # (N, k, D)
        out = per_rank[:, 0] * weights[:, :1]
        for rank in range(1, self.top_k):  # the order of the sum is each token's own
            out = out + per_rank[:, rank] * weights[:, rank, None]
        if self.shared_expert is not None:
            out = out + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        return out

    def counts(self, ids: Tensor) -> list[int]:
        """Count the tokens of each expert; on the meta device, for the plan, the first has all."""
        if ids.is_meta:
            return [ids.numel()] + [0] * (len(self.experts) - 1)
        return ids.flatten().bincount(minlength=len(self.experts)).tolist()


def choose_experts(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Router logits (N, E) -> probabilities (N, E) in float32 or wider, the k likeliest ids (N, k)."""
    probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    return probabilities, probabilities.topk(top_k, dim=-1).indices


@contextmanager
def chosen_experts(model: nn.Module) -> Iterator[Callable[[], ChosenExperts]]:
    """Yield what says by layer what choose_experts returned in the latest forward; {}: no experts.

    The last layer computes selected tokens alone, see TextModel.
    """
    kept: dict[int, tuple[Tensor, int]] = {}

    def keep(block: Experts, router: nn.Module, inputs: tuple, logits: Tensor):
        kept[block.index] = logits, block.top_k  # no more: a backward may compute the layer again

    def chosen() -> ChosenExperts:
        return {layer: choose_experts(*arguments) for layer, arguments in kept.items()}

    with ExitStack() as hooks:
        for block in model.modules():
            if isinstance(block, Experts):
                hooks.enter_context(block.gate.register_forward_hook(partial(keep, block)))
        yield chosen


def place_experts(layer: DecoderLayer, config: ModelConfig, index: int):
    """Give a layer an MLP of experts, where config.experts says so."""
    if config.experts is not None and config.experts.has_experts(index):
        layer.mlp = Experts(config.hidden_size, config.experts, index)


# a tensor of a file, of all experts of a layer -> weights of each of them, in the order of its rows
FUSED = {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}


def split_experts(
    tensors: Iterable[tuple[str, Tensor]], config: ModelConfig, file: Path, *, turned: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of a file, those of all experts of a layer as the weights of linear layers.

    Args:
        turned: they may be transposed too, as those of Qwen3-VL-MoE on the hub.
    Raises:
        ValueError: a tensor has another shape than config.json says.
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
        if turned and tensor.shape != shape:
            tensor = tensor.mT
        if tensor.shape != shape:
            raise ValueError(
                f"{file}: tensor {name} has shape {tuple(tensor.shape)}, {E} experts of config.json "
                f"have {shape}; is one of them missing, or transposed once too often? Take the "
                "folder's own config.json, or save it again with save_pretrained"
            )
        for index, expert in enumerate(tensor):
            for part, weight in zip(parts, expert.chunk(len(parts)), strict=True):
                yield f"{layer_name}.{index}.{part}.weight", weight.contiguous()


@dataclass
class StackedExperts:
    """Weights of all experts of a layer that a file has as one tensor."""

    experts: list[list[Weight]]  # of each expert those of FUSED
    turned: bool

    def stack(self, full: Callable[[Weight], Tensor]) -> Tensor:
        """Make the tensor, of weights that `full` makes."""
        stacked = torch.stack([torch.cat([*map(full, parts)]) for parts in self.experts])
        return stacked.mT.contiguous() if self.turned else stacked


def stack_experts(weights: dict[str, Weight], config: ModelConfig, *, turned: bool):
    """Put StackedExperts in place of the weights of single experts."""
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
            weights[f"{layer_name}.{kind}"] = StackedExperts(experts, turned)


def count_over_ranks(model: nn.Module, sum_counts: Callable):
    """Let the experts of a sharded model know how many tokens all ranks have for each of them."""
    for module in model.modules():
        if isinstance(module, Experts):
            module.forward = partial(module.forward, sum_over_ranks=sum_counts)
