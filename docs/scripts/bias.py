"""Print the expected gradient of every loss, computed exactly and without sampling: python -m docs.scripts.bias

The vocabulary has three tokens, one of which ends a completion. Completions have at most three tokens, so there are 15
completions. The loss functions that training uses run on every completion, or on every group of G completions, and each
result is weighted with its probability. A table cell has the cosine similarity between the expected gradient and the
objective's true gradient, and their norm ratio. See docs/notes/bias.md.
"""

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from minivlmrl.losses.advantages import EPSILON, group_advantages, leave_one_out
from minivlmrl.losses.grpo import LossNormalizer, grpo_loss
from minivlmrl.losses.ppo import gae, ppo_loss, token_rewards
from minivlmrl.losses.preference import DPO_LOSSES, dpo_loss

END, T = 2, 3  # id of the end token, and maximum completion length
PREFIXES = [prefix for n in range(T) for prefix in product(range(END), repeat=n)]  # 7: (), (0,), (1,), (0, 0), ...
COMPLETIONS = sorted({c[: c.index(END) + 1] if END in c else c for c in product(range(END + 1), repeat=T)})  # 15
ALL = torch.arange(len(COMPLETIONS))
TOKENS = torch.tensor([[*c] + [END] * (T - len(c)) for c in COMPLETIONS])  # (15, T)
PREFIX = torch.tensor([[PREFIXES.index(c[:t]) if t < len(c) else 0 for t in range(T)] for c in COMPLETIONS])  # (15, T)
MASK = torch.tensor([[float(t < len(c)) for t in range(T)] for c in COMPLETIONS]).double()  # (15, T)
RANDOM = {"generator": torch.Generator().manual_seed(1), "dtype": torch.float64}
POLICY = torch.randn(len(PREFIXES), END + 1, **RANDOM)  # (7, 3) logits of the token after each prefix
REFERENCE = POLICY + 0.5 * torch.randn(len(PREFIXES), END + 1, **RANDOM)
GRADED = torch.rand(len(ALL), **RANDOM).round(decimals=1)  # (15,) rewards 0, 0.1, ... 1
BINARY = (torch.rand(len(ALL), **RANDOM) < 0.3).double()  # (15,) rewards 0 and 1
BETA = 0.5  # for the preference losses


def logps_of(logits: Tensor) -> Tensor:
    """Compute log-probabilities (15, T), in nats, for all completions' tokens from logits (7, 3)."""
    return logits.log_softmax(-1)[PREFIX, TOKENS] * MASK


LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "rloo", "cispo", "sapo", "vespo")


def chances(logps: Tensor) -> Tensor:
    """(15, T) -> (15,) completion probabilities."""
    return logps.sum(1).exp()


def by_prefix(per_completion: Tensor) -> Tensor:
    """Sum completions' values (15,) over the completions that continue each prefix, (7,)."""
    return torch.zeros(len(PREFIXES)).double().index_put((PREFIX,), per_completion[:, None] * MASK, accumulate=True)


def expect(loss: Callable, sampler: Tensor, num_generations: int = 1) -> Tensor:
    """Return the mean of loss(indices (G,)) over all groups of completions sampled with log-probabilities (15, T)."""
    groups = torch.cartesian_prod(*[ALL] * num_generations).view(-1, num_generations)
    return chances(sampler)[groups].prod(1) @ torch.vmap(loss)(groups)


def expected_policy_loss(
    logps: Tensor, rewards: Tensor, options: dict, scale="none", G=2, one_group=False, *, old=None, ref=None
) -> Tensor:
    """Return the mean of grpo_loss over all groups of G completions; logps, old, ref: (15, T), rewards: (15,).

    options: keyword arguments of grpo_loss.
    one_group: the step has one group. Otherwise the step has so many groups that its token count and its rewards'
    standard deviation are constants.
    """
    sampler = logps.detach() if old is None else old
    chance, by_batch = chances(sampler), scale == "batch" and not one_group
    std = (chance @ rewards.square() - (chance @ rewards).square()).sqrt() + EPSILON if by_batch else 1.0

    def loss(i: Tensor) -> Tensor:
        advantages = group_advantages(rewards[i], G, "none" if by_batch else scale) / std
        if options.get("loss_type") == "rloo":
            advantages = leave_one_out(rewards[i], G)
        constants = {"old_per_token_logps": sampler[i], "ref_per_token_logps": None if ref is None else ref[i]}
        normalizer = LossNormalizer(G, MASK[i].sum() if one_group else G * (chance @ MASK.sum(1)), T)
        return grpo_loss(logps[i], advantages, MASK[i], **options, normalizer=normalizer, **constants)[0]

    return expect(loss, sampler, G)


