"""Check the museum of mistakes: parity says what the page says about each line of minimal.py that is changed."""

import pytest

from docs.scripts.museum import EXHIBITS, SOURCE, changed, record

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
