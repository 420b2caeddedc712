"""The gated delta rule, Qwen3.5's linear attention.

Each head keeps a state matrix S (K, V). A token multiplies S by its decay a, corrects the value predicted for its key,
and reads S with its query:

    S <- a S        u = beta (v - S^T k)        S <- S + k u^T        o = S^T q        a = e^g

Derivation of the chunked form. With G_i = g_1 + ... + g_i inside a chunk and S the state before the chunk,

    S_i = e^G_i S + sum over j <= i of e^(G_i - G_j) k_j u_j^T

Substituting S_(i-1) in u_i gives a triangular system, because u_i depends only on earlier tokens:

    u_i + sum over j < i of L_ij u_j = beta_i (v_i - e^G_i S^T k_i)

with L_ij = beta_i e^(G_i - G_j) k_i . k_j. Only the right side contains the state S, so two matrices without S are
computed for all chunks at once:

    X = (I + L)^-1 beta V        Y = (I + L)^-1 beta e^G K

Only outputs and the next state are computed chunk by chunk:

    U = X - Y S        O = e^G Q S + M U        M_ij = e^(G_i - G_j) q_i . k_j for j <= i
    S <- e^G_C S + (e^(G_C - G) K)^T U

Example: two tokens with keys and queries 1, values 8 and 6, and beta = a = 1/2:

    token by token:  u_1 = 8 / 2 = 4,  S = 4,  a S = 2,  u_2 = (6 - 2) / 2 = 2,  S = 2 + 2 = 4
    one chunk:       L_21 = 1/4,  u_1 = beta v_1 = 4,  u_2 = beta v_2 - L_21 u_1 = 3 - 4/4 = 2

Dimensions: b rows, T tokens per row, H heads, K key size, V value size, C tokens per chunk.
Source: Gated Delta Networks (arXiv 2412.06464); chunked form: DeltaNet (arXiv 2406.06484).
"""

import math

import torch
from torch import Tensor

CHUNK = 64  # tokens per chunk


def by_definition(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule token by token."""
    outputs = []
    for i in range(q.shape[1]):
        state = state * g[:, i].exp()[..., None, None]
        known_value = torch.einsum("bhkv,bhk->bhv", state, k[:, i])
        u = beta[:, i, :, None] * (v[:, i] - known_value)
        state = state + k[:, i, :, :, None] * u[:, :, None]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, i]))
    return torch.stack(outputs, dim=1), state


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute gated linear attention in chunks: each token updates the state, then reads it.

    Args:
        q, k: (b, T, H, K), queries and keys. All tensors must be float32, or all float64.
        v: (b, T, H, V), values.
        beta: (b, T, H), step size of the correction, 0 to 1.
        g: (b, T, H), log decay.
        state: (b, H, K, V), state before the first token.
    Returns:
        outputs (b, T, H, V), and the state after the last token
    """
    T = q.shape[1]
    if T == 1:
        return by_definition(q, k, v, beta, g, state)
    C = min(CHUNK, T)
    q = in_chunks(q, C)
    k = in_chunks(k, C)
    v = in_chunks(v, C)
    beta = in_chunks(beta[..., None], C)
    g = in_chunks(g, C)
    G = g.cumsum(-1)  # (b, H, chunks, C): log decay since the chunk start
    later = torch.ones(C, C, dtype=torch.bool, device=q.device).triu(1)
    # (b, H, chunks, C, C): decay from an earlier to a later token in the chunk
    decay = (G[..., None] - G[..., None, :]).masked_fill(later, -math.inf).exp()
    since = G.exp()[..., None]  # (b, H, chunks, C, 1): decay since the chunk start
    until = (G[..., -1:] - G).exp()[..., None]  # (b, H, chunks, C, 1): decay from a token to the chunk end
    X, Y = solve_chunks(k, v, beta, decay, since)
    queries = q * since
    M = (q @ k.mT) * decay
    keys = (k * until).mT
    tensors = (X, Y, queries, M, keys, since[..., -1:, :])
    outputs = []
    for chunk in zip(*(x.unbind(2) for x in tensors), strict=True):
        (chunk_x, chunk_y, chunk_queries, chunk_m, chunk_keys, chunk_decay) = chunk
        u = chunk_x - chunk_y @ state  # (b, H, C, V): beta * (v - value predicted by the state)
        outputs.append(chunk_queries @ state + chunk_m @ u)
        state = chunk_decay * state + chunk_keys @ u
    out = torch.cat(outputs, dim=2)[:, :, :T]
    return out.transpose(1, 2), state


def in_chunks(x: Tensor, size: int) -> Tensor:
    """Split tokens into chunks: (b, T, H, ...) -> (b, H, chunks, size, ...)."""
    (b, T) = x.shape[:2]
    # pad with zeros: k = 0 and g = 0 (decay 1) leave the state unchanged
    padding = x.new_zeros(b, -T % size, *x.shape[2:])
    filled = torch.cat([x, padding], dim=1)
    return filled.unflatten(1, (-1, size)).movedim(3, 1)


def solve_chunks(k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, since: Tensor) -> tuple[Tensor, Tensor]:
    """Solve each chunk's triangular system for X and Y; see the module docstring."""
    right = torch.cat([beta * v, beta * since * k], dim=-1)
    lower = beta * (k @ k.mT) * decay  # L in the derivation; solve_triangular ignores its diagonal
    solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    return solved.split([v.shape[-1], k.shape[-1]], dim=-1)
