"""Test the gradients and scores of filtered samples; test_properties.py compares the filters with transformers."""

import pytest
import torch

from minivlmrl.config.options import SamplingOptions
from minivlmrl.generation.filters import filter_logits
from minivlmrl.losses.grpo import LossNormalizer, grpo_loss
from minivlmrl.model.logprobs import completion_states, per_token_logps
from minivlmrl.model.packing import pack
from tests.helpers import tiny
from tests.helpers.draws import options, prompts, sample
from tests.helpers.stages import completions_of, folder, samples, stage, varied_rollouts  # noqa: F401 (fixtures)


def test_other_options_need_no_filters():
    assert not SamplingOptions(0.5, 9, [3], stop_strings=["a"]).filtered
    assert not SamplingOptions(0.0, top_k=5, top_p=0.5, min_p=0.1).filtered  # the likeliest token passes every filter


@pytest.mark.parametrize("setting", [dict(top_p=0.8), dict(top_k=2, temperature=0.7), dict(min_p=0.3)], ids=str)
def test_the_expected_gradient_is_that_of_the_policy_that_is_drawn_from(setting):
    """Sum over all 4-token completions that the filters allow, so that the expectation is exact."""
    model = tiny.model(dtype=torch.float64)
    sampling = options(max_new_tokens=4, **setting)
    model.lm_head = torch.nn.Linear(64, 4, bias=False).double()
    weights = [*tiny.telling_weights(model).parameters()]
    wanted = torch.cartesian_prod(*[torch.arange(4)] * 4)

    def draw(probs, rows, counts):
        possible = probs.gather(1, wanted[rows, counts, None])[:, 0] > 0
        return torch.where(possible, wanted[rows, counts], probs.argmax(-1))

    [group] = sample(model, prompts(1), len(wanted), sampling, (), draw)
    batch = pack(prompts(1), [{tuple(c.ids.tolist()): c for c in group}.values()], model.config)
    scores = filter_logits(model.lm_head(completion_states(model, batch)), sampling)
    chances = batch.pad(scores.log_softmax(-1).gather(1, batch.completion_ids[:, None])[:, 0]).sum(1).exp()
    assert len(chances) < 200 and chances.sum().item() == pytest.approx(1, abs=1e-12)

    def gradient(value):
        parts = torch.autograd.grad(value, weights, retain_graph=True, allow_unused=True)
        return torch.cat([part.flatten() for part in parts if part is not None])

    def expected(rewards):
        trained = batch.pad(per_token_logps(model, batch, sampling.temperature)[0])
        given = chances.detach() * rewards, batch.completion_mask
        return -gradient(grpo_loss(trained, *given, loss_type="dr_grpo", normalizer=LossNormalizer(1, 1, 1))[0])

    rewards = torch.rand(len(chances), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    exact = gradient(chances @ rewards)
    assert (expected(rewards) - exact).norm() < 1e-10 * exact.norm()
    assert expected(torch.ones_like(rewards)).norm() < 1e-10 * exact.norm()


@pytest.mark.parametrize("name, option", [("grpo", "beta=0.1"), ("grpo", "loss_type=rloo"), ("ppo", "kl_coef=0.1")])
def test_every_score_is_of_what_was_drawn_from(stage, samples, name, option):  # noqa: F811
    more = ["--grpo.beta=0.1"] if name == "grpo" else []
    filters = "--sampling.top_p=0.5", "--sampling.repetition_penalty=1.3"  # the penalty is not part of the policy
    run = stage(name, *filters, "--sampling.max_batch_tokens=200", *more, f"--{name}.{option}")
    [metrics] = run.go()
    assert metrics["rollout/logp_mismatch"] < 1e-5 and metrics.get("kl", 0) == 0
    counts = torch.cat([c.sampling_mask[0] for c in completions_of(samples[0])])
    assert 1 <= counts.min() < counts.max() < run.model.config.vocab_size / 2
