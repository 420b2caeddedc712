"""The one way to score completions: policy, old policy and reference all come through here."""

from torch import Tensor

from minivlmrl.kernels.linear_log_softmax import linear_log_softmax
from minivlmrl.model.batch import GroupBatch
from minivlmrl.model.qwen2_5_vl import Qwen2_5_VL


def per_token_logps(model: Qwen2_5_VL, batch: GroupBatch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability of every completion token given its prompt and the tokens before it.

    Args:
        temperature: divides the logits; the one the completions were sampled with.
    Returns:
        logps (M,) and entropies (M,) of the distributions, nats, completions in order (GroupBatch.pad makes rows).
    Source: TRL's GRPOTrainer._get_per_token_logps_and_entropies, without padding and without full logits.
    """
    hidden_states = model(batch, wanted=batch.layout.predict_index)  # (M, hidden_size)
    return linear_log_softmax(hidden_states, model.lm_head.weight, batch.completion_ids, temperature)