def expected_ppo_loss(logps: Tensor, values: Tensor, lam: float, cliprange: float, old: Tensor) -> Tensor:
    """Return the mean of ppo_loss over all completions, with GAE on graded rewards and the prefixes' values (7,)."""
    values, normalizer = values[PREFIX] * MASK, LossNormalizer(1, (chances(old) @ MASK.sum(1)).item())
    advantages, returns = gae(token_rewards(GRADED, old, old, MASK), values, lam=lam)
    fixed = {"old_per_token_logps": old, "old_values": values, "advantages": advantages, "returns": returns}

    def loss(i: Tensor) -> Tensor:
        drawn = {name: x[i] for name, x in fixed.items()}
        return ppo_loss(logps[i], values[i], MASK[i], cliprange=cliprange, **drawn, normalizer=normalizer)[0]

    return expect(loss, old)


def expected_dpo_loss(logps: Tensor, options: dict) -> Tensor:
    """Return the mean of dpo_loss over pairs sampled from the reference; a Bradley-Terry model labels them."""
    normalizer = LossNormalizer(2, (PAIRS.sum(1) @ MASK.sum(1)).item())
    given = [(logps[p], MASK[p], REF[p]) for p in torch.cartesian_prod(ALL, ALL)[:, None]]
    losses = [dpo_loss(*pair, **options, ref_per_token_logps=ref, normalizer=normalizer)[0] for *pair, ref in given]
    return PAIRS.flatten() @ torch.stack(losses)


def gradient(of: Callable, logits: Tensor, *given, **more) -> Tensor:
    """Return the function's gradient with respect to the logits, flattened; `of` gets (logps, ...)."""
    logits = logits.detach().requires_grad_()
    return torch.autograd.grad(of(logps_of(logits), *given, **more), logits)[0].flatten()


def reward_gradient(logits: Tensor, rewards: Tensor, beta: float = 0.0) -> Tensor:
    """Return the gradient of: expected reward minus beta times the completions' KL to the reference."""
    log_ratio = (logps_of(logits) - REF).sum(1)  # a constant, because its mean gradient is 0
    return gradient(lambda logps: chances(logps) @ (rewards - beta * log_ratio), logits)


def token_kl_gradient(logits: Tensor, sampler: Tensor) -> Tensor:
    """Return the gradient of the token KL to the reference, summed over the prefixes that a fixed sampler visits."""
    logits, ref = logits.detach().requires_grad_(), REFERENCE.log_softmax(-1)
    kl = (logits.softmax(-1) * (logits.log_softmax(-1) - ref)).sum(1)  # (7,)
    return torch.autograd.grad(by_prefix(chances(sampler)) @ kl, logits)[0].flatten()


def cell(found: Tensor, target: Tensor) -> str:
    """Format a gradient's cosine with its target, and their norm ratio."""
    pair = found @ target / found.norm() / target.norm(), found.norm() / target.norm()
    return "0" if pair[1] < 1e-9 else ", ".join("1" if abs(x - 1) < 1e-9 else f"{x:.4f}" for x in pair)


OLD, REF = logps_of(POLICY), logps_of(REFERENCE)
MOVED = POLICY + 4 * reward_gradient(POLICY, GRADED).view_as(POLICY)  # a large step: token ratios 0.75 to 1.33
PAIRS = 2 * chances(REF).outer(chances(REF)) * (GRADED[:, None] - GRADED).sigmoid()  # (15, 15): chosen, rejected


def policy_table() -> list[list[str]]:
    """Compare policy losses' gradients with the expected reward's gradient."""
    kinds = {name: (name, "token", "none") for name in LOSS_TYPES}
    kinds |= {f"dr_grpo, scale_rewards {scale}": ("dr_grpo", "token", scale) for scale in ("group", "batch")}
    kinds |= {"dr_grpo, level sequence": ("dr_grpo", "sequence", "none")}
    columns = {
        "one group a step": (GRADED, 2, True, POLICY, 9.0),
        "many groups": (GRADED, 2, False, POLICY, 9.0),
        "many, rewards 0 and 1": (BINARY, 2, False, POLICY, 9.0),
        "many, off-policy": (GRADED, 2, False, MOVED, 9.0),
        "and clipped at 0.1": (GRADED, 2, False, MOVED, 0.1),
    }
    table = [["loss_type", *columns]]
    for label, (name, level, scale) in kinds.items():
        cells = []
        for rewards, G, one_group, logits, clip in columns.values():
            options = {"loss_type": name, "importance_sampling_level": level}
            options |= {"epsilon_low": clip, "epsilon_high": clip + (name == "cispo")}
            found = gradient(expected_policy_loss, logits, rewards, options, scale, G, one_group, old=OLD)
            cells.append(cell(-found, reward_gradient(logits, rewards)))
        table.append([label, *cells])
    return table


