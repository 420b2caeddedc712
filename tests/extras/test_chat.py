"""Test that `minivlmrl chat` prints completions as the sampler of a run generates them."""

import json
import shutil

import numpy as np
import PIL.Image
import pytest
import torch

from minivlmrl.__main__ import main as start
from minivlmrl.config.options import DataOptions, SamplingOptions
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.media import fetch_image
from minivlmrl.data.messages import conversation
from minivlmrl.data.tokenizer import train_tokenizer
from minivlmrl.distributed.saving import save_model
from minivlmrl.extras.agents import tool_sampler
from minivlmrl.extras.answers import chat as command
from minivlmrl.generation import sampler
from minivlmrl.model.build import random_model
from minivlmrl.model.checkpoint import load_model, load_processor
from tests.helpers import tiny
from tests.helpers.links import ROOT
from tests.helpers.stages import ONE

LENGTH, TEMPERATURE = "--sampling.max_new_tokens", "--sampling.temperature"
TEXT = ["How many cats are there on the mat? naïve café 猫が好き 🐈"] * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Save two images and a random model, which often generates incomplete UTF-8 characters."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "model.json").write_text(json.dumps(tiny.RUN_MODEL))
    model, processor = random_model(folder / "model.json", train_tokenizer(TEXT, vocab_size=360), seed=0)
    save_model(folder / "checkpoint", tiny.telling_weights(model), processor)
    for seed, (name, size) in enumerate({"a.png": (84, 56), "b.png": (28, 112)}.items()):
        noise = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
        PIL.Image.fromarray(noise).save(folder / name)
    return folder


@pytest.fixture
def ask(folder, capsys):
    def ask(*arguments, prompt="How many cats?"):
        status = start(["chat", "--model", str(folder / "checkpoint"), "--prompt", prompt, *map(str, arguments)])
        return status, *capsys.readouterr()

    return ask


def sample_text(
    folder, images=(), prompt="How many cats?", system=None, seed=0, pixels=(None,) * 2, videos=(), **given
):
    """Sample a completion and return its text and whether it was truncated; `pixels` are (min_pixels, max_pixels)."""
    model = load_model(folder / "checkpoint")
    processor = load_processor(folder / "checkpoint", *pixels)
    messages = conversation(prompt, {"image": len(images), "video": len(videos)}, system_prompt=system)
    question = processor(messages, [fetch_image(folder / name) for name in images], list(videos))
    [[completion]] = sampler.Sampler(model, processor, SamplingOptions(**given), ONE)([question], 1, [f"ask/{seed}"])
    return processor.decode(completion.ids), not completion.stopped


def test_images_text_system_and_size_reach_the_model(folder, ask):
    a = folder / "a.png"
    b = folder / "b.png"
    cases = [
        (dict(), []), (dict(images=["a.png"]), ["--image", a]), (dict(system="Be brief."), ["--system", "Be brief."]),
        (dict(images=["a.png", "b.png"]), ["--image", a, "--image", b]),
        (dict(images=["b.png", "a.png"]), ["--image", b, "--image", a]),
        (dict(images=["a.png"], prompt="Is <image> a cat?"), ["--image", a]),
        (dict(images=["a.png"], pixels=(None, 28 * 28)), ["--image", a, f"--data.max_pixels={28 * 28}"]),
        (dict(images=["a.png"], pixels=(28 * 28 * 20, None)), ["--image", a, f"--data.min_pixels={28 * 28 * 20}"]),
    ]  # fmt: skip
    answers = []
    for expected, arguments in cases:
        prompt = expected.get("prompt", "How many cats?")
        text, cut = sample_text(folder, max_new_tokens=30, temperature=0.3, **expected)
        status, out, err = ask(*arguments, LENGTH, 30, TEMPERATURE, 0.3, prompt=prompt)
        assert (status, out, bool(err)) == (0, text + "\n", cut)
        answers.append(text)
    assert len(set(answers)) == len(cases)


def test_prompts_are_formatted_as_in_training(folder, ask, published, tmp_path):
    """If the prompt ends with `<think>`, `chat` prints this tag before the completion."""
    copy = shutil.copytree(folder / "checkpoint", tmp_path / "copy")
    content = "stages: [gone.py:S]\ndata: {prompt_template: 'Look. {problem} Now.', system_prompt: Be brief.}"
    (copy / "minivlmrl.yaml").write_text(content)
    for system, more in (("Be brief.", []), ("Go.", ["--system", "Go."])):
        text, _ = sample_text(folder, prompt="Look. How many cats? Now.", system=system, max_new_tokens=12)
        status, out, err = ask("--model", copy, LENGTH, 12, *more)
        assert (status, out) == (0, text + "\n")
        assert f"prompt template of {copy / 'minivlmrl.yaml'}: 'Look. {{problem}} Now.'" in err
    (copy / "chat_template.jinja").write_text(published("qwen3_5_nothink"))
    for value in (True, False):
        (copy / "minivlmrl.yaml").write_text(f"data: {{chat_template_kwargs: {{enable_thinking: {value}}}}}")
        assert ask("--model", copy, LENGTH, 2)[1].startswith("<think>\n") is value


