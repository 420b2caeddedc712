"""Compare a resumed run with its state: recipe options, and files named in the recipe."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import torch

from minivlmrl.config.import_utils import code_files
from minivlmrl.config.loading import flat
from minivlmrl.config.options import RunConfig
from minivlmrl.data.download import find_folder
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.row_files import split_of
from minivlmrl.data.rows import Dataset
from minivlmrl.errors import truncate
from minivlmrl.files import INDEX, digest, weight_files
from minivlmrl.json_files import json_text, parse_json
from minivlmrl.run.state_files import sampled_blocks
from minivlmrl.run.trainer_state import Fingerprints, TrainerState

# stage options that set the number of dataset rows per batch
BATCH_SIZE_OPTIONS = "prompts_per_step", "steps_per_generation"
# paths of initial weights; a resumed run instead loads the weights that its state contains
WEIGHTS = "model.path", "model.config", "adapter.path", "reference.path", "ppo.critic_path"
# model paths; fingerprints() hashes their settings files and reward model weights, which states lack
MODELS = "model.path", "model.config", "reference.path", "ppo.critic_path", "reward_model.path"
BEST_OPTIONS = "best_metric", "data.eval_file", "data.eval_rows"  # changes in these options reset the best evaluation
# {Fingerprints field: words before a changed file's name in messages}
FILE_KINDS = {
    "models": "model files in",
    "rows": "rows of",
    "media": "sizes or times of image and video files of",
    "code": "code in",
}


class Change(NamedTuple):
    """A recipe option or file changed since a state."""

    text: str
    moves_rows: bool  # whether the resumed run skips or repeats training rows
    resets_best: bool  # whether new evaluations are not comparable with the best so far


def recipe_options(config: RunConfig) -> dict[str, object]:
    """Return recipe options, such as {"grpo.beta": 0.04}, with the actual number of threads."""
    sections = asdict(config) | {"num_threads": torch.get_num_threads()}
    for name in ("stages", "output_dir", "resume"):
        del sections[name]
    return parse_json(json_text(flat(sections) | {"data.eval_rewards": config.eval_rewards}))


def fingerprints(config: RunConfig, datasets: Mapping[str, Dataset]) -> Fingerprints:
    """Hash all files that a run reads, including images and videos in `datasets`."""
    found = Fingerprints()
    model = config.model
    files = weight_files(find_folder(model.path)) if model.path else [Path(str(model.config))]
    found.base = digest(sampled_blocks(files))
    for option, file in row_files(config).items():
        found.rows[option] = checksum(split_of(file)[0])
    for option in MODELS:
        name = attrgetter(option)(config)
        path = Path(name or "")
        if name and path.exists():  # skip Hub repositories, whose cached files do not change
            parts = []  # names and contents of settings and tokenizer files
            for file in [path] if path.is_file() else sorted(path.glob("*.*")):
                if file.suffix in (".json", ".jinja", ".txt") and file.name != INDEX:
                    parts += [file.name, file]
            weights = path.rglob("*.safetensors") if option == "reward_model.path" else ()
            found.models[option] = digest(chain(parts, sampled_blocks(sorted(weights))))
    for name, rows in datasets.items():
        if isinstance(rows, FileDataset):
            found.media[name] = rows.media_fingerprint
    for file in sorted(code_files()):
        found.code[file.removeprefix(f"{Path.cwd()}{os.sep}")] = digest([Path(file)])
    return found


def row_files(config: RunConfig) -> dict[str, str]:
    """Return {option: data file} for the files that the stages read."""
    data = config.data
    own = {stage: data.files[stage] for stage in config.stage_names if stage in data.files}
    files = {"data.eval_file": data.eval_file if data.eval_rows else None}
    if len(own) < len(config.stage_names):
        files["data.train_file"] = data.train_file
        files |= {f"data.train[{number}].file": part.file for number, part in enumerate(data.train)}
    files |= {f"data.files.{stage}": file for stage, file in own.items()}
    return {option: file for option, file in files.items() if file}


def changes(old: TrainerState, new: TrainerState, saved: Path | None) -> Iterator[Change]:
    """Yield changes since the state `saved`: options, then file contents."""
    stage = new.stages[old.stage]
    batch_sizes = [f"{stage}.{name}" for name in BATCH_SIZE_OPTIONS] if old.rows else []
    for name in sorted(old.recipe.keys() | new.recipe.keys()):
        before = old.recipe.get(name)
        now = new.recipe.get(name)
        if before != now:
            text = f"{name} was {truncate(before, 80)} and is now {truncate(now, 80)}"
            if name in WEIGHTS:
                text += ", but weights that are in the state stay as they are"
            yield Change(text, name in batch_sizes or is_about_rows(name), name in BEST_OPTIONS)
    for kind, words in FILE_KINDS.items():
        before = getattr(old.files, kind)
        now = getattr(new.files, kind)
        for name in sorted(before.keys() & now.keys()):  # a file that only one run names counts as a changed option
            if before[name] != now[name]:
                text = f"changed since {saved} was saved: {words} {name}"
                yield Change(text, kind == "rows" and is_about_rows(name), name in BEST_OPTIONS)


def is_about_rows(option: str) -> bool:
    return option.startswith("data.") and not option.startswith("data.eval_")


def checksum(path: Path) -> str:
    """Hash a file's contents, or the file names and sizes in a folder."""
    if path.is_dir():
        return digest([json_text(sorted((str(file), file.stat().st_size) for file in path.rglob("*")))])
    return digest([path])
