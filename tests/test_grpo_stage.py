"""GRPO as a stage of a recipe: its numbers are those of the book's parts, with what the recipe says."""

import pytest
import torch

from minivlmrl.generate import Sampler, SamplingConfig
from minivlmrl.grpo import GRPO, GRPOConfig

from stages import ONE, drawn, letters

BUDGET = 80


def test_it_computes_what_the_books_parts_compute(stage, samples):
    """The same draws, micro-batches and loss, bit for bit; its metrics are more."""
    run = stage("grpo", "--grpo.beta=0.1", "--rewards={letters: 0.5}")
    batches, rows = run.next(), samples[0].rows
    algorithm = run.algorithm
    sample = Sampler(run.model, algorithm.processor, SamplingConfig(max_new_tokens=6))
    config = GRPOConfig(num_generations=3, micro_batch_size=2, beta=0.1)
    book = GRPO(run.model, algorithm.processor, sample, {letters: 0.5}, config, ONE, algorithm.reference)
    step = next(book.steps([rows]))
    assert step.metrics == {"reward": pytest.approx(run.step.metrics["reward"])}
    for ours, own in zip(batches, step.micro_batches, strict=True):
        (loss, metrics), (expected, its) = algorithm.loss(ours), book.loss(own)
        assert torch.equal(loss, expected) and metrics.keys() == its.keys()
        assert torch.equal(ours.group.completion_ids, own.group.completion_ids)


def test_rewards_have_the_weights_of_the_recipe(stage, samples):
    run = stage("grpo", "--rewards={letters: 0.5, format: 2}", "--grpo.scale_rewards=none", "--grpo.beta=0.1")
    advantages = torch.cat([batch.advantages for batch in run.next()]).view(4, 3)
    total = (samples[0].rewards @ torch.tensor([0.5, 2.0])).view(4, 3)
    torch.testing.assert_close(advantages, total - total.mean(1, keepdim=True))
    assert {"rewards/letters/mean", "rewards/format/std", "reward_std"} <= run.step.metrics.keys()


def test_a_token_budget_divides_a_step_and_its_groups(stage, samples):
    """Each completion is in one micro-batch, with the prompt that it answers."""
    run = stage("grpo", f"--grpo.max_tokens_per_micro_batch={BUDGET}", "--grpo.beta=0.1", "--grpo.micro_batch_size=4")
    batches, [rollout] = run.next(), samples
    assert sorted(torch.cat([b.completion_index for b in batches]).tolist()) == [*range(12)]
    assert len(batches) > 1
    for batch in batches:
        own = batch.completion_index.tolist()
        assert torch.equal(batch.group.completion_ids, torch.cat([drawn(rollout)[row].ids for row in own]))
        of = [rollout.prompts[prompt] for prompt in dict.fromkeys(row // 3 for row in own)]
        assert all(a is b for a, b in zip(batch.group.prompts, of, strict=True))
        assert sum(len(p.input_ids) for p in of) + len(batch.group.completion_ids) <= BUDGET
