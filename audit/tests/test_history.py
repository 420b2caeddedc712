"""Compare the table of TRL's bugs in docs/notes/bugs_of_others.md with the record in history.json."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_table_of_the_record():
    """Each bug is named before its fix, but not in the first good release and in 1.16.0."""
    about = json.loads((ROOT / "audit/history.json").read_text())
    page = (ROOT / "docs/notes/bugs_of_others.md").read_text()
    verdicts = {(row["trl"], row["bug"]): row["audit"] for row in about["rows"]}
    page = page.partition("## Bugs that TRL shipped")[2].partition("\n## ")[0]
    quiet = {release: verdicts.pop((release, bug)) for release, bug in [*verdicts] if bug == "none"}
    assert about["date"] in page and {release for release, _ in verdicts} == {*quiet}
    assert [release for release, verdict in quiet.items() if verdict != "silent"] == ["0.22.1"]
    bugs = {bug for _, bug in verdicts}
    for bug in bugs:
        case = about["cases"][bug]
        link = f"<https://github.com/huggingface/trl/pull/{case['fix']}>"
        assert f"| {bug} | {link} | {case['before']} | {case['good']} |" in page
        found = [verdicts[release, bug] for release in (case["before"], case["good"], "1.16.0")]
        assert found == ["named", "silent", "silent"]
    assert page.count("/pull/") == len(bugs)
