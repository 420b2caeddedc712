"""The table of cells: every loss of ours is in it, and no cell twice."""

from minivlmrl.algorithms import preference_losses as preference
from minivlmrl.algorithms import sft_loss as sft
from minivlmrl.algorithms.policy_losses import AVERAGES
from minivlmrl.audit.cells import families

FAMILIES = families()


def test_there_are_enough_cells():
    kinds = ("grpo ", "dpo ", "advantages", "sft ", "kto ", "reward ", "rloo ", "importance_sampling_ratio")
    count = {kind: sum(len(cells) for name, cells in FAMILIES.items() if kind in name) for kind in kinds}
    assert count["grpo "] >= 600 and count["dpo "] >= 230 and count["advantages"] >= 32, count
    assert all(count.values()), count


def test_cells_have_names_of_their_own():
    for family, cells in FAMILIES.items():
        assert len({cell.name for cell in cells}) == len(cells), family


def test_every_loss_of_ours_has_a_family():
    names = {f"grpo loss_type={name}" for name in AVERAGES if name != "rloo"} | {"rloo loss"}
    names |= {f"dpo {name}" for name in preference.DPO_LOSSES} | {f"sft loss_type={n}" for n in sft.SFT_LOSS_TYPES}
    names |= {f"kto loss_type={name}" for name in preference.KTO_LOSS_TYPES} | {"reward loss"}
    assert names <= FAMILIES.keys(), names - FAMILIES.keys()
