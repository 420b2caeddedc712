"""The page and the record of the audit on TRL's releases say the same."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_table_of_the_record():
    """Each bug is named in the release before its fix, and not in the first good one, nor in 1.16.0."""
    about = json.loads((ROOT / "audit/history.json").read_text())
    page, of = (ROOT / "docs/audit.md").read_text(), {(row["trl"], row["bug"]): row["audit"] for row in about["rows"]}
    page = page.partition("## Bugs that TRL shipped")[2].partition("\n## ")[0]
    quiet = {release: of.pop((release, bug)) for release, bug in [*of] if bug == "none"}
    assert about["date"] in page and {release for release, _ in of} == {*quiet}
    assert [release for release, said in quiet.items() if said != "silent"] == ["0.22.1"]
    bugs = {bug for _, bug in of}
    for bug in bugs:
        case = about["cases"][bug]
        link = f"<https://github.com/huggingface/trl/pull/{case['fix']}>"
        assert f"| {bug} | {link} | {case['before']} | {case['good']} |" in page
        said = [of[release, bug] for release in (case["before"], case["good"], "1.16.0")]
        assert said == ["named", "silent", "silent"]
    assert page.count("/pull/") == len(bugs)
