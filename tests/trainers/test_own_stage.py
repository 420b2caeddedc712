"""Test the interface of a method in a file of its own: a subclass of GRPOTrainer, a loss, advantages."""

import shutil
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from minivlmrl.trainers import registry
from minivlmrl.trainers.grpo import GRPOBatch, GRPOTrainer
from tests.helpers.stages import completions_of, main
from tests.trainers.test_grpo import REWARDS

FUNCTIONS = """
import torch

SEEN = {}

def asks(logps, advantages, mask, *, normalizer, entropies, sampling_per_token_logps, completion_ids, rows, step, **o):
    SEEN.update(entropies=entropies, sampler=sampling_per_token_logps, ids=completion_ids, rows=rows, step=step, rest=o)
    return -(advantages[:, None] * logps * mask).sum() / normalizer.tokens

def by_text(rewards, rewards_per_func, reward_weights, completions, completion_lengths, rows, step, learning_rate):
    assert torch.equal(rewards_per_func @ reward_weights, rewards) and learning_rate == 0.01
    SEEN.update(completions=completions, lengths=completion_lengths, rows=rows, step=step)
    return rewards - rewards.mean()

def per_token(rewards, completion_lengths):
    width = int(completion_lengths.max())
    return rewards[:, None] * (torch.arange(width) == 1)

def too_wide(rewards, completion_lengths):
    return rewards[:, None].repeat(1, int(completion_lengths.max()) + 1)

def no_kl(logps, advantages, mask, *, normalizer, **others):
    return -(advantages[:, None] * logps * mask).sum() / normalizer.tokens

def with_kl(logps, advantages, mask, *, normalizer, ref_per_token_logps, **others):
    return ((logps - ref_per_token_logps.detach()) * mask).sum() / normalizer.tokens
"""


@dataclass(kw_only=True)
class OwnBatch(GRPOBatch):
    marks: Tensor | None = None  # (R, T)


class Own(GRPOTrainer):
    """Train only on second tokens, with a term on all tokens."""

    batch_type = OwnBatch

    def prepare(self, batches):
        assert not torch.is_grad_enabled()
        for batch in batches:
            batch.marks = batch.loss_mask * (torch.arange(batch.loss_mask.shape[1]) == 1)

    def token_weights(self, batch, entropies):
        return super().token_weights(batch, entropies) * replace(batch).marks

    def extra_loss(self, batch, logps, entropies):
        term = (logps * batch.loss_mask).sum() / batch.normalizer.tokens
        return 0.5 * term, {"own": term.detach(), "rows": torch.tensor(float(len(batch.samples)))}


@pytest.fixture
def use(monkeypatch):
    """Return a function that makes a class the trainer of the stage grpo."""
    return lambda trainer: monkeypatch.setitem(registry.TRAINERS, "grpo", trainer)


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return lambda option, name: f"--grpo.{option}={tmp_path / 'mine.py'}:{name}"


def seen(trainer, name):
    """Return what the user's functions stored in SEEN."""
    from minivlmrl.config.import_utils import load_name

    text = getattr(trainer.options, name).rpartition(":")[0]
    return load_name(f"{text}:SEEN")


def test_an_own_stage_sees_all_rows_unless_it_says_otherwise(stage, script, use):
    found = {}
    for trainer in (GRPOTrainer, Own, type("Same", (GRPOTrainer,), {"needs_all_samples": False})):
        script(REWARDS)
        use(trainer)
        run = stage("grpo", "--grpo.num_generations=4", "--grpo.micro_batch_size=4")
        found[trainer.__name__] = sum(len(batch.samples) for batch in run.next())
    assert found == {"GRPOTrainer": 6, "Own": 16, "Same": 6}


def test_a_stage_prepares_batches_weights_tokens_and_adds_a_term(stage, use):
    """The hooks give the gradient of the sum written out: second tokens' policy term, and 0.5 times mean log pi."""
    use(Own)
    run = stage("grpo", "--grpo.loss_type=dapo")
    batches = run.next()
    total = sum(batch.normalizer.tokens for batch in batches) / len(batches)
    expected = 0.0
    for batch in batches:
        logps = batch.group.pad(run.trainer.logps(batch.group)[0])
        second = batch.advantages[:, None] * logps.detach().exp() / logps.detach().exp() * batch.marks
        loss = (-(logps - logps.detach()).exp() * second + 0.5 * logps * batch.loss_mask).sum() / total
        loss.backward()
        expected += loss.item()
    gradient = torch.cat([p.grad.flatten() for p in run.model.parameters()])
    run.model.zero_grad()
    line = run.update()
    assert line["loss"] == pytest.approx(expected, rel=1e-9)
    assert line["grad_norm"] == pytest.approx(gradient.norm().item(), rel=1e-9)
    assert line["rows"] == 6 and line["own"] < 0


