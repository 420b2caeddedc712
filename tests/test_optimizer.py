"""AdamW over what is trained, and the schedule of its learning rate."""

import pytest
import torch

from minivlmrl.adapters.adamw8bit import AdamW8bit
from minivlmrl.run.optimizer import OptimizerSection, TrainingConfig, build_optimizer, finish_gradients, learning_rate

from stages import ONE


def schedule(**options):
    config = TrainingConfig(max_steps=6, learning_rate=1.0, warmup_steps=2, **options)
    return [round(learning_rate(step, config), 4) for step in range(6)]


def test_schedules():
    assert schedule(lr_scheduler_type="linear") == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert schedule(lr_scheduler_type="linear", min_lr_ratio=0.2) == [0.5, 1.0, 1.0, 0.8, 0.6, 0.4]
    assert schedule(lr_scheduler_type="cosine") == [0.5, 1.0, 1.0, 0.8536, 0.5, 0.1464]
    assert schedule(lr_scheduler_type="constant") == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_the_warmup_is_one_step_ahead_of_transformers_and_the_rest_is_equal(transformers):
    """docs/exact.md, what differs from TRL."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
    theirs = transformers.get_linear_schedule_with_warmup(optimizer, 3, 8)
    rates = []
    for _ in range(8):
        rates.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    config = TrainingConfig(max_steps=8, learning_rate=1.0, warmup_steps=3)
    ours = [learning_rate(step, config) for step in range(8)]
    assert rates[0] == 0 and ours[:3] == rates[1:4] and ours[3:] == pytest.approx(rates[3:])


def test_the_optimizers_by_name_leave_frozen_parameters_out():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].requires_grad_(False)
    for name, kind in (("adamw", torch.optim.AdamW), ("adamw_8bit", AdamW8bit)):
        options = TrainingConfig(adam_beta2=0.5), OptimizerSection(name, weight_decay=0.1)
        optimizer = build_optimizer(model, *options)
        [group] = optimizer.param_groups
        assert type(optimizer) is kind and len(group["params"]) == 2
        assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-6, (0.9, 0.5), 0.1)


@pytest.mark.parametrize(("limit", "kept"), [(10.0, 5.0), (1.0, 1.0)])
def test_gradients_are_scaled_down_to_the_norm_and_never_up(limit, kept):
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    assert finish_gradients(model, ONE, limit) == 5.0
    assert model.weight.grad.norm().item() == pytest.approx(kept, rel=1e-5)
