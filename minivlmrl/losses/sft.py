"""The supervised fine-tuning loss; sft.py imports only torch, so you can copy the file."""

from typing import Literal, get_args

from torch import Tensor

from minivlmrl.losses.grpo import check_known

SFTType = Literal["nll", "dft"]
SFT_LOSS_TYPES = get_args(SFTType)


def sft_loss(per_token_logps: Tensor, mask: Tensor, *, loss_type: SFTType = "nll", normalizer=None) -> Tensor:
    """Compute the mean negative log-probability over the demonstrated tokens.

    Example: if every token has the log-probability -2, the loss "nll" is 2, and "dft" is 2 e^-2 = 0.271.

    Args:
        per_token_logps: (B, T) float, log-probabilities under the policy in nats, with gradient.
        mask: (B, T), 1 for tokens that are trained on.
        loss_type: "nll" is the negative log-likelihood. "dft" multiplies each token's loss by the token's detached
            probability, so that unlikely tokens do not dominate the gradient.
        normalizer: LossNormalizer whose `tokens` divides the summed loss. None divides by the mask's sum.
    Source: DFT eq. 9 (arXiv 2508.05629); TRL's SFTTrainer, num_items_in_batch = normalizer.tokens.
    """
    check_known("loss_type", loss_type, SFT_LOSS_TYPES)
    per_token_loss = -per_token_logps
    if loss_type == "dft":
        per_token_loss = per_token_loss * per_token_logps.detach().exp()  # -sg(p) log p
    num_tokens = mask.sum().clamp(min=1) if normalizer is None else normalizer.tokens
    return (per_token_loss * mask).sum() / num_tokens
