"""Test `task`: all trainers get the same rows and the same reward, and the model works in transformers."""

import random
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import transformers
from oracle import our_logits

from minivlmrl.__main__ import main
from minivlmrl.commands import task
from minivlmrl.config.loading import load_config
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.processor import Processor
from minivlmrl.model.checkpoint import load_model, load_processor
from minivlmrl.rewards.text import accuracy, find_answer, tag_format
from minivlmrl.run.loop import run_training
from minivlmrl.tasks import shapes
from recipes import shapes_reward

FILES = ("train.jsonl", "easyr1_train.jsonl", "verl_train.json")


@pytest.fixture
def rows(tmp_path):
    rows = shapes.Shapes(5, "0/grpo")
    task.write_split(tmp_path, "train", rows)
    return rows


@pytest.mark.parametrize("file", FILES)
def test_every_file_has_the_rows_of_the_default_run(tmp_path, rows, file):
    written = FileDataset(tmp_path / file, ("problem", "solution"))
    assert len(written) == len(rows)
    processor = Processor(shapes.tokenizer(), ImageProcessor())
    for ours, theirs in zip(rows, written, strict=True):
        prompt, expected = theirs.prompt(processor), ours.prompt(processor)
        assert torch.equal(prompt.input_ids, expected.input_ids)
        assert torch.equal(prompt.pixel_values, expected.pixel_values)
        assert theirs.columns["solution"] == ours.columns["solution"]


def test_datasets_reads_the_rows(tmp_path, rows, monkeypatch):
    monkeypatch.chdir(tmp_path)  # image paths are relative
    by_verl, by_easyr1, written = (
        datasets.load_dataset("json", data_files=file, split="train", cache_dir=str(tmp_path / "cache"))
        for file in reversed(FILES)
    )
    for ours, theirs in zip(rows, written.cast_column("images", datasets.List(datasets.Image())), strict=True):
        assert theirs["prompt"] == [{"role": "user", "content": shapes.PROBLEM}]
        assert theirs["solution"] == ours.columns["solution"]
        assert np.array_equal(ours.images[0], theirs["images"][0])
    solutions = [row.columns["solution"] for row in rows]
    assert [row["answer"] for row in by_easyr1] == solutions
    assert [row["reward_model"]["ground_truth"] for row in by_verl] == solutions
    assert by_verl[0]["images"][0]["image"].startswith("data:image/png;base64,")


def texts():
    """Answers, and answers in which parts are missing, doubled or exchanged."""
    rng = random.Random(0)
    parts = ["<think>", "</think>", "<answer>", "</answer>", " ", "\n", "", "red", "Red  square.", "red square", "<"]
    for label in shapes.LABELS:
        yield shapes.tagged_answer(label)
        yield from (shapes.make_rejected(label, rng) for _ in range(50))
    for _ in range(20_000):
        yield "".join(rng.choices(parts, k=rng.randint(0, 9)))


def test_the_reward_is_that_of_the_default_run_for_every_trainer():
    found = [*texts()]
    solution = ["red square"] * len(found)
    form = tag_format(found)
    correct = accuracy([find_answer(text) for text in found], solution)
    expected = [0.5 * a + b for a, b in zip(form, correct, strict=True)]
    assert {0, 0.5, 1, 1.5} == {*expected}
    assert shapes_reward.trl_reward([[{"role": "assistant", "content": text}] for text in found], solution) == expected
    assert [shapes_reward.verl_reward("shapes", text, "red square") for text in found] == expected
    inputs = [{"response": text, "response_length": 9, "ground_truth": "red square"} for text in found]
    columns = zip(expected, form, correct, strict=True)
    assert shapes_reward.easyr1_reward(inputs) == [{"overall": a, "format": b, "accuracy": c} for a, b, c in columns]


def test_a_folder_with_files_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("")
    assert main(["task", "shapes", str(tmp_path)]) == 2
    assert "already exists; choose another folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("end", ["error", "signal"])
def test_an_interrupted_command_can_be_repeated(tmp_path, monkeypatch, capsys, end):
    """A killed command leaves FOLDER.partial; after a signal the training returns its exit code without a model."""
    monkeypatch.setattr(task, "NUM_TRAIN", 2)
    monkeypatch.setattr(task, "NUM_EVAL", 2)
    folder = tmp_path / "new" / "task"

    def interrupted(config):
        if end == "error":
            raise KeyboardInterrupt
        return 75

    def trained(config):
        (Path(config.output_dir) / "checkpoint").mkdir()
        return 0

    monkeypatch.setattr(task, "run_training", interrupted)
    assert main(["task", "shapes", str(folder)]) == (130 if end == "error" else 75)
    assert not folder.exists() and (end == "error" or "repeat the command" in capsys.readouterr().out)
    monkeypatch.setattr(task, "run_training", trained)
    assert main(["task", "shapes", str(folder)]) == 0
    assert (folder / "README.md").is_file() and [*folder.parent.iterdir()] == [folder]


@pytest.mark.slow
def test_the_folder_trains_and_its_model_works_in_transformers(tmp_path, monkeypatch):
    folder = tmp_path / "task"
    assert main(["task", "shapes", str(folder)]) == 0
    assert {"README.md", "reward.py", *FILES} <= {path.name for path in folder.iterdir()}
    assert len([*folder.glob("*/*.png")]) == 768

    ours, processor = load_model(folder / "model"), load_processor(folder / "model")
    theirs = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "model").eval()
    rows = FileDataset(folder / "eval.jsonl", ("problem", "solution"))
    for number in range(4):
        prompt = rows[number].prompt(processor)
        ids = prompt.input_ids[None]
        types = (ids == ours.config.image_token_id).long()
        images = {"pixel_values": prompt.pixel_values, "image_grid_thw": prompt.image_grid_thw}
        with torch.no_grad():
            expected = theirs(input_ids=ids, mm_token_type_ids=types, **images).logits[0]
            [logits] = our_logits(ours, [prompt])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)

    files = [f"--data.{split}_file={folder / split}.jsonl" for split in ("train", "eval")]
    options = ["--stages=[grpo]", "--model.config=null", f"--model.path={folder / 'model'}", "--data.task=null"]
    short = ["--grpo.max_steps=1", f"--output_dir={tmp_path / 'run'}", "--num_threads=1"]
    assert run_training(load_config("recipes/shapes.yaml", [*options, *files, *short])) == 0
