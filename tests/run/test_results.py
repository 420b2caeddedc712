"""Test the result files of a run: contents, the rank that writes them, and protection from overwriting."""

import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import yaml

from minivlmrl.__main__ import main
from minivlmrl.config.loading import load_config
from minivlmrl.data.rows import Row
from minivlmrl.model.build import random_model
from minivlmrl.monitor.report import collect_run
from minivlmrl.run import results as file
from minivlmrl.run.metrics import MetricsLog
from minivlmrl.run.trainer_state import TrainerState
from minivlmrl.tasks import shapes
from minivlmrl.trainers.registry import find_class
from tests.helpers.runs import LETTERS, metrics, summary
from tests.helpers.stages import ONE, SECOND_RANK
from tests.helpers.talk import user


@pytest.fixture
def results(home, tmp_path, monkeypatch):
    def results(*overrides, world=ONE, held_out=None):
        config = load_config(home / "recipe.yaml", [f"--output_dir={tmp_path / 'run'}", *overrides])
        if world.is_main:
            (tmp_path / "run").mkdir()
        log = MetricsLog(config, world, TrainerState(0, config.stages, seconds={"sft": 1.5}, num_log_lines={}))
        log.open_files()
        model, processor = random_model(home / "model.json", shapes.tokenizer(), 0)
        found = file.Results(config, model, processor, log, held_out, [])
        found.write_config()
        return found

    return results


def trained(stage, max_steps=3, saved=None, **expected):
    """Return a stand-in trainer at the end of its stage; `says` are its evaluation metrics."""
    options = SimpleNamespace(max_steps=max_steps)
    mine = find_class(stage).trains_policy
    return SimpleNamespace(stage=stage, trains_policy=mine, options=options, evaluate=lambda rows: expected, save=saved)


@pytest.mark.parametrize(("trainer", "expected"), [
    (None, "evaluation start: logits. Nothing has been trained yet, .* activations overflow; try --model.compute"),
    (trained("sft"), "evaluation start: logits. The training has probably diverged; try a lower learning rate"),
], ids=["before training", "after training"])  # fmt: skip
def test_logits_that_are_not_finite_have_another_cure_before_training(results, monkeypatch, trainer, expected):
    def fail(*_):
        raise FloatingPointError("logits")

    monkeypatch.setattr(file, "evaluate", fail)
    found = results("--model.dtype=float16", held_out=shapes.Shapes(4, "x"))
    with pytest.raises(ValueError, match=expected):
        found.measure("start", trainer)


def test_the_second_rank_writes_nothing(results, monkeypatch):
    monkeypatch.setattr(file, "save_model", lambda *_: None)
    found = results(world=SECOND_RANK)
    found.write()
    assert not found.folder.exists()


def test_a_finished_run_is_not_overwritten_by_default(run, quick):
    folder = run("--stages=sft", "--sft.max_steps=1")
    kept = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    own = ["--stages=[]", "--model.config=null", f"--model.path={folder / 'checkpoint'}"]
    ways = "use --resume=never to delete them and start again, or another --output_dir to keep them"
    for options in (["--stages=sft", "--seed=1"], own, [*own, "--resume=auto"]):
        with pytest.raises(ValueError, match=f"^output_dir: {folder} contains the results of an earlier run; {ways}$"):
            run(*options)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == kept
    # a killed run has no summary; it may start again, but its metrics are kept
    (folder / "summary.json").unlink()
    with pytest.raises(ValueError, match="contains the results of an earlier run"):
        run(*own)
    run("--stages=sft", "--sft.max_steps=1")
    run("--stages=sft", "--sft.max_steps=1", "--resume=never")
    assert load_config(folder / "config.yaml").resume is None


OWN = ["config.yaml", "metrics.jsonl", "images", "tensorboard", "checkpoint", "report.html", "states"]


@pytest.mark.parametrize("name", OWN)
def test_files_that_no_run_wrote_are_not_replaced(home, tmp_path, name):
    (tmp_path / name).mkdir()
    for resume in ("null", "never", "auto"):
        options = f"--output_dir={tmp_path}", f"--resume={resume}", "--report_to=[tensorboard]"
        config = load_config(home / "recipe.yaml", options)
        with pytest.raises(ValueError, match=f"contains {name}, which the run would replace, but no file .minivlmrl"):
            file.check_output_dir(config)
    file.mark_output_dir(config)  # as a run does before its trackers create folders
    file.check_output_dir(config)


@pytest.mark.parametrize("name", OWN)
def test_links_in_the_folder_of_a_run_are_refused(home, tmp_path, name):
    """A folder that somebody sent may have links to files outside."""
    run = tmp_path / "run"
    outside = tmp_path / "other"
    (outside / "states").mkdir(parents=True)
    (outside / "config.yaml").touch()
    config = load_config(home / "recipe.yaml", [f"--output_dir={run}", "--report_to=[tensorboard]", "--resume=never"])
    run.mkdir()
    file.mark_output_dir(config)
    (run / name).symlink_to(outside / "states")
    with pytest.raises(ValueError, match=f"/run/{name} is a link to {outside}/states, and a run replaces no files"):
        file.check_output_dir(config)


