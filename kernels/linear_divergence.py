"""Divergence of two models' distributions from their hidden states, without all (M, V) logits.

Derivation. With p = softmax(h W^T / T) of the student, q of the teacher and m = b q + (1 - b) p:

    b = 0  D = KL(q || p)                         dD/dz = (p - q) / T
    b = 1  D = KL(p || q)                         dD/dz = p (log p - log q - D) / T
    else   D = b KL(q || m) + (1 - b) KL(p || m)  dD/dz = (1 - b) p (log p - log m - KL(p || m)) / T
"""

import math

import torch
from torch import Tensor

from minivlmrl.kernels.float32_matmul import float32_matmul
from minivlmrl.kernels.linear_log_softmax import accumulate_, rows_of_piece


class LinearDivergence(torch.autograd.Function):
    """Weighted sum of divergences, differentiable in the student, and each of them (M,), in nats.

    apply() takes the student's states h (M, D) and head w (V, D), those of the teacher, whose D may
    be another, weights (M,) in float32 (float64 of float64), b and the temperature. A few rows at a
    time are multiplied, with their gradient at once.

    Source: TRL's GKDTrainer.generalized_jsd_loss; arXiv 2306.13649 eq. 1.
    """

    @staticmethod
    def forward(ctx, h, w, teacher_h, teacher_w, weights, beta, temperature):
        grad_h = torch.zeros_like(h, dtype=weights.dtype)
        grad_w = torch.zeros_like(w, dtype=weights.dtype)
        values = torch.zeros_like(weights)
        size = rows_of_piece(len(h), len(w), h.device.type)
        for start in range(0, len(h), size):
            rows = slice(start, start + size)
            log_p = (float32_matmul(h[rows], w.T) / temperature).log_softmax(-1)
            log_q = (float32_matmul(teacher_h[rows], teacher_w.T) / temperature).log_softmax(-1)
            values[rows], dz = divergence(log_p, log_q, beta)
            dz = (dz * (weights[rows, None] / temperature)).to(h.dtype)
            accumulate_(grad_h[rows], dz, w)
            if ctx.needs_input_grad[1]:
                accumulate_(grad_w, dz.T, h[rows])
        ctx.save_for_backward(grad_h.to(h.dtype), grad_w.to(w.dtype))
        ctx.mark_non_differentiable(values)
        return (values * weights).sum(), values

    @staticmethod
    def backward(ctx, g, _):
        grad_h, grad_w = ctx.saved_tensors
        return grad_h * g, grad_w * g, None, None, None, None, None


def divergence(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """(m,) divergences of log-probabilities (m, V), and (m, V) their gradient to z / T."""
    p = log_p.exp()
    q = log_q.exp()
    if beta == 0:
        return (q * (log_q - log_p)).sum(-1), p - q
    if beta == 1:
        value = (p * (log_p - log_q)).sum(-1)
        return value, p * (log_p - log_q - value[:, None])
    log_m = torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
    student = (p * (log_p - log_m)).sum(-1)  # KL(p || m)
    teacher = (q * (log_q - log_m)).sum(-1)  # KL(q || m)
    gradient = (1 - beta) * p * (log_p - log_m - student[:, None])
    return beta * teacher + (1 - beta) * student, gradient
