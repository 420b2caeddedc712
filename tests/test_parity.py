"""parity.check, for other people's tests, holds our losses to TRL's recorded numbers, and finds a wrong one."""

import importlib.util
import re
import sys

import pytest
import torch

from minivlmrl.losses import Counts
from minivlmrl.objectives import preference_losses as preference
from minivlmrl.objectives.parity import cases, check, distance
from minivlmrl.objectives.policy_losses import FamilyLoss, policy_loss


def my_loss(batch, options):
    """Ours, as someone would write it who compares theirs."""
    if options["kind"] == "sft":
        return preference.sft_loss(**batch, loss_type=options["loss_type"])
    if options["kind"] == "dpo":
        names = preference.DPOLoss.__dataclass_fields__
        chosen = preference.DPOLoss(**{n: options[n] for n in names if n in options})
        return preference.dpo_loss(**batch, options=chosen)[0]
    names = FamilyLoss.__dataclass_fields__
    chosen = FamilyLoss(**{name: options[name] for name in names if name in options})
    counts = Counts(len(batch["mask"]), options["tokens"], options["max_completion_length"])
    return policy_loss(**batch, options=chosen, counts=counts)[0]


def usual(batch, options, average=lambda x, mask: x.sum() / mask.sum(), weight=True):
    """A token mean over the batch, clipped at .8 and 1.2, as most people write it."""
    logps, mask, advantages = batch["per_token_logps"], batch["mask"], batch["advantages"][:, None]
    ratio = (logps - batch["old_per_token_logps"]).exp()
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    d = batch["ref_per_token_logps"] - logps
    kl = (d.exp() - d - 1) * (ratio if weight else 1)
    return average((loss + options["beta"] * kl) * mask, mask)


DAPO = {"loss_type": "dapo", "importance_sampling_level": "token"}


def test_a_loss_of_ones_own_is_checked_against_recorded_numbers(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    assert check(my_loss) == 64 and check(my_loss, kind="dpo") == 15 and check(my_loss, kind="sft") == 2
    assert check(my_loss, loss_type="dapo") == 8 and check(my_loss, kind="dpo", loss_type="sigmoid") == 1


@pytest.mark.parametrize("only, known", [
    ({"kind": "ppo"}, "'kind': ['grpo', 'dpo', 'sft']"),
    ({"loss_type": "gspo"}, "'loss_type': ['grpo', 'bnpo', 'dr_grpo', "),
    ({"beta": 3}, "'beta': ['0.0', '0.1']"),
    ({"colour": 1}, "'colour': ['None']"),
])  # fmt: skip
def test_a_check_of_no_case_is_an_error_that_lists_what_there_is(only, known):
    with pytest.raises(ValueError, match="no recorded case has .*; there are .*" + re.escape(known)):
        check(my_loss, **only)


def test_the_usual_loss_passes_where_the_batch_is_the_step():
    assert check(usual, whole_step=True, **DAPO) == 2


def test_without_the_audit_a_wrong_loss_has_no_name(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AssertionError) as error:
        check(lambda batch, options: 2 * my_loss(batch, options), kind="sft")
    last = "minivlmrl-audit names the mistake: pip install ./audit, in a clone"
    head, first, second, says = str(error.value).splitlines()
    assert (head, says) == ("2 of 2 cases differ from TRL", last)
    assert all(re.match(r"sft\d+ .*: value differs by .*, gradient by 5", line) for line in (first, second))


def test_what_trl_says_of_ones_own_tensors(trl):
    """TRL's value and gradient are those that were recorded."""
    from parity.trl_oracle import what_trl_says

    for only in ({"kind": "grpo", "loss_type": "cispo", "beta": 0.1}, {"kind": "dpo", "beta": 0.3}, {"kind": "sft"}):
        *_, (_, options, batch, value, gradient) = cases(**only)
        says = what_trl_says(batch, options)
        assert distance(says["loss"], value) < 1e-12 and distance(says["gradient"], gradient) < 1e-12
