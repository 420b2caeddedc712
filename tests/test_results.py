"""The files of a run's folder: what is measured, what a row of the table says, and who writes."""

import errno
import json
import math
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from minivlmrl.hub.checkpoint import load_model, random_model
from minivlmrl.run import results as file
from minivlmrl.run.config import load_config
from minivlmrl.run.evaluate import Evaluation
from minivlmrl.run.results import Results, row
from minivlmrl.scale.ranks import World
from minivlmrl.tasks import shapes
from minivlmrl.tasks.shapes import Shapes

from stages import ONE

NAN = math.nan


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (Evaluation(0.1, 0.2, 0.3, []), {"sampled": 0.1, "greedy": 0.2, "format": 0.3}),
        (Evaluation(NAN, NAN, 0.3, [], pairs=0.5), {"format": 0.3, "pairs": 0.5}),
        (Evaluation(0.1, NAN, 0.3, [], {"giou greedy": -1.0}), {"sampled": 0.1, "format": 0.3, "giou greedy": -1.0}),
        (Evaluation(0.1, 0.2, 0.3, [], pairs=0.0), {"sampled": 0.1, "greedy": 0.2, "format": 0.3, "pairs": 0.0}),
    ],
)
def test_a_row_says_what_could_be_judged(result, expected):
    assert row(result) == expected
    assert list(row(result)) == list(expected)


@pytest.fixture
def results(home, tmp_path, monkeypatch):
    """results(world, held_out) of a run in tmp_path / "run"."""
    monkeypatch.setattr(file, "write_report", lambda *_: None)

    def results(world=ONE, held_out=None):
        config = load_config(home / "recipe.yaml", [f"--output_dir={tmp_path / 'run'}"])
        model, processor = random_model(home / "model.json", shapes.tokenizer(), 0)
        return Results(config, model, processor, world, held_out, {})

    return results


def test_what_is_measured_is_written(results, monkeypatch, capsys):
    monkeypatch.setattr(file, "evaluate", lambda *_: Evaluation(0.25, 0.5, 1.0, []))
    found = results(held_out=Shapes(4, "x"))
    found.measure("start")
    found.measure("after_sft", SimpleNamespace(pair_accuracy=lambda rows: len(rows) / 8))
    found.write({"sft": 1.5})
    summary = json.loads((found.folder / "summary.json").read_text())
    plain = {"sampled": 0.25, "greedy": 0.5, "format": 1.0}
    assert summary == {"chance": 1 / 12, "start": plain, "after_sft": plain | {"pairs": 0.5}, "seconds": {"sft": 1.5}}
    out = capsys.readouterr().out
    assert "after sft" in out and "0.083" in out and "1.5 s" in out
    weights = dict(load_model(found.folder / "checkpoint").named_parameters())
    assert all(torch.equal(weights[name], value) for name, value in found.model.named_parameters())
    assert load_config(found.folder / "config.yaml") == found.config


def test_a_disk_that_the_checkpoint_fills_has_what_was_measured(results, monkeypatch):
    monkeypatch.setattr(file, "evaluate", lambda *_: Evaluation(0.25, 0.5, 1.0, []))
    found = results(held_out=Shapes(4, "x"))
    found.measure("start")
    for full in ("algorithm", "checkpoint"):
        with pytest.raises(OSError, match="No space left"), monkeypatch.context() as patch:
            fail = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
            patch.setattr(file, "save_model", fail)
            found.write({}, SimpleNamespace(save=fail) if full == "algorithm" else None)
        assert json.loads((found.folder / "summary.json").read_text())["start"]["greedy"] == 0.5
        (found.folder / "summary.json").unlink()


def test_without_held_out_rows_nothing_is_measured(results, monkeypatch):
    monkeypatch.setattr(file, "evaluate", None)  # calling it would fail
    found = results()
    found.measure("start")
    assert found.results == {}


def test_the_second_rank_writes_nothing(results, monkeypatch):
    monkeypatch.setattr(file, "save_model", lambda *_: None)  # which all ranks call
    found = results(World(1, 2, torch.device("cpu")))
    found.write({"sft": 1.5})
    assert not found.folder.exists()


def test_logits_that_are_not_finite_are_named_with_a_cure(results):
    found = results(held_out=Shapes(2, "x"))
    with torch.no_grad():
        found.model.lm_head.weight[0, 0] = NAN
    with pytest.raises(ValueError, match=r"^evaluation after_sft: .*not finite; try a lower learning rate$"):
        found.measure("after_sft")


def test_a_finished_run_is_not_overwritten_unasked(run, plain):
    """Neither by training again nor by evaluating a checkpoint into its own folder."""
    folder = run("--stages=sft", "--sft.max_steps=1")
    kept = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    own = ["--stages=[]", "--model.config=null", f"--model.path={folder / 'checkpoint'}"]
    ways = "--overwrite=true begins anew there, another --output_dir leaves it alone"
    for options in (["--stages=sft", "--seed=1"], own, [*own, "--resume=auto"]):
        with pytest.raises(ValueError, match=f"^output_dir: {folder} holds the results of a run; {ways}$"):
            run(*options)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == kept
    (folder / "summary.json").unlink()  # as if the run had been killed: it may begin again, but its metrics are kept
    with pytest.raises(ValueError, match="holds the results of a run"):
        run(*own)
    run("--stages=sft", "--sft.max_steps=1")


def test_a_folder_that_cannot_be_made_is_named_before_the_weights(run, plain, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^output_dir: .*/file'"):
        run("--stages=[]", name="file")


def test_overwrite_begins_anew_and_is_not_in_the_recipe_that_is_left(run, plain):
    folder = run("--stages=sft", "--sft.max_steps=2", "--state_steps=1")
    run("--stages=sft", "--sft.max_steps=1", "--overwrite=true")
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1
    assert not list((folder / "states").glob("0*"))
    config = load_config(folder / "config.yaml")
    assert (config.overwrite, config.resume) == (False, None)
