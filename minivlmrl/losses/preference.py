"""Losses on preference pairs: DPO, its variants, and the reward model loss.

preference.py imports only torch and grpo.py.

B pairs, T tokens in the longest answer. In (B, 2, T), [:, 0] is the chosen and [:, 1] the rejected answer. Only
`per_token_logps` has a gradient.

Losses are divided by the number of pairs or tokens in the whole optimizer step, from `normalizer` (None = count the
batch). `normalizer.sequences` counts both answers in a pair. Two losses depend on the micro-batch size: aot and
aot_unpaired.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from minivlmrl.losses.grpo import check_known

Divergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
# losses defined for every f_divergence_type, not only for reverse_kl
F_LOSSES = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft")
SMOOTHED = ("sigmoid", "exo_pair", "robust", "aot", "aot_unpaired")  # losses that use label_smoothing


@dataclass
class Pairs:
    """Inputs for the functions in DPO_LOSSES."""

    logps: Tensor  # (B, 2) log pi(y | x), summed over tokens, nats
    ref_logps: Tensor  # (B, 2) log pi_ref(y | x)
    u: Tensor  # (B,) chosen log-ratio, log pi(y_c) - log pi_ref(y_c)
    v: Tensor  # (B,) rejected log-ratio, log pi(y_r) - log pi_ref(y_r)
    z: Tensor  # (B,) beta * margin, with margin = f_score(chosen) - f_score(rejected)
    mean_margin: Tensor  # (B,) margin between length-normalized scores
    sft_loss: Tensor  # (B,) copies of the mean negative log-probability over all chosen tokens
    beta: float
    e: float  # label smoothing, the assumed share of flipped labels
    discopop_tau: float  # DiscoPOP mixture temperature


# {loss_type: function from Pairs to losses (B,)}. In the formulas, chosen and rejected are log-ratios
# log(pi / pi_ref), and margin is chosen - rejected for reverse KL, else f_score(chosen) - f_score(rejected).
DPO_LOSSES: dict[str, Callable[[Pairs], Tensor]] = {
    # DPO eq. 7 (arXiv 2305.18290): -log sigmoid(beta margin); label smoothing: ericmitchell.ai/cdpo.pdf eq. 3
    "sigmoid": lambda pairs: smoothed(pairs.z, pairs.e),
    # SLiC (arXiv 2305.10425), as in RSO (2309.06657): the hinge loss max(0, 1 - beta margin)
    "hinge": lambda pairs: torch.relu(1 - pairs.z),
    # IPO eq. 17 (arXiv 2310.12036): (margin - 1 / (2 beta))^2, length-normalized as in the authors' code
    "ipo": lambda pairs: (pairs.mean_margin - 1 / (2 * pairs.beta)).square(),
    # EXO eq. 16 (arXiv 2402.00856): KL between predicted preference sigmoid(beta margin) and smoothed label
    "exo_pair": lambda pairs: (
        pairs.z.sigmoid() * (logsigmoid(pairs.z) - math.log(1 - pairs.e))
        + (-pairs.z).sigmoid() * (logsigmoid(-pairs.z) - math.log(pairs.e))
    ),
    # NCA (arXiv 2402.05369):
    # -log sigmoid(beta chosen) - log sigmoid(-beta chosen) / 2 - log sigmoid(-beta rejected) / 2
    "nca_pair": lambda pairs: (
        -logsigmoid(pairs.beta * pairs.u)
        - 0.5 * logsigmoid(-pairs.beta * pairs.u)
        - 0.5 * logsigmoid(-pairs.beta * pairs.v)
    ),
    # robust DPO, eq. 11 (arXiv 2403.00409): unbiased if a label is wrong with probability label_smoothing
    "robust": lambda pairs: (-(1 - pairs.e) * logsigmoid(pairs.z) + pairs.e * logsigmoid(-pairs.z)) / (1 - 2 * pairs.e),
    # BCO (arXiv 2404.04656), without its running mean of rewards:
    # -log sigmoid(beta chosen) - log sigmoid(-beta rejected)
    "bco_pair": lambda pairs: -logsigmoid(pairs.beta * pairs.u) - logsigmoid(-pairs.beta * pairs.v),
    # SPPO eq. 4.7 (arXiv 2405.00675): (chosen - 1 / (2 beta))^2 + (rejected + 1 / (2 beta))^2
    "sppo_hard": lambda pairs: (pairs.u - 0.5 / pairs.beta).square() + (pairs.v + 0.5 / pairs.beta).square(),
    # paired AOT (arXiv 2406.05882): DPO after sorting policy margins and reference margins
    "aot": lambda pairs: smoothed(
        pairs.beta * (sorted_margins(pairs.logps) - sorted_margins(pairs.ref_logps)), pairs.e
    ),
    # unpaired AOT (arXiv 2406.05882): DPO after sorting chosen and rejected log-ratios over the batch
    "aot_unpaired": lambda pairs: smoothed(pairs.beta * (pairs.u.sort().values - pairs.v.sort().values), pairs.e),
    # APO-zero, eq. 7 (arXiv 2408.06266): 1 - sigmoid(beta chosen) + sigmoid(beta rejected), computed with sigmoid(-x),
    # because 1 - sigmoid(20) and its gradient are 0 in float32. Training makes chosen answers more likely, and rejected
    # answers less likely.
    "apo_zero": lambda pairs: (-pairs.beta * pairs.u).sigmoid() + (pairs.beta * pairs.v).sigmoid(),
    # APO-down, eq. 8 (arXiv 2408.06266): sigmoid(beta chosen) + 1 - sigmoid(beta margin). Training makes chosen answers
    # less likely, and rejected answers even less likely.
    "apo_down": lambda pairs: (pairs.beta * pairs.u).sigmoid() + (pairs.beta * (pairs.v - pairs.u)).sigmoid(),
    # DiscoPOP eq. 5 (arXiv 2406.08414): logistic and exponential loss, mixed by sigmoid(beta margin / discopop_tau)
    "discopop": lambda pairs: torch.lerp(
        -logsigmoid(pairs.z), (-pairs.z).exp(), (pairs.z / pairs.discopop_tau).sigmoid()
    ),
    # MPO's generation loss (arXiv 2411.10442): mean negative log-probability of chosen tokens
    "sft": lambda pairs: pairs.sft_loss,
    # length-normalized DPO, Tulu 3 (arXiv 2411.15124): -log sigmoid(beta margin)
    "sigmoid_norm": lambda pairs: -logsigmoid(pairs.beta * pairs.mean_margin),
}


def dpo_loss(
    per_token_logps: Tensor,
    mask: Tensor,
    *,
    loss_type: str | Sequence[str] = "sigmoid",
    loss_weights: Sequence[float] | None = None,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    f_divergence_type: Divergence = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
    ld_alpha: float | None = None,
    discopop_tau: float = 0.05,
    ref_per_token_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    normalizer=None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute a DPO loss from DPO_LOSSES, or a weighted sum of several.

    Example: if policy and reference are equal, `sigmoid` is 0.693, `hinge` 1, and `ipo` with beta 0.1 is 25.

    Args:
        per_token_logps: (B, 2, T) float, policy log-probabilities in nats.
        mask: (B, 2, T), 1 for answer tokens.
        loss_type: one or more keys in DPO_LOSSES.
        loss_weights: weight per loss_type, None = all 1. MPO: ["sigmoid", "bco_pair", "sft"] with [0.8, 0.2, 1.0].
        beta: log-ratio factor, > 0; a large value keeps the policy near the reference.
        label_smoothing: assumed share of flipped labels, in [0, 0.5), for the losses in SMOOTHED.
        f_divergence_type: divergence between policy and reference; see f_score.
        f_alpha_divergence_coef: alpha for f_divergence_type alpha_divergence.
        ld_alpha: LD-DPO weight in [0, 1] for tokens beyond the shorter answer's length; None means 1.
        discopop_tau: DiscoPOP temperature, > 0.
        ref_per_token_logps: (B, 2, T) reference log-probabilities.
        ref_logps: (B, 2) reference log-probabilities summed over tokens, instead of ref_per_token_logps.
        normalizer: totals for the optimizer step, None = count this batch. `tokens` counts only chosen answers.
    Returns:
        Loss, and metrics rewards/chosen and rewards/rejected (beta times log-ratio, nats), rewards/margins,
        rewards/accuracies (share of positive margins), logps/chosen and logps/rejected.
    Raises:
        ValueError: conflicting options, a missing tensor, or an answer without tokens.
    Source: arXiv 2305.18290; f-DPO 2309.16240; LD-DPO eq. 9, 2409.06411; equals
        DPOTrainer._compute_loss in TRL 1.16, except for sigmoid's label_smoothing.
    """
    loss_types = [loss_type] if isinstance(loss_type, str) else loss_type
    check_dpo_options(loss_types, loss_weights, label_smoothing, f_divergence_type)
    if not beta > 0:
        raise ValueError(f"beta is {beta}, but it must be greater than 0")
    if ref_logps is None:
        if ref_per_token_logps is None:
            raise ValueError("pass ref_per_token_logps or ref_logps")
        ref_logps = answer_logps(ref_per_token_logps, mask, ld_alpha)
    lengths = mask.sum(-1)  # (B, 2)
    if (lengths == 0).any():
        raise ValueError("At least one answer has no tokens. Remove its pair, or truncate answers less.")
    B = len(mask)
    num_pairs = B
    num_tokens = lengths[:, 0].sum()
    if normalizer is not None:
        num_pairs = normalizer.sequences / 2
        num_tokens = normalizer.tokens
    logps = answer_logps(per_token_logps, mask, ld_alpha)
    log_ratio = logps - ref_logps  # (B, 2)
    u, v = log_ratio.unbind(1)
    scores = f_score(log_ratio, f_divergence_type, f_alpha_divergence_coef)
    mean_scores = scores / lengths  # (B, 2)
    # multiply by num_pairs / B, because dpo_loss sums sft_loss over B pairs and divides the sum by num_pairs
    sft_loss = -(per_token_logps * mask)[:, 0].sum() / num_tokens * (num_pairs / B)
    pairs = Pairs(
        logps, ref_logps, u, v,
        z=beta * (scores[:, 0] - scores[:, 1]),
        mean_margin=mean_scores[:, 0] - mean_scores[:, 1],
        sft_loss=sft_loss.expand(B),
        beta=beta,
        e=label_smoothing,
        discopop_tau=discopop_tau,
    )  # fmt: skip
    weights = loss_weights or [1.0] * len(loss_types)
    terms = [DPO_LOSSES[name](pairs) for name in loss_types]
    weighted = [weight * term for weight, term in zip(weights, terms, strict=True)]
    per_pair_loss = sum(weighted, start=u.new_zeros(()))
    metrics = _reward_metrics(beta * u.detach(), beta * v.detach())
    metrics["logps/chosen"], metrics["logps/rejected"] = logps.detach().mean(0)
    return per_pair_loss.sum() / num_pairs, metrics


