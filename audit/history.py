"""Which bugs that shipped the audit finds: steps of TRL's releases, before and after each fix.

    python audit/history.py FOLDER  # environments and steps go there; the table into history.json, which has the cases

A release is a folder in front of what is installed here, the older ones with an older transformers; torch is shared.
"""

import datetime
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.extend(str(Path(__file__).parent / name) for name in ("..", ".", "tests", "../tests", "../tests/helpers"))
import older_trl
import trl_fixtures

from minivlmrl_audit.audit import checked

RECORD = Path(__file__).with_suffix(".json")
ABOUT = json.loads(RECORD.read_text())
CASES = ABOUT["cases"]
LAST = "1.16.0"


def numbers(release: str) -> list[int]:
    """Split 0.16.1 into its numbers."""
    return [int(part) for part in release.split(".") if part]


def environment(work: Path, release: str) -> tuple[dict, str]:
    """Install a release where it is not yet; returns variables of its processes, and its transformers."""
    starts = [start for start in ABOUT["transformers"] if numbers(start) <= numbers(release)]
    version = ABOUT["transformers"][starts[-1]]
    folders = {work / f"trl-{release}": ["--no-deps", f"trl=={release}"]}
    if version:
        folders[work / f"transformers-{version}"] = [f"transformers=={version}", *ABOUT["with_them"]]
    for folder, packages in folders.items():
        if not folder.exists():
            install = [sys.executable, "-m", "pip", "install", "-q", "--target", folder, *packages]
            subprocess.run(install, check=True)
    variables = {"PYTHONPATH": os.pathsep.join(map(str, folders)), "CI": "1", "HF_HUB_OFFLINE": "1"}
    return os.environ | variables, version or trl_fixtures.transformers.__version__


def verdict(folder: Path, cause: str) -> str:
    """Audit the last step of a case: silent, named, or located and in which stages."""
    error = folder / "error.txt"
    if error.exists():
        return f"cannot run: {error.read_text().splitlines()[0]}"
    last_step = max(path for path in folder.iterdir() if path.name.isdigit())
    findings, _ = checked(last_step)
    wrong = [finding for finding in findings if not (finding.ok or finding.again)]
    if not wrong:
        return "silent"
    named = [each for finding in wrong for each in finding.explained[:4]]
    if cause and len(wrong) == 1 and any(cause in f"{each.name} {each.says}" for each in named):
        return "named"
    return f"located: {', '.join(finding.stage for finding in wrong)}"


def main(work: Path):
    """Make the table."""
    model = trl_fixtures.write_model(work)
    rows = []
    releases = {case[which] for case in CASES.values() for which in ("before", "good")} - {None}
    for release in sorted(releases, key=numbers):
        variables, version = environment(work, release)
        shutil.rmtree(work / release, ignore_errors=True)
        cases = {name: case for name, case in CASES.items() if release in (case["before"], case["good"], LAST)}
        cases["none"] = CASES["none"]
        command = [sys.executable, __file__, model, work / release, *cases]
        subprocess.run(command, env=variables, capture_output=True)
        for name, case in cases.items():
            cause = case.get("cause", "")
            if name == "none":  # a bug that no setting avoids is in the step without one too
                shipped = [other["cause"] for other in cases.values() if other["before"] == release]
                cause = shipped[0] if shipped else ""
            row = {"trl": release, "transformers": version, "bug": name}
            row["audit"] = verdict(work / release / name, cause)
            rows.append(row)
            print(row, flush=True)
    ABOUT.update(date=str(datetime.date.today()), rows=rows)
    RECORD.write_text(json.dumps(ABOUT, indent=1) + "\n")


if __name__ == "__main__":
    model, *rest = map(Path, sys.argv[1:])
    if rest:  # in a process of a release: the steps of some cases
        folder, *names = rest
        if trl_fixtures.trl.__version__ != LAST:
            trl_fixtures.STEPS_OF = older_trl.STEPS_OF
        for name in names:
            trl_fixtures.dump(model, folder / name, **CASES[str(name)])
    else:
        main(model)
