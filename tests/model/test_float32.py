"""Check which operations of a GRPO step in bfloat16 have float32 results."""

from collections import defaultdict

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WIDE = {torch.float32, torch.float64}


class Results(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.dtypes = defaultdict(set)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        found = {x.dtype for x in tree_leaves(result) if isinstance(x, torch.Tensor) and x.is_floating_point()}
        self.dtypes[function._opname] |= found
        return result


OPERATIONS = {  # purpose: (result dtypes, operations), in a step with model.compute_dtype: bfloat16
    "angles of the rotary position embeddings": (WIDE, "cos", "sin"),
    "mean squares in RMSNorm": (WIDE, "rsqrt_"),
    "attention scores": (WIDE, "softmax"),
    "log-probabilities of the sampler": (WIDE, "logsumexp"),
    "log-probabilities and entropies of the trainer": (WIDE, "linear_log_softmax"),
    "rewards, advantages, ratios, KL and losses": (WIDE, "exp", "mean", "minimum"),
    "layers, activations and embeddings": ({torch.bfloat16}, "linear", "silu", "embedding"),
}


def test_losses_and_probabilities_are_float32(stage):
    run = stage("grpo", "--grpo.beta=0.1", dtype=torch.bfloat16)
    with Results() as results:
        [metrics] = run.go(1)
    for dtypes, *operations in OPERATIONS.values():
        for name in operations:
            assert name in results.dtypes, f"{name} does not run"
            assert results.dtypes[name] <= dtypes, name
    assert 0 < metrics["rollout/logp_mismatch"] < 0.2  # nats


@pytest.mark.parametrize("name", ["sft", "dpo", "reward_model", "ppo"])
def test_losses_are_float32(stage, name):
    run = stage(name, dtype=torch.bfloat16)
    loss, _ = run.trainer.loss(run.next()[0])
    assert loss.dtype == torch.float32
