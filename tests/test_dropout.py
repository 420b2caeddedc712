"""Dropout: PEFT's products, what a mask depends on and what not, gradients, and where there is none."""

import copy

import pytest
import torch
from test_lora import adapted, batch, check_gradients, loss
from test_trained import ADAPTERS
from torch import nn

from minivlmrl.adapters.dropout import drop, mix, place_masks, token_numbers, with_dropout
from minivlmrl.adapters.lora import LoRALinear, adapter_parameters, adapters
from minivlmrl.batch import pack
from minivlmrl.logprobs import per_token_logps
from minivlmrl.scale.sharding import recompute_blocks

import tiny
from stages import STAGES, snapshot

DROPOUT = [*ADAPTERS, "--adapter.dropout=0.3"]


def numbers(count, seed=0):
    return torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(seed)).int()


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_a_share_p_is_0_and_the_mean_stays(p):
    """Over 2,000,000 values: of all, of each token and of each input; and two neighbours are independent."""
    tokens, x = numbers(2000), torch.ones(2000, 1000, dtype=torch.float64)
    found = drop(tokens, 5, p, x)
    assert found.unique().tolist() == [0, pytest.approx(1 / (1 - p))]
    spread = (p / (1 - p)) ** 0.5  # standard deviation of one value
    assert found.mean().item() == pytest.approx(1, abs=5 * spread / 2e6**0.5)
    for mean, count in ((found.mean(0), 2000), (found.mean(1), 1000)):
        assert (mean - 1).abs().max() < 5 * spread / count**0.5
        assert mean.std().item() == pytest.approx(spread / count**0.5, rel=0.2)
    off = (found - 1) / spread
    others = [drop(tokens, 6, p, x), drop(numbers(2000, 1), 5, p, x)]
    pairs = [off[1:] * off[:-1], off[:, 1:] * off[:, :-1], *(off * (other - 1) / spread for other in others)]
    assert all(pair.mean().abs().item() < 5 / 1.99e6**0.5 for pair in pairs)


def test_mix_is_one_to_one():
    some = torch.cat([torch.arange(-5000, 5000), torch.tensor([2**31 - 1, -(2**31)])]).int()
    assert len(mix(some.clone()).unique()) == len(some)
    assert mix(torch.tensor([0], dtype=torch.int32)) == 0  # the one that stays


@pytest.mark.parametrize("dora", [False, True])
def test_a_layer_is_pefts(dora):
    """In float64 with the same mask: what it computes and its gradients."""
    peft = pytest.importorskip("peft", reason="oracle missing: pip install peft")
    torch.manual_seed(4)
    theirs = nn.Sequential(nn.Linear(5, 3)).double()
    layer = LoRALinear(copy.deepcopy(theirs[0]), 2, 1.5, dora)
    config = peft.LoraConfig(r=2, lora_alpha=3, lora_dropout=0.4, use_dora=dora, target_modules=["0"])
    theirs, x = peft.get_peft_model(theirs, config).double().train(), torch.randn(6, 5, dtype=torch.float64)
    layer.drop = lambda x: drop(numbers(6), 1, 0.4, x)
    theirs.base_model.model[0].lora_dropout["default"].forward = layer.drop
    mine = [p for name, p in layer.named_parameters() if "lora_" in name]
    other = {p.shape: p for name, p in theirs.named_parameters() if "lora_" in name}
    for parameter in mine:
        other[parameter.shape].data += 0.3 * torch.randn_like(parameter)
        parameter.data.copy_(other[parameter.shape])
    for model in (layer, theirs):
        (model(x) ** 2).sum().backward()
    torch.testing.assert_close(layer(x), theirs(x), rtol=1e-12, atol=1e-12)
    for parameter in mine:
        torch.testing.assert_close(parameter.grad, other[parameter.shape].grad, rtol=1e-10, atol=1e-12)
    with_it = layer(x)
    layer.drop = None
    assert not torch.allclose(with_it, layer(x))


# masks of packed runs


def groups():
    """Two prompts, of no and of two images, with three completions each."""
    generator = torch.Generator().manual_seed(2)
    prompts = [tiny.prompt(generator, []), tiny.prompt(generator, [(1, 12, 8), (2, 4, 8)])]
    return prompts, [[tiny.completion(generator, n) for n in lengths] for lengths in ((3, 1, 5), (4, 2, 2))]


def masks(model, rows, key="0/sft/7/dropout"):
    """{layer: (inputs, in_features) 0 or 1} for a batch of some (prompt, completions) of the step's."""
    prompts, completions = groups()
    group = pack([prompts[i] for i, _ in rows], [[completions[i][j] for j in js] for i, js in rows], model.config)
    tokens = token_numbers(group, [3 * i + j for i, js in rows for j in js], 3, key)
    place_masks(adapters(model), group, tokens, model.config, 0.5)
    widths = {"visual.merger.": len(group.vision_index), "visual.": len(group.pixel_values)}
    widths |= {f"layers.{model.config.num_hidden_layers - 1}.mlp": len(group.completion_ids)}
    found = {}
    for name, layer in adapters(model).items():
        count = next((n for part, n in widths.items() if part in name), len(group.input_ids))
        if count:
            found[name] = layer.drop(torch.ones(count, layer.in_features)) > 0
    return found, group


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen2_vl"])
def test_masks_do_not_depend_on_neighbours(model_type):
    model = adapted(model_type=model_type)
    both, _ = masks(model, [(0, [0, 1, 2]), (1, [0, 1, 2])])
    alone = [masks(model, [(i, [0, 1, 2])])[0] for i in range(2)]
    assert len(both) == len(adapters(model))
    for name, mask in both.items():
        assert torch.equal(mask, torch.cat([part[name] for part in alone if name in part])), name


