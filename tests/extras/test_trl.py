"""Test that TRL's trainer reaches the same weights with our loss as with TRL's loss."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import torch
import trl

from minivlmrl.extras.trl import GRPOTrainer
from minivlmrl.losses import grpo
from tests.record import trl_fixtures
from tests.record.trl_fixtures import END, distinct, model, processor, questions, write_model

# 2 micro-batches of 4 completions per optimizer step, so that gradients are exact sums of halves
DEFAULTS = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4,
    "max_completion_length": 10, "max_steps": 2, "generation_kwargs": {"sequence_bias": [[[END], 2.0]]},
}  # fmt: skip
# two passes over each rollout, and four optimizer steps
OFF_POLICY = {"num_iterations": 2, "steps_per_generation": 4, "max_steps": 4}
EXACT = {
    "dr_grpo": {"loss_type": "dr_grpo", "entropy_coef": 0.01, "eval_strategy": "steps", "eval_steps": 1},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "delta": {"delta": 1.3, "epsilon": 0.01, "epsilon_high": 0.28} | OFF_POLICY,
    "GSPO": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
    | OFF_POLICY,
    "mask_truncated_completions": {"mask_truncated_completions": True, "max_completion_length": 4},
    "off_policy_mask_threshold": {"off_policy_mask_threshold": 1e-4} | OFF_POLICY,
    # equal to TRL's weights only with k3_of_trl, because our k3 rounds differently
    "everything": OFF_POLICY
    | {"beta": 0.04, "entropy_coef": 0.01, "top_entropy_quantile": 0.5, "off_policy_mask_threshold": 0.01},
    "beta without correction": {"beta": 0.04, "use_bias_correction_kl": False, "loss_type": "grpo"},
    "sapo": {"loss_type": "sapo", "sapo_temperature_neg": 1.2, "beta": 0.04},
    "vespo": {"loss_type": "vespo", "vespo_k_pos": 1.5, "beta": 0.04},
    "bnpo": {"loss_type": "bnpo", "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
}  # fmt: skip
SLOW = {"bnpo", "sapo", "vespo", "luspo", "delta", "beta without correction"}
MEASURED = {"step_time", "eval_step_time"}
TIMES = "runtime", "samples_per_second", "steps_per_second"
MEASURED |= {f"{mode}_{name}" for mode in ("train", "eval") for name in TIMES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def build(trainer_class, folder, output, arguments=None, **options):
    arguments = {"reward_funcs": [distinct], "trainer": trainer_class} | (arguments or {})
    if "eval_strategy" in options:
        arguments["eval_dataset"] = datasets.Dataset.from_list(questions(8))
    given = model(folder), output, questions(8), DEFAULTS | options, processor(folder)
    return trl_fixtures.build("GRPO", *given, **arguments)


def train(trainer):
    logged = []
    log = trainer.log
    trainer.log = lambda logs, *rest: (log(logs, *rest), logged.append(dict(logs)))
    trainer.train()
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}, logged


def largest_difference(some, others):
    return max((some[name] - others[name]).abs().max().item() for name in some)


def k3_of_trl(logps, ref_logps, estimator):
    """Compute k3 as TRL does; our `kl_term` uses expm1, which rounds differently."""
    return torch.exp(ref_logps - logps) - (ref_logps - logps) - 1


@pytest.mark.parametrize(
    ("options", "kl_term", "tolerance"),
    [
        pytest.param(options, k3_of_trl, 0.0, id=name, marks=[pytest.mark.slow] * (name in SLOW))
        for name, options in EXACT.items()
    ]
    + [pytest.param(EXACT["everything"], grpo.kl_term, 2e-5, id="everything, our k3")],
)
def test_the_weights_and_metrics_are_those_of_trl(folder, tmp_path, monkeypatch, options, kl_term, tolerance):
    monkeypatch.setattr(grpo, "kl_term", kl_term)
    options = {"logging_steps": 1} | options
    theirs, their_logs = train(build(trl.GRPOTrainer, folder, tmp_path, **options))
    ours, our_logs = train(build(GRPOTrainer, folder, tmp_path, **options))
    assert largest_difference(ours, dict(model(folder).named_parameters())) > 5e-4
    assert largest_difference(ours, theirs) <= tolerance
    for our_log, their_log in zip(our_logs, their_logs, strict=True):
        left_out = {name for name in their_log if name.endswith(("clip_ratio/low_min", "clip_ratio/high_max"))}
        assert our_log.keys() == their_log.keys() - left_out
        for name in our_log.keys() - MEASURED:
            assert our_log[name] == (their_log[name] and pytest.approx(their_log[name], rel=1e-4, abs=1e-6)), name


def mean_of_means(per_token_logps, advantages, mask, *, normalizer, **rest):
    """Average over each completion first, which is wrong for the loss dapo."""
    loss = -advantages[:, None] * (per_token_logps - per_token_logps.detach()).exp()
    return ((loss * mask).sum(1) / mask.sum(1)).sum() / normalizer.sequences, {}


def test_a_function_of_the_user_replaces_the_loss(folder, tmp_path):
    theirs, _ = train(build(trl.GRPOTrainer, folder, tmp_path))
    wrong, _ = train(build(GRPOTrainer, folder, tmp_path, {"loss": mean_of_means}))
    by_completion, _ = train(build(trl.GRPOTrainer, folder, tmp_path, loss_type="grpo"))
    assert largest_difference(wrong, theirs) > 1e-4
    assert largest_difference(wrong, by_completion) == 0


def code_of_the_page(words):
    """Return the Python block in docs/library.md that contains `words`."""
    page = (Path(__file__).parents[2] / "docs" / "library.md").read_text()
    [code] = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if words in code]
    return code


def test_the_lines_of_the_page_train_in_a_script_for_trl(folder, tmp_path):
    """The lines of the page use the variable names of a script that trains with TRL."""
    theirs = build(trl.GRPOTrainer, folder, tmp_path)
    names = {"model": theirs.model, "config": theirs.args, "processor": theirs.processing_class, "trl_reward": distinct}
    exec(code_of_the_page("extras.trl import GRPOTrainer"), names | {"rows": theirs.train_dataset})
    assert largest_difference(dict(theirs.model.named_parameters()), dict(model(folder).named_parameters())) > 5e-4


def test_the_function_of_the_page_trains(folder, tmp_path):
    space = {}
    exec(code_of_the_page("my_loss(per_token_logps"), space)
    theirs, _ = train(build(trl.GRPOTrainer, folder, tmp_path))
    ours, _ = train(build(GRPOTrainer, folder, tmp_path, {"loss": space["my_loss"]}))
    # with ratio 1, REINFORCE has the gradient of dapo
    assert largest_difference(ours, theirs) < 1e-5


@pytest.mark.parametrize(
    ("arguments", "options"),
    [({"loss": "rloo"}, {}), ({"kl_estimator": "k2"}, {"importance_sampling_level": "sequence_token", "beta": 0.01})],
)
def test_losses_that_trl_does_not_have_train(folder, tmp_path, arguments, options):
    trainer = build(GRPOTrainer, folder, tmp_path, arguments, logging_steps=1, **options)
    assert trainer.loss_options["kl_estimator"] == arguments.get("kl_estimator", "k3")
    weights, logged = train(trainer)
    assert largest_difference(weights, dict(model(folder).named_parameters())) > 5e-4
    assert "clip_ratio/high_mean" in logged[0]


@pytest.mark.parametrize(("loss", "options", "message"), [
    ("grpo", {"loss_type": "bnpo"}, "args.loss_type is 'bnpo', but loss is 'grpo'; set only one of them"),
    (None, {"epsilon": 0.3, "epsilon_high": 0.2}, "epsilon_low is 0.3, but it must be between 0 and epsilon_high"),
    ("gspo", {}, "loss_type is 'gspo', but it must be one of grpo, dapo, dr_grpo"),
    (None, {"use_adaptive_entropy": True}, "use_adaptive_entropy is true, but"),
    (None, {"use_liger_kernel": True}, "use_liger_kernel is true, but"),
    ("cispo", {"delta": 2.0}, "delta is 2.0, but the loss cispo_term has no such argument"),
])  # fmt: skip
def test_options_that_cannot_be_followed_are_refused(folder, tmp_path, loss, options, message):
    with pytest.raises(ValueError, match=message):
        build(GRPOTrainer, folder, tmp_path, {"loss": loss}, **options)


@pytest.mark.parametrize("loss_type", ["dapo", "vespo"])
def test_the_ratio_of_vllm_weights_the_loss_as_in_trl(folder, tmp_path, loss_type):
    """vLLM does not run here, so both trainers get the inputs of a step and the same ratios."""
    theirs = build(trl.GRPOTrainer, folder, tmp_path, loss_type=loss_type, max_steps=1)
    inputs = []
    their_loss = theirs._compute_loss
    theirs._compute_loss = lambda model, given: inputs.append(given) or their_loss(model, given)
    train(theirs)
    ratio = torch.rand(4, 1) + 0.5
    given = inputs[0] | {"importance_sampling_ratio": ratio}
    ours = build(GRPOTrainer, folder, tmp_path, loss_type=loss_type, max_steps=1)
    losses = []
    for trainer, compute in ((theirs, their_loss), (ours, ours._compute_loss)):
        trainer.model.load_state_dict(model(folder).state_dict())
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 2
        without = compute(trainer.model, inputs[0])
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
        losses.append((without.item(), compute(trainer.model, given).item()))
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][1]


def compare_on_ranks(folder, output):
    """Train on a rank of torchrun, and write the largest difference and the largest change of weights to a file."""
    options = {"per_device_train_batch_size": 4, "epsilon_high": 0.28} | OFF_POLICY
    theirs, _ = train(build(trl.GRPOTrainer, folder, output, **options))
    ours, _ = train(build(GRPOTrainer, folder, output, **options))
    numbers = [largest_difference(ours, theirs), largest_difference(ours, dict(model(folder).named_parameters()))]
    Path(output, f"rank{os.environ['RANK']}.json").write_text(json.dumps([float(number) for number in numbers]))


@pytest.mark.slow
def test_two_processes_end_with_the_weights_of_trl(folder, tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [__file__, str(folder), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        difference, change = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert difference == 0
        assert change > 5e-4


if __name__ == "__main__":
    compare_on_ranks(Path(sys.argv[1]), sys.argv[2])
