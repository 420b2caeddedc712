"""SFT loss; sft.py imports only torch and grpo.py."""

from typing import Literal, get_args

from torch import Tensor

from minivlmrl.losses.grpo import check_known

SFTType = Literal["nll", "dft"]
SFT_LOSS_TYPES = get_args(SFTType)


def sft_loss(per_token_logps: Tensor, mask: Tensor, *, loss_type: SFTType = "nll", normalizer=None) -> Tensor:
    """Compute the mean negative log-probability over target tokens.

    Example: at log-probability -2 for all tokens, "nll" is 2 and "dft" is 2 e^-2 = 0.271.

    Args:
        per_token_logps: (B, T) float, policy log-probabilities in nats, with gradient.
        mask: (B, T), 1 for tokens to train on.
        loss_type: "nll" (negative log-likelihood), or "dft", which multiplies it by the detached token probability so
            that unlikely tokens do not dominate the gradient.
        normalizer: LossNormalizer with the divisor `tokens`, by default mask.sum().
    Source: DFT eq. 9 (arXiv 2508.05629); TRL's SFTTrainer, where normalizer.tokens is named num_items_in_batch.
    """
    check_known("loss_type", loss_type, SFT_LOSS_TYPES)
    per_token_loss = -per_token_logps
    if loss_type == "dft":
        per_token_loss = per_token_loss * per_token_logps.detach().exp()  # -p log p, with detached p
    num_tokens = mask.sum().clamp(min=1) if normalizer is None else normalizer.tokens
    return (per_token_loss * mask).sum() / num_tokens
