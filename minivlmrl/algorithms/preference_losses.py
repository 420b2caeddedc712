"""Preference losses: DPO and its family, KTO, and the reward model's. Pure functions; imports torch alone.

Dimension letters: B pairs, T tokens of the longest answer. A pair is a group of two: in (B, 2, T) tensors [:, 0] is
chosen, [:, 1] rejected. `per_token_logps` carries the gradient, reference log-probabilities are constants.

Each loss divides by counts that the caller may give: those of the whole optimizer step. Then the gradients of
micro-batches add up to the gradient of the step. (Not so aot and aot_unpaired, which sort the pairs of a micro-batch,
as in TRL; nor sft with the weights of WPO, which multiply the micro-batch's mean.)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

F_DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
ANY_DIVERGENCE = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft")
KTO_LOSS_TYPES = ("kto", "apo_zero_unpaired")


@dataclass
class Pairs:
    """What the losses below are made of; each tensor (B,) unless a shape is given."""

    chosen_logps: Tensor  # log pi(y_c | x), summed over tokens
    rejected_logps: Tensor
    ref_chosen_logps: Tensor
    ref_rejected_logps: Tensor
    u: Tensor  # log pi(y_c) - log pi_ref(y_c)
    v: Tensor  # the same of the rejected answer
    score_u: Tensor  # f'(pi / pi_ref), which is u itself for the reverse KL
    score_v: Tensor
    chosen_length: Tensor  # tokens
    rejected_length: Tensor
    sft_loss: Tensor  # (B,): the pair's share of the mean negative log-probability of chosen tokens, times B
    beta: float
    label_smoothing: float
    smooth_sigmoid: bool
    discopop_tau: float

    @property
    def margin(self) -> Tensor:
        """d = f'(pi/pi_ref)(y_c) - f'(pi/pi_ref)(y_r)."""
        return self.score_u - self.score_v

    @property
    def mean_margin(self) -> Tensor:
        """The same per token of each answer."""
        return self.score_u / self.chosen_length.clamp(min=1) - self.score_v / self.rejected_length.clamp(min=1)


def sigmoid(p: Pairs) -> Tensor:
    """-log sigmoid(beta d). DPO eq. 7 (arXiv 2305.18290). With smooth_sigmoid: cDPO, as TRL had it up to 0.28."""
    return _smoothed(p.beta * p.margin, p.label_smoothing) if p.smooth_sigmoid else -logsigmoid(p.beta * p.margin)


def hinge(p: Pairs) -> Tensor:
    """max(0, 1 - beta d). SLiC (arXiv 2305.10425), as in RSO (2309.06657)."""
    return torch.relu(1 - p.beta * p.margin)


def ipo(p: Pairs) -> Tensor:
    """(d - 1 / (2 beta))^2 with d per token. IPO eq. 17 (arXiv 2310.12036), length-normalised as its authors do."""
    return (p.mean_margin - 1 / (2 * p.beta)).square()


def exo_pair(p: Pairs) -> Tensor:
    """KL between (s(bd), s(-bd)) and the labels (1 - e, e). EXO eq. 16 (arXiv 2402.00856)."""
    z, e = p.beta * p.margin, p.label_smoothing
    return z.sigmoid() * (logsigmoid(z) - math.log(1 - e)) + (-z).sigmoid() * (logsigmoid(-z) - math.log(e))


def nca_pair(p: Pairs) -> Tensor:
    """-log s(bu) - log s(-bu) / 2 - log s(-bv) / 2. NCA (arXiv 2402.05369)."""
    return -logsigmoid(p.beta * p.u) - 0.5 * logsigmoid(-p.beta * p.u) - 0.5 * logsigmoid(-p.beta * p.v)


def robust(p: Pairs) -> Tensor:
    """DPO unbiased under labels that are flipped with probability e. Robust DPO eq. 11 (arXiv 2403.00409)."""
    z, e = p.beta * p.margin, p.label_smoothing
    return (-(1 - e) * logsigmoid(z) + e * logsigmoid(-z)) / (1 - 2 * e)


def bco_pair(p: Pairs) -> Tensor:
    """-log s(bu) - log s(-bv): right and wrong answers apart. BCO (arXiv 2404.04656) without its running mean."""
    return -logsigmoid(p.beta * p.u) - logsigmoid(-p.beta * p.v)


def sppo_hard(p: Pairs) -> Tensor:
    """(u - 1/(2b))^2 + (v + 1/(2b))^2. SPPO eq. 4.7 with win probabilities 1 and 0 (arXiv 2405.00675)."""
    return (p.u - 0.5 / p.beta).square() + (p.v + 0.5 / p.beta).square()


def aot(p: Pairs) -> Tensor:
    """DPO on the sorted margins of policy and reference. AOT, paired (arXiv 2406.05882)."""
    sorted_margin = (p.chosen_logps - p.rejected_logps).sort().values
    return _smoothed(
        p.beta * (sorted_margin - (p.ref_chosen_logps - p.ref_rejected_logps).sort().values), p.label_smoothing
    )


def aot_unpaired(p: Pairs) -> Tensor:
    """DPO between the sorted chosen and the sorted rejected log ratios. AOT, unpaired (arXiv 2406.05882)."""
    return _smoothed(p.beta * (p.u.sort().values - p.v.sort().values), p.label_smoothing)


def apo_zero(p: Pairs) -> Tensor:
    """1 - s(bu) + s(bv): chosen up, rejected down. APO eq. 7 (arXiv 2408.06266)."""
    return 1 - (p.beta * p.u).sigmoid() + (p.beta * p.v).sigmoid()


def apo_down(p: Pairs) -> Tensor:
    """s(bu) + 1 - s(b(u - v)): chosen down, rejected further down. APO eq. 8 (arXiv 2408.06266)."""
    return (p.beta * p.u).sigmoid() + 1 - (p.beta * (p.u - p.v)).sigmoid()


def discopop(p: Pairs) -> Tensor:
    """Logistic and exponential loss, mixed by m = s(bd / tau). DiscoPOP eq. 5 (arXiv 2406.08414)."""
    z = p.beta * p.margin
    m = (z / p.discopop_tau).sigmoid()
    return -logsigmoid(z) * (1 - m) + (-z).exp() * m


def sft(p: Pairs) -> Tensor:
    """Token mean of -log pi over the chosen answers, the same for all pairs. The third part of MPO (2411.10442)."""
    return p.sft_loss


def sigmoid_norm(p: Pairs) -> Tensor:
    """-log s(b d) with d per token. Length-normalised DPO of Tulu 3 (arXiv 2411.15124)."""
    return -logsigmoid(p.beta * p.mean_margin)


DPO_LOSSES: dict[str, Callable[[Pairs], Tensor]] = {
    f.__name__: f
    for f in (
        sigmoid, hinge, ipo, exo_pair, nca_pair, robust, bco_pair, sppo_hard, aot, aot_unpaired, apo_zero, apo_down,
        discopop, sft, sigmoid_norm,
    )
}  # fmt: skip


def dpo_loss(
    per_token_logps: Tensor,
    completion_mask: Tensor,
    *,
    ref_per_token_logps: Tensor | None = None,
    loss_type: str | Sequence[str] = "sigmoid",
    loss_weights: Sequence[float] | None = None,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    smooth_sigmoid: bool = False,
    f_divergence_type: str = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
    ld_alpha: float | None = None,
    log_sum_sq_probs: Tensor | None = None,
    reference_free: bool = False,
    discopop_tau: float = 0.05,
    num_pairs: float | Tensor | None = None,
    num_tokens: float | Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Direct preference optimization with any of 15 losses, or a weighted sum of several.

    Example: policy and reference alike (u = v = 0): sigmoid gives log 2 = 0.693, hinge 1, ipo with beta 0.1 gives 25.

    Args:
        per_token_logps: (B, 2, T) float, nats.
        completion_mask: (B, 2, T), 1 for tokens of the answers.
        ref_per_token_logps: (B, 2, T), of the reference; needed unless reference_free.
        loss_type: a name in DPO_LOSSES, or several: MPO is ["sigmoid", "bco_pair", "sft"] ...
        loss_weights: ... with weights [0.8, 0.2, 1.0]; by default 1 each. They are not normalised.
        beta: how much a log ratio counts; large: stay near the reference.
        label_smoothing: share of labels taken to be wrong, for exo_pair, robust, aot, aot_unpaired ...
        smooth_sigmoid: ... and for sigmoid too (TRL ignores it there since 0.29).
        f_divergence_type, f_alpha_divergence_coef: which divergence from the reference is bounded, see _score; others
            than reverse_kl only for the losses in ANY_DIVERGENCE.
        ld_alpha: weight of the tokens of an answer beyond the length of the shorter one (LD-DPO), policy and reference.
        log_sum_sq_probs: (B, 2, T), log sum_j p_j^2 of each predicted distribution; given, pairs are weighted with how
            likely the policy is to say such answers itself (WPO). A constant for the gradient.
        reference_free: take the reference to be uniform.
        num_pairs: pairs of the optimizer step, by default B.
        num_tokens: chosen tokens of the optimizer step (for sft), by default those of the mask.
    Returns:
        loss, a scalar; and diagnostics, scalars: rewards/chosen, rewards/rejected (beta times the log ratio, nats),
        rewards/margins, rewards/accuracies (share of pairs with a positive margin), logps/chosen, logps/rejected.
    Raises:
        ValueError: an answer without tokens, no reference, an unknown name, or options that do not go together.
    Source: arXiv 2305.18290; f-DPO 2309.16240; LD-DPO eq. 9, 2409.06411; WPO eq. 2, 2406.11827; equals
        DPOTrainer._compute_loss of TRL 1.16.
    """
    names = [loss_type] if isinstance(loss_type, str) else list(loss_type)
    weights = [1.0] * len(names) if loss_weights is None else list(loss_weights)
    check_dpo_options(names, weights, label_smoothing, f_divergence_type, log_sum_sq_probs is not None)
    if ref_per_token_logps is None and not reference_free:
        raise ValueError("dpo_loss needs ref_per_token_logps; or say reference_free")
    lengths = completion_mask.sum(-1)  # (B, 2)
    if (lengths == 0).any():
        raise ValueError("an answer has no tokens: its pair teaches nothing about it; drop the pair or cut less")

    B = len(completion_mask)
    share = 1 / B if num_pairs is None else 1 / num_pairs
    counted = completion_mask if ld_alpha is None else _fade_tail(completion_mask, ld_alpha)
    logps = (per_token_logps * counted).sum(-1)  # (B, 2)
    ref = logps.new_zeros(()).expand(B, 2) if reference_free else (ref_per_token_logps * counted).sum(-1)
    log_ratios = logps - ref
    scores = _score(log_ratios, f_divergence_type, f_alpha_divergence_coef)
    tokens = lengths[:, 0].sum() if num_tokens is None else num_tokens
    pairs = Pairs(
        *logps.unbind(1), *ref.unbind(1), *log_ratios.unbind(1), *scores.unbind(1), *lengths.unbind(1),
        # summed with weight `share` over pairs this is -sum(logps of chosen tokens) / tokens
        sft_loss=(-(per_token_logps * completion_mask)[:, 0].sum() / (tokens * share * B)).expand(B),
        beta=beta, label_smoothing=label_smoothing, smooth_sigmoid=smooth_sigmoid, discopop_tau=discopop_tau,
    )  # fmt: skip
    per_pair_loss = sum(weight * DPO_LOSSES[name](pairs) for name, weight in zip(names, weights, strict=True))  # (B,)
    if log_sum_sq_probs is not None:
        # w = exp(mean_t(log pi - log sum_j p_j^2)), of both answers
        aligned = ((per_token_logps.detach() - log_sum_sq_probs) * completion_mask).sum(-1) / lengths
        per_pair_loss = per_pair_loss * aligned.sum(-1).exp()
    return per_pair_loss.sum() * share, _diagnostics(pairs)


