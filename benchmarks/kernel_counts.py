"""Count the kernels in a decode step and in a training micro-batch, without a GPU.

    python benchmarks/kernel_counts.py                   # Qwen2.5-VL-3B in bfloat16, without and with adapters
    python benchmarks/kernel_counts.py --size toy

The model is on the meta device, where tensors have shapes but no values, and a dispatch mode counts the operators below
autograd. Each operator that computes something counts as one kernel; views and allocations do not. The meta device
stands for a GPU: RMSNorm, the head and a decode step's attention count as one operator each, as on a GPU. Other
Triton kernels count as the torch operators that they replace. The counts are therefore no exact launch counts, but they
show the effect when the code changes.
"""

import argparse
from collections import Counter
from contextlib import ExitStack
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from sizes import config_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minivlmrl.config.options import LoRAOptions
from minivlmrl.data.rows import Completion, Prompt
from minivlmrl.distributed.weights import rollout_weights
from minivlmrl.generation import cuda_graphs, generate
from minivlmrl.generation.generate import make_token_sampler, prefill, sample_by_uniforms
from minivlmrl.kernels.rms_norm import RMSNorm
from minivlmrl.model.config import ModelConfig
from minivlmrl.model.families.registry import FAMILIES
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.lora import inject_adapters
from minivlmrl.model.packing import GroupBatch, pack

NO_KERNEL = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "_unsafe_view"}
TEXT, SIDE, GENERATIONS, NEW = 100, 64, 8, 256  # text tokens, patches per side, completions and their tokens


class KernelCounter(TorchDispatchMode):
    """Counts the operators that compute something, by name."""

    def __init__(self):
        super().__init__()
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        has_kernel = partial(torch._C._dispatch_has_kernel_for_dispatch_key, function.name())
        if has_kernel("CompositeImplicitAutograd") and not has_kernel("CPU"):
            with self:  # inference mode does not decompose these operators
                return function.decompose(*args, **(kwargs or {}))
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        is_view = any(x.alias_info and not x.alias_info.is_write for x in function._schema.arguments)
        on_meta = any(isinstance(x, Tensor) and x.is_meta for x in tree_leaves((args, kwargs, result)))
        if on_meta and not is_view and name not in NO_KERNEL:
            self.kernels[name] += 1
        return result


@torch.library.custom_op("kernel_counts::decode_attention", mutates_args=())
def decode_attention(q: Tensor) -> Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("kernel_counts::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("kernel_counts::rms_norm_backward", mutates_args=())
def rms_norm_backward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


decode_attention.register_fake(torch.empty_like)
rms_norm.register_fake(lambda x, weight: torch.empty_like(x))
rms_norm_backward.register_fake(lambda x, weight: (torch.empty_like(x), torch.empty_like(weight)))
rms_norm.register_autograd(
    lambda ctx, grad: rms_norm_backward(*ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, **_options) -> Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=("3b", "7b", "toy"), default="3b")
    parser.add_argument("--r", type=int, default=64, help="rank of the adapters")
    parser.add_argument("--names", action="store_true", help="print the number of kernels of each name")
    options = parser.parse_args()
    print("| adapters | decode step | sampling | forward of a micro-batch | backward |\n|---|---|---|---|---|")
    for r in (0, options.r):
        parts = count(config_of(options.size), r)
        print(f"| {f'r {r}' if r else 'none'} | {' | '.join(str(part.total()) for part in parts)} |")
        if options.names:
            print(*(dict(part.most_common()) for part in parts), sep="\n")


def count(config: ModelConfig, r: int) -> list[Counter[str]]:
    """Count the kernels in a decode step, in sampling its tokens, and in a forward and a backward pass."""
    with torch.device("meta"):
        model = FAMILIES[config.model_type].model(config).bfloat16()
    inject_adapters(model, LoRAOptions(r=r))
    patches = {
        RMSNorm: {"forward": lambda norm, x: rms_norm(x, norm.weight)},
        F: {"scaled_dot_product_attention": fused_attention},
        generate: {"float32_matmul": partial(torch.mm, out_dtype=torch.float32)},
        cuda_graphs: {"fits": lambda q: True, "decode_attention": lambda q, *_: decode_attention(q)},
    }
    with ExitStack() as stack:
        for owner, functions in patches.items():
            stack.enter_context(mock.patch.multiple(owner, **functions))
        decode, sample = count_decoding(model)
        with KernelCounter() as forward:
            logps, entropies = per_token_logps(model, make_batch(config, GENERATIONS))
        with KernelCounter() as backward:
            torch.autograd.backward([logps, entropies], [torch.empty_like(logps), torch.empty_like(entropies)])
    return [decode.kernels, sample.kernels, forward.kernels, backward.kernels]


@torch.no_grad()
def count_decoding(model) -> tuple[KernelCounter, KernelCounter]:
    """Count the kernels in the decode step that a CUDA graph captures, and in sampling a token for each row."""
    prompt_index = torch.zeros(GENERATIONS, dtype=torch.long)
    uniforms = torch.empty(GENERATIONS, NEW, dtype=torch.float64)
    sample_token = make_token_sampler(1.0, [0], sample_by_uniforms(uniforms, "meta"), device="meta")
    decode = cuda_graphs.CapturedDecode()
    with rollout_weights(model, gather_weights=True) as used:
        logits, attention = prefill(used, make_batch(model.config, 0), prompt_index, NEW, decode)
        with KernelCounter() as sample:
            ids, *_ = sample_token(logits, attention.rows, attention.newest + 1)
        attention.advance()
        decode(used, ids, attention)  # the first step also clones its input
        attention.advance()
        with KernelCounter() as step:
            decode(used, ids, attention)
    return step, sample


def make_batch(config: ModelConfig, generations: int) -> GroupBatch:
    """Pack one prompt with an image and its completions on the meta device."""
    merged = SIDE**2 // config.vision_config.spatial_merge_size**2
    ids = torch.cat([torch.full((merged,), config.image_token_id), torch.zeros(TEXT, dtype=torch.long)])
    patches = torch.empty(SIDE**2, config.vision_config.patch_dim, device="meta")
    prompt = Prompt(ids, patches, torch.tensor([[1, SIDE, SIDE]]))
    return pack([prompt], [[Completion(torch.zeros(NEW, dtype=torch.long))] * generations], config, "meta")


if __name__ == "__main__":
    main()
