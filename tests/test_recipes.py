"""Recipes of the repository in small runs: localisation, and referring expressions on real photographs."""

import json
from pathlib import Path

import PIL.Image
import pytest
import torch
from runs import metrics, summary

from benchmarks.digits import write_digits
from minivlmrl import train
from minivlmrl.rows import Completion
from minivlmrl.sampling import sample as sample_file
from minivlmrl.scale.checkpoint import load_model, random_model, save_model
from recipes import localisation
from recipes.localisation import Localisation, constant_box

ROOT = Path(__file__).parents[1]
LOCALISATION = ROOT / "recipes" / "localisation.yaml"
SMALL = [
    "--num_threads=1", "--data.eval_rows=12", "--data.demonstrations=8",
    *[f"--{stage}.{option}" for stage in ("sft", "grpo")
      for option in ("max_steps=2", "prompts_per_step=4", "micro_batch_size=4")],
]  # fmt: skip


def test_the_localisation_recipe_runs(run, capsys):
    folder = run(*SMALL, recipe=LOCALISATION)
    table, held_out = summary(folder), Localisation(12, "test")
    assert list(table) == ["chance", "start", "after_sft", "after_grpo", "seconds"]
    assert table["chance"] == constant_box(held_out)[1]
    assert any(held_out[i].columns["unseen"] for i in range(12))
    for name in ("start", "after_sft", "after_grpo"):
        assert list(table[name]) == [
            "sampled", "greedy", "format", "acc_0_5 sampled", "acc_0_5 greedy", "unseen sampled", "unseen greedy",
        ]  # fmt: skip
        assert all(0 <= share <= 1 for share in table[name].values())
    lines = metrics(folder)
    assert [(line["stage"], line["step"]) for line in lines] == [(s, i) for s in ("sft", "grpo") for i in (0, 1)]
    assert {"rewards/iou/mean", "rewards/box_format/mean", "kl"} <= set(lines[-1])
    load_model(folder / "checkpoint")
    said = capsys.readouterr().out
    assert "after grpo" in said and "unseen greedy" in said and f"constant box {table['chance']:>9.3f}" in said


def test_eval_rewards_say_what_is_reported(run, plain):
    """The first is what counts, the second the form, further ones have metrics of their own."""
    options = ["--stages=[]", f"--data.task={localisation.__file__}:TASK", "--data.eval_rows=2"]
    tables = [
        summary(run(*options, f"--data.eval_rewards=[{names}]", name=names))["start"]
        for names in ("giou, format", "iou, box_format, acc_0_5, giou")
    ]
    assert list(tables[0]) == ["sampled", "greedy", "format"]
    assert list(tables[1]) == [
        "sampled", "greedy", "format", "acc_0_5 sampled", "acc_0_5 greedy", "giou sampled", "giou greedy",
    ]  # fmt: skip
    assert tables[0]["greedy"] == tables[1]["giou greedy"] == -1  # an untrained model answers no box
    assert tables[1]["greedy"] == 0


def test_an_eval_reward_that_nobody_can_answer_is_refused(run, plain):
    """The reward model judges training's rollouts only."""
    with pytest.raises(ValueError, match="reward_model"):
        run("--stages=[]", "--data.eval_rewards=[reward_model, format]")


# recipes/rec_qwen2_5_vl_3b.yaml with a tiny checkpoint

RECIPE = ROOT / "recipes" / "rec_qwen2_5_vl_3b.yaml"
PHOTOS = {"china.jpg": ("the tower", [240, 60, 400, 300]), "flower.jpg": ("the flower", [180, 60, 480, 380])}


@pytest.fixture(scope="module")
def rec(tmp_path_factory):
    """A tiny checkpoint of the hub's patch size, and rows with two photographs and boxes made for this test."""
    datasets = pytest.importorskip("sklearn.datasets", reason="photographs missing: pip install scikit-learn")
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
def run_rec(rec, tmp_path, plain):
    def run(*overrides):
        rows = str(rec / "rows.jsonl")
        small = ["--data.max_pixels=50176", "--grpo.max_steps=1", "--grpo.prompts_per_step=2", "--num_threads=1"]
        files = [f"--model.path={rec / 'model'}", f"--data.train_file={rows}", f"--data.eval_file={rows}"]
        files += ["--sampling.max_new_tokens=8", f"--output_dir={tmp_path}", "--resume=never"]
        train.main([str(RECIPE), *files, *small, *overrides])
        return metrics(tmp_path)

    return run


