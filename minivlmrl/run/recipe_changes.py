"""Compare a run's options and files with the state it resumes from, and between ranks."""

import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import chain
from operator import attrgetter
from pathlib import Path

import torch

from minivlmrl.config.loading import flat
from minivlmrl.config.options import RunConfig
from minivlmrl.data.download import find_folder
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.media import files_of
from minivlmrl.data.read_row import answer_image_parts
from minivlmrl.data.row_files import split_of
from minivlmrl.data.rows import Dataset
from minivlmrl.distributed.process_group import World
from minivlmrl.errors import OURS, USER_FILES, UserError, pluralize, truncate
from minivlmrl.files import INDEX, digest
from minivlmrl.json_files import json_text, parse_json
from minivlmrl.run.state_files import BLOCK, sampled_blocks
from minivlmrl.run.trainer_state import TrainerState

MODELS = "model.path", "model.config", "adapter.path", "reference.path", "ppo.critic_path", "reward_model.path"
MEDIA_ROWS = 1024  # rows whose images and videos are hashed
FOLDERS = re.compile(r'(?<=")/[^":()]*/')  # absolute folder in JSON, as in "/home/ann/rows.jsonl"


def recipe_options(config: RunConfig) -> dict[str, object]:
    """Return all recipe options, such as {"grpo.beta": 0.04}, with the actual number of threads."""
    sections = asdict(config) | {"num_threads": torch.get_num_threads()}
    for name in ("stages", "output_dir", "resume"):
        del sections[name]
    return parse_json(json_text(flat(sections) | {"data.eval_rewards": config.eval_rewards}))


def file_hashes(config: RunConfig, datasets: Mapping[str, Dataset]) -> dict[str, str]:
    """Hash rows, models and code that a run reads: {"rows of data.train_file (my_rows.jsonl)": hash}."""
    hashes = {}
    for option, file in row_files(config).items():
        path = split_of(file)[0]
        hashes[f"rows of {option} ({path.name})"] = checksum(path)
    for name, rows in datasets.items():
        if name != "eval":
            hashes[f"rows of data.* for {name}"] = pluralize(len(rows), "row")
        if isinstance(rows, FileDataset):
            hashes[f"an image or a video of the rows for {name}"] = digest(media_of(rows))
    for option in MODELS:
        name = attrgetter(option)(config)
        if name and (os.path.exists(name) or option == "model.path"):  # other models may be written by an earlier stage
            path = Path(name) if os.path.exists(name) else find_folder(name)
            files = [path] if path.is_file() else sorted((*path.glob("*.*"), *path.glob("adapter/*.*")))
            settings = [file for file in files if file.suffix in (".json", ".jinja", ".txt") and file.name != INDEX]
            weights = [file for file in files if file.suffix == ".safetensors"]
            hashes[f"settings of {option}"] = digest(chain.from_iterable((file.name, file) for file in settings))
            hashes[f"weights of {option}"] = digest(sampled_blocks(weights))
    for file in sorted(code_files()):
        hashes[f"code in {file.removeprefix(f'{Path.cwd()}{os.sep}')}"] = digest([Path(file)])
    return hashes


def code_files() -> set[str]:
    """Return Python files named in a recipe, and modules imported from the folders of these files."""
    folders = tuple(os.path.join(os.path.dirname(file), "") for file in USER_FILES)
    imported = {str(getattr(module, "__file__", None)) for module in [*sys.modules.values()]}
    own = {file for file in imported if file.startswith(folders) and "site-packages" not in file}
    return USER_FILES | {file for file in own if not file.startswith(OURS)}


def media_of(rows: FileDataset) -> Iterator[str | bytes]:
    """Yield sizes and first blocks of image and video files, for a hash.

    In large datasets, only about 1,024 evenly spaced rows are read.
    """
    for index in range(0, len(rows), max(1, len(rows) // MEDIA_ROWS)):
        row, media = rows.read(index)
        media += [part["image"] for part in answer_image_parts(row)]
        for _, path in files_of(media, str(rows.facts[index].file.folder)):
            if os.path.isfile(path):
                yield str(os.path.getsize(path))
                with open(path, "rb") as file:
                    yield file.read(BLOCK)


def row_files(config: RunConfig) -> dict[str, str]:
    """Return {option: data file} for all data files read by training stages."""
    data = config.data
    own = {stage: data.files[stage] for stage in config.stage_names if stage in data.files}
    files = {"data.eval_file": data.eval_file if data.eval_rows else None}
    if len(own) < len(config.stage_names):
        files["data.train_file"] = data.train_file
        files |= {f"data.train[{number}].file": part.file for number, part in enumerate(data.train)}
    files |= {f"data.files.{stage}": file for stage, file in own.items()}
    return {option: file for option, file in files.items() if file}


def changes(old: TrainerState, new: TrainerState) -> Iterator[tuple[str, str]]:
    """Yield (name, description) for options and files that changed since the old run state was saved."""
    for name in sorted(old.recipe.keys() | new.recipe.keys()):
        before = old.recipe.get(name)
        now = new.recipe.get(name)
        if before != now:
            yield name, f"{name} was {truncate(before, 80)} and is now {truncate(now, 80)}"
    for name in sorted(old.hashes.keys() & new.hashes.keys()):  # files in both; others are changed options
        if old.hashes[name] != new.hashes[name]:
            yield name, f"{name} changed"


def check_same(values: dict, world: World):
    """Raise UserError on all ranks if their values differ, such as an option or the hash of a file.

    Paths are compared only by file name, because hosts may have different folders.
    """
    texts = {name: FOLDERS.sub("", json_text(value)) for name, value in values.items()}
    (_, first), *others = world.gather_objects((socket.gethostname(), texts))
    for rank, (host, found) in enumerate(others, start=1):
        for name in {**first, **found}:
            if found.get(name) != first.get(name):
                raise UserError(
                    f"{name} is {truncate(first.get(name), 80, str)} on rank 0, but "
                    f"{truncate(found.get(name), 80, str)} on rank {rank} ({host}); start all ranks with the same "
                    "recipe, options and files"
                )


def checksum(path: Path) -> str:
    """Hash a file's contents, or the file names and sizes in a folder."""
    if path.is_dir():
        return digest([json_text(sorted((str(file), file.stat().st_size) for file in path.rglob("*")))])
    return digest([path])