@pytest.mark.parametrize("name", ["checkpoint", "best/checkpoint"])
def test_models_that_the_run_reads_are_not_replaced(home, tmp_path, name):
    """A resumed run loads them again."""
    folder = tmp_path / "run" / name
    folder.mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    options = [f"--output_dir={tmp_path / 'run'}", "--model.config=null"]
    file.mark_output_dir(load_config(home / "recipe.yaml", options))
    for option in ("model.path", "reference.path"):
        config = load_config(home / "recipe.yaml", [*options, f"--{option}={tmp_path / 'link' / name}"])
        with pytest.raises(ValueError, match=f"the run would replace {tmp_path}/.*{name}, which it reads as {option}"):
            file.check_output_dir(config)


METRICS = "eval/accuracy_sampled", "eval/accuracy_greedy", "eval/format_sampled"
JUDGES = "--data.eval_rewards=[accuracy, format]"
evaluations = partial(metrics, name="evaluations.jsonl")


@pytest.mark.usefixtures("quick", "varied_rollouts")
def test_evaluations_during_training_do_not_change_the_run(run, capsys):
    with_them = run("--stages=[sft, grpo]", "--eval_steps=2", JUDGES, LETTERS, name="with")
    without = run("--stages=[sft, grpo]", LETTERS, JUDGES, name="without")
    lines, table = evaluations(with_them), summary(with_them)
    steps = [("sft", 0), ("sft", 2), ("sft", 3), ("grpo", 2), ("grpo", 3)]
    assert [(line["stage"], line["step"]) for line in lines] == steps
    for line, name in ((0, "start"), (2, "after_sft"), (4, "after_grpo")):
        assert {key: lines[line][key] for key in METRICS} == table[name]
    assert ["eval/loss" in line for line in lines] == [False, True, True, False, False]
    assert lines[2]["eval/loss"] < lines[1]["eval/loss"]
    assert evaluations(without) == [lines[0], lines[2], lines[4]]
    for name in ("metrics.jsonl", "completions.jsonl", "checkpoint/model.safetensors"):
        assert (with_them / name).read_bytes() == (without / name).read_bytes()
    out = capsys.readouterr().out
    assert "held-out, grpo 2: accuracy_sampled=0.000 accuracy_greedy=0.000 format_sampled=0.000 (" in out
    assert collect_run(with_them)["evaluations"][-1] == {"step": 6} | {name: lines[4][name] for name in METRICS}


@pytest.mark.parametrize(("kind", "values", "saved", "best", "options"), [
    ("eval/accuracy_sampled", [0.9, 0.1, 0.5, 0.5, 0.7], [1, 2, 4], 0.7, []),
    ("eval/accuracy_sampled", [0.1, 0.9, 0.5, 0.5, 0.3], [1, 2, 4], -0.3, ["--rewards={format: 1, accuracy: -1}"]),
    ("eval/loss", [9.0, 0.5, 0.4, 0.6, 0.1], [1, 2, 4], -0.1, []),
    ("eval/pair_accuracy", [None] * 5, [], None, []),
], ids=["a reward", "a penalty", "the loss", "no value"])  # fmt: skip
def test_the_model_with_the_best_evaluation_is_saved(results, monkeypatch, kind, values, saved, best, options):
    """The first evaluation is not saved, because it judges the initial model."""
    monkeypatch.setattr(file, "evaluate", lambda *_: {"eval/accuracy_sampled": values[len(done)] or 0})
    found = results(f"--best_metric={kind}", "--eval_steps=1", *options, held_out=shapes.Shapes(1, "x"))
    done, kept = [], []
    trainer = trained("sft", 4, saved=lambda folder, **_: kept.append((len(done), folder)))
    trainer.evaluate = lambda rows: {"eval/loss": values[len(done)]} if kind == "eval/loss" else {}
    found.measure("start")
    for step in range(1, 4):
        done.append(step)
        found.evaluate_if_due(trainer, step)
    done.append(4)
    found.measure("after_sft", trainer)
    assert kept == [(step, found.folder / "best") for step in saved]
    assert found.state.best == best


