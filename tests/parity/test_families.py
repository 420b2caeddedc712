"""Compare every loss and option with TRL, cell by cell; tests/extras/parity compares them with recorded numbers."""

import pytest

from minivlmrl.extras import kto
from minivlmrl.losses import preference, sft
from minivlmrl.losses.grpo import AVERAGES
from tests.parity import policy_cells as policy
from tests.parity import preference_cells
from tests.parity.compare import Cell, difference, questions

CELLS = {  # section in families.yaml: function that creates a cell from an entry
    "policy": policy.grpo_cell, "together": policy.together_cell, "advantages": policy.advantages_cell,
    "rloo": policy.rloo_advantages_cell, "correction": policy.correction_cell, "overlong": policy.overlong_cell,
    "dpo": preference_cells.dpo_cell, "kto": preference_cells.kto_cell, "sft": preference_cells.sft_cell,
    "reward": preference_cells.reward_cell,
}  # fmt: skip
FAMILIES: dict[str, list[Cell]] = {}
for kind, cell in CELLS.items():
    for question in questions(kind):
        FAMILIES.setdefault(question.family, []).append(cell(question))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_cell_of_a_family_equals_trl(family, trl):
    assert [*filter(None, map(difference, FAMILIES[family]))] == []


def test_a_wrong_loss_is_reported(monkeypatch, trl):
    right = preference.dpo_loss
    monkeypatch.setattr(preference, "dpo_loss", lambda *a, **b: (1.001 * (found := right(*a, **b))[0], found[1]))
    found = [*map(difference, FAMILIES["dpo hinge"])]
    assert len(found) == 8 and all(text.startswith("loss_type=hinge, beta=") for text in found)


def test_every_loss_of_ours_has_a_family():
    names = {f"grpo loss_type={name}" for name in AVERAGES if name != "rloo"} | {"rloo loss"}
    names |= {f"dpo {name}" for name in preference.DPO_LOSSES}
    names |= {f"sft loss_type={name}" for name in sft.SFT_LOSS_TYPES}
    names |= {f"kto loss_type={name}" for name in kto.KTO_LOSS_TYPES} | {"reward loss"}
    assert names <= FAMILIES.keys(), names - FAMILIES.keys()
