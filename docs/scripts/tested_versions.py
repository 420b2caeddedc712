"""Write the versions table in docs/faq.md from the workflow's matrix: python -m docs.scripts.tested_versions"""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faq.md"
WORKFLOW = ROOT / ".github" / "workflows" / "tests.yml"
SYSTEMS = {"ubuntu-latest": "Linux", "macos-latest": "macOS", "windows-latest": "Windows"}


def page() -> str:
    """Return the page with the current table as its first table; the text around it is written by hand."""
    return re.sub(r"(?m)(?:^\|.*\n)+", lambda _: combinations(), PAGE.read_text(encoding="utf-8"), count=1)


def combinations() -> str:
    """Return a table with a line for each job in the workflow."""
    pins = pinned()
    lines = ["| system | Python | PyTorch | Triton | tests | must pass |", "|---|---|---|---|---|---|"]
    for job in yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]["run"]["strategy"]["matrix"]["include"]:
        system = SYSTEMS[job["os"]]
        triton = job.get("triton", pins["triton"]) if system == "Linux" else "-"  # PyPI has it for Linux only
        must_pass = "no" if job.get("optional") else "yes"
        cells = [system, job["python"], job.get("torch", pins["torch"]), triton, job["tests"], must_pass]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def pinned() -> dict[str, str]:
    """Return {package: version} from constraints.txt."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
