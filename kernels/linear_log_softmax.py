"""Log-probability of chosen tokens and entropy, straight from hidden states: the (M, V) logits never exist at once.

Derivation. For one row h (D,), head W (V, D), chosen token y and temperature T:

    z = W h / T                          lse = log sum_j exp z_j          p = exp(z - lse)
    logp = z_y - lse                     H = -sum_j p_j log p_j = lse - sum_j p_j z_j

    d logp / dz_j = [j = y] - p_j        dH / dz_j = -p_j (log p_j + H)

so with upstream gradients g (of logp) and e (of H), one backward pass makes

    dz = g ([j = y] - p) - e p (log p + H)      dh = W^T dz / T      dW = dz h^T / T

Forward and backward go over the rows in chunks; the backward computes the chunk's logits again instead of keeping
them. Sums run in float32 (float64 for float64 inputs). The torch path below is also the reference for a fused kernel
behind the same signature (not written yet).
"""

import torch
from torch import Tensor

CHUNK_BYTES = 64 * 2**20  # most memory of one chunk of float32 logits, but 32 to 256 rows: more leaves the CPU's caches


def linear_log_softmax(hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Score chosen tokens under softmax(hidden @ weight.T / temperature).

    Args:
        hidden: (M, D), the states that predict the M tokens.
        weight: (V, D), the head.
        ids: (M,) int64, the chosen tokens.
        temperature: divides the logits, > 0.
    Returns:
        logps (M,) and entropies (M,), nats, float32 (float64 for float64 inputs); both are differentiable.
    Source: equals TRL's selective_log_softmax and entropy_from_logits applied to logits / temperature.
    """
    return _LinearLogSoftmax.apply(hidden, weight, ids, temperature)


@torch.no_grad()
def linear_log_sum_sq_probs(hidden: Tensor, weight: Tensor) -> Tensor:
    """log sum_j p_j^2 of p = softmax(hidden @ weight.T): (M,) nats, at most 0, no gradient.

    Source: the weight of WPO eq. 2 (arXiv 2406.11827); TRL's log_sum_sq_probs.
    """
    log_sums = []
    for rows in _chunks(len(hidden), len(weight)):
        z = hidden[rows] @ weight.T
        log_p = z.to(torch.promote_types(z.dtype, torch.float32)).log_softmax(-1)
        log_sums.append((2 * log_p).logsumexp(-1))
    return torch.cat(log_sums)


class _LinearLogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, ids, temperature):
        logps, entropies = [], []
        for rows in _chunks(len(hidden), len(weight)):
            logp, entropy, _ = _score(hidden[rows], weight, ids[rows], temperature)
            logps.append(logp)
            entropies.append(entropy)
        ctx.save_for_backward(hidden, weight, ids)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)  # None for an output that no loss uses
        return torch.cat(logps), torch.cat(entropies)

    @staticmethod
    def backward(ctx, grad_logps, grad_entropies):
        hidden, weight, ids = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        for rows in _chunks(len(hidden), len(weight)):
            _, entropy, log_p = _score(hidden[rows], weight, ids[rows], ctx.temperature)
            dz = torch.zeros_like(log_p)
            if grad_logps is not None:
                g = grad_logps[rows, None]
                dz.sub_(log_p.exp().mul_(g)).scatter_add_(1, ids[rows, None], g)  # g ([j = y] - p)
            if grad_entropies is not None:
                dz.sub_(
                    (log_p + entropy[:, None]).mul_(log_p.exp()).mul_(grad_entropies[rows, None])
                )  # e p (log p + H)
            dz = dz.div_(ctx.temperature).to(hidden.dtype)
            grad_hidden[rows] = dz @ weight
            grad_weight += (dz.T @ hidden[rows]).to(grad_weight.dtype)
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def _score(hidden, weight, ids, temperature):
    """One chunk: logp (m,), entropy (m,) and log_p (m, V)."""
    z = hidden @ weight.T
    log_p = z.to(torch.promote_types(z.dtype, torch.float32)).div_(temperature).log_softmax(-1)
    entropy = -log_p.exp().mul_(log_p).sum(-1)
    return log_p.gather(-1, ids[:, None])[:, 0], entropy, log_p


def _chunks(rows: int, vocab: int) -> list[slice]:
    """Slices of rows to score at a time, at least one (empty for no rows)."""
    size = min(max(CHUNK_BYTES // (4 * vocab), 32), 256)
    return [slice(i, i + size) for i in range(0, max(rows, 1), size)]
