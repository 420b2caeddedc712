"""Check that all ranks have the same options, files and code: copies on several hosts may have different ages."""

import os
import re
import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path

import torch

from minivlmrl.config.import_utils import code_files
from minivlmrl.config.loading import flat
from minivlmrl.config.options import RunConfig
from minivlmrl.config.types import Plain
from minivlmrl.data.download import find_folder
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.media import files_of
from minivlmrl.data.read_row import answer_image_parts
from minivlmrl.data.row_files import split_of
from minivlmrl.data.rows import Dataset
from minivlmrl.distributed.process_group import World
from minivlmrl.errors import PACKAGE, UserError, truncate
from minivlmrl.files import digest
from minivlmrl.run.recipe_changes import MODELS, row_files
from minivlmrl.run.state_files import BLOCK, sampled_blocks

MEDIA_ROWS = 1024  # rows whose images and videos are compared, evenly spaced
# files of model and data folders; others, such as .cache/ of a download, may differ
COMPARED = re.compile(r"[^.].*\.(json|jsonl|jinja|txt|csv|tsv|parquet|arrow|safetensors)")


def check_same_options(config: RunConfig, world: World):
    """Raise UserError on all ranks if an option differs on a rank; of paths, only the file names are compared."""
    options = flat(without_folders(asdict(config)))
    del options["output_dir"]  # `locked` checks that all ranks see one folder
    for rank, host, name, first, other in differences(options, world):
        raise UserError(
            f"{name} is {truncate(first, 80)} on rank 0, but {truncate(other, 80)} on rank {rank} ({host}); start all "
            "ranks with the same recipe and options"
        )


def check_same_files(config: RunConfig, datasets: Mapping[str, Dataset], world: World):
    """Raise UserError on all ranks if rows, images, weights or code differ on a rank."""
    if world.size == 1:
        return
    paths = {option: Path(split_of(file)[0]) for option, file in row_files(config).items()}
    for option in (*MODELS, "adapter.path"):
        if name := attrgetter(option)(config):
            paths[option] = Path(name) if os.path.exists(name) else find_folder(name)
    digests = {f"{option} ({path.name})": digest(contents(path)) for option, path in paths.items()}
    for name, rows in datasets.items():
        if isinstance(rows, FileDataset):
            digests[f"an image or a video of the rows for {name}"] = digest(media_of(rows))
    code = defaultdict(list)  # by name, because hosts may have other folders
    for file in map(Path, code_files()):
        code[file.name].append(digest([file]))
    digests |= {f"the code {name}": digest(sorted(found)) for name, found in code.items()}
    digests[f"the package {PACKAGE.name}"] = digest(sorted(PACKAGE.rglob("*.py")))
    digests["the version of torch"] = torch.__version__
    for rank, host, name, _, _ in differences(digests, world):
        raise UserError(
            f"{name} differs on rank {rank} ({host}) from rank 0; copy the files of rank 0's host to all hosts, or put "
            "them on a shared file system"
        )


def differences(values: dict, world: World) -> Iterator[tuple[int, str, str, Plain, Plain]]:
    """Yield (rank, host, name, value on rank 0, value on this rank) where a rank has another value than rank 0."""
    ranks = world.gather_objects((socket.gethostname(), values))
    expected = ranks[0][1]
    for rank, (host, found) in enumerate(ranks):
        for name in dict.fromkeys([*expected, *found]):
            if expected.get(name) != found.get(name):
                yield rank, host, name, expected.get(name), found.get(name)


def without_folders(value: Plain) -> Plain:
    """Shorten absolute paths in recipe values: "/home/ann/rows.jsonl" becomes "rows.jsonl"."""
    if isinstance(value, dict):
        return {without_folders(key): without_folders(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [*map(without_folders, value)]
    return re.sub(r"^/([^/:()]+/)*", "", value) if isinstance(value, str) else value


def contents(path: Path) -> Iterator[str | bytes | Path]:
    """Yield names and contents of the files in a data file or a folder; of large weights, only some blocks."""
    files = [path] if path.is_file() else sorted(file for file in path.glob("**/*") if file.is_file())
    for file in files:
        name = str(file.relative_to(path))
        if file == path or COMPARED.fullmatch(name):
            yield name
            yield from sampled_blocks([file]) if file.suffix == ".safetensors" else [file]


def media_of(rows: FileDataset) -> Iterator[str | bytes]:
    """Yield sizes and first blocks of image and video files."""
    for index in range(0, len(rows), max(1, len(rows) // MEDIA_ROWS)):
        row, media = rows.read(index)
        media += [part["image"] for part in answer_image_parts(row)]
        for _, path in files_of(media, str(rows.facts[index].file.folder)):
            if os.path.isfile(path):
                yield str(os.path.getsize(path))
                with open(path, "rb") as file:
                    yield file.read(BLOCK)