def test_adapters_are_saved_until_the_end(run, quick, user_data, varied_rollouts, rows, tmp_path, capsys, monkeypatch):
    options = [
        *user_data, "--stages=[sft]", "--sft.max_steps=3", "--adapter.r=2", "--adapter.target=[language, vision]",
        "--save_steps=2", "--data.eval_rows=2", f"--data.eval_file={rows}", "--best_metric=eval/loss",
    ]  # fmt: skip
    saved = []  # files after each save
    original = file.Results.save

    def save(self, trainer, folder):
        original(self, trainer, folder)
        saved.append(sorted(str(path.relative_to(folder)) for path in folder.rglob("checkpoint/**/*.*")))
        if len(saved) == 1:
            shutil.copytree(folder / "checkpoint", tmp_path / self.config.save)

    monkeypatch.setattr(file.Results, "save", save)
    folders = {}
    for kind in ("merged", "adapter"):
        saved.clear()
        folders[kind] = run(*options, f"--save={kind}", name=f"run_{kind}")
        assert ("checkpoint/model.safetensors" in saved[0]) == (kind == "merged")
    own_files = ["adapter/adapter_config.json", "adapter/adapter_model.safetensors", "adapter/minivlmrl.yaml"]
    cards = ["README.md", "adapter/README.md"]
    assert saved[0] == saved[-1] == [f"checkpoint/{name}" for name in sorted([*cards, *own_files, "minivlmrl.yaml"])]
    for name in ["model.safetensors", *own_files]:
        one, other = ((folder / "checkpoint" / name).read_bytes() for folder in folders.values())
        assert one == other, name
    assert not (folders["adapter"] / "best" / "checkpoint" / "model.safetensors").exists()
    answers = {}
    for kind in folders:
        out = tmp_path / f"{kind}.jsonl"
        for command in ("evaluate", "generate"):
            given = ["--model", str(tmp_path / kind), "--data", str(rows), "--out", str(out), "--rows=3"]
            assert main([command, *given]) == 0
        answers[kind] = out.read_bytes()
        prompt = ["--prompt=Name it.", "--image", str(rows.parent / "0.png"), "--sampling.max_new_tokens=4"]
        prompt.append("--sampling.temperature=0")
        capsys.readouterr()
        assert main(["chat", "--model", str(tmp_path / kind), *prompt]) == 0
        answers[kind] += capsys.readouterr().out.encode()
        assert main(["memory", "--model", str(tmp_path / kind)]) == 0
        answers[kind] += capsys.readouterr().out.partition(":")[2].encode()
    assert answers["merged"] == answers["adapter"]


def test_saved_weights_have_a_card_that_a_user_may_keep(run, quick, checkpoint, user_data, rows):
    """The card names base, recipe, data and results; without its mark, it is the user's, also after a resume."""
    options = [*user_data, "--adapter.r=2", "--stages=[sft]", f"--data.eval_file={rows}", "--data.eval_rows=2"]
    options.append("--state_steps=1")
    folder = run(*options, "--sft.max_steps=1") / "checkpoint"
    card = (folder / "README.md").read_text()
    results = summary(folder.parent)["after_sft"]
    _, head, text = card.split("---\n", 2)
    assert yaml.safe_load(head) == {"pipeline_tag": "image-text-to-text"} and "# license: fill it in" in head
    assert f"\n{checkpoint.name}, trained with" in text
    assert all(f"{metric} {value:.3f}" in text for metric, value in results.items())
    recipe = yaml.safe_load(text.split("```")[1].removeprefix("yaml"))
    assert recipe["data"]["eval_file"] == rows.name and recipe["adapter"] == {"r": 2} and "optimizer" not in recipe
    assert (folder / "adapter/README.md").read_text() == card
    (folder / "README.md").write_text("license: mit")
    run(*options, "--sft.max_steps=2", "--resume=auto")
    assert (folder / "README.md").read_text() == "license: mit"
    assert "max_steps: 2" in (folder / "adapter/README.md").read_text()


@pytest.mark.parametrize(("solutions", "options", "chance"), [
    (["left", "left", "right", None], (), 2 / 3), ([None], (), None),
    (["left"], ("--data.eval_rewards=[format, accuracy]",), None),
    (["Yes", "yes.", "no", 2, 2.0, "", " "], (), 2 / 5),
    # a question that occurs once gets the most frequent solution of all rows, which is "3"
    (["kind? a", "kind? a", "kind? b", "count? 3", "count? 3", "count? 2", "total? 9.5", "gauge? 3"], (), 5 / 8),
], ids=["the most frequent solution", "no solutions", "another reward", "spellings", "by question"])  # fmt: skip
def test_the_chance_of_rows_without_a_task(results, solutions, options, chance):
    """Chance answers each question with its most frequent solution; a text may begin with its question."""
    asked = [str(x).rpartition("? ")[0] for x in solutions]
    answers = [x.rpartition("? ")[2] if isinstance(x, str) else x for x in solutions]
    rows = [Row([user(q)], [], columns={"solution": x}) for q, x in zip(asked, answers, strict=True)]
    assert results("--data.task=null", *options, held_out=rows).chance() == chance


def test_a_finished_run_without_held_out_rows_is_continued(run):
    options = "--stages=sft", "--data.eval_rows=0", "--state_steps=1"
    run(*options, "--sft.max_steps=1")
    folder = run(*options, "--sft.max_steps=2", "--resume=auto")
    assert [line["step"] for line in metrics(folder)] == [0, 1]
