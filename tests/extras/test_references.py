"""Test a reference model that follows the policy, and reference log-probabilities that are computed beforehand."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from minivlmrl.config.loading import load_config
from minivlmrl.run.callbacks import Callback, default_callbacks
from minivlmrl.run.loop import run_training
from tests.helpers.runs import LETTERS, metrics

MOVES = ["--reference.sync_ref_model=true", "--reference.ref_model_sync_steps=2"]
GRPO = ["--stages=[grpo]", "--grpo.beta=0.1", LETTERS, *MOVES]
DPO = ["--stages=[dpo]", "--dpo.max_steps=6", "--state_steps=1"]
STORED = "--dpo.precompute_ref_log_probs=true"


class Copies(Callback):
    def __init__(self):
        self.policies = []
        self.references = []

    def on_step_end(self, trainer, step, number, values):
        self.policies.append([p.detach().clone() for p in trainer.policy.parameters()])
        self.references.append([p.detach().clone() for p in trainer.reference.model.parameters()])


class Stop(Callback):
    def __init__(self, number):
        self.number = number

    def on_step_begin(self, trainer, optimizer, step, number, batches):
        if number == self.number:
            raise ValueError("stopped by the test")


@pytest.fixture
def train(home, tmp_path, quick, varied_rollouts):
    def train(name, *options, more=()):
        config = load_config(home / "recipe.yaml", [f"--output_dir={tmp_path / name}", *options])
        run_training(config, [*default_callbacks(config), *more])
        return tmp_path / name

    return train


@pytest.mark.parametrize("options", [["--adapter.r=2"], ["--model.freeze=[vision]", "--adapter.r=2"]])
def test_a_reference_with_other_weights_cannot_move(train, checkpoint, user_data, options):
    with pytest.raises(ValueError, match=r"^reference.sync_ref_model moves .*the model of reference.path has other"):
        train("run", *user_data[:2], *GRPO, f"--reference.path={checkpoint}", *options)


def weights(folder):
    return load_file(folder / "checkpoint/model.safetensors")


def assert_equal_weights(one, other):
    one, other = weights(one), weights(other)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_reference_moves_as_in_trl_for_fifty_steps(train):
    from trl.trainer.callbacks import SyncRefModelCallback

    copies = Copies()
    first = [*GRPO, "--grpo.max_steps=50", "--model.dtype=float64"]
    train("run", *first, "--reference.ref_model_mixup_alpha=0.3", more=[copies])
    model, target = torch.nn.ParameterList(copies.policies[0]), torch.nn.ParameterList(copies.references[0])
    assert not all(map(torch.equal, model, target))
    for step, (policy, reference) in enumerate(zip(copies.policies[1:], copies.references[1:], strict=True), 2):
        if step % 2 == 0:
            SyncRefModelCallback._sync_target_model(torch.nn.ParameterList(policy), target, 0.3)
        for theirs, ours in zip(target, reference, strict=True):
            torch.testing.assert_close(ours, theirs.data, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("adapter", [[], ["--adapter.r=2"]], ids=["all", "adapters"])
def test_a_moving_reference_resumes_with_the_same_bytes(train, tmp_path, adapter):
    options = [*GRPO, *adapter, "--grpo.max_steps=5", "--state_steps=1"]
    whole = train("whole", *options)
    still = train("still", *options, "--reference.sync_ref_model=false")
    with pytest.raises(ValueError, match="stopped by the test"):
        train("run", *options, more=[Stop(3)])
    resumed = train("run", *options, "--resume=auto")
    assert_equal_weights(whole, resumed)
    assert metrics(whole) == metrics(resumed) != metrics(still)


def test_two_stages_of_grpo_renew_the_reference_and_resume_with_the_same_bytes(train):
    """DeepSeekMath's outer loop: the second stage begins with a reference equal to the policy, so its KL is 0."""
    options = ["--stages=[grpo, grpo]", "--grpo.beta=0.1", LETTERS, "--state_steps=1"]
    whole = train("whole", *options)
    assert [line["kl"] > 0 for line in metrics(whole)] == [False, True, True] * 2
    with pytest.raises(ValueError, match="stopped by the test"):
        train("run", *options, more=[Stop(2)])
    for _ in range(2):
        resumed = train("run", *options, "--resume=auto")
    assert_equal_weights(whole, resumed)


def test_stored_log_probabilities_train_as_a_live_reference(train):
    """MPO and LD-DPO read single tokens of the reference, and the evaluation reads held-out pairs."""
    options = [*DPO, "--model.dtype=float64", "--dpo.ld_alpha=0.5", "--dpo.loss_type=[sigmoid, bco_pair, sft]"]
    live, stored = train("live", *options), train("stored", *options, STORED)
    losses = [[line["loss"] for line in metrics(folder)] for folder in (live, stored)]
    # AdamW enlarges the rounding of gradients that are almost 0, so only the losses before the first update are equal
    # to 1e-12.
    assert losses[1][0] == pytest.approx(losses[0][0], rel=1e-12)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert metrics(live, "evaluations.jsonl")[-1] == metrics(stored, "evaluations.jsonl")[-1]
    assert not any("reference" in name for name in load_file(next(stored.glob("states/*/*.safetensors"))))


def test_no_log_probabilities_are_stored_without_a_reference(train):
    folder = train("free", *DPO, "--dpo.reference_free=true")
    stored = train("stored", *DPO, "--dpo.reference_free=true", STORED)
    assert not (stored / "reference_logps.safetensors").exists()
    assert_equal_weights(folder, stored)


def test_stored_log_probabilities_are_kept_by_a_resume_and_refused_if_a_row_changed(train, user_data, rows, home):
    options = [*DPO, *user_data, STORED]
    whole = train("whole", *options)
    with pytest.raises(ValueError, match="stopped by the test"):
        train("run", *options, more=[Stop(2)])
    file = whole.parent / "run" / "reference_logps.safetensors"
    before = file.read_bytes()
    assert_equal_weights(whole, train("run", *options, "--resume=auto"))
    assert file.read_bytes() == before
    with pytest.raises(ValueError, match="stopped by the test"):
        train("other", *options, more=[Stop(2)])
    save_file({"other": torch.zeros(2)}, whole.parent / "other" / "reference_logps.safetensors")
    with pytest.raises(ValueError, match=r"rows.jsonl:\d+: the row has changed since its reference"):
        train("other", *options, "--resume=auto")


def test_what_does_not_fit_together_is_refused(train, checkpoint):
    with pytest.raises(ValueError, match=r"reference.path must be null"):
        train("run", *DPO, STORED, f"--reference.path={checkpoint}")
