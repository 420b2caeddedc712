"""The small parts of the loop: schedule, merging of figures, sharing of work."""

import torch

from minivlmrl.run.config import StageConfig
from minivlmrl.run.metrics import merge
from minivlmrl.run.optimizer import build_optimizer, learning_rate
from minivlmrl.scale.ranks import World


def schedule(**options):
    config = StageConfig(max_steps=6, learning_rate=1.0, warmup_steps=2, **options)
    return [round(learning_rate(step, config), 4) for step in range(6)]


def test_schedules():
    assert schedule(lr_scheduler_type="linear") == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert schedule(lr_scheduler_type="linear", min_lr_ratio=0.2) == [0.5, 1.0, 1.0, 0.8, 0.6, 0.4]
    assert schedule(lr_scheduler_type="cosine") == [0.5, 1.0, 1.0, 0.8536, 0.5, 0.1464]
    assert schedule(lr_scheduler_type="constant") == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_adamw_leaves_frozen_parameters_out():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].requires_grad_(False)
    [group] = build_optimizer(model, StageConfig(adam_beta2=0.5, weight_decay=0.1)).param_groups
    assert len(group["params"]) == 2 and group["betas"] == (0.9, 0.5) and group["weight_decay"] == 0.1


def test_figures_merge_by_tokens_and_peaks_by_maximum_and_losses_by_sum():
    """A micro-batch's loss is its share of the step's: it is divided by the step's counts already."""
    parts = [
        ({"kl": 1.0, "rollout/logp_mismatch": 3e-6, "loss": 1.0}, 10),
        ({"kl": 4.0, "rollout/logp_mismatch": 1e-6, "loss": 2.0}, 20),
    ]
    assert merge(parts) == ({"kl": 3.0, "rollout/logp_mismatch": 3e-6, "loss": 3.0}, 30)
    assert merge([merge(parts), merge(parts)])[0] == {"kl": 3.0, "rollout/logp_mismatch": 3e-6, "loss": 6.0}


def test_ranks_share_as_equally_as_they_can():
    def shares(items, size):
        return [World(rank, size, torch.device("cpu")).share(items) for rank in range(size)]

    assert shares([1, 2, 3, 4], 2) == [[1, 2], [3, 4]]
    assert shares([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4, 5]]
    assert shares(range(2), 4) == [range(0), range(1), range(1, 1), range(1, 2)]


def test_a_rank_without_figures_counts_nothing():
    assert merge([({}, 0), ({"kl": 2.0}, 3)]) == ({"kl": 2.0}, 3)
    assert merge([]) == ({}, 0)
