"""Repeat the training of a run in RUN.again, and compare all files: `replay RUN --all`.

The comparison trusts nothing that the logs claim. docs/metrics.md explains what an agreement proves.
"""

import math
from collections import defaultdict
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path

from minivlmrl.extras.replay.again import run_config, train_again
from minivlmrl.extras.replay.difference import DAMAGED, content, difference, distance
from minivlmrl.files import digest
from minivlmrl.json_files import json_text, read_lines
from minivlmrl.run.callbacks import Callback
from minivlmrl.run.checkpoints import state_folders
from minivlmrl.run.metrics import METRICS
from minivlmrl.run.process import is_first
from minivlmrl.run.results import BEST
from minivlmrl.run.rollout_log import COMPLETIONS, LogLine
from minivlmrl.run.trainer_state import RUN

# files that are not compared: the lock, and the report, which is generated from other files
DERIVED = [".lock", "report.html"]
# largest difference in the first step's metrics that float32 rounding on another machine can explain
LARGEST_ROUNDING = 1e-3


def repeat_run(folder: Path, recipe: str | None, state_name: str | None, overrides: list[str]) -> int:
    """Repeat a run, print the differences, and return the exit status.

    The status is 0 if no file differs, 1 if a file differs, and 3 if the differences are small enough to be rounding on
    another machine.

    Args:
        folder: folder of a finished run.
        recipe: recipe to train with; None is config.yaml of the run, if that executes no code.
        state_name: saved state to start from, such as "000120", which is trusted.
        overrides: options of the command line, such as --data.train_file=rows.jsonl.
    """
    folder = folder.resolve()
    again_folder = Path(f"{folder}.again")
    state = folder / "states" / state_name if state_name else None
    first_step = int(state_name or 0)
    states = [path for path in state_folders(folder / "states") if int(path.name) > first_step]
    # config.yaml differs if command-line options replace the paths in the recipe
    skipped = [*DERIVED, "config.yaml"] if overrides else DERIVED
    differences = {}  # how each file or state differs; "" if both runs agree

    def compare(path: Path):
        name = path.relative_to(again_folder)
        if name not in differences and str(name) not in skipped:
            differences[name] = difference(path, folder / name, bool(overrides))

    class CompareStates(Callback):
        """Compare each saved state before it is removed, because a run keeps only its last states."""

        def on_step_begin(self, *_):
            for path in states:
                again_state = again_folder / "states" / path.name
                if is_first() and again_state.is_dir():
                    compare(again_state)
                    compare(again_state / RUN)

    config = run_config(folder, recipe, overrides)
    checkpoint_steps = math.gcd(*(int(path.name) for path in states))
    callback = CompareStates()
    code = train_again(config, state, again_folder, callback, checkpoint_steps=checkpoint_steps, checkpoint_minutes=0.0)
    if code or not is_first():
        return code
    callback.on_step_begin()
    for path in again_folder.rglob("*"):
        if path.is_file() and again_folder / "states" not in path.parents:
            compare(path)
    differences |= not_compared(folder, differences, first_step)
    return verdict(folder, again_folder, differences, first_step)


def not_compared(folder: Path, differences: dict[Path, str], first_step: int) -> dict[Path, str]:
    """Print the files that were not compared, and return those which count as differences.

    A file counts as a difference if the repeated run wrote other files into its folder, and so should have written this
    file, too. Files in best/ and reward_model/ also count, unless they may come from the steps that --state trusts.
    """
    written_folders = {"states", *(name.parts[0] for name in differences)} - {"images"}
    if first_step == 0:
        written_folders |= {BEST, "reward_model"}
    faults = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        # files in a compared state need no comparison, because the state stores their hashes
        is_compared = name in differences or name.parent in differences
        if path.is_file() and not is_compared and str(name) != ".lock":
            print(f"not compared: {name}")
            # saved states up to the one given by --state are trusted
            is_believed = "states/000001" <= str(name.parent) <= f"states/{first_step:06d}"
            if name.parts[0] in written_folders and not is_believed:
                faults[name] = "the repeated run did not write this file"
    return faults


def verdict(folder: Path, again_folder: Path, differences: dict[Path, str], first_step: int) -> int:
    """Print the differing files and a conclusion, and return the exit status."""
    faults = {name: fault for name, fault in sorted(differences.items()) if fault}
    for name, fault in faults.items():
        print(f"DIFFERS: {name}: {fault}")
    with suppress(*DAMAGED):  # an unreadable file is already among the faults
        gap = rounding(folder, again_folder, faults, first_step)
        if gap and same_rows(folder, again_folder, faults):
            print(
                f"both runs used the same rows, and numbers of the first steps differ by {gap:.2g}. "
                "The reason may be another processor, torch version, or number of ranks or threads."
            )
            return 3
    print("training with this recipe gives a different run" if faults else "nothing differs")
    return int(bool(faults))


def rounding(folder: Path, again_folder: Path, faults: dict[Path, str], first_step: int) -> float:
    """Return the largest difference between the first two steps' metrics, or 0 if rounding cannot explain it.

    Rounding explains differences up to LARGEST_ROUNDING in the first step or, if both runs have equal weights, in every
    step.
    """
    pairs = zip_longest(content(again_folder / METRICS), content(folder / METRICS))
    gaps = [distance(*pair) for pair in pairs][first_step:]
    other_weights = any(name.suffix == ".safetensors" for name in faults)
    return max(gaps[:2]) if max(gaps[:1] if other_weights else gaps) <= LARGEST_ROUNDING else 0.0


def same_rows(folder: Path, again_folder: Path, faults: dict[Path, str]) -> bool:
    """Return whether both runs used the same rows and images, and differ only in numbers.

    A run logs only the rows of its first rank. With different numbers of ranks, the rows in one log may therefore be a
    subset of the rows in the other.
    """
    again = rows_of_steps(again_folder)
    logged = rows_of_steps(folder)
    for step in again.keys() | logged.keys():
        fewer, more = sorted((again[step], logged[step]), key=len)
        if not fewer or not fewer <= more:
            return False
    numbers = [name for name, fault in faults.items() if fault.startswith("line ") and str(name) != "config.yaml"]
    return all(name in numbers or name.parts[0] == "images" for name in faults)


def rows_of_steps(folder: Path) -> dict[tuple, set[str]]:
    """Return the rows that a run logged for each (stage, step), without completions and paths."""
    rows = defaultdict(set)
    for line in read_lines(folder / COMPLETIONS, LogLine):
        pictures = digest([folder / name for name in line["images"]])
        row = line | {"completions": [], "where": "", "pictures": pictures}
        rows[line["stage"], line["step"]].add(json_text(row))
    return rows
