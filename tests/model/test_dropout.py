"""Compare the dropout of adapters with PEFT, and test its masks and where it is off."""

import pytest
import torch

from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.weights import recompute_blocks
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.lora import adapters, drop, dropout
from tests.helpers import tiny
from tests.model.test_lora import adapted, check_peft, loss
from tests.model.test_trainable import ADAPTERS

DROPOUT = [*ADAPTERS, "--adapter.dropout=0.3"]
LAYER = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("p", [0.05, 0.5])
def test_a_fraction_p_is_0_and_the_mean_is_unchanged(p):
    """Dropout masks from different seeds are uncorrelated."""
    x = torch.ones(1000, 1000, dtype=torch.float64)
    found = drop(p, 5, x)
    assert found.unique().tolist() == [0, pytest.approx(1 / (1 - p))]
    spread = (p / (1 - p)) ** 0.5  # the standard deviation of one value
    assert found.mean().item() == pytest.approx(1, abs=5 * spread / 1000)
    assert torch.equal(found, drop(p, 5, x))
    product = (found - 1) * (drop(p, 6, x) - 1) / spread**2
    assert abs(product.mean().item()) < 5 / 1000


def test_a_layer_with_dropout_matches_peft():
    layer, _, x = check_peft(0.4, lambda x: drop(0.4, 1, x))
    with_it = layer(x)
    layer.drop = None
    assert not torch.allclose(with_it, layer(x))


def test_recomputed_blocks_have_the_same_masks():
    plain = adapted()
    model = adapted()
    recompute_blocks(model)
    results = []
    for each in (plain, model):
        with dropout(each, 0.3, "0"):
            value = loss(each)
            results.append([value, *torch.autograd.grad(value, tiny.adapter_parameters(each))])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_masks_of_a_run(stage):
    trainer = stage("sft", *DROPOUT).trainer

    def kept(step=3, micro_batch=0, rank=0, seed=0, stage="sft", name=LAYER):
        layer = adapters(trainer.trained)[name]
        trainer.world = World(rank, 2, trainer.world.device)
        trainer.config.seed = seed
        trainer.stage = stage
        with trainer.dropout(step, micro_batch):
            return layer.drop(torch.ones(9, layer.in_features)).numpy().tobytes()

    others = [kept(step=4), kept(micro_batch=1), kept(rank=1), kept(seed=1), kept(stage="dpo")]
    others.append(kept(name=LAYER.replace("up", "gate")))
    assert len({kept(), *others}) == 7 and kept() == kept()


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_dropout_applies_only_to_the_training_forward(stage, samples, name):
    """Completions, old log-probabilities and those of the reference model are computed without dropout."""
    run = stage(name, *DROPOUT, f"--{name}.{'beta' if name == 'grpo' else 'kl_coef'}=0.1", "--grpo.num_iterations=2")
    run.go(2 if name == "grpo" else 4)
    first = run.next()[0]
    with torch.no_grad():
        logps = first.group.pad(per_token_logps(run.model, first.group, run.trainer.config.sampling.temperature)[0])
    torch.testing.assert_close(first.old_per_token_logps, logps, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(first.sampler_logps.double(), logps, rtol=1e-5, atol=1e-5)
    assert (first.ref_per_token_logps - logps).abs().max() > 1e-4
