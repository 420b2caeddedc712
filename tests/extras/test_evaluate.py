"""Test the commands `evaluate` and `generate`."""

import json
import shutil
from pathlib import Path

import pytest
from pytest import approx

from minivlmrl.extras.answers import evaluate as command
from minivlmrl.rewards.text import accuracy, find_answer
from minivlmrl.run.lock import open_locked

SMALL = ("--sampling.max_new_tokens=5", "--num_threads=1")


@pytest.fixture
def evaluate(checkpoint, rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # a config.yaml in the parent folder would be used as the recipe
    bare = shutil.copytree(checkpoint, tmp_path / "bare")

    def evaluate(*arguments, tool=command.main, model=bare, data=rows):
        tool(["--model", str(model), "--data", str(data), "--out", "out.jsonl", *SMALL, *arguments])
        lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        return lines, json.loads((tmp_path / "out.summary.json").read_text())

    return evaluate


def test_scoring_the_written_answers_again_gives_the_same_mean(evaluate, capsys):
    lines, summary = evaluate("--num_generations=2", "--data.answer_format=whole")
    assert [line["row"] for line in lines] == list(range(8)) and summary["rows"] == 8
    texts = [one["text"] for line in lines for one in line["answers"]]
    solutions = [line["solution"] for line in lines for _ in "12"]
    again = accuracy(answer_texts=[find_answer(text, "whole") for text in texts], solution=solutions)
    assert summary["accuracy"] == approx(sum(again) / 16)
    assert summary["cut"] == sum(not one["stopped"] for line in lines for one in line["answers"]) / 16
    assert "format" in summary
    assert f"accuracy                    {summary['accuracy']:.3f}" in capsys.readouterr().out


def test_an_interrupted_evaluation_leaves_no_summary_of_other_answers(evaluate, tmp_path, monkeypatch):
    evaluate()
    evaluated = [(tmp_path / name).read_bytes() for name in ("out.jsonl", "out.summary.json")]

    def first_row_only(*arguments):
        yield next(parts(*arguments))
        raise KeyboardInterrupt

    parts = command.generate_for_rows
    monkeypatch.setattr(command, "generate_for_rows", first_row_only)
    with pytest.raises(KeyboardInterrupt):
        evaluate()
    assert evaluated == [(tmp_path / name).read_bytes() for name in ("out.jsonl", "out.summary.json")]
    assert evaluated[0].startswith((tmp_path / "out.jsonl.partial").read_bytes())


@pytest.mark.parametrize(("words", "sentence"), [
    (["--temperature=-1"], r"sampling\.temperature is -1\.0, but it must be in \[0, inf\)"),
    (["--temperature=nan"], r"sampling\.temperature is None, but"),
    (["--data=out.jsonl"], r"--data is out\.jsonl, where the answers would be written"),
    (["--rows=0"], "--rows is 0, but both must be at least 1"),
    (["--sampling.temperature", "0.5"], "--sampling.temperature has no effect; use --model, --data, --rows or"),
    (["--data.eval_rows=3"], "--data.eval_rows=3 has no effect; use --model, --data, --rows or"),
])  # fmt: skip
def test_arguments_that_are_refused(evaluate, words, sentence):
    with pytest.raises(ValueError, match=sentence):
        evaluate(*words)


def test_truncated_probabilities_of_a_recipe_are_not_used_unless_they_are_typed(evaluate, tmp_path):
    """An evaluation in a run does not use them either, so that accuracies can be compared."""
    (tmp_path / "plain.yaml").write_text("data: {answer_format: whole}")
    (tmp_path / "cut.yaml").write_text("sampling: {top_k: 1, repetition_penalty: 9.0}\ndata: {answer_format: whole}")
    for several in ("--num_generations=1", "--num_generations=2"):
        plain = evaluate(several, "--recipe=plain.yaml")
        assert plain == evaluate(several, "--recipe=cut.yaml")
        assert plain != evaluate(several, "--recipe=plain.yaml", "--sampling.repetition_penalty=9.0")
    evaluate("--rows=1", "--out=new/folder/out.jsonl")
    assert (tmp_path / "new/folder/out.summary.json").is_file()
    for name in ("run.1", "run.2"):
        evaluate("--rows=1", f"--out={name}")
        assert (tmp_path / f"{name}.summary.json").is_file()


@pytest.mark.parametrize("base", [None, "", "/gone/base"])
def test_an_adapter_without_its_base_model_names_its_file(evaluate, tmp_path, base):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    with pytest.raises(ValueError, match=rf"adapter_config\.json does not name an existing base model .*{base!r}\)"):
        evaluate(model=tmp_path)


def test_the_recipe_of_a_run_in_a_parent_folder_is_not_used(evaluate, user_data, run, quick, tmp_path, capsys):
    trained = run("--stages=[]", *user_data, "--data.prompt_template=Look. {problem}")
    evaluate("--rows=1", model=trained / "checkpoint")
    assert f"recipe: {trained / 'config.yaml'}" in capsys.readouterr().out  # which has the rewards
    evaluate("--rows=1", model=shutil.copytree(trained / "checkpoint", trained / "best" / "checkpoint"))
    assert f"recipe: {trained / 'config.yaml'}" in capsys.readouterr().out
    other = tmp_path / "other"
    alone = shutil.copytree(trained / "checkpoint", other / "alone")
    config = (trained / "config.yaml").read_text()
    (other / "config.yaml").write_text(config.replace("Look. {problem}", "Say. {problem}"))
    (other / "metrics.jsonl").touch()
    evaluate("--rows=1", model=alone)
    assert f"recipe: {alone / 'minivlmrl.yaml'}" in capsys.readouterr().out
    (other / "metrics.jsonl").unlink()
    (alone / "minivlmrl.yaml").unlink()
    evaluate("--rows=1", model=alone)  # without metrics.jsonl, config.yaml is not the recipe of a run
    assert "own_data.yaml" in capsys.readouterr().out


def test_a_copied_checkpoint_keeps_the_options_of_its_run(evaluate, user_data, run, quick, tmp_path, capsys):
    message = ("--data.prompt_template=Look. {problem}", "--data.system_prompt=Be brief.", "--data.answer_format=whole")
    trained = run("--stages=[]", *user_data, *message, "--data.max_pixels=3136", "--sampling.stop_strings=[x]")
    lines = evaluate("--rows=2", model=trained / "checkpoint")[0]
    alone = shutil.copytree(trained / "checkpoint", tmp_path / "elsewhere" / "alone")
    capsys.readouterr()
    assert evaluate("--rows=2", model=alone)[0] == lines
    assert f"recipe: {alone / 'minivlmrl.yaml'}" in capsys.readouterr().out
    (tmp_path / "other.yaml").write_text("data: {prompt_template: 'Look. {problem}'}")
    evaluate("--rows=2", "--recipe=other.yaml", model=alone)
    assert "trained, sets other values for data.system_prompt, data.answer_format\n" in capsys.readouterr().err
    (alone / "minivlmrl.yaml").unlink()
    assert evaluate("--rows=2", "--sampling.stop_strings=[x]", model=alone)[0] != lines


def test_rewards_of_a_recipe_judge_unless_others_are_named(evaluate, rows, tmp_path):
    (tmp_path / "recipe.yaml").write_text("rewards: {iou: 1, box_format: 1, reward_model: 1}\n")
    requested = ["--rows=1", f"--recipe={tmp_path / 'recipe.yaml'}", "--data.prompt_template={problem}"]
    for option, names in ((None, ["iou", "box_format"]), ("--rewards={format: 1}", ["format"])):
        summary = evaluate(*requested, *filter(None, [option]), data=rows.parent / "boxes.jsonl")[1]
        assert [*summary] == ["rows", "cut", *names]


def test_generate_writes_answers_without_rewards(evaluate):
    lines, summary = evaluate(tool=command.generate_main)
    assert summary.keys() == {"rows", "cut"} and lines[0]["answers"][0]["rewards"] == {}
    assert evaluate("--rows=3", tool=command.generate_main)[0] == lines[:3]


def test_a_recipe_that_was_found_automatically_cannot_run_code(evaluate, checkpoint, tmp_path):
    """A checkpoint folder may come from somebody else, so its recipe is not trusted."""
    model = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    evil = tmp_path / "evil.py"
    trace = tmp_path / "executed"
    (tmp_path / "metrics.jsonl").touch()
    (model / "minivlmrl.yaml").unlink()  # otherwise config.yaml is the recipe of another run
    evil.write_text(f"open({str(trace)!r}, 'w')\ndef f(completions, **columns):\n    return [1.0] * len(completions)\n")
    for name in (f"{evil}:f", "recipes/fluent.py:fluent(path='model')"):
        recipe = tmp_path / "config.yaml"
        recipe.write_text(json.dumps({"data": {"eval_rewards": [name, "format"]}}))
        with pytest.raises(
            PermissionError, match=r"was found automatically and would run .*; read the code, then pass"
        ):
            evaluate("--rows=1", model=model)
        evaluate("--rows=1", model=model, tool=command.generate_main)  # the command generate calls no reward
        assert not trace.exists()
    recipe.write_text(json.dumps({"stages": [f"{evil}:f"], "data": {"eval_rewards": ["format"]}, "own": {}}))
    evaluate("--rows=1", model=model)  # evaluation loads no stage
    assert not trace.exists()
    requested = f"--data.eval_rewards=[{evil}:f, format]"
    assert evaluate("--rows=1", requested, model=model)[1][f"{evil}:f"] == 1.0 and trace.exists()
    recipe.write_text(json.dumps({"data": {"eval_rewards": [f"{evil}:f", "format"]}}))
    assert evaluate("--rows=1", f"--recipe={recipe}", model=model)[1][f"{evil}:f"] == 1.0


def test_pass_at_k_and_the_means_of_a_column():
    """Of 4 answers, 1 and 2 are right: of the 6 pairs, 3 and 5 have a right one."""
    lines = []
    for kind, rewards in (("shape", [1.0, 0.0, 0.0, 0.0]), ("color", [1.0, 0.0, 1.0, 0.0]), ("color", [None] * 4)):
        lines.append({"kind": kind, "answers": [{"stopped": True, "rewards": {"accuracy": x}} for x in rewards]})
    expected = {"cut": 0, "accuracy": 3 / 8, "accuracy pass@2": (3 / 6 + 5 / 6) / 2, "accuracy pass@4": 1}
    assert command.summarize(lines, ["accuracy"]) == approx(expected)
    by_kind = command.by_value(lines, ["accuracy"], "kind")
    assert by_kind["kind=color rows"] == 2 and by_kind["kind=color accuracy"] == 0.5
    assert by_kind["kind=shape accuracy pass@2"] == approx(3 / 6)
    lines[0]["answers"][0]["rewards"]["accuracy"] = 0.5
    assert command.summarize(lines, ["accuracy"]).keys() == {"cut", "accuracy"}, "not a share of right answers"


def test_answers_are_written_next_to_the_model(checkpoint, rows, tmp_path, monkeypatch):
    """Answers in the working folder would be overwritten by the answers of the next model."""
    monkeypatch.chdir(tmp_path)
    model = shutil.copytree(checkpoint, tmp_path / "run" / "checkpoint")
    given = ["--model", str(model), "--data", str(rows), "--rows=1", *SMALL]
    with pytest.raises(ValueError, match=r"--by is kind, but the rows have no such column; .*solution"):
        command.generate_main([*given, "--by=kind"])
    command.main([*given, "--by=solution"])
    assert any(
        "solution=" in name for name in json.loads((tmp_path / "run" / "evaluate_rows.summary.json").read_text())
    )
    diary = tmp_path / "diary.txt"
    diary.write_text("mine")
    out = tmp_path / "run" / "generate_rows.jsonl"
    for link in (out, out.with_suffix(".summary.json"), Path(f"{out}.partial")):  # in a folder that somebody sent
        link.symlink_to(diary)
    command.generate_main(given)
    assert diary.read_text() == "mine" and len(out.read_text().splitlines()) == 1 and not out.is_symlink()
    with (
        open_locked(Path(f"{out}.partial"), ""),
        pytest.raises(ValueError, match=f"another process is writing {out}; "),
    ):
        command.generate_main(given)
