"""Train a run again, from its start or from one of its states, in another folder."""

import shutil
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

from minivlmrl.config.loading import load_config
from minivlmrl.config.options import RunConfig
from minivlmrl.run import loop
from minivlmrl.run.callbacks import Callback, default_callbacks
from minivlmrl.run.process import is_first


def run_config(folder: Path, recipe: str | None, overrides: list[str]) -> RunConfig:
    """Load a run's options from its config.yaml or from a recipe.

    Args:
        folder: the run's folder, or a recipe.
        recipe: recipe to use instead of the run's config.yaml.
        overrides: command-line options, such as --seed=1.

    Raises:
        ValueError: config.yaml would execute Python code that the command line does not name.
    """
    if not folder.is_dir():  # a recipe, whose output_dir may contain another run
        return load_config(folder, ["--resume=never", *overrides])
    config_file = recipe or folder / "config.yaml"
    asked_for = None if recipe else overrides
    return load_config(config_file, [f"--output_dir={folder}", *overrides], asked_for)


def train_again(config: RunConfig, state: Path | None, folder: Path, callback: Callback, **options) -> int:
    """Train a copy of a run from a checkpoint or from step 0, and return the exit code.

    Args:
        config: the run's options.
        state: the checkpoint's folder; None starts from step 0.
        folder: the copy's folder, which is created.
        callback: callback that is called after the default callbacks.
        options: RunConfig values that replace the values of `config`.

    Raises:
        ValueError: `folder` exists.
    """
    if is_first():  # the other ranks wait for rank 0 in run_training
        if folder.exists():
            raise ValueError(f"{folder} already exists. Remove it or choose another folder.")
        folder.mkdir()
        reward_model = Path(config.output_dir) / "reward_model"
        if state and reward_model.is_dir():
            shutil.copytree(reward_model, folder / "reward_model")
    resume = str(state) if state else "never"
    config = replace(config, output_dir=str(folder), resume=resume, report_to=[], **options)
    with redirect_stdout(sys.stderr):
        return loop.run_training(config, [*default_callbacks(config), callback])
