"""Test that trainers are found by stage name, which weights they train, and options that all stages share."""

import functools
import importlib
from types import SimpleNamespace

import pytest
import torch

from minivlmrl.config.loading import as_overrides
from minivlmrl.config.options import RunConfig
from minivlmrl.trainers.base import MicroBatch
from minivlmrl.trainers.ppo import PPOBatch
from minivlmrl.trainers.registry import TRAINERS, find_trainer
from tests.helpers.by_hand import loss_options
from tests.helpers.stages import STAGES

ROWS = SimpleNamespace(pad=lambda flat: flat.view(2, 2))


@pytest.mark.parametrize(("mask", "mean", "advantages"), [
    ([[0.0, 0.0], [0.0, 0.0]], 0.0, [0.0, 0.0]),
    ([[0.0, 1.0], [0.0, 0.0]], 2.0, [5.0, 0.0]),
    ([[0.0, 1.0], [1.0, 1.0]], 3.0, [5.0, 6.5]),
])  # fmt: skip
def test_means_of_a_micro_batch_divide_by_its_tokens(mask, mean, advantages):
    """Without tokens a mean is 0, and the sum over a single token is divided by one."""
    assert MicroBatch(ROWS, torch.tensor(mask), None).mean(torch.tensor([1.0, 2.0, 3.0, 4.0])).item() == mean
    per_token = torch.tensor([[4.0, 5.0], [6.0, 7.0]])
    tensors = dict.fromkeys(("old_per_token_logps", "old_values", "returns", "sampler_logps"), per_token)
    ppo = PPOBatch(ROWS, torch.tensor(mask), None, samples=[], advantages=per_token, **tensors)
    assert ppo.completion_advantages() == advantages


@pytest.mark.parametrize("following", STAGES)
def test_a_later_stage_trains_everything_again(stage, following):
    run = stage("dpo", "--model.freeze=[vision]")
    assert not any(p.requires_grad for p in run.model.visual.blocks.parameters())
    first = run.trainer
    first.config.stages = [following]
    first.config.model.freeze = []
    trainer = find_trainer(following, first.config)(first.config, run.model, first.processor, first.world)
    assert all(p.requires_grad for p in run.model.parameters())
    alone = {name for name, p in trainer.trained.named_parameters() if not p.requires_grad}
    assert alone == ({"backbone.lm_head.weight"} if following == "reward_model" else set())


def test_each_stage_has_a_class_of_its_name():
    run = RunConfig()
    assert set(TRAINERS) == set(STAGES)
    for name in TRAINERS:
        trainer = find_trainer(name, run)
        assert trainer.stage == name and isinstance(getattr(run, name), trainer.config_type)
    known = r"dpo, grpo, ppo, reward_model, sft, file\.py:name"
    with pytest.raises(ValueError, match=rf"unknown stage 'gropo'; known names are: {known}; did you mean grpo\?$"):
        find_trainer("gropo", run)


# {stage: (the trainer's module, its loss, options other than the defaults)}
LOSSES = {
    "sft": ("trainers.sft", "sft_loss", {"loss_type": "dft"}),
    "dpo": ("trainers.dpo", "dpo_loss", {
        "loss_type": ["sigmoid", "ipo"], "loss_weights": [1.0, 0.5], "beta": 0.2, "label_smoothing": 0.1,
        "f_alpha_divergence_coef": 0.4, "ld_alpha": 0.3, "use_weighting": True,
    }),
    "reward_model": ("extras.reward_model", "reward_loss", {"center_rewards_coefficient": 0.1}),
    "grpo": ("trainers.grpo", "grpo_loss", {
        "loss_type": "bnpo", "importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.3,
        "beta": 0.1, "kl_estimator": "k1", "use_bias_correction_kl": False,
    }),
    "ppo": ("trainers.ppo", "ppo_loss", {"cliprange": 0.3, "vf_coef": 0.4}),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_a_trainer_passes_every_option_of_its_stage_to_the_loss(stage, monkeypatch, name):
    """So a run never uses a default of the loss function in place of an option."""
    module, loss, options = LOSSES[name]
    module = importlib.import_module(f"minivlmrl.{module}")
    original, calls = getattr(module, loss), []

    @functools.wraps(original)
    def spy(*arguments, **given):
        calls.append(given)
        return original(*arguments, **given)

    monkeypatch.setattr(module, loss, spy)
    run = stage(name, *as_overrides({f"{name}.{option}": value for option, value in options.items()}))
    run.go(1)
    passed = loss_options(run.options, original)
    assert options.items() <= passed.items() <= calls[0].items()
