"""Test that docs/results.md agrees with the package, the pinned versions and the workflow."""

import re
import tomllib

import yaml

from minivlmrl.model.families.registry import FAMILIES
from tests.helpers.links import ROOT, rows_of

PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
PINS = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
JOBS = WORKFLOW["jobs"]


def test_the_workflow_runs_the_versions_of_the_page():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = [text.rpartition(" ")[2] for text in project["classifiers"] if "Python :: 3." in text]
    lines = JOBS["run"]["strategy"]["matrix"]["include"]
    assert {line["python"] for line in lines if not line.get("optional")} == {*versions}
    cells = " ".join(row[0] for row in rows_of(PAGE, "What ran where"))
    assert {*re.findall(r"\b3\.1\d\b", cells)} == {*versions}
    pairs = re.findall(r"torch (2\.\S+) with Triton (3\.\S+)", cells.replace(",", ""))
    tried = {(line.get("torch", PINS["torch"]), line.get("triton", PINS["triton"])) for line in lines}
    assert {*pairs} == tried and len(pairs) == 3
    assert f"torch>={min(pairs)[0].removesuffix('.0')}" in project["dependencies"]


def test_the_files_of_a_release_need_all_other_jobs_and_each_commit_runs_once():
    assert {*JOBS["package"]["needs"]} == {*JOBS} - {"package"}
    assert WORKFLOW[True] == {"push": {"branches": ["main"]}, "pull_request": None}  # YAML reads `on` as True


def test_all_model_families_are_on_the_page():
    assert {row[1].strip("`") for row in rows_of(PAGE, "Model families")} == {*FAMILIES}
    for _, name, part in rows_of(PAGE, "Model families"):
        assert part == ("extras" if ".extras." in FAMILIES[name.strip("`")] else "core")


def test_versions_of_other_projects_are_pinned_or_recorded():
    recorded = {path.stem for path in (ROOT / "tests" / "recorded").glob("*.json")}
    for project, versions in rows_of(PAGE, "Versions of other projects"):
        numbers = re.findall(r"\d+(?:\.\d+)+", versions)
        assert numbers
        for number in numbers:
            if "(recorded)" in versions:
                assert any(name.endswith(f"{project}_{number}") for name in recorded), (project, number)
            else:
                assert PINS[project] == number
