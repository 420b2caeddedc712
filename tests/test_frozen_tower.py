"""A frozen tower sees a rollout's images once, and what is trained stays what it was, in float64."""

import pytest
import torch

from minivlmrl.sampling import kept_prefill
from minivlmrl.vision import VisionTransformer

from stages import folder, lively, samples, snapshot, stage  # noqa: F401

FROZEN = "--model.freeze=[vision, merger]"
MORE = {
    "kept prefill": ["--grpo.micro_batch_size=4"],
    "micro-batches": ["--grpo.num_iterations=2"],
    "pieces": ["--grpo.max_tokens_per_micro_batch=90"],
    "rloo": ["--grpo.loss_type=rloo", "--grpo.steps_per_generation=2"],
}


@pytest.fixture
def seen(monkeypatch):
    """How many patches each forward of a tower has."""
    seen, forward = [], VisionTransformer.forward

    def count(self, pixel_values, image_grid_thw):
        seen.append(len(pixel_values))
        return forward(self, pixel_values, image_grid_thw)

    monkeypatch.setattr(VisionTransformer, "forward", count)
    return seen


@pytest.mark.parametrize("more", [*MORE.values()], ids=[*MORE])
def test_each_image_is_seen_once_a_rollout(stage, seen, monkeypatch, more):  # noqa: F811
    run = stage("grpo", "--grpo.beta=0.1", FROZEN, *more)
    metrics = run.go(3)
    once, weights = list(seen), snapshot(run.model)
    assert len(once) == run.batches.draws
    monkeypatch.setattr(kept_prefill, "see_once", lambda algorithm, prompts: None)
    seen.clear()
    again = stage("grpo", "--grpo.beta=0.1", FROZEN, *more)
    expected = again.go(3)
    assert sum(seen) >= 2 * sum(once)
    for line, other in zip(metrics, expected, strict=True):
        assert line == pytest.approx(other, rel=1e-12, abs=1e-12)
    for name, weight in snapshot(again.model).items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grpo", ["--model.freeze=[vision]"]),
        ("grpo", [FROZEN, "--sampling.max_tokens_at_once=120"]),
        ("ppo", [FROZEN, "--ppo.critic=separate"]),
    ],
    ids=["merger trained", "pieces", "critic"],
)
def test_nothing_is_kept_of_other_towers_and_in_pieces(stage, samples, name, options):  # noqa: F811
    stage(name, *options).go()
    assert all(prompt.vision_embeds is None for rollout in samples for prompt in rollout.prompts)


def test_a_reward_model_sees_for_itself(stage, samples):  # noqa: F811
    run = stage("grpo", FROZEN)
    run.algorithm.reward_model = lambda prompts, completions: [0.0] * sum(map(len, completions))
    run.go()
    assert all(prompt.vision_embeds is None for prompt in samples[0].prompts)
