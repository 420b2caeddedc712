"""AdamW whose two moments take 8 bits a value instead of 32 (arXiv 2110.02861).

A row of a moment is cut into blocks of 256 values. A block keeps its largest absolute value in
float32, its scale, and for each value the index of the nearest of 256 numbers between -1 and 1,
which lie closer together near 0. No block crosses a row, and ranks share a weight by rows: any
number of them computes the same codes. bitsandbytes cuts the flat tensor instead.
"""

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256  # values with one scale
SMALLEST = 4096  # moments of a tensor with fewer values, and of a vector, stay in float32
PIECE = 2**24  # values that are in float32 at a time
SIGNED = {"exp_avg": True, "exp_avg_sq": False}  # the moments


def dynamic_code(signed: bool) -> Tensor:
    """List bitsandbytes' 256 numbers, ascending: 0, 1, and twice as many in each of seven decades."""
    numbers = [torch.zeros(1), torch.ones(1)]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
        numbers += [middles, -middles] if signed else [middles]
    return torch.cat(numbers).sort().values


def quantize(values: Tensor, code: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """(rows, n) float32 -> indices (rows, n) uint8 of numbers, scales (rows, ceil(n / block))."""
    rows, n = values.shape
    blocks = F.pad(values, (0, -n % block)).view(rows, -1, block)
    scales = blocks.abs().amax(2)
    shares = blocks * (1 / scales.clamp(min=1e-38))[..., None]
    nearest = torch.bucketize(shares, (code[:-1] + code[1:]) / 2, out_int32=True)
    return nearest.to(torch.uint8).view(rows, -1)[:, :n], scales


def dequantize(indices: Tensor, scales: Tensor, code: Tensor) -> Tensor:
    """Compute the (rows, n) float32 values that quantize's result means."""
    return code[indices.int()] * scales.repeat_interleave(BLOCK, 1)[:, : indices.shape[1]]


class AdamW8bit(torch.optim.Optimizer):
    """torch.optim.AdamW in all but its moments; for weights of 16 bits with Kahan's sum.

    These keep in 16 bits what rounding has taken from them: small updates add up.
    """

    def __init__(self, parameters: Iterable, lr: float, betas=(0.9, 0.999), weight_decay=0.0):
        defaults = {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": weight_decay}
        super().__init__(parameters, defaults)
        self.codes = {name: dynamic_code(signed) for name, signed in SIGNED.items()}

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter] = self.state.get(parameter) or empty_state(parameter)
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict):
        weight = _rows(parameter)
        gradient = _rows(parameter.grad)
        self.codes = {name: code.to(weight.device) for name, code in self.codes.items()}
        state = {name: _rows(value) for name, value in self.state[parameter].items()}
        lr = group["lr"]
        (beta1, beta2) = group["betas"]
        number = state["step"].add_(1).item()
        dtype = torch.promote_types(weight.dtype, torch.float32)
        size = max(1, PIECE // weight.shape[1])
        for rows in (slice(start, start + size) for start in range(0, len(weight), size)):
            piece = {name: value[rows] for name, value in state.items() if name != "step"}
            g = gradient[rows].to(dtype)
            new = weight[rows].to(dtype, copy=True)
            m = self._read(piece, "exp_avg").to(dtype).mul_(beta1).add_(g, alpha=1 - beta1)
            v = self._read(piece, "exp_avg_sq").to(dtype).mul_(beta2)
            v.addcmul_(g, g, value=1 - beta2)
            denominator = (v.sqrt() / math.sqrt(1 - beta2**number)).add_(group["eps"])
            new.mul_(1 - lr * group["weight_decay"])
            new += piece.get("rounded_off", 0)
            new.addcdiv_(m, denominator, value=-lr / (1 - beta1**number))
            weight[rows] = new.to(weight.dtype)
            if "rounded_off" in piece:
                piece["rounded_off"].copy_(new - weight[rows])
            for name, moment in (("exp_avg", m), ("exp_avg_sq", v)):
                if f"{name}_scale" in piece:  # else it is the state itself
                    indices, scales = quantize(moment, self.codes[name])
                    # the update divides by a root: there nothing is rounded down to 0
                    piece[name].copy_(indices.clamp(min=int(name == "exp_avg_sq")))
                    piece[f"{name}_scale"].copy_(scales)

    def _read(self, piece: dict[str, Tensor], name: str) -> Tensor:
        scale = piece.get(f"{name}_scale")
        return piece[name] if scale is None else dequantize(piece[name], scale, self.codes[name])


def empty_state(parameter: Tensor) -> dict[str, Tensor]:
    """Make moments of 0, sharded as the parameter is."""
    parameter = parameter.detach()
    state = {"step": torch.zeros(())}
    if parameter.dtype.itemsize == 2:
        state["rounded_off"] = torch.zeros_like(parameter)
    small = parameter.dim() == 1 or parameter.numel() < SMALLEST
    dtype = torch.promote_types(parameter.dtype, torch.float32) if small else torch.uint8
    for name in SIGNED:
        state[name] = torch.zeros_like(parameter, dtype=dtype)
        if not small:
            blocks = parameter.flatten(1)[:, ::BLOCK]
            state[f"{name}_scale"] = torch.zeros_like(blocks, dtype=torch.float32)
    return state


def _rows(tensor: Tensor) -> Tensor:
    """View what this rank holds of a tensor as (rows, n); a number as it is."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()
    return local.view(len(local), -1) if local.dim() else local
