"""Every loss and option of ours against TRL, cell by cell; the table that says so; and numbers recorded from TRL.

The cells are in minivlmrl/audit. `python tests/record_losses.py` writes the recorded numbers anew.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from record_losses import record

import minivlmrl.audit
from minivlmrl.algorithms import preference_losses as preference
from minivlmrl.algorithms import sft_loss as sft
from minivlmrl.algorithms.policy_losses import AVERAGES, FamilyLoss, PolicyInputs, policy_loss
from minivlmrl.audit.compare import Outcome, ask, compare, judge
from minivlmrl.audit.parity import check, families, main, status, summary
from minivlmrl.losses import Counts

FAMILIES = families()
RECORDED = Path(__file__).parent / "recorded" / "trl_1.16.0.json"
MISSING = "oracle missing: pip install trl==1.16.0 transformers==5.23.0"
GONE = {"gspo_token"}  # in TRL up to 1.13


@pytest.mark.parametrize("family", FAMILIES)
def test_every_cell_of_a_family_equals_trl(family):
    trl = pytest.importorskip("trl", reason=MISSING)
    row = judge(family, [ask(cell) for cell in FAMILIES[family]], trl.__version__)
    assert row.kind == ("absent" if family in GONE else "agrees"), f"{row.verdict}: {row.example}"
    assert "no answer" not in row.verdict, row.verdict


def outcomes(*kinds):
    return [Outcome(f"cell {i}", kind, error, text) for i, (kind, error, text) in enumerate(kinds)]


def test_the_exit_status():
    good, bad = judge("a", outcomes(("agrees", 0.0, "")), "1"), judge("b", outcomes(("differs", 1.0, "")), "1")
    absent, excused = (
        judge("c", outcomes(("absent", 0.0, "")), "1"),
        judge("gspo_token", outcomes(("absent", 0, "")), "1"),
    )
    excused.kind, excused.note = "differs", "known"
    assert [status(rows) for rows in ([good, absent], [good, excused], [good, bad], [absent])] == [0, 0, 1, 2]
    assert summary([good, excused, absent]) == (
        "3 families, 3 cells: 1 agree, 1 not in this version, 1 differ (1 of them as known)"
    )


def test_the_command_prints_a_table(capsys):
    trl = pytest.importorskip("trl", reason=MISSING)
    assert main(["--filter", "dpo hinge"]) == 0
    title, _, row, _, end = capsys.readouterr().out.splitlines()
    assert f"TRL {trl.__version__}" in title and end.startswith("1 families, 8 cells: 1 agree")
    assert row.split()[:6] == ["dpo", "hinge", "8", "agrees", "to", "15"]
    again = json.loads(record({"dpo hinge": FAMILIES["dpo hinge"]}, trl.__version__))["cells"]
    assert len(again) == 1 and again.items() <= json.loads(RECORDED.read_text())["cells"].items()


def test_a_wrong_loss_is_reported(capsys, monkeypatch):
    pytest.importorskip("trl", reason=MISSING)
    right = preference.dpo_loss

    def wrong(*args, **options):
        loss, diagnostics = right(*args, **options)
        return loss * 1.001, diagnostics

    monkeypatch.setattr(preference, "dpo_loss", wrong)
    assert main(["--filter", "dpo hinge"]) == 1
    assert "differs by 1.0e-03 in 8 of 8 cells" in capsys.readouterr().out


def test_without_trl_the_command_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, "minivlmrl.audit.trl_oracle", raising=False)
    monkeypatch.delattr(minivlmrl.audit, "trl_oracle", raising=False)
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "pip install trl==1.16.0" in err


def test_a_filter_that_fits_nothing_is_refused(capsys):
    pytest.importorskip("trl", reason=MISSING)
    assert main(["--filter", "no such loss"]) == 2
    assert "no such loss" in capsys.readouterr().err


def test_ours_equals_the_recorded_numbers_without_trl(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    record = json.loads(RECORDED.read_text(encoding="utf-8"))
    first = torch.randn(3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist()
    assert first == record["first normal numbers of seed 0"], "this torch draws other numbers: record anew"
    cells = {f"{family}: {c.name}": c for family, of in FAMILIES.items() for c in of}
    for name, numbers_of_trl in record["cells"].items():
        theirs = {key: torch.tensor(value, dtype=torch.float64) for key, value in numbers_of_trl.items()}
        outcome = compare(cells[name], theirs)
        assert outcome.kind == "agrees", f"{name}: {outcome}"


def test_each_family_is_recorded():
    names = json.loads(RECORDED.read_text(encoding="utf-8"))["cells"]
    assert {name.partition(": ")[0] for name in names} == FAMILIES.keys() - GONE
    assert 60 <= len(names) <= 120 and RECORDED.stat().st_size < 200_000


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
