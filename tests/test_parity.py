"""Every loss and option of ours against TRL, cell by cell; the table that says so; and numbers recorded from TRL.

The cells stand in minivlmrl/audit. `python -m minivlmrl parity --record tests/recorded/trl_1.16.0.json` writes the
recorded numbers anew.
"""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

import minivlmrl.audit
from minivlmrl.algorithms import preference_losses as preference
from minivlmrl.algorithms import sft_loss as sft
from minivlmrl.algorithms.policy_losses import AVERAGES
from minivlmrl.audit.cells import families
from minivlmrl.audit.compare import Cell, NotInThisVersion, Outcome, ask, compare, digits, judge, with_gradients
from minivlmrl.audit.notes import NOTES, known, numbers
from minivlmrl.audit.parity import main, status, summary

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


def cell(ours, theirs, tolerance=1e-10):
    def result(value):
        if isinstance(value, Exception):
            raise value
        return {name: torch.as_tensor(v, dtype=torch.float64) for name, v in value.items()}

    return Cell("fake", "options", lambda: result(ours), lambda: result(theirs), tolerance)


@pytest.mark.parametrize(
    "ours, theirs, kind",
    [
        ({"loss": 1.0}, {"loss": 1.0}, "agrees"),
        ({"loss": 1.0}, {"loss": 1.0 + 1e-12}, "agrees"),
        ({"loss": 1.0}, {"loss": 1.0 + 1e-9}, "differs"),
        ({"loss": 1e9}, {"loss": 1e9 + 1e-3}, "agrees"),  # relative to what is large
        ({"loss": 1.0}, {"loss": [1.0, 1.0]}, "differs"),
        ({"loss": 1.0}, {"loss": math.nan}, "differs"),
        ({"loss": math.nan}, {"loss": math.nan}, "agrees"),
        ({"loss": 1.0}, {"loss": 1.0, "d loss / d x": 0.0}, "differs"),
        ({"loss": 1.0, "metric kl": 1.0}, {"loss": 1.0, "metric kl": 1.0 + 1e-7, "metric other": 3.0}, "agrees"),
        ({"loss": 1.0, "metric kl": 1.0}, {"loss": 1.0, "metric kl": 1.1}, "differs"),
        (ValueError("no"), {"loss": 1.0}, "differs"),
        ({"loss": 1.0}, NotInThisVersion("no option x"), "absent"),
        ({"loss": 1.0}, AttributeError("no attribute y"), "failed"),
    ],
)
def test_what_becomes_of_a_cell(ours, theirs, kind):
    assert ask(cell(ours, theirs)).kind == kind


def outcomes(*kinds):
    return [Outcome(f"cell {i}", kind, error, text) for i, (kind, error, text) in enumerate(kinds)]


@pytest.mark.parametrize(
    "kinds, kind, verdict",
    [
        ([("agrees", 3e-12, ""), ("agrees", 0.0, "")], "agrees", "agrees to 11 digits"),
        ([("agrees", 0.0, ""), ("absent", 0.0, "no option x")], "agrees",
         "agrees to 16 digits (1 of 2 cells had no answer: no option x)"),
        ([("agrees", 0.0, ""), ("differs", 0.25, ""), ("differs", 0.5, "")], "differs",
         "differs by 5.0e-01 in 2 of 3 cells"),
        ([("differs", math.inf, "")], "differs", "differs in shape or NaN in 1 of 1 cells"),
        ([("differs", math.inf, "ours raised ValueError: no")], "differs",
         "differs in shape or NaN (ours raised ValueError: no) in 1 of 1 cells"),
        ([("differs", 0.5, "metric kl")], "differs", "differs by 5.0e-01 (metric kl) in 1 of 1 cells"),
        ([("absent", 0.0, "no option x")], "absent", "not in this version (no option x)"),
        ([("failed", 0.0, "AttributeError: y"), ("absent", 0.0, "x")], "failed",
         "could not be asked (AttributeError: y)"),
    ],
)  # fmt: skip
def test_what_is_said_about_a_family(kinds, kind, verdict):
    row = judge("fake", outcomes(*kinds), "1.16.0")
    assert (row.kind, row.verdict) == (kind, verdict)
    assert row.excused == (kind != "differs")


def test_a_note_excuses_a_difference_only_in_its_versions_and_cells():
    wrong = Outcome("beta=0.1, seed=0", "differs", 0.1)
    row = judge("grpo defaults", [wrong], "1.8.0")
    assert row.excused and "False by default up to 1.9" in row.note
    assert not judge("grpo defaults", [wrong], "1.10.0").excused
    assert not judge("grpo defaults", [wrong, Outcome("seed=0", "differs", 0.1)], "1.8.0").excused
    assert judge("grpo defaults", [wrong], "1.16.0").note == ""


def test_notes_are_about_families_that_exist_and_versions_that_differ():
    titles = [f"{family}: {c.name}" for family, cells in FAMILIES.items() for c in cells]
    for _, since, below, text in NOTES:
        version = ".".join(map(str, numbers(since))) if numbers(since) > (0,) else "0.1"
        assert numbers(since) < numbers(below)
        assert any(text in known(title, version) for title in titles), text
    assert {title for title in titles if known(title, "1.16.0")} <= {t for t in titles if t.startswith("gspo_token")}
    assert numbers("1.16.0.dev0") == (1, 16, 0) > numbers("1.9")


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


def test_digits_and_gradients():
    assert [digits(error) for error in (0.0, 1e-17, 3e-12, 0.5)] == [16, 16, 11, 0]
    x, y = torch.tensor(3.0, requires_grad=True), torch.tensor(1.0, requires_grad=True)
    result = with_gradients(x * x, {"x": x, "y": y}, {"m": 2})
    assert {name: value.item() for name, value in result.items()} == {
        "loss": 9, "d loss / d x": 6, "d loss / d y": 0, "metric m": 2,
    }  # fmt: skip


def test_an_option_that_trl_does_not_know_is_named():
    pytest.importorskip("trl", reason=MISSING)
    from minivlmrl.audit import policy_cells, trl_oracle

    batch = policy_cells.policy_batch(0)
    with pytest.raises(NotInThisVersion, match="GRPOConfig has no option no_such_option"):
        trl_oracle.grpo_loss(batch, no_such_option=1)
    with pytest.raises(NotInThisVersion, match="Unknown loss type: no_such_loss"):
        trl_oracle.grpo_loss(batch, loss_type="no_such_loss")
    with pytest.raises(NotInThisVersion, match=r"no trl\.no_such\.GRPOTrainer"):
        trl_oracle.grpo_loss(batch, module="trl.no_such")


def test_the_command_prints_a_table(capsys, tmp_path):
    trl = pytest.importorskip("trl", reason=MISSING)
    report, recorded = tmp_path / "table.json", tmp_path / "numbers.json"
    assert main(["--filter", "dpo hinge", "--json", str(report), "--record", str(recorded)]) == 0
    title, _, row, _, end = capsys.readouterr().out.splitlines()
    assert f"TRL {trl.__version__}" in title and end.startswith("1 families, 8 cells: 1 agree")
    assert row.split()[:6] == ["dpo", "hinge", "8", "agrees", "to", "15"]
    table = json.loads(report.read_text())
    assert table["trl"] == trl.__version__ and table["rows"][0]["kind"] == "agrees"
    again = json.loads(recorded.read_text())["cells"]
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
