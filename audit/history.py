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
import patients

from minivlmrl_audit.audit import checked

RECORD = Path(__file__).with_suffix(".json")
ABOUT = json.loads(RECORD.read_text())
CASES, LAST = ABOUT["cases"], "1.16.0"


def numbers(release: str) -> list[int]:
    """Split 0.16.1 into its numbers."""
    return [int(part) for part in release.split(".") if part]


def environment(work: Path, release: str) -> tuple[dict, str]:
    """Install a release where it is not yet; returns variables of its processes, and its transformers."""
    since = [start for start in ABOUT["transformers"] if numbers(start) <= numbers(release)]
    version, folders = ABOUT["transformers"][since[-1]], {work / f"trl-{release}": ["--no-deps", f"trl=={release}"]}
    if version:
        folders[work / f"transformers-{version}"] = [f"transformers=={version}", *ABOUT["with_them"]]
    for folder, what in folders.items():
        if not folder.exists():
            subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", folder, *what], check=True)
    path, installed = os.pathsep.join(map(str, folders)), patients.transformers.__version__
    return os.environ | {"PYTHONPATH": path, "CI": "1", "HF_HUB_OFFLINE": "1"}, version or installed


def verdict(folder: Path, cause: str) -> str:
    """Audit the last step of a case: silent, named, or located and in which stages."""
    if (folder / "error.txt").exists():
        return f"cannot run: {(folder / 'error.txt').read_text().splitlines()[0]}"
    last = max(path for path in folder.iterdir() if path.name.isdigit())
    wrong = [finding for finding in checked(last)[0] if not (finding.ok or finding.again)]
    fits = [fit for finding in wrong for fit, _ in finding.explained[:4]]
    if cause and len(wrong) == 1 and any(cause in f"{of.name} {of.says}" for fit in fits for of in fit):
        return "named"
    return f"located: {', '.join(finding.stage for finding in wrong)}" if wrong else "silent"


def main(work: Path):
    """Make the table."""
    model, rows = patients.write_model(work), []
    releases = {case[which] for case in CASES.values() for which in ("before", "good")} - {None}
    for release in sorted(releases, key=numbers):
        variables, version = environment(work, release)
        shutil.rmtree(work / release, ignore_errors=True)
        shown = {name: case for name, case in CASES.items() if release in (case["before"], case["good"], LAST)}
        names = [*dict.fromkeys([*shown, "none"])]
        subprocess.run([sys.executable, __file__, model, work / release, *names], env=variables, capture_output=True)
        for name in names:
            # a bug that no setting avoids is in the step without one too
            of = CASES[name] if name in shown else next((x for x in shown.values() if x["before"] == release), {})
            said = verdict(work / release / name, of.get("cause", ""))
            rows.append({"trl": release, "transformers": version, "bug": name, "audit": said})
            print(rows[-1], flush=True)
    ABOUT.update(date=str(datetime.date.today()), rows=rows)
    RECORD.write_text(json.dumps(ABOUT, indent=1) + "\n")


if __name__ == "__main__":
    folder, *rest = map(Path, sys.argv[1:])
    for each in rest[1:]:
        patients.dump(folder, rest[0] / each, **CASES[str(each)])
    if not rest:
        main(folder)
