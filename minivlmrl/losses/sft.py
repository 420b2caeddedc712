"""The loss of supervised fine-tuning; this file imports only torch, so that you can copy it."""

from typing import Literal, get_args

from torch import Tensor

SFTType = Literal["nll", "dft"]
SFT_LOSS_TYPES = get_args(SFTType)


def sft_loss(
    per_token_logps: Tensor, mask: Tensor, *, loss_type: SFTType = "nll", normalizer=None
) -> Tensor:
    """Compute the mean negative log-probability of the demonstrated tokens.

    Example: two rows have 1 and 3 tokens, all with log-probability -2. The loss is 2.0, the mean
    over the 4 tokens. With "dft", each token has the weight e^-2 = 0.135, so the loss is 0.271.

    Args:
        per_token_logps: (B, T) float, log-probabilities under the policy in nats, with gradient.
        mask: (B, T), 1 for tokens that are trained on.
        loss_type: "nll" is the negative log-likelihood. "dft" multiplies the loss of each token by
            the detached probability of the token, so that the gradient of an unlikely token is not
            larger than the gradient of a likely one.
        normalizer: LossNormalizer by whose `tokens` the sum of the losses is divided. None divides
            by the sum of the mask.
    Source: DFT eq. 9 (arXiv 2508.05629); TRL's SFTTrainer, num_items_in_batch = normalizer.tokens.
    """
    if loss_type not in SFT_LOSS_TYPES:
        known = ", ".join(SFT_LOSS_TYPES)
        raise ValueError(f"loss_type is {loss_type!r}, but it must be one of {known}")
    per_token_loss = -per_token_logps
    if loss_type == "dft":
        per_token_loss = per_token_loss * per_token_logps.detach().exp()  # -sg(p) log p
    num_tokens = mask.sum().clamp(min=1) if normalizer is None else normalizer.tokens
    return (per_token_loss * mask).sum() / num_tokens
