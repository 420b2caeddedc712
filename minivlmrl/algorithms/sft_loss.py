"""Supervised fine-tuning: (B, T) log-probabilities of demonstrated tokens in, a scalar out. Imports torch alone."""

from torch import Tensor

SFT_LOSS_TYPES = ("nll", "dft")


def sft_loss(
    per_token_logps: Tensor,
    completion_mask: Tensor,
    num_tokens: float | Tensor | None = None,
    loss_type: str = "nll",
) -> Tensor:
    """Mean negative log-probability of the demonstrated tokens.

    Example: two rows of 1 and 3 tokens, all with log-probability -2: loss 2.0 (4 tokens share the mean, not 2 rows);
    with dft each token counts p = e^-2 = 0.135 of that, so 0.271.

    Args:
        per_token_logps: (B, T) float, nats.
        completion_mask: (B, T), 1 for tokens to learn.
        num_tokens: tokens of the optimizer step, by default those of the mask (at least 1). Given, the micro-batches
            of a step add up to the token mean of the whole step.
        loss_type: "nll"; or "dft", which weighs each token with its own probability, a constant for the gradient:
            then an unlikely demonstration pulls no harder than a likely one.
    Raises:
        ValueError: an unknown loss_type.
    Source: DFT eq. 9 (arXiv 2508.05629); TRL's SFTTrainer, loss_type nll and dft, num_items_in_batch = num_tokens.
    """
    if loss_type not in SFT_LOSS_TYPES:
        raise ValueError(f"loss_type is {loss_type!r}; known are {', '.join(SFT_LOSS_TYPES)}")
    if num_tokens is None:
        num_tokens = completion_mask.sum().clamp(min=1)
    per_token_loss = -per_token_logps
    if loss_type == "dft":
        per_token_loss = per_token_loss * per_token_logps.detach().exp()  # -sg(p) log p
    return (per_token_loss * completion_mask).sum() / num_tokens
