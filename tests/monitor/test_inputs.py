"""Test that the input check names planted faults, and gives no warning about healthy steps."""

import json
from dataclasses import replace
from itertools import count, product

import PIL.Image
import pytest
import torch

from minivlmrl.config.loading import load_config
from minivlmrl.data.chat_template import ChatTemplate
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.messages import text_of
from minivlmrl.data.rows import Row
from minivlmrl.model import decoder
from minivlmrl.monitor.inputs import InputCheck, check_inputs
from minivlmrl.run.loop import run_training
from minivlmrl.trainers import offline
from minivlmrl.trainers.base import Step
from tests.helpers.talk import assistant, system, text, user
from tests.trainers.test_offline import Dialogues

MODELS = ("model", "tied", "qwen3_vl", "qwen3_5", "qwen3_vl_moe", "qwen3_5_moe")
FROZEN = "--model.freeze=[vision, merger]"


@pytest.mark.parametrize(("name", "options", "model"), [
    *product(["sft", "grpo"], [[]], MODELS), *product(["dpo", "reward_model", "ppo"], [[]], ["model"]),
    *product(["dpo", "grpo"], [[FROZEN], ["--model.freeze=[]"], ["--adapter.r=2"]], ["model"]),
])  # fmt: skip
def test_healthy_steps_raise_no_alarm(stage, name, options, model):
    run = stage(name, *options, model=model)
    run.next()
    assert check_inputs(run.trainer, run.step) == []


ROWS = {  # answers that tokenizers may divide into tokens in several ways
    "a column": {"problem": "What is it?\n", "image": "red.png", "completion": " a <b> c "},
    "two images": {"problem": "<image> or <image>?", "images": ["red.png", "blue.png"], "completion": "both"},
    "no image": {"problem": "e\u0301 <|im_end|> <|image_pad|>", "completion": "<think>\nhm\n</think>\n\nd"},
    "parts": {"messages": [
        system("Be brief."), user([{"type": "image", "image": "red.png"}, text("What?")]), assistant("red"),
        user([text("And?"), {"type": "image", "image": "blue.png"}]), assistant("blue"),
    ]},
    "tags": {"messages": [user("<image>Now?"), assistant("red")], "image": "red.png"},
    "a list of frames": {"problem": "How many?", "video": ["red.png", "blue.png", "red.png"], "completion": "three"},
}  # fmt: skip


@pytest.mark.parametrize("model", ["model", "qwen3_vl", "qwen3_5"])
def test_healthy_rows_raise_no_alarm(stage, tmp_path, write_rows, model):
    rows = write_rows(*ROWS.values())
    for color in ("red", "green", "blue"):
        PIL.Image.effect_noise((56, 84), 50).convert("RGB").save(tmp_path / f"{color}.png")
    run = stage("sft", "--sft.prompts_per_step=6", rows=FileDataset(rows, ("problem", "completion")), model=model)
    run.next()
    assert check_inputs(run.trainer, run.step) == []


@pytest.mark.parametrize("name", ["sft", "dpo", "reward_model"])
def test_answers_with_prompts_of_their_own_raise_no_alarm(stage, published, name):
    trainer = stage(name).trainer
    trainer.processor = replace(trainer.processor, template=ChatTemplate(published("qwen3_5_think"), "t"))
    batch = trainer.micro_batch([Dialogues(8, "rows")[i] for i in range(3)])
    assert len(batch.group.prompts) > 3
    assert check_inputs(trainer, Step([batch])) == []


# ---- planted faults, which happen before the step is prepared (early) or afterwards (late)


def later(field, change):
    """Return a planted fault that applies `change` to a field of all micro-batches."""

    def plant(run):
        groups = [batch.group for batch in run.step.micro_batches]
        groups = [replace(group, **{field: change(getattr(group, field))}) for group in groups]
        batches = zip(run.step.micro_batches, groups, strict=True)
        run.step.micro_batches = [replace(batch, group=group) for batch, group in batches]

    return plant


def prompts(change, numbers=range(4)):
    """Return a planted fault in the prompts with these numbers; the input check builds its prompts later."""

    def plant(run, patch):
        original, counter = Row.prompt, count()

        def prompt(row, processor):
            made = original(row, processor)
            if next(counter) in numbers:
                made = change(row, made, processor)
                made.row = row
            return made

        patch.setattr(Row, "prompt", prompt)

    return plant


def without_images(row, prompt, processor):
    return processor([{**message, "content": text} for message in row.messages if (text := text_of(message))])


