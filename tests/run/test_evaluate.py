"""Test how an evaluation averages rewards, and that its samples depend only on the row."""

from dataclasses import replace
from types import SimpleNamespace

import PIL.Image
import pytest
import torch

from minivlmrl.config.options import DataOptions, RunConfig, SamplingOptions
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.messages import conversation
from minivlmrl.data.rows import Row
from minivlmrl.model.build import random_model
from minivlmrl.run import evaluate as file
from minivlmrl.run import results
from minivlmrl.tasks import shapes
from tests.helpers.runs import write_lines
from tests.helpers.stages import ONE
from tests.helpers.talk import user

REWARDS = ["iou", "box_format", "acc_0_5"]
NAN = float("nan")


def config(rewards=("accuracy", "format"), sampling=None, blind=False):
    data = DataOptions(eval_rewards=list(rewards), eval_without_images=blind)
    return RunConfig(data=data, sampling=sampling or SamplingOptions(max_new_tokens=6))


@pytest.mark.parametrize(("rewards", "evaluated"), [
    ({"format": 0.5, "accuracy": 1.0}, ["accuracy", "format"]),  # as in the default recipe
    ({"box_format": 1.0, "own.py:f": 0.2, "iou": 1.0}, ["iou", "own.py:f", "box_format"]),
    ({"environment": 1.0}, ["environment"]),
    ({"reward_model": 1.0, "format": 0.1}, ["format"]),
    ({"reward_model": 1.0}, ["accuracy", "format"]),
    ({}, ["accuracy", "format"]),
])  # fmt: skip
def test_by_default_the_rewards_of_the_recipe_judge(rewards, evaluated):
    """The reward with the largest weight comes first, and a format last; a reward model cannot score held-out rows."""
    run = RunConfig(rewards=rewards)
    assert run.eval_rewards == evaluated
    run.data.eval_rewards = ["iou"]
    assert run.eval_rewards == ["iou"]


SAMPLING = SamplingOptions(0.7, 20, None, 5, 0.9, 0.1, 1.3, stop_strings=["</answer>"], max_batch_tokens=20_000)


@pytest.fixture
def scripted(monkeypatch):
    """Take the rewards of a row from its columns `sampled` and `greedy`, instead of generating."""

    def make_sampler(model, processor, sampling, world, gather_weights):
        # an evaluation has the stop strings of training, but no truncated probabilities, and bounded batches
        assert sampling == SamplingOptions(sampling.temperature, 20, stop_strings=["</answer>"], max_batch_tokens=16384)
        return SimpleNamespace(world=world, kind={1.0: "sampled", 0.0: "greedy"}[sampling.temperature])

    def answer(sample, rows, count, rewards):
        return torch.tensor([row.columns[sample.kind][: len(rewards)] for row in rows]), [[None]] * len(rows)

    monkeypatch.setattr(file, "make_sampler", make_sampler)
    monkeypatch.setattr(file, "generate_and_score", answer)


def scored(sampled, greedy):
    return Row([], [], {"sampled": sampled, "greedy": greedy})


ROWS = [
    scored([0.5, 1.0, 1.0], [1.0, 1.0, 1.0]),
    scored([0.0, 0.0, 0.0], [0.25, 0.0, 0.0]),
    scored([NAN, 1.0, NAN], [NAN, 1.0, NAN]),
    scored([0.25, 0.0, 0.0], [0.5, 1.0, 1.0]),
    scored([0.25, 1.0, 0.0], [0.25, 0.0, 0.0]),
]


@pytest.mark.parametrize("batch_size", [2, 8])
def test_each_metric_is_a_mean_over_the_rows_that_have_a_value(scripted, monkeypatch, batch_size):
    monkeypatch.setattr(file, "BATCH_SIZE", batch_size)
    assert file.evaluate(None, None, ROWS, config(REWARDS, SAMPLING), ONE) == {
        "eval/iou_sampled": 0.25, "eval/iou_greedy": 0.5, "eval/box_format_sampled": 0.6,
        "eval/acc_0_5_sampled": 0.25, "eval/acc_0_5_greedy": 0.5,
    }  # fmt: skip


def test_metrics_that_no_row_provides_are_not_reported(scripted):
    # with one reward, only the first value counts
    rows = [scored([NAN, 1.0, NAN], [0.5, 1.0, NAN])]
    assert file.evaluate(None, None, rows, config(REWARDS, SAMPLING), ONE) == {
        "eval/iou_greedy": 0.5, "eval/box_format_sampled": 1.0,
    }  # fmt: skip
    assert file.evaluate(None, None, rows, config(REWARDS[:1], SAMPLING), ONE) == {"eval/iou_greedy": 0.5}
    # only a format in the second place lacks a greedy metric
    assert "eval/acc_0_5_greedy" in file.evaluate(None, None, ROWS, config(["iou", "acc_0_5"], SAMPLING), ONE)


