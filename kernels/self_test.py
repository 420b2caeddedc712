"""Compare bfloat16 matrix products and Triton kernels with float64 on the CPU, at sizes of real models.

    python -m minivlmrl.kernels.self_test                              # everything, on cuda:0
    python -m minivlmrl.kernels.self_test cuda:3 decode_attention
    python -m minivlmrl.kernels.self_test cuda:0 float32_matmul        # for GPUs without our Triton kernels: T4, V100

Compilers can miscompile a kernel for one GPU: on Hopper, Triton 3.6 and 3.7 computed attention outputs with
errors of 30 to 40 % (triton-lang/triton#11366).
"""

import os
import sys
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minivlmrl.kernels.backend import INTERPRETED
from minivlmrl.kernels.decode_attention import decode_attention
from minivlmrl.kernels.float32_matmul import float32_matmul
from minivlmrl.kernels.linear_log_softmax import linear_log_softmax
from minivlmrl.kernels.nf4_unpack import BLOCK, GROUP, nf4_unpack
from minivlmrl.kernels.selective_log_softmax import selective_log_softmax
from minivlmrl.kernels.window_attention import Segments, window_attention

# Triton's interpreter multiplies bfloat16 matrices incorrectly
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
# vision tower heads: dimension 80 in Qwen2.5-VL, 64 or 72 in Qwen3-VL
WINDOW_HEADS = 2 if INTERPRETED else 16
WINDOW_HEAD_DIMS = (64, 72, 80, 128)
# (key heads, query heads per key head, head dimension): Qwen2.5-VL-3B, -7B, Qwen3.5, a 0.5B text model
DECODERS = ((2, 8, 128), (4, 7, 128), (2, 4, 256), (2, 7, 64))
TEMPERATURE = 0.7
TOLERANCE = 0.02  # maximum relative error; correct bfloat16 kernels have about 0.003


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.detach().double().cpu() - expected).norm() / expected.norm()).item()


def compare(function: Callable, inputs: Sequence[Tensor], device: str) -> list[float]:
    """Return relative errors in a function's results and gradients, compared with float64 on the CPU."""
    leaves = [x.to(device).requires_grad_() for x in inputs]
    exact_leaves = [x.double().requires_grad_() for x in inputs]
    actual = function(*leaves)
    expected = function(*exact_leaves)
    upstream = torch.randn(expected.shape).to(actual.dtype)
    gradients = torch.autograd.grad(actual, leaves, upstream.to(device))
    exact_gradients = torch.autograd.grad(expected, exact_leaves, upstream.double())
    return list(map(relative_error, (actual, *gradients), (expected.detach(), *exact_gradients)))


def check_float32_matmul(device: str) -> list[float]:
    errors = []
    for leading in ((), (2, 3)):
        a, b = (torch.randn(*leading, *size).to(DTYPE) for size in ((40, 256), (256, 80)))
        errors.append(relative_error(float32_matmul(a.to(device), b.to(device)), a.double() @ b.double()))
    return errors


def check_windows(device: str) -> list[float]:
    lengths = [64, 64, 48, 16, 12, 4]
    errors = []
    for head_dim in WINDOW_HEAD_DIMS:
        errors += compare(
            lambda q, k, v: window_attention(q, k, v, Segments(lengths, q.device)),
            [torch.randn(sum(lengths), WINDOW_HEADS, head_dim).to(DTYPE) for _ in range(3)],
            device,
        )
    return errors


def check_decoding(device: str) -> list[float]:
    """Check attention for decoding, with padded prompts and a KV cache that is not full."""
    B, G, P, C = 2, 8, 300, 70  # prompts, completions per prompt, prompt tokens, completion tokens
    R = B * G
    prompt_bias = torch.zeros(B, P)
    prompt_bias[1, 200:] = float("-inf")
    own_bias = torch.zeros(R, C)
    own_bias[:, 50:] = float("-inf")
    bias = torch.cat([prompt_bias.repeat_interleave(G, 0), own_bias], 1)[:, None, None].double()
    errors = []
    for K, heads_per_key, D in DECODERS:
        shapes = [(R, K * heads_per_key, D), *[(B, K, P, D)] * 2, *[(R, K, C, D)] * 2]
        q, k, v, own_k, own_v = (torch.randn(shape).to(DTYPE) for shape in shapes)
        inputs = q, k, v, prompt_bias.to(DTYPE), own_k, own_v, own_bias.to(DTYPE)
        actual = decode_attention(*(x.to(device) for x in inputs))
        keys, values = (
            torch.cat([prompt.repeat_interleave(G, 0), own], 2).double() for prompt, own in ((k, own_k), (v, own_v))
        )
        expected = F.scaled_dot_product_attention(q.double()[:, :, None], keys, values, bias, enable_gqa=True)
        errors.append(relative_error(actual, expected[:, :, 0]))
    return errors


def check_selective_log_softmax(device: str) -> list[float]:
    ids = torch.randint(20_000, (32,))
    return compare(
        lambda z: torch.cat(selective_log_softmax(z, ids.to(z.device), TEMPERATURE)),
        [3 * torch.randn(32, 20_000).to(DTYPE)],
        device,
    )


def check_linear_log_softmax(device: str) -> list[float]:
    rows, vocab = (32, 5_000) if INTERPRETED else (2_048, 10_000)
    ids = torch.randint(vocab, (rows,))
    return compare(
        lambda h, w: torch.cat(linear_log_softmax(h, w, ids.to(h.device), TEMPERATURE)),
        [torch.randn(rows, 64).to(DTYPE), 0.3 * torch.randn(vocab, 64).to(DTYPE)],
        device,
    )


def check_nf4(device: str) -> list[float]:
    num_blocks = 2 * GROUP + 5
    packed = torch.randint(256, (num_blocks * BLOCK // 2,), dtype=torch.uint8)
    scale_indices = torch.randint(256, (num_blocks,), dtype=torch.uint8)
    group_scales, scale_table, values = torch.rand(3), torch.randn(256), torch.randn(16)
    offset = torch.tensor(0.5)
    inputs = [x.to(device) for x in (packed, scale_indices, group_scales, offset)]
    tables = scale_table.to(device), values.to(device)
    actual = nf4_unpack(*inputs, tables=tables, dtype=DTYPE)
    scales = scale_table.double()[scale_indices.int()] * group_scales[torch.arange(num_blocks) // GROUP] + offset
    nibbles = torch.stack([packed >> 4, packed & 15], 1).flatten().int()
    expected = values.double()[nibbles] * scales.repeat_interleave(BLOCK)
    return [relative_error(actual, expected)]


CHECKS = {
    "float32_matmul": check_float32_matmul,
    "window_attention": check_windows,
    "decode_attention": check_decoding,
    "selective_log_softmax": check_selective_log_softmax,
    "linear_log_softmax": check_linear_log_softmax,
    "nf4_unpack": check_nf4,
}


def largest_error(kernel: str, device: str) -> float:
    """Return a kernel's largest relative error, or NaN if a result is NaN."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return torch.tensor(CHECKS[kernel](device), dtype=torch.float64).max().item()


def main(device: str = "cuda:0", *kernels: str):
    """Print the largest relative error per kernel; stop at the first exception."""
    os.environ |= {"MINIVLMRL_KERNELS": "triton", "MINIVLMRL_SELF_TEST": "0"}
    for kernel in kernels or CHECKS:
        print(kernel, largest_error(kernel, device), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
