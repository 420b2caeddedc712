"""Log-probabilities of completion tokens under a model."""

from torch import Tensor

from minivlmrl.kernels.linear_log_softmax import linear_log_softmax
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.packing import GroupBatch


def per_token_logps(model: VisionLanguageModel, batch: GroupBatch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities of completion tokens, given all previous tokens.

    Logits are computed in blocks, in forward and again in backward. If sampling used a filter such as top_p,
    log-probabilities are normalized over the kept tokens.

    Args:
        batch: GroupBatch with M completion tokens.
        temperature: logit divisor, as in sampling.
    Returns:
        Log-probabilities (M,) and entropies (M,), in nats; GroupBatch.pad converts (M,) to (R, T).
    Source: TRL's GRPOTrainer._get_per_token_logps_and_entropies, without padding.
    """
    return logps_of_states(model, completion_states(model, batch), batch, temperature)


def completion_states(model: VisionLanguageModel, batch: GroupBatch) -> Tensor:
    """Compute hidden states (M, hidden_size) that predict completion tokens."""
    return model(batch, select=batch.layout.predict_index)


def logps_of_states(
    model: VisionLanguageModel, states: Tensor, batch: GroupBatch, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities and entropies (M,) from hidden states (M, hidden_size)."""
    return linear_log_softmax(states, model.lm_head.weight, batch.completion_ids, temperature, batch.sampling_mask)
