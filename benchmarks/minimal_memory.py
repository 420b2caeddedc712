"""Count the bytes that minimal.py needs on a GPU, with fake tensors, which have shapes but no values.

    python -m benchmarks.minimal_memory Qwen2.5-VL-3B grpo    # takes about a minute and 1 GB of memory

A step has two rows, because only at the second row in the second step, weights, gradients and optimizer states all
exist. A row has an image with 616 x 616 pixels, 60 text tokens, and answers with 256 tokens, 8 for GRPO. Counted in GB
(10^9 bytes) on 2026-11-29, without the few GB for CUDA itself and for fragmentation:

                      sft    grpo     dpo
    Qwen2.5-VL-3B    70.0    72.2    78.8
    Qwen2.5-VL-7B   149.4   153.2   167.6

With --lora, a GRPO step of the 3B needs 13.8 GB after loading (2026-12-01).
"""

import argparse
import json
import sys
import tempfile
import weakref
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from benchmarks.papers import load_patched

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
SIDE, TEXT, ANSWER = 616, 60, 256  # pixels, text tokens, answer tokens


class Count(TorchDispatchMode):
    """Count the bytes in live storages, and their maximum since the last mark."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = self.largest = 0
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return result

    def add(self, storage):
        if storage._cdata in self.seen:
            return
        self.seen.add(storage._cdata)
        size = (storage.nbytes() + 511) // 512 * 512  # CUDA allocates multiples of 512 bytes
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.remove, storage._cdata, size)

    def remove(self, key, size):
        self.seen.discard(key)
        self.now -= size

    def mark(self, name: str):
        print(f"{name:40} {self.now / 1e9:7.2f} GB, at most {self.peak / 1e9:7.2f} since the last line", flush=True)
        self.largest = max(self.largest, self.peak)
        self.peak = self.now


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


class Indexing(TorchFunctionMode):
    """Replace indexing, which fails with fake tensors, with operators that allocate the same memory."""

    def __init__(self, frequency_count: int):
        super().__init__()
        self.frequency_count = frequency_count

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__getitem__ and isinstance(args[0], FakeTensor):
            return index(*args)
        if function is torch.Tensor.repeat_interleave and isinstance(args[1], torch.Tensor):
            return args[0].new_zeros(self.frequency_count)  # real length depends on unknown values
        return function(*args, **(kwargs or {}))


def index(x, places):
    places = places if isinstance(places, tuple) else (places,)
    is_ellipsis = [place is Ellipsis for place in places]
    if any(is_ellipsis):
        at = is_ellipsis.index(True)
        missing = x.dim() - sum(place is not None for place in places) + 1
        places = places[:at] + (slice(None),) * missing + places[at + 1 :]
    axis = 0
    for place in places:
        if isinstance(place, int):
            x = x.select(axis, place)
            continue
        if place is None:
            x = x.unsqueeze(axis)
        elif isinstance(place, slice):
            start, stop, _ = place.indices(x.shape[axis])
            x = torch.ops.aten.slice.Tensor(x, axis, start, stop)
        else:
            x = x.index_select(axis, place)
        axis += 1
    return x


def recompute_in_backward(layer, *arguments):
    """Imitate minimal.recompute_in_backward on a GPU with fake tensors, which are on the CPU."""
    if torch.is_grad_enabled():
        return checkpoint(layer, *arguments, use_reentrant=False, preserve_rng_state=False)
    return layer(*arguments)


def make_model(minimal, config):
    with torch.device("meta"):
        model = minimal.QwenVL(config)
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = nn.Parameter(torch.empty(weight.shape, device="cpu"))
    if config["tie_word_embeddings"]:
        model.lm_head.weight = model.model["embed_tokens"].weight
    return model


def make_prompt(minimal):
    h = w = SIDE // 14
    length = TEXT + h * w // 4
    ids = torch.ones(length, dtype=torch.long, device="cpu")
    positions = torch.zeros(3, length, dtype=torch.long, device="cpu")
    return minimal.Prompt(ids, positions, [(torch.zeros(h * w, 1176, device="cpu"), h, w)])


def sample(minimal, model, prompt, G: int, count: Count):
    """Compute the prompt, and the first and last completion tokens, with a full-length cache."""
    token = torch.zeros(G, 1, dtype=torch.long, device="cpu")
    position = torch.zeros(3, 1, dtype=torch.long, device="cpu")
    with torch.autocast("cuda", torch.bfloat16, enabled=True), torch.no_grad():
        states, cache = model(prompt.ids[None], prompt.positions, images=prompt.images)
        count.mark("  prompt")
        model.lm_head(states[:, -1].expand(G, -1)).float().softmax(-1)
        length = len(prompt.ids) + ANSWER - 1
        cache = [tuple(x.new_empty(G, x.shape[1], length, x.shape[3]) for x in layer) for layer in cache]
        states, cache = model(token, position, cache)
        model.lm_head(states[:, -1]).float().softmax(-1)
    count.mark("  last token")


def in_bfloat16(model):
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.bfloat16(), requires_grad=False)


def update(model, states: dict):
    """Imitate a fused AdamW step, which allocates only two states per weight."""
    for weight in model.parameters():
        if weight.requires_grad and weight not in states:
            states[weight] = torch.zeros_like(weight), torch.zeros_like(weight)
        weight.grad = None


def train(minimal, model, stage: str, count: Count):
    reference = minimal.make_reference(model) if stage == "dpo" else None
    if reference is not None:
        in_bfloat16(reference)  # like minimal.make_reference on a GPU
    count.mark("reference" if stage == "dpo" else "no reference")
    prompt = make_prompt(minimal)
    answers = torch.zeros({"grpo": 8, "dpo": 2, "sft": 1}[stage], ANSWER, dtype=torch.long, device="cpu")
    states = {}
    for step in (1, 2):
        for row in (1, 2):
            print(f"step {step}, row {row}")
            if stage == "grpo":
                sample(minimal, model, prompt, len(answers), count)
            if reference is not None:
                with torch.no_grad():
                    minimal.log_probabilities(reference, prompt, answers)
                count.mark("  reference's log-probabilities")
            loss = minimal.log_probabilities(model, prompt, answers).sum()
            count.mark("  forward")
            loss.backward()
            del loss
            count.mark("  backward")
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update(model, states)
        count.mark("AdamW")


def main():
    configs = json.loads((ROOT / "tests" / "recorded" / "hub_configs.json").read_text())
    names = [name for name, config in configs.items() if config["model_type"] == "qwen2_5_vl"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=names)
    parser.add_argument("stage", choices=["grpo", "dpo", "sft"])
    parser.add_argument("--lora", action="store_true", help="apply docs/papers/lora.md")
    options = parser.parse_args()
    minimal = load_patched(["lora"] * options.lora)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(configs[options.model]))
        config = minimal.read_config(folder)
    # CUDA autocast computes log_softmax in float32
    log_softmax = torch.Tensor.log_softmax
    in_float32 = mock.patch.object(torch.Tensor, "log_softmax", lambda x, axis: log_softmax(x.float(), axis))
    fused = mock.patch.object(F, "scaled_dot_product_attention", lambda q, k, v, mask: Attention.apply(q, k, v))
    autocast = torch.autocast
    on_cpu = mock.patch.object(torch, "autocast", lambda kind, dtype, enabled: autocast("cpu", dtype))
    with_checkpoints = mock.patch.object(minimal, "recompute_in_backward", recompute_in_backward)
    count = Count()
    with (
        on_cpu,
        with_checkpoints,
        FakeTensorMode(allow_non_fake_inputs=True),
        count,
        Indexing(sum(config["rope_scaling"]["mrope_section"])),
        in_float32,
        fused,
    ):
        model = make_model(minimal, config)
        count.mark("weights")
        if options.lora:
            in_bfloat16(model)  # like add_adapters on a GPU
            minimal.add_adapters(model)
            count.mark("frozen weights and adapters")
        train(minimal, model, options.stage, count)
    print(f"{options.model} {options.stage}: at most {count.largest / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
