"""Compare every loss and option with TRL, cell by cell; tests/extras/parity compares them with recorded numbers."""

from dataclasses import asdict

import pytest

from minivlmrl.extras import kto
from minivlmrl.losses import preference, sft
from minivlmrl.losses.grpo import AVERAGES
from tests.parity.compare import ask, judge
from tests.parity.families import families

FAMILIES = families()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_cell_of_a_family_equals_trl(family, record_property, trl):
    row = judge(family, [ask(cell) for cell in FAMILIES[family]])
    record_property("row of parity", asdict(row))
    assert row.agrees, f"{row.verdict}: {row.example}"


def test_a_wrong_loss_is_reported(monkeypatch, trl):
    right = preference.dpo_loss

    def wrong(*args, **options):
        loss, diagnostics = right(*args, **options)
        return loss * 1.001, diagnostics

    monkeypatch.setattr(preference, "dpo_loss", wrong)
    row = judge("dpo hinge", [ask(cell) for cell in FAMILIES["dpo hinge"]])
    assert row.verdict == "differs by 1.0e-03 in 8 of 8 cells"


def test_every_loss_of_ours_has_a_family():
    names = {f"grpo loss_type={name}" for name in AVERAGES if name != "rloo"} | {"rloo loss"}
    names |= {f"dpo {name}" for name in preference.DPO_LOSSES}
    names |= {f"sft loss_type={name}" for name in sft.SFT_LOSS_TYPES}
    names |= {f"kto loss_type={name}" for name in kto.KTO_LOSS_TYPES} | {"reward loss"}
    assert names <= FAMILIES.keys(), names - FAMILIES.keys()
