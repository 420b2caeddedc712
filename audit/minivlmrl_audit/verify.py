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
from minivlmrl.tools.replay import is_first, run_config, train_again
from minivlmrl_audit.difference import content, difference, distance


def parser() -> argparse.ArgumentParser:
    """The command line; what it does not know are fields of the recipe."""
    p = argparse.ArgumentParser(
        "python -m minivlmrl verify", description=__doc__, allow_abbrev=False
    )
    p.add_argument("run", help="the folder of a run that has ended")
    p.add_argument("--recipe", help="default: config.yaml of the run, if it names no code")
    p.add_argument("--state", help="begin with this one, such as 000120, and believe it")
    return p


class Comparison:
    """What is found of each file: "" where both runs say the same, else what differs."""

    def __init__(self, folder: Path, again: Path, skipped: list[str]):
        self.folder = folder
        self.again = again
        self.skipped = skipped  # names of files that are not compared
        self.found = {}

    def compare(self, paths: Iterable[Path]):
        """Compare these files of the second run with the first one's, each once."""
        for path in paths:
            name = path.relative_to(self.again).as_posix()
            if path.is_file() and name not in self.found and name not in self.skipped:
                other = self.folder / name
                self.found[name] = difference(path, other) if other.is_file() else "missing"

    def compare_states(self, states: list[Path]):
        """Compare states while they are there: a run keeps its last ones alone."""
        for state in states:
            self.compare((self.again / "states" / state.name).glob("*"))

    def name_others(self, states: list[Path]):
        """Print what is in the first run's folder alone; a fault in a folder that a run writes."""
        written = {(self.folder / name).parent for name in self.found} | set(states)
        written -= {self.folder, self.folder / "images"}
        for path in self.folder.rglob("*"):
            name = path.relative_to(self.folder).as_posix()
            if path.is_file() and name not in self.found and name != ".lock":
                print(f"not compared: {name}")
                self.found[name] = "not of this run" if path.parent in written else ""

    def faults(self) -> dict[str, str]:
        """What differs, by the names of files."""
        return {name: what for name, what in sorted(self.found.items()) if what}


def main(arguments: list[str]) -> int:
    """Print what differs; 0: nothing, 1: something, 3: numbers alone, as on another machine."""
    options, overrides = parser().parse_known_args(arguments)
    folder = Path(options.run)
    again = Path(f"{options.run}.again")
    state = options.state and folder / "states" / options.state
    first_step = int(options.state or 0)
    states = [path for path in state_folders(folder / "states") if int(path.name) > first_step]
    skipped = [".lock", "page.html"]  # the page is made of the other files
    if overrides:
        skipped.append("config.yaml")  # with paths of this machine it says something else
    comparison = Comparison(folder, again, skipped)

    def see(*_):
        if is_first():
            comparison.compare_states(states)

    config = run_config(folder, options.recipe, overrides)
    state_steps = math.gcd(*(int(path.name) for path in states))
    code = train_again(config, state, again, see, state_steps=state_steps, state_minutes=0.0)
    if code or not is_first():
        return code
    comparison.compare_states(states)
    comparison.compare(path for path in again.rglob("*") if again / "states" not in path.parents)
    comparison.name_others(states)
    return verdict(comparison, first_step)


def verdict(comparison: Comparison, first_step: int) -> int:
    """Print the faults and what they mean; returns the exit status."""
    faults = comparison.faults()
    for name, what in faults.items():
        print(f"DIFFERS: {name}: {what}")
    steps = []
    for run in (comparison.folder, comparison.again):
        lines = content(run / METRICS)[first_step : first_step + 2]
        steps.append(dict(enumerate(lines)))
    weights = {name for name in comparison.found if name.endswith(".safetensors")}
    is_rounding = steps[0] != steps[1] and weights <= faults.keys()
    if is_rounding and same_rows(comparison.folder, comparison.again, faults):
        print(
            f"rows are the same; numbers of the first steps differ by {distance(*steps):.2g}: "
            "rounding of another processor, torch, or number of ranks or threads?"
        )
        return 3
    print("this is not what the recipe trains" if faults else "nothing differs")
    return int(bool(faults))


def same_rows(folder: Path, again: Path, faults: dict[str, str]) -> bool:
    """Whether rows, their pictures and the names of files are equal, whatever was computed.

    Of a step as many rows are logged as the first rank has: one log may have a part of another.
    """
    logs = [content(run / COMPLETIONS) for run in (folder, again)]
    if "config.yaml" in faults:
        return False
    for line in logs[0]:
        if faults.keys() & set(line["images"]):
            return False
    for name, what in faults.items():
        in_parts = name.startswith(("states/", "images/"))
        if what in ("missing", "not of this run") and not in_parts:
            return False
    rows = [{json_text(line | {"completions": []}) for line in lines} for lines in logs]
    return min(rows, key=len) <= max(rows, key=len)