def answer_logps(per_token_logps: Tensor, mask: Tensor, ld_alpha: float | None = None) -> Tensor:
    """Sum token log-probabilities over each answer: (B, 2, T) -> (B, 2), in nats.

    LD-DPO multiplies log-probabilities of tokens beyond the shorter answer's length by ld_alpha.

    Source: LD-DPO eq. 9 (arXiv 2409.06411); DPOTrainer.compute_ref_log_probs in TRL 1.16.
    """
    weights = mask.to(per_token_logps.dtype)  # float weights, because ld_alpha * mask could round ld_alpha
    if ld_alpha is not None:
        shorter = mask.sum(-1).amin(1)  # (B,)
        shared = mask.cumsum(-1) <= shorter[:, None, None]
        weights = torch.where(shared, weights, ld_alpha * weights)
    return (per_token_logps * weights).sum(-1)


def f_score(log_ratio: Tensor, divergence: Divergence, alpha: float = 0.5) -> Tensor:
    """Compute the derivative f'(t) of an f-divergence at t = pi / pi_ref, from log t.

    reverse_kl: f'(t) = log t
    forward_kl: f'(t) = 1 - 1/t
    js_divergence: f'(t) = log(2t / (1 + t))
    alpha_divergence: f'(t) = (t^(alpha - 1) - 1) / (alpha - 1)
    """
    if divergence == "reverse_kl" or (divergence == "alpha_divergence" and abs(alpha - 1) < 1e-6):
        return log_ratio
    if divergence == "forward_kl":
        return -(-log_ratio).expm1()  # 1 - exp(-x), but exact for small x
    if divergence == "js_divergence":
        return math.log(2) + logsigmoid(log_ratio)
    # clamp, because expm1 overflows in float32 above 88
    return ((alpha - 1) * log_ratio).clamp(max=80.0).expm1() / (alpha - 1)


