"""Divergence of two models' distributions from their hidden states, without all (M, V) logits.

Derivation. With p = softmax(h W^T / T) of the student, q of the teacher and m = b q + (1 - b) p:

    b = 0     D = KL(q || p)                                dD/dz = (p - q) / T
    b = 1     D = KL(p || q)                                dD/dz = p (log p - log q - D) / T
    else      D = b KL(q || m) + (1 - b) KL(p || m)         dD/dz = (1 - b) p (log p - log m - KL(p || m)) / T

since sum_j m_j d log m_j = 0. The teacher has no gradient. The forward computes a few rows at a
time, their loss and its gradient dz, and multiplies dz: no logits are computed twice or kept.
"""

import math

import torch
from torch import Tensor

from minivlmrl.kernels.float32_matmul import float32_matmul
from minivlmrl.kernels.linear_log_softmax import _rows, accumulate_


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, w, teacher_h, teacher_w, weights, beta, temperature):
        wide, size = weights.dtype, _rows(len(h), len(w), h.device.type)
        needs_h, needs_w = ctx.needs_input_grad[:2]
        grads = [torch.zeros_like(x, dtype=wide) for x in (h, w)]
        found = []
        for start in range(0, len(h), size):
            rows = slice(start, start + size)
            log_p = (float32_matmul(h[rows], w.T) / temperature).log_softmax(-1)
            log_q = (float32_matmul(teacher_h[rows], teacher_w.T) / temperature).log_softmax(-1)
            value, dz = divergence(log_p, log_q, beta)
            found.append(value)
            dz = (dz * (weights[rows, None] / temperature)).to(h.dtype)
            if needs_h:
                accumulate_(grads[0][rows], dz, w)
            if needs_w:
                accumulate_(grads[1], dz.T, h[rows])
        ctx.save_for_backward(*(g.to(x.dtype) for g, x in zip(grads, (h, w), strict=True)))
        values = torch.cat([*found, weights[:0]])
        ctx.mark_non_differentiable(values)
        return (values * weights).sum(), values

    @staticmethod
    def backward(ctx, g, _):
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        return *(grad * g if need else None for grad, need in needed), *[None] * 5


def divergence(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """(m,) divergences of log-probabilities (m, V), and (m, V) their gradient to T times log_p."""
    p, q = log_p.exp(), log_q.exp()
    if beta == 0:
        return (q * (log_q - log_p)).sum(-1), p - q
    log_m = log_q
    if beta < 1:
        log_m = torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
    own = (p * (log_p - log_m)).sum(-1)
    share = 1.0 if beta == 1 else 1 - beta
    value = share * own + (0 if beta == 1 else beta * (q * (log_q - log_m)).sum(-1))
    return value, share * p * (log_p - log_m - own[:, None])


def linear_divergence(
    student: tuple[Tensor, Tensor],
    teacher: tuple[Tensor, Tensor],
    weights: Tensor,
    beta: float = 0.5,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Compute the weighted sum of generalized Jensen-Shannon divergences, and each of them.

    Args:
        student, teacher: hidden states (M, D) and the head (V, D); D and dtype may be others.
        weights: (M,) float32 (float64 of float64 states), of the tokens.
        beta: 0 is KL(teacher || student), 1 is KL(student || teacher).
    Returns:
        the sum, which is differentiable in the student, and divergences (M,), in nats.
    Source: TRL's GKDTrainer.generalized_jsd_loss; arXiv 2306.13649 eq. 1.
    """
    return _LinearDivergence.apply(*student, *teacher, weights, beta, temperature)
