"""Test the stage recipes/opd.py: on-policy distillation, in which a teacher grades each token."""

import re
import shlex

import pytest
from pytest import approx

from tests.helpers.links import ROOT
from tests.helpers.runs import metrics

OPD = [f"--stages=[{ROOT}/recipes/opd.py:OPD]", "--opd.max_steps=12", "--opd.prompts_per_step=4"]
OPD += ["--opd.num_generations=2", "--opd.micro_batch_size=2", "--opd.learning_rate=3e-3"]
SFT = ["--stages=[sft]", "--sft.max_steps=12", "--sft.prompts_per_step=8", "--sft.learning_rate=3e-3"]


def test_the_student_becomes_like_its_teacher(run, quick, user_data):
    """The mean of log(student / teacher) is the KL, and with ratio 1 it is also the loss."""
    teacher = run(*user_data, *SFT, "--data.eval_rows=0", name="teacher") / "checkpoint"
    first, *_, last = metrics(run(*user_data, *OPD, "--data.eval_rows=0", f"--reference.path={teacher}"))
    assert first["teacher_kl"] > 0.3 and last["teacher_kl"] < 0.7 * first["teacher_kl"]
    assert first["loss"] == approx(first["teacher_kl"], rel=1e-4)


def test_the_command_of_the_recipe_trains_an_adapter(run, quick, user_data, checkpoint, rows, monkeypatch):
    monkeypatch.chdir(ROOT)
    teacher = run(*user_data, *SFT, "--data.eval_rows=0", name="teacher") / "checkpoint"
    text = (ROOT / "recipes" / "opd.py").read_text().partition("\n\n")[2].partition("\n\n")[0]
    text = text.replace("\\\n", " ").replace("STUDENT", str(checkpoint)).replace("TEACHER", str(teacher))
    [_, _, recipe, *words] = shlex.split(re.sub(r"\w+\.jsonl", str(rows), text))
    small = ["--opd.max_steps=8", "--opd.prompts_per_step=2", "--opd.num_generations=2", "--sampling.max_new_tokens=6"]
    folder = run(*words, *small, "--data.eval_rows=1", "--opd.learning_rate=3e-3", recipe=recipe)
    lines = [line for line in metrics(folder) if "teacher_kl" in line]
    assert len(lines) == 8 and lines[0]["teacher_kl"] > 0.3 and (folder / "checkpoint" / "adapter").is_dir()


def test_without_a_teacher_the_stage_is_refused(run, user_data):
    with pytest.raises(ValueError, match=r"the stage opd needs a teacher; set reference\.path to its folder"):
        run(*user_data, *OPD)
