"""Notes on other versions of TRL excuse the differences that they are about, and nothing else."""

from parity.compare import NOTES, Outcome, judge, known
from parity.families import families

FAMILIES = families()


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
        version = ".".join(map(str, since)) if since > [0] else "0.1"
        assert since < below
        assert any(text in known(title, version) for title in titles), text
    assert {title for title in titles if known(title, "1.16.0")} <= {t for t in titles if t.startswith("gspo_token")}
    assert known("gspo_token", "1.14.0.dev0") and not known("gspo_token", "1.9")
