"""`python -m minivlmrl verify RUN`: train a run again as RUN.again, and compare every file.

Nothing that a log says of itself is believed. docs/verify.md says what this proves.
"""

import argparse
import math
from collections.abc import Iterable
from pathlib import Path

from minivlmrl.hub.folder import json_text
from minivlmrl.run.completions import COMPLETIONS
from minivlmrl.run.metrics import METRICS
from minivlmrl.run.resume import state_folders
from minivlmrl.tools.process import is_first
from minivlmrl.tools.replay import run_config, train_again
from minivlmrl_audit.difference import content, difference, distance

DERIVED = (".lock", "page.html")  # the page is made of the other files


def main(arguments: list[str]) -> int:
    """Print what differs; 0: nothing, 1: something, 3: numbers alone, as on another machine."""
    about = {"description": __doc__, "allow_abbrev": False}
    p = argparse.ArgumentParser("python -m minivlmrl verify", **about)
    p.add_argument("run", help="the folder of a run that has ended")
    p.add_argument("--recipe", help="default: config.yaml of the run, if it names no code")
    p.add_argument("--state", help="begin with this one, such as 000120, and believe it")
    options, overrides = p.parse_known_args(arguments)
    folder = Path(options.run)
    again_folder = Path(f"{options.run}.again")
    state = options.state and folder / "states" / options.state
    first_step = int(options.state or 0)
    states = [path for path in state_folders(folder / "states") if int(path.name) > first_step]
    differences = {}  # of each file: "" where both runs say the same

    def compare(paths: Iterable[Path]):
        for path in paths:
            name = path.relative_to(again_folder).as_posix()
            # with paths of this machine a recipe says something else
            skipped = name in DERIVED or (overrides and name == "config.yaml")
            if path.is_file() and name not in differences and not skipped:
                other = folder / name
                differences[name] = difference(path, other) if other.is_file() else "missing"

    def see(*_):  # a run keeps its last states alone
        if is_first():
            for path in states:
                compare((again_folder / "states" / path.name).glob("*"))

    config = run_config(folder, options.recipe, overrides)
    state_steps = math.gcd(*(int(path.name) for path in states))
    code = train_again(config, state, again_folder, see, state_steps=state_steps, state_minutes=0.0)
    if code or not is_first():
        return code
    see()
    compare(path for path in again_folder.rglob("*") if again_folder / "states" not in path.parents)
    differences |= not_compared(folder, differences, states)
    return verdict(folder, again_folder, differences, first_step)


def not_compared(folder: Path, differences: dict[str, str], states: list[Path]) -> dict[str, str]:
    """Print the files of a run that are not compared; one where runs write files is a fault."""
    written_folders = {(folder / name).parent for name in differences} | set(states)
    written_folders -= {folder, folder / "images"}
    faults = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in differences and name != ".lock":
            print(f"not compared: {name}")
            faults[name] = "not of this run" if path.parent in written_folders else ""
    return faults


def verdict(folder: Path, again_folder: Path, differences: dict[str, str], first_step: int) -> int:
    """Print the faults and what they mean; returns the exit status."""
    faults = {name: fault for name, fault in sorted(differences.items()) if fault}
    for name, fault in faults.items():
        print(f"DIFFERS: {name}: {fault}")
    steps = []
    for run in (folder, again_folder):
        lines = content(run / METRICS)[first_step : first_step + 2]
        steps.append(dict(enumerate(lines)))
    weights = {name for name in differences if name.endswith(".safetensors")}
    is_rounding = steps[0] != steps[1] and weights <= faults.keys()
    if is_rounding and same_rows(folder, again_folder, faults):
        print(
            f"rows are the same; numbers of the first steps differ by {distance(*steps):.2g}: "
            "rounding of another processor, torch, or number of ranks or threads?"
        )
        return 3
    print("this is not what the recipe trains" if faults else "nothing differs")
    return int(bool(faults))


def same_rows(folder: Path, again_folder: Path, faults: dict[str, str]) -> bool:
    """Whether rows, their pictures and the names of files are equal, whatever was computed.

    Of a step as many rows are logged as the first rank has: one log may have a part of another.
    """
    logs = [content(run / COMPLETIONS) for run in (folder, again_folder)]
    exact = {"config.yaml"}.union(*(line["images"] for line in logs[0]))
    for name, fault in faults.items():
        is_lost = fault in ("missing", "not of this run")
        if name in exact or (is_lost and not name.startswith(("states/", "images/"))):
            return False
    rows = [{json_text(line | {"completions": []}) for line in lines} for lines in logs]
    return min(rows, key=len) <= max(rows, key=len)