def test_answers_stop_as_in_training(folder, ask, tmp_path):
    """Other options for sampling in training, such as its temperature, are not used."""
    text, _ = sample_text(folder, max_new_tokens=20)
    stop = next(filter(str.isalpha, text))
    copy = shutil.copytree(folder / "checkpoint", tmp_path / "copy")
    for rule, expected in ((f"stop_strings: [{stop}]", text[: text.index(stop) + 1]), ("max_new_tokens: 3", text)):
        (copy / "minivlmrl.yaml").write_text(f"sampling: {{{rule}, environment: gone.py:E, temperature: 0.1}}")
        status, out, _ = ask("--model", copy, LENGTH, 20)
        assert status == 0 and out.startswith(expected) and (out == f"{text}\n") == (expected == text)


def test_code_that_a_found_recipe_names_is_refused(folder, ask, tmp_path):
    copy = shutil.copytree(folder / "checkpoint", tmp_path / "copy")
    for values in ("data: {task: evil.py:f}", "rewards: {evil.py:f: 1}", "optimizer: {name: 'torch.optim:SGD'}"):
        (copy / "minivlmrl.yaml").write_text(values)
        code, _, err = ask("--model", copy)
        assert code == 2 and "minivlmrl.yaml was found automatically and would run the code " in err


@pytest.mark.parametrize("options", [
    {}, {"image": {"max_pixels": 3136}}, {"video": {"nframes": 6, "max_pixels": 100352}},
    {"image": {"min_pixels": 12544}, "video": {"resized_height": 56, "resized_width": 28}},
], ids=str)  # fmt: skip
def test_images_and_videos_have_the_sizes_of_training(folder, tmp_path, options):
    tiny.write_video(tmp_path / "v.mkv", [np.full((112, 112, 3), i, np.uint8) for i in range(24)], 4)
    row = {"problem": "What?", "image": str(folder / "a.png"), "video": "v.mkv"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    processor = load_processor(folder / "checkpoint")
    trained = FileDataset(tmp_path / "rows.jsonl", ("problem",), **options)[0].prompt(processor)
    words = ["--image", row["image"], "--video", str(tmp_path / "v.mkv"), "--model", "M", "--prompt", "What?"]
    shown = command.build_row(command.build_parser().parse_args(words), DataOptions(**options)).prompt(processor)
    assert torch.equal(shown.pixel_values, trained.pixel_values) and torch.equal(shown.input_ids, trained.input_ids)
    assert torch.equal(shown.second_per_grid_ts, trained.second_per_grid_ts)


@pytest.mark.parametrize("text", ["猫🐈x", "\ufffd"])
def test_a_character_is_shown_with_its_last_byte(text):
    tokenizer = train_tokenizer([], vocab_size=270)
    stop = tokenizer.special_tokens["<|im_end|>"]
    pieces = []
    stream = command.Stream(tokenizer, [stop], pieces.append)
    for token_id in [*tokenizer.encode(text), *tokenizer.encode("猫")[:-1], stop]:
        stream.write(None, torch.tensor([token_id]))
    assert pieces == [piece for char in text for piece in [""] * (len(char.encode()) - 1) + [char]] + [""] * 2
    stream.end()
    assert pieces[-1] == "\ufffd"


def test_the_dtype_is_an_option_and_ctrl_c_prints_no_traceback(ask, monkeypatch):
    dtypes = []

    def interrupted(model, *rest, **_):
        dtypes.append(model.lm_head.weight.dtype)
        raise KeyboardInterrupt

    monkeypatch.setattr(sampler, "generate", interrupted)
    assert ask() == ask("--model.dtype=bfloat16") == (130, "\n", "")
    assert dtypes == [torch.float32, torch.bfloat16]


def test_a_tool_is_called(ask, monkeypatch):
    calls = iter([[("calculator", "1 + 1")]])
    monkeypatch.setattr(tool_sampler, "token_bytes", lambda *_: b"<calculator></calculator>")
    monkeypatch.setattr(tool_sampler, "find_calls", lambda *_: next(calls, []))
    status, out, _ = ask("--sampling.environment", f"{ROOT}/recipes/tools.py:calculator", LENGTH, "40")
    assert status == 0 and out.count("<result>2</result>") == 1
