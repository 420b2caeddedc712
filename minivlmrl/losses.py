"""Policy-gradient losses: GRPO and its family as one pure function of log-probabilities. Imports torch alone.

Dimension letters: B completions, T tokens of the longest. A row's tokens stand on the left; completion_mask says which
are real. Everywhere `per_token_logps` carries the gradient; old, reference and advantages are constants.

The loss is put together in this order, each step a function or a line below:

    ratio       r_t = pi(o_t) / pi_old(o_t), by token or for a whole row           importance_ratio
    term        what is to be made small for each token                            clipped_term, cispo_term, ...
    masks       off-policy rows and low-entropy tokens lose their term, the sampler's mismatch reweights it
    KL          + beta * KL: neither masked nor reweighted                         kl_term
    aggregate   how tokens and rows are averaged                                   aggregate
    entropy     - entropy_coef * mean entropy

Each loss divides by counts that the caller may give: those of the whole optimizer step. Then the gradients of
micro-batches, however the step is split, add up to the gradient of the step.
"""

import math

import torch
from torch import Tensor

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "rloo")  # one term, six ways to average it
LOSS_TYPES = (*CLIPPED, "cispo", "sapo", "vespo")
IMPORTANCE_SAMPLING_LEVELS = ("token", "sequence", "sequence_token")
KL_ESTIMATORS = ("k1", "k2", "k3")
CORRECTION_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def grpo_loss(
    per_token_logps: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    *,
    old_per_token_logps: Tensor | None = None,
    ref_per_token_logps: Tensor | None = None,
    sampling_per_token_logps: Tensor | None = None,
    importance_sampling_ratio: Tensor | None = None,
    entropies: Tensor | None = None,
    loss_type: str = "dapo",
    importance_sampling_level: str = "token",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    beta: float = 0.0,
    kl_estimator: str = "k3",
    kl_straight_through: bool = False,
    use_bias_correction_kl: bool = True,
    top_entropy_quantile: float = 1.0,
    entropy_threshold: float | Tensor | None = None,
    entropy_coef: float = 0.0,
    off_policy_mask_threshold: float | None = None,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    max_completion_length: int | None = None,
    num_sequences: float | Tensor | None = None,
    num_tokens: float | Tensor | None = None,
    num_entropy_tokens: float | Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy-gradient loss of a batch of completions.

    Example: one row of two tokens, on-policy (ratio 1), advantage 0.5, beta 0: every per-token loss is -0.5, so the
    loss is -0.5 for grpo, bnpo and dapo; dr_grpo with max_completion_length 4 gives -0.25, luspo (a sum) -1.

    Args:
        per_token_logps: (B, T) float, nats, of the policy that is trained.
        advantages: (B,) or (B, T).
        completion_mask: (B, T), 1 for real tokens. A row of zeros (a truncated completion) teaches nothing but counts
            as a row.
        old_per_token_logps: (B, T), of the policy that sampled; None: the present one (ratio 1, its gradient kept).
        ref_per_token_logps: (B, T), of the reference; needed with beta > 0.
        sampling_per_token_logps: (B, T), as the sampler recorded them, for off_policy_mask_threshold; None: the old.
        importance_sampling_ratio: (B, T) or (B, 1), see rollout_importance_ratio; multiplies the term (vespo: its
            sequence weight).
        entropies: (B, T), nats, with gradient; needed with top_entropy_quantile < 1 or entropy_coef.
        loss_type: the term and its average, see the functions below and `aggregate`.
        importance_sampling_level: see importance_ratio. rloo has its own.
        epsilon_low, epsilon_high: the ratio is clipped to [1 - epsilon_low, 1 + epsilon_high]; for cispo epsilon_high
            is the bound itself and there is no lower one.
        delta: bound of the ratio on the unclipped side too ("two-sided clipping"). Keep it over 1 + epsilon_high: below
            that it takes the clip's place.
        beta, kl_estimator, kl_straight_through, use_bias_correction_kl: see kl_term.
        top_entropy_quantile: the term counts only for tokens whose entropy is in this upper share; the divisors keep
            all tokens.
        entropy_threshold: what such an entropy must reach, of the whole step; by default this batch's quantile.
        entropy_coef: weight of the mean entropy, which is to grow.
        off_policy_mask_threshold: rows with a negative advantage whose mean log ratio sampler / policy is over this
            lose their term (nats per token).
        sapo_temperature_pos, sapo_temperature_neg: see sapo_term.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: see vespo_term.
        max_completion_length, num_sequences, num_tokens: see `aggregate`.
        num_entropy_tokens: tokens of the step that the entropy's mean is over; by default this batch's own mean,
            weighted by its share of rows (as TRL does; it depends on how the step is split).
    Returns:
        loss, a scalar; and diagnostics, scalars without gradient: kl, and by loss_type clip_ratio/low_mean,
        clip_ratio/high_mean, clip_ratio/region_mean (shares of tokens, of rows at level "sequence"),
        cispo_clip_ratio, vespo/phi_seq_mean.
    Raises:
        ValueError: something that an option needs is missing, or an option has no meaning.
    Source: DeepSeekMath eq. 3 and 4 (arXiv 2402.03300); equals GRPOTrainer._compute_loss of TRL 1.16, and for rloo
        RLOOTrainer's. Entropy mask: 2506.01939; off-policy mask: DeepSeek-V3.2 (2512.02556).
    """
    if epsilon_high < epsilon_low:
        raise ValueError(f"epsilon_high {epsilon_high} is below epsilon_low {epsilon_low}; give at least as much room")
    if beta and ref_per_token_logps is None:
        raise ValueError(f"beta is {beta}: the KL term needs ref_per_token_logps")
    if entropies is None and (entropy_coef or top_entropy_quantile < 1):
        raise ValueError("entropy_coef and top_entropy_quantile need entropies")
    if advantages.dim() == 1:
        advantages = advantages[:, None]  # (B, 1): one advantage for all tokens of a row
    if old_per_token_logps is None:
        old_per_token_logps = per_token_logps.detach()

    log_ratio = per_token_logps - old_per_token_logps
    level = "sequence_sum" if loss_type == "rloo" else importance_sampling_level
    ratio = importance_ratio(log_ratio, completion_mask, level)  # (B, T), or (B, 1) for whole rows

    if loss_type in CLIPPED:
        per_token_loss, diagnostics = clipped_term(ratio, advantages, epsilon_low, epsilon_high, delta)
    elif loss_type == "cispo":
        per_token_loss, diagnostics = cispo_term(per_token_logps, ratio, advantages, epsilon_high)
    elif loss_type == "sapo":
        per_token_loss, diagnostics = sapo_term(ratio, advantages, sapo_temperature_pos, sapo_temperature_neg)
    elif loss_type == "vespo":
        shape = (vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg)
        log_weight = _vespo_log_weight(log_ratio.detach(), importance_sampling_ratio, completion_mask)
        per_token_loss, diagnostics = vespo_term(per_token_logps, log_weight, advantages, *shape)
    else:
        raise ValueError(f"loss_type is {loss_type!r}; known are {', '.join(LOSS_TYPES)}")

    if off_policy_mask_threshold is not None:
        sampler = old_per_token_logps if sampling_per_token_logps is None else sampling_per_token_logps
        drift = _row_mean((sampler - per_token_logps.detach()).nan_to_num(0.0), completion_mask)  # (B, 1)
        per_token_loss = per_token_loss * ((advantages >= 0) | (drift <= off_policy_mask_threshold))
    kept = completion_mask
    if top_entropy_quantile < 1:
        if entropy_threshold is None:
            entropy_threshold = top_entropy_threshold(entropies, completion_mask, top_entropy_quantile)
        kept = completion_mask * (entropies >= entropy_threshold)
        per_token_loss = per_token_loss * kept
    if importance_sampling_ratio is not None and loss_type != "vespo":
        per_token_loss = per_token_loss * importance_sampling_ratio
    if beta:
        per_token_kl = kl_term(per_token_logps, ref_per_token_logps, kl_estimator, kl_straight_through)
        if use_bias_correction_kl:  # k2's gradient is the KL's already: there the ratio only reweights
            is_k2 = kl_straight_through or kl_estimator == "k2"
            per_token_kl = per_token_kl * (ratio.detach() if is_k2 else ratio)
        per_token_loss = per_token_loss + beta * per_token_kl
        diagnostics["kl"] = per_token_kl

    loss = aggregate(per_token_loss, completion_mask, loss_type, max_completion_length, num_sequences, num_tokens)
    if entropy_coef:
        rows = len(completion_mask)
        share = 1.0 if num_sequences is None else rows / num_sequences
        over = kept.sum().clamp(min=1) / share if num_entropy_tokens is None else num_entropy_tokens
        loss = loss - entropy_coef * (entropies * kept).sum() / over
    return loss, {name: _mean(value.detach(), completion_mask) for name, value in diagnostics.items()}


def importance_ratio(log_ratio: Tensor, completion_mask: Tensor, level: str) -> Tensor:
    """How much likelier the policy makes what the old policy drew.

        token            r_t = pi(o_t) / pi_old(o_t)                                             GRPO
        sequence         s = (prod_t r_t)^(1/|o|), the geometric mean, for all tokens of a row   GSPO
        sequence_token   the value of s, with the gradient of each token's own log-probability   GSPO-token
        sequence_sum     prod_t r_t, the ratio of whole completions                              RLOO

    Args:
        log_ratio: (B, T) log r_t, with gradient.
    Returns:
        (B, T) for token and sequence_token, else (B, 1).
    Source: GSPO eq. 7 and 14 (arXiv 2507.18071), RLOO (2402.14740); TRL's GRPOTrainer (token, sequence), its
        gspo_token trainer of 1.12 (sequence_token), RLOOTrainer (sequence_sum).
    """
    if level == "token":
        return log_ratio.exp()
    if level == "sequence":
        return _row_mean(log_ratio, completion_mask).exp()
    if level == "sequence_token":
        return (_row_mean(log_ratio, completion_mask).detach() + log_ratio - log_ratio.detach()).exp()
    if level == "sequence_sum":
        return (log_ratio * completion_mask).sum(-1, keepdim=True).exp()
    raise ValueError(f"importance_sampling_level is {level!r}; known are {', '.join(IMPORTANCE_SAMPLING_LEVELS)}")


def clipped_term(
    ratio: Tensor, advantages: Tensor, epsilon_low: float, epsilon_high: float, delta: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(r A, clip(r, 1 - eps_low, 1 + eps_high) A): no gain from moving further than the clip range.

    Source: PPO eq. 7 (arXiv 1707.06347), DAPO's two bounds (2503.14476), delta of INTELLECT-2 (2505.07291).
    """
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    low = (bounded < 1 - epsilon_low) & (advantages < 0)
    high = (bounded > 1 + epsilon_high) & (advantages > 0)
    shares = {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low | high}
    return -torch.min(bounded * advantages, clipped * advantages), shares


def cispo_term(
    per_token_logps: Tensor, ratio: Tensor, advantages: Tensor, epsilon_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-sg(min(r, eps_high)) A log pi: the weight is clipped instead of the update, so every token keeps a gradient.

    Source: MiniMax-M1 eq. 4 (arXiv 2506.13585), whose eps_high is 5.
    """
    weight = ratio.clamp(max=epsilon_high).detach()
    return -weight * advantages * per_token_logps, {"cispo_clip_ratio": (ratio > epsilon_high) & (advantages > 0)}


def sapo_term(
    ratio: Tensor, advantages: Tensor, temperature_pos: float, temperature_neg: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-(4 / tau) sigmoid(tau (r - 1)) A: a soft gate in place of the clip, slope 1 at r = 1.

    tau is temperature_pos where A > 0, else temperature_neg.
    Source: SAPO eq. 5 and 6 (arXiv 2511.20347).
    """
    tau = torch.where(advantages > 0, temperature_pos, temperature_neg)
    return -(torch.sigmoid(tau * (ratio - 1)) * 4 / tau) * advantages, {}


def vespo_term(
    per_token_logps: Tensor,
    log_weight: Tensor,
    advantages: Tensor,
    k_pos: float,
    lambda_pos: float,
    k_neg: float,
    lambda_neg: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-sg(phi(W)) A log pi with phi(W) = W^k exp(lambda (1 - W)), 1 at W = 1 and small far from it.

    Args:
        log_weight: (B, 1), log of W, the ratio of whole completions. k and lambda are the _pos ones where A >= 0.
    Source: VESPO (arXiv 2602.10693).
    """
    k = torch.where(advantages >= 0, k_pos, k_neg)
    lam = torch.where(advantages >= 0, lambda_pos, lambda_neg).clamp(min=1e-4)
    phi = (lam + k * log_weight - lam * log_weight.exp()).exp().nan_to_num(0.0, 0.0, 0.0)
    return -phi * advantages * per_token_logps, {"vespo/phi_seq_mean": phi}


def _vespo_log_weight(log_ratio: Tensor, importance_sampling_ratio: Tensor | None, completion_mask: Tensor) -> Tensor:
    """log W (B, 1): the sum over tokens of log ratios, and of the sampler's mismatch where it is given."""
    lowest, highest = math.log(1e-8), 20.0
    total = (log_ratio.clamp(-highest, highest) * completion_mask).sum(-1, keepdim=True)
    if importance_sampling_ratio is not None:
        total = total + importance_sampling_ratio.log().clamp(lowest, highest).sum(-1, keepdim=True)
    return total.clamp(lowest, highest)


def kl_term(
    per_token_logps: Tensor, ref_per_token_logps: Tensor, estimator: str = "k3", straight_through: bool = False
) -> Tensor:
    """Estimate KL(pi || pi_ref) at each token from the one token that was drawn.

                                                 value                        expected gradient, on-policy
        k1   log pi - log pi_ref                 unbiased                     0
        k2   (log pi - log pi_ref)^2 / 2         biased                       the KL's
        k3   pi_ref/pi - log(pi_ref/pi) - 1      unbiased, never negative     that of KL(pi_ref || pi)

    Args:
        straight_through: the estimator's value with k2's gradient.
            grpo_loss's use_bias_correction_kl mends the gradient in another way: it weighs the term with the ratio,
            whose own gradient makes that of k1 and k3 the KL's, off-policy too. (For k2 and straight_through, which
            have the right one, the ratio is a constant there.)
    Returns:
        (B, T) nats.
    Source: Schulman, "Approximating KL divergence" (2020); on gradients arXiv 2506.09477; k3 as in TRL, the others and
        the straight-through form as in verl.
    """
    log_ref_ratio = ref_per_token_logps - per_token_logps
    k2 = 0.5 * log_ref_ratio.square()
    if estimator == "k1":
        kl = -log_ref_ratio
    elif estimator == "k2":
        kl = k2
    elif estimator == "k3":
        kl = log_ref_ratio.exp() - log_ref_ratio - 1
    else:
        raise ValueError(f"kl_estimator is {estimator!r}; known are {', '.join(KL_ESTIMATORS)}")
    return kl.detach() + k2 - k2.detach() if straight_through else kl


def rollout_importance_ratio(
    old_per_token_logps: Tensor,
    sampling_per_token_logps: Tensor,
    completion_mask: Tensor,
    *,
    mode: str = "sequence_mask",
    clip_max: float | None = 3.0,
    clip_min: float | None = None,
) -> Tensor:
    """Correct for a sampler whose log-probabilities are not quite the trainer's (other kernels, other precision).

    Args:
        old_per_token_logps: (B, T), of the policy that sampled, computed as in training.
        sampling_per_token_logps: (B, T), as the sampler recorded them; NaN where it has none (ratio 1).
        mode: "token_..." one ratio a token, "sequence_..." their product for the row; "..._truncate" clips it to
            [clip_min, clip_max], "..._mask" sets it to 0 outside.
    Returns:
        (B, T) or (B, 1), for grpo_loss(importance_sampling_ratio=).
    Source: truncated and masked importance sampling (Yao et al., "Your efficient RL framework secretly brings you
        off-policy RL training", 2025); TRL's vllm_importance_sampling_mode.
    """
    if mode not in CORRECTION_MODES:
        raise ValueError(f"mode is {mode!r}; known are {', '.join(CORRECTION_MODES)}")
    log_ratio = ((old_per_token_logps - sampling_per_token_logps) * completion_mask).nan_to_num(0.0)
    ratio = (log_ratio.sum(-1, keepdim=True) if mode.startswith("sequence") else log_ratio).exp()
    low, high = -math.inf if clip_min is None else clip_min, math.inf if clip_max is None else clip_max
    if mode.endswith("truncate"):
        return ratio.clamp(low, high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def top_entropy_threshold(entropies: Tensor, completion_mask: Tensor, quantile: float) -> Tensor:
    """The entropy that the given upper share of tokens reaches, a scalar (infinite for no tokens).

    Source: arXiv 2506.01939 (20 % of tokens); TRL's get_high_entropy_mask.
    """
    real = entropies.detach()[completion_mask.bool()].float()
    return torch.quantile(real, 1 - quantile) if len(real) else real.new_tensor(math.inf)


def aggregate(
    per_token_loss: Tensor,
    completion_mask: Tensor,
    loss_type: str,
    max_completion_length: int | None = None,
    num_sequences: float | Tensor | None = None,
    num_tokens: float | Tensor | None = None,
) -> Tensor:
    """Average per-token losses, which decides how much a long completion weighs.

        grpo, sapo, rloo     mean over rows of each row's token mean   a token of a long row weighs less
        luspo                mean over rows of each row's sum          a long row weighs more
        dr_grpo              sum / (rows * max_completion_length)      a constant divisor: no length bias
        dapo, cispo, vespo   sum / tokens of the optimizer step        all tokens of the step weigh the same
        bnpo                 token mean of this micro-batch, weighted by its share of rows: the only average that
                             depends on how the step is split (it does so in TRL too)

    Args:
        per_token_loss: (B, T), or (B, 1) for one value for all tokens of a row.
        num_sequences: rows of the optimizer step, by default B.
        num_tokens: completion tokens of the optimizer step, by default those of the mask.
    Raises:
        ValueError: an unknown loss_type, or dr_grpo without max_completion_length.
    Source: TRL 1.16 with num_sequences = B * gradient_accumulation_steps and
        num_tokens = num_items_in_batch / num_processes * gradient_accumulation_steps / steps_per_generation.
        LUSPO: arXiv 2602.05261; Dr. GRPO: 2503.20783; DAPO: 2503.14476.
    """
    B = len(completion_mask)
    num_sequences = B if num_sequences is None else num_sequences
    tokens_here = completion_mask.sum().clamp(min=1)
    masked = per_token_loss * completion_mask
    if loss_type in ("grpo", "sapo", "rloo"):
        return (masked.sum(-1) / completion_mask.sum(-1).clamp(min=1)).sum() / num_sequences
    if loss_type == "luspo":
        return masked.sum() / num_sequences
    if loss_type == "bnpo":
        return masked.sum() / tokens_here * (B / num_sequences)
    if loss_type in ("dapo", "cispo", "vespo"):
        return masked.sum() / (tokens_here if num_tokens is None else num_tokens)
    if loss_type == "dr_grpo":
        if max_completion_length is None:
            raise ValueError("loss_type dr_grpo divides by max_completion_length; give it")
        return masked.sum() / (num_sequences * max_completion_length)
    raise ValueError(f"loss_type is {loss_type!r}; known are {', '.join(LOSS_TYPES)}")


def _row_mean(value: Tensor, mask: Tensor) -> Tensor:
    """(B, T) -> (B, 1): mean over each row's real tokens."""
    return (value * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def _mean(value: Tensor, mask: Tensor) -> Tensor:
    """Mean over real tokens of a (B, T) tensor, over rows of a (B, 1) one."""
    value = value.to(mask.dtype if mask.is_floating_point() else torch.float32)
    return value.mean() if value.shape[1] == 1 else (value * mask).sum() / mask.sum().clamp(min=1)