def test_boxes_of_the_resized_image_are_scaled_back(run_rec, monkeypatch):
    """A policy that writes the true box in pixels of the resized image gets IoU 1; in original pixels it does not."""
    scores = {}
    for space in ("resized", "original"):

        def write(prompts, space=space):
            said = []
            for prompt, (_, box) in zip(prompts, boxes(prompts), strict=True):
                _, height, width = prompt.image_grid_thw[0].tolist()
                scale = (width * 14 / 640, height * 14 / 427) if space == "resized" else (1, 1)
                numbers = [round(v * scale[i % 2], 1) for i, v in enumerate(box)]
                said.append(f"<think>there</think><answer>{json.dumps({'bbox_2d': numbers})}</answer>")
            return said

        monkeypatch.setattr(sample_file, "generate", speak(write))
        [line] = run_rec("--data.eval_rows=2", "--grpo.num_generations=2", "--rollout.max_logp_mismatch=.inf")
        scores[space] = line["rewards/iou/mean"]
    assert scores["resized"] == pytest.approx(1, abs=0.01)
    assert scores["original"] < 0.7


def boxes(prompts):
    """Which photograph a prompt shows: the flower's question is the longer one by a token or more."""
    tokenizer = localisation.tokenizer()
    texts = [tokenizer.decode(prompt.input_ids.tolist()) for prompt in prompts]
    return [next(photo for photo in PHOTOS.values() if photo[0] in text) for text in texts]


def speak(write):
    """A generate() that says what write() makes up."""
    tokenizer = localisation.tokenizer()

    def generate(model, prompts, num_generations, *rest, **draws):
        said = []
        for text in write(prompts):
            ids = torch.tensor([*tokenizer.encode(text), tokenizer.special_tokens["<|im_end|>"]])
            said.append([Completion(ids, torch.zeros(len(ids)), True) for _ in range(num_generations)])
        return said

    return generate


def test_the_digits_recipe_runs(run, plain, tmp_path, monkeypatch):
    """Pictures that nobody here drew, as a user's own files: SFT on demonstrations of its own, then GRPO."""
    pytest.importorskip("sklearn", reason="digits missing: pip install scikit-learn")
    monkeypatch.chdir(tmp_path)
    write_digits("digits")
    files = {name: (tmp_path / "digits" / f"{name}.jsonl").read_text().splitlines() for name in ("eval", "train")}
    assert (len(files["eval"]), len(files["train"])) == (297, 1500) and not set(files["eval"]) & set(files["train"])
    lines = (tmp_path / "digits" / "demonstrations.jsonl").read_text().splitlines()
    shown = [json.loads(line) for line in lines]
    wrong = sum(f"<answer>{row['solution']}</answer>" not in row["completion"] for row in shown) / len(shown)
    assert len(shown) == 500 and 0.1 < wrong < 0.25  # a tenth of the random digits is right
    folder = run(*[option for option in SMALL if "demonstrations" not in option], recipe=ROOT / "recipes/digits.yaml")
    lines = metrics(folder)
    assert [(line["stage"], line["step"]) for line in lines] == [(s, i) for s in ("sft", "grpo") for i in (0, 1)]
    assert list(summary(folder)) == ["chance", "start", "after_sft", "after_grpo", "seconds"]
    load_model(folder / "checkpoint")


@pytest.mark.parametrize(
    "name", ["rec_qwen2_5_vl_3b_one_card", "lora_7b", "cls_qwen2_vl_2b", "rec_qwen3_vl_4b_one_card"]
)
def test_a_step_of_the_recipes_of_one_card(run, plain, own, rows, name):
    small = ["--grpo.max_steps=1", "--grpo.prompts_per_step=2", "--grpo.num_generations=2"]
    small += ["--sampling.max_new_tokens=4", "--num_threads=1"]
    files = [*own, f"--data.eval_file={rows}", "--data.eval_rows=1", "--max_epochs=null"]
    files += ["--data.eval_rewards=[accuracy, format]", "--rewards={accuracy: 1}"]
    [line] = metrics(run(*files, *small, recipe=ROOT / "recipes" / f"{name}.yaml"))
    assert line["stage"] == "grpo" and line["completions/mean_length"] <= 4
