"""recipes/rec_qwen2_5_vl_3b.yaml on real photographs with a tiny checkpoint: it loads and makes one step."""

import json
from pathlib import Path

import PIL.Image
import pytest
import yaml

from minivlmrl import train
from minivlmrl.generate import Completion
from minivlmrl.hub.checkpoint import random_model, save_model
from minivlmrl.run import evaluate as rollout_file
from minivlmrl.tasks import localisation

datasets = pytest.importorskip("sklearn.datasets", reason="photographs missing: pip install scikit-learn")
ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "rec_qwen2_5_vl_3b.yaml"
PHOTOS = {"china.jpg": ("the tower", [240, 60, 400, 300]), "flower.jpg": ("the flower", [180, 60, 480, 380])}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny checkpoint of the hub's patch size, and rows with two photographs and boxes made for this test."""
    folder = tmp_path_factory.mktemp("rec")
    values = json.loads((ROOT / "recipes" / "localisation_model.json").read_text())
    values["vision_config"] |= {"patch_size": 14, "window_size": 112}
    (folder / "model.json").write_text(json.dumps(values))
    save_model(folder / "model", *random_model(folder / "model.json", localisation.tokenizer(), seed=0))
    rows = []
    for photo in datasets.load_sample_images().filenames:
        name = Path(photo).name
        with PIL.Image.open(photo) as image:
            image.save(folder / name)
        what, box = PHOTOS[name]
        problem = f"Please provide the bounding box coordinate of the region this sentence describes: {what}."
        rows.append({"image": name, "problem": problem, "solution": box})
    assert len(rows) == 2
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture
def run(folder, tmp_path, monkeypatch):
    def run(*overrides):
        monkeypatch.setattr(train, "write_report", lambda *_: None)
        rows = str(folder / "rows.jsonl")
        small = ["--data.max_pixels=50176", "--grpo.max_steps=1", "--grpo.prompts_per_step=2", "--num_threads=1"]
        files = [f"--model.path={folder / 'model'}", f"--data.train_file={rows}", f"--data.eval_file={rows}"]
        train.main([str(RECIPE), *files, *small, "--sampling.max_new_tokens=8", f"--output_dir={tmp_path}", *overrides])
        return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]

    return run


def test_one_step(run):
    [line] = run()
    assert {"rewards/iou", "rewards/box_format", "kl"} <= set(line)
    assert line["grad_norm"] >= 0 and line["completions/mean_length"] <= 8


def test_boxes_of_the_resized_image_are_scaled_back(run, folder, monkeypatch):
    """A policy that writes the true box in pixels of the resized image gets IoU 1; in original pixels it does not."""
    scores = {}
    for space in ("resized", "original"):

        def write(model, prompts, num_generations, *_, space=space):
            said = []
            for prompt, (_, box) in zip(prompts, boxes(prompts), strict=True):
                _, height, width = prompt.image_grid_thw[0].tolist()
                scale = (width * 14 / 640, height * 14 / 427) if space == "resized" else (1, 1)
                numbers = [round(v * scale[i % 2], 1) for i, v in enumerate(box)]
                text = f"<think>there</think><answer>{json.dumps({'bbox_2d': numbers})}</answer>"
                said.append(text)
            return said

        monkeypatch.setattr(rollout_file, "generate", speak(write, folder))
        [line] = run("--data.eval_rows=2", "--grpo.num_generations=2")
        scores[space] = line["rewards/iou"]
    assert scores["resized"] == pytest.approx(1, abs=0.01)
    assert scores["original"] < 0.7


def boxes(prompts):
    """Which photograph a prompt shows: the flower's question is the longer one by a token or more."""
    tokenizer = localisation.tokenizer()
    texts = [tokenizer.decode(prompt.input_ids.tolist()) for prompt in prompts]
    return [next(photo for photo in PHOTOS.values() if photo[0] in text) for text in texts]


def speak(write, folder):
    """A generate() that says what write() makes up."""
    tokenizer = localisation.tokenizer()

    def generate(model, prompts, num_generations, *rest, **draws):
        import torch

        said = []
        for text in write(model, prompts, num_generations):
            ids = torch.tensor([*tokenizer.encode(text), tokenizer.special_tokens["<|im_end|>"]])
            said.append([Completion(ids, torch.zeros(len(ids)), True) for _ in range(num_generations)])
        return said

    return generate


def test_the_settings_are_vlm_r1s():
    recipe = yaml.safe_load(RECIPE.read_text())
    grpo = recipe["grpo"]
    assert (grpo["num_generations"], grpo["beta"], grpo["learning_rate"], grpo["max_steps"]) == (8, 0.04, 1e-6, 480)
    assert "{problem}" in recipe["data"]["prompt_template"] and recipe["data"]["box_space"] == "resized"
