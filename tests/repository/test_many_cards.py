"""Test that the predictions for many cards count the collective operations that FSDP calls on real ranks."""

import json
import sys
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from links import ROOT
from on_ranks import launch

from minivlmrl.diagnostics.memory import MemoryEstimator
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.weights import reshard
from minivlmrl.errors import phase
from minivlmrl.model.families.registry import FAMILIES
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.lora import inject_adapters
from minivlmrl.model.packing import pack
from minivlmrl.model.trainable import trained_parameters
from minivlmrl.run.loop import optimizer_step
from minivlmrl.run.setup import choose_sharding
from minivlmrl.trainers.base import Step

import tiny

sys.path.insert(0, str(ROOT / "benchmarks"))
import many_cards
from many_cards import CollectiveCounter, recipe

MODES = many_cards.MODES
many_cards.PROMPTS = 3  # enough, because every micro-batch between the first and the last calls the same operations


def operations_of_a_step(folder, mode: list[str], world: World) -> tuple[Counter, Counter]:
    """Run one optimizer step and gather the weights for a rollout on a real rank, and return the operations by kind."""
    run = recipe(world.size, mode)
    config = tiny.config()
    model = FAMILIES[config.model_type].model(config)
    if run.adapter.r:
        inject_adapters(model.to(torch.bfloat16), run.adapter)
    sharding = choose_sharding(run, world)
    if sharding:
        sharding.shard(model)
    generator = torch.Generator().manual_seed(world.rank)
    prompt = tiny.prompt(generator, [(1, 4, 6)], dtype=torch.bfloat16)
    batch = pack([prompt], tiny.to_completions([[tiny.completion(generator, length) for length in (3, 5)]]), config)

    def training_loss(micro_batch):
        return per_token_logps(model, batch)[0].sum() * 1e-3, {}

    trainer = SimpleNamespace(
        world=world, trained=model, run=run, config=run.grpo, training_loss=training_loss,
        dropout=lambda number, index: nullcontext(), after_step=lambda number: None, phase=phase,
    )  # fmt: skip
    step = Step([SimpleNamespace(weight=1.0, group=batch)] * many_cards.PROMPTS)
    optimizer = torch.optim.SGD(trained_parameters(model), 1e-3)
    for number in range(2):  # a run's first step gathers some weights once more
        with CollectiveCounter() as counter:
            optimizer_step(trainer, step, optimizer, number)
    reshard(model)
    with CollectiveCounter() as rollout:
        if sharding:
            sharding.gather(model)
    return counter.calls + rollout.calls, counter.bytes + rollout.bytes


@pytest.fixture(scope="module")
def real_operations(tmp_path_factory):
    """Return the operations for each mode on four ranks; a host has only two ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(many_cards, "CARDS_PER_HOST", 2)
        return launch(4, tmp_path_factory.mktemp("ranks"), MODES, operations_of_a_step)


@pytest.mark.parametrize("mode", MODES)
def test_predicted_operations_are_those_of_real_ranks(real_operations, monkeypatch, mode):
    """Gradients from all micro-batches and weights for a rollout have the predicted bytes and call counts."""
    monkeypatch.setattr(many_cards, "CARDS_PER_HOST", 2)
    estimator = MemoryEstimator(tiny.config())
    predicted = many_cards.count_step(recipe(4, MODES[mode]), estimator, 4)
    run = recipe(4, MODES[mode])
    # trained parameters have gradients that are reduced in float32 and padded, so that all ranks have equally many
    once = run.sharding.once_per_step or not run.sharding.enabled
    numbers = [parameter.numel() for parameter in trained_parameters(estimator.build(run, "grpo"))]
    gradient_bytes = (1 if once else many_cards.PROMPTS) * 4 * sum(numbers)
    kind = "reduced" if run.sharding.enabled else "all-reduced"
    assert gradient_bytes <= predicted.bytes[kind] < 1.1 * gradient_bytes
    weight_bytes = (1 if once else many_cards.PROMPTS) * 2 * estimator.parameters  # in bfloat16
    assert predicted.bytes["gathered"] > weight_bytes if run.sharding.enabled else not predicted.bytes["gathered"]
    for calls, sizes in (rank[mode] for rank in real_operations):
        assert (calls, sizes) == (predicted.calls, predicted.bytes)


def test_the_script_prints_and_writes_its_rows(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(many_cards, "MODES", {name: MODES[name] for name in [*MODES][::5]})  # the first and the last
    monkeypatch.setattr(
        sys, "argv", ["many_cards.py", "--sizes=toy", "--cards", "16", f"--json={tmp_path / 'out.json'}"]
    )
    many_cards.main()
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [row["mode"] for row in rows] == list(many_cards.MODES)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| toy | 16 |")]
    assert len(lines) == len(rows) * len(many_cards.NETWORKS)


def test_seconds_by_hand(monkeypatch):
    """8 cards with 350 GB/s gather 350 GB in 7/8 s. Two hosts with 8 network cards at 45 GB/s reach 350 GB/s, too."""
    one_call = many_cards.Communication(Counter(gathered=1), Counter())
    assert many_cards.seconds(one_call, 8, 8, 0) == pytest.approx(20e-6 + 7 * 5e-6)
    monkeypatch.setattr(many_cards, "START", 0.0)
    monkeypatch.setattr(many_cards, "HOP", 0.0)
    flat = many_cards.Communication(Counter(gathered=1), Counter(gathered=350e9))
    assert many_cards.seconds(flat, 8, 8, 0) == pytest.approx(7 / 8)
    assert many_cards.seconds(flat, 16, 16, 8) == pytest.approx(15 / 16)
    assert many_cards.seconds(flat, 16, 16, 1) == pytest.approx(15 / 16 * 350 / 45)
    # 8 cards each send 45 GB of gradients to one other host, and a host has one network card
    hybrid = many_cards.Communication(Counter({"all-reduced": 1}), Counter({"all-reduced": 45e9}))
    assert many_cards.seconds(hybrid, 16, 8, 1) == pytest.approx(8)
    # without shards, one ring through all cards has each host's network card for itself
    assert many_cards.seconds(hybrid, 16, 1, 1) == pytest.approx(2 * 15 / 16)
    assert many_cards.seconds(hybrid, 8, 1, 0) == pytest.approx(2 * 7 / 8 * 45 / 350)
    assert many_cards.efficiency(4.0, 4.0) == (0.5, pytest.approx(4 / 5.6))