def test_a_divided_group_has_the_masks_of_the_whole():
    """Completions 0 and 2 apart from 1: the prompt is computed twice, with one mask."""
    model = adapted()
    whole, group = masks(model, [(1, [0, 1, 2])])
    [ends, middle] = [masks(model, [(1, js)])[0] for js in ([0, 2], [1])]
    prompt, name = group.layout.prompt_lengths[0], "model.layers.0.mlp.down_proj"
    assert all(torch.equal(part[name][:prompt], whole[name][:prompt]) for part in (ends, middle))
    pieces = torch.cat([ends[name][prompt : prompt + 3], middle[name][prompt:], ends[name][prompt + 3 :]])
    assert torch.equal(pieces, whole[name][prompt:])
    for name in whole:
        if "visual" in name:
            assert torch.equal(ends[name], whole[name])


def test_what_a_mask_depends_on():
    """The step, the layer, the prompt, the completion and the token: all masks have about half of their bits alike."""
    model = adapted()
    step = [(0, [0, 1, 2]), (1, [0, 1, 2])]
    found, other = masks(model, step)[0], masks(model, step, "0/sft/8/dropout")[0]
    name, others = "model.layers.0.mlp.up_proj", ("model.layers.0.mlp.gate_proj", "model.layers.1.mlp.up_proj")
    rows = torch.cat([found[name], other[name], *(found[name] for name in others)]).float() * 2 - 1
    alike = rows @ rows.T / rows.shape[1]
    assert (alike - torch.eye(len(rows))).abs().max() < 0.75
    patches = found["visual.blocks.0.attn.qkv"].float() * 2 - 1
    assert (patches @ patches.T / patches.shape[1] - torch.eye(len(patches))).abs().fill_diagonal_(0).max() < 1
    last = found[f"model.layers.{model.config.num_hidden_layers - 1}.mlp.up_proj"]
    starts = [0, 3, 4]  # of the first prompt's completions: its last token predicts all of them
    assert all(torch.equal(last[0], last[start]) for start in starts)


def place(model):
    """Masks for test_lora's batch."""
    group = batch(model)
    place_masks(adapters(model), group, token_numbers(group, [0, 1], 2, "0"), model.config, 0.3)
    return model


def test_gradients_given_the_masks():
    check_gradients(place(adapted()))


def test_recomputed_blocks_have_the_same_masks():
    plain, model = place(adapted(dora=True)), place(adapted(dora=True))
    recompute_blocks(model)
    without = loss(adapted(dora=True))
    losses = [loss(each) for each in (plain, model)]
    for each in losses:
        each.backward()
    assert losses[0] == losses[1] != without
    for own, other in zip(adapter_parameters(model), adapter_parameters(plain), strict=True):
        assert torch.equal(own.grad, other.grad)


# stages


def test_masks_of_a_run(stage):
    """They depend on seed, step and micro-batch alone, and are gone after the last micro-batch."""
    run, found = stage("sft", *DROPOUT), {}
    run.next()
    layer = adapters(run.algorithm.trained)["model.layers.0.mlp.up_proj"]
    for name, (seed, number) in {"one": (0, 3), "same": (0, 3), "step": (0, 4), "seed": (1, 3)}.items():
        run.algorithm.run.seed = seed
        for k, part in enumerate(with_dropout(run.algorithm, run.step, number)):
            found[f"{name} {k}"] = layer.drop(torch.ones(len(part.group.input_ids), layer.in_features)) > 0
        assert layer.drop is None
    assert len(found) == 8 and len({mask.numpy().tobytes() for mask in found.values()}) == 6
    assert all(torch.equal(found[f"one {k}"], found[f"same {k}"]) for k in range(2))


@pytest.mark.parametrize("name", STAGES)
def test_a_step_is_the_same_however_it_is_divided(stage, name):
    """Weights after three steps in float64; they are not those without dropout."""
    sizes = [f"--{name}.micro_batch_size={size}" for size in (4, 1, 3)]
    ways = [[size, *DROPOUT] for size in sizes] + [[sizes[0], *ADAPTERS]]
    if name in ("grpo", "ppo"):
        ways.insert(0, [*DROPOUT, f"--{name}.max_tokens_per_micro_batch=40"])
    ends = []
    for options in ways:
        run = stage(name, *options)
        run.go(3)
        ends.append(snapshot(run.algorithm.trained))
    first, *others, without = ends
    for other in others:
        for key, weight in first.items():
            torch.testing.assert_close(other[key], weight, rtol=1e-12, atol=1e-12)
    assert max((first[key] - weight).abs().max() for key, weight in without.items()) > 1e-4


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_only_what_is_trained_has_dropout(stage, samples, name):
    """Completions, their old log-probabilities and the reference's are those of the policy without."""
    run = stage(name, *DROPOUT, f"--{name}.{'beta' if name == 'grpo' else 'kl_coef'}=0.1", "--grpo.num_iterations=2")
    run.go(2 if name == "grpo" else 4)
    first = run.next()[0]
    assert all(layer.drop is None for layer in adapters(run.algorithm.trained).values())
    with torch.no_grad():
        logps = first.group.pad(per_token_logps(run.model, first.group, run.algorithm.run.sampling.temperature)[0])
    torch.testing.assert_close(first.old_per_token_logps, logps, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(first.sampler_logps.double(), logps, rtol=1e-5, atol=1e-5)
    assert (first.ref_per_token_logps - logps).abs().max() > 1e-4
    assert run.update()["rollout/logp_mismatch"] > 1e-4
