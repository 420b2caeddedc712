"""docs/find.md answers where things are: the names in it exist."""

import pytest
from links import ROOT, links, missing

PAGE = ROOT / "docs" / "find.md"


def test_thirteen_questions_have_answers():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "? | " in line]
    assert len(rows) == 13
    for row in rows[:-1]:
        assert "[`" in row, f"no name of code in: {row}"


def test_names_exist():
    assert len(links(PAGE)) >= 15
    assert missing(PAGE) == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_names_on_every_page_exist(page):
    if page.name not in ("policy_gradients.md", "preferences.md", "ppo.md"):  # test_losses_page.py has those
        assert missing(page) == []
