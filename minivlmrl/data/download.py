"""Find or download models and data sets on the Hugging Face hub by their ids."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from os.path import isdir, isfile
from pathlib import Path, PurePosixPath

from minivlmrl.data.image_settings import image_settings
from minivlmrl.files import INFERENCE_CONFIG, weight_files

REPOSITORY = re.compile(r"(?P<id>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?")
NETWORK_SECONDS = 5  # timeout for a request to the hub
DOWNLOADED = ["*.safetensors", "*.json", "*.jinja", "merges.txt", INFERENCE_CONFIG, "LICENSE*", "NOTICE*"]
# data set branches: None is the branch with the original files. The other branch has the files
# that the hub has converted to parquet; splits above 5 GB are called "partial-train" there.
BRANCHES = None, "refs/convert/parquet"
SETTINGS = ["*.json", "*.jinja", "merges.txt"]  # a repository's small files, without weights


def find_settings(name: str | Path) -> Path:
    """Return a folder with the config.json of a model, whose weights are not downloaded.

    Args:
        name: config.json, its folder, or a repository's id on the hub.
    """
    path = Path(name)
    if path.exists():
        return path.parent if path.is_file() else path
    repository = REPOSITORY.fullmatch(str(name))
    if not repository or isdir(path.parent):
        raise ValueError(
            f"{name}: no such file or folder; pass config.json, its folder or the id of a repository on the hub"
        )
    with hub_errors(f"{name}: there is no such folder, no copy in the Hugging Face cache"):
        return _snapshot(repository["id"], repository["revision"], SETTINGS)


def find_folder(name: str | Path) -> Path:
    """Return a model's folder, and download the model if necessary.

    Args:
        name: a folder, or a repository's id on the hub, for example
            "Qwen/Qwen2.5-VL-3B-Instruct" or "OWNER/NAME@BRANCH". A folder with this name has priority.
    """
    folder = Path(name)
    if isdir(folder):
        return folder
    if isfile(folder):  # os.path, because pathlib raises OSError for a name that is too long
        raise ValueError(
            f"{name} is a file, but a model is a folder in the Hugging Face format. "
            + (
                "A GGUF file of llama.cpp cannot be trained; download the folder of the original "
                "model, with config.json and safetensors files."
                if folder.suffix == ".gguf"
                else f"Use the folder that contains the file, {folder.parent}."
            )
        )
    replaced = Path(f"{folder.resolve()}.replaced")
    if isdir(replaced):
        warnings.warn(
            f"{folder} does not exist, because saving it was interrupted; the folder before the "
            f"save, {replaced}, is used instead",
            stacklevel=2,
        )
        return replaced
    repository = REPOSITORY.fullmatch(str(name))
    if not repository or (isdir(folder.parent) and not repository["revision"]):
        raise ValueError(
            f"{name}: this folder does not exist in the working folder, {Path.cwd()}. A model must be a folder in the "
            "Hugging Face format or the id of a repository, with its owner, such as Qwen/Qwen2.5-VL-3B-Instruct."
            + (f" If {name} is a repository, write {name}@main." if "/" in str(name) else "")
        )
    with hub_errors(f"{name}: there is no such folder, no complete copy in the Hugging Face cache"):
        return _snapshot(repository["id"], repository["revision"])


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Convert every exception in the block to a ValueError whose message begins with `name`."""
    try:
        yield
    except (
        Exception
    ) as error:  # releases of huggingface_hub use different network libraries with exceptions of their own
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{name}, and the download failed ({reason}). Check the name and the network, or "
            "download the repository on another machine and use its folder."
        ) from error


def _snapshot(repo_id: str, revision: str | None, patterns: list[str] = DOWNLOADED) -> Path:
    """Return a model repository's cached folder, and download missing files."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    download = partial(
        snapshot_download,
        repo_id,
        revision=revision,
        allow_patterns=patterns,
        ignore_patterns="*/*",  # skip files in subfolders
    )
    # The cache may lack the repository, or lack some files because another program downloaded only a part of the
    # repository.
    with suppress(LocalEntryNotFoundError, ValueError):
        cached = Path(download(local_files_only=True))
        names = ["config.json"]
        if patterns == DOWNLOADED:
            weight_files(cached)
            image_settings(cached)
            names.append("tokenizer.json")
        if all((cached / name).is_file() for name in names):
            return cached
    # This request fails after a timeout if the hub cannot be reached. The download could wait forever.
    HfApi().model_info(repo_id, revision=revision, timeout=NETWORK_SECONDS)
    return Path(download())


def find_split(name: str) -> list[Path] | None:
    """Return the parquet files in a data set's split, and download the files if necessary.

    Args:
        name: "OWNER/NAME@SPLIT", or "OWNER/NAME" for the split train.

    Returns:
        The files, or None if the name is a local path. A name is a local path if it is not of the above form, or if it
        has no @ and either its first part is a local folder or it ends with a suffix such as .jsonl.
    """
    repository = REPOSITORY.fullmatch(name)
    path = Path(name)
    is_path = isdir(path.parent) or re.fullmatch(r"\.[a-z]+", path.suffix)
    if not repository or (is_path and not repository["revision"]):
        return None
    from huggingface_hub.errors import LocalEntryNotFoundError, RevisionNotFoundError

    repo_id = repository["id"]
    split = repository["revision"] or "train"
    all_splits = set()
    with hub_errors(f"{name}: no such file or data set of the hub was found"):
        for cached, branch in product((True, False), BRANCHES):
            # the cache may lack the data set, and the hub may lack the branch
            with suppress(LocalEntryNotFoundError, RevisionNotFoundError):
                names = _parquet_files(repo_id, branch, split, cached)
                splits = {file: split_of(file) for file in names}
                all_splits.update(splits.values())
                files = [file for file in names if f"/{splits[file]}".endswith(f"/{split}")]
                if len({splits[file] for file in files}) == 1:
                    folder = _download(repo_id, branch, files, cached)
                    return [folder / file for file in files]
        names = ", ".join(f"{repo_id}@{other}" for other in sorted(all_splits))
        raise ValueError(
            f"the split {split} does not exist or is ambiguous; the data set has the splits "
            f"{names or '(none, because it has no parquet files)'}"
        )


def _parquet_files(repo_id: str, branch: str | None, split: str, cached: bool) -> list[str]:
    """List the parquet files of a branch in the cache, whose paths contain the split's name, or on the hub."""
    from huggingface_hub import HfApi

    if cached:
        folder = _download(repo_id, branch, f"*{split}*.parquet", cached)
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
    else:
        info = HfApi().dataset_info(repo_id, revision=branch, timeout=NETWORK_SECONDS)
        names = [file.rfilename for file in info.siblings or ()]
    for name in names:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"the data set has a file {name!r}, which would be written outside of the cache")
    return sorted(name for name in names if name.endswith(".parquet"))


def _download(repo_id: str, branch: str | None, patterns: list[str] | str, cached: bool) -> Path:
    """Download a data set's files, or only find them in the cache; return their folder."""
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        repo_id, repo_type="dataset", revision=branch, allow_patterns=patterns, local_files_only=cached
    )
    return Path(folder)


def split_of(file: str) -> str:
    """Return the split that a parquet file belongs to.

    Examples: "train" for data/train-00000-of-00002.parquet and default/train/0000.parquet, and "en/test" for
    en/test.parquet.
    """
    *folders, name = PurePosixPath(file).with_suffix("").parts
    name = re.sub(r"-\d.*", "", name)
    if name.isdigit() and folders:
        name = folders.pop()
    subset = [part for part in folders if part not in ("data", "default", name)]
    return "/".join([*subset, name])