def reward_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    center_rewards_coefficient: float | None = None,
    margin: Tensor | None = None,
    normalizer=None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the Bradley-Terry loss for reward models, -log sigmoid(r_c - r_r - margin).

    Example: rewards 2 (chosen) and 1 (rejected) give log(1 + e^-1) = 0.313.

    Args:
        chosen, rejected: (B,) rewards.
        center_rewards_coefficient: weight for (chosen + rejected)^2, which keeps the mean reward near 0; None means 0.
        margin: (B,) target difference between chosen and rejected rewards.
    Returns:
        Loss, and metrics rewards/chosen, rewards/rejected, rewards/margins and rewards/accuracies.
    Source: InstructGPT eq. 1 (arXiv 2203.02155), Llama 2 eq. 2 (2307.09288), 2312.09244; TRL.
    """
    difference = chosen - rejected
    if margin is not None:
        difference = difference - margin
    per_pair_loss = -logsigmoid(difference)
    if center_rewards_coefficient is not None:
        center = (chosen + rejected).square()
        per_pair_loss = per_pair_loss + center_rewards_coefficient * center
    num_pairs = len(difference) if normalizer is None else normalizer.sequences / 2
    return per_pair_loss.sum() / num_pairs, _reward_metrics(chosen.detach(), rejected.detach())


def check_dpo_options(
    loss_type: Sequence[str],
    loss_weights: Sequence[float] | None,
    label_smoothing: float,
    f_divergence_type: str,
    prefix: str = "",
    **_others: object,
):
    """Raise ValueError for conflicting `dpo_loss` options.

    Args:
        prefix: text before option names in messages, such as "dpo.".
    """
    for name in loss_type:
        check_known(f"{prefix}loss_type", name, DPO_LOSSES)
    check_known(f"{prefix}f_divergence_type", f_divergence_type, get_args(Divergence))
    num_weights = len(loss_type) if loss_weights is None else len(loss_weights)
    only_reverse_kl = [name for name in loss_type if name not in F_LOSSES]
    rules = [
        (not loss_type or len(loss_type) != num_weights,
         f"loss_type is {loss_type} and loss_weights is {loss_weights}; "
         "name at least one loss, and give one weight for each"),
        (f_divergence_type != "reverse_kl" and only_reverse_kl,
         f"loss_type {only_reverse_kl} is only defined for f_divergence_type reverse_kl; "
         f"with {f_divergence_type} use one of {', '.join(F_LOSSES)}"),
        ("exo_pair" in loss_type and not label_smoothing,
         "loss_type exo_pair takes the logarithm of label_smoothing; set it above 0"),
        (not 0 <= label_smoothing < 0.5,
         f"label_smoothing is {label_smoothing}, but it must be in [0, 0.5)"),
    ]  # fmt: skip
    for is_broken, message in rules:
        if is_broken:
            raise ValueError(f"{prefix}{message}")


def sorted_margins(logps: Tensor) -> Tensor:
    return (logps[:, 0] - logps[:, 1]).sort().values


def smoothed(z: Tensor, label_smoothing: float) -> Tensor:
    """Compute DPO's logistic loss -log sigmoid(z) with label smoothing."""
    return -(1 - label_smoothing) * logsigmoid(z) - label_smoothing * logsigmoid(-z)


def _reward_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    return {
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "rewards/margins": (chosen - rejected).mean(),
        "rewards/accuracies": (chosen > rejected).to(chosen.dtype).mean(),
    }
