"""The gated delta rule: a matrix S (K, V) a head, written with the error of what it says of a key.

    S <- a S        u = beta (v - S^T k)        S <- S + k u^T        o = S^T q        a = e^g

Derivation of the form in chunks. With G_i = g_1 + ... + g_i in a chunk and S the state before it,

    S_i = e^G_i S + sum over j <= i of e^(G_i - G_j) k_j u_j^T

The key of u_i meets a S_(i-1), so there j < i. Put in, this is a triangular system

    u_i + sum over j < i of L_ij u_j = beta_i (v_i - e^G_i S^T k_i)
    L_ij = beta_i e^(G_i - G_j) k_i . k_j

with S on its right side alone. So it is solved for all chunks at once, X = (I + L)^-1 beta V and
Y = (I + L)^-1 beta e^G K, and from chunk to chunk a few products are left:

    U = X - Y S        O = e^G Q S + M U with M_ij = e^(G_i - G_j) q_i . k_j, j <= i
    S <- e^G_C S + (e^(G_C - G) K)^T U

Example: k = q = 1, beta = a = 1/2, v = 8, 6. Token by token u = 4, S = 4; then a S = 2, u = 2 and
S = 4. As a chunk L_21 = 1/4 and beta v = 4, 3, so u = 4, 3 - 4/4 = 2.

Dimension letters: b rows, T tokens of each, H heads, C tokens of a chunk.
Source: Gated Delta Networks (arXiv 2412.06464); chunks as of DeltaNet (arXiv 2406.06484).
"""

import math

import torch
from torch import Tensor

CHUNK = 64  # tokens


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute gated_delta_rule token by token."""
    outputs = []
    for i in range(q.shape[1]):
        state = state * g[:, i].exp()[..., None, None]
        known_value = torch.einsum("bhkv,bhk->bhv", state, k[:, i])  # S^T k
        u = beta[:, i, :, None] * (v[:, i] - known_value)
        state = state + k[:, i, :, :, None] * u[:, :, None]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, i]))
    return torch.stack(outputs, dim=1), state


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Write T tokens of each row into its state and read it after each; one token by definition.

    Args:
        q, k, v: (b, T, H, K) twice, (b, T, H, V), float32 or float64 as all that follows.
        beta, g: (b, T, H), share of the error that is written, and log of the decay.
        state: (b, H, K, V) before the first token.
    Returns:
        (b, T, H, V), and the state after the last token.
    """
    T = q.shape[1]
    if T == 1:
        return by_definition(q, k, v, beta, g, state)
    C = min(CHUNK, T)
    q, k, v, beta, g = (in_chunks(x, C) for x in (q, k, v, beta[..., None], g))
    G = g.cumsum(-1)  # (b, H, chunks, C)
    later = torch.ones(C, C, dtype=torch.bool, device=q.device).triu(1)
    decay = (G[..., None] - G[..., None, :]).masked_fill(later, -math.inf).exp()  # from j to i
    since = G.exp()[..., None]  # the decay since the chunk began, (b, H, chunks, C, 1)
    until = (G[..., -1:] - G).exp()[..., None]  # the decay until it ends
    X, Y = solve_chunks(k, v, beta, decay, since)
    queries = q * since
    M = (q @ k.mT) * decay
    keys = (k * until).mT
    tensors = (X, Y, queries, M, keys, since[..., -1:, :])
    outputs = []
    for chunk in zip(*(x.unbind(2) for x in tensors), strict=True):
        (chunk_x, chunk_y, chunk_queries, chunk_m, chunk_keys, chunk_decay) = chunk
        u = chunk_x - chunk_y @ state  # (b, H, C, V)
        outputs.append(chunk_queries @ state + chunk_m @ u)
        state = chunk_decay * state + chunk_keys @ u
    return torch.cat(outputs, dim=2)[:, :, :T].transpose(1, 2), state


def in_chunks(x: Tensor, size: int) -> Tensor:
    """(b, T, H, ...) -> (b, H, chunks, size, ...): zeros at the end change no state."""
    (b, T) = x.shape[:2]
    filled = torch.cat([x, x.new_zeros(b, -T % size, *x.shape[2:])], dim=1)
    return filled.unflatten(1, (-1, size)).movedim(3, 1)


def solve_chunks(
    k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, since: Tensor
) -> tuple[Tensor, Tensor]:
    """Solve the triangular systems of all chunks: X and Y of the derivation."""
    right = torch.cat([beta * v, beta * since * k], dim=-1)
    lower = beta * (k @ k.mT) * decay  # L; its diagonal is not read
    solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    return solved.split([v.shape[-1], k.shape[-1]], dim=-1)
