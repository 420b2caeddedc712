"""Count the bytes that minimal.py needs on a GPU, with fake tensors, which have shapes but no values.

    python -m benchmarks.minimal_memory Qwen2.5-VL-3B grpo    # takes about a minute and 1 GB of memory

A step has two rows, because only at the second row in the second step, weights, gradients and optimizer states all
exist. A row has an image with 616 x 616 pixels, 60 text tokens, and answers with 256 tokens, 8 for GRPO. Counted in GB
(10^9 bytes) on 2026-11-29, without the few GB for CUDA itself and for fragmentation:

                      sft    grpo     dpo
    Qwen2.5-VL-3B    70.0    72.2    78.8
    Qwen2.5-VL-7B   149.4   153.2   167.6

With --lora, a GRPO step of the 3B needs 13.8 GB after loading (2026-12-01). Sampling needs less than the gradients, and
is left out.
"""

import argparse
import json
import tempfile
import weakref
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from benchmarks.papers import load_patched

ROOT = Path(__file__).resolve().parents[1]
SIDE, TEXT, ANSWER = 616, 60, 256  # pixels, text tokens, answer tokens
ANSWERS = {"grpo": 8, "dpo": 2, "sft": 1}


class Count(TorchDispatchMode):
    """Count the bytes in live storages, and their maximum."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.seen:
                storage = tensor.untyped_storage()
                size = (storage.nbytes() + 511) // 512 * 512  # CUDA allocates multiples of 512 bytes
                self.seen.add(storage._cdata)
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.remove, storage._cdata, size)
        return result

    def remove(self, key, size):
        self.seen.discard(key)
        self.now -= size


class Attention(torch.autograd.Function):
    """Imitate the memory of a fused kernel, which saves queries, keys, values, output and one number per query."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)
    def forward(ctx, q, k, v):
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx, gradient):
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


def recompute_in_backward(layer, *arguments):
    """Imitate minimal.recompute_in_backward on a GPU with fake tensors, which are on the CPU."""
    if torch.is_grad_enabled():
        return checkpoint(layer, *arguments, use_reentrant=False, preserve_rng_state=False)
    return layer(*arguments)


def in_bfloat16(model):
    """Convert frozen layers, like make_reference and add_adapters on a GPU."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.bfloat16(), requires_grad=False)


def train(minimal, model, stage: str):
    """Take two steps with two rows each."""
    reference = minimal.make_reference(model) if stage == "dpo" else None
    if reference is not None:
        in_bfloat16(reference)
    side = SIDE // 14
    length = TEXT + side**2 // 4
    ids, positions = torch.ones(length, dtype=torch.long), torch.zeros(3, length, dtype=torch.long)
    prompt = minimal.Prompt(ids, positions, [(torch.zeros(side**2, 1176), side, side)])
    answers = torch.zeros(ANSWERS[stage], ANSWER, dtype=torch.long)
    states = []
    for _ in range(2):
        for _ in range(2):
            if reference is not None:
                with torch.no_grad():
                    minimal.log_probabilities(reference, prompt, answers)
            minimal.log_probabilities(model, prompt, answers).sum().backward()
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        # a fused AdamW allocates two states per weight
        states = states or [torch.zeros_like(weight) for weight in trained for _ in range(2)]
        for weight in trained:
            weight.grad = None


def main():
    configs = json.loads((ROOT / "tests" / "recorded" / "hub_configs.json").read_text())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=[name for name in configs if name.startswith("Qwen2.5-VL")])
    parser.add_argument("stage", choices=ANSWERS)
    parser.add_argument("--lora", action="store_true", help="apply docs/papers/lora.md")
    options = parser.parse_args()
    minimal = load_patched(["lora"] * options.lora)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(configs[options.model]))
        config = minimal.read_config(folder)
    frequencies = sum(config["rope_scaling"]["mrope_section"])
    log_softmax, repeat_interleave, autocast = torch.Tensor.log_softmax, torch.Tensor.repeat_interleave, torch.autocast

    def repeat(x, repeats, *axis):
        if isinstance(repeats, int):
            return repeat_interleave(x, repeats, *axis)
        return x.new_zeros(frequencies)  # the real length depends on values

    count = Count()
    replaced = [  # what a GPU does, and what fake tensors cannot know
        (torch.Tensor, "log_softmax", lambda x, axis: log_softmax(x.float(), axis)),
        (torch.Tensor, "repeat_interleave", repeat),
        (F, "scaled_dot_product_attention", lambda q, k, v, mask: Attention.apply(q, k, v)),
        (torch, "autocast", lambda kind, dtype, enabled: autocast("cpu", dtype)),
        (minimal, "recompute_in_backward", recompute_in_backward),
    ]
    with FakeTensorMode(), count, ExitStack() as stack:
        for owner, name, function in replaced:
            stack.enter_context(mock.patch.object(owner, name, function))
        model = minimal.QwenVL(config)
        if config["tie_word_embeddings"]:
            model.lm_head.weight = model.model["embed_tokens"].weight
        if options.lora:
            in_bfloat16(model)
            minimal.add_adapters(model)
        count.peak = count.now
        train(minimal, model, options.stage)
    print(f"{options.model} {options.stage}: at most {count.peak / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
