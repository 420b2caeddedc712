"""The loss of supervised fine-tuning. It imports torch alone: copy it out."""

from typing import Literal, get_args

from torch import Tensor

SFTType = Literal["nll", "dft"]
SFT_LOSS_TYPES = get_args(SFTType)


def sft_loss(
    per_token_logps: Tensor, mask: Tensor, loss_type: SFTType = "nll", *, normalizer=None
) -> Tensor:
    """Average the negative log-probability of the demonstrated tokens.

    Example: two rows of 1 and 3 tokens, all with log-probability -2: loss 2.0 (4 tokens share the
    mean, not 2 rows); with dft each token counts p = e^-2 = 0.135 of that, so 0.271.

    Args:
        per_token_logps: (B, T) float, nats.
        mask: (B, T), 1 for tokens that are trained on.
        loss_type: "nll"; or "dft", which weighs each token with its own probability, a constant for
            the gradient: then an unlikely demonstration pulls no harder than a likely one.
        normalizer: an object with `tokens` of the optimizer step, by default those of the mask.
    Source: DFT eq. 9 (arXiv 2508.05629); TRL's SFTTrainer, num_items_in_batch = normalizer.tokens.
    """
    if loss_type not in SFT_LOSS_TYPES:
        raise ValueError(f"loss_type is {loss_type!r}; known are {', '.join(SFT_LOSS_TYPES)}")
    per_token_loss = -per_token_logps
    if loss_type == "dft":
        per_token_loss = per_token_loss * per_token_logps.detach().exp()  # -sg(p) log p
    num_tokens = mask.sum().clamp(min=1) if normalizer is None else normalizer.tokens
    return (per_token_loss * mask).sum() / num_tokens
