"""Every loss and option of ours against TRL, cell by cell; and numbers recorded from TRL.

`python -m parity.record_losses` in tests/ writes the recorded numbers anew.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from parity.compare import ask, compare, judge, questions
from parity.families import families
from parity.record_losses import record

from minivlmrl.objectives import preference_losses as preference
from minivlmrl.objectives.policy_losses import AVERAGES

FAMILIES = families()
RECORDED = Path(__file__).parents[1] / "recorded" / "trl_1.16.0.json"


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


def test_a_cell_is_recorded_as_it_was(trl):
    again = json.loads(record({"dpo hinge": FAMILIES["dpo hinge"]}, trl.__version__))["cells"]
    assert len(again) == 1 and again.items() <= json.loads(RECORDED.read_text())["cells"].items()


def test_ours_equals_the_recorded_numbers_without_trl(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    record = json.loads(RECORDED.read_text(encoding="utf-8"))
    first = torch.randn(3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist()
    assert first == record["first normal numbers of seed 0"], "this torch draws other numbers: record anew"
    cells = {f"{family}: {c.name}": c for family, of in FAMILIES.items() for c in of}
    for name, numbers_of_trl in record["cells"].items():
        theirs = {key: torch.tensor(value, dtype=torch.float64) for key, value in numbers_of_trl.items()}
        outcome = compare(cells[name], theirs)
        assert outcome.agrees, f"{name}: {outcome}"


def test_each_family_is_recorded():
    names = json.loads(RECORDED.read_text(encoding="utf-8"))["cells"]
    assert {name.partition(": ")[0] for name in names} == FAMILIES.keys()
    assert 60 <= len(names) <= 120 and RECORDED.stat().st_size < 200_000


def test_every_loss_of_ours_has_a_family():
    names = {f"grpo loss_type={name}" for name in AVERAGES if name != "rloo"} | {"rloo loss"}
    names |= {f"dpo {name}" for name in preference.DPO_LOSSES}
    names |= {f"sft loss_type={name}" for name in preference.SFT_LOSS_TYPES}
    names |= {f"kto loss_type={name}" for name in preference.KTO_LOSS_TYPES} | {"reward loss"}
    assert names <= FAMILIES.keys(), names - FAMILIES.keys()


def test_options_are_tried_with_every_loss_that_takes_them():
    """TRL refuses some weights."""
    of = {name: set() for name in ("loss_type", "f_divergence_type", "ld_alpha")}
    for question in questions("dpo"):
        for name in of.keys() & question.options.keys():
            of[name].add(str(question.options["loss_type"]))
    kinds = {question.options.get("f_divergence_type", "reverse_kl") for question in questions("dpo")}
    assert kinds == set(preference.F_DIVERGENCES) and of["f_divergence_type"] == set(preference.F_LOSSES)
    assert set(preference.DPO_LOSSES) == of["ld_alpha"] <= of["loss_type"]
