"""Test that the split of a step into micro-batches and the order of rows change no number."""

import pytest
import torch

from minivlmrl.data.loader import Batches
from minivlmrl.tasks.shapes import Shapes
from tests.helpers.stages import Stage, snapshot

pytestmark = pytest.mark.usefixtures("varied_rollouts")


class Ragged(Shapes):
    """Rows with answers of different lengths: the answer of row i ends in i more words."""

    def __getitem__(self, index):
        row = super().__getitem__(index)
        row.completion += " so" * index
        row.chosen += " it is" * index
        row.rejected += " no" * (7 - index)
        row.columns["label"] = index % 3 == 0
        return row


def steps(folder, stage, *overrides):
    usual = {"max_steps": 2, "micro_batch_size": 4, "learning_rate": 3e-3}
    usual |= {"kl_coef": 0.1} if stage == "ppo" else {}
    usual = [f"--{stage}.{name}={value}" for name, value in usual.items()]
    run = Stage(folder, stage, *usual, *overrides, rows=Ragged(8, "rows"))
    lines = []
    for _ in range(run.options.max_steps):
        run.next()
        lines.append(run.update())
    return lines, snapshot(run.trainer.trained)


RUNS = {
    "sft dft": ("sft", ["--sft.loss_type=dft"]),
    "dpo with options": ("dpo", ["--dpo.ld_alpha=0.5"]),
    "dpo with sft": ("dpo", ["--dpo.loss_type=[sigmoid, sft]"]),
    "reward_model": ("reward_model", ["--reward_model.center_rewards_coefficient=0.1"]),
    "grpo": ("grpo", []),
    "grpo with options": ("grpo", ["--grpo.num_iterations=2", "--grpo.steps_per_generation=2", "--grpo.beta=0.1",
                                   "--grpo.top_entropy_quantile=0.6", "--grpo.entropy_coef=0.05", "--grpo.max_steps=4",
                                   "--grpo.mask_truncated_completions=true"]),
    **{f"grpo {name}": ("grpo", [f"--grpo.loss_type={name}", "--grpo.num_iterations=2", "--grpo.beta=0.1"])
       for name in ("dr_grpo", "rloo", "vespo")},
    "cispo": ("grpo", ["--method=cispo", "--grpo.steps_per_generation=1", "--grpo.num_iterations=2",
                       "--grpo.beta=0.1"]),
    "gspo": ("grpo", ["--grpo.importance_sampling_level=sequence", "--grpo.num_iterations=2"]),
    "grpo resampled": ("grpo", ["--grpo.max_num_gen_batches=3", "--sampling.max_new_tokens=1",
                                "--grpo.num_generations=2"]),
    "ppo": ("ppo", ["--ppo.steps_per_generation=2", "--ppo.num_iterations=2", "--ppo.max_steps=5"]),
}  # fmt: skip


def assert_same_steps(found, expected, rel, of_rows=False):
    """Compare the metrics and weights of two runs; some metrics are float32."""
    (lines, weights), (others, same_weights) = found, expected
    for line, other in zip(lines, others, strict=True):
        assert line.keys() == other.keys() and line["grad_norm"] > 1e-6
        for name in ("loss", "grad_norm"):
            assert other[name] == pytest.approx(line[name], rel=rel, abs=1e-13), name
        for name in line.keys() - {"rollout/logp_mismatch", "rollout/logp_mismatch_rms"}:  # rounding errors
            if of_rows and name.startswith("vespo"):
                continue  # the metric is always averaged over tokens
            if name == "rewards/accuracies" and abs(line["rewards/margins"]) < 1e-9:
                continue  # policy and reference are equal, so rounding decides
            assert other[name] == pytest.approx(line[name], rel=1e-5, abs=1e-6), name
    torch.testing.assert_close(same_weights, weights, rtol=rel, atol=1e-12)


TOKENS = "max_tokens_per_micro_batch"  # a prompt has about 30 tokens, so a bound of 40 divides a group


@pytest.mark.parametrize(("name", "split"), [
    *((name, "micro_batch_size=1") for name in RUNS),
    ("grpo", f"{TOKENS}=40"), ("grpo", f"{TOKENS}=70"), ("ppo", f"{TOKENS}=40"),
])  # fmt: skip
def test_micro_batch_size(folder, name, split):
    stage, options = RUNS[name]
    pair = (steps(folder, stage, *options, f"--{stage}.{option}") for option in ("micro_batch_size=4", split))
    assert_same_steps(*pair, 1e-12, name == "grpo vespo")  # phi of VESPO is a mean over rows


def reorder(monkeypatch, order):
    """Reorder the four rows of every batch; each row keeps its key."""
    original = Batches.__next__

    def draw(self):
        rows = original(self)
        return [rows[i] for i in order]

    monkeypatch.setattr(Batches, "__next__", draw)


@pytest.mark.parametrize("stage", ["sft", "dpo", "reward_model", "grpo", "ppo"])
def test_order_of_rows_in_a_step(folder, stage, monkeypatch):
    options = {"grpo": ["--grpo.beta=0.1", "--grpo.max_steps=1"], "ppo": ["--ppo.max_steps=1"]}.get(stage, [])
    expected = steps(folder, stage, *options)
    reorder(monkeypatch, [2, 0, 3, 1])
    assert_same_steps(steps(folder, stage, *options), expected, 1e-11)
