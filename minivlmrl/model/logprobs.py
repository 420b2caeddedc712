"""Log-probabilities of completion tokens under a model: the policy, the old policy or the reference."""

from torch import Tensor

from minivlmrl.kernels.linear_log_softmax import linear_log_softmax
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.packing import GroupBatch


def per_token_logps(model: VisionLanguageModel, batch: GroupBatch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Compute each completion token's log-probability given the prompt and earlier tokens.

    Logits are computed block by block, in the forward pass and again in the backward pass, so that memory never holds
    all logits (M, vocab_size). If sampling used filters such as top_p, the log-probabilities are normalized over the
    tokens that the filters kept.

    Args:
        batch: packed batch with M completion tokens.
        temperature: logit divisor, which should equal the sampling temperature.
    Returns:
        Token log-probabilities (M,) and distribution entropies (M,), in nats. GroupBatch.pad arranges such values in
        rows.
    Source: TRL's GRPOTrainer._get_per_token_logps_and_entropies, without padding.
    """
    return logps_of_states(model, completion_states(model, batch), batch, temperature)


def completion_states(model: VisionLanguageModel, batch: GroupBatch) -> Tensor:
    """Compute the hidden states (M, hidden_size) from which the head predicts the completion tokens."""
    return model(batch, select=batch.layout.predict_index)


def logps_of_states(
    model: VisionLanguageModel, states: Tensor, batch: GroupBatch, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute token log-probabilities and entropies, each (M,), from hidden states (M, hidden_size)."""
    return linear_log_softmax(states, model.lm_head.weight, batch.completion_ids, temperature, batch.sampling_mask)
