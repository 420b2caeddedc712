"""Replay: a step trained again draws the completions and gives the metrics that the run's files have, bit for bit."""

import json
import re

import pytest
from safetensors.torch import load_file

from minivlmrl import grpo
from minivlmrl.__main__ import main
from minivlmrl.reward_functions.names import REWARDS

LOUD = ["--rewards={letters: 1.0}", "--log_completions=1", "--data.eval_rows=1", "--num_threads=1", "--data.pairs=8"]
MORE = ["--grpo.num_iterations=2", "--grpo.steps_per_generation=2", "--grpo.max_steps=7", "--ppo.num_ppo_epochs=2"]


@pytest.fixture
def replayed(capsys):
    """replayed(folder, stage or None, step) -> exit status and lines."""

    def replayed(folder, stage, step, *more):
        capsys.readouterr()
        code = main(["replay", str(folder), *([f"--stage={stage}"] if stage else []), f"--step={step}", *more])
        out = capsys.readouterr()
        return code, (out.err if code == 2 else out.out).splitlines()

    return replayed


SAME = ["completions.jsonl says the same", "metrics.jsonl says the same"]


def table(lines):
    """Each completion of the printed group: name of the column -> what is there."""
    [start] = [number for number, line in enumerate(lines) if line.startswith("completion ")]
    names = [name.strip() for name in re.split(r"  +", lines[start].replace("completion", "completion "))]
    return [dict(zip(names, line.split(), strict=True)) for line in lines[start + 1 :: 2] if line[:1].isdigit()]


def test_every_stage_from_a_state_and_from_the_beginning(run, plain, lively, replayed):
    folder = run("--stages=[sft,dpo,grpo]", "--state_steps=2", "--keep_states=9", *LOUD)
    for stage, step, state in (("sft", 1, None), ("dpo", 2, "000004"), ("grpo", 2, "000008")):
        code, lines = replayed(folder, stage, step, "--prompt=3")
        began = folder / "states" / state if state else "the beginning"
        assert code == 0 and f"{stage} step {step}, trained again from {began}" in lines
        assert lines[-2:] == SAME if stage == "grpo" else lines[-1] == SAME[1]
        names = {"sft": ["completion"], "dpo": ["chosen", "rejected"]}
        assert [line.get("answer") for line in table(lines)] == names.get(stage, [None] * 3)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    code, again = replayed(folder, "grpo", 2, "--prompt=0")
    assert code == 0 and again != lines, "another prompt"
    assert replayed(folder, None, 2, "--prompt=0") == (0, again), "the last stage by default"
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before, "it writes nothing"


def test_several_passes_over_a_rollout(run, plain, lively, replayed):
    """Two passes over a rollout of two steps: step 5 is in the middle of the rollout that begins with step 4."""
    folder = run("--stages=[grpo,ppo]", "--state_steps=1", "--keep_states=9", *LOUD, *MORE)
    code, lines = replayed(folder, "grpo", 5)
    assert code == 0 and f"grpo step 5, trained again from {folder / 'states' / '000004'}" in lines
    assert all(float(line["differ by"]) > 1e-4 for line in table(lines)), "since they were drawn the policy has moved"
    assert lines[-2:] == SAME
    code, lines = replayed(folder, "ppo", 1)
    assert code == 0 and lines[-2:] == SAME


def test_what_a_run_logged_is_compared(run, plain, lively, replayed):
    folder = run("--stages=[grpo]", "--grpo.max_steps=1", *LOUD)
    path = folder / "completions.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["completions"][1]["tokens"][0][1] += 0.001
    path.write_text("\n".join(map(json.dumps, lines)))
    code, said = replayed(folder, "grpo", 0)
    assert (
        code == 1 and said[-2].startswith("completions.jsonl says something else: another CPU") and said[-1] == SAME[1]
    )
    path.unlink()
    (folder / "metrics.jsonl").write_text("")
    assert replayed(folder, "grpo", 0)[1][-1] == "nothing to compare with: no file of a run has this step"


