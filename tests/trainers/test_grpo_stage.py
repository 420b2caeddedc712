"""GRPO as a stage of a recipe: its numbers are those of the book's parts, with what the recipe says."""

import pytest
import torch

from minivlmrl.config.options import GRPOOptions, SamplingOptions
from minivlmrl.generation.generate import Sampler
from minivlmrl.trainers.grpo import GRPO
from minivlmrl.trainers.grpo_stage import tool_metrics

from stages import ONE, letters


def test_calls_of_tools_by_hand():
    """Of three completions: two calls, one of which failed; none; two that failed, and an answer that did not fit."""
    assert tool_metrics([(2, 1, False), (0, 0, False), (3, 2, True)]) == {
        "tools/call_frequency": pytest.approx(5 / 3),
        "tools/answered_frequency": pytest.approx(2 / 3),
        "tools/failure_frequency": pytest.approx(3 / 5),
        "tools/cut_ratio": pytest.approx(1 / 3),
    }


def test_it_computes_what_the_books_parts_compute(stage, samples):
    """The same draws, micro-batches and loss, bit for bit; its metrics are more."""
    run = stage("grpo", "--grpo.beta=0.1", "--rewards={letters: 0.5}")
    batches = run.next()
    rows = samples[0].rows
    algorithm = run.algorithm
    sample = Sampler(run.model, algorithm.processor, SamplingOptions(max_new_tokens=6))
    config = GRPOOptions(num_generations=3, micro_batch_size=2, beta=0.1)
    book = GRPO(run.model, algorithm.processor, sample, {letters: 0.5}, config, ONE, algorithm.reference)
    step = next(book.steps([rows]))
    assert step.metrics == {"reward": pytest.approx(run.step.metrics["reward"])}
    for ours, own in zip(batches, step.micro_batches, strict=True):
        loss, metrics = algorithm.loss(ours)
        expected, its = book.loss(own)
        assert torch.equal(loss, expected) and metrics.keys() > its.keys()
        assert torch.equal(ours.group.completion_ids, own.group.completion_ids)
