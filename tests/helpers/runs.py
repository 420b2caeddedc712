"""Fixtures that train a tiny recipe, for tests of training, options and results."""

import json

import numpy as np
import PIL.Image
import pytest
import yaml

from minivlmrl.__main__ import main
from minivlmrl.commands.train import train_recipe
from minivlmrl.monitor.memory.estimate import MemoryEstimator
from minivlmrl.tasks.shapes import Shapes
from tests.helpers import tiny

STAGE = {"max_steps": 3, "prompts_per_step": 4, "micro_batch_size": 4, "learning_rate": 3e-3}
RECIPE = tiny.recipe(STAGE, stages=["sft", "grpo"], data={"task": "shapes(demonstrations=8)", "eval_rows": 4})
LETTERS = "--rewards={letters: 1, format: 0, accuracy: 0}"


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    """Return a folder with recipe.yaml and its tiny model's config."""
    home = tmp_path_factory.mktemp("recipe")
    (home / "model.json").write_text(json.dumps(tiny.RUN_MODEL))
    (home / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return home


@pytest.fixture
def run(home, tmp_path):
    """Return a function that trains the recipe with changed options, and returns the run's folder."""

    def run(*overrides, name="run", recipe=home / "recipe.yaml"):
        train_recipe([str(recipe), f"--output_dir={tmp_path / name}", *overrides])
        return tmp_path / name

    return run


def leave_out(patch):
    """Speed up a run: no report, no summary of row lengths, shuffle 1,000 rows instead of a million."""
    patch.setattr("minivlmrl.monitor.report.write_page", lambda *_: None)
    patch.setattr("minivlmrl.monitor.check.preflight.describe_rows", lambda *_: ())
    patch.setattr("minivlmrl.tasks.shapes.FRESH_ROWS", 1000)


@pytest.fixture
def quick(monkeypatch):
    leave_out(monkeypatch)


@pytest.fixture(scope="session")
def checkpoint(home):
    """Return a Hugging Face folder with the recipe's randomly initialized model."""
    train_recipe([str(home / "recipe.yaml"), f"--output_dir={home / 'untrained'}", "--stages=[]", "--data.eval_rows=1"])
    return home / "untrained" / "checkpoint"


@pytest.fixture(scope="session")
def rows(home):
    """Return a user's JSON lines file with eight images, beside files with other questions, boxes and a video."""
    shapes = Shapes(8, "own")
    lines = []
    for i in range(8):
        shapes[i].images[0].save(home / f"{i}.png")
        lines.append({
            "problem": "Name it.", "image": f"{i}.png", "solution": shapes[i].columns["solution"],
            "completion": shapes[i].completion, "chosen": shapes[i].chosen,
            "rejected": shapes[i].rejected + " or so",
        })  # fmt: skip
    write_lines(home / "rows.jsonl", lines)
    write_lines(home / "other.jsonl", [line | {"problem": "Hm?"} for line in lines[:4]])
    PIL.Image.new("RGB", (90, 50), "red").save(home / "box.png")  # resized to 84 x 56
    write_lines(home / "boxes.jsonl", [{"problem": "Box it.", "image": "box.png", "solution": [0, 0, 45, 25]}] * 4)
    tiny.write_video(home / "film.mkv", [np.full((56, 56, 3), 10 * i, np.uint8) for i in range(24)], rate=8)
    write_lines(home / "film.jsonl", [{"problem": "What?", "video": "film.mkv", "completion": "It dawns."}] * 4)
    return home / "rows.jsonl"


@pytest.fixture(scope="session")
def user_data(checkpoint, rows):
    """Return command-line options to train the checkpoint on the user's rows."""
    files = ["--data.task=null", f"--data.train_file={rows}", "--data.eval_rows=256"]
    return ["--model.config=null", f"--model.path={checkpoint}", *files]


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_parquet(path, content, **options):
    """Write a list of rows, or a table of pyarrow, as a parquet file. Skip the test if pyarrow is missing."""
    pyarrow = pytest.importorskip("pyarrow", reason="extra missing: pip install pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.Table.from_pylist(content) if isinstance(content, list) else content
    parquet.write_table(table, path, **options)


def metrics(folder, name="metrics.jsonl"):
    return read_lines(folder / name)


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture
def whole_run(run, quick, home, rows, tmp_path, capsys):
    """Return a function that trains a tiny model on the user's rows, and loads it in transformers and commands."""

    def go(sizes, theirs):
        (tmp_path / "model.json").write_text(json.dumps(sizes))
        start = run("--stages=[]", "--data.eval_rows=1", f"--model.config={tmp_path / 'model.json'}", name="start")
        own = ["--model.config=null", "--data.task=null", f"--data.train_file={rows}"]
        PIL.Image.new("RGB", (56, 56), "teal").save(home / "teal.png")
        questions = [{"problem": "Hm?", "image": "teal.png", "solution": word} for word in ("teal", "red")]
        write_lines(home / "teal.jsonl", questions * 2)
        own += [f"--data.eval_file={home / 'teal.jsonl'}", "--sampling.max_new_tokens=14"]
        small = ["--sft.max_steps=1", "--grpo.max_steps=1", "--adapter.r=2"]
        folder = run(*own, *small, f"--model.path={start / 'checkpoint'}", name="own") / "checkpoint"
        results = json.loads((folder.parent / "summary.json").read_text())
        assert {"start", "after_sft", "after_grpo"} <= results.keys()
        _, info = theirs.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values())
        capsys.readouterr()
        image = ["--image", str(home / "0.png"), "--sampling.max_new_tokens=4"]
        assert main(["chat", "--model", str(folder), "--prompt", "What?", *image]) == 0
        assert main(["check", str(home / "recipe.yaml"), *own, f"--model.path={folder}"]) == 0
        assert main(["memory", "--model", str(folder), str(home / "recipe.yaml")]) == 0
        assert "GB on each GPU" in capsys.readouterr().out
        return folder

    return go


@pytest.fixture(scope="module")
def cached_activations():
    """Cache activation counts, which several tests need for the same model."""
    counted = {}
    count = MemoryEstimator.activations

    def activations(costs, run, models, work):
        weights = [(name, p.shape, p.dtype, p.requires_grad) for name, p in models.named_parameters()]
        options = (run.model.dtype, run.model.compute_dtype, run.model.activation_checkpointing)
        key = (repr(costs.config), *weights, *options, work)
        if key not in counted:
            counted[key] = count(costs, run, models, work)
        return counted[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryEstimator, "activations", activations)
        yield
