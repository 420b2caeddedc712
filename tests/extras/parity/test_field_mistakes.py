"""Show each mistake in docs/museum.md in the smallest example: gradients of the wrong and of the right loss.

A token with a negative gradient becomes likelier.
"""

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM

A = torch.tensor([1.0, -1.0])  # advantages


def gradient(loss, x: list) -> list[float]:
    x = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    [slope] = torch.autograd.grad(loss(x) + 0 * x.sum(), x)
    return [round(y, 4) + 0.0 for y in slope.flatten().tolist()]


@pytest.mark.parametrize(("choose", "ratio", "slope"), [
    (torch.minimum, 0.5, 0.0), (torch.minimum, 1.5, 1.0), (torch.maximum, 0.5, 1.0), (torch.maximum, 1.5, 0.0),
])  # fmt: skip
def test_maximum_for_negative_advantages(choose, ratio, slope):
    """The maximum does not push down a bad token that became likelier."""
    assert gradient(lambda x: -choose(-x, -x.clamp(0.8, 1.2)).sum(), [ratio]) == [slope]


@pytest.mark.parametrize(("detach", "slope"), [(True, -1.0), (False, 2.0)])
def test_cispo_without_detach(detach, slope):
    """A good token with a probability below 1/e becomes less likely."""

    def loss(x):
        ratio = (x + 3).exp().clamp(max=5.0)
        return -((ratio.detach() if detach else ratio) * x).sum()

    assert gradient(loss, [-3.0]) == [slope]


def test_cispo_without_log_pi():
    def clipped(loss):
        return gradient(lambda x: loss((x + 1).exp().clamp(0.8, 1.2), x).sum(), [0.0])

    assert clipped(lambda ratio, logp: -ratio.detach() * logp) == [-1.2]
    assert clipped(lambda ratio, logp: -ratio) == [0.0]


def test_a_kl_that_is_not_least_at_the_reference():
    """x is log r; Schulman's estimate has the gradient 0 at x = 0."""
    right = gradient(lambda x: (x.exp() * ((-x).exp() + x - 1)).sum(), [0.0])
    mlx_lm_lora = gradient(lambda x: ((2 * x).exp() - x - 1).sum(), [0.0])
    mlx_guided_grpo = gradient(lambda x: (x.exp() * (-x).exp() + x - 1).sum(), [0.0])
    assert (right, mlx_lm_lora, mlx_guided_grpo) == ([0.0], [1.0], [1.0])


def test_a_kl_without_a_gradient_on_average():
    ref = torch.full((3,), 1 / 3, dtype=torch.float64).log()

    def average(estimate):
        return gradient(lambda x: (x.softmax(-1).detach() * estimate(x.log_softmax(-1))).sum(), [1.0, 0.0, -1.0])

    assert average(lambda logps: (ref - logps).exp() - (ref - logps) - 1) == [0.3319, -0.0886, -0.2433]
    assert average(lambda logps: logps - ref) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("sign", "slope"), [(-1, 0.6321), (1, 1.7183)])
def test_a_kl_with_policy_and_reference_swapped(sign, slope):
    assert gradient(lambda x: ((sign * x).exp() - sign * x - 1).sum(), [1.0]) == [slope]


def test_luspo_without_the_mask():
    mask = torch.tensor([[1.0, 0.0]])

    def luspo(reduce):
        return gradient(lambda x: reduce(-(x - x.detach()).exp()), [[-1.0, -1.0]])

    assert luspo(lambda terms: (terms * mask).sum(1).mean()) == [-1.0, 0.0]
    assert luspo(lambda terms: (terms * mask.sum(1)).mean()) == [-0.5, -0.5]


@pytest.mark.parametrize(("dim", "ratio", "pairs"), [
    (-1, [-0.5, 0.5], [-0.009, -0.491]), (None, [0.0, 0.0], [-0.5, -0.5]),
])  # fmt: skip
def test_one_sum_for_the_batch(dim, ratio, pairs):
    """One ratio for all rows has no gradient, and one logit for all pairs lets a right pair hide a wrong one."""
    assert gradient(lambda x: -(A * (x - x.detach()).sum(dim).exp()).mean(), [[-1.0], [-1.5]]) == ratio
    assert gradient(lambda x: -F.logsigmoid(x.sum(dim)).mean(), [[4.0], [-4.0]]) == pairs


@pytest.mark.parametrize(("mask", "slopes"), [([1.0, 0.0], [-1.0, 0.0]), ([1.0, 1.0], [-1.0, 1.0])])
def test_a_sum_without_the_mask(mask, slopes):
    mask = torch.tensor(mask)
    assert gradient(lambda x: (-A * (x - x.detach()).exp() * mask).sum(), [-1.0, -1.5]) == slopes


@pytest.mark.parametrize(("total", "slope"), [(torch.sum, -0.125), (torch.mean, -0.0312)])
def test_a_mean_of_parts_of_a_mean(total, slope):
    assert gradient(lambda x: total(-x.sum(1) / 8), [[0.0, 0.0]] * 4)[0] == slope


def test_a_rejected_answer_attends_to_the_chosen_one():
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=2)).double()
    ids, positions = torch.arange(12)[None], torch.tensor([[*range(7), *range(5)]])

    def differs(mask):
        logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        return bool((logits[:, 7:] - model(ids[:, 7:]).logits).abs().max() > 1e-6)

    assert not differs(None)
    assert differs(torch.tensor([[1] * 7 + [2] * 5]))


def test_kto_with_a_logarithm():
    """A margin of -4 gets 55 times the gradient."""
    assert gradient(lambda x: (1 - x.sigmoid()).sum(), [-4.0]) == [-0.0177]
    assert gradient(lambda x: -F.logsigmoid(x).sum(), [-4.0]) == [-0.982]


@pytest.mark.parametrize(("sign", "slope"), [(1, 0.25), (-1, -0.25)])
def test_kto_makes_rejected_answers_likelier(sign, slope):
    assert gradient(lambda x: (sign * (1 - (-x).sigmoid())).sum(), [0.0]) == [slope]