def test_a_group_is_printed_with_what_the_run_logged(run, plain, lively, replayed):
    folder = run("--stages=[grpo]", "--grpo.max_steps=1", *LOUD)
    _, lines = replayed(folder, "grpo", 0, "--prompt=2")
    logged = json.loads((folder / "completions.jsonl").read_text().splitlines()[2])
    assert any(f"row {logged['row']} " in line and repr(logged["solution"]) in line for line in lines)
    for shown, said in zip(table(lines), logged["completions"], strict=True):
        assert f"    {said['text']!r}" in lines
        assert float(shown["letters"]) == pytest.approx(said["rewards"]["letters"], rel=1e-3)
        assert float(shown["advantage"]) == pytest.approx(said["advantage"], rel=1e-3, abs=1e-6)
        assert float(shown["sampled"]) == pytest.approx(sum(logp for _, logp in said["tokens"]), rel=1e-3)
        assert float(shown["differ by"]) < 1e-4 and shown["trained"] == shown["sampled"]


STAGES = ("advantages", "rows", "mask", "logps", "logps of sampler", "loss", "gradients", "clip", "update")


@pytest.mark.parametrize(
    "options, step, stages",
    [
        (("--grpo.loss_type=grpo", "--rewards={many: 1.0}"), 1, STAGES),
        (("--grpo.beta=0.1",), 1, STAGES),
        (MORE[:3], 3, ("mask", "logps", "loss", "gradients", "clip", "update")),
        (("--adapter.r=2",), 0, ("advantages", "rows", "mask", "loss", "clip", "update")),
    ],
    ids=str,
)
def test_a_step_that_is_written_down_agrees_with_the_audit(
    run, plain, lively, replayed, capsys, tmp_path, monkeypatch, options, step, stages
):
    """With two micro-batches or more; rows that teach nothing are not in the step, but in its counts."""
    monkeypatch.setitem(REWARDS, "many", lambda completions, **_: [float(len(text) > 9) for text in completions])
    options = ("--stages=[grpo]", "--grpo.micro_batch_size=1", "--grpo.max_steps=4", *LOUD, *options)
    folder, out = run(*options, "--log_completions=9"), tmp_path / "step"
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    code, lines = replayed(folder, "grpo", step, f"--out={out}")
    assert code == 0 and lines[-1] == SAME[1]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    rows = len(load_file(out / "step.safetensors")["input_ids"])
    assert "many" not in str(options) or 4 < rows < 12
    assert main(["audit", str(out)]) == 0
    said = capsys.readouterr().out
    assert [name for name in STAGES if re.search(rf"^{name} +agrees", said, re.M)] == list(stages), said


def test_a_wrong_step_is_found(run, plain, lively, replayed, capsys, tmp_path, monkeypatch):
    """A loss that is half of what it should be."""
    folder = run("--stages=[grpo]", "--grpo.max_steps=1", *LOUD)
    loss = grpo.grpo_loss
    monkeypatch.setattr(grpo, "grpo_loss", lambda *a, **o: (loss(*a, **o)[0] / 2, loss(*a, **o)[1]))
    assert replayed(folder, "grpo", 0, f"--out={tmp_path}")[0] == 1
    assert main(["audit", str(tmp_path)]) == 1
    assert "explained by: factor 0.5" in capsys.readouterr().out


def test_mistakes_are_named(run, home, plain, lively, replayed):
    folder = run("--stages=[grpo]", "--grpo.max_steps=1", "--state_steps=1", *LOUD)
    for arguments, words in (
        (("sft", 0), "--stage sft: the run has grpo"),
        (("grpo", 1), "--step 1: grpo has the steps 0 to 0"),
        (("grpo", 0, "--prompt=4"), "--prompt 4: the step has the prompts 0 to 3"),
        (("grpo", 0, "--seed=1"), "a run is replayed as it was; only a recipe takes --seed=1"),
    ):
        code, lines = replayed(folder, *arguments)
        assert code == 2 and words in "\n".join(lines)
    code, lines = replayed(home / "recipe.yaml", "grpo", 0, "--stages=[grpo]", "--grpo.loss_type=cispo", "--out=x")
    assert code == 2 and "--out: grpo of this run is not the book's GRPO on whole weights" in "\n".join(lines)
