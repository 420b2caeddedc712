"""The one way to score completions: policy, old policy and reference all come through here."""

from torch import Tensor

from minivlmrl.kernels.linear_log_softmax import linear_log_softmax
from minivlmrl.model.decoder import Qwen2_5_VL
from minivlmrl.model.packing import GroupBatch


def plain_per_token_logps(
    model: Qwen2_5_VL, batch: GroupBatch, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute per_token_logps by its definition, all logits in memory: for tests and exercise 7."""
    logits = model.lm_head(completion_states(model, batch)) / temperature  # (M, vocab_size)
    log_probs = logits.log_softmax(-1)
    logps = log_probs.gather(1, batch.completion_ids[:, None])[:, 0]
    return logps, -(log_probs.exp() * log_probs).sum(-1)


def per_token_logps(
    model: Qwen2_5_VL, batch: GroupBatch, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute the log-probability of every completion token, given its prompt and those before it.

    Logits are made a block at a time, and again in the backward: never all (M, vocab_size). Where
    filters left ids out, batch.sampling_mask, probabilities are of the others alone.

    Args:
        batch: its M completion tokens are scored.
        temperature: divides the logits; take the one that the completions were sampled with.
    Returns:
        logps (M,) and entropies (M,) of the distributions, in nats; GroupBatch.pad makes rows.
    Source: TRL's GRPOTrainer._get_per_token_logps_and_entropies, without padding.
    """
    return logps_of_states(model, completion_states(model, batch), batch, temperature)


def completion_states(model: Qwen2_5_VL, batch: GroupBatch) -> Tensor:
    """(M, hidden_size): the state from which the head predicts each completion token."""
    return model(batch, select=batch.layout.predict_index)


def logps_of_states(
    model: Qwen2_5_VL, states: Tensor, batch: GroupBatch, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute per_token_logps from states that are needed for something else too."""
    return linear_log_softmax(
        states, model.lm_head.weight, batch.completion_ids, temperature, batch.sampling_mask
    )
