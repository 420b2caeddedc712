"""Train a recipe with several seeds, one after the other: `minivlmrl train RECIPE --seeds=0,1,2`."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from minivlmrl.config.loading import flat, read_yaml
from minivlmrl.config.options import RunConfig
from minivlmrl.errors import PACKAGE, UserError, truncate
from minivlmrl.files import RUN_CONFIG
from minivlmrl.json_files import json_text, parse_json
from minivlmrl.run.results import SUMMARY


def take_seeds(arguments: Sequence[str]) -> tuple[list[int], list[str]]:
    """Separate --seeds=0,1,2 from the other arguments."""
    seeds = []
    others = []
    for argument in arguments:
        if not argument.startswith("--seeds"):
            others.append(argument)
        elif re.fullmatch(r"--seeds=\d{1,9}(,\d{1,9})*", argument):
            seeds = [*dict.fromkeys(map(int, argument.removeprefix("--seeds=").split(",")))]
        else:
            raise UserError(f"{argument}: write seeds with commas and without spaces, as in --seeds=0,1,2")
    return seeds, others


def train_seeds(config: RunConfig, seeds: Sequence[int], arguments: Sequence[str]) -> int:
    """Train one process per seed in output_dir/seed0 and so on; return the first exit code other than 0, or 0.

    A finished seed is skipped, a stopped one resumed. Processes: user code must not keep values between seeds.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError("--seeds trains in one process; with torchrun, start one command per seed, as with --seed=1")
    for seed in seeds:
        folder = Path(config.output_dir, f"seed{seed}")
        if (folder / SUMMARY).is_file() and config.resume != "never":
            check_same_recipe(config, folder)
            print(f"seed {seed}: {folder} is finished", flush=True)
            continue
        print(f"seed {seed}: {folder}", flush=True)
        own = [f"--seed={seed}", f"--output_dir={folder}"]
        resume = [] if config.resume == "never" else ["--resume=auto"]
        if code := run_child([sys.executable, "-m", "minivlmrl", "train", *arguments, *own, *resume]):
            return code
    return 0


def check_same_recipe(config: RunConfig, folder: Path):
    """Raise UserError if a finished run had other options."""
    finished = flat(read_yaml(folder / RUN_CONFIG))
    for name, value in flat(parse_json(json_text(asdict(config)))).items():
        is_own = name in ("seed", "output_dir", "resume") or (config.max_epochs and name.endswith(".max_steps"))
        if not is_own and finished.get(name) != value:
            raise UserError(
                f"{folder} is finished, but with {name}={truncate(finished.get(name), 80)} instead of "
                f"{truncate(value, 80)}; choose another --output_dir, or train all seeds again with --resume=never"
            )


def run_child(command: Sequence[str]) -> int:
    """Run a command, and pass stop signals on to it."""
    paths = [str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    child = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))})
    for name in ("SIGTERM", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda number, _frame: child.send_signal(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to the child, too
    code = child.wait()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return code if code >= 0 else 128 - code