@pytest.mark.parametrize(("name", "needs"), [
    ("eval/format_greedy", {"demonstrations"}), ("eval/accuracy_gray_image", {"demonstrations"}),
    ("eval/loss", {"prompts", "pairs"}), ("eval/pair_accuracy", {"demonstrations"}),
])  # fmt: skip
def test_a_best_metric_that_no_evaluation_of_the_run_measures_is_refused(name, needs):
    run = config()
    run.best_metric = name
    trainers = {kind: SimpleNamespace(needs=kind) for kind in needs}
    with pytest.raises(ValueError, match=f"best_metric is '{name}', but it must be one of eval/accuracy_sampled, "):
        results.check_outputs(run, trainers)
    run.best_metric = {"demonstrations": "eval/loss", "pairs": "eval/pair_accuracy"}[max(needs - {"prompts"})]
    results.check_outputs(run, trainers)
    run.output_dir = f"{__file__}/run"
    with pytest.raises(ValueError, match=f"output_dir is '{__file__}', but it must be a folder, and this is a file"):
        results.check_outputs(run, trainers)


@pytest.fixture(scope="module")
def model(folder):
    return random_model(folder / "model.json", shapes.tokenizer(), 0)


def test_evaluations_without_images_use_gray_and_swapped_images(model, monkeypatch):
    """Evaluations with gray or swapped images keep the keys of rows, and so their random numbers."""
    rows = [shapes.Shapes(4, "held out")[i] for i in range(4)]
    rows[1].images = []
    rows[1].messages = [user("What is it?")]
    rows[2].images = rows[2].images * 2
    rows[2].messages = conversation("Which?", {"image": 2})
    keys = []
    shown = []

    def recorded(sample, batch, count, rewards):
        way = float(len(keys) // 4)
        keys.extend(row.key for row in batch)
        shown.extend([image.tobytes() for image in row.images] for row in batch)
        return torch.full((len(batch), 2), way), [[None]] * len(batch)

    monkeypatch.setattr(file, "generate_and_score", recorded)
    monkeypatch.setattr(file, "BATCH_SIZE", 2)
    values = file.evaluate(*model, rows, config(blind=True), ONE)
    assert [values[f"eval/accuracy_{way}"] for way in ("sampled", "gray_image", "swapped_image")] == [0.0, 2.0, 3.0]
    assert "eval/accuracy_gray_image" not in file.evaluate(*model, rows, config(), ONE)
    assert keys == [f"evaluation/{i}" for i in range(4)] * 6
    own = shown[:4]
    blank = PIL.Image.new("RGB", rows[0].images[0].size, "gray").tobytes()
    assert own == [[image.tobytes() for image in row.images] for row in rows]
    assert shown[8:12] == [[blank], [], [blank] * 2, [blank]]
    assert shown[12:16] == [own[2][:1], [], own[3] * 2, own[0]]


def test_videos_are_gray_or_swapped_too(tmp_path):
    sizes = {"a": (56, 28), "b": (28, 28), "c": (28, 56)}
    for name, size in sizes.items():
        PIL.Image.new("RGB", size, "red").save(tmp_path / f"{name}.png")
    lines = [{"problem": "1", "video": ["a.png", "a.png"], "image": "b.png"}, {"problem": "2", "image": "c.png"},
             {"problem": "3", "videos": [["b.png"], ["c.png"]]}]  # fmt: skip
    write_lines(tmp_path / "rows.jsonl", lines)
    rows = FileDataset(tmp_path / "rows.jsonl")
    images = ImageProcessor(patch_size=7)
    for name, expected in {"gray_image": [(56, 28), (56, 28)], "swapped_image": [(28, 28)]}.items():
        row = replace(rows[0], index=0)
        row = replace(row, **file.IMAGE_ABLATIONS[name](row, rows))
        [video], [image] = row.videos, row.images
        assert [frame.size for frame in video.read(images).frames] == expected
        gray = PIL.Image.new("RGB", (28, 28), "gray")
        # boxes are in pixels of the row's own image, so another row's image has the same size
        assert image.size == (28, 28) and (image.tobytes() == gray.tobytes()) == (name == "gray_image")
        colors = {frame.getpixel((0, 0)) for frame in video.read(images).frames}
        assert colors == ({gray.getpixel((0, 0))} if name == "gray_image" else {(255, 0, 0)})
    [swapped] = file.IMAGE_ABLATIONS["swapped_image"](replace(rows[1], index=1), rows)["images"]
    assert swapped.size == (28, 56)
    assert len(file.IMAGE_ABLATIONS["swapped_image"](replace(rows[2], index=2), rows)["videos"]) == 2
