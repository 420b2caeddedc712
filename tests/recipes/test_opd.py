"""Test the stage recipes/opd.py: on-policy distillation, in which a teacher grades each token."""

import pytest
from pytest import approx

from tests.helpers.links import ROOT
from tests.helpers.runs import metrics

OPD = [f"--stages=[{ROOT}/recipes/opd.py:OPD]", "--opd.max_steps=12", "--opd.prompts_per_step=4"]
OPD += ["--opd.num_generations=2", "--opd.micro_batch_size=2", "--opd.learning_rate=3e-3"]
SFT = ["--stages=[sft]", "--sft.max_steps=12", "--sft.prompts_per_step=8", "--sft.learning_rate=3e-3"]


@pytest.mark.parametrize("adapter", [[], ["--adapter.r=8"]], ids=["all weights", "LoRA"])
def test_the_student_becomes_like_its_teacher(run, plain, own, adapter):
    """The mean of log(student / teacher) is the KL, and with ratio 1 it is also the loss."""
    short = ["--data.eval_rows=0"]
    teacher = run(*own, *SFT, *short, name="teacher") / "checkpoint"
    first, *_, last = metrics(run(*own, *OPD, *short, *adapter, f"--reference.path={teacher}"))
    assert first["teacher_kl"] > 0.3 and last["teacher_kl"] < 0.7 * first["teacher_kl"]
    assert first["loss"] == approx(first["teacher_kl"], rel=1e-4)


def test_without_a_teacher_the_stage_is_refused(run, own):
    with pytest.raises(ValueError, match=r"the stage opd needs a teacher; set reference\.path to its folder"):
        run(*own, *OPD)