def kto_loss(
    per_token_logps: Tensor,
    ref_per_token_logps: Tensor,
    completion_mask: Tensor,
    labels: Tensor,
    *,
    kl: Tensor | None = None,
    loss_type: str = "kto",
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    num_sequences: float | Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Learn from single answers that are marked good or bad.

        kto                 good: 1 - s(beta (u - kl))      bad: 1 - s(beta (kl - u))
        apo_zero_unpaired   good: 1 - s(beta u)             bad: s(beta u)

    Example: policy and reference alike and kl 0: every answer has loss 0.5.

    Args:
        per_token_logps, ref_per_token_logps, completion_mask: (B, T).
        labels: (B,) bool, True for good.
        kl: a scalar without gradient, see kto_kl; needed for kto.
        num_sequences: answers of the optimizer step, by default B.
    Returns:
        loss, a scalar; and diagnostics: rewards/chosen and rewards/rejected, means over the good and the bad (NaN
        where there are none), kl.
    Raises:
        ValueError: kto without kl, or an unknown loss_type.
    Source: KTO eq. 8 (arXiv 2402.01306); equals TRL's KTOTrainer.
    """
    if loss_type not in KTO_LOSS_TYPES:
        raise ValueError(f"loss_type is {loss_type!r}; known are {', '.join(KTO_LOSS_TYPES)}")
    if loss_type == "kto" and kl is None:
        raise ValueError("loss_type kto needs kl; see kto_kl")
    u = ((per_token_logps - ref_per_token_logps) * completion_mask).sum(-1)  # (B,)
    point = kl if loss_type == "kto" else 0.0
    good = labels.bool()
    z = beta * torch.where(good, u - point, point - u)
    weight = torch.where(good, u.new_tensor(desirable_weight), u.new_tensor(undesirable_weight))
    per_answer_loss = weight * (1 - z.sigmoid())
    rewards = beta * u.detach()
    diagnostics = {"rewards/chosen": rewards[good].mean(), "rewards/rejected": rewards[~good].mean()}
    if loss_type == "kto":
        diagnostics["kl"] = kl
    return per_answer_loss.sum() / (len(labels) if num_sequences is None else num_sequences), diagnostics


def kto_kl(per_token_logps: Tensor, ref_per_token_logps: Tensor, completion_mask: Tensor) -> Tensor:
    """How far the policy has moved on answers to *other* prompts, (B, T) -> a scalar, never negative, no gradient.

    Source: KTO's z_0; TRL's KTOTrainer, which pairs each prompt with the next row's answer.
    """
    log_ratio = ((per_token_logps - ref_per_token_logps) * completion_mask).sum(-1)
    return log_ratio.mean().detach().clamp(min=0)


def reward_loss(
    chosen_rewards: Tensor,
    rejected_rewards: Tensor,
    *,
    margin: Tensor | None = None,
    center_rewards_coefficient: float | None = None,
    num_pairs: float | Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-log sigmoid(r_c - r_r - margin), the Bradley-Terry likelihood of the preferences.

    Example: rewards 2 and 1: log(1 + e^-1) = 0.313.

    Args:
        chosen_rewards, rejected_rewards: (B,).
        margin: (B,), by how much the chosen one is to win.
        center_rewards_coefficient: weight of (r_c + r_r)^2, which keeps rewards around zero.
        num_pairs: pairs of the optimizer step, by default B.
    Returns:
        loss, a scalar; and diagnostics: rewards/chosen, rewards/rejected, rewards/margins, rewards/accuracies.
    Source: InstructGPT eq. 1 (arXiv 2203.02155), Llama 2 eq. 2 (2307.09288), centring 2312.09244; TRL's RewardTrainer.
    """
    difference = chosen_rewards - rejected_rewards
    per_pair_loss = -logsigmoid(difference if margin is None else difference - margin)
    if center_rewards_coefficient is not None:
        per_pair_loss = per_pair_loss + center_rewards_coefficient * (chosen_rewards + rejected_rewards).square()
    loss = per_pair_loss.sum() / (len(difference) if num_pairs is None else num_pairs)
    return loss, _reward_figures(chosen_rewards.detach(), rejected_rewards.detach())


def check_dpo_options(
    loss_type: Sequence[str],
    loss_weights: Sequence[float] | None,
    label_smoothing: float,
    f_divergence_type: str,
    use_weighting: bool,
):
    """Raise ValueError for options of dpo_loss that are unknown or do not go together."""
    if not loss_type or (loss_weights is not None and len(loss_type) != len(loss_weights)):
        raise ValueError(f"loss_type is {loss_type}, loss_weights {loss_weights}: give one weight for each name")
    for name in loss_type:
        if name not in DPO_LOSSES:
            raise ValueError(f"loss_type is {name!r}; known are {', '.join(DPO_LOSSES)}")
        if f_divergence_type != "reverse_kl" and name not in ANY_DIVERGENCE:
            raise ValueError(
                f"{name} is made for reverse_kl; {f_divergence_type} goes with {', '.join(ANY_DIVERGENCE)}"
            )
        if use_weighting and name in ("aot", "aot_unpaired"):
            raise ValueError(f"{name} sorts the pairs; weights of single pairs (WPO) have no meaning for it")
    if f_divergence_type not in F_DIVERGENCES:
        raise ValueError(f"f_divergence_type is {f_divergence_type!r}; known are {', '.join(F_DIVERGENCES)}")
    if "exo_pair" in loss_type and not label_smoothing:
        raise ValueError("exo_pair takes log(label_smoothing): give a label_smoothing over 0, such as 1e-3")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}: a share of wrong labels, in [0, 0.5)")


