"""AdamW with 8-bit instead of 32-bit moments (arXiv 2110.02861).

Rows of a moment tensor are split into blocks of 256 values. A block is stored as 256 bytes and a float32 scale, which
is the largest absolute value in the block. A byte is an index into 256 fixed numbers between -1 and 1, which are denser
near 0. FSDP shards whole rows, so all 256 values of a block are on one rank.

Option: `optimizer: {name: adamw_8bit}`.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from minivlmrl.distributed.weights import is_part
from minivlmrl.kernels.nf4_unpack import GROUP
from minivlmrl.model.nf4 import dequantize, dynamic_code, quantize

SMALLEST = 4096  # smaller tensors, and all vectors, keep float32 moments
PIECE = 2**24  # values to dequantize at a time, to limit memory
SIGNED = {"exp_avg": True, "exp_avg_sq": False}  # {moment: whether values may be negative}


class AdamW8bit(torch.optim.Optimizer):
    """torch.optim.AdamW with 8-bit moments, and Kahan summation for 16-bit weights.

    Kahan summation stores a weight's rounding error in 16 more bits, so small updates are not lost.
    """

    def __init__(self, parameters: Iterable, lr: float, betas: tuple[float, float], weight_decay: float):
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        """Update all parameters with a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self.state[parameter] = empty_state(parameter)
                state = self.state[parameter]
                num_steps = state["step"].add_(1).item()
                weight = _rows(parameter)
                gradient = _rows(parameter.grad)
                moments = {name: _rows(value) for name, value in state.items() if name != "step"}
                num_rows = max(1, PIECE // weight.shape[1])
                for start in range(0, len(weight), num_rows):
                    rows = slice(start, start + num_rows)
                    piece = {name: value[rows] for name, value in moments.items()}
                    self._update_rows(weight[rows], gradient[rows], piece, num_steps, group)

    def _update_rows(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], num_steps: float, group: dict):
        """Update a chunk of rows with AdamW (arXiv 1711.05101, algorithm 2)."""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        learning_rate = group["lr"]
        beta1, beta2 = group["betas"]
        gradient = gradient.to(dtype)
        m = self._read(state, "exp_avg").to(dtype)
        m.mul_(beta1).add_(gradient, alpha=1 - beta1)
        v = self._read(state, "exp_avg_sq").to(dtype)
        v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        correction1 = 1 - beta1**num_steps
        correction2 = 1 - beta2**num_steps
        denominator = v.sqrt() / math.sqrt(correction2)
        denominator.add_(group["eps"])
        new_weight = weight.to(dtype, copy=True)
        new_weight.mul_(1 - learning_rate * group["weight_decay"])
        new_weight += state.get("rounded_off", 0)
        new_weight.addcdiv_(m, denominator, value=-learning_rate / correction1)
        weight.copy_(new_weight)
        if "rounded_off" in state:
            state["rounded_off"].copy_(new_weight - weight)
        self._write(state, "exp_avg", m)
        self._write(state, "exp_avg_sq", v)

    def _read(self, state: dict[str, Tensor], name: str) -> Tensor:
        """Return a moment tensor, dequantized if it is stored in 8 bits."""
        if f"{name}_scale" not in state:
            return state[name]
        indices = state[name]
        code = dynamic_code(SIGNED[name], indices.device)
        return dequantize(indices, state[f"{name}_scale"], code)

    def _write(self, state: dict[str, Tensor], name: str, moment: Tensor):
        """Store a moment tensor, quantized to 8 bits unless the parameter is small."""
        if f"{name}_scale" not in state:  # _update_rows has already changed float32 moments in place
            return
        code = dynamic_code(SIGNED[name], moment.device)
        indices, scales = quantize(moment, code)
        # avoid 0: AdamW divides by the square root of exp_avg_sq
        if name == "exp_avg_sq":
            indices.clamp_(min=1)
        state[name].copy_(indices)
        state[f"{name}_scale"].copy_(scales)


def empty_state(parameter: Tensor) -> dict[str, Tensor]:
    """Create the optimizer state of a new parameter, sharded like the parameter."""
    parameter = parameter.detach()
    state = {"step": torch.zeros(())}
    if parameter.dtype.itemsize == 2:
        state["rounded_off"] = torch.zeros_like(parameter)
    is_small = parameter.dim() == 1 or parameter.numel() < SMALLEST
    moment_dtype = torch.promote_types(parameter.dtype, torch.float32) if is_small else torch.uint8
    for name in SIGNED:
        state[name] = torch.zeros_like(parameter, dtype=moment_dtype)
        if not is_small:
            blocks = parameter.flatten(1)[:, ::GROUP]  # one value per block of 256
            state[f"{name}_scale"] = torch.zeros_like(blocks, dtype=torch.float32)
    return state


def _rows(tensor: Tensor) -> Tensor:
    """View this rank's tensor shard as a matrix (rows, n)."""
    local_rows = tensor.to_local() if is_part(tensor) else tensor.detach()
    row_size = math.prod(local_rows.shape[1:])
    return local_rows.view(len(local_rows), row_size)
