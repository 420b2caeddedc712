"""KTO loss (Kahneman-Tversky optimization), to use in your own training stage."""

from typing import Literal, get_args

import torch
from torch import Tensor

from minivlmrl.losses.grpo import check_known

KTOType = Literal["kto", "apo_zero_unpaired"]
KTO_LOSS_TYPES = get_args(KTOType)


def kto_loss(
    per_token_logps: Tensor,
    mask: Tensor,
    labels: Tensor,
    *,
    loss_type: KTOType = "kto",
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    ref_per_token_logps: Tensor,
    kl: Tensor | None = None,
    normalizer=None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the KTO loss for answers labeled good or bad.

        kto                 good: 1 - s(beta (u - kl))      bad: 1 - s(beta (kl - u))
        apo_zero_unpaired   good: 1 - s(beta u)             bad: s(beta u)

    where u = log pi - log pi_ref and s is the sigmoid. Example: if policy and reference are equal and kl is 0, all
    losses are 0.5.

    Args:
        per_token_logps: (B, T), policy log-probabilities in nats, with gradient.
        mask: (B, T), 1 for answer tokens.
        labels: (B,) bool, True for good answers.
        beta: log-ratio factor, > 0.
        desirable_weight, undesirable_weight: weights for good and bad answers.
        ref_per_token_logps: (B, T), reference log-probabilities, without gradient.
        kl: scalar without gradient (see kto_kl); required for loss_type kto.
    Returns:
        loss; metrics kl, rewards/chosen and rewards/rejected (means over good and bad answers, NaN if there are none)
    Source: KTO eq. 8 (arXiv 2402.01306); equals KTOTrainer._compute_loss in TRL 1.16.
    """
    check_known("loss_type", loss_type, KTO_LOSS_TYPES)
    u = ((per_token_logps - ref_per_token_logps) * mask).sum(-1)  # (B,)
    zero_point = u.new_zeros(())
    if loss_type == "kto":
        if kl is None:
            raise ValueError("loss_type kto needs kl; see kto_kl")
        zero_point = kl
    good = labels.bool()
    z = beta * torch.where(good, u - zero_point, zero_point - u)
    desirable = u.new_tensor(desirable_weight)
    undesirable = u.new_tensor(undesirable_weight)
    # not 1 - sigmoid(z), which float32 rounds to 0 at z = 20
    per_answer_loss = torch.where(good, desirable, undesirable) * (-z).sigmoid()
    rewards = beta * u.detach()
    metrics = {"rewards/chosen": rewards[good].mean(), "rewards/rejected": rewards[~good].mean()}
    if loss_type == "kto":
        metrics["kl"] = zero_point
    num_answers = len(labels) if normalizer is None else normalizer.sequences
    return per_answer_loss.sum() / num_answers, metrics


def kto_kl(per_token_logps: Tensor, ref_per_token_logps: Tensor, mask: Tensor) -> Tensor:
    """Estimate KL(pi || pi_ref) for KTO: a scalar in nats, at least 0, without gradient.

    Args:
        per_token_logps, ref_per_token_logps, mask: (B, T), for prompts paired with answers to *other* prompts (KTO's
            z_0); TRL takes them from the preceding row.
    """
    log_ratio = ((per_token_logps - ref_per_token_logps) * mask).sum(-1)
    return log_ratio.mean().detach().clamp(min=0)
