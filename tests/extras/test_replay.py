"""Test that the replay of a step gives the completions and metrics of the run, bit for bit."""

import re
import sys

import pytest

from minivlmrl.__main__ import main
from minivlmrl.config.import_utils import run_file
from minivlmrl.extras.replay import compare
from tests.helpers.runs import read_lines, write_lines

LOUD = ["--rewards={letters: 1.0}", "--log_completions=1", "--data.eval_rows=1", "--num_threads=1"]
LOUD += ["--data.task=shapes(pairs=8)"]


@pytest.fixture
def replayed(capsys):
    def replayed(folder, stage, step, *more):
        capsys.readouterr()
        code = main(["replay", str(folder), *([f"--stage={stage}"] if stage else []), f"--step={step}", *more])
        out = capsys.readouterr()
        return code, (out.err if code == 2 else out.out).splitlines()

    return replayed


SAME = ["completions.jsonl equals the replayed step", "metrics.jsonl equals the replayed step"]


def table(lines):
    """Return the printed table of a group as a list of {column: text}, one for each completion."""
    [start] = [number for number, line in enumerate(lines) if line.startswith("completion ")]
    names = [name.strip() for name in re.split(r"  +", lines[start].replace("completion", "completion "))]
    return [dict(zip(names, line.split(), strict=True)) for line in lines[start + 1 :] if line[:1].isdigit()]


def test_replay_from_a_checkpoint_and_from_the_start(run, plain, lively, replayed, home, monkeypatch):
    monkeypatch.setattr("minivlmrl.run.states.NUM_KEPT_STATES", 9)
    folder = run("--stages=[sft,dpo,grpo]", "--state_steps=2", *LOUD)
    for stage, step, state in (("sft", 1, None), ("dpo", 2, "000004"), ("grpo", 2, "000008")):
        code, lines = replayed(folder, stage, step, "--prompt=3")
        began = folder / "states" / state if state else "the start of the run"
        assert code == 0 and f"{stage} step {step}, replayed from {began}" in lines
        assert lines[-2:] == SAME if stage == "grpo" else lines[-1] == SAME[1]
        names = {"sft": ["completion"], "dpo": ["chosen", "rejected"]}
        assert [line.get("answer") for line in table(lines)] == names.get(stage, [None] * 3)
    monkeypatch.setattr("minivlmrl.run.results.evaluate", lambda *_: pytest.fail("a replay evaluates nothing"))
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    code, again = replayed(folder, "grpo", 2, "--prompt=0")
    assert code == 0 and again != lines, "another prompt"
    assert replayed(folder, None, 2, "--prompt=0") == (0, again), "the last stage by default"
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before, "it writes nothing"
    code, lines = replayed(home / "recipe.yaml", "grpo", 0, "--stages=[grpo]", *LOUD, f"--output_dir={folder}")
    assert (code, lines[0]) == (0, "grpo step 0, replayed from the start of the run"), "a recipe has no checkpoint"


def test_incomplete_logs_and_missing_checkpoints_are_reported(run, plain, lively, replayed):
    """A run that was killed, or that still runs, has incomplete logs."""
    folder = run("--stages=[grpo]", "--grpo.max_steps=3", "--state_steps=1", *LOUD)
    metrics_file = folder / "metrics.jsonl"
    (folder / "completions.jsonl").write_text("")
    first, second, third = metrics_file.read_bytes().splitlines(keepends=True)
    metrics_file.write_bytes(first)
    code, lines = replayed(folder, "grpo", 2)
    assert lines[0] == f"grpo step 2, replayed from {folder / 'states' / '000002'}"
    missing = f"The logs of the run do not contain this step: {metrics_file} ends with grpo step"
    assert (code, lines[-1]) == (0, f"{missing} 0.")
    metrics_file.write_bytes(first + second + third[:-9])
    (folder / "states" / "000002" / "complete.json").unlink()
    code, lines = replayed(folder, "grpo", 2)
    assert lines[0] == "grpo step 2, replayed from the start of the run"
    cut = ", followed by a line that is incomplete, because the run is writing it or was killed."
    assert (code, lines[-1]) == (0, f"{missing} 1{cut}")