def test_token_weights_that_a_loss_from_a_file_ignores_are_refused(stage, use, mine):
    use(Own)
    with pytest.raises(ValueError, match=r"grpo\.loss_type .*mine\.py:asks would ignore Own\.token_weights"):
        stage("grpo", mine("loss_type", "asks"))


def test_token_weights_of_another_shape_are_refused(stage, use):
    """Weights (T,) would broadcast over completions."""

    class Wrong(GRPOTrainer):
        def token_weights(self, batch, entropies):
            return super().token_weights(batch, entropies)[0]

    use(Wrong)
    with pytest.raises(ValueError, match=r"Wrong\.token_weights has the shape \[\d+\], but it must have the shape \["):
        stage("grpo").go(1)


def test_a_loss_gets_what_it_asks_for_by_name(stage, mine):
    run = stage("grpo", mine("loss_type", "asks"), "--grpo.micro_batch_size=4")
    run.go(1)
    [batch] = run.next()
    run.update()
    found = seen(run.trainer, "loss_type")
    assert found["step"] == 1 and len(found["rows"]) == 12 and found["rows"][0]["solution"]
    assert torch.equal(found["ids"], batch.group.pad(batch.group.completion_ids))
    assert torch.equal(found["sampler"], batch.sampler_logps)
    assert found["entropies"].shape == batch.loss_mask.shape and found["entropies"].requires_grad
    assert not {"token_weights", "entropies"} & found["rest"].keys()


def test_advantages_get_what_they_ask_for_by_name(stage, mine, samples):
    run = stage("grpo", mine("advantages", "by_text"))
    run.go(2)
    found = seen(run.trainer, "advantages")
    sampled = completions_of(samples[-1])
    assert found["lengths"].tolist() == [len(completion.ids) for completion in sampled]
    assert found["completions"] == [run.trainer.processor.decode_assistant_turn(x) for x in sampled]
    assert found["step"] == 1 and len(found["rows"]) == 12 and found["rows"][0]["solution"]


def test_advantages_may_be_per_token(stage, mine, script):
    """A token's advantage is its own, and completions.jsonl has the mean over tokens."""
    script(*[[float(n % 3) for n in range(12)]] * 2)
    run = stage("grpo", mine("advantages", "per_token"))
    [first, _] = run.next()
    index = first.completion_index
    assert index.tolist() == [1, 2, 4, 5]  # completions with advantage 0 everywhere are left out
    expected = (index % 3).float()
    assert torch.equal(first.advantages[:, 1], expected) and first.advantages.sum() == expected.sum()
    assert first.advantages.shape == first.loss_mask.shape
    means = expected * first.loss_mask[:, 1] / first.loss_mask.sum(1)
    assert first.completion_advantages() == pytest.approx(means.tolist())
    assert run.update()["grad_norm"] > 0
    with pytest.raises(ValueError, match=r"(?s)grpo\.advantages .*too_wide returned .* or of shape \(12, \d\)"):
        stage("grpo", mine("advantages", "too_wide")).next()


DRAWS = """
import random, numpy, torch
from minivlmrl.trainers.grpo import GRPOTrainer

class Draws(GRPOTrainer):
    stage = "draws"

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.drawn = torch.rand(())

    def loss(self, batch):
        loss, metrics = super().loss(batch)
        return loss, metrics | {"drawn": self.drawn, "draws": torch.rand(()) + random.random() + numpy.random.rand()}

def chance(completions, **columns):
    return [random.random() for _ in completions]
"""


def test_the_seed_repeats_what_own_code_draws_even_after_a_resume(folder, varied_rollouts, tmp_path):
    (tmp_path / "own.py").write_text(DRAWS)
    options = [f"--stages=[{tmp_path}/own.py:Draws]", f"--rewards={{{tmp_path}/own.py:chance: 1.0}}", "--eval_steps=2",
               "--draws.max_steps=4", "--draws.prompts_per_step=2", "--state_steps=2"]  # fmt: skip
    whole = main(folder, tmp_path, "whole", *options)
    torch.rand(1)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    states = sorted((tmp_path / "again" / "states").iterdir())
    for state in states[1:]:
        shutil.rmtree(state)
    torch.rand(1)
    assert main(folder, tmp_path, "again", *options, "--resume=auto") == whole and states[0].name.endswith("2")
    assert len({line["draws"] for line in whole}) == 4 and len({line["drawn"] for line in whole}) == 1
    evaluations = [(tmp_path / name / "evaluations.jsonl").read_text() for name in ("whole", "again")]
    assert evaluations[0] == evaluations[1]
    other = main(folder, tmp_path, "other", *options, "--seed=1")
    assert other[0]["drawn"] != whole[0]["drawn"] and other[0]["draws"] != whole[0]["draws"]
