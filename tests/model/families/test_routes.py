"""Test that training selects the same experts as sampling."""

import pytest
import torch
from on_ranks import eager

from minivlmrl.agents import tool_sampler
from minivlmrl.model.families.experts import chosen_experts
from minivlmrl.model.families.routes import routes_of

import tiny
from tiny import pack

MOE = ("qwen3_vl_moe", "qwen3_5_moe")
WAYS = {
    "tools": ["--sampling.environment=on_ranks:Eye", "--sampling.top_p=0.9"],
    "filters": ["--sampling.top_k=50", "--sampling.max_batch_tokens=3000"],
    "sampled again": ["--grpo.max_num_gen_batches=2"],
}


def many_tokens(stage, monkeypatch, model, way, completions, *more):
    """Return a float32 stage with 50-token completions, and with many calls if it has tools."""
    monkeypatch.setattr(tool_sampler, "find_calls", eager)
    monkeypatch.setattr(tool_sampler.ToolEpisode, "closes_a_call", lambda self, searched_from: True)
    options = ["--sampling.max_new_tokens=50", "--sampling.stop_token_ids=[]", f"--grpo.num_generations={completions}"]
    return stage("grpo", *options, *WAYS[way], *more, dtype=torch.float32, model=model)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MOE)
def test_every_token_has_the_same_experts_in_training_and_sampling(stage, monkeypatch, model, way):
    run = many_tokens(stage, monkeypatch, model, way, 3, "--sampling.max_new_tokens=30")
    [line] = run.go()
    assert line["rollout/route_mismatch"] == 0 and line["rollout/logp_mismatch"] < 1e-3
    run.next()
    # change the routers, so that some tokens get other experts
    for layer in run.model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.weight.data += 0.02 * torch.randn_like(layer.mlp.gate.weight)
    assert 0 < run.update()["rollout/route_mismatch"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("model", MOE)
def test_0_of_100000_tokens_have_other_experts(stage, monkeypatch, model):
    options = ["--grpo.prompts_per_step=8", "--grpo.max_steps=4", "--sampling.max_batch_tokens=20000"]
    run = many_tokens(stage, monkeypatch, model, "filters", 64, *options)
    drawn = 0
    for number in range(4):
        batches = run.next()
        drawn += int(batches[0].normalizer.tokens)
        if number == 0:  # the other rollouts use the weights after this step
            assert run.update()["rollout/route_mismatch"] == 0
            continue
        with torch.no_grad():
            found = [run.trainer.training_loss(batch)[1] for batch in batches]
        assert [metrics["rollout/route_mismatch"] for metrics in found] == [0] * 4
    assert drawn > 100_000


def test_a_model_without_experts_logs_no_routes(stage):
    [line] = stage("grpo").go()
    assert not any("route" in name for name in line)


@pytest.mark.parametrize("model_type", MOE)
def test_a_route_is_the_set_of_experts_of_a_token_in_all_layers(model_type):
    """The expert order does not matter. The last layer computes only tokens that predict."""
    model = tiny.model(model_type=model_type)
    generator = torch.Generator().manual_seed(0)
    rows = [tiny.prompt(generator, grids) for grids in ([(1, 4, 6)], [])]
    batch = pack(rows, [[tiny.completion(generator, n) for n in (5, 20)], []], model.config)
    select = batch.layout.predict_index
    with chosen_experts(model) as chosen:
        model(batch, select=select)
    chosen = chosen()
    routes = routes_of(chosen, model.model, select)
    assert len(chosen) == (3 if model_type == "qwen3_5_moe" else 2)
    selected = [ids if i == 2 else ids[select] for i, (_, ids) in chosen.items()]
    sets = [tuple(frozenset(ids[token].tolist()) for ids in selected) for token in range(25)]
    for first in range(25):
        for second in range(25):
            assert (routes[first] == routes[second]) == (sets[first] == sets[second])
    probabilities, ids = chosen[0]
    turned = chosen | {0: (probabilities, ids.flip(1))}
    assert torch.equal(routes_of(turned, model.model, select), routes) and len(set(sets)) > 5
