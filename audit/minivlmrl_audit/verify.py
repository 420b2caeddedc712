"""`python -m minivlmrl verify RUN`: train a run again as RUN.again, and compare every file.

Nothing that a log says of itself is believed. docs/verify.md says what this proves.
"""

import argparse
import math
from pathlib import Path

from minivlmrl.hub.folder import json_text
from minivlmrl.run.completions import COMPLETIONS
from minivlmrl.run.metrics import METRICS
from minivlmrl.run.resume import state_folders
from minivlmrl.tools.replay import is_first, run_config, train_again
from minivlmrl_audit.difference import content, difference, distance


def main(arguments: list[str]) -> int:
    """Print what differs; 0: nothing, 1: something, 3: numbers alone, as on another machine."""
    about = {"description": __doc__, "allow_abbrev": False}
    parser = argparse.ArgumentParser("python -m minivlmrl verify", **about)
    parser.add_argument("run", help="the folder of a run that has ended")
    parser.add_argument("--recipe", help="default: config.yaml of the run, if it names no code")
    parser.add_argument("--state", help="begin with this one, such as 000120, and believe it")
    options, overrides = parser.parse_known_args(arguments)
    folder = Path(options.run)
    again = Path(f"{options.run}.again")
    found = {}
    state = options.state and folder / "states" / options.state
    done = int(options.state or 0)
    # with paths of this machine it says something else; the page is made of the other files
    derived = [".lock", "page.html", *["config.yaml"] * bool(overrides)]
    later = [path for path in state_folders(folder / "states") if int(path.name) > done]

    def compare(paths):
        for path in filter(Path.is_file, paths) if is_first() else ():
            if (name := path.relative_to(again).as_posix()) not in (*found, *derived):
                here = (folder / name).is_file()
                found[name] = difference(path, folder / name) if here else "missing"

    def see(*_):  # a run keeps its last states alone
        compare(file for path in later for file in (again / "states" / path.name).glob("*"))

    often = {"state_steps": math.gcd(*(int(path.name) for path in later)), "state_minutes": 0.0}
    config = run_config(folder, options.recipe, overrides)
    if (code := train_again(config, state, again, see, **often)) or not is_first():
        return code
    see()
    compare(path for path in again.rglob("*") if again / "states" not in path.parents)
    written = {(folder / name).parent for name in found} - {folder, folder / "images"}
    for path in filter(Path.is_file, folder.rglob("*")):
        if (name := path.relative_to(folder).as_posix()) not in (*found, ".lock"):
            print(f"not compared: {name}")
            found[name] = "not of this run" if path.parent in (*written, *later) else ""
    faults = {name: what for name, what in sorted(found.items()) if what}
    for name, what in faults.items():
        print(f"DIFFERS: {name}: {what}")
    steps = [dict(enumerate(content(run / METRICS)[done : done + 2])) for run in (folder, again)]
    weights = {name for name in found if name.endswith(".safetensors")}
    if steps[0] != steps[1] and weights <= faults.keys() and same_rows(folder, again, faults):
        what = f"rows are the same; numbers of the first steps differ by {distance(*steps):.2g}"
        print(f"{what}: rounding of another processor, torch, or number of ranks or threads?")
        return 3
    print("this is not what the recipe trains" if faults else "nothing differs")
    return int(bool(faults))


def same_rows(folder: Path, again: Path, faults: dict[str, str]) -> bool:
    """Whether rows, their pictures and the names of files are equal, whatever was computed.

    Of a step as many rows are logged as the first rank has: one log may have a part of another.
    """
    logs = [content(run / COMPLETIONS) for run in (folder, again)]
    exact = {"config.yaml", *(path for line in logs[0] for path in line["images"])}
    lost = {name for name in faults if faults[name] in ("missing", "not of this run")}
    lost = {name for name in lost if not name.startswith(("states/", "images/"))}
    rows = [{json_text(line | {"completions": []}) for line in lines} for lines in logs]
    return min(rows, key=len) <= max(rows, key=len) and not (exact | lost) & faults.keys()
