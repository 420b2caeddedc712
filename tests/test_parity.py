"""parity.check, for other people's tests, holds our losses to TRL's recorded numbers, and finds a wrong one."""

import sys

import pytest

from minivlmrl.algorithms import preference_losses as preference
from minivlmrl.algorithms import sft_loss as sft
from minivlmrl.algorithms.policy_losses import FamilyLoss, PolicyInputs, policy_loss
from minivlmrl.audit.parity import check
from minivlmrl.losses import Counts


def my_loss(batch, options):
    """Ours, as someone would write it who compares theirs."""
    if options["kind"] == "sft":
        return sft.sft_loss(**batch, loss_type=options["loss_type"])
    if options["kind"] == "dpo":
        names = preference.DPOLoss.__dataclass_fields__
        return preference.dpo_loss(
            **batch, options=preference.DPOLoss(**{n: options[n] for n in names if n in options})
        )[0]
    names = FamilyLoss.__dataclass_fields__
    given = PolicyInputs(**{name: x for name, x in batch.items() if name not in ("mask", "advantages")})
    chosen = FamilyLoss(**{name: options[name] for name in names if name in options})
    counts = Counts(len(batch["mask"]), options["tokens"], options["max_completion_length"])
    return policy_loss(given, batch["advantages"], batch["mask"], chosen, counts)[0]


def test_a_loss_of_ones_own_is_checked_against_recorded_numbers(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    assert check(my_loss) == 49 and check(my_loss, kind="dpo") == 15
    assert check(my_loss, kind="grpo", loss_type="dapo") == 4
    with pytest.raises(AssertionError, match=r"^2 of 2 cases differ from TRL\nsft.* gradient by 5"):
        check(lambda batch, options: 2 * my_loss(batch, options), kind="sft")
