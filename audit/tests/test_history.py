"""The page and the record of the audit on TRL's releases say the same."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_table_of_the_record():
    about = json.loads((ROOT / "audit/history.json").read_text())
    page, of = (ROOT / "docs/history.md").read_text(), {(row["trl"], row["bug"]): row["audit"] for row in about["rows"]}
    quiet = {release: of.pop((release, bug)) for release, bug in [*of] if bug == "none"}
    assert about["date"] in page and {release for release, _ in of} == {*quiet}
    assert [release for release, said in quiet.items() if said != "silent"] == ["0.22.1"]
    for bug in {bug for _, bug in of}:
        case = about["cases"][bug]
        before, good, last = (of[release, bug] for release in (case["before"], case["good"], "1.16.0"))
        link = f"<https://github.com/huggingface/trl/pull/{case['fix']}>"
        assert f"| {bug} | {link} | {case['before']}: {before} | {case['good']}: {good} | {last} |" in page
        assert (before, good, last) == ("named", "silent", "silent")
