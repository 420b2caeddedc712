"""Test the load-balancing loss against transformers, its gradient in a step, and token counts."""

import sys

import pytest
import torch

from minivlmrl.distributed.process_group import World
from minivlmrl.model.families.experts import choose_experts, chosen_experts
from minivlmrl.model.families.routers import RouterLog, load_balancing_loss

import tiny
from stages import SECOND_RANK
from tiny import pack

MOE = ("qwen3_vl_moe", "qwen3_5_moe")


@pytest.mark.parametrize("model_type", MOE)
def test_the_balance_loss_matches_transformers(model_type, monkeypatch):
    """Compare value and gradients for layers with different token counts.

    If each expert has equally many tokens, the loss is k.
    """
    oracle = pytest.importorskip("oracle", reason="oracle missing: pip install transformers==5.23.0")
    oracle.in_float64(monkeypatch, model_type)
    theirs = sys.modules[oracle.CLASSES[model_type].__module__].load_balancing_loss_func
    generator = torch.Generator().manual_seed(0)
    for num_experts, k in ((2, 1), (5, 2), (8, 8), (64, 6)):
        shapes = [(40, num_experts), (40, num_experts), (7, num_experts)]
        logits = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
        found = load_balancing_loss([choose_experts(layer, k) for layer in logits])
        expected = theirs(tuple(logits), num_experts, k)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        both = [torch.autograd.grad(loss, logits) for loss in (found, expected)]
        for ours, other in zip(*both, strict=True):
            assert (ours - other).abs().max() <= 1e-12 * other.abs().max() or k == num_experts
    alike = torch.eye(4, dtype=torch.float64)  # four experts get one token each
    assert load_balancing_loss([choose_experts(alike, 1)]).item() == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("name", ["sft", "grpo", "reward_model"])
def test_the_mean_balance_loss_of_micro_batches_is_added(stage, name):
    """The loss and all gradients include the balance loss. Coefficient 0 disables it.

    The stage reward_model trains a copy of the policy.
    """
    found = {}
    for coefficient in (0.0, 0.5):
        run = stage(name, f"--{name}.router_aux_loss_coef={coefficient}", model="qwen3_vl_moe")
        batches = run.next()
        trainer = run.trainer
        trainer.needs_all_samples = True
        gradients, losses, balance = 0, 0, 0
        for batch in batches:
            loss, metrics = trainer.training_loss(batch)
            loss.backward()
            losses = losses + loss.detach()
            balance = balance + metrics["aux_loss"] / len(batches)
        gradients = {name: p.grad.clone() for name, p in trainer.trained.named_parameters() if p.grad is not None}
        found[coefficient] = losses, gradients, balance.detach()
        trainer.trained.zero_grad()
        model = trainer.trained if name == "reward_model" else trainer.policy
        for batch in batches:
            with chosen_experts(model) as chosen:
                trainer.loss(batch)
            (0.5 * load_balancing_loss(chosen().values()) / len(batches)).backward()
        added = {name: p.grad for name, p in trainer.trained.named_parameters() if p.grad is not None}
    (loss, gradients, balance), (more, whole, _) = found.values()
    torch.testing.assert_close(more, loss + 0.5 * balance, rtol=1e-12, atol=0)
    assert added["model.layers.0.mlp.gate.weight" if name != "reward_model" else next(iter(added))].any()
    for name, gradient in whole.items():
        expected = gradients[name] + added.get(name, 0)
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-13)


def test_a_coefficient_without_experts_is_refused_before_the_first_step(run):
    with pytest.raises(ValueError, match=r"^sft\.router_aux_loss_coef: the model has no experts; remove this option"):
        run("--stages=[sft]", "--sft.router_aux_loss_coef=0.1")


@pytest.mark.parametrize("model_type", MOE)
def test_tokens_of_text_and_images_are_counted_by_expert(model_type):
    """Count the tokens by hand.

    The last layer computes only tokens that predict. Ranks are summed.
    """
    model = tiny.model(model_type=model_type)
    config = model.config
    generator = torch.Generator().manual_seed(0)
    rows = [tiny.prompt(generator, grids) for grids in ([(1, 4, 6)], [])]
    batch = pack(rows, [[tiny.completion(generator, n) for n in (5, 20)], []], config)
    select = batch.layout.predict_index
    with chosen_experts(model) as chosen:
        model(batch, select=select)
    chosen = chosen()
    for world, times in ((World(), 1), (SECOND_RANK, 2)):
        log = RouterLog(config, world)
        assert log.take() == {}
        metrics = log.add(batch, chosen)
        log.add(batch, chosen)
        [(name, tables)] = log.take().items()
        assert name == "experts/tokens" and log.take() == {}
        images = set(batch.vision_index.tolist())
        expected = torch.zeros(2, config.num_hidden_layers, 5, dtype=torch.long)
        for layer, (_, ids) in chosen.items():
            tokens = select.tolist() if layer == 2 else range(len(batch.input_ids))
            for token, experts in zip(tokens, ids.tolist(), strict=True):
                for expert in experts:
                    expected[int(token in images), layer, expert] += 2 * times
        assert tables == expected.tolist() and expected[1].sum() > 0
    for layer, (probabilities, _) in chosen.items():
        entropy = torch.distributions.Categorical(probabilities).entropy().mean()
        torch.testing.assert_close(metrics[f"experts/entropy/{layer}"], entropy)
