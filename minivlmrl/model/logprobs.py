"""Log-probabilities of completions, computed alike for policy, old policy and reference model."""

from torch import Tensor

from minivlmrl.kernels.linear_log_softmax import linear_log_softmax
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.packing import GroupBatch


def plain_per_token_logps(
    model: VisionLanguageModel, batch: GroupBatch, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute the results of per_token_logps by their definition, with all logits in memory.

    Only tests and exercise 7 use this function.
    """
    logits = model.lm_head(completion_states(model, batch)) / temperature  # (M, vocab_size)
    log_probs = logits.log_softmax(-1)
    logps = log_probs.gather(1, batch.completion_ids[:, None])[:, 0]
    return logps, -(log_probs.exp() * log_probs).sum(-1)


def per_token_logps(
    model: VisionLanguageModel, batch: GroupBatch, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute the log-probability of each completion token given the prompt and earlier tokens.

    Logits are computed block by block, and computed again in the backward pass, so that the whole
    tensor of logits (M, vocab_size) never exists. If sampling filters such as top_p removed tokens
    (batch.sampling_mask), the probabilities are normalised over the remaining vocabulary.

    Args:
        batch: packed batch with M completion tokens.
        temperature: divisor of the logits, which should equal the sampling temperature.
    Returns:
        Log-probabilities (M,) of the tokens and entropies (M,) of the distributions, in nats.
        GroupBatch.pad arranges such values in rows.
    Source: TRL's GRPOTrainer._get_per_token_logps_and_entropies, without padding.
    """
    return logps_of_states(model, completion_states(model, batch), batch, temperature)


def completion_states(model: VisionLanguageModel, batch: GroupBatch) -> Tensor:
    """Compute the hidden states (M, hidden_size) that predict the completion tokens."""
    return model(batch, select=batch.layout.predict_index)


def logps_of_states(
    model: VisionLanguageModel, states: Tensor, batch: GroupBatch, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute the results of per_token_logps from the hidden states of completion_states.

    This function is for callers that also need the hidden states.
    """
    return linear_log_softmax(
        states, model.lm_head.weight, batch.completion_ids, temperature, batch.sampling_mask
    )