def test_logged_values_are_printed_and_compared(run, plain, lively, replayed):
    options = "--rewards={letters: 1.0, accuracy: 0.0}", *LOUD[1:]
    folder = run("--stages=[grpo]", "--grpo.max_steps=1", *options)
    path = folder / "completions.jsonl"
    lines = read_lines(path)
    _, message = replayed(folder, "grpo", 0, "--prompt=2")
    assert any(f"row {lines[2]['row']} " in line and repr(lines[2]["solution"]) in line for line in message)
    for shown, logged in zip(table(message), lines[2]["completions"], strict=True):
        position = message.index(f"    {logged['text']!r}")
        reason = f"    accuracy: {logged['why']['accuracy']}"
        assert message[position + 1 : position + 3] == [f"    answer: {logged['answer']!r}", reason]
        assert float(shown["letters"]) == pytest.approx(logged["rewards"]["letters"], rel=1e-3)
        assert float(shown["advantage"]) == pytest.approx(logged["advantage"], rel=1e-3, abs=1e-6)
        assert float(shown["sampled"]) == pytest.approx(sum(logp for _, logp in logged["tokens"]), rel=1e-3)
        assert float(shown["differ by"]) < 1e-4 and shown["trained"] == shown["sampled"]
    lines[0]["completions"][1]["tokens"][0][1] += 0.001
    write_lines(path, lines)
    code, message = replayed(folder, "grpo", 0)
    assert message[-2].startswith("completions.jsonl differs from the replayed step. Possible reasons are a different")
    assert (code, message[-1]) == (1, SAME[1])
    path.unlink()
    (folder / "metrics.jsonl").write_text("")
    _, message = replayed(folder, "grpo", 0)
    assert message[-1] == f"The logs of the run do not contain this step: {folder} contains no metrics."
    for arguments, words in (
        (("sft", 0), "--stage sft: the run has no stage with this name. Choose one of its stages: grpo"),
        (("grpo", 1), "--step 1: the stage grpo has only the steps 0 to 0"),
        (("grpo", 0, "--prompt=4"), "--prompt 4: the step has only the prompts 0 to 3"),
        (("grpo", 0, "--seed=1"), "a run is replayed with its own options, so --seed=1 is not allowed"),
    ):
        code, lines = replayed(folder, *arguments)
        assert code == 2 and words in "\n".join(lines)


def test_code_named_by_a_run_needs_permission(run, plain, replayed, tmp_path):
    reward = tmp_path / "mine.py"
    reward.write_text("def f(completions, **columns):\n    return [float(len(text)) for text in completions]\n")
    options = ["--stages=[grpo]", "--grpo.max_steps=1", *LOUD[1:], f"--rewards={{'{reward}:f': 1.0}}"]
    folder = run(*options)
    trace = tmp_path / "executed"
    del sys.modules[run_file(str(reward)).__name__]
    reward.write_text(f"open({str(trace)!r}, 'w')\n{reward.read_text()}")
    code, lines = replayed(folder, "grpo", 0)
    expected = f"would run the code {reward}:f; read the code, then pass --recipe={folder / 'config.yaml'}"
    assert code == 2 and expected in lines[-1] and not trace.exists()
    code, lines = replayed(folder, "grpo", 0, f"--recipe={folder / 'config.yaml'}")
    assert code == 0 and lines[-2:] == SAME and trace.exists()


def test_rows_that_repeat_within_a_step_are_compared_one_by_one(tmp_path):
    """If a step has more prompts than the dataset has rows, a row occurs twice with different completions."""
    lines = [{"stage": "grpo", "step": 0, "row": 3, "completions": [text]} for text in ("red", "blue")]
    write_lines(tmp_path / "completions.jsonl", lines)
    write_lines(tmp_path / "metrics.jsonl", [])
    assert compare(tmp_path, "grpo", 0, lines, {}) == {"completions.jsonl": True}
    assert compare(tmp_path, "grpo", 0, lines[:1], {}) == {"completions.jsonl": False}
