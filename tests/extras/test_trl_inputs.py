"""Test that the callback for TRL's trainers names inputs without effect, and is silent in healthy runs."""

import re

import pytest
import torch

from minivlmrl.extras.trl_inputs import InputCheck, gray_problems
from tests.helpers.talk import assistant
from tests.record import trl_fixtures
from tests.record.trl_fixtures import distinct, model, picture, processor, questions, write_model

SIZES = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 1, "seed": 1}
GENERATION = {"num_generations": 2, "max_completion_length": 6}
GRAY, BLIND = "the outputs of the model do not change if ", r"\d+ of \d+ trained parameters get no gradient, .*visual"
LEGS = "the tokens have placeholders for images, but there are no images"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def build(folder, output, name, policy=None, callbacks=(), **options):
    answers = [assistant("red ball"), assistant("no")]
    columns = {"SFT": {"completion": answers[:1]}, "DPO": {"chosen": answers[:1], "rejected": answers[1:]}}
    rows = [row | columns.get(name, {}) for row in questions(4)]
    options = SIZES | {"GRPO": GENERATION}.get(name, {"max_length": None}) | options
    arguments = {"reward_funcs": [distinct]} if name == "GRPO" else {}
    policy = policy or model(folder)
    arguments["callbacks"] = list(callbacks)
    return trl_fixtures.build(name, policy, output, rows, options, processor(folder), **arguments)


@pytest.mark.parametrize("name", ["SFT", "DPO", "GRPO"])
def test_a_healthy_run_has_no_problem_and_the_same_weights(folder, tmp_path, name, recwarn):
    check = InputCheck()
    policies = []
    for callbacks in ([check], []):
        trainer = build(folder, tmp_path, name, callbacks=callbacks, max_steps=2)
        trainer.train()
        policies.append(trainer.model.state_dict())
    assert check.is_done and check.problems == [] and not [one for one in recwarn if "gray" in str(one.message)]
    for weights, plain in zip(*(policy.values() for policy in policies), strict=True):
        assert torch.equal(weights, plain)


def detached(policy, patch):
    policy.model.visual.register_forward_hook(lambda _, __, out: frozen(out))


def frozen(out):
    out.pooler_output = out.pooler_output.detach()
    return out


def hidden(policy, patch):
    original = policy.model.forward

    def forward(input_ids=None, attention_mask=None, **kwargs):
        if attention_mask is not None and attention_mask.shape == input_ids.shape:  # a decode step has a longer mask
            attention_mask = attention_mask * (input_ids != image_id)
        return original(input_ids=input_ids, attention_mask=attention_mask, **kwargs)

    image_id = policy.config.image_token_id
    policy.model.forward = forward


def dropped_images(policy, patch):
    policy.register_forward_pre_hook(without_images, with_kwargs=True)


def without_images(_, args, kwargs):
    return args, {key: value for key, value in kwargs.items() if key not in ("pixel_values", "image_grid_thw")}


PLANTED = {detached: BLIND, hidden: GRAY, dropped_images: LEGS}


@pytest.mark.parametrize("plant", PLANTED)
@pytest.mark.parametrize("name", ["SFT", *(pytest.param(name, marks=pytest.mark.slow) for name in ("DPO", "GRPO"))])
def test_a_planted_fault_is_named(folder, tmp_path, monkeypatch, name, plant):
    check = InputCheck()
    policy = model(folder)
    trainer = build(folder, tmp_path, name, policy, [check])
    plant(policy, monkeypatch)
    with pytest.warns(UserWarning, match=f"step 0: {PLANTED[plant]}.*Check the rows, the collator"):
        trainer.train()
    assert any(re.match(PLANTED[plant], problem) for problem in check.problems)


def mostly_frozen(folder):
    """Return a model in which, as with adapters, some trained layers have inputs that require no gradient."""
    policy = model(folder)
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_("attn.qkv" in name or "q_proj" in name or "lm_head" in name)
    policy.enable_input_require_grads = lambda: None  # transformers fixes the fault in some models
    return policy


@pytest.mark.parametrize("name", ["SFT", pytest.param("DPO", marks=pytest.mark.slow)])
def test_a_tower_that_checkpointing_cuts_off_is_named_and_stays_cut_off(folder, tmp_path, name):
    """Reentrant checkpointing gives no gradient to blocks whose inputs require no gradient."""
    check = InputCheck()
    kept = {}
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    options |= {"max_steps": 2, "learning_rate": 1e-2}
    for callbacks in ([check], []):
        torch.manual_seed(0)
        trainer = build(folder, tmp_path, name, mostly_frozen(folder), callbacks, **options)
        trainer.train()
        kept[bool(callbacks)] = {name: p.detach() for name, p in trainer.model.named_parameters()}
    assert all(torch.equal(weight, kept[False][name]) for name, weight in kept[True].items())
    [problem] = check.problems
    assert re.fullmatch(r"6 of 7 trained parameters get no gradient, for example .*q_proj.*", problem)


def test_one_of_two_images_of_a_row_is_named(folder):
    """The input check makes each image of a row gray alone."""
    policy = model(folder)
    text = ["<|vision_start|><|image_pad|><|vision_end|>a" * 2]
    inputs = processor(folder)(text=text, images=[picture(0), picture(1)], return_tensors="pt")
    assert gray_problems(policy, (), dict(inputs), ["image"]) == []
    policy.register_forward_pre_hook(second_gray, with_kwargs=True)
    [problem] = gray_problems(policy, (), dict(inputs), ["image"])
    assert problem == f"{GRAY}1 of 2 images of a micro-batch are gray, for example the image with the index 1"


def second_gray(_, args, kwargs):
    pixels = kwargs["pixel_values"].clone()
    pixels[len(pixels) // 2 :] = 0
    return args, kwargs | {"pixel_values": pixels}
