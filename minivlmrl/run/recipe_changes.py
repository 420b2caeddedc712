"""Compare options and files of a run with its state, and between ranks."""

import os
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from operator import attrgetter
from pathlib import Path

import torch

from minivlmrl.config.loading import flat
from minivlmrl.config.options import RunConfig
from minivlmrl.data.download import find_folder
from minivlmrl.data.row_files import split_of
from minivlmrl.distributed.process_group import World
from minivlmrl.errors import USER_FILES, UserError, truncate
from minivlmrl.files import INDEX, digest
from minivlmrl.json_files import json_text, parse_json
from minivlmrl.run.state_files import sampled_blocks
from minivlmrl.run.trainer_state import TrainerState

MODELS = "model.path", "model.config", "adapter.path", "reference.path", "ppo.critic_path", "reward_model.path"


def recipe_options(config: RunConfig) -> dict[str, object]:
    """Return recipe options, such as {"grpo.beta": 0.04}, with the actual number of threads."""
    sections = asdict(config) | {"num_threads": torch.get_num_threads()}
    for name in ("stages", "output_dir", "resume"):
        del sections[name]
    return parse_json(json_text(flat(sections) | {"data.eval_rewards": config.eval_rewards}))


def file_hashes(config: RunConfig) -> dict[str, str]:
    """Hash rows, models and code that a run reads: {"rows of data.train_file": hash}."""
    hashes = {f"rows of {option}": checksum(split_of(file)[0]) for option, file in row_files(config).items()}
    for option in MODELS:
        name = attrgetter(option)(config)
        if name and (os.path.exists(name) or option == "model.path"):  # an earlier stage may write the others
            path = Path(name) if os.path.exists(name) else find_folder(name)
            files = [path] if path.is_file() else sorted((*path.glob("*.*"), *path.glob("adapter/*.*")))
            settings = [file for file in files if file.suffix in (".json", ".jinja", ".txt") and file.name != INDEX]
            weights = [file for file in files if file.suffix == ".safetensors"]
            hashes[f"settings of {option}"] = digest(chain.from_iterable((file.name, file) for file in settings))
            hashes[f"weights of {option}"] = digest(sampled_blocks(weights))
    for file in sorted(USER_FILES):
        hashes[f"code in {file.removeprefix(f'{Path.cwd()}{os.sep}')}"] = digest([Path(file)])
    return hashes


def row_files(config: RunConfig) -> dict[str, str]:
    """Return {option: data file} for files read by stages."""
    data = config.data
    own = {stage: data.files[stage] for stage in config.stage_names if stage in data.files}
    files = {"data.eval_file": data.eval_file if data.eval_rows else None}
    if len(own) < len(config.stage_names):
        files["data.train_file"] = data.train_file
        files |= {f"data.train[{number}].file": part.file for number, part in enumerate(data.train)}
    files |= {f"data.files.{stage}": file for stage, file in own.items()}
    return {option: file for option, file in files.items() if file}


def changes(old: TrainerState, new: TrainerState) -> Iterator[tuple[str, str]]:
    """Yield (name, description) for options and files that differ between a state and a run."""
    for name in sorted(old.recipe.keys() | new.recipe.keys()):
        before = old.recipe.get(name)
        now = new.recipe.get(name)
        if before != now:
            yield name, f"{name} was {truncate(before, 80)} and is now {truncate(now, 80)}"
    for name in sorted(old.hashes.keys() & new.hashes.keys()):  # a file that only one run names is a changed option
        if old.hashes[name] != new.hashes[name]:
            yield name, f"{name} changed"


def check_same(values: dict, world: World):
    """Raise UserError on all ranks if a rank has another value, such as an option or the hash of a file."""
    first, *others = world.gather_objects(values)
    for rank, found in enumerate(others, start=1):
        for name in {**first, **found}:
            if found.get(name) != first.get(name):
                raise UserError(
                    f"{name} is {truncate(first.get(name), 80)} on rank 0, but {truncate(found.get(name), 80)} on "
                    f"rank {rank}; start all ranks with the same recipe, options and files"
                )


def checksum(path: Path) -> str:
    """Hash a file's contents, or the file names and sizes in a folder."""
    if path.is_dir():
        return digest([json_text(sorted((str(file), file.stat().st_size) for file in path.rglob("*")))])
    return digest([path])
