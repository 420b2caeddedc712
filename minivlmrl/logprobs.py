"""The one way to score completions: policy, old policy and reference all come through here."""

from torch import Tensor

from minivlmrl.batch import GroupBatch
from minivlmrl.decoder import Qwen2_5_VL
from minivlmrl.kernels.linear_log_softmax import linear_log_softmax, linear_log_sum_sq_probs


def per_token_logps(model: Qwen2_5_VL, batch: GroupBatch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability of every completion token given its prompt and the tokens before it.

    Args:
        temperature: divides the logits; the one the completions were sampled with.
    Returns:
        logps (M,) and entropies (M,) of the distributions, nats, completions in order (GroupBatch.pad makes rows).
    Source: TRL's GRPOTrainer._get_per_token_logps_and_entropies, without padding and without full logits.
    """
    return logps_of_states(model, completion_states(model, batch), batch, temperature)


def completion_states(model: Qwen2_5_VL, batch: GroupBatch) -> Tensor:
    """(M, hidden_size): the state that each completion token is predicted from, as the head reads it."""
    return model(batch, wanted=batch.layout.predict_index)


def logps_of_states(
    model: Qwen2_5_VL, states: Tensor, batch: GroupBatch, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """per_token_logps, for who needs the states for something else too."""
    return linear_log_softmax(states, model.lm_head.weight, batch.completion_ids, temperature)


def log_sum_sq_probs(model: Qwen2_5_VL, states: Tensor) -> Tensor:
    """(M,) log sum_j p_j^2 of each predicted distribution, without gradient: what WPO aligns log-probabilities with."""
    return linear_log_sum_sq_probs(states, model.lm_head.weight)
