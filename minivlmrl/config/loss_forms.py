"""Accept losses with two signatures: f(logps, advantages, mask, **named), like grpo_loss, and f(batch, options).

Losses return a scalar, or (scalar, {metric: value}).
"""

from collections.abc import Callable

from minivlmrl.config.import_utils import parameters_of


class RunBatch(dict):
    """A micro-batch as {name: tensor}, with the same tensor names as in `minivlmrl parity`."""

    def __missing__(self, name: str):
        raise KeyError(f"{name} is not in the batch; a run has ref_per_token_logps only if grpo.beta is above 0")


def takes_batch(function: Callable) -> bool:
    """Return True for a loss f(batch, options), False for a loss like grpo_loss or a wrapper f(*args, **kwargs)."""
    parameters = parameters_of(function)
    is_wrapper = len(parameters) > 1 and any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return sum(p.default is p.empty for p in positional) < 3 and not is_wrapper and "advantages" not in parameters


def like_grpo_loss(function: Callable) -> Callable:
    """Wrap a loss f(batch, options) to be called like grpo_loss."""
    if not takes_batch(function):
        return function

    def loss(per_token_logps, advantages, mask, *, normalizer, old_per_token_logps, ref_per_token_logps, **options):
        batch = RunBatch(per_token_logps=per_token_logps, advantages=advantages, mask=mask)
        batch["old_per_token_logps"] = per_token_logps.detach() if old_per_token_logps is None else old_per_token_logps
        if ref_per_token_logps is not None:
            batch["ref_per_token_logps"] = ref_per_token_logps
        options |= {
            "tokens": normalizer.tokens,
            "max_completion_length": normalizer.max_completion_length,
            "whole_step": normalizer.sequences == len(mask),
        }
        return function(batch, options)

    return loss