def _score(log_ratio: Tensor, divergence: str, alpha: float) -> Tensor:
    """f'(t) of t = pi / pi_ref, given log t.

    reverse_kl log t; forward_kl 1 - 1/t; js_divergence log(2t / (1 + t)); alpha_divergence (t^(a-1) - 1) / (a - 1).
    """
    if divergence == "reverse_kl" or (divergence == "alpha_divergence" and abs(alpha - 1) < 1e-6):
        return log_ratio
    if divergence == "forward_kl":
        return 1 - (-log_ratio).exp()
    if divergence == "js_divergence":
        return math.log(2) + logsigmoid(log_ratio)
    if divergence == "alpha_divergence":
        return (((alpha - 1) * log_ratio).clamp(max=80.0).exp() - 1) / (alpha - 1)  # e^80 still is a float32
    raise ValueError(f"f_divergence_type is {divergence!r}; known are {', '.join(F_DIVERGENCES)}")


def _fade_tail(completion_mask: Tensor, ld_alpha: float) -> Tensor:
    """(B, 2, T): 1 up to the length of the shorter answer, ld_alpha beyond, 0 where there is no token."""
    position = completion_mask.cumsum(-1)
    shared = completion_mask.sum(-1).amin(1)[:, None, None]
    return torch.where(position <= shared, completion_mask, ld_alpha * completion_mask)


def _smoothed(z: Tensor, label_smoothing: float) -> Tensor:
    return -(1 - label_smoothing) * logsigmoid(z) - label_smoothing * logsigmoid(-z)


def _diagnostics(pairs: Pairs) -> dict[str, Tensor]:
    figures = _reward_figures(pairs.beta * pairs.u.detach(), pairs.beta * pairs.v.detach())
    logps = {"logps/chosen": pairs.chosen_logps, "logps/rejected": pairs.rejected_logps}
    return figures | {name: value.detach().mean() for name, value in logps.items()}


def _reward_figures(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    return {
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "rewards/margins": (chosen - rejected).mean(),
        "rewards/accuracies": (chosen > rejected).to(chosen.dtype).mean(),
    }
