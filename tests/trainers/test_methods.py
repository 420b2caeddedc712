"""Compare recipes/methods with the formulas of their papers, written out row by row, in float64.

The formulas of VPPO, PAPO and NoisyRollout are those of their authors' code (huaixuheqing/VPPO-RL, MikeWangWZHL/PAPO,
NUS-TRAIL/NoisyRollout, December 2026), those of NSR, ASPO and pairwise sampling those of the papers.
"""

import math
import re
import shutil

import pytest
import torch

from minivlmrl.config.import_utils import load_name
from minivlmrl.losses.grpo import LossNormalizer, grpo_loss
from minivlmrl.trainers.base import Rollout
from tests.helpers.links import ROOT


def load(name):
    return load_name(f"recipes/methods/{name}")


@pytest.fixture
def tokens():
    """Return policy and hidden log-probabilities (5, 7), advantages (5,) and a ragged mask, in float64."""
    generator = torch.Generator().manual_seed(1)
    logps = -2 * torch.rand(5, 7, generator=generator, dtype=torch.double)
    hidden = logps + torch.randn(5, 7, generator=generator, dtype=torch.double)
    lengths = torch.tensor([7, 4, 1, 6, 3])
    mask = (torch.arange(7) < lengths[:, None]).double()
    return logps, hidden, torch.tensor([1.0, -0.5, 0.25, -1.0, 2.0], dtype=torch.double), mask


def test_the_visual_kl_is_k3_with_its_gradient(tokens):
    logps, hidden, _, _ = tokens
    logps = logps.clone().requires_grad_()
    hidden = hidden.clone()
    hidden[0, 0] = logps[0, 0] + 30  # above the bound of 10 nats: no gradient
    kl = load("blind.py:visual_kl")(logps, hidden)
    expected = torch.exp(hidden - logps) - (hidden - logps) - 1
    assert kl[0, 0] == 10 and kl.min() >= 0
    torch.testing.assert_close(kl.flatten()[1:], expected.flatten()[1:], rtol=1e-12, atol=1e-14)
    [found] = torch.autograd.grad(kl.sum(), logps)
    theirs = 1 - torch.exp(hidden - logps.detach())
    theirs[0, 0] = 0
    torch.testing.assert_close(found, theirs, rtol=1e-12, atol=1e-14)


def test_vppo_weights_tokens_and_completions_as_its_authors_do(tokens):
    """Rank tokens by KL, keep ceil(0.4 n) of n, and scale completions to [0.9, most] with a mean of 1."""
    logps, hidden, _, mask = tokens
    depends = load("blind.py:visual_kl")(logps, hidden) * mask
    kept = load("vppo.py:top_tokens")(depends, mask, 0.4)
    means = []
    for row, length in enumerate(mask.sum(1).int().tolist()):
        values = depends[row, :length].tolist()
        best = sorted(range(length), key=lambda t, values=values: -values[t])[: math.ceil(0.4 * length)]
        assert kept[row].nonzero()[:, 0].tolist() == sorted(best)
        means.append(sum(values) / length)
    scale = load("vppo.py:completion_scale")(torch.tensor(means), torch.tensor(means), 0.9)
    normalized = [(x - min(means)) / (max(means) - min(means)) for x in means]
    most = 0.9 + 0.1 / (sum(normalized) / 5)
    assert scale.tolist() == pytest.approx([0.9 + x * (most - 0.9) for x in normalized], rel=1e-6)
    assert scale.mean().item() == pytest.approx(1)
    assert load("vppo.py:completion_scale")(torch.ones(2), torch.ones(2), 0.9).tolist() == [1, 1]


def test_pgpo_moves_the_advantage_without_changing_its_sum(tokens):
    logps, hidden, _, mask = tokens
    depends = load("blind.py:visual_kl")(logps, hidden)
    weights = load("pgpo.py:gate")(depends, mask, 0.3, 2.0, 0.5)
    torch.testing.assert_close(weights.sum(1), mask.sum(1), rtol=1e-12, atol=0)
    for row, length in enumerate(mask.sum(1).int().tolist()):
        relative = depends[row, :length] / depends[row, :length].max()
        raw = [1 + 2 * x if x >= 0.3 else 0.5 for x in relative.tolist()]
        assert weights[row, :length].tolist() == pytest.approx([x * length / sum(raw) for x in raw])
    assert torch.equal(load("pgpo.py:gate")(depends * 0, mask, 0.3, 2.0, 0.5), mask)  # no picture: as GRPO


def own(stage, name, *options):
    """Return a run of one step of a method in a file, with one micro-batch and patches hidden at random."""
    title = name.partition(":")[2].lower()
    size = ["--grpo.micro_batch_size=4", "--grpo.loss_type=dapo", "--grpo.beta=0"]
    return stage(title, f"--stages=[recipes/methods/{name}]", *size, *options)