def kl_table() -> list[list[str]]:
    """Compare the KL term's gradient with the gradients of two KLs."""
    table, none = [["KL", "token KL", "KL of completions", "token KL, off-policy"]], 0 * GRADED
    tokens, completions = token_kl_gradient(POLICY, OLD), -reward_gradient(POLICY, none, 1.0)
    kinds = ("k1", "k1 corrected", "k2", "k3", "k3 straight-through", "k3 corrected")
    for loss_type, kind in product(("luspo", "grpo"), kinds):
        estimator = kind[:2] + "+" * ("straight" in kind)
        options = {"loss_type": loss_type, "beta": 1.0, "kl_estimator": estimator}
        options["use_bias_correction_kl"] = "corrected" in kind
        constants = {"old": OLD, "ref": REF}
        on, off = (gradient(expected_policy_loss, x, none, options, **constants) for x in (POLICY, MOVED))
        cells = cell(on, tokens), cell(on, completions), cell(off, token_kl_gradient(MOVED, OLD))
        table.append([f"{kind}, {loss_type}", *cells])
    on = gradient(expected_policy_loss, POLICY, (REF - OLD).sum(1), {"loss_type": "rloo"})
    return [*table, ["k1 in the reward, rloo", cell(on, tokens), cell(on, completions), ""]]


def ppo_table() -> list[list[str]]:
    """Compare PPO's gradient with the expected reward's gradient."""
    table = [["values", "lam", "on-policy", "off-policy"]]
    true = by_prefix(chances(OLD) * GRADED) / by_prefix(chances(OLD))
    for (name, values), lam in product({"true": true, "half": true / 2, "zero": 0 * true}.items(), (1.0, 0.95, 0.0)):
        cells = []
        for logits in (POLICY, MOVED):
            found = gradient(expected_ppo_loss, logits, values, lam, 9.0, OLD)  # never clipped
            cells.append(cell(-found, reward_gradient(logits, GRADED)))
        table.append([name, f"{lam:g}", *cells])
    return table


def preference_table() -> list[list[str]]:
    """Compare preference losses' gradients with the gradient of the KL-regularised reward.

    That is the expected reward minus beta times the completions' KL to the reference.
    """
    table = [["loss_type", "at the reference", "elsewhere", "at the optimum"]]
    best = (chances(REF) * (GRADED / BETA).exp())[:, None] * MASK  # the optimum's probabilities, up to a factor
    optimum = torch.zeros_like(POLICY).index_put((PREFIX, TOKENS), best, accumulate=True).log()
    for name in DPO_LOSSES:
        options = {"loss_type": name, "beta": BETA, "label_smoothing": 0.1 * (name in ("exo_pair", "robust"))}
        here, there, left = (-gradient(expected_dpo_loss, x, options) for x in (REFERENCE, POLICY, optimum))
        cells = cell(here, reward_gradient(REFERENCE, GRADED)), cell(there, reward_gradient(POLICY, GRADED, BETA))
        table.append([name, *cells, cell(left, here).split(", ")[-1]])  # only the norm ratio
    return table


def noise(logits: Tensor, rewards: Tensor, G: int) -> dict[str, float]:
    """Compute a completion's gradient variance for each baseline, relative to the expected reward as baseline.

    With scores s = grad log p, V(b) = E (r - b)^2 |s|^2 - |E r s|^2 for a constant baseline b. The leave-one-out
    baseline adds its own samples' variance: V(E r) + (E (r - E r)^2 E |s|^2 + |E r s|^2) / (G - 1).
    """
    chance = chances(logps_of(logits))
    scores = torch.autograd.functional.jacobian(lambda x: logps_of(x).sum(1), logits).flatten(1)  # (15, 21)
    squares, mean = scores.square().sum(1), chance @ rewards
    signal, spread = ((chance * rewards) @ scores).square().sum(), chance @ (rewards - mean).square()
    best = (chance * rewards) @ squares / (chance @ squares)
    fixed = {"none": 0.0, "expected reward": mean, "best constant": best}
    found = {name: chance @ ((rewards - b).square() * squares) - signal for name, b in fixed.items()}
    exact = found["expected reward"]
    found["leave one out"] = exact + (spread * (chance @ squares) + signal) / (G - 1)
    return {name: (value / exact).item() for name, value in found.items()}


def noise_table() -> list[list[str]]:
    """Compare gradient variances for equally many completions.

    The values are means over 20 random policies with rewards 0 and 1.
    """
    random = {"generator": torch.Generator().manual_seed(1), "dtype": torch.float64}
    cases = [(torch.randn(POLICY.shape, **random), torch.rand(len(ALL), **random)) for _ in range(20)]
    cells, sizes = {}, (2, 4, 8, 16)
    for G, (logits, drawn) in product(sizes, cases):
        for name, value in noise(logits, (drawn < 0.3).double(), G).items():
            cells.setdefault(name, dict.fromkeys(sizes, 0.0))[G] += value / len(cases)
    return [
        ["baseline", *map(str, sizes)],
        *([name, *map("{:.2f}".format, row.values())] for name, row in cells.items()),
    ]


def main():
    """Print all tables. docs/notes/bias.md shows the rows that its text discusses."""
    for table in (policy_table, noise_table, kl_table, ppo_table, preference_table):
        print(table.__doc__, "", *(f"| {' | '.join(row)} |" for row in table()), "", sep="\n")


if __name__ == "__main__":
    main()
