"""Check the museum of mistakes: each line stands once in minimal.py, and parity says what the page says."""

import pytest

from docs.scripts.museum import EXHIBITS, SOURCE, changed, record
from tests.helpers.links import ROOT

PICTURE = (ROOT / "docs" / "images" / "museum.svg").read_text(encoding="utf-8")


def test_the_museum_has_ten_exhibits_of_lines_in_minimal():
    assert len(EXHIBITS) == 10
    for number, exhibit in enumerate(EXHIBITS, 1):
        assert f">{number}. {exhibit.title}</text>" in PICTURE
        assert changed(exhibit) != SOURCE


LONG = (
    "The group of one", "The nearly greedy sampler", "The labels shifted twice", "The loss divided twice",
    "The answer in the wrong place", "The reference that follows", "The picture that nobody sees",
)  # fmt: skip


@pytest.mark.parametrize(
    "exhibit", [pytest.param(x, marks=[pytest.mark.slow] * (x.title in LONG), id=x.title) for x in EXHIBITS]
)
def test_parity_says_what_the_page_says(exhibit, tmp_path):
    report = record(exhibit.kind, changed(exhibit), tmp_path)
    assert report[: report.index("DIFFERS")].splitlines()[-1].strip() == exhibit.stage
    assert exhibit.says in report.split("DIFFERS")[1]


@pytest.mark.parametrize("kind", ["grpo", "sft", "dpo"])
def test_parity_says_nothing_about_minimal(kind, tmp_path):
    assert "DIFFERS" not in record(kind, SOURCE, tmp_path)
