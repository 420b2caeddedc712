"""Test the audit on bugs that TRL shipped.

Each bug is audited in two releases: the last one before its fix and the first good one.

    python audit/history.py FOLDER

FOLDER receives one environment per release, and the dumped steps. history.json lists the bugs under "cases", and this
script writes the verdicts into it under "rows". An environment is a folder with one TRL release, which PYTHONPATH
places before the installed packages. Older releases also need an older transformers; torch is always the installed one.
"""

import datetime
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.extend(str(Path(__file__).parent / name) for name in ("..", ".", "tests"))
import older_trl
import trl_fixtures

from minivlmrl_audit.audit import checked

RECORD = Path(__file__).with_suffix(".json")
ABOUT = json.loads(RECORD.read_text())
CASES = ABOUT["cases"]
LAST = "1.16.0"


def numbers(release: str) -> list[int]:
    """Split a release number such as "0.16.1" into [0, 16, 1], so that releases can be sorted."""
    return [int(part) for part in release.split(".") if part]


def environment(work: Path, release: str) -> tuple[dict, str]:
    """Install a TRL release into a folder in `work`, unless the folder exists.

    Returns the environment variables for a process that uses the release, and its transformers version.
    """
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
    """Audit the last dumped step in `folder`, and return a verdict.

    The verdict is "silent" if no number differs, and "named" if only one stage differs and its first four
    explanations contain `cause`. Otherwise it is "located: " with the stages that differ, or "cannot run: " with the
    error that prevented training.
    """
    error = folder / "error.txt"
    if error.exists():
        return f"cannot run: {error.read_text().splitlines()[0]}"
    last_step = max(path for path in folder.iterdir() if path.name.isdigit())
    findings, _ = checked(last_step)
    wrong = [finding for finding in findings if not (finding.ok or finding.again)]
    if not wrong:
        return "silent"
    named = [each for finding in wrong for each in finding.explained[:4]]
    if cause and len(wrong) == 1 and any(cause in each.says for each in named):
        return "named"
    return f"located: {', '.join(finding.stage for finding in wrong)}"


def dump_cases(model: Path, folder: Path, names: list[str]):
    """Train and dump two steps per named case with the imported TRL release, or write the error to error.txt.

    main() starts a process for this function in each release's environment.
    """
    if trl_fixtures.trl.__version__ != LAST:
        trl_fixtures.STEPS_OF = older_trl.STEPS_OF
    for name in names:
        output = folder / name
        output.mkdir(parents=True)
        try:
            trl_fixtures.train(CASES[name]["kind"], model, output, 2, **{"max_steps": 1} | CASES[name]["options"])
        except Exception as error:  # an old release may raise any error
            (output / "error.txt").write_text(f"{type(error).__name__}: {error}")


def main(work: Path):
    """Audit every case with its release before the fix, its first good release and TRL 1.16.0.

    The verdicts are written to history.json.
    """
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
            if name == "none":  # a bug in the default settings also affects this case
                shipped = [other["cause"] for other in cases.values() if other["before"] == release]
                cause = shipped[0] if shipped else ""
            found = verdict(work / release / name, cause)
            rows.append({"trl": release, "transformers": version, "bug": name, "audit": found})
            print(rows[-1], flush=True)
    ABOUT.update(date=str(datetime.date.today()), rows=rows)
    RECORD.write_text(json.dumps(ABOUT, indent=1) + "\n")


if __name__ == "__main__":
    folder, *rest = sys.argv[1:]
    if rest:
        dump_cases(Path(folder), Path(rest[0]), rest[1:])
    else:
        main(Path(folder))
