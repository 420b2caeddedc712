"""Test that trainers pass the options of their stage to their loss."""

import functools
import importlib
import inspect

import pytest

from minivlmrl.config.loading import as_overrides

# {stage: (the trainer's module, its loss, options other than the defaults)}
LOSSES = {
    "sft": ("trainers.sft", "sft_loss", {"loss_type": "dft"}),
    "dpo": ("trainers.dpo", "dpo_loss", {
        "loss_type": ["sigmoid", "ipo"], "loss_weights": [1.0, 0.5], "beta": 0.2, "label_smoothing": 0.1,
        "f_alpha_divergence_coef": 0.4, "ld_alpha": 0.3,
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
    taken = inspect.signature(original).parameters.keys() - {"advantages"}  # "advantages" also names an option
    passed = {option: value for option, value in vars(run.options).items() if option in taken}
    assert options.items() <= passed.items() <= calls[0].items()