def encoder(change):
    def plant(run, patch):
        original = offline.encode_answer
        patch.setattr(offline, "encode_answer", lambda *arguments: change(original(*arguments)))

    return plant


def without_placing(run, patch):
    patch.setattr(decoder, "place_images", lambda x, embeds, index: (x, []))


def hidden(choose):
    """Return a planted fault that sets keys and values at some positions to 0, as if a mask hid the positions."""

    def plant(run, patch):
        original = decoder.GroupAttention.__call__

        def attend(self, index, q, k, v):
            positions = choose(run.step.micro_batches[0].group)
            return original(self, index, q, k.index_fill(0, positions, 0), v.index_fill(0, positions, 0))

        patch.setattr(decoder.GroupAttention, "__call__", attend)

    return plant


def prompt_starts(group):
    return torch.cat([torch.arange(span.start, span.stop - 2) for span in group.layout.prompt_spans])


def without_texts(run, patch):
    original = ChatTemplate.render
    emptied = lambda message: {**message, "content": [p for p in message["content"] if p.get("type") == "image"]}  # noqa: E731
    patch.setattr(ChatTemplate, "render", lambda self, messages: original(self, [emptied(m) for m in messages]))


def gray_processor(run, patch):
    original = ImageProcessor.__call__

    def gray(self, image, **options):
        patches, grid = original(self, image, **options)
        return torch.zeros_like(patches), grid

    patch.setattr(ImageProcessor, "__call__", gray)


def detached_loss(run, patch):
    original = run.trainer.loss
    weight = next(iter(run.model.parameters()))
    patch.setattr(run.trainer, "loss", lambda batch: (original(batch)[0].detach() + 0 * weight.sum(), {}))


def untrained_row(run):
    for batch in run.step.micro_batches:
        batch.loss_mask[0] = 0


blank = later("pixel_values", torch.zeros_like)
IMAGES, IMAGE = "the images of the prompt are not those of its row", "the loss has no gradient at an image"
LACK, TOKENS = "the tokens of the step do not contain message 0", "the tokens of the prompt are not those of its row"
ANSWER = "the tokens of an answer are not those of its row"
TEXT = "the loss has no gradient at the text of the prompt"
# (stage, fault before a step is prepared, fault afterwards, beginning of the warning)
PLANTED = [
    ("sft", None, blank, IMAGES),
    ("sft", prompts(without_images), None, IMAGES),
    ("sft", gray_processor, None, "all patches of the images are 0"),
    ("sft", without_placing, None, IMAGE),
    ("sft", hidden(lambda group: group.vision_index), None, IMAGE),
    ("sft", hidden(prompt_starts), None, "the loss has no gradient at most of the text of the prompt"),
    ("sft", detached_loss, None, TEXT),
    ("sft", None, untrained_row, TEXT),
    ("sft", prompts(lambda row, made, processor: replace(made, input_ids=made.input_ids[:-6])), None, TOKENS),
    ("sft", without_texts, None, LACK),
    ("sft", encoder(lambda made: replace(made, ids=made.ids[:2], policy_mask=made.policy_mask[:2])), None, ANSWER),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "early", "late", "problem"), PLANTED)
def test_a_planted_fault_is_named(stage, monkeypatch, kind, early, late, problem):
    run = stage(kind)
    if early:
        early(run, monkeypatch)
    run.next()
    if late:
        late(run)
    warnings = check_inputs(run.trainer, run.step)
    assert any(f": {problem}" in warning for warning in warnings), warnings


def test_a_run_warns_at_its_first_step_and_computes_the_same(folder, varied_rollouts, monkeypatch):
    def go(name, callbacks):
        options = [f"--output_dir={folder / name}", "--stages=[sft, grpo]", "--sft.max_steps=2", "--grpo.max_steps=2"]
        run_training(load_config(folder / "recipe.yaml", options), callbacks)
        return (folder / name / "checkpoint/model.safetensors").read_bytes()

    assert go("checked", [InputCheck()]) == go("plain", [])
    assert not (folder / "checked/warnings.jsonl").read_text()
    without_placing(None, monkeypatch)
    go("blind", [InputCheck()])
    warnings = [json.loads(line) for line in (folder / "blind/warnings.jsonl").read_text().splitlines()]
    assert [(line["stage"], line["step"]) for line in warnings if IMAGE in line["warning"]] == [("sft", 0), ("grpo", 0)]