def test_papo_adds_its_terms_to_the_loss_of_grpo(stage):
    run = own(stage, "papo.py:PAPO", "--papo.gamma=0.3", "--papo.eta=0.2", "--papo.hidden=1.0")
    [batch] = run.next()
    black = load("blind.py:hide")(batch.group, 1.0, run.trainer.processor.image_processor)
    assert len(black.pixel_values.unique()) == 3 and black.pixel_values.max() < -1.4  # black in three colors
    mask, n = batch.loss_mask, batch.loss_mask.sum()
    with torch.no_grad():
        hidden = batch.group.pad(run.trainer.logps(black)[0])
    logps = batch.group.pad(run.trainer.logps(batch.group)[0])
    kl = ((hidden - logps).exp() - (hidden - logps) - 1) * mask
    policy = -((logps - logps.detach()).exp() * batch.advantages[:, None] * mask).sum() / n
    loss = policy - 0.3 * kl.sum() / n + 0.2 * -(logps * mask).sum() / n
    gradients = torch.autograd.grad(loss, [p for p in run.model.parameters() if p.requires_grad], allow_unused=True)
    norm = torch.cat([g.flatten() for g in gradients if g is not None]).norm()
    line = run.update()
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-9)
    assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-8)
    assert line["papo/kl"] == pytest.approx(kl.sum().item() / n.item(), rel=1e-9) and line["papo/kl"] > 0


@pytest.mark.parametrize("name", ["vppo.py:VPPO", "pgpo.py:PGPO"])
def test_stages_reshape_advantages_over_all_micro_batches(stage, name):
    """Two micro-batches have the weights of one, and a step trains."""
    found = []
    for size in (2, 4):
        hidden = ["--vppo.hidden=1.0"] if "VPPO" in name else []
        run = own(stage, name, f"--grpo.micro_batch_size={size}", *hidden)
        advantages = [row[row != 0] for batch in run.next() for row in batch.advantages * batch.loss_mask]
        found.append(torch.cat(advantages))
        assert run.update()["grad_norm"] > 0
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["my_vppo.py:MyVPPO", "my_papo.py:MyPAPO"])
def test_the_files_of_the_page_train(stage, tmp_path, name):
    shutil.copy(ROOT / "recipes" / "methods" / "blind.py", tmp_path)
    for code in re.findall(r"```python\n(# (\S+) .*?)```", (ROOT / "docs" / "your_paper.md").read_text(), re.DOTALL):
        (tmp_path / code[1]).write_text(code[0])
    file, _, title = name.partition(":")
    run = stage(file.removesuffix(".py"), f"--stages=[{tmp_path / file}:{title}]", "--grpo.micro_batch_size=4")
    assert run.go(1)[0]["grad_norm"] > 0


def test_noisy_rollout_samples_half_a_group_beside_noise_and_trains_beside_the_clean_picture(stage):
    noisy = "recipes/methods/noisy_rollout.py"
    engine = f"--sampling.engine={noisy}:NoisyRollout(steps=10, noise=500)"
    run = stage("grpo", engine, "--grpo.num_generations=4", "--rollout.max_logp_mismatch=.inf")
    [first, _] = run.next()
    trained = torch.cat([prompt.pixel_values for prompt in first.group.prompts])
    assert torch.equal(trained, torch.cat([sample.prompt.pixel_values for sample in first.samples[::4]]))
    with torch.no_grad():
        drift = (first.group.pad(run.trainer.logps(first.group)[0]) - first.sampler_logps) * first.loss_mask
    by_sample = drift.abs().amax(1).view(-1, 4)
    assert by_sample[:, :2].max() < 1e-5 < by_sample[:, 2:].min()  # only the second half saw noise
    assert isinstance(run.step.rollout, Rollout) and run.update()["grad_norm"] > 0
    step = load(f"{noisy.rpartition('/')[2]}:noise_step")
    assert [step(n, 100, 500, 30.0, 0.4) for n in (0, 40, 100)] == [499, 250, 0]
    betas = [1e-5 + (5e-3 - 1e-5) / (1 + math.exp(6 - 12 * n / 999)) for n in range(1000)]
    kept = load(f"{noisy.rpartition('/')[2]}:diffusion_kept")(499)
    assert kept == pytest.approx(math.prod(1 - beta for beta in betas[:500]), rel=1e-4)


def test_nsr_and_pairwise_advantages_by_hand():
    rewards = torch.tensor([1.0, 0.5, 1.5, math.nan])
    assert load("functions.py:nsr")(rewards).tolist() == pytest.approx([0.1, -1, 0.1, 0])
    found = load("functions.py:pairwise")(torch.tensor([0.0, 1.0, 2.0, 4.0]), 4, "none", share=0.5)
    assert found.tolist() == [-1.75, 0, 0, 2.25]


def test_aspo_flips_the_weight_of_positive_tokens(tokens):
    """Negative tokens are those of GRPO; positive ones have gradient A / r, but not above the clipping range."""
    logps, old, advantages, mask = tokens
    logps = logps.clone().requires_grad_()
    settings = {
        "normalizer": LossNormalizer(5, 21.0),
        "old_per_token_logps": old,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
    }
    loss, _ = load("functions.py:aspo")(logps, advantages, mask, **settings)
    [found] = torch.autograd.grad(loss, logps)
    theirs, _ = grpo_loss(logps, advantages, mask, loss_type="dapo", **settings)
    [plain] = torch.autograd.grad(theirs, logps)
    torch.testing.assert_close(found[advantages < 0], plain[advantages < 0], rtol=1e-12, atol=1e-15)
    ratio = (logps.detach() - old).exp()
    weight = (1 / ratio).clamp(max=3) * (ratio <= 1.2)
    expected = -weight * advantages[:, None] * mask / 21
    torch.testing.assert_close(found[advantages > 0], expected[advantages > 0], rtol=1e-12, atol=1e-15)
